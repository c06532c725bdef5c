"""A decode step as one graph of vLLM's: the GPU runs through it, and the host serves each layer as it asks.

    GPU    attention, split, packet, hot experts, wait ......... add, attention, split, packet, ...
    host                    packet? send, answer, put ..................           packet? ...

vLLM captures the model with our layers in it, and replays it with one launch. So the host launches nothing between two
layers. Each layer writes its packet, and waits on the GPU for a word of the host. Every layer asks, even where no pair
is cold: the next one writes over its packet. The host must not wait for the GPU meanwhile, because the GPU waits for
it. Where all experts are hot nobody asks, and the routing is read when somebody wants the step's report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from vllm_ndp.integration.cuda.layer import AsideLayer, StandIn
from vllm_ndp.integration.cuda.messenger import Messenger, Packet
from vllm_ndp.integration.routing_sidecar import Note
from vllm_ndp.integration.step import Step

_RELEASE_S = 10.0
"""How long a graph is answered with nothing after its step has failed."""


class WholeStep:
    """One per worker, once there is a KV cache."""

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
        return num_rows <= self._messenger.most_rows

    # -- capture --------------------------------------------------------------------------------------------------

    def launch(
        self,
        layer: AsideLayer,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Callable[[], object],
    ) -> torch.Tensor:
        """A layer as a graph has it: in a capture, or in the run before it, which compiles what the capture needs."""
        messenger = self._messenger
        asks = self._asks.setdefault(len(x), not all(each.holds_everything for each in self._layers))
        captures = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if not captures:  # nobody's rows: all of them are padding, and the answer is there
            self._wait_for_moves()  # a capture fails where another thread asks CUDA for memory
            messenger.live.zero_()
            messenger.answer[0] = int(asks)
        out = layer.launch(x, topk_weights, topk_ids, self._note_of(layer.index), beside, asks=asks)
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
