"""Streams beside the one that computes: what is copied on them, and who waits for it.

A stream copies in order and by itself; an event is a point on it that the host or the main stream may wait for. The
same code runs on tensors of the host (`HostStream`), where a copy is done when it is asked for.

Weights arrive from a map of the host through pinned buffers. Memory that is mapped from a file is pageable: the driver
would copy it to buffers of its own with one thread, and have the caller wait. Here some threads fill one buffer while
the stream empties the other: vLLM leaves torch's own operators one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Pinned = Callable[..., torch.Tensor]
"""(shape..., dtype=...) -> memory of the host that a stream can copy from and to by itself."""


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no one else is given. For each priority torch hands out 32 streams in turn, vLLM's main stream
    among those of the lower one. Work meant to run beside the main stream could then queue behind it. So make few, and
    keep them."""
    return torch.cuda.Stream(device, priority=-1)


class CudaStream:
    """A stream of its own. `record_main` and `wait_on_main` are for the thread that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device)

    def record_main(self) -> Event:
        """The point that the main stream reaches when it has done what it was given so far, for `wait_event`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return CudaEvent(event, self._stream.device)

    def wait_event(self, event: Event) -> None:
        """Start the next work when the main stream has passed an event of `record_main`, and maybe before its end."""
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Between the GPU and pinned memory of the host, without waiting."""
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def record_event(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaEvent(event, self._stream.device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """What this thread launches within goes to this stream."""
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield


class CudaEvent:
    """A point on a stream, or on the main stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self._device = event, device

    def synchronize(self) -> None:
        """Return when it is passed."""
        self.event.synchronize()

    def wait_on_main(self) -> None:
        """Have the main stream wait for it; the host does not."""
        torch.cuda.current_stream(self._device).wait_event(self.event)


class HostStream:
    """For tensors of the host: everything is done at once."""

    def record_main(self) -> Event:
        return _PASSED

    def wait_event(self, event: Event) -> None: ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def record_event(self) -> Event:
        return _PASSED


class _Passed:
    def synchronize(self) -> None: ...

    def wait_on_main(self) -> None: ...


_PASSED = _Passed()
Event = CudaEvent | _Passed
Stream = CudaStream | HostStream


def make_stream(device: torch.device) -> Stream:
    return CudaStream(device) if device.type == "cuda" else HostStream()


def pinned_for(device: torch.device) -> Pinned:
    """Memory that a stream of this device copies from and to by itself."""

    def allocate(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        # named, because a default device would be asked for pinned memory, which it has none of
        return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")

    return allocate


class Arrival:
    """A tensor on its way to the host; nobody waits until somebody asks."""

    def __init__(self, stream: Stream, pinned: Pinned, source: torch.Tensor) -> None:
        """source: of the main stream, which has been told to write it; nobody may write it afterwards."""
        self._source, self._here = source, pinned(*source.shape, dtype=source.dtype)
        stream.wait_event(stream.record_main())
        stream.copy(self._here, source)
        self._event = stream.record_event()

    def values(self) -> NDArray[Any]:
        self._event.synchronize()
        return self._here.numpy()


class LateCheck:
    """In turns: `begin` once per step, `settle` before the next."""

    def __init__(self, stream: Stream, pinned: Pinned, device: torch.device, most_rows: int) -> None:
        self._stream, self._pinned = stream, pinned
        self._expected = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._host_expected = pinned(most_rows, dtype=torch.int64)
        self._differ: Arrival | None = None

    def begin(self, entries: torch.Tensor, expected: NDArray[np.int64]) -> None:
        """entries i64 [T] on the GPU, expected [T]."""
        if self._differ is not None:
            raise RuntimeError("the check before this one was not settled")
        count = len(expected)
        self._host_expected.numpy()[:count] = expected
        self._expected[:count].copy_(self._host_expected[:count], non_blocking=True)
        self._differ = Arrival(self._stream, self._pinned, (entries != self._expected[:count]).any())

    def settle(self) -> bool:
        """Whether they were the expected ones; True where nothing was begun."""
        differ, self._differ = self._differ, None
        return differ is None or not differ.values()


# -- weights on their way into GPU memory ------------------------------------------------------------------------------


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
        self._stream.wait_event(after or self._stream.record_main())
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
            self._stream.wait_event(self._stream.record_main())  # the memory may be what the stream is reading now
        for first in range(0, len(source), step):
            part = source[first : first + step]
            turn, buffer = self._fill_next(part.reshape(-1), part.dtype)
            if (taken := self._taken[turn]) is not None:
                self._stream.wait_event(taken)
            landing = self._landing[turn][: buffer.nbytes].view(part.dtype)
            self._stream.copy(landing, buffer)
            self._emptied[turn] = arrived = self._stream.record_event()
            arrived.wait_on_main()
            take(first, landing.view(part.shape))
            self._taken[turn] = self._stream.record_main()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        step = len(self._buffers[0]) // target.element_size()
        for start in range(0, len(target), step):
            turn, buffer = self._fill_next(source[start : start + step], target.dtype)
            self._stream.copy(target[start : start + step], buffer)
            self._emptied[turn] = self._stream.record_event()

    def _fill_next(self, source: torch.Tensor, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """The buffer whose turn it is and that holds these values now, flat; its number first. Raises what a thread
        raises."""
        turn, self._next = self._next, (self._next + 1) % len(self._buffers)
        if (emptied := self._emptied[turn]) is not None:
            emptied.synchronize()
        buffer = self._buffers[turn][: source.numel() * dtype.itemsize].view(dtype)
        parts = min(FILLERS, buffer.nbytes // LEAST_FILLED)
        if parts < 2:
            buffer.copy_(source)
        else:
            list(self._fillers.map(_copy_part, buffer.chunk(parts), source.chunk(parts)))
        return turn, buffer


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
