"""The rule of 2026's engines: an expert cache at any width; the link copies a miss or the host computes it.

FreeToken's rule (arXiv 2608.16157; llama.cpp forks and KTransformers have like ones): one LRU cache over all layers,
warmed by the prompt. The link copies some of the missing experts, the host's CPU computes the others: as many of each
as end the layer soonest. An idle link brings the experts that the host has computed, one after the other. Later copies
wait for the one on the link. With misses_by=host nothing is copied on demand: dynamic hot and cold experts, as
exllamav3 has them. Caches and host hold experts at one width.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.work import PS_PER_S
from vllm_ndp.cost_model.costs import Costs, each_ps
from vllm_ndp.cost_model.memory import Memory
from vllm_ndp.lab.systems.system import WEIGHT_BITS, ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, add_up
from vllm_ndp.lab.vectorised.execution import shared_ps, streamed_ps, without_device
from vllm_ndp.lab.vectorised.outcome import Outcome, attention_ps, layer_factor

MISSES = ("either", "host")
SCOPES = ("all", "layer")
HIT, COPIED, COMPUTED = 1, 2, 3
MOST_WAITING = 64
"""Experts that an idle link may still bring, the newest."""


def _bits(options: ReplayOptions) -> int:
    return options.choice("cache_bits", WEIGHT_BITS, 4)


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """The host keeps every expert, at the same width."""
    num_experts = costs.shape.num_layers * costs.shape.num_experts
    return Memory(options.gpu_memory(costs), host=num_experts * costs.replica_bytes(_bits(options)))


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    bits, misses, scope = _bits(options), options.choice("misses_by", MISSES), options.choice("scope", SCOPES)
    g, b, d, layers, _ = batches.shape
    loads, experts, expert_bytes = batches.loads, batches.num_experts, costs.replica_bytes(bits)
    lanes = 1 if scope == "all" else layers
    held = options.held(costs, expert_bytes)
    counts = np.arange(b + 1)
    prices = Prices(
        each_ps(counts, partial(costs.gpu_expert_ps, num_bytes=expert_bytes)).tolist(),
        costs.cpu_experts_ps(counts, expert_bytes).tolist(),
        each_ps(counts, costs.hop_ps).tolist(),
        float(costs.copy_opening_ps),
        expert_bytes * PS_PER_S / costs.hardware.link.bulk_bytes_per_s,
        float(costs.launch_ps(expert_bytes)),
    )
    done, ends, filled = np.zeros(loads.rows.shape, np.uint8), np.zeros((g, d, layers)), 0
    beside = np.broadcast_to(shared_ps(batches, costs)[:, :, 0], (g, d)).tolist()
    before = (attention_ps(batches, costs) + costs.overhead_ps).tolist()  # each layer's experts, without the head
    cells = loads.experts + np.arange(layers)[:, None] * experts
    warmed = _warmed(batches, options, lanes, int(held / layer_factor(batches, costs) / lanes))
    for group in range(g):
        caches = _Caches(prices, warmed[group].tolist(), layers * experts // lanes, copies=misses == "either")
        now = 0.0
        for step, running in enumerate(batches.rows[group].tolist()):
            each_layer = zip(cells[group, step].tolist(), loads.rows[group, step].tolist(), strict=True)
            for layer, (of, rows) in enumerate(each_layer):
                now += before[group][step]
                caches.receive(now)
                took, done[group, step, layer] = caches.layer(of, rows, running, beside[group][step], now)
                if running:
                    ends[group, step, layer] = took
                    now += took
        filled += caches.filled
    computed = done == COMPUTED
    computes = (add_up(np.where(computed, loads.rows, 0)) > 0) * batches.rows[:, :, None]

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.minimum(streamed_ps(costs, expert_bytes, counts), costs.cpu_layers_ps(counts, expert_bytes))

    return without_device(
        f"{bits} bits, {scope}, misses {misses}",
        batches,
        costs,
        options.loss,
        np.maximum(ends - shared_ps(batches, costs), 0.0),
        found=done == HIT,
        prompts=layers_ps,
        fetched=(int((done == COPIED).sum()) + filled) * expert_bytes / costs.shape.expert_bytes,
        bits=bits,
        on_host=computed,
        crossing=float(computes.sum()),
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
        rest, moved, begins = 0.0, 0.0, max(busy, 0.0) + self.opening
        for rows in missing:  # not sum(): Python 3.12 and later add floats in another way
            rest += self.host[rows]
        best = max(here, hop + rest), 0
        for copied, rows in enumerate(missing if copies else (), 1):
            rest -= self.host[rows]
            moved += self.gpu[rows]
            first, last = begins + self.copy + moved, begins + copied * self.copy + self.gpu[rows]
            ends = max(here + moved + launch, first, last)
            if copied < len(missing):
                ends = max(ends, hop + max(rest, 0.0))
            if ends < best[0]:
                best = ends, copied
        return best


class _Caches:
    """What the caches of one group hold, the least recently used first, and the link to them.

    An expert is a cell, layer * E + expert; a cache has as many cells of places as it is given at first.
    """

    def __init__(self, prices: Prices, start: list[list[int]], cells: int, *, copies: bool) -> None:
        """cells: of each cache. copies: whether a layer's misses may be copied for it."""
        self._prices, self._cells, self._copies, self._places = prices, cells, copies, len(start[0])
        self._held = [dict.fromkeys(cache) for cache in start]
        self._free_at, self._coming, self._waiting = 0.0, -1, deque[int](maxlen=MOST_WAITING)
        self.filled = 0
        """Copies by an idle link."""

    def _bring(self, cell: int) -> None:
        cache = self._held[cell // self._cells]
        if not self._places or cell in cache:
            return
        if len(cache) >= self._places:
            del cache[next(iter(cache))]
        cache[cell] = None

    def receive(self, now: float) -> None:
        """What an idle link has brought by now, the newest that waits first; it begins with the next."""
        while True:
            if self._coming >= 0 and self._free_at <= now:
                self._bring(self._coming)
                self._coming = -1
                self.filled += 1
            if self._coming >= 0 or self._free_at >= now:
                return
            while self._waiting and self._waiting[-1] in self._held[self._waiting[-1] // self._cells]:
                self._waiting.pop()
            if not self._waiting:
                self._free_at = now
                return
            self._coming = self._waiting.pop()
            self._free_at += self._prices.opening + self._prices.copy

    def layer(
        self, cells: list[int], rows: list[int], running: int, here: float, now: float
    ) -> tuple[float, list[int]]:
        """(what the experts of a layer take, HIT, COPIED or COMPUTED for each slot). here: what runs beside them."""
        cache, prices = self._held[cells[0] // self._cells], self._prices
        done, missing, launch = [0] * len(cells), [], prices.launch
        for slot, (cell, count) in enumerate(zip(cells, rows, strict=True)):
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
        waiting, busy = [rows[slot] for slot in missing], self._free_at - now
        ends, copied = prices.divided(waiting, here, launch, prices.hop[running], busy, copies=self._copies)
        if copied:
            self._free_at = max(self._free_at, now) + prices.opening + copied * prices.copy
        for place, slot in enumerate(missing):
            done[slot] = COPIED if place < copied else COMPUTED
            if place < copied:
                self._bring(cells[slot])
            elif self._places and cells[slot] != self._coming:
                self._waiting.append(cells[slot])
        return ends, done


def _warmed(batches: Batches, options: ReplayOptions, lanes: int, places: int) -> NDArray[np.int64]:
    """[G, lanes, P]: cells that the caches hold after the prompts, from the least used of the group's prompts to the
    most; popularity decides between equal ones."""
    worth = batches.prompt_counts + options.prior.values / (1.0 + float(options.prior.values.max()))
    worth = worth.reshape(len(worth), lanes, -1)
    order = np.argsort(-worth, axis=2, kind="stable")[:, :, :places]
    return np.asarray(order[:, :, ::-1] + np.arange(lanes)[:, None] * worth.shape[2])


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

    The published cache lets the lowest recent score leave (MRS).
    """
    own: dict[str, float | str] = {"cache_bits": FULL_PRECISION_BITS, "scope": "layer"}
    return replace(replay(batches, costs, replace(options, own=own)), policy="CPU, link and cache")


HYBRIMOE = System(
    "hybrimoe",
    (
        "the best prefix of misses by load is copied; the published greedy schedule comes near it",
        "copies that fill the cache occupy the link; the least recently used expert leaves",
        "no prefetch of later layers",
    ),
    replay_hybrimoe,
)
