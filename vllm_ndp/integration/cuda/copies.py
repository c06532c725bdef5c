"""Weights on their way into GPU memory: from a map of the host through pinned buffers, beside what computes.

Memory that is mapped from a file is pageable. The driver would copy it to buffers of its own with one thread, and have
the caller wait. Here some threads fill one buffer while the stream empties the other: vLLM leaves torch's own operators
one thread. Knows memory and streams; does not know experts, layers or plans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.integration.cuda.streams import Event, Pinned, Stream, make_stream, pinned_for

BUFFER_BYTES = 32 << 20
BUFFERS = 2
FILLERS = 4
"""Threads that fill a buffer together: one core copies from a map at a tenth of what a link of today carries."""
LEAST_FILLED = 1 << 20
"""Bytes that are worth a thread."""
SMALL_BYTES = 4096
_ALIGNED = 16


class PinnedCopies:
    """For one thread at a time, which must be inside the stream that reads what is copied."""

    def __init__(
        self, stream: Stream, pinned: Pinned, *, buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS
    ) -> None:
        self._stream, self._pinned = stream, pinned
        self._buffers = [pinned(buffer_bytes, dtype=torch.uint8) for _ in range(buffers)]
        self._emptied: list[Event | None] = [None] * buffers
        self._next = 0
        self._landing: list[torch.Tensor] = []  # on the GPU, for what is converted there
        self._taken: list[Event | None] = [None] * buffers
        self._small = pinned(SMALL_BYTES, dtype=torch.uint8)
        self._fillers = ThreadPoolExecutor(FILLERS, "ndp-filler")
        self._uploaded: Event | None = None

    def copy_all(self, copies: list[tuple[torch.Tensor, torch.Tensor]], after: Event | None = None) -> None:
        """Copy each source of the host, contiguous, to its place on the GPU, contiguous too; dtypes may differ.

        Work that the stream gets from now on comes after the copies. Work that it has got so far comes before: all,
        or up to the event `after`. The rest then runs beside the copies, and must not use their places.
        """
        if after is None:
            self._stream.wait_for_main()
        else:
            self._stream.wait_event(after)
        for target, source in copies:
            self._copy(target.view(-1), source.reshape(-1))
        self._stream.record_event().wait_on_main()

    def record_main(self) -> Event:
        """The point up to which the stream was given work, for `after`."""
        return self._stream.record_main()

    def upload(self, arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
        """Small arrays, flat and contiguous, on the GPU: one copy by the stream itself, for which the host does not
        wait. It waits for the upload before, whose memory this one needs."""
        ends = np.cumsum([-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays]).tolist()
        if self._uploaded is not None:
            self._uploaded.synchronize()
        if ends[-1] > len(self._small):
            self._small = self._pinned(2 * ends[-1], dtype=torch.uint8)
        places = list(zip([0, *ends[:-1]], arrays, strict=True))
        for start, array in places:
            self._small.numpy()[start : start + array.nbytes] = array.view(np.uint8)
        there = self._small[: ends[-1]].to(device, non_blocking=True, copy=True)
        self._uploaded = self._stream.record_main()
        return [there[start : start + a.nbytes].view(torch.from_numpy(a).dtype) for start, a in places]

    def convert(
        self,
        source: torch.Tensor,
        device: torch.device,
        take: Callable[[int, torch.Tensor], None],
        rows_at_once: int = 1,
    ) -> None:
        """Show rows of the host [N, K] to the stream, some at a time: take(first, rows on the GPU) gives it work.

        rows_at_once: N and every part's number of rows are multiples of it. A row must fit a buffer.
        """
        step = len(self._buffers[0]) // (source.shape[1] * source.element_size()) // rows_at_once * rows_at_once
        if not self._landing:
            self._landing = [torch.empty(len(b), dtype=torch.uint8, device=device) for b in self._buffers]
            self._stream.wait_for_main()  # the memory may be what the stream is reading now
        for first in range(0, len(source), step):
            part = source[first : first + step]
            turn, self._next = self._next, (self._next + 1) % len(self._buffers)
            if (emptied := self._emptied[turn]) is not None:
                emptied.synchronize()
            if (taken := self._taken[turn]) is not None:
                self._stream.wait_event(taken)
            size = part.numel() * part.element_size()
            self._fill(self._buffers[turn][:size].view(part.dtype), part.reshape(-1))
            self._stream.copy(self._landing[turn][:size], self._buffers[turn][:size])
            self._emptied[turn] = arrived = self._stream.record_event()
            arrived.wait_on_main()
            take(first, self._landing[turn][:size].view(part.dtype).view(part.shape))
            self._taken[turn] = self._stream.record_main()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        step = len(self._buffers[0]) // target.element_size()
        for start in range(0, len(target), step):
            part = target[start : start + step]
            turn, self._next = self._next, (self._next + 1) % len(self._buffers)
            if (emptied := self._emptied[turn]) is not None:
                emptied.synchronize()
            buffer = self._buffers[turn][: part.numel() * part.element_size()].view(part.dtype)
            self._fill(buffer, source[start : start + step])
            self._stream.copy(part, buffer)
            self._emptied[turn] = self._stream.record_event()

    def _fill(self, buffer: torch.Tensor, source: torch.Tensor) -> None:
        """Both flat, in the host's memory; dtypes may differ. Raises what a thread raises."""
        parts = min(FILLERS, buffer.nbytes // LEAST_FILLED)
        if parts < 2:
            buffer.copy_(source)
        else:
            list(self._fillers.map(_copy_part, buffer.chunk(parts), source.chunk(parts)))


@torch.inference_mode()  # which holds for a thread: vLLM's buffers may have been made in it
def _copy_part(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)


class CopiesByThread:
    """Buffers and a stream for each thread that copies: the one that migrates, and the one that computes."""

    def __init__(self, make: Callable[[torch.device], PinnedCopies] | None = None) -> None:
        self._make = make or (lambda device: PinnedCopies(make_stream(device), pinned_for(device)))
        self._mine = threading.local()

    def of_this_thread(self, device: torch.device) -> PinnedCopies:
        if not hasattr(self._mine, "copies"):
            self._mine.copies = self._make(device)
        copies: PinnedCopies = self._mine.copies
        return copies

    def copy_all(self, copies: list[tuple[torch.Tensor, torch.Tensor]], after: Event | None = None) -> None:
        self.of_this_thread(copies[0][0].device).copy_all(copies, after)
