"""The rule of 2026's engines: an expert cache at any width; the link copies a miss or the host computes it.

FreeToken's rule (arXiv 2608.16157; llama.cpp forks and KTransformers have like ones): one LRU cache over all layers,
warmed by the prompt. The link copies some of the missing experts, the host's CPU computes the others: as many of each
as end the layer soonest. An idle link brings the experts that the host has computed, one after the other. Later copies
wait for the one on the link. With misses = host nothing is copied on demand: dynamic hot and cold experts, as exllamav3
has them. Caches and host hold experts at one width.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.work import PS_PER_S
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory
from vllm_ndp.lab.systems.quantized import WEIGHT_BITS
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, add_up
from vllm_ndp.lab.vectorised.execution import cold_at, on_gpu_ps, prompts_ps, shared_ps, without_device
from vllm_ndp.lab.vectorised.outcome import Cold, Outcome, Traffic, attention_ps, layer_factor

MISSES = ("either", "host")
SCOPES = ("all", "layer")
HIT, COPIED, COMPUTED = 1, 2, 3
MOST_WAITING = 64
"""Experts that an idle link may still bring, the newest."""


@dataclass(frozen=True)
class CacheRule:
    """How a cache is run."""

    bits: int
    """Bits of every expert, in the cache and on the host."""
    misses: str
    """either: copied or computed, what ends the layer sooner · host: computed."""
    scope: str
    """all: one cache for all layers · layer: one each."""

    @classmethod
    def of(cls, options: ReplayOptions) -> CacheRule:
        bits = options.choice("cache_bits", WEIGHT_BITS, 4)
        return cls(bits, options.choice("misses_by", MISSES), options.choice("scope", SCOPES))

    def places(self, costs: Costs, options: ReplayOptions) -> int:
        """Experts that the GPU's memory holds, of the whole model."""
        every = costs.shape.num_layers * costs.shape.num_experts
        return min(options.room(costs) // costs.replica_bytes(self.bits), every)


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """The host keeps every expert, at the same width."""
    rule, shape = CacheRule.of(options), costs.shape
    return Memory(options.gpu_memory(costs), host=shape.num_layers * shape.num_experts * costs.replica_bytes(rule.bits))


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    rule = CacheRule.of(options)
    return replay_cache(f"{rule.bits} bits, {rule.scope}, misses {rule.misses}", rule, batches, costs, options)


def replay_cache(policy: str, rule: CacheRule, batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    g, b, d, layers, _ = batches.shape
    loads, experts = batches.loads, batches.num_experts
    per_model = rule.places(costs, options) / layer_factor(batches, costs)
    places = int(per_model if rule.scope == "all" else per_model / layers)
    expert_bytes = costs.replica_bytes(rule.bits)
    gpu = costs.gpu_experts_ps(b, expert_bytes)
    beside = np.broadcast_to(shared_ps(batches, costs)[:, :, 0], (g, d))
    prices = Prices(
        gpu.tolist(),
        costs.cpu_experts_ps(np.arange(b + 1), expert_bytes).tolist(),
        costs.hops_ps(b).tolist(),
        float(costs.copy_opening_ps),
        expert_bytes * PS_PER_S / costs.hardware.link.bulk_bytes_per_s,
        float(costs.launch_ps(expert_bytes)),
    )
    done, ends, filled = np.zeros(loads.rows.shape, np.uint8), np.zeros((g, d, layers)), 0
    start = _warmed(batches, options, rule, places)
    before = attention_ps(batches, costs) + costs.overhead_ps  # each layer's experts; the head's share is left out
    for group in range(g):
        caches = _Caches(rule, prices, experts, layers, places, start[group].tolist())
        now = 0.0
        for step, running in enumerate(batches.rows[group].tolist()):
            each_layer = zip(loads.experts[group, step].tolist(), loads.rows[group, step].tolist(), strict=True)
            for layer, (ids, rows) in enumerate(each_layer):
                now += float(before[group, step])
                caches.receive(now)
                took, done[group, step, layer] = caches.layer(
                    layer, ids, rows, running, float(beside[group, step]), now
                )
                if running:
                    ends[group, step, layer] = took
                    now += took
        filled += caches.filled
    on_gpu = (done == HIT) | (done == COPIED)
    computed = done == COMPUTED
    moved = (int((done == COPIED).sum()) + filled) * expert_bytes / costs.shape.expert_bytes
    cold = Cold(float(rule.bits * loads.rows[computed].sum()), int(loads.rows[computed].sum()))
    if rule.bits < FULL_PRECISION_BITS:
        cold = cold_at(batches, rule.bits, options.loss)
    beside_rows = (add_up(np.where(computed, loads.rows, 0)) > 0) * batches.rows[:, :, None]
    return without_device(
        policy,
        batches,
        costs,
        moe_ps=np.maximum(ends - shared_ps(batches, costs), 0.0),
        prefill_ps=_prompts_ps(batches, costs, expert_bytes),
        fetched_experts=moved,
        hot_pairs=int(loads.rows[done == HIT].sum()),
        cold=cold,
        traffic=Traffic(
            hbm_bytes=float(on_gpu.sum()) * expert_bytes,
            host_bytes=float(computed.sum()) * expert_bytes,
            link_bytes=float(beside_rows.sum()) * 2 * costs.shape.hidden_size * costs.shape.dtype_bytes,
        ),
    )


class Prices(NamedTuple):
    """In ps, by rows: an expert here, one on the host, so many rows there and back; before copies, and each of them;
    a layer with any expert here."""

    gpu: list[float]
    host: list[float]
    hop: list[float]
    opening: float
    copy: float
    launch: float

    def divided(
        self, missing: list[int], here: float, launch: float, hop: float, busy: float, *, copies: bool = True
    ) -> tuple[float, int]:
        """(when the layer ends, how many of the missing are copied so that it ends soonest); heaviest first. launch:
        what the first one on the GPU takes beside itself, while its copy arrives. copies: whether any may be."""
        count = len(missing)
        rest, moved, begins = 0.0, 0.0, max(busy, 0.0) + self.opening
        for rows in missing:  # not sum(): Python 3.12 and later add floats in another way
            rest += self.host[rows]
        best = math.inf, 0
        for copied in range(count + 1):
            if copied:
                rest -= self.host[missing[copied - 1]]
                moved += self.gpu[missing[copied - 1]]
            if copied and not copies:
                continue
            ends = here + moved + (launch if copied else 0.0)
            if copied:
                last = self.gpu[missing[copied - 1]]
                ends = max(ends, begins + self.copy + moved, begins + copied * self.copy + last)
            if copied < count:
                ends = max(ends, hop + max(rest, 0.0))
            if ends < best[0]:
                best = ends, copied
        return best


class _Caches:
    """What the caches of one group hold, the least recently used first, and the link to them."""

    def __init__(
        self, rule: CacheRule, prices: Prices, num_experts: int, num_layers: int, places: int, start: list[int]
    ) -> None:
        """start: cells, layer * E + expert, the least recent first."""
        self._rule, self._prices, self._num_experts, self._places = rule, prices, num_experts, places
        one: dict[int, None] = {}
        self._of_layer = [one] * num_layers if rule.scope == "all" else [{} for _ in range(num_layers)]
        self._free_at, self._coming, self._waiting = 0.0, -1, deque[int](maxlen=MOST_WAITING)
        self.filled = 0
        """Copies by an idle link."""
        for cell in start:
            self._bring(cell)

    def _bring(self, cell: int) -> None:
        cache = self._of_layer[cell // self._num_experts]
        if not self._places or cell in cache:
            return
        if len(cache) >= self._places:
            del cache[next(iter(cache))]
        cache[cell] = None

    def receive(self, now: float) -> None:
        """What an idle link has brought by now, the newest that waits first; it begins with the next."""
        while self._coming < 0 or self._free_at <= now:
            if self._coming >= 0:
                self._bring(self._coming)
                self._coming = -1
                self.filled += 1
                continue
            if self._free_at >= now:
                return
            while self._waiting and self._waiting[-1] in self._of_layer[self._waiting[-1] // self._num_experts]:
                self._waiting.pop()
            if not self._waiting:
                self._free_at = now
                return
            self._coming = self._waiting.pop()
            self._free_at += self._prices.opening + self._prices.copy

    def layer(
        self, layer: int, ids: list[int], rows: list[int], running: int, here: float, now: float
    ) -> tuple[float, list[int]]:
        """(what the experts of a layer take, HIT, COPIED or COMPUTED for each slot). here: what runs beside them."""
        cache, first, prices = self._of_layer[layer], layer * self._num_experts, self._prices
        done, missing, launch = [0] * len(ids), [], prices.launch
        for slot, (expert, count) in enumerate(zip(ids, rows, strict=True)):
            cell = first + expert
            if count and cell in cache:
                done[slot] = HIT
                here += launch + prices.gpu[count]
                launch = 0.0
                cache[cell] = cache.pop(cell)
            elif count:
                missing.append(slot)
        if not missing:
            return here, done
        missing.sort(key=lambda slot: -rows[slot])
        waiting = [rows[slot] for slot in missing]
        copies, busy = self._rule.misses != "host", self._free_at - now
        ends, copied = prices.divided(waiting, here, launch, prices.hop[running], busy, copies=copies)
        if copied:
            self._free_at = max(self._free_at, now) + prices.opening + copied * prices.copy
        for place, slot in enumerate(missing):
            cell = first + ids[slot]
            done[slot] = COPIED if place < copied else COMPUTED
            if place < copied:
                self._bring(cell)
            elif self._places and cell != self._coming:
                self._waiting.append(cell)
        return ends, done


def _warmed(batches: Batches, options: ReplayOptions, rule: CacheRule, places: int) -> NDArray[np.int64]:
    """Experts that the caches hold after the prompts, [G, P]: cells layer * E + expert.

    From the least used of the group's prompts to the most; popularity decides between equal ones.
    """
    g, _, _, layers, _ = batches.shape
    worth = batches.prompt_counts + options.prior.values / (1.0 + float(options.prior.values.max()))
    if rule.scope == "all":
        order = np.argsort(-worth.reshape(g, -1), axis=1, kind="stable")[:, :places]
    else:
        ranked = np.argsort(-worth, axis=2, kind="stable")[:, :, :places]
        order = (ranked + np.arange(layers)[:, None] * batches.num_experts).reshape(g, -1)
        order = order.reshape(g, layers, -1).transpose(0, 2, 1).reshape(g, -1)
    return np.ascontiguousarray(order[:, ::-1], np.int64)


def _prompts_ps(batches: Batches, costs: Costs, expert_bytes: int) -> NDArray[np.float64]:
    """[G, B]: every expert of a prompt comes over the link, or the host computes it; by layer the sooner of both."""
    fetch = costs.fetch_ps(expert_bytes)

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        copied = np.maximum((counts > 0).sum(axis=1) * fetch, on_gpu_ps(costs, counts, expert_bytes))
        times: NDArray[np.float64] = np.minimum(copied, costs.cpu_layers_ps(counts, expert_bytes))
        return times

    return prompts_ps(batches, costs, layers_ps)


EXPERT_CACHE = System(
    "expert_cache",
    (
        "one LRU over all layers (scope=layer: one each), begun with what the group's prompts used most",
        "each layer's misses are copied or computed by the host, as many of each as end it soonest; heaviest copied",
        "an idle link brings what the host computed, the newest first; what it carries delays later copies",
        "prompts stream every expert, or the host computes it; CPU kernels read narrow experts at the same rate",
    ),
    replay,
    memory,
    fills_memory=True,
    options=("cache_bits", "misses_by", "scope"),
)


def replay_hybrimoe(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """HybriMoE (arXiv 2504.05897): the same rule in full precision, with a cache of num_hot experts per layer.

    The published greedy schedule approximates the division of misses. The published cache lets the lowest recent score
    leave (MRS); here the least recently used does.
    """
    rule = CacheRule(FULL_PRECISION_BITS, "either", "layer")
    return replay_cache("CPU, link and cache", rule, batches, costs, options)


HYBRIMOE = System(
    "hybrimoe",
    (
        "the best prefix of misses by load is copied; the published greedy schedule comes near it",
        "copies that fill the cache occupy the link; the least recently used expert leaves",
        "no prefetch of later layers",
    ),
    replay_hybrimoe,
)
