"""One MoE layer, one step: split the (row, expert) pairs, run all sides at the same time, add them, account.

The device's message leaves before shared and hot experts are computed, and its answer is collected after. The answer is
a weighted partial sum, added before vLLM's tensor-parallel all-reduce. If no valid answer comes, the same pairs are
computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from vllm_ndp.integration.cuda.layer import AsideLayer, FixedOutput, RunningStep
from vllm_ndp.integration.cuda.limits import refuse_capture
from vllm_ndp.integration.cuda.messenger import Messenger
from vllm_ndp.integration.device_link import DeviceView, add_sums, sent_rows
from vllm_ndp.integration.host_replicas import HostExperts
from vllm_ndp.integration.hot_experts import HotExperts
from vllm_ndp.integration.hot_slots import HotSlots, SlotPairs
from vllm_ndp.integration.planner import PlanRunner
from vllm_ndp.integration.price_probe import Shared
from vllm_ndp.integration.routing_sidecar import Routed
from vllm_ndp.integration.step import Step
from vllm_ndp.layer.split import HotArrays, Pairs, Split, Splitter

_MOST_KNOWN = 4096
"""Forms of hot pairs whose tensors are kept: to make them costs more than to split few rows."""


class HotViews:
    """On a CPU views of what the splitter has written, valid until the next split; on a GPU a copy."""

    def __init__(self, splitter: Splitter, device: torch.device) -> None:
        self._splitter, self._on_gpu = splitter, device.type != "cpu"
        self._arrays: HotArrays | None = None
        self._known: dict[tuple[int, int, bool], SlotPairs] = {}

    def of(self, split: Split, slots: HotSlots, topk_ids: torch.Tensor, applied: torch.Tensor) -> SlotPairs | None:
        """topk_ids [T, k]; applied f32 [T, k]: what outputs are multiplied with. None where no pair is hot here."""
        splitter, num_hot, num_rows = self._splitter, split.num_hot, topk_ids.shape[0]
        if not num_hot:
            return None
        if self._on_gpu:
            if not splitter.native.moved():  # the table says it all, where the GPU has it
                return SlotPairs(slots.expert_map[topk_ids], applied)
            where = torch.from_numpy(splitter.hot.where[: topk_ids.numel()]).to(topk_ids.device)
            return SlotPairs(where.view(topk_ids.shape), applied)
        if split.num_columns:
            pairs = self._of(num_rows, split.num_columns)
            return pairs._replace(idle_rows=split.idle_rows) if split.idle_rows else pairs
        if num_hot == num_rows * splitter.top_k:
            return self._of(num_rows, splitter.top_k)
        return self._of(num_hot, 1, are_listed=True)

    def _of(self, num_rows: int, num_columns: int, *, are_listed: bool = False) -> SlotPairs:
        """Pairs that the splitter has written, as a table of so many rows or one after the other."""
        arrays, key = self._splitter.hot, (num_rows, num_columns, are_listed)
        if self._arrays is not arrays or len(self._known) > _MOST_KNOWN:  # a step needed more room
            self._arrays, self._known = arrays, {}
        if (known := self._known.get(key)) is None:
            size, shape = num_rows * num_columns, key[:2]
            slots, weights = (torch.from_numpy(each[:size]) for each in (arrays.slots, arrays.topk_weights))
            rows = torch.from_numpy(arrays.rows[:size]) if are_listed else None
            known = self._known[key] = SlotPairs(slots.view(shape), weights.view(shape), rows)
        return known


LAYERS: WeakValueDictionary[str, MoELayer] = WeakValueDictionary()
"""An operator takes strings, not objects: layers by name, the engine's number in front."""


@dataclass(frozen=True)
class LayerParts:
    """Parts that the layers of a worker share."""

    hot: HotExperts
    device: DeviceView
    planner: PlanRunner
    running: RunningStep
    views: HotViews
    host: HostExperts | None = None
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
        self.aside = None
        if parts.messenger is not None:
            self.aside = AsideLayer(index, self._slots, self._link, parts.host, parts.messenger, self._compute_here)

    def run(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, beside: Callable[[], object] = object
    ) -> torch.Tensor:
        """x [T, H], topk_weights f32 [T, k], topk_ids [T, k] global expert ids -> a fresh tensor [T, H].

        beside: is called once, when the message has left, and may take as long as the device does.
        """
        step = self._parts.running.step
        if self._parts.weighs_input:
            x = x * topk_weights.to(x.dtype)
        routed = Routed(x, topk_weights, topk_ids)
        if step is None:
            whole = self._parts.running.whole
            if whole is not None and self.aside is not None and whole.takes(len(x)):
                return whole.launch(self.aside, routed, beside)
            if not self._parts.running.captures_whole_steps or whole is not None:
                refuse_capture(self.index, x)
            beside()
            out = self._slots.run_anything(x, self._applied(topk_weights), topk_ids)
        else:
            try:
                out = self._run_in(step, routed, beside)
            except BaseException:
                step.abandon()  # whoever asks for the step's report now must not hide the cause
                raise
        return out if self._fixed is None else self._fixed.hold(out)

    def run_with_shared(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, shared_input: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and what the layer's shared experts make of shared_input [T, H]."""
        shared, outputs = self._shared, list[torch.Tensor]()
        assert shared is not None
        routed = self.run(x, topk_weights, topk_ids, lambda: outputs.append(shared(shared_input)))
        return routed, outputs[0]

    def _run_in(self, step: Step, routed: Routed, beside: Callable[[], object]) -> torch.Tensor:
        self._parts.hot.wait(self.index)
        if not step.started:
            step.start()
        num_rows = step.rows.num_rows
        if num_rows == routed.x.shape[0]:
            return self._run_rows(step, routed, beside)
        out = torch.zeros_like(routed.x)  # rows past the scheduled ones are padding of a captured graph
        out[:num_rows] = self._run_rows(step, Routed(*(each[:num_rows] for each in routed)), beside)
        return out

    def _applied(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """Weights for the outputs: 1 where the input was weighed. Planning and balancing see the router's weights."""
        return torch.ones_like(topk_weights) if self._parts.weighs_input else topk_weights

    def _run_rows(self, step: Step, routed: Routed, beside: Callable[[], object]) -> torch.Tensor:
        """Split, start what runs beside, compute the hot pairs, collect, account."""
        x, topk_weights, topk_ids = routed
        parts, note = self._parts, step.note_of(self.index)
        aside = self.aside if self.aside is not None and self.aside.takes(step) else None
        if note is not None and (aside is None or parts.weighs_input):
            note.write(routed)
            note = None
        if aside is not None:
            return aside.run(step, Routed(x, self._applied(topk_weights), topk_ids), note, beside)
        run, (ids, weights) = step.take(), _on_host(topk_ids, topk_weights)
        run.clock.begin_layer()
        chosen = ids.data_ptr(), weights.data_ptr()
        split = run.splitter.split(self.index, *chosen, with_device=self._device.takes_pairs)
        hot = parts.views.of(split, self._slots, topk_ids, self._applied(topk_weights))
        call, answered = None, True
        if split.device and self._link is not None:  # of several ranks the leader alone sends
            call = self._link.send(step, self.index, x, split.device)
        try:
            warm = None
            if split.warm and parts.host is not None:  # its rows leave before hot experts keep a GPU busy
                warm = sent_rows(x, split.warm)
            beside()
            out = self._slots.run(x, hot)
            if split.stream:  # of a prompt: one sum in float32, rounded at its end; some experts stay where they pass
                keep = parts.planner.slots_to_keep(step, self.index, split.stream)
                out = out.float().add_(parts.hot.stream(self.index, x, split.stream, keep))
            if warm is not None and parts.host is not None:
                add_sums(out, parts.host.execute(self.index, warm, split.warm), split.warm.sent_rows)
            if call is not None:  # the device takes longest: it was the first to start, and comes last
                answered = call.add(out)
            if not answered:
                self._compute_here(out, x, split.device)
        except BaseException:
            if call is not None:
                call.abandon()
            raise
        step.end_layer(self.index, split, None if call is None else call.answer, answered=answered)
        return out.to(x.dtype)

    def _compute_here(self, out: torch.Tensor, x: torch.Tensor, pairs: Pairs) -> None:
        """The device gave no valid answer: add the same pairs, computed in this process."""
        assert self._link is not None
        if (sums := self._link.stand_in(self.index, sent_rows(x, pairs), pairs)) is None:
            out.add_(self._parts.hot.stream_whole(self.index, x, pairs))
        else:
            add_sums(out, sums, pairs.sent_rows)


def _on_host(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """i32 and f32 [T, k], contiguous, in the host's memory: from a GPU in one copy.

    A conversion to what a tensor is already costs more than the split of few rows.
    """
    ids = topk_ids if topk_ids.dtype is torch.int32 else topk_ids.to(torch.int32)
    weights = topk_weights if topk_weights.dtype is torch.float32 else topk_weights.to(torch.float32)
    if ids.is_cpu:
        return ids.contiguous(), weights.contiguous()
    ids, bits = torch.stack([ids, weights.view(torch.int32)]).cpu()
    return ids, bits.view(torch.float32)
