"""One MoE layer of a decode step without waiting for the GPU: what `moe_layer` does for few rows, in another order.

Splits on the GPU, sends off the packet, launches the hot experts, and only then waits for what the device makes of
the rest. With every expert here there is nothing to send: the layer waits for nothing then, and its counts are read
when the step ends. Gives what the eager layer gives. Knows one layer's slots and the messenger; does not know how plans
are made.
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
from vllm_ndp.integration.hot_slots import CudaSlotKernel, HotSlots
from vllm_ndp.integration.step import Step
from vllm_ndp.layer.split import Pairs, Split

ComputeHere = Callable[[torch.Tensor, torch.Tensor, Pairs], None]
"""Adds to `out` what the pairs of a call without an answer give: (out, x, pairs)."""


@dataclass(frozen=True)
class Answer:
    """What the thread brings: the layer's split, and the call, None where another rank sends, with its result."""

    split: Split
    call: DeviceCall | None
    result: ExecuteResult | None

    @property
    def sums(self) -> NDArray[np.float32] | None:
        return None if self.result is None else self.result.y


class AsideLayer:
    def __init__(
        self, index: int, slots: HotSlots, link: DeviceLink | None, messenger: Messenger, compute_here: ComputeHere
    ) -> None:
        """link: None where another rank sends."""
        self.index = index
        self._slots, self._link, self._messenger = slots, link, messenger
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
            if taken.answer.result is not None:
                partial = messenger.sums(taken)
                self._routing.add_rows(out, partial, packet.sent_rows[: len(partial)])
                result = taken.answer.result
            elif call is not None:
                answered = False
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

        step.end_later(topk_ids.to(torch.int32), end)
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
        """Send the rows of a packet and wait for the device, at most until the deadline."""
        split = self._split(step, packet.ids, packet.weights)
        if self._link is None:
            return Answer(split, None, None)
        rows = packet.x[: len(split.device.sent_rows)]
        call = self._link.send(step, self.index, submit_ps, rows, split.device)
        return Answer(split, call, call.result())


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
