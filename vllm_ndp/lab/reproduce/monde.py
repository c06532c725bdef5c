"""MoNDE (arXiv 2405.18832): what its published speed-ups over moving parameters can and cannot be, on its own hardware.

The baseline is a framework that copies the experts in use to the GPU. Published, with 128 experts: up to 7.5 times as
fast in encoders and 3.7 times in decoders. Source: its abstract and third-party summaries; its full text could not be
read. Its two limits follow from its rule alone. The gain of few rows is a ratio of bandwidths. The gain of many rows
ends where the units compute as long as the link copies. Knows one layer of equally loaded experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.reproduce import Reproduction, Row
from vllm_ndp.lab.systems.near_memory import moved_share

ENCODER, DECODER, EXPERTS = 7.5, 3.7, 128
LINK, DEVICE = 32e9, 512e9
"""Peak rates of its public re-implementation, bytes/s."""
MOST_ROWS = 64


def gain_by_rows(costs: Costs, active: int) -> NDArray[np.float64]:
    """Speed-up of MoNDE's rule (the best H) over copying every expert, [MOST_ROWS].

    For a layer of `active` experts with 1, 2, ... rows each.
    """
    device, gpu = costs.device_experts_ps(MOST_ROWS)[FULL_PRECISION_BITS], costs.gpu_experts_ps(MOST_ROWS)
    moved = np.arange(active + 1)
    gains = []
    for rows in range(1, MOST_ROWS + 1):
        first = min(costs.copy_ps, gpu[rows]) * (moved > 0)  # nothing to compute yet, or nothing left to copy
        copied = moved * max(costs.copy_ps, gpu[rows]) + first
        stays = (active - moved) * device[rows]
        gains.append(copied[-1] / np.maximum(copied, stays).min())
    return np.array(gains)


def rows_of_models() -> Iterator[Row]:
    for name in ("mixtral-8x7b", "qwen3-30b-a3b"):
        costs = Costs(load_hardware("h100-ndp512", times="roofline"), model_named(name))
        gains = gain_by_rows(costs, EXPERTS)
        text = f"experts of {name}, {EXPERTS} of them in use with as many rows each, best H"
        yield Row(name, "experts of a layer, 1 row each", "x", None, float(gains[0]), text)
        yield Row(name, "the same, 16 rows each", "x", None, float(gains[15]), text)
        enough = int(np.argmax(gains <= ENCODER)) + 1 if (gains <= ENCODER).any() else MOST_ROWS
        yield Row(name, "rows per expert that leave the published 7.5x", "rows", None, float(enough), text)
        yield Row(name, "H of the rule, share of active experts", "%", None, 100 * moved_share(costs), "preset's rates")


def reproduce() -> Reproduction:
    limit = (LINK + DEVICE) / LINK
    share = (1 / DECODER - 1 / limit) / (1 - 1 / limit)
    peak = "peak rates: 32 GB/s of link, 512 GB/s of device"
    return Reproduction(
        "MoNDE, arXiv 2405.18832",
        (
            Row("rule", "H, share of active experts", "%", None, 100 * LINK / (LINK + DEVICE), peak),
            Row("limit", "experts of a layer, few rows each", "x", None, limit, f"both sides at once, {peak}"),
            Row(
                "decoder", "share of the baseline's time that is no copy", "%", None, 100 * share,
                f"implied by {DECODER:g}x if experts gain {limit:g}x and the rest nothing",
            ),
            *rows_of_models(),
        ),
        (
            "a decoder gains 3.7x only where more than a fifth of the baseline's time is no copy: encoder-decoder "
            "models with experts in every second or fourth layer, or a cache. For a decoder of experts in every layer "
            "without a cache the same rule gives the limit, which is what `compare` shows of monde and gpu_on_demand",
            "an encoder's 7.5x is inside what the rule gives between few rows per expert and as many as the units can "
            "keep up with; its own batch and lengths could not be read, so it is neither confirmed nor refuted",
            "MoNDE's units, link and memory are the preset's; its models (Switch, NLLB-MoE) are not among our shapes, "
            "and a ratio of copies and reads of one expert does not depend on the expert's size",
        ),
    )  # fmt: skip
