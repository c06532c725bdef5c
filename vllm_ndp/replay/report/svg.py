"""Charts as SVG text, heatmaps as small PNGs inside it. Knows pixels and colours. Does not know what is shown."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
from numpy.typing import NDArray

# Okabe and Ito: distinguishable with every common colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C", "#6A3D9A", "#B2A100")
INK, FAINT, GRID = "#222", "#666", "#e4e4e4"
_CHAR = 6.2  # average width of a character at 11 px


@dataclass
class Axis:
    """Maps values to pixels; `log` axes need positive limits."""

    low: float
    high: float
    start: float  # pixel of `low`
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(powers) <= 3 else (1,)
            values = [step * 10.0**power for power in powers for step in steps]
        else:
            raw = (self.high - self.low) / count
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw)
            values = [step * i for i in range(math.floor(self.low / step), math.ceil(self.high / step) + 1)]
        slack = 1e-9 * abs(self.high - self.low)
        return [v for v in values if self.low - slack <= v <= self.high + slack]


@dataclass
class Chart:
    """One set of axes with a legend; add series, then `svg()`."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    left: int = 58
    bottom: int = 42
    legend_width: int = 0
    y_names: Sequence[str] = ()
    """Categories: row i of the y axis is called y_names[i]."""
    parts: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.right = self.width - 12 - self.legend_width
        self.ax = Axis(*self.x, self.left, self.right, self.x_log)
        self.ay = Axis(*self.y, self.height - self.bottom, 12, self.y_log)

    def line(self, xs: Sequence[float], ys: Sequence[float], color: str, name: str = "", dash: str = "") -> None:
        points = " ".join(f"{self.ax(x):.1f},{self.ay(y):.1f}" for x, y in zip(xs, ys, strict=True))
        self.parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
        )
        self._entry(name, color)

    def band(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], color: str, name: str = ""
    ) -> None:
        forth = [f"{self.ax(x):.1f},{self.ay(v):.1f}" for x, v in zip(xs, high, strict=True)]
        back = [f"{self.ax(x):.1f},{self.ay(v):.1f}" for x, v in zip(xs, low, strict=True)][::-1]
        self.parts.append(f'<polygon points="{" ".join(forth + back)}" fill="{color}" fill-opacity="0.22"/>')
        self._entry(name, color)

    def dot(self, x: float, y: float, color: str, title: str, shape: str = "circle", name: str = "") -> None:
        cx, cy = self.ax(x), self.ay(y)
        tip = f"<title>{escape(title)}</title>"
        if shape == "circle":
            self.parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="5" fill="{color}">{tip}</circle>')
        else:
            box = f'x="{cx - 4.5:.1f}" y="{cy - 4.5:.1f}" width="9" height="9"'
            turn = f' transform="rotate(45 {cx:.1f} {cy:.1f})"' if shape == "diamond" else ""
            self.parts.append(f'<rect {box} fill="{color}"{turn}>{tip}</rect>')
        self._entry(name, color)

    def level(self, y: float, color: str, name: str) -> None:
        """A horizontal line over the whole width."""
        self.line([self.x[0], self.x[1]], [y, y], color, name, "5 3")

    def svg(self) -> str:
        out = []
        for value in self.ax.ticks():
            at = self.ax(value)
            out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="12" y2="{self.ay.start}" stroke="{GRID}"/>')
            out.append(text(at, self.ay.start + 15, number(value), anchor="middle"))
        rows = enumerate(self.y_names) if self.y_names else ((v, number(v)) for v in self.ay.ticks())
        for value, name in rows:
            at = self.ay(value)
            out.append(f'<line x1="{self.left}" x2="{self.right}" y1="{at:.1f}" y2="{at:.1f}" stroke="{GRID}"/>')
            out.append(text(self.left - 6, at + 4, name, anchor="end"))
        out.append(text((self.left + self.right) / 2, self.height - 6, self.x_label, anchor="middle", color=FAINT))
        middle = (self.ay.start + 12) / 2
        out.append(
            f'<g transform="translate(12 {middle:.0f}) rotate(-90)">'
            f"{text(0, 0, self.y_label, anchor='middle', color=FAINT)}</g>"
        )
        for row, (name, color) in enumerate(self.legend):
            y = 20 + 17 * row
            out.append(f'<rect x="{self.right + 12}" y="{y - 8}" width="12" height="9" fill="{color}"/>')
            out.append(text(self.right + 29, y, name))
        return frame(self.width, self.height, [*out, *self.parts])

    def _entry(self, name: str, color: str) -> None:
        if name and (name, color) not in self.legend:
            self.legend.append((name, color))


def stacked_bars(
    labels: Sequence[str], parts: dict[str, Sequence[float]], colors: dict[str, str], unit: str, width: int = 1000
) -> str:
    """Horizontal bars, one per label, drawn to one scale."""
    left, right, row = int(max(len(label) for label in labels) * _CHAR) + 16, width - 90, 21
    totals = [sum(values[i] for values in parts.values()) for i in range(len(labels))]
    axis = Axis(0, max(totals), left, right)
    out = []
    for i, label in enumerate(labels):
        y, start = 30 + row * i, 0.0
        out.append(text(left - 8, y + 12, label, anchor="end"))
        for name, values in parts.items():
            end = start + values[i]
            if end > start:
                tip = f"<title>{escape(f'{label}: {name} {number(values[i])} {unit}')}</title>"
                box = f'x="{axis(start):.1f}" y="{y}" width="{axis(end) - axis(start):.1f}" height="{row - 5}"'
                out.append(f'<rect {box} fill="{colors[name]}">{tip}</rect>')
            start = end
        out.append(text(axis(totals[i]) + 6, y + 12, number(totals[i]), color=FAINT))
    at = float(left)
    for name, color in colors.items():
        out.append(f'<rect x="{at}" y="4" width="12" height="10" fill="{color}"/>' + text(at + 17, 13, name))
        at += 34 + len(name) * _CHAR
    return frame(width, 34 + row * len(labels), out)


def heatmap(
    values: NDArray[np.float64], title: str, *, diverging: bool = False, unit: str = "", width: int = 300
) -> str:
    """[rows, columns] as coloured cells: layers downwards, experts to the right. NaN stays blank."""
    top = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    top = top or 1.0
    low = -top if diverging else 0.0
    height = int(min(max(values.shape[0] * 22, 60), 260))
    png = base64.b64encode(_png(_colors(values, low, top, diverging))).decode()
    image = (
        f'<image x="34" y="24" width="{width - 44}" height="{height}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{png}"/>'
    )
    ramp = np.linspace(low, top, 64)[None, :]
    bar = base64.b64encode(_png(_colors(ramp, low, top, diverging))).decode()
    y = height + 46
    scale = (
        f'<image x="34" y="{y}" width="{width - 44}" height="8" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{bar}"/>'
    )
    return frame(
        width,
        y + 26,
        [
            text(34, 15, title, weight=600),
            image,
            text(30, 34, "0", anchor="end", color=FAINT),
            text(30, 22 + height, str(values.shape[0] - 1), anchor="end", color=FAINT),
            text(34, height + 38, f"expert 0 … {values.shape[1] - 1}", color=FAINT),
            scale,
            text(34, y + 21, number(low) + unit, color=FAINT),
            text(width - 10, y + 21, number(top) + unit, anchor="end", color=FAINT),
        ],
    )


def text(x: float, y: float, content: str, *, anchor: str = "start", color: str = INK, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}">'
        f"{escape(content)}</text>"
    )


def frame(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{"".join(parts)}</svg>'


def number(value: float) -> str:
    """Short: three significant digits, thousands with k."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _colors(values: NDArray[np.float64], low: float, high: float, diverging: bool) -> NDArray[np.uint8]:
    """White to blue, or orange over white to blue; linear in the value."""
    blue, orange, white = np.array([0, 82, 140.0]), np.array([196, 92, 0.0]), np.array([255, 255, 255.0])
    share = np.clip((np.nan_to_num(values) - low) / (high - low), 0, 1)[..., None]
    if diverging:
        signed = 2 * share - 1
        mixed = np.where(signed >= 0, white + signed * (blue - white), white - signed * (orange - white))
    else:
        mixed = white + share * (blue - white)
    mixed = np.where(np.isnan(values)[..., None], 240.0, mixed)
    return mixed.astype(np.uint8)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """RGB [rows, columns, 3] as a PNG file."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + pixels[row].tobytes() for row in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
