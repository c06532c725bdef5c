"""A model and a machine whose times are round numbers, and traces written down choice by choice, for pencil and paper.

An expert is 6 MB in 16 bits: 10 us over the link (F), 1 us on the GPU (C), 20 us from host
memory. Attention takes less than 10 ns.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ndp_device.common.decoder_layers import DecoderLayer, GroupedQuery
from ndp_device.common.model_shape import WholeModel
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.systems import SYSTEMS, ReplayOptions
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.cache import NextLayer
from vllm_ndp.lab.vectorised.outcome import Outcome
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.traces.format import Provenance
from vllm_ndp.traces.trace import Sequence, Trace, from_sequences

US = 1e6  # ps
F, C = 10 * US, 1 * US
HARDWARE = load_hardware(
    "h100-ndp512",
    **{
        "link.raw_bytes_per_s": 600_000_000_000,
        "link.bulk_bytes_per_s": 600_000_000_000,
        "link.dma_launch_ps": 0,
        "link.dma_latency_ps": 0,
        "link.completion_ps": 0,
        "gpu.hbm_bytes_per_s": 6_000_000_000_000,
        "host.memory_bytes_per_s": 300_000_000_000,
        "host.memory_efficiency_percent": 100,
        "dram.kind": "ideal",
        "dram.ideal_bytes_per_s": 600_000_000_000,
    },
)


def machine(num_layers: int = 1, top_k: int = 2) -> Costs:
    layer = DecoderLayer(attention=GroupedQuery(num_heads=1, num_kv_heads=1, head_dim=1))
    sizes = num_layers, 4, top_k, 1000, 1000
    return Costs(HARDWARE, WholeModel("by hand", *sizes, vocab_size=1, decoder=(layer,) * num_layers))


def chosen(*steps: list[list[int]]) -> np.ndarray:
    """One [L][k] per step."""
    return np.array(steps, np.int64)


def requests_of(
    requests: Iterable[tuple[np.ndarray, np.ndarray]], num_experts: int, weights: Iterable[np.ndarray] | None = None
) -> Trace:
    """Requests of (prompt, decode) [T, L, k] each; gate weights are equal unless given, of decode alone."""
    requests = [(np.asarray(prompt), np.asarray(decode)) for prompt, decode in requests]
    gates = [_equal(decode) for _, decode in requests] if weights is None else list(weights)
    sequences = [
        Sequence("", 0.0, prompt, _equal(prompt), decode, gates[r].astype(np.float32))
        for r, (prompt, decode) in enumerate(requests)
    ]
    layers, top_k = requests[0][0].shape[1:]
    provenance = Provenance(model="by hand", num_layers=layers, num_experts=num_experts, top_k=top_k)
    return from_sequences(provenance, sequences)


def _equal(ids: np.ndarray) -> np.ndarray:
    return np.full(ids.shape, 1 / ids.shape[2], np.float32)


def trace(prompt: np.ndarray, decode: np.ndarray, weights: np.ndarray | None = None) -> Batches:
    """One request of a model with four experts; gate weights are equal unless given."""
    return Batches.of(requests_of([(prompt, decode)], 4, None if weights is None else [weights]))


def options_of(
    batches: Batches,
    num_hot: int,
    prior: list[list[float]] | None = None,
    loss: LossTable | None = None,
    predictor: NextLayer | None = None,
    **own: float | str,
) -> ReplayOptions:
    layers, experts = batches.shape[3], batches.num_experts
    known = ImportanceScore.from_weights(
        np.array(prior) if prior else np.tile(np.arange(experts, 0, -1.0), (layers, 1))
    )
    return ReplayOptions(
        policy=load_policy("prefill", PolicySettings(prior=known)),
        budget=Budget(num_hot, 2.0),
        loss=loss or LossTable.nominal(layers, experts),
        prior=known,
        predictor=predictor,
        own=own,
    )


def run(system: str, batches: Batches, costs: Costs, num_hot: int, *known: Any, **options: Any) -> Outcome:
    """known and options: as options_of."""
    return SYSTEMS[system].replay(batches, costs, options_of(batches, num_hot, *known, **options))
