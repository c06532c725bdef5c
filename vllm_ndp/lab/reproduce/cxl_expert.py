"""Seed 002 (CXL-Expert): its three latencies, its sweep under two assumption sets and from a trace, and real bytes.

128 experts, top-1, 1024 tokens with Zipf(1.5) popularity, expected counts. "50 us per cold expert" and "24 MB of
activations per expert" are fitted: the text gives neither, but nothing else reproduces 213 and 48 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.lab.reproduce.cxl_trace import trace_rows
from vllm_ndp.lab.reproduce.row import Reproduction, Row

NUM_EXPERTS, TOKENS, ZIPF = 128, 1024, 1.5
GPU_TOKEN_S, CPU_TOKEN_S = 5e-6, 50e-6
PCIE, CXL = 32e9, 64e9
PERCENTILES = (0, 25, 50, 75, 90, 95, 97, 99, 100)


@dataclass(frozen=True)
class Sizes:
    """Bytes of an expert's weights and of the activations it exchanges."""

    weights: float = 200e6
    activations: float = 24e6
    cold_expert_s: float = 50e-6


PHYSICAL = Sizes(weights=2 * 1024 * 2048 * 2, activations=1024 * 1024 * 2 / NUM_EXPERTS, cold_expert_s=50e-6)
"""Two fp16 matrices of 1024 x 2048, and each expert's share of 1024 fp16 vectors of 1024."""


def expected_tokens() -> NDArray[np.float64]:
    """Tokens of each expert, most popular first."""
    popularity = np.arange(1, NUM_EXPERTS + 1) ** -ZIPF
    tokens: NDArray[np.float64] = TOKENS * popularity / popularity.sum()
    return tokens


def baseline_s(sizes: Sizes) -> float:
    """GPU only: every expert is loaded in every step, then each token costs 5 us."""
    return NUM_EXPERTS * sizes.weights / PCIE + TOKENS * GPU_TOKEN_S


def mondelike_s(sizes: Sizes) -> float:
    """Activations only, no compute."""
    return NUM_EXPERTS * sizes.activations / CXL


def cxl_expert_s(sizes: Sizes, percentile: float = 75.0, weight_ratio: float = 1.0) -> float:
    """Experts above the percentile are loaded to the GPU (at weight_ratio of their size), the others run on the CPU."""
    num_hot = round(NUM_EXPERTS * (1 - percentile / 100))
    tokens = expected_tokens()
    load = num_hot * sizes.weights * weight_ratio / PCIE
    compute = tokens[:num_hot].sum() * GPU_TOKEN_S + tokens[num_hot:].sum() * CPU_TOKEN_S
    return float(load + compute + (NUM_EXPERTS - num_hot) * sizes.cold_expert_s)


def side_by_side_s(sizes: Sizes, percentile: float = 75.0, compression: float = 1.0) -> float:
    """GPU and host at the same time, the slower one counts. A cold expert lies in the expander at 8 bits, divided by
    compression as its activations are; the host reads both at the expander's rate. Sizes and rates are the source's;
    which of them apply was chosen among 48 combinations, 12 of which peak at 70-80 % within 8 % of 213 ms.
    """
    num_hot = round(NUM_EXPERTS * (1 - percentile / 100))
    tokens = expected_tokens()
    gpu = num_hot * sizes.weights / PCIE + tokens[:num_hot].sum() * GPU_TOKEN_S
    cold = (sizes.weights / 2 + sizes.activations) / compression / CXL
    return float(max(gpu, (NUM_EXPERTS - num_hot) * cold + tokens[num_hot:].sum() * CPU_TOKEN_S))


def _best_percentile(sizes: Sizes, compression: float = 1.0) -> float:
    percentiles = [100 * (1 - num_hot / NUM_EXPERTS) for num_hot in range(NUM_EXPERTS + 1)]
    return min(percentiles, key=lambda percentile: side_by_side_s(sizes, percentile, compression))


def reproduce_cxl_expert(physical: bool = False) -> Reproduction:
    sizes = PHYSICAL if physical else Sizes()
    published = (None, None, None) if physical else (805.0, 48.0, 213.0)
    size = f"{sizes.weights / 1e6:.2f} MB per expert, {sizes.activations / 1e6:.3g} MB of activations"
    baseline, ideal, ours = baseline_s(sizes), mondelike_s(sizes), cxl_expert_s(sizes)
    rows = [
        Row("baseline", "latency", "ms", published[0], 1e3 * baseline, f"all 128 experts every step over PCIe; {size}"),
        Row("mondelike", "latency", "ms", published[1], 1e3 * ideal, f"128 x activations over CXL, no compute; {size}"),
        Row(
            "cxl_expert",
            "latency",
            "ms",
            published[2],
            1e3 * ours,
            "25 % of experts loaded, 50 us per cold expert (fitted)",
        ),
        Row("baseline", "throughput", "tokens/s", None if physical else 1270.0, TOKENS / baseline, size),
        Row("mondelike", "throughput", "tokens/s", None if physical else 21300.0, TOKENS / ideal, size),
        Row("cxl_expert", "throughput", "tokens/s", None if physical else 4800.0, TOKENS / ours, size),
        Row("cxl_expert", "over baseline", "x", None if physical else 3.8, baseline / ours, size),
        Row("mondelike", "over cxl_expert", "x", None if physical else 4.4, ours / ideal, size),
    ]
    rows += _sweep(sizes)
    rows += _side_by_side(sizes, published=not physical)
    if not physical:
        rows += trace_rows(TOKENS, ZIPF, PERCENTILES)
    rows += [
        Row(
            f"weights / {factor}",
            "over unquantised",
            "x",
            1.5 if factor == 2 and not physical else None,
            ours / cxl_expert_s(sizes, weight_ratio=1 / factor),
            "hot loads shrink too; with cold experts only nothing would change, 200 of 213 ms are hot loads",
        )
        for factor in (2, 4)
    ]
    return Reproduction("CXL-Expert (seed 002)" + (", real bytes" if physical else ""), tuple(rows), NOTES)


def _side_by_side(sizes: Sizes, *, published: bool) -> Iterator[Row]:
    name = "side by side"
    text = "GPU and host at once; cold weights (8 bits) and activations cross CXL"
    best = _best_percentile(sizes)
    yield Row(name, "latency", "ms", 213.0 if published else None, 1e3 * side_by_side_s(sizes), text)
    yield Row(name, "best percentile", "%", 75.0 if published else None, best, text)
    for percentile in PERCENTILES:
        yield Row(f"{name} {percentile}%", "latency", "ms", None, 1e3 * side_by_side_s(sizes, percentile), text)
    for factor in (2, 4):
        tuned = side_by_side_s(sizes, _best_percentile(sizes, factor), factor)
        gain = side_by_side_s(sizes, best) / tuned
        quantity = f"cold bytes / {factor}, each at its best percentile"
        yield Row(name, quantity, "x", 1.5 if published and factor == 2 else None, gain, text)


def _sweep(sizes: Sizes) -> Iterator[Row]:
    for percentile in PERCENTILES:
        yield Row(
            f"sweep {percentile}%",
            "latency",
            "ms",
            None,
            1e3 * cxl_expert_s(sizes, percentile),
            "experts above the percentile of load are hot",
        )


NOTES = (
    "the baseline loads all 128 experts in every step, which contradicts 'hot experts are cached' and 'transferred "
    "when selected': Zipf(1.5) top-1 touches about 78 of them",
    "with the costs one after the other, which give 213 ms, the sweep has no peak at 75 %: latency falls with the "
    "percentile until 97-99 %; with GPU and host side by side it peaks at 77 %, and 75 % takes 204.8 ms",
    "replayed token by token the baseline loads 80 experts, not 128 (500 ms); at 75 % 32 loads are 200 of 200 ms as "
    "published; the best threshold loads 8 of them (94 %, 50 ms), and with all experts in the expander 97 ms: "
    "the CPU computes them from there, for at the stated 2 TFLOP/s, 500 us a token, the expander itself needs over 512",
    "a higher percentile makes fewer experts hot, yet the text calls 100 % 'all on the GPU'",
    "1.5x from quantising cold experts does not come out one after the other, where 200 of 213 ms are loads of hot "
    "ones; side by side it is 1.7x with the threshold set anew and 1.0x without, and / 4 does not level off (2.9x)",
    "the side by side reading uses the stated sizes and rates; which apply was chosen among 48 combinations",
    "two fp16 matrices of 1024 x 2048 are 8.39 MB, not 200 MB: with real bytes the baseline takes 38.7 ms and the "
    "'ideal' 48 ms loses to it",
    "1024 fp16 vectors of 1024 are 2.1 MB, not 24 MB",
    "213 / 48 = 4.4, the abstract says within 4x; PCIe 5.0 x16 is 64 GB/s, 32 is Gen4",
    "50 us per CPU token is unrelated to 20 TFLOP/s: the stated matrices cost 8.4 MFLOP, 0.42 us",
    "'commodity' memory cannot multiply, yet one variant does",
)
