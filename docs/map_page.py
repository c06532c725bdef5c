"""docs/map.md from docs/measured/map.json: who wins each cell, by how much, why, and what would make the device win.

python docs/map_page.py             cell by cell, the first map, the one at H100 rates, today's, and what changed
python docs/map_page.py COMMIT      the same, from the map as it was kept at a commit to today's
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from measured_figures import Figures, about, load_measured

BEFORE = {
    "mixtral-8x7b": ("device 90", "device 126", "device 126", "4 bits 373", "4 bits 373", "4 bits 373", "4 bits 373"),
    "qwen3-30b-a3b": ("device 504", "device 635", "4 bits 955", "4 bits 955", "8 bits 759", "8 bits 759", "8 bits 759"),
    "gpt-oss-120b": ("-", "device 285", "device 309", "device 333", "device 364", "4 bits 668", "4 bits 668"),
    "qwen3-235b-a22b": ("-", "-", "device 61", "device 65", "device 72", "device 85", "device 90"),
    "deepseek-v3": ("-", "-", "-", "-", "device 38", "device 41", "device 43"),
}
"""The map of 2026-11-22, loss at most that of 3 bits, at 8, 16, 24, 32, 48, 80 and 96 GB with H100 rates."""


AS_FITTED, SAME_GPU = "as fitted", "H100 rates at every size"
WITH_DEVICE = ("device", "joint")
"""Sides of a machine with a device: plans that use it, and joint plans that leave it idle, which win nothing."""


_SHORT = {
    "every model as sticky as Qwen3-30B": "all sticky",
    "every model memoryless": "all memoryless",
    "H100 rates at every size": "H100 rates",
    "hops by DMA": "DMA",
}
"""Names of assumptions in cells."""


class Row(NamedTuple):
    """A system's best variant in a cell."""

    name: str
    side: str
    tokens_per_s: float
    loss: float
    on_gpu: float | None = None
    """Part of decode's choices that are found in GPU memory."""


class Map:
    """Cells by what was assumed, model, size and limit of loss."""

    def __init__(self, source: Figures) -> None:
        self.figures = source.figures
        self._rows = {
            (cell["assumed"], cell["model"], cell["gb"], cell["limit"]): [Row(*row) for row in cell["rows"]]
            for cell in self.figures["cells"]
        }

    def rows(self, assumed: str, model: str, size: int, limit: str) -> list[Row]:
        """Fastest first; none where nothing fits."""
        if assumed not in (*self.figures["band"], *self.figures["devices"], *self.figures.get("prices", ())):
            raise LookupError(f"docs/measured/map.json has no cells of {assumed!r}: run `make map`")
        return self._rows.get((assumed, model, size, limit), [])

    def places(self) -> Iterator[tuple[str, int]]:
        for model in self.figures["models"]:
            for size in map(int, self.figures["cards"]):
                yield model, size

    def ratio(self, assumed: str, model: str, size: int, limit: str) -> float | None:
        """The device's speed over the fastest other's, 1 where the fastest plan leaves it idle; None without both."""
        rows = self.rows(assumed, model, size, limit)
        return _ratio(next((row for row in rows if row.side in WITH_DEVICE), None), rows)

    def won(self, assumed: str, limit: str, by: float = 0.0) -> list[tuple[str, int]]:
        """Cells that the device wins, by at least that part of the other's speed."""
        there = [(place, self.rows(assumed, *place, limit)) for place in self.places()]
        return [place for place, rows in there if rows and rows[0].side == "device"
                and ((lead := _ratio(rows[0], rows)) is None or lead >= 1 + by)]  # fmt: skip

    def decided_by(self, model: str, size: int, limit: str) -> list[str]:
        """Assumptions of the band under which the other side wins the cell."""
        ratios = {assumed: self.ratio(assumed, model, size, limit) for assumed in self.figures["band"]}
        fitted = ratios.get(AS_FITTED)
        known = [] if fitted is None else [(name, ratio) for name, ratio in ratios.items() if ratio is not None]
        return [name for name, ratio in known if (ratio > 1) != (fitted > 1)]

    def filled(self, assumed: str, limit: str) -> int:
        return sum(bool(self.rows(assumed, *place, limit)) for place in self.places())


def _ratio(device: Row | None, rows: list[Row]) -> float | None:
    other = next((row for row in rows if row.side != "device"), None)
    return None if device is None or other is None else device.tokens_per_s / other.tokens_per_s


def summary(source: Figures) -> str:
    """How many cells the device wins under every assumption."""
    known, limits = Map(source), list(source.figures["limits"])
    lines = ["| assumed | " + " | ".join(f"at {limit}' loss" for limit in limits) + " |"]
    lines.append("|---|" + "---|" * len(limits))
    for assumed in [*known.figures["band"], *known.figures["devices"]]:
        counts = [f"{len(known.won(assumed, limit))} of {known.filled(assumed, limit)}" for limit in limits]
        lines.append(f"| {assumed} | " + " | ".join(counts) + " |")
    return "\n".join(lines)


SENTENCE = re.compile(
    r"\d+ pairs of model and GPU memory: the device wins \d+, \d+ of them by 5 % or more, "
    r"and \d+ with a host of 614 GB/s"
)


def renewed(readme: str, source: Figures) -> str:
    """The README with the map's figures in its sentence about it."""
    known, limit = Map(source), next(iter(source.figures["limits"]))
    won, fast = (len(known.won(assumed, limit)) for assumed in (AS_FITTED, "host 614 GB/s"))
    clearly = len(known.won(AS_FITTED, limit, by=0.05))
    said = f"{known.filled(AS_FITTED, limit)} pairs of model and GPU memory: the device wins {won}, {clearly} of them"
    said += f" by 5 % or more, and {fast} with a host of 614 GB/s"
    text, count = SENTENCE.subn(said, readme)
    if count != 1:
        raise LookupError(f"the README must say once {SENTENCE.pattern!r}, and does {count} times")
    return text


def page(source: Figures) -> str:
    known = Map(source)
    lines = [f"# {source.question}", "", f"For researchers. Simulated. {about(source)}", ""]
    lines += [
        "A cell names the fastest system within a limit of loss, its tokens/s at batch 1, and its lead over the",
        "runner-up. In brackets stands the share of the router's choices that the system finds on the GPU. After the",
        "semicolon stands the device's speed over the fastest system without it: lowest and highest ratio over all",
        "assumptions about locality and prices. The cell ends with the assumptions under which the other side wins, or",
        "with `always`.",
        "",
        "* `joint`: our planner, which chooses place and width of every expert. Bold: its plan uses the device.",
        "* `device`: the paper's plan. `all`: every expert on the GPU.",
        "* `cache`: a GPU cache of experts; a miss is fetched from the host, or computed there.",
        "",
    ]
    lines += ["![The device's speed over the fastest other system's, by model and memory](map.svg)", ""]
    for limit, loss in known.figures["limits"].items():
        lines += [f"## Loss at most that of {limit} everywhere ({loss:.4f}), as fitted", "", *_cells(known, limit), ""]
    lines += ["## Cells that the device wins", "", summary(source), ""]
    lines += ["## Over the price of a message", "", *_prices(known), ""]
    return "\n".join([*lines, "## What would make the device win", "", *_changes(known)]) + "\n"


def _said(rows: list[Row]) -> str:
    """Winner and runner-up."""
    if not rows:
        return "nothing fits"
    first, second = rows[0], next((row for row in rows if row.side != rows[0].side), None)
    if second is None:
        return _named(first)
    ahead = 100 * (first.tokens_per_s / second.tokens_per_s - 1)
    return f"{_named(first)}, {ahead:.0f} % before {second.name} {second.tokens_per_s:.0f}"


def _named(row: Row) -> str:
    text = f"{row.name} {row.tokens_per_s:.0f}"
    text = f"**{text}**" if row.side == "device" else text
    return text if row.on_gpu is None else f"{text} ({100 * row.on_gpu:.0f} %)"


def _cells(known: Map, limit: str) -> list[str]:
    models, sizes = known.figures["models"], [int(size) for size in known.figures["cards"]]
    lines = ["| GB | " + " | ".join(models) + " |", "|---|" + "---|" * len(models)]
    for size in sizes:
        told = []
        for model in models:
            text = _said(known.rows(AS_FITTED, model, size, limit))
            found = [known.ratio(assumed, model, size, limit) for assumed in known.figures["band"]]
            ratios = [ratio for ratio in found if ratio is not None]
            if not ratios:
                told.append(text)
                continue
            decides = ", ".join(_SHORT.get(name, name) for name in known.decided_by(model, size, limit))
            told.append(
                f"{text}; {min(ratios):.2f} to {max(ratios):.2f}, {f'not with {decides}' if decides else 'always'}"
            )
        lines.append(f"| {size} | " + " | ".join(told) + " |")
    return lines


def _prices(known: Map) -> list[str]:
    """What the device wins while messages to it and hops to the host grow dearer alike, cheapest first."""
    limits, prices = known.figures["limits"], known.figures["prices"]
    lines = [
        "Columns 2 and 3: the time of one row to the host's CPU and back, and to the device and back with the first",
        "tile of weights. Both change together.",
        "",
        "| assumed | host, us | device, us | " + " | ".join(f"cells won at {limit}' loss" for limit in limits) + " | "
        "device over the fastest other: least, median, most |",
        "|---|---|---|" + "---|" * (len(limits) + 1),
    ]
    for assumed, (host, device) in sorted(prices.items(), key=lambda item: item[1]):
        counts = [f"{len(known.won(assumed, limit))} of {known.filled(assumed, limit)}" for limit in limits]
        found = (known.ratio(assumed, *place, next(iter(limits))) for place in known.places())
        ratios = sorted(ratio for ratio in found if ratio is not None)
        spread = ", ".join(map(_marked, (ratios[0], ratios[len(ratios) // 2], ratios[-1]))) if ratios else "-"
        lines.append(f"| {assumed} | {host:.2f} | {device:.2f} | {' | '.join(counts)} | {spread} |")
    return lines


def _changes(known: Map) -> list[str]:
    """The device over the fastest other system, by cell and change."""
    limit, *_, wider = known.figures["limits"]
    changes = [
        change
        for change in known.figures["devices"]
        if change not in known.figures["prices"] and "150 ns" not in change
    ]
    lines = [
        f"The device's speed over that of the fastest system without it, at {limit}' loss, one change at a time. Joint",
        "plans may give experts on the GPU fewer than 16 bits. The column `16-bit hot slots` shows the paper's plan,",
        f"which may not; it has {wider}' loss.",
        "",
        "| " + " | ".join(["model", "GB", AS_FITTED, "16-bit hot slots", *changes]) + " |",
        "|---|---|---|---|" + "---|" * len(changes),
    ]
    for model, size in known.places():
        rows = known.rows(AS_FITTED, model, size, limit)
        wide = known.rows(AS_FITTED, model, size, wider)
        paper = _ratio(next((row for row in wide if row.name == "device"), None), wide)
        ratios = [known.ratio(AS_FITTED, model, size, limit), paper]
        ratios += [known.ratio(change, model, size, limit) for change in changes]
        if rows:
            lines.append(f"| {model} | {size} | " + " | ".join(map(_marked, ratios)) + " |")
    return lines


def _marked(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}"


def history(known: Map) -> list[str]:
    """Cell by cell: the map before, at H100 rates, and now; with the step that changed the side that wins."""
    lines = [
        "Before: no expert cache, no joint plan, no 4 bits on KTransformers' GPU; a hop to the host cost 7 us, to the",
        "device 1.1; routing without memory. H100 rates: all of that mended. Now: the card's own rates too.",
        "",
        "| model | GB | before | H100 rates | now | why another side wins |",
        "|---|---|---|---|---|---|",
    ]
    limit = list(known.figures["limits"])[-1]
    for model, size in known.places():
        before = BEFORE[model][list(known.figures["cards"]).index(str(size))]
        rows = [known.rows(assumed, model, size, limit) for assumed in (SAME_GPU, AS_FITTED)]
        told = " | ".join(_named(found[0]) if found else "nothing fits" for found in rows)
        lines.append(f"| {model} | {size} | {before} | {told} | {_step_that_decided(before, *rows)} |")
    return lines


def _step_that_decided(before: str, same_gpu: list[Row], now: list[Row]) -> str:
    sides = [before.startswith("device"), *(rows[0].side == "device" for rows in (same_gpu, now) if rows)]
    if before == "-" or len(sides) < 3:
        return "-"
    steps = ("rivals, prices and routing", "the card's rates")
    changed = [step for step, was, became in zip(steps, sides, sides[1:], strict=False) if was != became]
    return ", then ".join(changed) or "the same side"


def compared(before: Map, now: Map) -> list[str]:
    """Cell by cell as fitted: winner and runner-up of both maps, and how far each side moved."""
    lines = ["| model | GB | loss of | before | now | why |", "|---|---|---|---|---|---|"]
    for (model, size), limit in ((place, limit) for place in now.places() for limit in now.figures["limits"]):
        was, became = (known.rows(AS_FITTED, model, size, limit) for known in (before, now))
        if was or became:
            told = " | ".join(map(_said, (was, became)))
            lines.append(f"| {model} | {size} | {limit} | {told} | {_what_moved(was, became)} |")
    return lines


def _what_moved(was: list[Row], became: list[Row]) -> str:
    """Speeds of the best row of each side that leads in either map, then whether another side wins."""
    best = [{row.side: row for row in reversed(rows)} for rows in (was, became)]
    leading = dict.fromkeys(row.side for rows in (was[:2], became[:2]) for row in rows)
    told = []
    for side in leading:
        old, new = (rows.get(side) for rows in best)
        if old is None or new is None:
            told.append(f"{side} {'is new' if old is None else 'no longer leads or fits'}")
        else:
            told.append(f"{side} {100 * (new.tokens_per_s / old.tokens_per_s - 1):+.1f} %")
    sides = [rows[0].side if rows else "nothing" for rows in (was, became)]
    turned = "the same side wins" if sides[0] == sides[1] else f"{sides[1]} instead of {sides[0]}"
    return f"{turned}: {', '.join(told)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="a commit that has docs/measured/map.json; none: the first map")
    given = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    now = load_measured(root / "docs" / "measured")["map"]
    if given.commit is None:
        print("\n".join(history(Map(now))))
        return
    kept = ["git", "show", f"{given.commit}:docs/measured/map.json"]
    before = json.loads(subprocess.run(kept, cwd=root, capture_output=True, text=True, check=True).stdout)
    print(f"Before: {before['commit']}, {before['date']}. Now: {now.commit}, {now.date}.\n")
    print("\n".join(compared(Map(Figures(**before)), Map(now))))


if __name__ == "__main__":
    main()
