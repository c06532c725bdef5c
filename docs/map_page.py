"""docs/map.md from docs/measured/map.json: who wins each cell, by how much, and what would make the device win."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from measured_figures import Figures, about

AS_FITTED = "as fitted"


class Row(NamedTuple):
    """A system's best variant in a cell."""

    name: str
    side: str
    tokens_per_s: float
    loss: float


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
        if assumed not in (*self.figures["band"], *self.figures["devices"], *self.figures["prices"]):
            raise LookupError(f"docs/measured/map.json has no cells of {assumed!r}: run `make map`")
        return self._rows.get((assumed, model, size, limit), [])

    def places(self) -> Iterator[tuple[str, int]]:
        for model in self.figures["models"]:
            for size in map(int, self.figures["cards"]):
                yield model, size

    def ratio(self, assumed: str, model: str, size: int, limit: str) -> float | None:
        """The device's speed over the fastest other's; None where one of them is missing."""
        rows = self.rows(assumed, model, size, limit)
        return _ratio(next((row for row in rows if row.side == "device"), None), rows)

    def won(self, assumed: str, limit: str) -> list[tuple[str, int]]:
        there = [(place, self.rows(assumed, *place, limit)) for place in self.places()]
        return [place for place, rows in there if rows and rows[0].side == "device"]

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


SENTENCE = re.compile(r"wins \d+ of \d+ cells of our map, \d+ with a host of 614 GB/s")


def renewed(readme: str, source: Figures) -> str:
    """The README with the map's figures in its sentence about it."""
    known, limit = Map(source), next(iter(source.figures["limits"]))
    won, fast = (len(known.won(assumed, limit)) for assumed in (AS_FITTED, "host 614 GB/s"))
    said = f"wins {won} of {known.filled(AS_FITTED, limit)} cells of our map, {fast} with a host of 614 GB/s"
    text, count = SENTENCE.subn(said, readme)
    if count != 1:
        raise LookupError(f"the README must say once {SENTENCE.pattern!r}, and does {count} times")
    return text


def page(source: Figures) -> str:
    known = Map(source)
    lines = [f"# {source.question}", "", f"For researchers. Simulated. {about(source)}", ""]
    lines += [
        "A cell names the fastest system at batch 1 within a limit of loss, and its lead over the runner-up. Then",
        "comes the device's speed over the fastest other system's: the range over locality and prices, and under",
        "how many of them the device wins. `joint` and `device` use the device. `cache` is a GPU cache of experts",
        "whose misses are fetched or computed on the host. `all` has every expert on the GPU.",
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
    text = f"{first.name} {first.tokens_per_s:.0f}"
    text = f"**{text}**" if first.side == "device" else text
    if second is None:
        return text
    ahead = 100 * (first.tokens_per_s / second.tokens_per_s - 1)
    return f"{text}, {ahead:.0f} % before {second.name} {second.tokens_per_s:.0f}"


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
            band = f"; {min(ratios):.2f} to {max(ratios):.2f}, {sum(r > 1 for r in ratios)} of {len(ratios)}"
            told.append(text + band)
        lines.append(f"| {size} | " + " | ".join(told) + " |")
    return lines


def _prices(known: Map) -> list[str]:
    """What the device wins while messages to it and hops to the host grow dearer alike, cheapest first."""
    limits, prices = known.figures["limits"], known.figures["prices"]
    lines = [
        "One row to the host's CPU and back, and to the device and back with its first tile; both change together.",
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
    changes = known.figures["devices"]
    lines = [
        f"The device's speed over the fastest other system's at {limit}' loss, one change at a time.",
        f"`16-bit hot slots`: the paper's plan, whose experts on the GPU keep 16 bits, at {wider}' loss, which it has;",
        "elsewhere joint plans may narrow them.",
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
