"""One layer, one step: split the (row, expert) pairs, run both halves at the same time, add them.

    decode rows   hot pairs -> slots (vLLM's fused kernel)      cold and spilled pairs -> one message to the device
    prefill rows  hot pairs -> slots                            cold pairs -> streamed from the pool, full precision

The message leaves before the hot experts are computed and its answer is collected after; what the device returns is a
gate-weighted partial sum, added before vLLM's tensor-parallel all-reduce. If no valid answer comes, the same pairs are
computed here. Knows tensors of one layer; does not know how a plan was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.errors import DeviceUnavailable
from vllm_ndp.integration.hot_slots import ALIAS_PAIRS, CpuSlotKernel, HotSlots

if TYPE_CHECKING:
    from vllm_ndp.integration.controller import NdpController
    from vllm_ndp.integration.step import DeviceCall, StepContext


NOTHING: Mapping[int, int] = MappingProxyType({})


class Pairs(NamedTuple):
    """P (row, expert) pairs of one layer, on the host, in the order of their rows."""

    rows: NDArray[np.int64]  # [P], row of the step
    experts: NDArray[np.int64]  # [P]
    gates: NDArray[np.float32]  # [P]

    @property
    def distinct_experts(self) -> NDArray[np.int64]:
        return np.unique(self.experts)

    def of_rows(self, wanted: NDArray[np.bool_]) -> Pairs:
        """The pairs whose row is marked in `wanted` [T]."""
        keep = wanted[self.rows]
        return Pairs(self.rows[keep], self.experts[keep], self.gates[keep])


NO_PAIRS = Pairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


@dataclass
class FewPairs:
    """The pairs of a few rows as lists. A cold pair is aliased to a slot its row reads anyway, with weight 0."""

    slots: list[list[int]]  # [T][k], no -1
    gates: list[list[float]]  # [T][k], 0 where cold
    pairs_in_slot: dict[int, int]
    rows_without: list[int]  # rows with no hot pair: aliased to somebody else's slot
    cold_rows: list[int]
    cold_experts: list[int]
    cold_gates: list[float]

    @classmethod
    def split(cls, slot_of: list[int], ids: list[list[int]], gates: list[list[float]]) -> FewPairs:
        few = cls([[slot_of[expert] for expert in row] for row in ids], gates, {}, [], [], [], [])
        for row, (row_slots, row_ids) in enumerate(zip(few.slots, ids, strict=True)):
            own = max(row_slots)
            if own < 0:
                few.rows_without.append(row)
            for column, slot in enumerate(row_slots):
                if slot >= 0:
                    few.pairs_in_slot[slot] = few.pairs_in_slot.get(slot, 0) + 1
                    continue
                few.cold_rows.append(row)
                few.cold_experts.append(row_ids[column])
                few.cold_gates.append(gates[row][column])
                gates[row][column] = 0.0
                row_slots[column] = own
        anyone = next(iter(few.pairs_in_slot), -1)
        for row in few.rows_without:
            few.slots[row] = [anyone] * len(few.slots[row])
        return few

    def cold(self) -> Pairs:
        return Pairs(
            np.array(self.cold_rows, dtype=np.int64),
            np.array(self.cold_experts, dtype=np.int64),
            np.array(self.cold_gates, dtype=np.float32),
        )


class LayerDispatch:
    def __init__(self, index: int, slots: HotSlots, controller: NdpController) -> None:
        self.index = index
        self.slots = slots
        self._controller = controller
        self._few_rows = isinstance(slots.kernel, CpuSlotKernel)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, H], weights f32 [T, k], ids [T, k] global expert ids -> routed output [T, H], a fresh tensor."""
        step = self._controller.step
        if step is None:
            return self._profile(x, weights, ids)
        self._controller.migrator.wait(self.index)
        num_rows = step.enter_layer(self.index, ids, weights)
        if num_rows == x.shape[0]:
            return self._forward(step, x, weights, ids)
        out = torch.zeros_like(x)  # rows past the scheduled ones are padding of a captured graph
        out[:num_rows] = self._forward(step, x[:num_rows], weights[:num_rows], ids[:num_rows])
        return out

    def _forward(self, step: StepContext, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self._few_rows and ids.numel() <= ALIAS_PAIRS and step.rows.all_decode:
            return self._forward_few(step, x, weights, ids)
        slots = step.spill(self.index, self.slots.slot_of, ids, weights)[ids]
        cold = _cold_pairs(slots, ids, weights)
        to_device = cold.of_rows(step.rows.decode)
        to_stream = cold.of_rows(~step.rows.decode)
        call = step.send(self.index, x, to_device) if len(to_device.rows) else None
        out = self.slots.run(x, weights, slots)
        if len(to_stream.rows):
            self._stream(out, x, to_stream, step.keep(self.index, to_stream))
        device_ps = None if call is None else self._collect(step, call, out, x, to_device)
        here = slots.cpu().numpy()
        pairs_in_slot = np.bincount(here[here >= 0], minlength=1)
        step.leave_layer(self.index, pairs_in_slot[pairs_in_slot > 0].tolist(), to_stream, to_device, device_ps)
        return out

    def _forward_few(
        self, step: StepContext, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """The same for a few decode rows on CPU: lists are faster than tensor operations on a dozen numbers."""
        experts, gates_of = ids.tolist(), weights.tolist()
        few = FewPairs.split(step.spill_few(self.index, self.slots.slot_list, experts, gates_of), experts, gates_of)
        to_device = few.cold() if few.cold_rows else NO_PAIRS
        call = step.send(self.index, x, to_device) if few.cold_rows else None
        if not few.pairs_in_slot:
            out = torch.zeros_like(x)
        else:
            gates = torch.tensor(few.gates, dtype=torch.float32) if few.cold_rows else weights
            slots = torch.tensor(few.slots, dtype=torch.int32)
            out = self.slots.kernel.fused(x, self.slots.w13, self.slots.w2, gates, slots)
            if few.rows_without:
                out[few.rows_without] = 0
        device_ps = None if call is None else self._collect(step, call, out, x, to_device)
        step.leave_layer(self.index, list(few.pairs_in_slot.values()), NO_PAIRS, to_device, device_ps)
        return out

    def _collect(
        self, step: StepContext, call: DeviceCall, out: torch.Tensor, x: torch.Tensor, pairs: Pairs
    ) -> int | None:
        """Add what the device returns, or the same pairs computed here. Simulated ps; None: there was no answer."""
        try:
            return call.add_into(out)
        except DeviceUnavailable:
            step.compute_locally(self.index, out, x, pairs, self._stream)
            return None

    def _stream(self, out: torch.Tensor, x: torch.Tensor, pairs: Pairs, keep: Mapping[int, int] = NOTHING) -> None:
        """Full precision from the pool; one rounding for all streamed experts. keep: expert -> slot where it stays."""
        out.add_(self._controller.streamer.run(self.index, x, pairs, self.slots, keep))

    def _profile(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """vLLM measures peak memory with random rows: every pair runs in some slot, nothing leaves the process."""
        num_slots = len(self.slots.expert_in)
        if num_slots == 0:
            return torch.zeros_like(x)
        return self.slots.run(x, weights, (ids % num_slots).to(torch.int32))


def _cold_pairs(slots: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Pairs:
    host_slots = slots.cpu().numpy()
    rows, cols = np.nonzero(host_slots < 0)
    if len(rows) == 0:
        return Pairs(rows, rows, np.empty(0, dtype=np.float32))
    return Pairs(rows, ids.cpu().numpy()[rows, cols].astype(np.int64), weights.float().cpu().numpy()[rows, cols])
