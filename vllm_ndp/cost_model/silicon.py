"""Times of GPU kernels that were measured: vLLM's MoE layers, products, attention and all-reduces on four cards.

    time = base x ratio          base = fastest time of the kernel + bytes / memory rate + flops / arithmetic rate

`base` is of the work that is asked for, on the hardware that is asked for. `ratio`, measured time over base, is the
mean of the eight nearest measured rows, each weighted by 1 / distance^2; a measured row itself has its own ratio.
Distance is that of the sizes' logarithms to base 2, in whole sixteenths: of an expert's matrices, experts with a row,
and rows of each; of a product's columns, depth and rows; of attention's requests, heads, cached values and tokens; of
latent attention's requests, weights and tokens.

Left out, because such a row says nothing of weights that come from memory, or was disturbed:

* rows faster than the memory allows, and rows whose bytes fit into the card's L2 cache, unless their reading takes less
  than a quarter of the kernel's fastest time;
* rows half as slow again as one of the same layer with more tokens.

A MoE layer of any part of the experts is fitted to these times of the whole layer at 2^0 to 2^14 tokens:

    layer = fixed + sum over experts with a row of expert(rows)          no expert: 0

The fixed time and that of an expert with one row are the line of least relative squares through the times in which
experts have four rows at most; an expert takes at least what reading it takes. Expert(rows) then follows the times with
more rows. By construction no time falls with rows, with experts, or with the bytes that a kernel reads of them, and no
part of the fixed time leaves with experts that leave.

`vllm-ndp reproduce silicon` says how far they foretell. Whole numbers throughout. silicon.csv names source, licence and
version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.common.decoder_layers import Latent
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import PS_PER_S, ceil_div

FILE = Path(__file__).with_name("silicon.csv")
CARDS = {  # the preset with the rates of each, and the bytes of its L2 cache
    "h100": ("h100-ndp512", 50 * 10**6),
    "h200": ("h200-gen5", 50 * 10**6),
    "l40s": ("l40s", 96 * 10**6),
    "rtxpro6000": ("rtxpro6000", 128 * 10**6),
}
BITS = {"bf16": (16, 1), "fp8": (8, 1), "int4": (33, 8), "mxfp4": (17, 4)}
"""Bits of a weight with its scales, as a fraction."""
EXPERTS = {16: ("bf16",), 8: ("fp8",), 4: ("int4", "mxfp4")}
"""Kernels that stand for experts of a width; narrower ones are read by the kernels of 4 bits."""
SMALLEST_HIDDEN = 1024
"""Of a model that the tables are asked about: half of the smallest that was measured."""
_TOKENS = [1 << at for at in range(15)]
"""Of measured MoE layers."""
_ROWS = [4**at for at in range(8)]
"""Of measured products."""
_REDUCED = [128 * 4**at for at in range(11)]
"""Bytes of measured all-reduces."""
_LATENT, _HIDDEN = Latent(num_heads=1, query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128), 7168
"""Of the measured latent attention (DeepSeek-V3), whose shards have 1 to 128 heads."""
_NEAREST = 8
_ONE = 1 << 16
_DISTURBED = 3, 2


class Load(NamedTuple):
    """What a kernel reads, computes, and looks like."""

    num_bytes: int
    flops: int
    sizes: tuple[int, ...]


def experts(hidden: int, intermediate: int, touched: int, pairs: int, num_bytes: int) -> Load:
    """A layer's experts with gate: `touched` of them have `pairs` rows in all. num_bytes: of their weights."""
    moved = num_bytes + 2 * pairs * (2 * hidden + 3 * intermediate)
    flops = 6 * hidden * intermediate * pairs
    return Load(moved, flops, (_log(hidden), _log(intermediate), _log(touched), _log(pairs) - _log(touched)))


def product(columns: int, depth: int, rows: int) -> Load:
    num_bytes = 2 * (columns * depth + rows * (columns + depth))
    return Load(num_bytes, 2 * columns * depth * rows, (_log(columns), _log(depth), _log(rows)))


def attention(requests: int, heads: int, kv_values: int, num_bytes: int, flops: int, tokens: int) -> Load:
    """kv_values: numbers cached for a token. tokens: of each request, cached ones in decode, new ones in a prompt."""
    return Load(num_bytes, flops, (_log(requests), _log(heads), _log(kv_values), _log(max(tokens, 1))))


def latent(requests: int, weights: int, num_bytes: int, flops: int, tokens: int) -> Load:
    """A layer's latent attention in decode, with its products. num_bytes and flops: beside those of the weights."""
    sizes = _log(requests), _log(weights), _log(max(tokens, 1))
    return Load(2 * weights + num_bytes, 2 * requests * weights + flops, sizes)


def _log(number: int) -> int:
    """Sixteenths of its logarithm to base 2, rounded down."""
    return (number**16).bit_length() - 1


@dataclass(frozen=True, eq=False)
class Kernel:
    """Rows of one kernel, or of those that stand for one, on one card."""

    fastest_ps: int
    groups: tuple[tuple[int, ...], ...]
    """Of each row, the layer that it is of, and its place on the kernel's axis."""
    places: tuple[int, ...]
    sizes: NDArray[np.int64]
    base_ps: NDArray[np.int64]
    took_ps: NDArray[np.int64]
    num_left_out: int

    def ratio(self, sizes: tuple[int, ...], among: NDArray[np.bool_] | None = None) -> int:
        """In 65 536ths. among: rows that may be asked."""
        apart = ((self.sizes - np.array(sizes)) ** 2).sum(axis=1)
        ratios = self.took_ps * _ONE // self.base_ps
        if among is not None:
            apart, ratios = apart[among], ratios[among]
        if (same := apart == 0).any():
            return int(ratios[same].sum()) // int(same.sum())
        nearest = np.argsort(apart, kind="stable")[:_NEAREST]
        weights = 10**9 // apart[nearest]
        return int((weights * ratios[nearest]).sum()) // int(weights.sum())

    def ps(self, load: Load, rates: Rates, among: NDArray[np.bool_] | None = None) -> int:
        ratio = _ratio(self, load.sizes) if among is None else self.ratio(load.sizes, among)
        return ceil_div((self.fastest_ps + base_ps(load, *rates)) * ratio, _ONE)


Rates = tuple[int, int]
"""Bytes and flops a second."""


@lru_cache(1 << 16)
def _ratio(kernel: Kernel, sizes: tuple[int, ...]) -> int:
    return kernel.ratio(sizes)


def base_ps(load: Load, bytes_per_s: int, flops_per_s: int) -> int:
    return ceil_div(load.num_bytes * PS_PER_S, bytes_per_s) + ceil_div(load.flops * PS_PER_S, flops_per_s)


@dataclass(frozen=True)
class Layer:
    """A MoE layer of one shape on one card."""

    fixed_ps: int
    expert_bytes: int
    rows: tuple[int, ...]
    """Of an expert, in 65 536ths, ascending from one row on."""
    expert_ps: tuple[int, ...]
    """Of an expert with so many rows."""

    def growing_ps(self, touched: int, pairs: int, num_bytes: int) -> int:
        """What `touched` experts with `pairs` rows in all add to the fixed time, if they hold num_bytes."""
        one = ceil_div(self.expert_ps[0] * num_bytes * _ONE, self.expert_bytes)
        rows = max(pairs * _ONE, touched * _ONE)  # of all of them
        before, at = one, self.rows[0]
        for then, ps in zip(self.rows[1:], self.expert_ps[1:], strict=True):
            # an expert with twice the rows takes at most twice as long, also where its bytes are few
            after = min(one + (ps - self.expert_ps[0]) * touched * _ONE, before * then // at)
            if rows <= then * touched:
                between = ceil_div((after - before) * (rows - at * touched), (then - at) * touched)
                return ceil_div(before + between, _ONE)
            before, at = after, then
        return ceil_div(before * rows, at * touched * _ONE)


def fitted(
    of: Kernel,
    shape: tuple[int, ...],
    weight_bits: tuple[int, int],
    rates: Rates,
    among: NDArray[np.bool_] | None = None,
) -> Layer:
    """shape: hidden, intermediate, chosen experts, experts. among: measured rows that may be asked."""
    hidden, wide, chosen, num_experts = shape
    expert_bytes = 3 * hidden * wide * weight_bits[0] // weight_bits[1] // 8
    pairs = [chosen * tokens for tokens in _TOKENS]
    touched = [min(each, num_experts) for each in pairs]
    loads = [experts(hidden, wide, t, p, t * expert_bytes) for t, p in zip(touched, pairs, strict=True)]
    took = never_falling([of.ps(load, rates, among) for load in loads])
    few, read = sum(each < 5 * num_experts for each in pairs), ceil_div(expert_bytes * PS_PER_S, rates[0])
    if touched[0] == touched[few - 1]:
        fixed = took[0] * of.fastest_ps // (of.fastest_ps + base_ps(loads[0], *rates))
        fixed = min(fixed, max(took[0] - touched[0] * read, 0))
        one = max((took[0] - fixed) // touched[0], read)
    else:
        fixed, one = _line(touched[:few], took[:few], read)
    rows, expert_ps = [_ONE], [one]
    for t, p, ps in zip(touched, pairs, took, strict=True):
        if p > t:
            rows.append(p * _ONE // t)
            expert_ps.append(min(max((ps - fixed) // t, expert_ps[-1]), expert_ps[-1] * rows[-1] // rows[-2]))
    return Layer(fixed, expert_bytes, tuple(rows), tuple(expert_ps))


@lru_cache(1024)
def layer(card: str, width: int, shape: tuple[int, ...], rates: Rates) -> Layer:
    """width: 16, 8 or 4, of EXPERTS."""
    names = EXPERTS[width]
    return fitted(kernel(card, *names), shape, BITS[names[-1]], rates)


@lru_cache(1024)
def _products(card: str, columns: int, depth: int, rates: Rates) -> list[int]:
    of = kernel(card, "gemm")
    return never_falling([of.ps(product(columns, depth, rows), rates) for rows in _ROWS])


def product_ps(card: str, columns: int, depth: int, rows: int, rates: Rates) -> int:
    return _between(_ROWS, _products(card, columns, depth, rates), rows)


@cache
def _all_reduces(card: str) -> list[tuple[int, list[int]]]:
    return sorted((shape[0], never_falling(times)) for shape, times in _lines()[card, "allreduce"])


def all_reduce_ps(card: str, num_gpus: int, num_bytes: int) -> int | None:
    """That of the next more GPUs that were measured; None: there are none."""
    found = next((times for gpus, times in _all_reduces(card) if gpus >= num_gpus), None)
    return None if found is None else _between(_REDUCED, found, num_bytes)


def spread_ps(card: str, kernel: str, shape: tuple[int, ...], tokens: int) -> int:
    """A layer whose experts lie whole on GPUs. shape: hidden, intermediate, chosen experts, experts, GPUs."""
    [found] = [times for of, times in _lines()[card, kernel] if of == shape]
    return _between(_TOKENS, never_falling(found), tokens)


def _between(known: Sequence[int], took: Sequence[int], asked: int) -> int:
    """A straight line between measured sizes, the first below them, in proportion beyond the last."""
    if asked >= known[-1]:
        return ceil_div(took[-1] * asked, known[-1])
    after = max(next(at for at, each in enumerate(known) if each > asked), 1)
    (low, high), (short, long) = known[after - 1 : after + 1], took[after - 1 : after + 1]
    return short + ceil_div((long - short) * (max(asked, low) - low), high - low)


def never_falling(times: Sequence[int]) -> list[int]:
    """The nearest such ones: runs that fall are their means (Ayer and others, Annals of Mathematical Statistics 26)."""
    runs: list[tuple[int, int]] = []
    for ps in times:
        runs.append((ps, 1))
        while len(runs) > 1 and runs[-2][0] * runs[-1][1] > runs[-1][0] * runs[-2][1]:
            (last, many), (before, more) = runs.pop(), runs.pop()
            runs.append((before + last, more + many))
    return [total // count for total, count in runs for _ in range(count)]


def _line(at: Sequence[int], took: Sequence[int], least: int) -> tuple[int, int]:
    """(at 0, slope) of least relative squares; the slope is `least` or more, neither is below 0."""
    weights = [10**40 // ps**2 for ps in took]
    s, st, stt, sy, sty = (
        sum(w * x**a * y**b for w, x, y in zip(weights, at, took, strict=True))
        for a, b in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
    )
    slope = max((s * sty - st * sy) // (s * stt - st * st), least)
    start = (sy - slope * st) // s
    return (start, slope) if start > 0 else (0, max(sty // stt, least))


@cache
def kernel(card: str, *names: str) -> Kernel:
    """One kernel of a card; with several names, the rows of all."""
    preset, cache_bytes = CARDS[card]
    gpu, best, there = load_hardware(preset).gpu, [], 0
    groups, places, sizes, bases, took = [], [], [], [], []
    for name in names:
        series = _lines()[card, name]
        fastest = min(ps for _, times in series for ps in times if ps)
        best.append(fastest)
        for shape, times in series:
            there += sum(map(bool, times))
            for at, ps in enumerate(times):
                load = _measured(name, shape, at)
                read = ceil_div(load.num_bytes * PS_PER_S, gpu.hbm_bytes_per_s)
                warm = ps < read or (load.num_bytes <= cache_bytes and 4 * read > fastest)
                if ps == 0 or warm or _disturbed(ps, times[at + 1 :]):
                    continue
                groups.append(shape)
                places.append(at)
                sizes.append(load.sizes)
                bases.append(fastest + base_ps(load, gpu.hbm_bytes_per_s, gpu.flops_per_s))
                took.append(ps)
    arrays = [np.array(values, np.int64) for values in (sizes, bases, took)]
    return Kernel(min(best), tuple(groups), tuple(places), arrays[0], arrays[1], arrays[2], there - len(groups))


@cache
def _lines() -> dict[tuple[str, str], list[tuple[tuple[int, ...], list[int]]]]:
    found: dict[tuple[str, str], list[tuple[tuple[int, ...], list[int]]]] = {}
    for line in FILE.read_text().splitlines():
        if not line.startswith(("#", "card,")):
            card, name, shape, times = line.split(",")
            ps = [0 if at == "-" else 1000 * int(at) for at in times.split()]
            found.setdefault((card, name), []).append((tuple(map(int, shape.split("x"))), ps))
    return found


def _disturbed(ps: int, later: Sequence[int]) -> bool:
    times, of = _DISTURBED
    return any(other > 0 and ps * of > times * other for other in later)


def _measured(name: str, shape: tuple[int, ...], at: int) -> Load:
    """The load of the row `at` along a kernel's axis: see the head of silicon.csv."""
    if name in BITS:
        hidden, intermediate, chosen, num_experts = shape
        pairs = chosen << at
        touched, (bits, of) = min(pairs, num_experts), BITS[name]
        return experts(hidden, intermediate, touched, pairs, touched * 3 * hidden * intermediate * bits // of // 8)
    if name == "gemm":
        return product(shape[0], shape[1], 4**at)
    tokens = 16 * 4**at
    if name == "latent":
        requests, heads = shape
        form, kv_tokens = msgspec.structs.replace(_LATENT, num_heads=heads), requests * tokens
        cached, flops = form.values_read(requests, kv_tokens), form.flops(requests, kv_tokens, kv_tokens)
        return latent(requests, form.weights(_HIDDEN), 2 * cached, flops, tokens)
    requests, heads, kv_heads, size = shape
    kv_values = 2 * kv_heads * size
    pairs = requests * (tokens if name.startswith("decode") else tokens * (tokens + 1) // 2)
    return attention(requests, heads, kv_values, 2 * requests * tokens * kv_values, 4 * pairs * heads * size, tokens)
