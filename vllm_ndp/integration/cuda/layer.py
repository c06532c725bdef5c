"""One MoE layer of a decode step with one wait for the GPU: what `moe_layer` does for few rows, in another order.

Splits on the GPU, which writes the packet for the host; sends it and launches the hot experts. Only then waits for the
device and the host's CPU, which compute the rest. With every expert here there is nothing to send or to wait for. The
layer's counts are then read when somebody asks for the step's report. Gives what the eager layer gives, but for the
rounding of rows that both computed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.transport.sender_thread import Order, State
from vllm_ndp.integration.cuda.messenger import MOST_ROWS, Messenger, Packet
from vllm_ndp.integration.cuda.packet import Fields, HostFields
from vllm_ndp.integration.device_link import DeviceCall, DeviceLink, as_float32
from vllm_ndp.integration.host_replicas import HostExperts
from vllm_ndp.integration.hot_slots import CudaSlotKernel, HotSlots
from vllm_ndp.integration.routing_sidecar import Note, Routed
from vllm_ndp.integration.step import Step
from vllm_ndp.layer.split import Pairs, Split

ComputeHere = Callable[[torch.Tensor, torch.Tensor, Pairs], None]
"""Adds to `out` what the pairs of a call without an answer give: (out, x, pairs)."""
StandIn = Callable[[int, NDArray[np.float32], Pairs], NDArray[np.float32]]
"""What they give, on the CPU: (layer, their rows f32 [S, H], pairs) -> sums f32 [S, H]."""


class AsideLayer:
    def __init__(
        self,
        index: int,
        slots: HotSlots,
        link: DeviceLink | None,
        host: HostExperts | None,
        messenger: Messenger,
        compute_here: ComputeHere,
    ) -> None:
        """link: None where another rank sends. host: None where this rank's CPU computes no experts."""
        self.index = index
        self._slots, self._link, self._host, self._messenger = slots, link, host, messenger
        self._compute_here = compute_here
        self._routing = messenger.routing
        self._kernel, self._held = slots.running()
        self._num_slots, self._num_experts = len(slots.expert_in), len(slots.expert_map)
        has_spare_id = isinstance(self._kernel, CudaSlotKernel) and self._num_slots < self._num_experts
        self._elsewhere = self._num_slots if has_spare_id else -1

    def takes(self, step: Step) -> bool:
        """Whether a step's layers go this way: decode rows that fit the buffers."""
        return step.rows.num_rows <= MOST_ROWS and step.rows.all_decode

    @property
    def holds_everything(self) -> bool:
        return self._num_slots == self._num_experts and bool((self._slots.expert_in >= 0).all())

    def run(self, step: Step, routed: Routed, note: Note | None, beside: Callable[[], object]) -> torch.Tensor:
        """A fresh tensor [T, H]. routed: with weights as outputs are weighed. note: where the routing is to be noted,
        if it is not yet."""
        if self.holds_everything:
            out = self._launch(routed, note, beside, asks=False)
            self.note_later(step)
            return out
        x = routed.x
        step.take().clock.begin_layer()
        packet = self._messenger.packet(len(x))
        here, asked = packet.here, None
        ahead = self._send_ahead(step, packet)
        try:
            self._routing.split(self._slots.expert_map, routed, here, self._elsewhere, note)
            if ahead is None:
                asked = self._ask(step, packet)
            beside()
            out = self._run_hot(here, are_named=self._elsewhere >= 0)
            if ahead is not None:
                asked, ahead = self._sent_ahead(step, packet, ahead, packet.require), None
            assert asked is not None
            sums = self._sums(packet.arrays, asked)
        except BaseException:
            if ahead is not None:
                self._abandon(packet, ahead)
            if asked is not None and asked.call is not None:
                asked.call.abandon()
            raise
        split, call, _ = asked
        if sums is not None:
            self._routing.add_rows(out, self._messenger.bring(sums), here.sent_rows[: len(sums)])
        answered = call is None or call.answer is not None
        if not answered:
            self._compute_here(out, x, split.device)
        step.end_layer(self.index, split, None if call is None else call.answer, answered=answered)
        return out

    # -- in a graph of the whole step -----------------------------------------------------------------------------

    def launch(self, routed: Routed, note: Note, beside: Callable[[], object], *, asks: bool) -> torch.Tensor:
        """All of a layer by the GPU alone, for a graph: it asks the host, if it does, and waits for the answer there.
        The arguments are those of `run`, with padding behind the rows that count."""
        messenger, num_rows = self._messenger, len(routed.x)
        out = self._launch(routed, note, beside, asks=asks, live=messenger.live)
        if asks:
            here = messenger.packet(num_rows).here
            self._routing.take_answer(messenger.answer, out, messenger.host_sums[:num_rows], here)
        return out

    def _launch(
        self,
        routed: Routed,
        note: Note | None,
        beside: Callable[[], object],
        *,
        asks: bool,
        live: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """asks: whether some rows may leave. live: of a graph, how many rows are no padding."""
        here, elsewhere = self._messenger.packet(len(routed.x)).here, self._elsewhere if asks else -1
        self._routing.split(self._slots.expert_map, routed, here, elsewhere, note, asks, live)
        beside()
        are_named = elsewhere >= 0 if asks else isinstance(self._kernel, CudaSlotKernel)
        return self._run_hot(here, are_named=are_named, in_graph=live is not None)

    def serve(self, step: Step, packet: Packet, watch: Callable[[], object], stand_in: StandIn) -> None:
        """The host's side of `launch`: what the GPU asks, it gets. watch: raises where no question will come."""
        step.take().clock.begin_layer()
        asked, ahead = None, self._send_ahead(step, packet)
        try:
            if ahead is None:
                packet.look(watch)
                asked = self._send(step, packet.arrays, self._split(step, *packet.arrays.addresses))
            else:
                asked, ahead = self._sent_ahead(step, packet, ahead, watch), None
            sums = self._sums(packet.arrays, asked)
        except BaseException:
            if ahead is not None:
                ahead.order.sender.cancel()
            if asked is not None and asked.call is not None:
                asked.call.abandon()
            raise
        split, call, left = asked
        answered = call is None or call.answer is not None
        if not answered:  # on the CPU, because the GPU waits
            rows = _places(left, split.device)
            here = stand_in(self.index, as_float32(packet.arrays.x[rows]), split.device)
            parts = [(rows, here)] if sums is None else [(np.arange(len(left)), sums), (rows, here)]
            sums = _added(parts, len(left))
        self._messenger.put(sums)
        step.end_layer(self.index, split, None if call is None else call.answer, answered=answered)

    def note_later(self, step: Step) -> None:
        """The host's side of a layer that does not ask."""
        step.end_later(self.index, self._counted(step))

    def _counted(self, step: Step) -> Callable[[NDArray[np.int32]], None]:
        def end(found: NDArray[np.int32]) -> None:
            step.take().clock.begin_layer()
            weights = np.ones(found.shape, np.float32)  # nothing leaves with them
            step.end_layer(self.index, self._split(step, found.ctypes.data, weights.ctypes.data), None)

        return end

    def _run_hot(self, here: Fields, *, are_named: bool, in_graph: bool = False) -> torch.Tensor:
        """are_named: no slot is -1, so that the kernel may take them as they are."""
        if not self._num_slots:
            return torch.zeros_like(here.x_here)

        def compute() -> torch.Tensor:
            run = self._kernel.run
            if are_named:
                assert isinstance(self._kernel, CudaSlotKernel)
                run = self._kernel.run_named
            return run(here.x_here, self._held, here.weights_here, here.slots)

        if in_graph or self._messenger.graphs is None:
            return compute()
        return self._messenger.graphs.run((self.index, are_named), here.x_here, compute)

    def _split(self, step: Step, topk_ids: int, topk_weights: int) -> Split:
        """The same as on the GPU: the pairs of a message, and what counts. Addresses of i32 and f32 [T, k]."""
        return step.parts.run.splitter.split(self.index, topk_ids, topk_weights, with_device=False)

    def _ask(self, step: Step, packet: Packet) -> _Asked:
        """Wait for the packet, and send."""
        split = self._split(step, *packet.fetch().addresses)
        return self._send(step, packet.arrays, split)

    def _send(self, step: Step, packet: HostFields, split: Split) -> _Asked:
        """Send the device its rows of a packet, if anything is asked of it here."""
        pairs, left = split.device, _rows_that_left(split)
        if not pairs or self._link is None:
            return _Asked(split, None, left)
        rows = packet.x[: len(left)] if len(pairs.sent_rows) == len(left) else packet.x[_places(left, pairs)]
        return _Asked(split, self._link.send_rows(step, self.index, step.parts.run.clock.now_ps, rows, pairs), left)

    def _send_ahead(self, step: Step, packet: Packet) -> _Ahead | None:
        """Have the packet sent when it is there, where a thread can do that."""
        if self._link is None or (order := packet.order(step.parts.run.splitter, self.index)) is None:
            return None
        handle = self._link.send_ahead(step, self.index, order, packet.arrays.x)
        return None if handle is None else _Ahead(order, handle)

    def _sent_ahead(self, step: Step, packet: Packet, ahead: _Ahead, require: Callable[[], object]) -> _Asked:
        """Go on from where the thread has come to."""
        assert self._link is not None
        outcome = ahead.order.sender.end(require)
        if outcome.state is State.LEFT:  # it has seen the packet
            return self._send(step, packet.arrays, self._split(step, *packet.arrays.addresses))
        split = step.parts.run.splitter.found()
        if outcome.state is State.FOUND:
            return self._send(step, packet.arrays, split)
        if outcome.state is State.NOTHING:
            return _Asked(split, None, split.device.sent_rows)
        left = split.device.sent_rows
        sums = None if outcome.reply is None else self._messenger.arrived(outcome.reply.tensors[0].shape[0])
        call = self._link.sent_ahead(ahead.handle, outcome, packet.arrays.x[: len(left)], split.device, sums)
        return _Asked(split, call, left)

    def _abandon(self, packet: Packet, ahead: _Ahead) -> None:
        """The step is lost before the thread was asked: its answer, if there will be one, is for nobody."""
        ahead.order.sender.cancel()
        with contextlib.suppress(RuntimeError):  # what ended the step may be the GPU
            packet.fetch()

    def _sums(self, packet: HostFields, asked: _Asked) -> NDArray[np.float32] | None:
        """Sums of the rows that left, [n, H]. The host's CPU computes its own, then waits for the device's, at most
        until the deadline. None where nobody here computed any."""
        found = []
        split, call, left = asked
        if split.warm and self._host is not None:
            rows = _places(left, split.warm)
            found.append((rows, self._host.execute(self.index, as_float32(packet.x[rows]), split.warm)))
        if call is not None and (result := call.result()) is not None:
            if not split.warm:
                return result.y
            found.append((_places(left, split.device), result.y))
        return _added(found, len(left))


class _Asked(NamedTuple):
    """A layer that has asked the device, if for anything; left: the rows of its packet."""

    split: Split
    call: DeviceCall | None
    left: NDArray[np.int64]


class _Ahead(NamedTuple):
    """A message that a thread will send."""

    order: Order
    handle: Any


def _rows_that_left(split: Split) -> NDArray[np.int64]:
    """In order, as a packet has them."""
    if not split.warm:
        return split.device.sent_rows
    return np.union1d(split.device.sent_rows, split.warm.sent_rows)


def _places(left: NDArray[np.int64], pairs: Pairs) -> NDArray[np.int64]:
    """Places of some pairs' rows among those that left."""
    return np.searchsorted(left, pairs.sent_rows)


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


# -- a decode step as one graph of vLLM's ------------------------------------------------------------------------------


_RELEASE_S = 10.0
"""How long a graph is answered with nothing after its step has failed."""


class WholeStep:
    """The GPU runs through the graph, and the host serves each layer as it asks. One per worker, once there is a cache.

        GPU    attention, split, packet, hot experts, wait ......... add, attention, split, packet, ...
        host                    packet? send, answer, put ..................           packet? ...

    vLLM captures the model with our layers in it, and replays it with one launch, so the host launches nothing between
    two layers. Each layer writes its packet, and waits on the GPU for a word of the host. Every layer asks, even where
    no pair is cold: the next one writes over its packet. The host must not wait for the GPU meanwhile. Where all
    experts are hot nobody asks, and the routing is read when somebody wants the step's report.
    """

    def __init__(
        self,
        layers: Sequence[AsideLayer],
        messenger: Messenger,
        note_of: Callable[[int], Note],
        wait_for_moves: Callable[[], None],
        stand_in: StandIn,
    ) -> None:
        """note_of: where the routing of a layer is noted, at the addresses that a graph keeps. wait_for_moves: have the
        main stream wait for experts on their way into slots. stand_in: computes what a device did not answer."""
        self._layers, self._messenger, self._note_of = layers, messenger, note_of
        self._wait_for_moves, self._stand_in = wait_for_moves, stand_in
        self._asks: dict[int, bool] = {}
        """By the rows of a graph: whether its layers ask."""
        self._under_way: tuple[Step, int] | None = None

    def takes(self, num_rows: int) -> bool:
        """Whether layers of so many rows fit."""
        return num_rows <= MOST_ROWS

    # -- capture --------------------------------------------------------------------------------------------------

    def launch(self, layer: AsideLayer, routed: Routed, beside: Callable[[], object]) -> torch.Tensor:
        """A layer as a graph has it: in a capture, or in the run before it, which compiles what the capture needs."""
        messenger, x = self._messenger, routed.x
        asks = self._asks.setdefault(len(x), not all(each.holds_everything for each in self._layers))
        captures = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if not captures:  # nobody's rows: all of them are padding, and the answer is there
            self._wait_for_moves()  # a capture fails where another thread asks CUDA for memory
            messenger.live.zero_()
            messenger.answer[0] = int(asks)
        out = layer.launch(routed, self._note_of(layer.index), beside, asks=asks)
        if not captures:
            if x.is_cuda:
                torch.cuda.current_stream().synchronize()
            messenger.packet(len(x)).arrays.word[0] = 0
        return out

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin(self, step: Step, num_rows: int) -> None:
        """Before vLLM replays the graph of so many rows, padding included."""
        self._wait_for_moves()
        if not step.started:
            step.start()
        self._messenger.live.fill_(step.rows.num_rows)
        self._under_way = step, num_rows

    def serve(self) -> None:
        """After it has launched the graph: answer every layer, if one was begun."""
        if self._under_way is None:
            return
        (step, num_rows), self._under_way = self._under_way, None
        packet = self._messenger.packet(num_rows)
        if not self._asks[num_rows]:
            for layer in self._layers:
                layer.note_later(step)
            return
        try:
            for layer in self._layers:
                layer.serve(step, packet, self._watch, self._stand_in)
        except BaseException:
            step.abandon()
            self._release(packet)
            raise

    def _watch(self) -> None:
        """Raise where the graph runs no longer: what went wrong on the GPU, or that nobody asked."""
        if self._is_idle():
            raise RuntimeError("the graph of this step has ended, and not every MoE layer has asked the host")

    def _is_idle(self) -> bool:
        device = self._messenger.live.device
        return device.type == "cuda" and torch.cuda.current_stream(device).query()

    def _release(self, packet: Packet) -> None:
        """Let the graph of a failed step run to its end, so that memory can be freed."""
        ends_s = time.monotonic() + _RELEASE_S
        self._messenger.host_sums.numpy()[:] = 0
        try:
            while not self._is_idle() and time.monotonic() < ends_s:
                if packet.arrays.word[0]:
                    packet.arrays.word[0] = 0
                    self._messenger.put(None)
                time.sleep(0.0001)
        except RuntimeError:  # of the GPU; what ended the step is told
            return
        packet.arrays.word[0] = self._messenger.answer.numpy()[0] = 0


class RunningStep:
    """Which step runs now, for the layers: None outside of steps and while vLLM profiles memory."""

    def __init__(self, *, captures_whole_steps: bool = False) -> None:
        """captures_whole_steps: whether vLLM captures our layers; before there is a KV cache it does so to measure, and
        throws the graphs away."""
        self.captures_whole_steps = captures_whole_steps
        self.step: Step | None = None
        self.whole: WholeStep | None = None
        """What decode steps run as one graph by, once there is a KV cache."""
