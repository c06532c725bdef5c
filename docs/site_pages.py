"""Pages of the site that follow from the code: commands, settings, metrics, errors. A hook of mkdocs (mkdocs.yml).

Made when the site is built and kept nowhere, so they cannot be out of date. Errors are read from the source: every
`raise` of an error of ours, its sentence with the places that are filled in; error_families.py says why and what to do.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import code_tables
import fault_figures
import figure_tables
from error_families import FAMILIES, family_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ndp_device", "vllm_ndp")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
NOT_SERVED = ("measured", "templates")
"""Folders of docs/ that a site does not have."""


# -- errors ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sentence:
    """What an error says, where it comes from."""

    error: str
    text: str
    file: str

    @property
    def advice(self) -> str:
        """Messages end with what to do, behind their last colon."""
        last = self.text.rpartition(": ")[2] if ": " in self.text else ""
        return last if re.search(r"[a-z]{3}", last) else ""


def error_classes() -> dict[str, str]:
    """Every class below NdpError, whichever file defines it -> the first line of its docstring."""
    bases: dict[str, set[str]] = {}
    about: dict[str, str] = {}
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
                about[node.name] = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    ours = {"NdpError"}
    while grown := {name for name, of in bases.items() if of & ours} - ours:
        ours |= grown
    return {name: about[name] for name in sorted(ours) if name in about}


def sentences() -> Iterator[Sentence]:
    """Of every error that the code raises or makes with a sentence of its own."""
    classes = error_classes()
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes):
                continue
            for argument in node.args:
                text = _text(argument)
                if " " in text.strip("… "):
                    yield Sentence(node.func.id, text, path.relative_to(ROOT).as_posix())


def _text(node: ast.expr) -> str:
    """The sentence with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def _sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def refusals() -> Iterator[Sentence]:
    """What the plugin refuses beside itself: pairs of a condition and a sentence's end, in two functions."""
    for name in ("compat.py", "cuda/limits.py"):
        path = ROOT / "vllm_ndp" / "integration" / name
        functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
        for function in (one for one in functions if one.name in ("check", "refusals")):
            for node in ast.walk(function):
                text = _text(node.elts[1]) if isinstance(node, ast.Tuple) and len(node.elts) == 2 else ""
                if " " in text:
                    whole = f"quantization 'ndp' does not work together with {text}"
                    yield Sentence("ConfigError", whole, path.relative_to(ROOT).as_posix())


def errors_page() -> str:
    """Families, each with its reason, what to do, and its sentences."""
    found = sorted({*sentences(), *refusals()}, key=lambda one: (one.error, one.text))
    classes = error_classes()
    lines = ["# Errors", "", f"The {len(found)} sentences that errors of ours are made of, … for what is filled in. A"]
    lines += ["command ends with one of them on stderr and exit code 2; a server refuses to start with one.", ""]
    for family in FAMILIES:
        own = [one for one in found if family_of(one.error, one.text, one.file) is family]
        kinds = "; ".join(f"`{name}`: {classes[name]}" for name in sorted({one.error for one in own}))
        lines += [f"## {family.title}", "", kinds, "", f"**Why.** {family.why}", ""]
        lines += [f"**What to do.** {family.what_to_do}", "", "| sentence | which says | from |", "|---|---|---|"]
        lines += [f"| {_cell(one.text)} | {_cell(one.advice)} | `{one.file}` |" for one in own]
        lines.append("")
    return "\n".join(lines)


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
    from vllm_ndp.setting_names import DEBUG, TOP

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


PAGES = {
    "reference/commands.md": commands_page,
    "reference/settings.md": settings_page,
    "reference/metrics.md": metrics_page,
    "reference/errors.md": errors_page,
    "reference/files.md": code_tables.files_page,
    "reference/faults.md": lambda: f"# Faults that tests cover\n\n{fault_figures.every_fault(ROOT)}\n",
    "reference/hooks.md": lambda: f"# Hooks of vLLM\n\n{figure_tables.vllm_hooks(ROOT)}\n",
    "reference/models.md": lambda: f"# Published models\n\n{code_tables.published_models()}\n",
    "reference/options.md": lambda: f"# Options of vllm serve\n\n{code_tables.option_answers()}\n",
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
