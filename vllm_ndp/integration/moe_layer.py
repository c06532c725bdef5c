"""One MoE layer, one step: split the (row, expert) pairs, run both halves at the same time, add them.

    decode rows   hot pairs -> hot slots (vLLM's fused kernel)     cold and offloaded pairs -> one message to the device
                  warm pairs -> the host's CPU
    prefill rows  hot pairs -> hot slots                           cold pairs -> streamed from the pool, or in the same
                                                                   message; in full precision either way

The message leaves before shared and hot experts are computed and its answer is collected after; what the device returns
is a weighted partial sum, added before vLLM's tensor-parallel all-reduce. If no valid answer comes, the same pairs are
computed here. Knows tensors of one layer; does not know how a plan was made.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.integration.batch import RowLocator
from vllm_ndp.integration.cuda.layer import AsideLayer, FixedOutput
from vllm_ndp.integration.cuda.messenger import Messenger
from vllm_ndp.integration.device_link import DeviceCall
from vllm_ndp.integration.few_rows import FewRows
from vllm_ndp.integration.hot_experts import HotExperts
from vllm_ndp.integration.hot_slots import ALIAS_PAIRS, SlotPairs
from vllm_ndp.integration.leaders_device import Device
from vllm_ndp.integration.pairs import (
    Pairs,
    Split,
    keep_warm,
    send_prompts,
    split_among_ranks,
    split_arrays,
    split_lists,
)
from vllm_ndp.integration.planner import Planner
from vllm_ndp.integration.quantized_slots import QuantizedSlots
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.integration.step import RunningStep, Step
from vllm_ndp.integration.warm_experts import WarmExperts
from vllm_ndp.simulation.balance import Balancer, LayerLoad
from vllm_ndp.simulation.devices import DevicesBalancer
from vllm_ndp.simulation.prefill_split import PrefillSplit

Shared = Callable[[torch.Tensor], torch.Tensor]
"""Shared experts: [T, H] -> [T, H], a fresh tensor."""

LAYERS: WeakValueDictionary[str, MoELayer] = WeakValueDictionary()
"""An operator takes strings, not objects: layers by name, the engine's number in front."""


class MoELayer:
    def __init__(
        self,
        index: int,
        hot: HotExperts,
        device: Device,
        planner: Planner,
        sidecar: RoutingSidecar,
        locator: RowLocator,
        running: RunningStep,
        balancer: Balancer | DevicesBalancer | None,
        prefill_split: PrefillSplit | None,
        *,
        weighs_input: bool = False,
        shared: Shared | None = None,
        messenger: Messenger | None = None,
        fixed: FixedOutput | None = None,
        warm: WarmExperts | None = None,
        bytes_of_width: NDArray[np.int64] | None = None,
    ) -> None:
        """balancer: None where hot experts never leave the GPU. prefill_split: None where the device computes nothing
        of prompts. weighs_input: the router's one weight is for x. shared: the shared experts, where they are ours to
        run. messenger: where decode layers do not wait for the GPU. fixed: where a captured graph reads what this layer
        gives. warm: None where the host's CPU computes no experts. bytes_of_width [256]: of a hot expert on the
        simulated GPU, None where all have one width."""
        self.index = index
        self._hot, self._slots = hot, hot.layers[index]
        self._device, self._planner, self._sidecar = device, planner, sidecar
        self._locator, self._running, self._balancer = locator, running, balancer
        self._prefill_split = prefill_split
        self._weighs_input = weighs_input
        self._shared, self._fixed, self._warm, self._bytes_of_width = shared, fixed, warm, bytes_of_width
        self._aside = (
            None if messenger is None else AsideLayer(index, self._slots, device, messenger, self._compute_here)
        )

    def forward(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, beside: Callable[[], object] = object
    ) -> torch.Tensor:
        """x [T, H], topk_weights f32 [T, k], topk_ids [T, k] global expert ids -> a fresh tensor [T, H].

        beside: is called once, when the message has left, and may take as long as the device does.
        """
        step = self._running.step
        if step is None:
            beside()
            out = self._slots.run_anything(self._weighed(x, topk_weights), self._applied(topk_weights), topk_ids)
            return out if self._fixed is None else self._fixed.hold(out)
        try:
            out = self._forward(step, x, topk_weights, topk_ids, beside)
            return out if self._fixed is None else self._fixed.hold(out)
        except BaseException:
            step.abandon()  # whoever asks for the step's report now must not hide the cause
            raise

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
        num_rows = self._begin(step, topk_weights, topk_ids)
        x = self._weighed(x, topk_weights)
        if num_rows == x.shape[0]:
            return self._run(step, x, topk_weights, topk_ids, beside)
        out = torch.zeros_like(x)  # rows past the scheduled ones are padding of a captured graph
        out[:num_rows] = self._run(step, x[:num_rows], topk_weights[:num_rows], topk_ids[:num_rows], beside)
        return out

    def _weighed(self, x: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The input of the experts, weighed where that is how the model does it."""
        return x * topk_weights.to(x.dtype) if self._weighs_input else x

    def _applied(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """What outputs are weighed with: 1 where the input was. Planning and balancing see the router's weights."""
        return torch.ones_like(topk_weights) if self._weighs_input else topk_weights

    def _begin(self, step: Step, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> int:
        """Wait for the hot slots, write the router's choices beside the KV cache; returns the number of real rows."""
        self._hot.wait(self.index)
        if not step.started:
            step.start(*self._locator.locate(step.spans))
        num_rows = step.rows.num_rows
        if step.few is None:
            self._sidecar.write(self.index, step.slot_mapping, topk_ids[:num_rows], topk_weights[:num_rows])
        return num_rows

    def _run(
        self,
        step: Step,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Callable[[], object],
    ) -> torch.Tensor:
        if step.few is not None:
            return self._run_few(step.few, step, x, topk_weights, topk_ids, beside)
        if self._aside is not None and self._aside.takes(step):
            return self._aside.run(step, x, self._applied(topk_weights), topk_ids, beside)
        step.begin_layer()
        split = self._split(step, topk_weights, topk_ids)
        if self._warm is not None:
            split = keep_warm(split, self._planner.warm(self.index))
        split = self._split_prompts(step, split)
        call = self._device.submit(step, self.index, x, split)
        try:
            beside()
            warm = None if self._warm is None else self._warm.begin(self.index, x, split.warm)
            out = self._slots.run(x, split.hot)
            host_ps = 0 if warm is None else warm.add(out)
            self._stream(out, x, split.stream, self._planner.slots_to_keep(step, self.index, split.stream))
            device_ps = self._collect(step, call, out, x, split.device)
        except BaseException:
            if call is not None:
                call.abandon()
            raise
        step.end_layer(self.index, split, device_ps, host_ps, self._hot_bytes(split.hot))
        return out

    def _hot_bytes(self, pairs: SlotPairs) -> int | None:
        """What the hot experts of these pairs take in simulated GPU memory, where each has a width of its own."""
        if self._bytes_of_width is None:
            return None
        assert isinstance(self._slots, QuantizedSlots)
        widths = self._planner.widths(self.index)[self._slots.experts_in(pairs.slots)]
        return int(self._bytes_of_width[widths].sum())

    def _run_few(
        self,
        few: FewRows,
        step: Step,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Callable[[], object],
    ) -> torch.Tensor:
        """The same for few decode rows, whose split, counts and clock are one native call."""
        count = few.split(self.index, topk_weights, topk_ids, offload=self._balancer is not None and self._device.is_up)
        if not count:
            beside()
            return few.run_hot(self._slots, x)
        call = self._device.submit_few(step.number, self.index, x, few, count)  # None: another rank sends
        try:
            beside()
            out = few.run_hot(self._slots, x)
            if call is None:
                few.end_layer(count, 0)
                return out
            if (answer := call.result()) is not None:
                few.add(out, answer.y)
                few.end_layer(count, answer.timing.total_ps)
                step.device.add(answer.timing)
                return out
            self._compute_here(call, out, x, few.device_pairs(count))
        except BaseException:
            if call is not None:
                call.abandon()
            raise
        few.end_layer(count, None)
        return out

    def _split(self, step: Step, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> Split:
        if (owners := self._hot.owners(self.index)) is not None:
            return self._split_among_ranks(step, topk_weights, topk_ids, owners)
        is_few = topk_ids.numel() <= ALIAS_PAIRS and step.rows.all_decode
        if is_few and self._slots.takes_few_rows and self._warm is None:
            return self._split_few(step, topk_weights, topk_ids)
        expert_map, offloaded = self._slots.expert_map, frozenset[int]()
        if (balancer := self._balancer_now(step)) is not None:
            is_hot, weights = (expert_map >= 0).cpu().numpy(), topk_weights.float().cpu().numpy()
            ids, bits = topk_ids.cpu().numpy().astype("int64"), step.bits_by_row(self.index)
            if self._warm is None:
                load = LayerLoad.of_arrays(is_hot, ids, weights, bits)
            else:
                is_warm = self._planner.warm(self.index)
                load = LayerLoad.of_arrays(is_hot, ids, weights, bits, is_warm, self._warm.layer_ps(ids, is_warm))
            if offloaded := balancer.offloaded(load):
                gone = torch.tensor(sorted(offloaded), device=expert_map.device)
                expert_map = expert_map.index_fill(0, gone, -1)
        applied = self._applied(topk_weights)
        return split_arrays(expert_map, topk_ids, applied, step.rows.decode)._replace(offloaded=offloaded)

    def _split_among_ranks(
        self, step: Step, topk_weights: torch.Tensor, topk_ids: torch.Tensor, owners: NDArray[np.int64]
    ) -> Split:
        """owners [E]: the rank that holds each hot expert; what is offloaded is so on every rank."""
        offloaded = frozenset[int]()
        if (balancer := self._balancer_now(step)) is not None:
            ids, weights = topk_ids.cpu().numpy().astype("int64"), topk_weights.float().cpu().numpy()
            load = LayerLoad.of_arrays(owners >= 0, ids, weights, step.bits_by_row(self.index))
            if offloaded := balancer.offloaded(load):
                owners = owners.copy()
                owners[sorted(offloaded)] = -1
        rank, decode = self._hot.rank, step.rows.decode
        applied = self._applied(topk_weights)
        split = split_among_ranks(self._slots.expert_map, owners, rank, topk_ids, applied, decode)
        return split._replace(offloaded=offloaded)

    def _split_few(self, step: Step, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> Split:
        ids, weights = topk_ids.tolist(), topk_weights.tolist()
        expert_map, offloaded = self._slots.expert_map_list, frozenset[int]()
        if (balancer := self._balancer_now(step)) is not None:
            load = LayerLoad.of_lists([slot >= 0 for slot in expert_map], ids, weights, step.bits_by_row(self.index))
            if offloaded := balancer.offloaded(load):
                expert_map = [-1 if expert in offloaded else slot for expert, slot in enumerate(expert_map)]
        if self._weighs_input:
            weights = [[1.0] * len(row) for row in weights]
        return split_lists(expert_map, ids, weights, self._applied(topk_weights))._replace(offloaded=offloaded)

    def _split_prompts(self, step: Step, split: Split) -> Split:
        """Of the pairs that would be streamed, the device computes those of the experts that it has sooner."""
        if self._prefill_split is None or not len(split.stream.rows) or not self._device.is_up:
            return split
        decode = split.device.experts, step.bits_of(self.index, split.device)
        return send_prompts(split, self._prefill_split.on_device(split.stream.experts, *decode))

    def _balancer_now(self, step: Step) -> Balancer | DevicesBalancer | None:
        """None where hot experts stay on the GPU: by the settings, in a step with prompts, and without a device."""
        return self._balancer if self._balancer and step.rows.all_decode and self._device.is_up else None

    def _collect(
        self, step: Step, call: DeviceCall | None, out: torch.Tensor, x: torch.Tensor, pairs: Pairs
    ) -> int | None:
        """Add what the device returns, or the same pairs computed here. Simulated ps; None: there was no answer."""
        if call is None:  # nothing to send, or another rank sends
            return 0
        if (answer := call.result()) is not None:
            call.add(out, answer)
            step.device.add(answer.timing)
            return int(answer.timing.total_ps)
        self._compute_here(call, out, x, pairs)
        return None

    def _compute_here(self, call: DeviceCall, out: torch.Tensor, x: torch.Tensor, pairs: Pairs) -> None:
        """The device gave no valid answer: add the same pairs, computed in this process."""
        here = self._device.compute_locally(call, x, pairs)
        out.add_(self._hot.stream_whole(self.index, x, pairs) if here is None else here)

    def _stream(self, out: torch.Tensor, x: torch.Tensor, pairs: Pairs, keep: dict[int, int]) -> None:
        """Add the pairs in full precision from the pool; one rounding for all. keep: expert -> slot to stay in."""
        if len(pairs.rows):
            out.add_(self._hot.stream(self.index, x, pairs, keep))
