"""The rule of 2026's engines: an expert cache at any width; the link copies a miss or the host computes it.

FreeToken's rule (arXiv 2608.16157; llama.cpp forks and KTransformers have like ones): one LRU cache over all layers,
warmed by the prompt. The link copies some of the missing experts, the host's CPU computes the others: as many of each
as end the layer soonest. An idle link brings the experts that the host has computed, one after the other. Later copies
wait for the one on the link. With misses = host nothing is copied on demand: dynamic hot and cold experts, as exllamav3
has them. Caches and host hold experts at one width. The loop is csrc/shared_cache.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.units import PS_PER_S
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.host_cpu import HostCpu
from vllm_ndp.lab._shared_cache import run
from vllm_ndp.lab.systems.quantized import WEIGHT_BITS
from vllm_ndp.lab.systems.system import Memory, ReplayOptions, System, beside_host_memory, slots_bytes
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import gate_loss, on_gpu_ps, prompts_ps, shared_ps, without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic, layer_factor

MISSES = ("either", "host", "copy")
SCOPES = ("all", "layer")
HIT, COPIED, COMPUTED = 1, 2, 3


@dataclass(frozen=True)
class CacheRule:
    """How a cache is run."""

    bits: int
    """Bits of every expert, in the cache and on the host."""
    misses: str
    """either: copied or computed, what ends the layer sooner · host: computed · copy: copied."""
    scope: str
    """all: one cache for all layers · layer: one each."""
    fills: bool
    """Whether an idle link brings what the host has computed."""

    @classmethod
    def of(cls, options: ReplayOptions) -> CacheRule:
        bits = options.whole("cache_bits", 4, min(WEIGHT_BITS), max(WEIGHT_BITS))
        if bits not in WEIGHT_BITS:
            raise ConfigError(f"cache_bits must be one of {', '.join(map(str, WEIGHT_BITS))}, got {bits}")
        misses = options.word("misses_by", MISSES[0], MISSES)
        fills = options.word("fills", "idle", ("idle", "none")) == "idle"
        return cls(bits, misses, options.word("scope", SCOPES[0], SCOPES), fills)

    def places(self, costs: Costs, options: ReplayOptions) -> int:
        """Experts that the GPU's memory holds, of the whole model."""
        shape = costs.shape
        room = shape.num_layers * min(options.budget.num_hot, shape.num_experts) * shape.expert_bytes
        if options.gpu_bytes is not None:
            room = max(options.gpu_bytes - slots_bytes(shape, 0), room)
        return min(room // costs.replica_bytes(self.bits), shape.num_layers * shape.num_experts)


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """The host keeps every expert, at the same width."""
    rule, shape = CacheRule.of(options), costs.shape
    gpu = slots_bytes(shape, options.budget.num_hot) if options.gpu_bytes is None else options.gpu_bytes
    return Memory(gpu=gpu, host=shape.num_layers * shape.num_experts * costs.replica_bytes(rule.bits))


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    rule = CacheRule.of(options)
    policy = f"{rule.bits} bits, {rule.scope}, misses {rule.misses}" + ("" if rule.fills else ", no fills")
    return replay_cache("expert_cache", policy, rule, batches, costs, options)


def replay_cache(
    name: str, policy: str, rule: CacheRule, batches: Batches, costs: Costs, options: ReplayOptions
) -> Outcome:
    g, b, d, layers, _ = batches.shape
    loads, experts = batches.loads, batches.num_experts
    done, ends, filled = np.zeros(loads.rows.shape, np.uint8), np.zeros((g, d, layers)), np.zeros(g, np.int64)
    per_model = rule.places(costs, options) / layer_factor(batches, costs)
    places = int(per_model if rule.scope == "all" else per_model / layers)
    expert_bytes, cpu = costs.replica_bytes(rule.bits), HostCpu.of(costs)
    gpu = on_gpu_ps(costs, np.arange(b + 1)[:, None], expert_bytes)
    beside = np.broadcast_to(shared_ps(batches, costs)[:, :, 0], (g, d))
    run(
        loads.experts,
        loads.rows,
        _warmed(batches, options, rule, places),
        experts,
        places,
        rule.scope == "all",
        _before(batches, costs),
        np.ascontiguousarray(beside),
        batches.rows,
        gpu,
        cpu.experts_ps(costs, b, expert_bytes, cpu.memory_bytes_per_s),
        cpu.hops_ps(costs, b),
        float(costs.copy_opening_ps),
        expert_bytes * PS_PER_S / costs.hardware.link.bulk_bytes_per_s,
        rule.misses != "host",
        rule.misses != "copy",
        rule.fills,
        done,
        ends,
        filled,
    )
    here = (done == HIT) | (done == COPIED)
    computed = done == COMPUTED
    moved = (int((done == COPIED).sum()) + int(filled.sum())) * expert_bytes / costs.shape.expert_bytes
    quantized = rule.bits < FULL_PRECISION_BITS
    widths = np.full(batches.ids.shape, rule.bits if quantized else 0, np.uint8)
    pairs, hot = int(loads.rows.sum()), int(loads.rows[done == HIT].sum())
    cold = pairs if quantized else int(loads.rows[computed].sum())
    beside_rows = (add_up(np.where(computed, loads.rows, 0)) > 0) * batches.rows[:, :, None]
    return without_device(
        name,
        policy,
        batches,
        costs,
        moe_ps=np.maximum(ends - shared_ps(batches, costs), 0.0),
        gpu_ps=add_up(np.where(here, gpu[loads.rows], 0.0)),
        prefill_ps=_prompts_ps(batches, costs, expert_bytes),
        fetched_experts=moved,
        hot_pairs=hot,
        cold_bits=float(rule.bits * cold),
        cold_pairs=cold,
        loss=gate_loss(batches, widths, options.loss),
        traffic=Traffic(
            hbm_bytes=float(here.sum()) * expert_bytes,
            host_bytes=float(computed.sum()) * expert_bytes,
            link_bytes=float(beside_rows.sum()) * 2 * costs.shape.hidden_size * costs.shape.dtype_bytes,
        ),
        notes={"places": places, "copied": int((done == COPIED).sum()), "filled": int(filled.sum())},
    )


def _before(batches: Batches, costs: Costs) -> NDArray[np.float64]:
    """[G, D], what runs before each layer's experts; the head's share of a step is left out."""
    before = np.zeros(batches.rows.shape)
    for count in np.unique(batches.rows[batches.rows > 0]).tolist():
        here = batches.rows == count
        before[here] = costs.attention_ps(count, batches.kv_tokens[here])
    return before + costs.overhead_ps


def _warmed(batches: Batches, options: ReplayOptions, rule: CacheRule, places: int) -> NDArray[np.int64]:
    """Experts that the caches hold after the prompts, [G, P]: cells layer * E + expert.

    From the least used of the group's prompts to the most; popularity decides between equal ones.
    """
    g, _, _, layers, _ = batches.shape
    counts = np.array([np.sum([prompt.counts for prompt in group], axis=0) for group in batches.prompts], np.float64)
    worth = counts + options.prior.values / (1.0 + float(options.prior.values.max()))
    if rule.scope == "all":
        order = np.argsort(-worth.reshape(g, -1), axis=1, kind="stable")[:, :places]
    else:
        ranked = np.argsort(-worth, axis=2, kind="stable")[:, :, :places]
        order = (ranked + np.arange(layers)[:, None] * batches.num_experts).reshape(g, -1)
        order = order.reshape(g, layers, -1).transpose(0, 2, 1).reshape(g, -1)
    return np.ascontiguousarray(order[:, ::-1], np.int64)


def _prompts_ps(batches: Batches, costs: Costs, expert_bytes: int) -> NDArray[np.float64]:
    """[G, B]: every expert of a prompt comes over the link, or the host computes it; by layer the sooner of both."""
    cpu = HostCpu.of(costs)
    fetch = costs.fetch_ps(expert_bytes)

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        copied = np.maximum((counts > 0).sum(axis=1) * fetch, on_gpu_ps(costs, counts, expert_bytes))
        times: NDArray[np.float64] = np.minimum(copied, cpu.layers_ps(costs, counts, expert_bytes))
        return times

    return prompts_ps(batches, costs, layers_ps)


EXPERT_CACHE = System(
    "expert_cache",
    (
        "one LRU over all layers (scope=layer: one each), begun with what the group's prompts used most",
        "each layer's misses are copied or computed by the host, as many of each as end it soonest; heaviest copied",
        "an idle link brings what the host computed, the newest first; what it carries delays later copies",
        "prompts stream every expert, or the host computes it; CPU kernels read narrow experts at full memory rate",
    ),
    False,
    replay,
    memory,
    fills_memory=True,
)


def replay_hybrimoe(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """HybriMoE (arXiv 2504.05897): the same rule in full precision, with a cache of num_hot experts per layer.

    The published greedy schedule approximates the division of misses. The published cache lets the lowest recent score
    leave (MRS); here the least recently used does.
    """
    rule = CacheRule(FULL_PRECISION_BITS, "either", "layer", fills=True)
    return replay_cache("hybrimoe", "CPU, link and cache", rule, batches, costs, options)


HYBRIMOE = System(
    "hybrimoe",
    (
        "the best prefix of misses by load is copied; the published greedy schedule comes near it",
        "copies that fill the cache occupy the link; the least recently used expert leaves",
        "no prefetch of later layers",
    ),
    False,
    replay_hybrimoe,
    beside_host_memory,
)
