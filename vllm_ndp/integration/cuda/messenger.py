"""One layer's way to the device and back while the GPU computes: a packet out, a thread that sends, a partial sum in.

    main stream   split -> packet            hot experts ...............  add
    lane                        packet out                     sums in
    thread                                wait | send | receive
    host          launches ........................................ take

The thread waits for the packet, which is the only wait for the GPU in a layer. The host waits for the thread, the main
stream for the sums. Each buffer exists once. The next layer's packet arrives only when the main stream has added what
came back for this one. This layer's packet and sums are read before that. Knows buffers, lanes and the thread. Does not
know what is hot, nor how the device is asked: that is `ask`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.integration.cuda.lanes import Lane, Mark, Pinned
from vllm_ndp.integration.cuda.packet import Fields, HostFields, RowForm, lay_out, packet_bytes

MOST_ROWS = 256
"""Of a step whose layers go this way; what has more rows computes for so long that waiting costs little."""

Ask = Callable[[HostFields], Any]
"""Called by the thread when a packet has pairs that leave: sends them and returns the answer, if there is one with the
attribute `sums`."""


@dataclass(frozen=True)
class Buffers:
    """For steps of T rows: the packet on both sides."""

    here: Fields
    host: Fields
    arrays: HostFields


@dataclass(frozen=True)
class Taken:
    """Outcome of a packet: what `ask` returned, None where no pair left; and the way of the sums, if some came."""

    packet: HostFields
    answer: Any
    arrived: Mark | None


class Messenger:
    """One per worker. Strictly in turns: `begin`, then `take`."""

    def __init__(
        self,
        lane: Lane,
        pinned: Pinned,
        device: torch.device,
        form: RowForm,
        *,
        most_rows: int = MOST_ROWS,
        start_thread: Callable[[], object] = object,
    ) -> None:
        """start_thread: called once in the thread, before anything else. Raises what it raises."""
        self.most_rows = most_rows
        self.lane, self._form = lane, form
        size = packet_bytes(most_rows, *form)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host_memory = pinned(size, dtype=torch.uint8)
        self._sums = torch.zeros(most_rows, form.hidden, dtype=torch.float32, device=device)
        self._host_sums = pinned(most_rows, form.hidden, dtype=torch.float32)
        self._by_rows: dict[int, Buffers] = {}
        self._asked: SimpleQueue[tuple[Buffers, Mark, Ask] | None] = SimpleQueue()  # at most one, by the turns
        self._taken: SimpleQueue[Taken | BaseException] = SimpleQueue()
        self._under_way = False
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, args=(start_thread, started), name="ndp-messenger", daemon=True)
        self._thread.start()
        if (failed := started.get()) is not None:  # a thread that is not there would be waited for in every layer
            raise failed

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return int(self._memory.nbytes + self._sums.nbytes)

    def buffers(self, num_rows: int) -> Buffers:
        """The packet for so many rows; what is written into it leaves with `begin`."""
        if num_rows not in self._by_rows:
            here = lay_out(self._memory, num_rows, *self._form)
            host = lay_out(self._host_memory, num_rows, *self._form)
            self._by_rows[num_rows] = Buffers(here, host, HostFields(host))
        return self._by_rows[num_rows]

    def begin(self, buffers: Buffers, ask: Ask) -> None:
        """Send off the packet that the main stream was told to write."""
        if self._under_way:
            raise RuntimeError("a packet is under way: take what came of it first")
        self._under_way = True
        size = buffers.here.num_bytes
        self.lane.follow_main()
        self.lane.copy(self._host_memory[:size], self._memory[:size])
        self._asked.put((buffers, self.lane.mark(), ask))

    def take(self) -> Taken:
        """Wait for the thread. Raises what went wrong in it."""
        found = self._taken.get()
        self._under_way = False
        if isinstance(found, BaseException):
            raise found
        return found

    def sums(self, taken: Taken) -> torch.Tensor:
        """The partial sums f32 [n, H] on the device, for the main stream, which waits for them."""
        assert taken.arrived is not None
        taken.arrived.hold_main()
        return self._sums[: int(taken.packet.head[1])]

    def abandon(self) -> None:
        """An error ended the step: wait for the thread all the same, so that the next step begins in turn."""
        if self._under_way:
            self._taken.get()
            self._under_way = False

    def close(self) -> None:
        self.abandon()
        self._asked.put(None)
        self._thread.join()

    # -- in the thread --------------------------------------------------------------------------------------------

    def _serve(self, start_thread: Callable[[], object], started: SimpleQueue[BaseException | None]) -> None:
        try:
            start_thread()
        except BaseException as error:
            started.put(error)
            return
        started.put(None)
        while (asked := self._asked.get()) is not None:
            try:
                self._taken.put(self._answer(*asked))
            except BaseException as error:  # it belongs to the step, which waits for it
                self._taken.put(error)

    def _answer(self, buffers: Buffers, arrived: Mark, ask: Ask) -> Taken:
        arrived.wait_on_host()
        packet = buffers.arrays
        if not packet.head[0]:
            return Taken(packet, None, None)
        answer = ask(packet)
        sums: NDArray[np.float32] | None = getattr(answer, "sums", None)
        if sums is None:
            return Taken(packet, answer, None)
        # The device lends the memory of a large answer until the next message: a copy on the lane would read it later.
        self._host_sums.numpy()[: len(sums)] = sums
        self.lane.copy(self._sums[: len(sums)], self._host_sums[: len(sums)])
        return Taken(packet, answer, self.lane.mark())
