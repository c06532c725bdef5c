"""A trace arranged for replay: G groups of B requests that decode together, as dense arrays.

Requests join groups in trace order; what does not fill a group is left out. Within a group prompts run one after the
other, then all decode in step until the longest is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.trace import Trace

T = TypeVar("T", bound=np.generic)

_SHORT = 16


def add_up(values: NDArray[Any]) -> NDArray[Any]:
    """Sum over the last axis, slot by slot: several times faster than numpy's reduction where that axis is short."""
    total: NDArray[Any]
    if values.shape[-1] > _SHORT:
        total = values.sum(axis=-1)
        return total
    total = values[..., 0].astype(np.int64 if values.dtype == np.bool_ else values.dtype)
    for slot in range(1, values.shape[-1]):
        total += values[..., slot]
    return total


def sums_before(values: NDArray[Any]) -> NDArray[Any]:
    """[..., S] -> [..., S + 1]: at h the sum of the first h."""
    return np.concatenate([np.zeros_like(values[..., :1]), values.cumsum(axis=-1)], axis=-1)


def sums_after(values: NDArray[Any]) -> NDArray[Any]:
    """[..., S] -> [..., S + 1]: at h the sum of all but the first h."""
    return sums_before(values[..., ::-1])[..., ::-1]


@dataclass(frozen=True)
class Loads:
    """Rows of each used expert, for G groups, D steps, L layers. Unused slots hold expert 0 with 0 rows.

    An axis of S slots instead of one of all experts: S is the most experts that any layer of any step uses. So 10 used
    experts of 512 cost 10.
    """

    experts: NDArray[np.int64]  # [G, D, L, S], distinct, rising
    rows: NDArray[np.int64]  # [G, D, L, S]
    places: NDArray[np.int64]  # [G, B, D, L, k], of each pair that exists, in the flat [G * D * L * S]

    @classmethod
    def of(cls, ids: NDArray[np.int64], valid: NDArray[np.bool_], num_experts: int) -> Loads:
        """ids [G, B, D, L, k]; valid [G, B, D]."""
        g, _, d, layers, _ = ids.shape
        cells = np.arange(g * d * layers).reshape(g, 1, d, layers, 1)
        pairs = np.broadcast_to(valid[:, :, :, None, None], ids.shape)
        used, pair_of, counts = np.unique(
            (cells * num_experts + ids)[pairs], return_inverse=True, return_counts=True
        )  # rising, so that a cell's experts stand side by side
        cell, expert = np.divmod(used, num_experts)
        slot = np.arange(len(used)) - np.searchsorted(cell, cell)
        slots = int(slot.max()) + 1
        places = np.zeros(ids.shape, np.int64)
        places[pairs] = (cell * slots + slot)[pair_of]
        experts, rows = np.zeros((2, g, d, layers, slots), np.int64)
        experts.reshape(-1, slots)[cell, slot] = expert
        rows.reshape(-1, slots)[cell, slot] = counts
        return cls(experts, rows, places)

    def look_up(self, table: NDArray[T], part: slice = slice(None)) -> NDArray[T]:
        """[G, C, L, S], what a table [L, E] or [G, L, E] says about each slot's expert in the steps of part."""
        experts = self.experts[:, part]
        g, _, layers, _ = experts.shape
        own = np.arange(g)[:, None, None, None] * (table.ndim == 3) * layers
        found: NDArray[T] = table.ravel()[(own + np.arange(layers)[:, None]) * table.shape[-1] + experts]
        return found

    def of_pairs(self, values: NDArray[T]) -> NDArray[T]:
        """[G, B, D, L, k], what values [G, D, L, S] say of each pair's slot."""
        found: NDArray[T] = values.ravel()[self.places]
        return found

    def count(self, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Number of pairs that each slot serves [G, D, L, S], of those marked in chosen [G, B, D, L, k]."""
        counts = np.bincount(self.places[chosen], minlength=self.rows.size)
        return counts.reshape(self.rows.shape).astype(np.int64)


@dataclass(frozen=True)
class Batches:
    """D decode steps, L layers, k choices, E experts; `valid` marks the (group, request, step) rows that exist."""

    num_experts: int
    ids: NDArray[np.int64]  # [G, B, D, L, k]; 0 where not valid
    weights: NDArray[np.float32]  # [G, B, D, L, k]
    valid: NDArray[np.bool_]  # [G, B, D]
    prompts: tuple[tuple[RoutingStats, ...], ...]  # [G][B]
    decodes: tuple[tuple[RoutingStats, ...], ...]  # [G][B], what a clairvoyant knows
    requests: NDArray[np.int64]  # [G, B], index in the trace
    trace: Trace

    @classmethod
    def of(cls, trace: Trace, batch: int = 1) -> Batches:
        """Requests in trace order.

        Raises TraceError when the trace has fewer requests than one group takes, or no decode.
        """
        sequences = trace.sequences
        groups = len(sequences) // batch if batch > 0 else 0
        if groups == 0:
            raise TraceError(f"a batch of {batch} needs as many requests, the trace has {len(sequences)}")
        sequences = sequences[: groups * batch]
        steps = max(len(s.decode_ids) for s in sequences)
        if steps == 0:
            raise TraceError("the trace has no decode tokens: nothing can be replayed")
        p = trace.provenance
        ids = np.zeros((len(sequences), steps, p.num_layers, p.top_k), np.int64)
        weights = np.zeros(ids.shape, np.float32)
        valid = np.zeros((len(sequences), steps), np.bool_)
        for row, sequence in enumerate(sequences):
            decoded = len(sequence.decode_ids)
            ids[row, :decoded], weights[row, :decoded] = sequence.decode_ids, sequence.decode_weights
            valid[row, :decoded] = True
        prompts = [trace.stats(s) for s in sequences]
        decodes = [trace.stats(s, "decode") for s in sequences]
        return cls(
            num_experts=p.num_experts,
            ids=ids.reshape(groups, batch, *ids.shape[1:]),
            weights=weights.reshape(groups, batch, *ids.shape[1:]),
            valid=valid.reshape(groups, batch, steps),
            prompts=tuple(tuple(prompts[g * batch : (g + 1) * batch]) for g in range(groups)),
            decodes=tuple(tuple(decodes[g * batch : (g + 1) * batch]) for g in range(groups)),
            requests=np.arange(len(sequences)).reshape(groups, batch),
            trace=trace,
        )

    def first_steps(self, steps: int) -> Batches:
        """The same groups, cut short."""
        ids, weights = self.ids[:, :, :steps], self.weights[:, :, :steps]
        return replace(self, ids=ids, weights=weights, valid=self.valid[:, :, :steps])

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """G, B, D, L, k."""
        g, b, d, layers, k = self.ids.shape
        return g, b, d, layers, k

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """[G, D], requests still decoding in each step."""
        counts: NDArray[np.int64] = self.valid.sum(axis=1, dtype=np.int64)
        return counts

    @cached_property
    def kv_tokens(self) -> NDArray[np.int64]:
        """Sum of the context lengths of all rows in each step [G, D]."""
        prompt = np.array([[stats.num_tokens for stats in group] for group in self.prompts])
        context = prompt[:, :, None] + 1 + np.arange(self.valid.shape[2])
        total: NDArray[np.int64] = (context * self.valid).sum(axis=1, dtype=np.int64)
        return total

    @cached_property
    def prompt_counts(self) -> NDArray[np.float64]:
        """[G, L, E], how often the prompts of each group chose each expert."""
        return np.array([np.sum([stats.counts for stats in group], axis=0) for group in self.prompts], np.float64)

    @property
    def num_decisions(self) -> int:
        """(token, layer) routing decisions of all decode rows."""
        return int(self.valid.sum()) * int(self.ids.shape[3])

    @cached_property
    def pairs(self) -> NDArray[np.bool_]:
        """Mask over pairs [G, B, D, 1, 1] of the rows that are valid."""
        return self.valid[:, :, :, None, None]

    @cached_property
    def loads(self) -> Loads:
        return Loads.of(self.ids, self.valid, self.num_experts)
