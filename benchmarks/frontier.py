"""Which system decodes fastest on a GPU of so many GB: where near-data computing pays, and where it does not.

Every system gets the whole GPU memory beside attention and KV cache. The host holds every model, the device what its
preset says: a system that needs more of it has no row. Joint plans are made for the device, for the host, and for both,
within each limit of loss; the paper's plan has the paper's own rule of bits. For public shapes on synthetic routing and
the cards that have so much memory. What docs/map.md rests on; of a trace, `compare --memory 16,24,48 --fit` says as
much. Knows rows of `compare`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ndp_device.common.errors import NdpError
from ndp_device.timing.public_models import public_shape
from vllm_ndp.lab.compare import Replays, Workload
from vllm_ndp.lab.options import CAPACITY, GB, CompareSettings
from vllm_ndp.lab.vectorised.outcome import Summary
from vllm_ndp.planning.bitwidths import nominal_loss
from vllm_ndp.traces.synthetic import read_routing, synthetic_trace

SYSTEMS = (
    "balanced",
    "quantized",
    "dynaexq",
    "expert_cache",
    "hybrimoe",
    "ktransformers",
    "llama_cpp",
    "fiddler",
    "vllm_offload",
)
DEVICE = ("balanced", "joint")
"""Systems that may use the device."""
CARDS = {
    8: "rtx4060ti-8gb",
    16: "rtx4060ti-16gb",
    24: "rtx4090",
    32: "rtx5090",
    48: "l40s",
    80: "h100-ndp512",
    96: "rtxpro6000",
}
"""GB -> the preset of a card that has them."""
TIERS = ("gpu+device", "gpu+host", "gpu+host+device")
AVG_BITS = 3.0
LIMITS = {"4 bits": nominal_loss(4), "3 bits": nominal_loss(3)}
"""Loss of all experts at that width, in units of 1 bit."""
_PLANS, _MARGIN = 5, 0.002
"""The most joint plans for one limit of loss, and how much further than by the excess the next may expect to lose less.
The first expects to lose the limit, as one width for all does. Requests may lose more than predicted."""
_SLACK = 1e-6
_LAYERS = 8
ROOMY: dict[str, str | int] = {
    "host.memory_capacity_bytes": 2 * 10**12,
    "host.cxl_capacity_bytes": 2 * 10**12,
}
SHAPES = ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b", "qwen3-235b-a22b", "deepseek-v3")
"""From small to large, with few large experts and with many small ones."""

OWN_BITS = {"gpt-oss-20b": 4, "gpt-oss-120b": 4, "deepseek-v3": 8}
"""Models that were released with narrow experts: at that width and above they lose nothing."""


@dataclass(frozen=True)
class Cell:
    """One model on one size of GPU memory; no rows where not even attention fits."""

    model: str
    memory_gb: int
    rows: tuple[Summary, ...]
    """Fastest first."""


def frontier(
    workload: Workload,
    settings: CompareSettings,
    memory_gb: Iterable[int],
    cards: Mapping[int, str] | None = None,
) -> list[Cell]:
    """A cell per size, with the settings' model, first batch size and hardware, or the card of that size."""
    num_experts = workload.trace.provenance.num_experts
    cells = []
    for size in memory_gb:
        at = replace(
            settings,
            hardware=(cards or {}).get(size, settings.hardware),
            overrides={**settings.overrides, **ROOMY, CAPACITY: size * GB},
            systems=SYSTEMS,
            policies=("prefill",),
            batches=settings.batches[:1],
            num_hot=num_experts,
            avg_bits=AVG_BITS,
            policy_options={"bit_rule": "importance"},
            fit=True,
            options={},
        )
        try:
            replays = Replays(workload, at)
        except NdpError:
            cells.append(Cell(settings.model, size, ()))
            continue
        rows = [replays.replay(one).row for one in replays.planned]
        rows += [
            row for tiers in TIERS for limit in LIMITS.values() for row in _joint_within(workload, at, tiers, limit)
        ]
        rows = [_as_released(row, settings.model) for row in rows]
        cells.append(Cell(settings.model, size, tuple(sorted(rows, key=lambda row: -row.decode_tokens_per_s))))
    return cells


def frontier_of_shapes(
    models: Iterable[str],
    settings: CompareSettings,
    memory_gb: Iterable[int] = tuple(CARDS),
    routing: str = "auto",
    cards: Mapping[int, str] = CARDS,
    seed: int = 0,
) -> list[Cell]:
    """The cells of public shapes on cards: synthetic routing of each one's experts, eight layers that stand for all."""
    batch = settings.batches[0]
    cells, sizes, named = [], tuple(memory_gb), tuple(models)
    for model in named:
        public_shape(model)  # refused before the first of them takes its time
    for model in named:
        sizes_of = {"num_layers": _LAYERS, "num_requests": 6 if batch <= 4 else 3 * batch // 2, "prompt_len": 256}
        trace = synthetic_trace(
            read_routing(routing, model).settings(model, **sizes_of, decode_len=64, seed=seed), model
        )
        at = replace(settings, model=model, overrides={**settings.overrides, "dram.kind": "ideal"}, batches=(batch,))
        cells += frontier(Workload(trace), at, sizes, cards=cards)
    return cells


def _joint_within(workload: Workload, settings: CompareSettings, tiers: str, limit: float) -> Iterator[Summary]:
    """Joint plans, each expected to lose less than the one before, until one keeps the limit."""
    most = limit
    for _ in range(_PLANS):
        rows = _joint(workload, settings, tiers, most)
        yield from rows
        if not rows or rows[0].loss <= limit * (1 + _SLACK):
            return
        most *= limit / rows[0].loss * (1 - _MARGIN)


def _joint(workload: Workload, settings: CompareSettings, tiers: str, most: float) -> list[Summary]:
    """The joint plan's row at an expected loss; none where it does not fit."""
    at = replace(
        settings,
        systems=("joint",),
        policies=("prefill_shrunk",),
        policy_options={"bit_rule": "importance", "calibrate": True},
        options={"max_gate_loss": most, "tiers": tiers},
    )
    try:
        replays = Replays(workload, at)
        return [replays.replay(one).row for one in replays.planned]
    except NdpError:
        return []


def _as_released(row: Summary, model: str) -> Summary:
    own = OWN_BITS.get(model)
    widths = [int(bits) for bits in re.findall(r"(\d+)(?= bits| over|$)", row.policy)]
    if own is None or row.system in DEVICE or not widths or min(widths) < own:
        return row
    return replace(row, loss=0.0)
