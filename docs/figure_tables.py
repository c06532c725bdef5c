"""Tables of measurements, one function for each: hooks of vLLM, a GPU, ranks, quality, installing.

Returns Markdown. Each reads its file of docs/measured/ below a root; those of faults are in fault_figures.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from import_graph import ROOT
from measured_figures import about, cited, load_measured, table

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


def gpu_dry_run(root: Path = ROOT) -> str:
    """What the same command did on a machine without a GPU, and the kit that takes it to one."""
    measured = load_measured(root / "docs" / "measured")
    runs = {what: measured[name] for name, what in DRY_RUNS.items() if name in measured}
    if not runs:
        return "No dry run is recorded."
    became = [{piece["piece"]: piece["became"] for piece in run.figures["pieces"]} for run in runs.values()]
    lines = [f"| piece | {' | '.join(runs)} |", "|---" * (1 + len(runs)) + "|"]
    for piece, said in became[0].items():
        others = (of.get(piece, "-") for of in became[1:])
        lines.append(
            f"| `{piece}` | {' | '.join([said, *('the same' if other == said else other for other in others)])} |"
        )
    kit = next((run.figures["kit"] for run in reversed(runs.values()) if run.figures["kit"]), [])
    lines += ["", "| part of the kit | MiB | holds |", "|---|---|---|"]
    for part in kit:
        holds = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in part["holds"].items())
        lines.append(f"| {part['part']} | {part['bytes'] / 2**20:.1f} | {holds} |")
    return "\n".join([*lines, *(f"\n{what}: {about(run)}" for what, run in runs.items())])


def asynchronous_layer(root: Path = ROOT) -> str:
    """Microseconds of each part of a decode layer, by who sends."""
    measured = load_measured(root / "docs" / "measured")["asynchronous_layer"]
    rows = measured.figures["results"]
    shown = [row for row in rows if not row["holds_gil"]]
    lines = [
        f"the {row['sends']} sends: {', '.join(f'{part} {us:.0f}' for part, us in row['us'].items())}.\\"
        for row in shown
    ]
    for row in rows:
        turns = row["fixed_us_of_turns"]
        lock = ", lock held" if row["holds_gil"] else ""
        lines.append(f"the {row['sends']} sends{lock}: fixed {min(turns):.0f} to {max(turns):.0f}.\\")
    return "\n".join([*lines, about(measured)])


def compiled_kernels(root: Path = ROOT) -> str:
    """The most that any specialisation of a kernel needs."""
    measured = load_measured(root / "docs" / "measured")["compiled_kernels"]
    rows = measured.figures["results"]
    targets = " / ".join(f"{row['sm']}" for row in rows if row["kernel"] == rows[0]["kernel"])
    lines = [f"| on sm {targets} | specialisations | registers | stack | shared memory |", "|---|---|---|---|---|"]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        cells = [" / ".join(str(row[key]) for row in mine) for key in ("registers", "stack_bytes", "shared_bytes")]
        lines.append(f"| `{kernel}` | {mine[0]['cases']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", about(measured)])


# -- ranks -------------------------------------------------------------------------------------------------------------


def ranks_matrix(root: Path = ROOT) -> str:
    """Tokens identical of all, by how the model is split, who starts the ranks, the form and the precision."""
    measured = load_measured(root / "docs" / "measured")["ranks_matrix"]
    cells = measured.figures["cells"]
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
    beside = [f"| {cell['mode']} | {said(cell)} |" for cell in cells if cell["mode"] not in modes]
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""] if reasons else [""]
    if earlier := sorted({cell["commit"] for cell in cells if "earlier" in cell}):
        lines += [f"\\* of earlier code: {', '.join(earlier)}", ""]
    lines += ["| beside the matrix: mp, eager, identity | tokens identical |", "|---|---|", *beside]
    return "\n".join([*lines, "", cited(measured)])


def ranks_wall(root: Path = ROOT) -> str:
    """Least seconds of a pass by mode and side, and their ratio to stock."""
    measured = load_measured(root / "docs" / "measured")["ranks_wall"]
    rows = measured.figures["wall"]
    sides = {"stock": "stock", "all hot": "every expert hot", "half hot": "half hot, 2 bits, one device"}
    lines = [f"| | {' | '.join(sides.values())} |", f"|{'---|' * (len(sides) + 1)}"]
    for row in rows:
        least = {side: f"{min(row['measured_seconds'][side]):.3f} s" for side in sides}
        cells = [least.pop("stock"), *(f"{took} ({row['of_stock'][side]:.2f})" for side, took in least.items())]
        lines.append(f"| {row['mode']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", cited(measured)])


# -- prompts -----------------------------------------------------------------------------------------------------------


def prefill_sides(root: Path = ROOT) -> str:
    """Time until the first token of streamed and of split prompts: simulated, and on the wall beside stock."""
    measured = load_measured(root / "docs" / "measured")["prefill_sides"]
    lines = ["| model | tokens | first token: streamed | split | | token and moves: streamed | split |"]
    lines += ["|---" * 7 + "|"]
    for row in (row for row in measured.figures["simulated"] if row["tokens"] == 256):
        of = {key.removeprefix("simulated_"): value for key, value in row.items()}
        times = of["streamed_ttft_ms"], of["split_ttft_ms"], of["streamed_both_ms"], of["split_both_ms"]
        streamed, split, both, both_split = (f"{ms:.0f}" for ms in times)
        lines.append(
            f"| {row['model']} | 256 | {streamed} | {split} | {times[0] / times[1]:.1f}x | {both} | {both_split} |"
        )
    lines += ["", "**On the wall**, one layer of Mixtral-8x7B's width, ms (times stock):", ""]
    lines += ["| tokens | stock | streamed | split (default) | simulated: streamed | split |", "|---" * 6 + "|"]
    live = measured.figures["live"]
    for row in live:
        cells = [f"{row['measured_stock_ttft_ms']:.0f}"]
        kinds = ("streamed", "split")
        cells += [f"{row[f'measured_{kind}_ttft_ms']:.0f} ({row[f'{kind}_over_stock']:.2f})" for kind in kinds]
        cells += [f"{row[f'simulated_{kind}_ttft_us'] / 1000:.1f}" for kind in kinds]
        lines.append(f"| {row['tokens']} | {' | '.join(cells)} |")
    faster = sum(row["streamed_over_stock"] > row["split_over_stock"] for row in live)
    return "\n".join([
        *lines, "", cited(measured), "",
        f'On two cores, `"prefill": "streamed"` is faster at {faster} of {len(live)} lengths.',
    ])  # fmt: skip


# -- calibration -------------------------------------------------------------------------------------------------------


def calibration_memory(root: Path = ROOT) -> str:
    """What calibrating one expert takes."""
    measured = load_measured(root / "docs" / "measured")["calibration_memory"]
    of = measured.figures
    took = f"{of['peak_private_gb']} GB and {of['seconds_per_expert'] / 60:.1f} minutes of one core"
    return f"One expert of {of['hidden']} x {of['intermediate']} takes {took} ({cited(measured)})."


# -- quality -----------------------------------------------------------------------------------------------------------


def quality_uncovered(root: Path = ROOT) -> str:
    """What each way to make replicas loses on subjects that no calibration text covers, a table per model."""
    parts = []
    for name, found in load_measured(root / "docs" / "measured").items():
        if name.startswith("quality_uncovered"):
            table = _beside_each_other(found.figures["rows"])
            parts.append("\n".join([f"**{found.figures['model']}**", "", *table, "", about(found)]))
    return "\n\n".join(parts)


def _beside_each_other(rows: list[dict[str, Any]]) -> list[str]:
    """A column for each arm at equal bytes and at equal time. The yardstick, first, is the same in both."""
    columns = list(dict.fromkeys((row["arm"], row["equal"]) for row in rows))
    yardstick = rows[0]["arm"]
    columns = [(arm, equal) for arm, equal in columns if arm != yardstick or equal == "bytes"]
    heads = [arm if arm == yardstick else f"{arm}, equal {equal}" for arm, equal in columns]
    lines = [f"| path | average bits | hot | {' | '.join(heads)} |", "|---" * (3 + len(columns)) + "|"]
    for how, bits, hot in dict.fromkeys(_place(row) for row in rows):
        of = {(row["arm"], row["equal"]): row for row in rows if _place(row) == (how, bits, hot)}
        cells = [loss_cell(of[column]) if column in of else "-" for column in columns]
        path = f"{how}, {next(iter(of.values()))['sequences']} sequences"
        lines.append(f"| {path} | {bits:g} | {f'{hot:.0%}' if hot else 'none'} | {' | '.join(cells)} |")
    return lines


def _place(row: dict[str, Any]) -> tuple[str, float, float]:
    return row["how"], row["avg_bits"], row["part_hot"]


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
    """How long each way to install takes."""
    found = load_measured(root / "docs" / "measured").get("install_times")
    if found is None:
        return "Not taken yet on a quiet machine; what was seen on a busy one: [log](log/operating.md)."
    lines = ["| way | wall | processor | on disk |", "|---|---|---|---|"]
    for name, figures in found.figures.items():
        disk = figures["disk_bytes"] / 1e9
        lines.append(f"| {WAYS[name]} | {figures['seconds']:.0f} s | {figures['processor_s']:.0f} s | {disk:.1f} GB |")
    return "\n".join([*lines, "", about(found)])
