"""One MoE layer of a decode step without waiting for the GPU: what `moe_layer` does for few rows, in another order.

Splits on the GPU, sends off the packet and launches the hot experts. Only then waits for the device and the host's CPU,
which compute the rest. With every expert here there is nothing to send: the layer waits for nothing then, and its
counts are read when somebody asks for the step's report. Gives what the eager layer gives, but for the rounding of rows
that both computed. Knows one layer's slots and the messenger; does not know how plans are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.device.calls import ExecuteResult
from vllm_ndp.integration.cuda.messenger import Messenger
from vllm_ndp.integration.cuda.packet import HostFields
from vllm_ndp.integration.cuda.routing import routing_for
from vllm_ndp.integration.device_link import DeviceCall, DeviceLink
from vllm_ndp.integration.host_cpu import HostCpuExperts
from vllm_ndp.integration.hot_slots import CudaSlotKernel, HotSlots
from vllm_ndp.integration.rows import as_float32
from vllm_ndp.integration.step import Step
from vllm_ndp.layer.split import Pairs, Split

ComputeHere = Callable[[torch.Tensor, torch.Tensor, Pairs], None]
"""Adds to `out` what the pairs of a call without an answer give: (out, x, pairs)."""


@dataclass(frozen=True)
class Answer:
    """Answer of the thread: the layer's split, the call to the device, its result, and the sums of the rows that left.
    `call` is None where the device is not asked here; `sums` is None where nobody here computed any."""

    split: Split
    call: DeviceCall | None = None
    result: ExecuteResult | None = None
    sums: NDArray[np.float32] | None = None


class AsideLayer:
    def __init__(
        self,
        index: int,
        slots: HotSlots,
        link: DeviceLink | None,
        host: HostCpuExperts | None,
        messenger: Messenger,
        compute_here: ComputeHere,
    ) -> None:
        """link: None where another rank sends. host: None where this rank's CPU computes no experts."""
        self.index = index
        self._slots, self._link, self._host, self._messenger = slots, link, host, messenger
        self._compute_here = compute_here
        self._routing = routing_for(slots.expert_map.device)
        self._kernel, self._held = slots.running()
        self._num_slots, self._num_experts = len(slots.expert_in), len(slots.expert_map)
        has_spare_id = isinstance(self._kernel, CudaSlotKernel) and self._num_slots < self._num_experts
        self._elsewhere = self._num_slots if has_spare_id else -1

    def takes(self, step: Step) -> bool:
        """Whether a step's layers go this way: decode rows that fit the buffers."""
        return step.rows.num_rows <= self._messenger.most_rows and step.rows.all_decode

    @property
    def holds_everything(self) -> bool:
        return self._num_slots == self._num_experts and bool((self._slots.expert_in >= 0).all())

    def run(
        self,
        step: Step,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Callable[[], object],
    ) -> torch.Tensor:
        """x [T, H], topk_weights [T, k] as outputs are weighed, topk_ids [T, k] -> a fresh tensor [T, H]."""
        topk_weights = topk_weights.to(torch.float32)
        if self.holds_everything:
            return self._run_everything(step, x, topk_weights, topk_ids, beside)
        step.begin_layer()
        messenger, buffers = self._messenger, self._messenger.buffers(len(x))
        packet = buffers.here
        self._routing.split(self._slots.expert_map, topk_ids, topk_weights, x, packet, self._elsewhere)
        submit_ps = step.parts.clock.now_ps
        messenger.begin(buffers, lambda arrived: self._ask(step, submit_ps, arrived))
        try:
            beside()
            out = self._run_hot(x, topk_weights, packet.slots, are_named=self._elsewhere >= 0)
        except BaseException:
            messenger.abandon()
            raise
        taken = messenger.take()
        result, answered = None, True
        if taken.answer is None:  # nothing leaves
            split = self._split(step, taken.packet.ids)
        else:
            split, call = taken.answer.split, taken.answer.call
            result, answered = taken.answer.result, call is None or taken.answer.result is not None
            if taken.answer.sums is not None:
                partial = messenger.sums(taken)
                self._routing.add_rows(out, partial, packet.sent_rows[: len(partial)])
            if not answered:
                self._compute_here(out, x, split.device)
        step.end_layer(self.index, split, result, answered=answered)
        return out

    def _run_everything(
        self,
        step: Step,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Callable[[], object],
    ) -> torch.Tensor:
        beside()
        slots = self._slots.expert_map.index_select(0, topk_ids.reshape(-1).long()).view(topk_ids.shape)
        out = self._run_hot(x, topk_weights, slots, are_named=isinstance(self._kernel, CudaSlotKernel))

        def end(found: NDArray[np.int32]) -> None:
            step.begin_layer()
            step.end_layer(self.index, self._split(step, found), None)

        step.end_later(self.index, end)
        return out

    def _run_hot(
        self, x: torch.Tensor, topk_weights: torch.Tensor, slots: torch.Tensor, *, are_named: bool
    ) -> torch.Tensor:
        """are_named: no slot is -1, so that the kernel may take them as they are."""
        if not self._num_slots:
            return torch.zeros_like(x)
        if are_named:
            assert isinstance(self._kernel, CudaSlotKernel)
            return self._kernel.run_named(x, self._held, topk_weights, slots)
        return self._kernel.run(x, self._held, topk_weights, slots)

    def _split(self, step: Step, ids: NDArray[np.int32], weights: NDArray[np.float32] | None = None) -> Split:
        """The same as on the GPU, for the account. ids [T, k]; weights [T, k]: needed where something leaves."""
        ids = np.ascontiguousarray(ids)
        weights = np.ones(ids.shape, np.float32) if weights is None else np.ascontiguousarray(weights)
        return step.split(self.index, torch.from_numpy(ids), torch.from_numpy(weights), with_device=False)

    # -- in the messenger's thread ---------------------------------------------------------------------------------

    def _ask(self, step: Step, submit_ps: int, packet: HostFields) -> Answer:
        """Send the device its rows of a packet; the host's CPU computes its own meanwhile. Then wait for the device, at
        most until the deadline."""
        split, call, result = self._split(step, packet.ids, packet.weights), None, None
        left = split.device.sent_rows  # in order, as the packet has them
        if split.warm:
            left = np.union1d(left, split.warm.sent_rows)
        of_device, of_host = (np.searchsorted(left, part.sent_rows) for part in (split.device, split.warm))
        if split.device and self._link is not None:
            rows = packet.x[: len(left)] if len(of_device) == len(left) else packet.x[of_device]
            call = self._link.send(step, self.index, submit_ps, rows, split.device)
        found = []
        if split.warm and self._host is not None:
            found.append((of_host, self._host.execute(self.index, as_float32(packet.x[of_host]), split.warm)))
        if call is not None and (result := call.result()) is not None:
            found.append((of_device, result.y))
        return Answer(split, call, result, _added(found, len(left)))


def _added(found: list[tuple[NDArray[np.int64], NDArray[np.float32]]], num_rows: int) -> NDArray[np.float32] | None:
    """(rows, their sums) of each who computed, in one array [num_rows, H]; None where nobody did."""
    if len(found) < 2 and all(len(rows) == num_rows for rows, _ in found):
        return found[0][1] if found else None
    sums = np.zeros((num_rows, found[0][1].shape[1]), np.float32)
    for rows, part in found:
        sums[rows] += part
    return sums


class FixedOutput:
    """A layer's results at one address: what a captured graph reads after a layer that runs between its pieces."""

    def __init__(self, most_rows: int, like: torch.Tensor) -> None:
        """most_rows: of a step that graphs are captured for; larger ones run without. like: [..., H], of the layer."""
        self._memory = like.new_empty(most_rows, like.shape[-1])

    def hold(self, out: torch.Tensor) -> torch.Tensor:
        """The same values, [T, H]: in the fixed memory where T fits."""
        if len(out) > len(self._memory):
            return out
        return self._memory[: len(out)].copy_(out)
