"""The (row, expert) pairs of one layer, and where each one runs: in a hot slot, on the device, or streamed.

Knows arrays of one layer. Does not know layers, steps, plans or the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.integration.hot_slots import SlotPairs


class Pairs(NamedTuple):
    """P pairs on the host, in the order of their rows."""

    rows: NDArray[np.int64]  # [P], row of the step
    experts: NDArray[np.int64]  # [P]
    topk_weights: NDArray[np.float32]  # [P], what the router gave the pair

    @property
    def distinct_experts(self) -> NDArray[np.int64]:
        return np.unique(self.experts)

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Pairs:
        """Those that are marked in `chosen` [P], or at these places."""
        return Pairs(self.rows[chosen], self.experts[chosen], self.topk_weights[chosen])

    def of_rows(self, wanted: NDArray[np.bool_]) -> Pairs:
        """The pairs whose row is marked in `wanted` [T]."""
        return self.where(wanted[self.rows])

    @property
    def sent_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(the rows [S] that have a pair, in order; which of them each pair [P] is of)."""
        begins = np.ones(len(self.rows), dtype=np.bool_)  # pairs come row by row
        np.not_equal(self.rows[1:], self.rows[:-1], out=begins[1:])
        return self.rows[begins], np.cumsum(begins, dtype=np.int32) - np.int32(1)

    def beside(self, others: Pairs) -> Pairs:
        """These and the pairs of other rows, in the order of all rows."""
        if not len(self.rows) or not len(others.rows):
            return self if len(self.rows) else others
        rows = np.concatenate([self.rows, others.rows])
        order = np.argsort(rows, kind="stable")
        experts = np.concatenate([self.experts, others.experts])
        weights = np.concatenate([self.topk_weights, others.topk_weights])
        return Pairs(rows, experts, weights).where(order)


NO_PAIRS = Pairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


class Split(NamedTuple):
    """Every pair of a layer exactly once: `hot` runs in slots, `device` is sent, `stream` comes from the pool, `warm`
    is for the host's CPU."""

    hot: SlotPairs
    device: Pairs  # decode rows, and prefill rows by send_prompts
    stream: Pairs  # prefill rows
    offloaded: frozenset[int] = frozenset()  # hot experts that run on the device this time
    loads: tuple[list[int], list[int]] | None = None
    """Where several ranks hold whole hot experts: pairs of each, and its rank. None: `hot` has all hot pairs."""
    warm: Pairs = NO_PAIRS  # decode rows


def split_lists(
    expert_map: list[int], topk_ids: list[list[int]], topk_weights: list[list[float]], router_weights: torch.Tensor
) -> Split:
    """Split the pairs of a few decode rows. expert_map [E]: hot slot or -1. topk_ids and topk_weights [T][k].

    router_weights f32 [T, k]: topk_weights as the router gave them. On a dozen numbers lists are faster than tensor
    operations. Hot pairs keep their order in as many columns as the row with most of them has; a row with fewer gets a
    hot slot that it reads anyway, with weight 0, and a row without any the slot of another row: it is set to 0 then.
    """
    slots = [[expert_map[expert] for expert in row] for row in topk_ids]
    pairs_in_slot: dict[int, int] = {}
    hot_slots: list[list[int]] = []
    hot_weights: list[list[float]] = []
    cold_rows: list[int] = []
    cold_experts: list[int] = []
    cold_weights: list[float] = []
    for row, (row_slots, row_weights) in enumerate(zip(slots, topk_weights, strict=True)):
        hot_slots.append([])
        hot_weights.append([])
        for column, slot in enumerate(row_slots):
            if slot >= 0:
                pairs_in_slot[slot] = pairs_in_slot.get(slot, 0) + 1
                hot_slots[row].append(slot)
                hot_weights[row].append(row_weights[column])
                continue
            cold_rows.append(row)
            cold_experts.append(topk_ids[row][column])
            cold_weights.append(row_weights[column])
    idle_rows = [row for row, here in enumerate(hot_slots) if not here]
    another, columns = next(iter(pairs_in_slot), -1), max(map(len, hot_slots)) or 1
    for here, weights in zip(hot_slots, hot_weights, strict=True):
        missing = columns - len(here)
        here.extend([max(here, default=another)] * missing)
        weights.extend([0.0] * missing)
    hot = SlotPairs(
        torch.tensor(hot_slots, dtype=torch.int32),
        torch.tensor(hot_weights, dtype=torch.float32) if cold_rows else router_weights,
        list(pairs_in_slot.values()),
        idle_rows,
    )
    if not cold_rows:
        return Split(hot, NO_PAIRS, NO_PAIRS)
    cold = Pairs(np.array(cold_rows, np.int64), np.array(cold_experts, np.int64), np.array(cold_weights, np.float32))
    return Split(hot, cold, NO_PAIRS)


def split_arrays(
    expert_map: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, is_decode: NDArray[np.bool_]
) -> Split:
    """Split any number of rows. expert_map i32 [E]; topk_ids and topk_weights [T, k]; is_decode [T]."""
    slots = expert_map[topk_ids]
    here = slots.cpu().numpy()
    rows, columns = np.nonzero(here < 0)
    counts = np.bincount(here[here >= 0], minlength=1)
    hot = SlotPairs(slots, topk_weights, counts[counts > 0].tolist())
    if len(rows) == 0:
        return Split(hot, NO_PAIRS, NO_PAIRS)
    experts = topk_ids.cpu().numpy()[rows, columns].astype(np.int64)
    cold = Pairs(rows, experts, topk_weights.float().cpu().numpy()[rows, columns])
    return Split(hot, cold.of_rows(is_decode), cold.of_rows(~is_decode))


def split_among_ranks(
    expert_map: torch.Tensor,
    owners: NDArray[np.int64],
    rank: int,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    is_decode: NDArray[np.bool_],
) -> Split:
    """The same where several ranks hold whole hot experts. owners [E]: the rank of each, -1 where it is not on a GPU.

    Pairs of another rank's hot experts are nobody's here. A slot that is not needed keeps the expert it had, so the map
    may name one that is this rank's no longer.
    """
    ids = topk_ids.cpu().numpy().astype(np.int64)
    on_gpu = owners[ids] >= 0
    rows, columns = np.nonzero(~on_gpu)
    counts = np.bincount(ids[on_gpu], minlength=len(owners))
    used = np.flatnonzero(counts)
    own = torch.from_numpy(owners == rank).to(expert_map.device)
    slots = torch.where(own, expert_map, -1)[topk_ids]
    num_own = int(counts[owners == rank].sum())
    hot = SlotPairs(slots, topk_weights, [num_own] if num_own else [])
    cold = Pairs(rows, ids[rows, columns], topk_weights.float().cpu().numpy()[rows, columns])
    loads = counts[used].tolist(), owners[used].tolist()
    return Split(hot, cold.of_rows(is_decode), cold.of_rows(~is_decode), loads=loads)


def keep_warm(split: Split, warm: NDArray[np.bool_]) -> Split:
    """The same with the device's pairs that have a warm expert on the host's CPU instead. warm [E]; before prompts."""
    here = warm[split.device.experts]
    return split._replace(device=split.device.where(~here), warm=split.device.where(here)) if here.any() else split


def send_prompts(split: Split, experts: NDArray[np.int64]) -> Split:
    """The same with the pairs of prefill rows that have one of these experts on the device instead."""
    sent = np.isin(split.stream.experts, experts)
    return split._replace(device=split.device.beside(split.stream.where(sent)), stream=split.stream.where(~sent))


def add_sums(out: torch.Tensor, sums: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
    """Add partial sums f32 [S, H] to these rows [S] of out [T, H], which are distinct and in order."""
    partial = torch.from_numpy(sums)
    if len(rows) == out.shape[0]:
        out.add_(partial.to(out.device))
    elif out.device.type != "cpu":  # one rounding, as above: results do not depend on how many rows were sent
        index = torch.from_numpy(rows).to(out.device)
        out.index_copy_(0, index, out.index_select(0, index).add_(partial.to(out.device)))
    else:
        out.index_add_(0, torch.from_numpy(rows).to(out.device), partial.to(out.device, out.dtype))
