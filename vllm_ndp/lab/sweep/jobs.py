"""Independent pieces of work on one core, on all cores of this machine, or on a Ray cluster; results as they come.

A piece is a number; what it means is the business of the function that is handed over. Worker processes are forked, so
they share the function's data (a trace, arranged) until they write to it. Each worker of Ray holds a copy, for the
whole run. Knows processes. Does not know sweeps.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from ndp_device.common.errors import ConfigError, NdpError

R = TypeVar("R")
Work = Callable[[int], R]

RAY = "ray"
_WAITING_PER_WORKER = 2


def parse_jobs(text: str) -> int | str:
    """Read a number of processes, `all` (one for each core this process may use) or `ray`."""
    if text == RAY:
        _ray()
        return RAY
    if text == "all":
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--jobs must be a number of processes, all, or ray, got {text!r}")
    return int(text)


def run_each(work: Work[R], pieces: Sequence[int], jobs: int | str = 1) -> Iterator[tuple[int, R]]:
    """Yield (piece, its result) in the order in which they end. An error of a piece ends the whole."""
    if jobs == RAY:
        return _on_ray(work, pieces)
    if jobs == 1 or len(pieces) < 2:
        return ((piece, work(piece)) for piece in pieces)
    return _in_processes(work, pieces, min(int(jobs), len(pieces)))


def _in_processes(work: Work[R], pieces: Sequence[int], jobs: int) -> Iterator[tuple[int, R]]:
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, context, initializer=_adopt, initargs=(work,)) as pool:
        try:
            yield from _as_completed(pool, pieces, jobs)
        except BrokenProcessPool:
            raise NdpError(
                "a worker process ended without an answer, perhaps because memory ran out: try with fewer --jobs"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _as_completed(pool: ProcessPoolExecutor, pieces: Sequence[int], jobs: int) -> Iterator[tuple[int, Any]]:
    """Hand out a few pieces per worker at a time, so that an interrupted sweep has little to wait for."""
    left = iter(pieces)
    running: dict[Future[Any], int] = {}
    while True:
        for piece in left:
            running[pool.submit(_run_adopted, piece)] = piece
            if len(running) >= _WAITING_PER_WORKER * jobs:
                break
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield running.pop(future), future.result()


_adopted: list[Work[Any]] = []
"""In a worker process: the function it was forked with."""


def _adopt(work: Work[Any]) -> None:
    _adopted[:] = [work]


def _run_adopted(piece: int) -> Any:
    return _adopted[0](piece)


class _Worker:
    """A Ray actor: lives for the whole run, so what the function remembers is remembered."""

    def __init__(self, work: Work[Any]) -> None:
        self._work = work

    def run(self, piece: int) -> tuple[int, Any]:
        return piece, self._work(piece)


def _on_ray(work: Work[R], pieces: Sequence[int]) -> Iterator[tuple[int, R]]:
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False)
    try:
        count = max(min(int(ray.cluster_resources().get("CPU", 1)), len(pieces)), 1)
        held = ray.put(work)  # once, whatever the number of workers
        actor = ray.remote(num_cpus=1)(_Worker)
        pool = importlib.import_module("ray.util.actor_pool").ActorPool([actor.remote(held) for _ in range(count)])
        yield from pool.map_unordered(lambda worker, piece: worker.run.remote(piece), pieces)
    finally:
        if started:
            ray.shutdown()


def _ray() -> Any:
    try:
        return importlib.import_module(RAY)
    except ImportError:
        raise ConfigError("--jobs ray needs Ray, which is not installed: pip install 'vllm-ndp[ray]'") from None
