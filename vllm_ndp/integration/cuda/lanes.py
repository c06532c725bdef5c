"""Streams beside the one that computes: what is copied on them, and who waits for it.

A lane copies in order and by itself; a mark is a point on it that the host or the main stream may wait for. The same
code runs on tensors of the host (`HostLane`), where a copy is done when it is asked for. Knows streams and memory;
does not know layers, experts or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Pinned = Callable[..., torch.Tensor]
"""(shape..., dtype=...) -> memory of the host that a lane can copy from and to by itself."""


class Mark(Protocol):
    """A point on a lane, or on the main stream."""

    def wait_on_host(self) -> None:
        """Return when it is passed."""

    def hold_main(self) -> None:
        """Have the main stream wait for it; the host does not."""


class Lane(Protocol):
    def follow_main(self) -> None:
        """Start the next work when the main stream has done what it was given so far."""

    def mark_main(self) -> Mark:
        """The point that the main stream reaches when it has done what it was given so far, for `follow`."""

    def follow(self, mark: Mark) -> None:
        """Start the next work when the main stream has passed a mark of `mark_main`, and maybe before its end."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Between the GPU and pinned memory of the host, without waiting."""

    def mark(self) -> Mark: ...


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no one else is given. For each priority torch hands out 32 streams in turn, vLLM's main stream
    among those of the lower one. Work meant to run beside the main stream could then queue behind it. So make few, and
    keep them."""
    return torch.cuda.Stream(device, priority=-1)


class CudaLane:
    """A stream of its own. `follow_main` and `hold_main` are for the thread that computes: streams are per thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device)

    def follow_main(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def mark_main(self) -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return CudaMark(event, self._stream.device)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaMark(event, self._stream.device)


class CudaMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self._device = event, device

    def wait_on_host(self) -> None:
        self.event.synchronize()

    def hold_main(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)


class HostLane:
    """For tensors of the host: everything is done at once."""

    def follow_main(self) -> None: ...

    def mark_main(self) -> Mark:
        return _PASSED

    def follow(self, mark: Mark) -> None: ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def mark(self) -> Mark:
        return _PASSED


class _Passed:
    def wait_on_host(self) -> None: ...

    def hold_main(self) -> None: ...


_PASSED = _Passed()


def make_lane(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else HostLane()


def pinned_for(device: torch.device) -> Pinned:
    """Memory that a lane of this device copies from and to by itself."""

    def allocate(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        # named, because a default device would be asked for pinned memory, which it has none of
        return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")

    return allocate


class Arrival:
    """A tensor on its way to the host; nobody waits until somebody asks."""

    def __init__(self, lane: Lane, pinned: Pinned, source: torch.Tensor) -> None:
        """source: of the main stream, which has been told to write it; nobody may write it afterwards."""
        self._source, self._here = source, pinned(*source.shape, dtype=source.dtype)
        lane.follow_main()
        lane.copy(self._here, source)
        self._mark = lane.mark()

    def values(self) -> NDArray[Any]:
        self._mark.wait_on_host()
        return self._here.numpy()


class LateCheck:
    """In turns: `begin` once per step, `settle` before the next."""

    def __init__(self, lane: Lane, pinned: Pinned, device: torch.device, most_rows: int) -> None:
        self._lane = lane
        self._expected = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._host_expected = pinned(most_rows, dtype=torch.int64)
        self._differ = torch.zeros(1, dtype=torch.bool, device=device)
        self._host_differ = pinned(1, dtype=torch.bool)
        self._arrived: Mark | None = None

    def begin(self, entries: torch.Tensor, expected: NDArray[np.int64]) -> None:
        """entries i64 [T] on the GPU, expected [T]."""
        if self._arrived is not None:
            raise RuntimeError("the check before this one was not settled")
        count = len(expected)
        self._host_expected.numpy()[:count] = expected
        self._expected[:count].copy_(self._host_expected[:count], non_blocking=True)
        self._differ.copy_((entries != self._expected[:count]).any().view(1))
        self._lane.follow_main()
        self._lane.copy(self._host_differ, self._differ)
        self._arrived = self._lane.mark()

    def settle(self) -> bool:
        """Whether they were the expected ones; True where nothing was begun."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return True
        arrived.wait_on_host()
        return not self._host_differ.numpy()[0]
