"""Write the parts of the docs that follow from something else (`make docs`), or say which are not current (`--check`).

    docs/performance.md     from docs/templates/performance.md.j2 and docs/measured/*.json
    docs/families.md        from docs/templates/families.md.j2 and docs/measured/families.json
    docs/architecture.md    its file tables and arrows, from the first sentence and the imports of every file
    docs/compatibility.md   its tables of vLLM's hooks, from docs/measured/vllm_hooks.json, and of vLLM's options;
                            how long installing takes, where that was measured
    docs/gpu.md             what was measured on a GPU, and what a dry run of the same pieces did without one
    docs/faults.md          a long night, attacks beside an honest host, a layer without its device
    docs/distributed.md     its tables of ranks, from docs/measured/ranks_matrix.json
    docs/timing.md          its table of published models, from the sizes that the simulated host computes with
    docs/replica-format.md  its tables of what is lost, from docs/measured/quality_uncovered*.json
    README.md               the sentences with measured figures

In a hand-written page, the text from `<!-- generated: NAME -->` to `<!-- end -->` is replaced; the rest is prose.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fault_figures
import import_graph
import jinja2
from import_graph import ROOT

SOURCES = (".py", ".pyi", ".cpp", ".h")
NOT_DRAWN = "ndp_device/errors"
"""Imported by nearly every file and importing none: its arrows would hide all others."""
BLOCK = re.compile(r"(<!-- generated: (?P<name>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


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


# -- measurements ------------------------------------------------------------------------------------------------------


class Figures(SimpleNamespace):
    """One file of docs/measured/: `question`, `command`, `origin`, `date`, `commit`, `machine`, `figures`."""

    figures: Any

    def row(self, table: str = "results", /, **wanted: Any) -> Any:
        """The only row of a list of figures that has these values."""
        rows = [row for row in self.figures[table] if all(row.get(key) == value for key, value in wanted.items())]
        if len(rows) != 1:
            raise LookupError(f"{table} must hold one row with {wanted}, found {len(rows)}")
        return rows[0]


BY_HAND = "by hand, see the log"
ENVELOPE = {"question", "command", "origin", "date", "commit", "machine", "figures"}


def load_measured(folder: Path) -> dict[str, Figures]:
    """By file name. A file without the envelope is refused: a figure without its command and date says nothing."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if missing := sorted(ENVELOPE - content.keys()):
            raise ValueError(f"{path.name} must say {', '.join(missing)}: write it with the benchmark's --json")
        found[path.stem.replace("-", "_")] = Figures(**content)
    return found


def about(measured: Figures) -> str:
    """Where figures come from: the lines under a table."""
    machine = measured.machine
    at = f" at {measured.commit}" if measured.commit else ""
    origin = re.sub(r"docs/(\S+)", r"[\1](\1)", measured.origin)
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    parts = [f"{origin}{at}, {measured.date}", machine["processor"], cores]
    if load := machine.get("load"):
        low, high = min(load), max(load)
        parts.append(f"load {low:.1f}" if high - low < 0.05 else f"load {low:.1f} to {high:.1f}")
    command = "" if measured.command == BY_HAND else f"`{measured.command}`\\\n"
    return f"{command}{', '.join(parts)}"


def headline(
    claim: str, now: float, target: float, unit: str, source: Figures, *, at_least: bool = False, digits: int = 1
) -> str:
    """One row of the headline table; the verdict follows from the two numbers."""
    met = now >= target if at_least else now <= target
    wanted = f"at {'least' if at_least else 'most'} {target:g} {unit}".rstrip()
    command = source.command if source.command == BY_HAND else f"`{source.command.split(' --')[0]}`"
    while (round(now, digits) >= target if at_least else round(now, digits) <= target) != met:
        digits += 1  # 40.3 of 40 would read as met
    verdict = "met" if met else "**missed**"
    return f"| {claim} | {f'{now:.{digits}f} {unit}'.rstrip()} | {wanted} | {verdict} | {command} |"


def rendered(template: str, root: Path = ROOT) -> str:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / "docs" / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.globals |= {"about": about, "headline": headline}
    return templates.get_template(template).render(load_measured(root / "docs" / "measured"))


# -- vLLM's hooks ------------------------------------------------------------------------------------------------------

TESTED = "0.32.0"
"""The version that the tests run with."""


def vllm_hooks(root: Path = ROOT) -> str:
    """What each version of vLLM has for the hooks, beside what the tested one has, and which test looks at it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from vllm_hooks import SHOWN_BY

    versions = load_measured(root / "docs" / "measured")["vllm_hooks"].figures["versions"]
    others = [version for version in versions if version != TESTED]
    tests = {hook: test.partition("::") for test, hooks in SHOWN_BY.items() for hook in hooks}
    lines = [f"| hook | {TESTED} | {' | '.join(others)} | shown by |", f"|{'---|' * (len(others) + 3)}"]
    for hook, found in versions[TESTED]["hooks"].items():
        cells = ["same" if (text := versions[other]["hooks"][hook]) == found else f"**{text}**" for other in others]
        file, _, claim = tests[hook]
        shown = f"`{file}`: {claim.removeprefix('test_').replace('_', ' ')}"
        lines.append(f"| {hook} | `{found}` | {' | '.join(cells)} | {shown} |")
    imports = [
        f"{v['imports'] - len(v['lacking'])} of {v['imports']}" for v in (versions[v] for v in (TESTED, *others))
    ]
    return "\n".join([*lines, f"| names that we import | {' | '.join(imports)} | `test_cuda_hooks` |"])


# -- a GPU -------------------------------------------------------------------------------------------------------------

DRY_RUNS = {"gpu_dry_run": "vLLM's CPU build", "gpu_kit_dry_run": "vLLM's CUDA build, out of the kit"}
"""By the name of their record: what they ran with."""


def gpu_results(root: Path = ROOT) -> str:
    """Every piece of benchmarks/gpu_check.py that was run where there is a GPU."""
    measured = load_measured(root / "docs" / "measured")
    pieces = {name: found for name, found in measured.items() if name.startswith("gpu_") and name not in DRY_RUNS}
    if not pieces:
        return "**Nothing.** No piece has been run on a GPU: there is no `docs/measured/gpu_<piece>.json` yet."
    parts = []
    for name, found in pieces.items():
        rows = found.figures.get("results", [])
        single = {key: value for key, value in found.figures.items() if key not in ("results", "gpu")}
        lines = [f"**`{name.removeprefix('gpu_')}`** {found.question} ({found.figures['gpu']})", ""]
        lines += table(rows) if rows else []
        lines += ["", *(f"* {key}: {value}" for key, value in single.items()), "", about(found)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Of rows that need not have the same keys."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(column, "")).replace("|", "/") for column in columns] for row in rows]
    return [f"| {' | '.join(row)} |" for row in ([*columns], ["---"] * len(columns), *cells)]


def gpu_dry_run(root: Path = ROOT) -> str:
    """What the same command did on a machine without a GPU, and the kit that takes it to one."""
    measured = load_measured(root / "docs" / "measured")
    runs = {what: measured[name] for name, what in DRY_RUNS.items() if name in measured}
    if not runs:
        return "No dry run is recorded."
    became = [{piece["piece"]: piece["became"] for piece in run.figures["pieces"]} for run in runs.values()]
    lines = [f"| piece | {' | '.join(runs)} |", "|---" * (1 + len(runs)) + "|"]
    lines += [f"| `{piece}` | {' | '.join(of.get(piece, '-') for of in became)} |" for piece in became[0]]
    kit = next((run.figures["kit"] for run in reversed(runs.values()) if run.figures["kit"]), [])
    lines += ["", "| part of the kit | MiB | holds |", "|---|---|---|"]
    for part in kit:
        holds = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in part["holds"].items())
        lines.append(f"| {part['part']} | {part['bytes'] / 2**20:.1f} | {holds} |")
    return "\n".join([*lines, *(f"\n{what}: {about(run)}" for what, run in runs.items())])


# -- pages -------------------------------------------------------------------------------------------------------------


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


# -- ranks -------------------------------------------------------------------------------------------------------------


def ranks_matrix(root: Path = ROOT) -> str:
    """Tokens identical of all, by how the model is split, who starts the ranks, the form and the precision."""
    cells = load_measured(root / "docs" / "measured")["ranks_matrix"].figures["cells"]
    of = {tuple(cell[key] for key in ("mode", "executor", "form", "precision")): cell for cell in cells}
    modes = list(dict.fromkeys(cell["mode"] for cell in cells if cell["precision"] == "quantized"))
    columns = [(form, precision) for precision in ("identity", "quantized") for form in ("eager", "compiled")]
    titles = [f"{precision}, {form}" for form, precision in columns]
    lines = [f"| ranks | started by | {' | '.join(titles)} |", f"|{'---|' * (len(columns) + 2)}"]
    reasons: list[str] = []

    def said(cell: dict[str, Any] | None) -> str:
        if cell is None:
            return "not run"
        if "reason" in cell:
            reasons.extend([cell["reason"]] * (cell["reason"] not in reasons))
            return f"({reasons.index(cell['reason']) + 1})"
        if cell["fallback_pairs"] or cell["row_mismatches"]:
            raise ValueError(
                f"{cell['mode']} {cell['form']}: pairs fell back or rows were mixed up, so it shows nothing"
            )
        return f"{cell['identical']} of {cell['total']}" + (" *" if "earlier" in cell else "")

    for mode in modes:
        for executor in ("mp", "ray"):
            row = []
            for form, precision in columns:
                text = said(of.get((mode, executor, form, precision)))
                alike = of.get((mode, executor, form, precision), {}).get("stock_alike", {})
                if "identical" in alike:
                    text += f"; {alike['identical']}"
                if (alone := of.get((mode, executor, form, "alone"))) and precision == "quantized":
                    text += f"; alone {said(alone)}"
                row.append(text)
            lines.append(f"| {mode} | {executor} | {' | '.join(row)} |")
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""] if reasons else [""]
    if earlier := {f"{cell['earlier']}, at {cell['commit']}" for cell in cells if "earlier" in cell}:
        lines += [f"\\* {'; '.join(sorted(earlier))}", ""]
    beside = [cell for cell in cells if cell["mode"] not in modes]
    lines += ["| beside the matrix: mp, eager, identity | tokens identical |", "|---|---|"]
    lines += [f"| {cell['mode']} | {said(cell)} |" for cell in beside]
    return "\n".join(lines)


# -- quality -----------------------------------------------------------------------------------------------------------


def quality_uncovered(root: Path = ROOT) -> str:
    """What each way to make replicas loses on subjects that no calibration text covers, a table per model."""
    parts = []
    for name, found in load_measured(root / "docs" / "measured").items():
        if not name.startswith("quality_uncovered"):
            continue
        rows = found.figures["rows"]
        arms = list(dict.fromkeys(row["arm"] for row in rows))
        places = list(dict.fromkeys((row["how"], row["avg_bits"], row["part_hot"]) for row in rows))
        lines = [f"**{found.figures['model']}**", "", f"| path | average bits | hot | {' | '.join(arms)} |"]
        lines.append("|---" * (3 + len(arms)) + "|")
        for how, bits, hot in places:
            of = {row["arm"]: row for row in rows if (row["how"], row["avg_bits"], row["part_hot"]) == (how, bits, hot)}
            cells = [loss_cell(of[arm]) if arm in of else "-" for arm in arms]
            path = f"{how}, {next(iter(of.values()))['sequences']} sequences"
            lines.append(f"| {path} | {bits:g} | {f'{hot:.0%}' if hot else 'none'} | {' | '.join(cells)} |")
        parts.append("\n".join([*lines, "", about(found)]))
    return "\n\n".join(parts)


def loss_cell(row: dict[str, Any]) -> str:
    text = f"{row['delta_nll']:.4f} ({row['standard_error']:.4f})"
    if row["delta_nll"] and row.get("part_of_auto_gptq", 1) != 1:
        text += f" **{row['part_of_auto_gptq']:.2f}** ({row['part_error']:.2f})"
    return f"{text}; {row['bits_read']:.2f}"


# -- how long installing takes -----------------------------------------------------------------------------------------

WAYS = {
    "demo": "`make demo` in a fresh clone",
    "cpu": "`pip install 'vllm-ndp[cpu]'` of a wheel, until a request is answered",
    "device": "`pip install vllm-ndp` of a wheel, until a device answers",
}


def install_times(root: Path) -> str:
    """The ways to install, and of each what took how long."""
    found = load_measured(root / "docs" / "measured").get("install_times")
    if found is None:
        return "Not taken yet on a quiet machine; what was seen on a busy one: [log](log/operating.md)."
    lines = ["| way | wall | processor | on disk |", "|---|---|---|---|"]
    for name, figures in found.figures.items():
        disk = figures["disk_bytes"] / 1e9
        lines.append(f"| {WAYS[name]} | {figures['seconds']:.0f} s | {figures['processor_s']:.0f} s | {disk:.1f} GB |")
    lines += ["", "| step | wall | processor | load then |", "|---|---|---|---|"]
    for name, figures in found.figures.items():
        lines.append(f"| **{WAYS[name]}** | | | |")
        for step in figures["steps"]:
            whole = "load" in step
            used = f"{step['processor_s']:.0f} s | {step['load']:.1f}" if whole else "|"
            lines.append(f"| {step['step']} | {step['seconds']:.0f} s | {used} |")
    return "\n".join([*lines, "", about(found)])


# -- options of vLLM ---------------------------------------------------------------------------------------------------


def option_answers() -> str:
    """What becomes of every option of `vllm serve` beside ours, and the test that shows it."""
    from vllm_ndp.integration.flags import EACH_NOT_OURS, EACH_REFUSED, EACH_WORKS, NOT_OURS, REFUSED, WORKS, Answer

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


def blocks(root: Path = ROOT) -> dict[str, Callable[[], str]]:
    return {
        "arrows of ndp_device": lambda: room_drawing("ndp_device", root),
        "arrows of vllm_ndp": lambda: room_drawing("vllm_ndp", root),
        "arrows of vllm_ndp/integration": lambda: module_drawing("vllm_ndp/integration", root),
        "files of ndp_device": lambda: file_tables("ndp_device", root),
        "files of vllm_ndp": lambda: file_tables("vllm_ndp", root),
        "published models": published_models,
        "ranks": lambda: ranks_matrix(root),
        "hooks of vLLM": lambda: vllm_hooks(root),
        "measured on a GPU": lambda: gpu_results(root),
        "dry run without a GPU": lambda: gpu_dry_run(root),
        "options of vLLM": option_answers,
        "a long night": lambda: fault_figures.soak(load_measured(root / "docs" / "measured"), about),
        "attacks": lambda: fault_figures.hostile(load_measured(root / "docs" / "measured"), about),
        "degraded": lambda: fault_figures.degraded(load_measured(root / "docs" / "measured"), about),
        "quality on uncovered subjects": lambda: quality_uncovered(root),
        "install times": lambda: install_times(root),
        "measured": lambda: rendered("readme-measured.md.j2", root),
    }


def filled(page: str, root: Path = ROOT) -> str:
    """The page with every generated block written anew."""
    known = blocks(root)

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in known:
            raise KeyError(f"no block is called {name!r}; there are {', '.join(known)}")
        return f"{match[1]}\n{known[name]().strip()}\n\n{match[3]}"

    return BLOCK.sub(fill, page)


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Every page with generated parts, as it should read."""
    found = {root / "docs" / f"{name}.md": rendered(f"{name}.md.j2", root) for name in ("performance", "families")}
    for name in (
        "docs/architecture.md",
        "docs/compatibility.md",
        "docs/distributed.md",
        "docs/faults.md",
        "docs/gpu.md",
        "docs/replica-format.md",
        "docs/timing.md",
        "README.md",
    ):
        path = root / name
        found[path] = filled(path.read_text(), root)
    return found


def stale(root: Path = ROOT) -> list[str]:
    """The pages that do not read as they should."""
    return [
        path.relative_to(root).as_posix()
        for path, wanted in pages(root).items()
        if not path.exists() or path.read_text() != wanted
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is not current")
    found = stale()
    if parser.parse_args().check:
        for name in found:
            print(f"{name} does not say what the code and docs/measured/ say: run `make docs`")
        return 1 if found else 0
    for path, text in pages().items():
        path.write_text(text)
    print(f"written: {', '.join(found) or 'nothing, all pages are current'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
