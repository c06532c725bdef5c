"""Experts on their way into slots, beside the step that will use them: one thread, layer by layer.

A layer waits for its own slots and for nothing else, so what a step computes does not depend on how fast the copies
are. Knows threads and streams; not which experts move, nor where they come from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from vllm_ndp.integration.cuda.lanes import CudaMark, Mark, own_stream

Move = Callable[[], None]


class Beside(Protocol):
    """A stream for the moves of one layer, behind what the step before may still be reading."""

    def carry_out(self, moves: Sequence[Move]) -> Mark:
        """Called in the thread; the mark is passed when the moves are done."""


class Migrator:
    def __init__(self, cores: Collection[int], beside: Callable[[], Beside | None] | None = None) -> None:
        """`cores`: where the thread may run; the one that makes it may be bound to a single core. None of them: there
        is no thread, and moves are carried out as they are begun, on the caller's stream. `beside`: asked for each
        layer as it is begun; None where moves are done when they return."""
        self._cores = frozenset(cores)
        self._beside = beside or _OneStream()
        self._thread = ThreadPoolExecutor(1, "ndp-migration", self._start)
        self._pending: dict[int, Future[Mark | None]] = {}  # layer -> its moves: at most one entry per layer

    def begin(self, layer: int, moves: Sequence[Move]) -> None:
        """Carry out the moves of a layer that has none pending, in the order in which layers were begun."""
        if layer in self._pending:
            raise ValueError(f"layer {layer} still waits for the moves before these")
        if moves and not self._cores:
            _carry_out(moves, None)
        elif moves:
            self._pending[layer] = self._thread.submit(_carry_out, tuple(moves), self._beside())

    def wait(self, layer: int) -> None:
        """Return when the slots of the layer hold what they are to hold, or will before the main stream reads them.

        Raises what went wrong on the way.
        """
        if (pending := self._pending.pop(layer, None)) is not None and (done := pending.result()) is not None:
            done.hold_main()

    def wait_for_all(self) -> None:
        for layer in list(self._pending):
            self.wait(layer)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _start(self) -> None:
        os.sched_setaffinity(0, self._cores)  # 0: this thread


class _OneStream:
    """On a GPU: the stream on which all moves are, whatever their layer; it is made when the first of them begins."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> _Behind | None:
        if not torch.cuda.is_initialized():
            return None
        if self._stream is None:
            self._stream = own_stream(torch.device("cuda", torch.cuda.current_device()))  # of the worker's thread
        return _Behind(self._stream)


class _Behind:
    """The moves of one layer, behind what the step before may still be reading."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._ready = stream, torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(stream.device))

    def carry_out(self, moves: Sequence[Move]) -> Mark:
        done = torch.cuda.Event()
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for move in moves:
                move()
            done.record(self._stream)
        return CudaMark(done, self._stream.device)


@torch.inference_mode()
def _carry_out(moves: Sequence[Move], beside: Beside | None) -> Mark | None:
    if beside is not None:
        return beside.carry_out(moves)
    for move in moves:
        move()
    return None
