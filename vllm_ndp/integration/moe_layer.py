"""One MoE layer, one step: split the (row, expert) pairs, run all sides at the same time, add them, account.

The device's message leaves before shared and hot experts are computed, and its answer is collected after. The answer is
a weighted partial sum, added before vLLM's tensor-parallel all-reduce. If no valid answer comes, the same pairs are
computed here. Knows tensors of one layer; does not know how a plan was made, nor where a pair runs and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from vllm_ndp.integration.cuda.layer import AsideLayer, FixedOutput
from vllm_ndp.integration.cuda.limits import refuse_capture
from vllm_ndp.integration.cuda.messenger import Messenger
from vllm_ndp.integration.device import DeviceView
from vllm_ndp.integration.host_cpu import HostCpuExperts
from vllm_ndp.integration.hot_experts import HotExperts
from vllm_ndp.integration.planner import PlanRunner
from vllm_ndp.integration.slot_pairs import HotViews
from vllm_ndp.integration.step import RunningStep, Step
from vllm_ndp.integration.streamed_experts import StreamedExperts
from vllm_ndp.layer.split import Pairs

Shared = Callable[[torch.Tensor], torch.Tensor]
"""Shared experts: [T, H] -> [T, H], a fresh tensor."""

LAYERS: WeakValueDictionary[str, MoELayer] = WeakValueDictionary()
"""An operator takes strings, not objects: layers by name, the engine's number in front."""


class Pending(Protocol):
    """Pairs under way beside the hot slots: on the device, on the host's CPU, or of experts that stream through."""

    def add(self, out: torch.Tensor) -> bool:
        """Wait, and add the weighted sums to the rows of out [T, H]. False: nothing came, and nothing was added."""

    def abandon(self) -> None:
        """The step is lost: nothing is added, and nothing stays under way."""


@dataclass(frozen=True)
class LayerParts:
    """Parts that the layers of a worker share."""

    hot: HotExperts
    device: DeviceView
    planner: PlanRunner
    running: RunningStep
    views: HotViews
    stream: StreamedExperts
    host: HostCpuExperts | None = None
    """None where the host's CPU computes no experts, or another rank does that."""
    messenger: Messenger | None = None
    """Where decode layers do not wait for the GPU."""
    weighs_input: bool = False
    """The router's one weight is for x."""


class MoELayer:
    def __init__(
        self, index: int, parts: LayerParts, *, shared: Shared | None = None, fixed: FixedOutput | None = None
    ) -> None:
        """shared: the shared experts, where they are ours to run. fixed: where a captured graph reads what this layer
        gives."""
        self.index, self._parts = index, parts
        self._slots, self._device, self._link = parts.hot.layers[index], parts.device, parts.device.link
        self._shared, self._fixed = shared, fixed
        self._aside = None
        if parts.messenger is not None:
            self._aside = AsideLayer(index, self._slots, self._link, parts.host, parts.messenger, self._compute_here)

    def forward(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, beside: Callable[[], object] = object
    ) -> torch.Tensor:
        """x [T, H], topk_weights f32 [T, k], topk_ids [T, k] global expert ids -> a fresh tensor [T, H].

        beside: is called once, when the message has left, and may take as long as the device does.
        """
        step = self._parts.running.step
        if step is None:
            refuse_capture(self.index, x)
            beside()
            out = self._slots.run_anything(self._weighed(x, topk_weights), self._applied(topk_weights), topk_ids)
        else:
            try:
                out = self._forward(step, x, topk_weights, topk_ids, beside)
            except BaseException:
                step.abandon()  # whoever asks for the step's report now must not hide the cause
                raise
        return out if self._fixed is None else self._fixed.hold(out)

    def forward_with_shared(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, shared_input: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and what the layer's shared experts make of shared_input [T, H]."""
        shared, outputs = self._shared, list[torch.Tensor]()
        assert shared is not None
        routed = self.forward(x, topk_weights, topk_ids, lambda: outputs.append(shared(shared_input)))
        return routed, outputs[0]

    def _forward(
        self,
        step: Step,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Callable[[], object],
    ) -> torch.Tensor:
        self._parts.hot.wait(self.index)
        if not step.started:
            step.start()
        num_rows = step.rows.num_rows
        x = self._weighed(x, topk_weights)
        if num_rows == x.shape[0]:
            return self._run(step, x, topk_weights, topk_ids, beside)
        out = torch.zeros_like(x)  # rows past the scheduled ones are padding of a captured graph
        out[:num_rows] = self._run(step, x[:num_rows], topk_weights[:num_rows], topk_ids[:num_rows], beside)
        return out

    def _weighed(self, x: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The input of the experts, weighed where that is how the model does it."""
        return x * topk_weights.to(x.dtype) if self._parts.weighs_input else x

    def _applied(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """Weights for the outputs: 1 where the input was weighed. Planning and balancing see the router's weights."""
        return torch.ones_like(topk_weights) if self._parts.weighs_input else topk_weights

    def _run(
        self,
        step: Step,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Callable[[], object],
    ) -> torch.Tensor:
        """Split, start what runs beside, compute the hot pairs, collect, account."""
        parts = self._parts
        step.note_routing(self.index, topk_ids, topk_weights)
        if self._aside is not None and self._aside.takes(step):
            return self._aside.run(step, x, self._applied(topk_weights), topk_ids, beside)
        step.begin_layer()
        split = step.split(self.index, topk_ids, topk_weights, with_device=self._device.takes_pairs)
        hot = parts.views.of(split, self._slots, topk_ids, self._applied(topk_weights))
        pending, call = list[Pending](), None
        if split.device and self._link is not None:  # of several ranks the leader alone sends
            pending.append(call := self._link.start(step, self.index, x, split.device))
        if split.warm and parts.host is not None:
            pending.append(parts.host.start(self.index, x, split.warm))
        if split.stream:
            pending.append(parts.stream.start(step, self.index, x, split.stream))
        answered = True
        try:
            beside()
            out = self._slots.run(x, hot)
            if split.stream:  # of a prompt: one sum in float32, rounded at its end
                out = out.float()
            for each in reversed(pending):  # the device, which takes longest, is the first to start and comes last
                answered = each.add(out)
            if not answered:
                self._compute_here(out, x, split.device)
        except BaseException:
            for each in pending:
                each.abandon()
            raise
        step.end_layer(self.index, split, None if call is None else call.answer, answered=answered)
        return out.to(x.dtype)

    def _compute_here(self, out: torch.Tensor, x: torch.Tensor, pairs: Pairs) -> None:
        """The device gave no valid answer: add the same pairs, computed in this process."""
        assert self._link is not None
        here = self._link.compute_locally(self.index, x, pairs)
        out.add_(self._parts.hot.stream_whole(self.index, x, pairs) if here is None else here)
