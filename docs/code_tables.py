"""What pages say about the code, from the code: files and arrows, options of vLLM, published models.

Returns Markdown. Knows no page and no measurement.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import import_graph
from import_graph import ROOT

SOURCES = (".py", ".pyi", ".cpp", ".h")
NOT_DRAWN = "ndp_device/errors"
"""Imported by nearly every file and importing none: its arrows would hide all others."""


# -- files -------------------------------------------------------------------------------------------------------------


def opening(path: Path) -> str:
    """The first sentences of a file: what it knows and what it does not. Whole sentences, whole lines."""
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        comment = re.match(r"(//.*\n)+", text)
        lines = [line.removeprefix("//").strip() for line in comment[0].splitlines()] if comment else []
        paragraph = "\n".join(lines[: lines.index("")] if "" in lines else lines)
    lines = paragraph.splitlines()
    count = next((number for number, line in enumerate(lines, 1) if line.rstrip().endswith(".")), len(lines))
    text = " ".join(lines[:count]).replace("|", "\\|")
    return text if text.endswith(".") or ". " not in text else text[: text.rindex(". ") + 1]


def file_tables(package: str, root: Path = ROOT) -> str:
    """One table per folder of the package. A source without a sentence of its own stands beside its header."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted((root / package).rglob("*")):
        if path.suffix in SOURCES and path.name != "__init__.py":
            folders.setdefault(path.parent, []).append(path)
    parts = []
    for folder, paths in sorted(folders.items()):
        package_file = folder / "__init__.py"
        about = opening(package_file) if package_file.exists() and folder != root / package else ""
        lines = [f"**`{folder.relative_to(root).as_posix()}/`** {about}".rstrip(), "", "| file | knows |", "|---|---|"]
        names = {path.name for path in paths}
        for path in paths:
            header = path.with_suffix(".h").name
            if path.suffix == ".cpp" and not opening(path) and header in names:
                continue
            beside = path.with_suffix(".cpp")
            shared = path.suffix == ".h" and beside.name in names and not opening(beside)
            name = f"`{path.name}`, `{beside.name}`" if shared else f"`{path.name}`"
            lines.append(f"| {name} | {opening(path)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def files_page(root: Path = ROOT) -> str:
    """Every file with its first sentences, and who imports whom inside integration/."""
    tables = [f"## {package}\n\n{file_tables(package, root)}" for package in ("ndp_device", "vllm_ndp")]
    drawn = f"## Imports inside vllm_ndp/integration\n\n{module_drawing('vllm_ndp/integration', root)}"
    return "\n\n".join(["# Every file", *tables, drawn, ""])


# -- arrows ------------------------------------------------------------------------------------------------------------


def drawing(arrows: import_graph.Arrows, label: Callable[[str], str]) -> str:
    """A Mermaid flow chart: an arrow from the file or room that imports to what is imported."""
    nodes = {name: re.sub(r"\W|^_+|_+$", "", label(name)) for name in arrows}
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {node}["{label(name)}"]' for name, node in sorted(nodes.items()) if node != label(name)]
    for name in sorted(arrows):
        targets = sorted(nodes[target] for target in arrows[name] if target in nodes)
        lines.append(f"    {nodes[name]}" + (f" --> {' & '.join(targets)}" if targets else ""))
    return "\n".join([*lines, "```"])


def room_drawing(package: str, root: Path = ROOT) -> str:
    rooms = import_graph.room_arrows(root)
    inside = {
        room: targets
        for room, targets in rooms.items()
        if room.startswith(f"{package}/") and room != NOT_DRAWN and not room.endswith("/__init__")
    }
    parts = [drawing(inside, lambda room: room.removeprefix(f"{package}/"))]
    outside = {
        room: sorted(target for target in targets if not target.startswith(f"{package}/") and target != NOT_DRAWN)
        for room, targets in sorted(inside.items())
    }
    if any(outside.values()):
        lines = ["| room | imports from outside the package |", "|---|---|"]
        lines += [f"| `{room}` | {listed(targets)} |" for room, targets in outside.items() if targets]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def module_drawing(room: str, root: Path = ROOT) -> str:
    """The files of one room, by name, and the arrows between them."""
    prefix = room.replace("/", ".") + "."
    arrows = import_graph.module_arrows(root)
    inside = {module: targets for module, targets in arrows.items() if module.startswith(prefix)}
    return drawing(inside, lambda module: module.removeprefix(prefix))


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# -- published models --------------------------------------------------------------------------------------------------

CONTEXT = 4096


def published_models() -> str:
    """Sizes of every published model, and what its GPU takes for one token beside routed experts."""
    from ndp_device.timing.public_models import PUBLIC_MODELS
    from ndp_device.timing.shapes import SHAPES
    from ndp_device.timing.spec import load_hardware
    from vllm_ndp.simulation.gpu_timing import GpuModel

    hardware = load_hardware("h100-ndp512")
    lines = [
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
    return "\n".join(lines)


def attention_name(attention: Any) -> str:
    """What the table calls a form of attention."""
    if attention.window:
        return f"{'chunks' if attention.is_chunked else 'window'} of {attention.window}"
    names = {"GroupedQuery": "full", "Latent": "latent", "GatedDelta": "linear", "StateSpace": "Mamba-2"}
    return names.get(type(attention).__name__, type(attention).__name__)


# -- options of vLLM ---------------------------------------------------------------------------------------------------


def option_answers() -> str:
    """What becomes of every option of `vllm serve` beside ours, and the test that shows it."""
    from serve_options import EACH_NOT_OURS, EACH_REFUSED, EACH_WORKS, NOT_OURS, REFUSED, WORKS, Answer

    def options(answer: Answer) -> str:
        return " ".join(f"`{name.lstrip('_').replace('_', '-')}`" for name in answer.names)

    def each(test: str) -> str:
        return f"One by one: {test.replace('::', ' ')}[OPTION]."

    lines = [each(EACH_WORKS), "", "| works | how | shown by |", "|---|---|---|"]
    lines += [f"| {options(answer)} | {answer.what} | {answer.test.replace('::', ' ')} |" for answer in WORKS]
    lines += [
        "",
        each(EACH_REFUSED),
        "",
        "| refused at the start | why, and what is accepted | shown by |",
        "|---|---|---|",
    ]
    lines += [f"| {options(answer)} | {answer.what} | {answer.test.replace('::', ' ')} |" for answer in REFUSED]
    lines += ["", each(EACH_NOT_OURS), "", "| vLLM's own, which the plugin takes no part in | of |", "|---|---|"]
    lines += [f"| {options(answer)} | {answer.what} |" for answer in NOT_OURS]
    return "\n".join(lines)
