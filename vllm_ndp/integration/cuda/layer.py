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
from vllm_ndp.integration.device_link import DeviceCall
from vllm_ndp.integration.hot_slots import CudaSlotKernel, HotSlots, SlotPairs
from vllm_ndp.integration.leaders_device import Device
from vllm_ndp.integration.pairs import NO_PAIRS, Pairs, Split
from vllm_ndp.integration.step import Step

ComputeHere = Callable[[DeviceCall, torch.Tensor, torch.Tensor, Pairs], None]
"""Adds to `out` what the pairs of a call without an answer give: (call, out, x, pairs)."""


@dataclass(frozen=True)
class Answer:
    """What the thread brings: the call, None where another rank sends; and its result, if it had one."""

    call: DeviceCall | None
    result: ExecuteResult | None

    @property
    def sums(self) -> NDArray[np.float32] | None:
        return None if self.result is None else self.result.y


class AsideLayer:
    def __init__(
        self, index: int, slots: HotSlots, device: Device, messenger: Messenger, compute_here: ComputeHere
    ) -> None:
        self.index = index
        self._slots, self._device, self._messenger = slots, device, messenger
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
        submit_ps = step.clock.now_ps
        messenger.begin(buffers, lambda arrived: self._ask(step, submit_ps, arrived))
        try:
            beside()
            out = self._run_hot(x, topk_weights, packet.slots, are_named=self._elsewhere >= 0)
        except BaseException:
            messenger.abandon()
            raise
        taken = messenger.take()
        pairs = _pairs(taken.packet)
        device_ps: int | None = 0
        if taken.answer is not None:
            device_ps = self._add(step, taken.answer, lambda: messenger.sums(taken), out, x, pairs, packet.sent_rows)
        counts = _counts(taken.packet.slots, self._num_slots)
        step.end_layer(self.index, Split(SlotPairs(packet.slots, topk_weights, counts), pairs, NO_PAIRS), device_ps)
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
            hot = SlotPairs(slots, topk_weights, _counts(found, self._num_slots))
            step.begin_layer()
            step.end_layer(self.index, Split(hot, NO_PAIRS, NO_PAIRS), 0)

        step.end_later(slots, end)
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

    def _add(
        self,
        step: Step,
        answer: Answer,
        sums: Callable[[], torch.Tensor],
        out: torch.Tensor,
        x: torch.Tensor,
        pairs: Pairs,
        sent_rows: torch.Tensor,
    ) -> int | None:
        """Add what the device returned, or the same pairs computed here. Simulated ps; None: there was no answer."""
        if answer.call is None:
            return 0
        if answer.result is None:
            self._compute_here(answer.call, out, x, pairs)
            return None
        partial = sums()
        self._routing.add_rows(out, partial, sent_rows[: len(partial)])
        step.device.add(answer.result.timing)
        return int(answer.result.timing.total_ps)

    # -- in the messenger's thread ---------------------------------------------------------------------------------

    def _ask(self, step: Step, submit_ps: int, packet: HostFields) -> Answer:
        """Send the rows of a packet and wait for the device, at most until the deadline."""
        num_pairs, num_rows = int(packet.head[0]), int(packet.head[1])
        call = self._device.send(
            step.number,
            submit_ps,
            self.index,
            packet.x[:num_rows],
            packet.sent_rows[:num_rows],
            packet.pair_rows[:num_pairs],
            packet.pair_experts[:num_pairs],
            step.bits_of(self.index, _pairs(packet)),
            packet.pair_weights[:num_pairs],
        )
        return Answer(call, None if call is None else call.result())


def _pairs(packet: HostFields) -> Pairs:
    """Those that leave, by row of the step."""
    count = int(packet.head[0])
    rows = packet.sent_rows[packet.pair_rows[:count]]
    return Pairs(rows, packet.pair_experts[:count].astype(np.int64), packet.pair_weights[:count].copy())


def _counts(slots: NDArray[np.int32], num_slots: int) -> list[int]:
    """Pairs of each slot that is in use. slots [T, k]; a slot that is none is not among the first num_slots."""
    here = slots[(slots >= 0) & (slots < num_slots)]
    counts = np.bincount(here, minlength=1)
    return counts[counts > 0].tolist()


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
