"""Streams beside the one that computes: what is copied on them, and who waits for it.

A stream copies in order and by itself; an event is a point on it that the host or the main stream may wait for. The
same code runs on tensors of the host (`HostStream`), where a copy is done when it is asked for. Knows streams
and memory; does not know layers, experts or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Pinned = Callable[..., torch.Tensor]
"""(shape..., dtype=...) -> memory of the host that a stream can copy from and to by itself."""


class Event(Protocol):
    """A point on a stream, or on the main stream."""

    def synchronize(self) -> None:
        """Return when it is passed."""

    def wait_on_main(self) -> None:
        """Have the main stream wait for it; the host does not."""


class Stream(Protocol):
    def wait_for_main(self) -> None:
        """Start the next work when the main stream has done what it was given so far."""

    def record_main(self) -> Event:
        """The point that the main stream reaches when it has done what it was given so far, for `follow`."""

    def wait_event(self, event: Event) -> None:
        """Start the next work when the main stream has passed an event of `record_main`, and maybe before its end."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Between the GPU and pinned memory of the host, without waiting."""

    def record_event(self) -> Event: ...


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no one else is given. For each priority torch hands out 32 streams in turn, vLLM's main stream
    among those of the lower one. Work meant to run beside the main stream could then queue behind it. So make few, and
    keep them."""
    return torch.cuda.Stream(device, priority=-1)


class CudaStream:
    """A stream of its own. `wait_for_main` and `wait_on_main` are for the thread that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device)

    def wait_for_main(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def record_main(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return CudaEvent(event, self._stream.device)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def record_event(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaEvent(event, self._stream.device)


class CudaEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self._device = event, device

    def synchronize(self) -> None:
        self.event.synchronize()

    def wait_on_main(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)


class HostStream:
    """For tensors of the host: everything is done at once."""

    def wait_for_main(self) -> None: ...

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
        stream.wait_for_main()
        stream.copy(self._here, source)
        self._event = stream.record_event()

    def values(self) -> NDArray[Any]:
        self._event.synchronize()
        return self._here.numpy()


class LateCheck:
    """In turns: `begin` once per step, `settle` before the next."""

    def __init__(self, stream: Stream, pinned: Pinned, device: torch.device, most_rows: int) -> None:
        self._stream = stream
        self._expected = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._host_expected = pinned(most_rows, dtype=torch.int64)
        self._differ = torch.zeros(1, dtype=torch.bool, device=device)
        self._host_differ = pinned(1, dtype=torch.bool)
        self._arrived: Event | None = None

    def begin(self, entries: torch.Tensor, expected: NDArray[np.int64]) -> None:
        """entries i64 [T] on the GPU, expected [T]."""
        if self._arrived is not None:
            raise RuntimeError("the check before this one was not settled")
        count = len(expected)
        self._host_expected.numpy()[:count] = expected
        self._expected[:count].copy_(self._host_expected[:count], non_blocking=True)
        self._differ.copy_((entries != self._expected[:count]).any().view(1))
        self._stream.wait_for_main()
        self._stream.copy(self._host_differ, self._differ)
        self._arrived = self._stream.record_event()

    def settle(self) -> bool:
        """Whether they were the expected ones; True where nothing was begun."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return True
        arrived.synchronize()
        return not self._host_differ.numpy()[0]
