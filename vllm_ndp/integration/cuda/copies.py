"""Weights on their way into GPU memory: from a map of the host through pinned buffers, beside what computes.

Memory that is mapped from a file is pageable: the driver would copy it to buffers of its own with one thread, and have
the caller wait. Here the calling thread fills one buffer while the lane empties the other. Knows memory and lanes; does
not know experts, layers or plans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from vllm_ndp.integration.cuda.lanes import Lane, Mark, Pinned, make_lane, pinned_for

BUFFER_BYTES = 32 << 20
BUFFERS = 2


class PinnedCopies:
    """For one thread at a time, which must be inside the stream that reads what is copied."""

    def __init__(self, lane: Lane, pinned: Pinned, *, buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS) -> None:
        self._lane = lane
        self._buffers = [pinned(buffer_bytes, dtype=torch.uint8) for _ in range(buffers)]
        self._emptied: list[Mark | None] = [None] * buffers
        self._next = 0

    def copy_all(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each source of the host, contiguous, to its place on the GPU, contiguous too; dtypes may differ.

        What the stream was given so far is done before, what it is given from now on after.
        """
        self._lane.follow_main()
        for target, source in copies:
            self._copy(target.view(-1), source.reshape(-1))
        self._lane.mark().hold_main()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        step = len(self._buffers[0]) // target.element_size()
        for start in range(0, len(target), step):
            part = target[start : start + step]
            turn, self._next = self._next, (self._next + 1) % len(self._buffers)
            if (emptied := self._emptied[turn]) is not None:
                emptied.wait_on_host()
            buffer = self._buffers[turn][: part.numel() * part.element_size()].view(part.dtype)
            buffer.copy_(source[start : start + step])
            self._lane.copy(part, buffer)
            self._emptied[turn] = self._lane.mark()


class CopiesByThread:
    """Buffers and a lane for each thread that copies: the one that migrates, and the one that computes."""

    def __init__(self, make: Callable[[torch.device], PinnedCopies] | None = None) -> None:
        self._make = make or (lambda device: PinnedCopies(make_lane(device), pinned_for(device)))
        self._mine = threading.local()

    def copy_all(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if not hasattr(self._mine, "copies"):
            self._mine.copies = self._make(copies[0][0].device)
        self._mine.copies.copy_all(copies)
