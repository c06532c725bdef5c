"""Seed 002's three schemes and its sweep again, replayed from a trace instead of summed up: one step of 1024 tokens.

The tokens are drawn from the same Zipf(1.5) that the closed form takes the expectation of. The systems that `compare`
runs read, copy and multiply every used expert. Link, CPU and expander have seed 002's rates: 5 us of GPU, 50 us of CPU
and 500 us of expander per token. Activations are packed as measured, not by the constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ndp_device.common.decoder_layers import DecoderLayer, GroupedQuery
from ndp_device.common.model_shape import WholeModel
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.reproduce.row import Row
from vllm_ndp.lab.systems.cxl_expert import CXL_EXPERT
from vllm_ndp.lab.systems.gpu_on_demand import GPU_ON_DEMAND
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.outcome import Outcome
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.traces.format import Provenance
from vllm_ndp.traces.trace import Sequence, from_sequences

Options = dict[str, float | str]

HIDDEN, INTERMEDIATE = 1024, 32552  # three fp16 matrices: 200 MB
COSTS = Costs(
    load_hardware(
        "seed002-cxl-amx",
        **{
            "gpu.flops_per_s": 40_000_000_000_000,
            "host.cpu_flops_per_s": 4_000_000_000_000,
            "host.cxl_flops_per_s": 400_000_000_000,
        },
    ),
    WholeModel(
        "seed 002",
        *(1, 128, 1, HIDDEN, INTERMEDIATE),
        vocab_size=1,
        decoder=(DecoderLayer(attention=GroupedQuery(num_heads=1, num_kv_heads=1, head_dim=1)),),
    ),
)


@lru_cache(1)
def drawn(tokens: int, zipf: float, seed: int = 0) -> tuple[Batches, ImportanceScore]:
    """(one step of so many tokens, what is known of popularity: their very counts)."""
    experts = COSTS.shape.num_experts
    popularity = np.arange(1, experts + 1) ** -zipf
    chosen = np.random.default_rng(seed).choice(experts, size=tokens, p=popularity / popularity.sum())
    one = np.ones((1, 1, 1), np.float32)
    sequences = [
        Sequence(number, "", 0.0, ids, one, ids, one) for number, ids in enumerate(chosen.reshape(tokens, 1, 1, 1))
    ]
    provenance = Provenance(model="seed 002", num_layers=1, num_experts=experts, top_k=1)
    counts = np.bincount(chosen, minlength=experts).astype(np.float64)
    return Batches.of(from_sequences(provenance, sequences), tokens), ImportanceScore.from_weights(counts[None])


def replayed(system: System, tokens: int, zipf: float, own: Options, num_hot: int = 0) -> Outcome:
    batches, prior = drawn(tokens, zipf)
    options = ReplayOptions(
        policy=load_policy("static", PolicySettings(prior=prior)),
        budget=Budget(num_hot, 2.0),
        loss=LossTable.nominal(1, COSTS.shape.num_experts),
        prior=prior,
        own=own,
    )
    return system.replay(batches, COSTS, options)


@lru_cache(1)
def trace_rows(tokens: int, zipf: float, percentiles: tuple[float, ...]) -> tuple[Row, ...]:
    return tuple(_rows(tokens, zipf, percentiles))


def _rows(tokens: int, zipf: float, percentiles: tuple[float, ...]) -> Iterator[Row]:
    def ms(outcome: Outcome) -> float:
        return float(outcome.moe_ps.sum()) / 1e9

    used = int((drawn(tokens, zipf)[0].loads.rows > 0).sum())
    text = f"replayed; the {tokens} tokens drawn use {used} of 128 experts"
    yield Row("replayed baseline", "latency", "ms", 805.0, ms(replayed(GPU_ON_DEMAND, tokens, zipf, {})), text)
    near: Options = {"near_data": "on", "tiers": "fixed", "warm_share": 0.0, "percentile": 100.0}
    text = "replayed: all experts in the expander at 4 bits, none loaded; the CPU is faster than its 500 us a token"
    yield Row("replayed mondelike", "latency", "ms", 48.0, ms(replayed(CXL_EXPERT, tokens, zipf, near)), text)
    still: Options = {"tiers": "fixed"}
    for percentile in percentiles:
        outcome = replayed(CXL_EXPERT, tokens, zipf, still | {"percentile": float(percentile)})
        text = "replayed: experts above the percentile of load are loaded, GPU and host at once"
        published = 213.0 if percentile == 75 else None
        yield Row(f"replayed {percentile}%", "latency", "ms", published, ms(outcome), text)
    adaptive = replayed(CXL_EXPERT, tokens, zipf, still)
    loaded = adaptive.migrated_bytes / COSTS.shape.expert_bytes
    text = f"replayed: the threshold of least time loads {loaded:.0f} experts"
    yield Row("replayed adaptive", "latency", "ms", None, ms(adaptive), text)
    text = "the least time of any threshold, a percentile of load"
    yield Row("replayed adaptive", "best percentile", "%", 75.0, 100 * (1 - loaded / 128), text)
    plain = replayed(CXL_EXPERT, tokens, zipf, still | {"activation_bits": 16.0})
    text = (
        "replayed: packed activations against 16-bit ones, each at its best threshold; published for all quantisation"
    )
    yield Row("replayed adaptive", "activations at 8 bits", "x", 1.5, ms(plain) / ms(adaptive), text)
    resident = replayed(CXL_EXPERT, tokens, zipf, still, num_hot=32)
    text = "replayed: the 32 hottest stay in GPU memory, as the text says and its figure does not"
    yield Row("replayed, 32 resident", "latency", "ms", None, ms(resident), text)
