"""One layer's way to the device and back: a packet to the host, partial sums to the GPU.

    main stream   split, packet to the host                hot experts ............   sums in, add
    thread        ...................... packet there: send | answer
    host          begin | launches ...................................... end | add

The GPU writes the packet into the host's memory. Where the device shares memory with the host and cores suffice, a
thread sends it, while the host launches (transport/sender_thread.py). Else the host waits for the packet, sends, then
launches. Each buffer exists once: a packet has arrived only when the main stream has added what came back for the layer
before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.transport.sender_thread import Order, Places, SenderThread
from vllm_ndp.integration.cuda.packet import Fields, HostFields, RowForm
from vllm_ndp.integration.cuda.streams import Pinned, own_stream
from vllm_ndp.layer.split import Splitter

MOST_ROWS = 256
"""Most rows of a step whose layers go this way. A step with more rows computes for so long that waiting costs
little."""
CORES = 3
"""Fewest that the thread is used with: host, device and thread spin, and each needs one (docs/log/gpu.md)."""

LOOK_S = 0.1
"""After so long it is asked whether the GPU still runs."""

MOST_CAPTURED_ROWS = 32
"""Of a step that is captured: each layer keeps a graph for every number of rows that came."""

Compute = Callable[[], torch.Tensor]
"""Launches kernels on the current stream, from memory that stays where it is; [T, H]."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor  # [T, H]


class HotGraphs:
    """A layer's hot experts as one launch: captured when a step of so many rows comes again, replayed ever after.

    vLLM's operator launches its kernels one by one from Python, which costs the host more than the GPU. Rows, weights
    and slots lie where a packet has them, and slots keep their places when experts move: a graph of one step serves the
    next. One per worker. All graphs share memory, because they run one after the other.
    """

    def __init__(self, device: torch.device, most_rows: int = MOST_CAPTURED_ROWS) -> None:
        self._device, self._most_rows = device, most_rows
        self._stream: torch.cuda.Stream | None = None
        self._pool: tuple[int, int] | None = None
        self._out: torch.Tensor | None = None
        self._known: dict[Hashable, _Captured | None] = {}

    def run(self, key: Hashable, x: torch.Tensor, compute: Compute) -> torch.Tensor:
        """A fresh tensor like x [T, H]. key: what is computed from x."""
        num_rows = len(x)
        key = key, num_rows
        if num_rows > self._most_rows:
            return compute()
        if key not in self._known:  # Triton compiles what it has not seen, and vLLM takes memory that it keeps
            self._known[key] = None
            return compute()
        if (known := self._known[key]) is None:
            known = self._known[key] = self._capture(x, compute)
        known.graph.replay()
        return known.out.clone()

    def _capture(self, x: torch.Tensor, compute: Compute) -> _Captured:
        """Other threads may go on with copies meanwhile."""
        main = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream, self._pool = own_stream(self._device), torch.cuda.graph_pool_handle()
            self._out = x.new_empty(self._most_rows, x.shape[-1])
        assert self._out is not None
        graph, out = torch.cuda.CUDAGraph(), self._out[: len(x)]
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out.copy_(compute())
            finally:
                graph.capture_end()
        main.wait_stream(self._stream)
        return _Captured(graph, out)


@dataclass(frozen=True)
class Packet:
    """For steps of T rows, on both sides."""

    here: Fields
    arrays: HostFields
    places: Places
    _sender: SenderThread | None
    _seen: torch.Tensor
    _orders: dict[int, Order] = field(default_factory=dict)

    def order(self, splitter: Splitter, layer: int) -> Order | None:
        """For a thread that waits for it; None where there is none. splitter: the worker's."""
        if self._sender is not None and layer not in self._orders:
            self._orders[layer] = Order(self._sender, self.places, splitter.finder, layer)
        return self._orders.get(layer)

    def require(self) -> None:
        """Wait until the main stream has written it, which raises what went wrong there."""
        self._seen.copy_(self.here.head)

    def look(self, watch: Callable[[], object]) -> None:
        """Wait until a captured layer has written it. watch: is called now and then, and raises where none will."""
        look_again_s = time.monotonic() + LOOK_S
        while not self.arrays.word[0]:
            if time.monotonic() > look_again_s:
                watch()
                look_again_s = time.monotonic() + LOOK_S
        self.arrays.word[0] = 0

    def fetch(self) -> HostFields:
        """Wait for it, where no thread does."""
        self.require()
        self.arrays.word[0] = 0
        return self.arrays


class _Sums(NamedTuple):
    """The sums of so many rows, on both sides. Made once, since to cut a tensor takes longer than to copy a row."""

    array: NDArray[np.float32]
    pinned: torch.Tensor
    there: torch.Tensor


class Messenger:
    """One per worker."""

    def __init__(
        self,
        pinned: Pinned,
        device: torch.device,
        form: RowForm,
        routing: ModuleType,
        sender: SenderThread | None = None,
        graphs: HotGraphs | None = None,
    ) -> None:
        """routing: packet.py or kernels.py, which write packets and add sums. sender: of a thread that sends; the host
        does where None. graphs: of hot experts; each kernel is launched where None."""
        self.routing, self.graphs = routing, graphs
        self._sender = sender if len(os.sched_getaffinity(0)) >= CORES else None
        self._fields = Fields.allocate(MOST_ROWS, form, pinned, device)
        self._seen = pinned(4, dtype=torch.int32)
        self._sums = torch.zeros(MOST_ROWS, form.hidden, dtype=torch.float32, device=device)
        self.host_sums = pinned(MOST_ROWS, form.hidden, dtype=torch.float32)
        self.live = torch.zeros(1, dtype=torch.int32, device=device)
        """Rows of a captured step that are no padding."""
        self.answer = pinned(16, dtype=torch.int32)
        """The first is 1 when the sums are there that a captured layer waits for, which then clears it."""
        self._host_sums, self._answer = self.host_sums.numpy(), self.answer.numpy()
        self._by_rows: dict[int, Packet] = {}
        self._sums_by_rows: dict[int, _Sums] = {}

    @property
    def has_thread(self) -> bool:
        return self._sender is not None

    def packet(self, num_rows: int) -> Packet:
        """For so many rows: the main stream writes into it."""
        if (known := self._by_rows.get(num_rows)) is None:
            fields = self._fields.of_rows(num_rows)
            arrays = HostFields(fields)
            known = Packet(fields, arrays, arrays.places(self.host_sums), self._sender, self._seen)
            self._by_rows[num_rows] = known
        return known

    def arrived(self, num_rows: int) -> NDArray[np.float32]:
        """[n, H], where a packet's thread has put the sums."""
        return self._sums_of(num_rows).array

    def put(self, sums: NDArray[np.float32] | None) -> None:
        """Answer a captured layer that waits: [n, H] of the rows that left; None where none did."""
        if sums is not None and sums.ctypes.data != self._host_sums.ctypes.data:  # else a thread has put them there
            np.copyto(self._host_sums[: len(sums)], sums)
        self._answer[0] = 1

    def bring(self, sums: NDArray[np.float32]) -> torch.Tensor:
        """[n, H] on the device, for the main stream. The caller may write over `sums` at once, as a device does that
        lends the memory of its answer."""
        mine = self._sums_of(len(sums))
        if sums is not mine.array:
            np.copyto(mine.array, sums)
        return mine.there.copy_(mine.pinned, non_blocking=True)

    def _sums_of(self, num_rows: int) -> _Sums:
        if (known := self._sums_by_rows.get(num_rows)) is None:
            pinned = self.host_sums[:num_rows]
            known = self._sums_by_rows[num_rows] = _Sums(pinned.numpy(), pinned, self._sums[:num_rows])
        return known
