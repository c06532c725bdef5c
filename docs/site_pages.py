"""Pages of the site that follow from the code: commands, settings, metrics, models. A hook of mkdocs (mkdocs.yml).

Made when the site is built and kept nowhere, so they cannot be out of date.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
NOT_SERVED = ("claims.toml", "measured", "templates")
"""What a site does not have of docs/."""


def _cell(text: str) -> str:
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", " ".join(text.split()))


# -- commands ----------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    import typer

    from ndp_device.__main__ import app as device
    from vllm_ndp.app import app as plugin

    lines = [
        "# Commands",
        "",
        "Every help, as the programs print it. A command prints one JSON object as its last line.",
    ]
    for name, app in (("vllm-ndp", plugin), ("ndp-device", device)):
        lines += ["", f"## {name}"]
        lines += _helps(typer.main.get_command(app), name)
    return "\n".join(lines) + "\n"


def _helps(node: Any, path: str) -> list[str]:
    children = getattr(node, "commands", {})
    lines = [] if children else ["", f"### {path}", "", "```"]
    if not children:
        context = node.context_class(node, info_name=path, terminal_width=110, max_content_width=110)
        lines += [*node.get_help(context).splitlines(), "```"]
    return lines + [line for name, child in children.items() for line in _helps(child, f"{path} {name}")]


# -- settings and metrics ----------------------------------------------------------------------------------------------


def settings_page() -> str:
    """Settings on top, then those in `debug`: fields of NdpSettings, with the strings that stand below them."""
    tree = ast.parse((ROOT / "vllm_ndp" / "config.py").read_text())
    from vllm_ndp.config import DEBUG, TOP

    (settings,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "NdpSettings"]
    lines = ["# Settings", "", "What `--additional-config '{\"ndp\": {...}}'` may hold. Unknown names are refused.", ""]
    rows: dict[str, str] = {}
    for field, below in zip(settings.body, settings.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
            about = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            default = ast.unparse(field.value).replace("field(default_factory=dict)", "{}")
            kind = ast.unparse(field.annotation)
            rows[field.target.id] = f"| `{field.target.id}` | {_cell(kind)} | `{default}` | {_cell(str(about))} |"
    head = ["| setting | type | default | effect |", "|---|---|---|---|"]
    lines += [*head, *(rows[name] for name in TOP if name in rows)]
    lines += ["", "Under `debug`: what only researchers turn.", "", *head, *(rows[name] for name in DEBUG)]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Names and meanings from integration/serving/metrics.py, read without vLLM."""
    tree = ast.parse((ROOT / "vllm_ndp" / "integration" / "serving" / "metrics.py").read_text())
    lines = [
        "# Metrics",
        "",
        "On vLLM's own `/metrics`, beside what vLLM counts. simulated and measured never mix.",
        "",
    ]
    lines += ["| metric | kind | what |", "|---|---|---|"]
    for name, kind, ending in (("COUNTERS", "counter", "_total"), ("HISTOGRAMS", "histogram", "")):
        for key, about in _table_of(tree, name):
            lines.append(f"| `vllm:{key}{ending}` | {kind} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


def _table_of(tree: ast.Module, name: str) -> Iterator[tuple[str, str]]:
    """Key and first string of each entry of a dictionary of tuples."""
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == name and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                first = value.elts[0] if isinstance(value, ast.Tuple) else value
                if isinstance(key, ast.Constant) and isinstance(first, ast.Constant):
                    yield str(key.value), str(first.value)


# -- published models --------------------------------------------------------------------------------------------------

CONTEXT = 4096


def models_page() -> str:
    """Sizes of every published model, and what its GPU takes for one token beside routed experts."""
    from ndp_device.timing.public_models import PUBLIC_MODELS, SHAPES
    from ndp_device.timing.spec import load_hardware
    from vllm_ndp.cost_model.gpu_timing import GpuModel

    hardware = load_hardware("h100-ndp512")
    lines = [
        "# Published models\n",
        "| model | config.json of | MoE layers (of all) | E / top-k | H / I | attention | 10^9 parameters: here, card "
        f"(active) | KV bytes/token | state KB/request | us/token beside experts, {CONTEXT} cached |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, public in PUBLIC_MODELS.items():
        model = SHAPES[name]
        gpu = GpuModel(hardware, model)
        forms = dict.fromkeys(attention_name(layer.attention) for layer in model.decoder)
        counts = [sum(attention_name(layer.attention) == form for layer in model.decoder) for form in forms]
        attention = ", ".join(f"{count} {form}" for form, count in zip(forms, counts, strict=True))
        total, active = public.published
        beside = sum(gpu.before_experts_ps(1, CONTEXT)) + model.num_layers * gpu.shared_ps(1) + gpu.head_ps(1)
        cells = (
            name,
            public.source,
            f"{model.num_layers} ({len(model.decoder)})",
            f"{model.num_experts} / {model.top_k}",
            f"{model.hidden_size} / {model.intermediate_size}",
            attention,
            f"{model.num_parameters / 1e9:.1f}, {total:g} ({model.num_active_parameters / 1e9:.1f}, {active:g})",
            f"{model.kv_bytes}",
            f"{model.state_bytes / 1000:.0f}" if model.state_bytes else "-",
            f"{beside / 1e6:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def attention_name(attention: Any) -> str:
    """What the table calls a form of attention."""
    if attention.window:
        return f"{'chunks' if attention.is_chunked else 'window'} of {attention.window}"
    names = {"GroupedQuery": "full", "Latent": "latent", "GatedDelta": "linear", "StateSpace": "Mamba-2"}
    return names.get(type(attention).__name__, type(attention).__name__)


PAGES = {
    "reference/commands.md": commands_page,
    "reference/settings.md": settings_page,
    "reference/metrics.md": metrics_page,
    "reference/models.md": models_page,
}


# -- hooks of mkdocs ---------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the pages, and the README as the first one."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ROOT))
    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link that the site does not have, to a source or a measurement, becomes the path that it names."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def served(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        inside = target.is_relative_to(ROOT / "docs") and target.relative_to(ROOT / "docs").parts[:1]
        if inside and inside[0] not in NOT_SERVED:
            return match[0]
        return f"{match[1]} (`{target.relative_to(ROOT).as_posix()}`)"

    return LINK.sub(served, markdown)
