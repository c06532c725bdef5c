"""Loads of each decode layer: its distinct experts, and the number of rows that chose each.

An axis of S slots instead of one of all experts: S is the most experts that any layer of any step uses. So 10 used
experts of 512 cost 10. Knows routing. Does not know hardware, policies or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

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
    """Rows of each used expert, for G groups, D steps, L layers. Unused slots hold expert 0 with 0 rows."""

    experts: NDArray[np.int64]  # [G, D, L, S], distinct, rising
    rows: NDArray[np.int64]  # [G, D, L, S]
    places: NDArray[np.int64]  # [G, B, D, L, k], of each pair, in the flat [G * D * L * S]

    @classmethod
    def of(cls, ids: NDArray[np.int64], valid: NDArray[np.bool_], num_experts: int) -> Loads:
        """ids [G, B, D, L, k]; valid [G, B, D]."""
        g, b, d, layers, k = ids.shape
        cells = np.arange(g * d * layers).reshape(g, d, layers, 1)
        pairs = np.broadcast_to(valid[:, :, :, None, None], ids.shape)
        if b * k >= num_experts:  # about all of them are used: a slot for each
            slots = num_experts
            experts = np.broadcast_to(np.arange(num_experts), (g, d, layers, num_experts)).copy()
            places = cells.reshape(g, 1, d, layers, 1) * slots + ids
        else:
            chosen = np.where(pairs, ids, num_experts).transpose(0, 2, 3, 1, 4).reshape(-1, b * k)
            low = (b * k - 1).bit_length()  # a pair's place in its layer, below its expert
            ranked = np.sort(chosen << low | np.arange(b * k), axis=1)
            order, ranked = ranked & ((1 << low) - 1), ranked >> low
            slot = np.zeros(ranked.shape, np.int64)
            np.cumsum(ranked[:, 1:] != ranked[:, :-1], axis=1, out=slot[:, 1:])
            slots = int(slot.max()) + 1
            slot += cells.reshape(-1, 1) * slots
            experts = np.zeros((g, d, layers, slots), np.int64)
            experts.ravel()[slot] = np.where(ranked < num_experts, ranked, 0)
            by_pair = np.empty_like(slot)
            by_pair.ravel()[cells.reshape(-1, 1) * (b * k) + order] = slot
            places = by_pair.reshape(g, d, layers, b, k).transpose(0, 3, 1, 2, 4)
        rows = np.bincount(places[pairs], minlength=experts.size).reshape(experts.shape).astype(np.int64)
        return cls(experts, rows, places)

    def look_up(self, table: NDArray[T], part: slice = slice(None)) -> NDArray[T]:
        """[G, C, L, S], what a table [L, E] or [G, L, E] says about each slot's expert in the steps of part."""
        experts = self.experts[:, part]
        g, _, layers, _ = experts.shape
        own = np.arange(g)[:, None, None, None] * (table.ndim == 3) * layers
        found: NDArray[T] = table.ravel()[(own + np.arange(layers)[:, None]) * table.shape[-1] + experts]
        return found

    def count(self, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Number of pairs that each slot serves [G, D, L, S], of those marked in chosen [G, B, D, L, k]."""
        counts = np.bincount(self.places[chosen], minlength=self.rows.size)
        return counts.reshape(self.rows.shape).astype(np.int64)

    def total(self, values: NDArray[np.float32], chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        """[G, D, L, S], sum of values [G, B, D, L, k] over the chosen pairs of each slot."""
        sums = np.bincount(self.places[chosen], weights=values[chosen], minlength=self.rows.size)
        return sums.reshape(self.rows.shape).astype(np.float64)
