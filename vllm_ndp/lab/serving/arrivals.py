"""When requests arrive, in picoseconds of the simulated clock: drawn by a seed, or taken from a recording.

Knows times only. Only this file turns a measured time into a simulated one. The arrival of a request is an input, and
not a result of either clock.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError, TraceError
from vllm_ndp.traces.format import CACHED
from vllm_ndp.traces.trace import Trace

PROCESSES = ("poisson", "bursty", "recorded", "steps", "together")
"""poisson, bursty: drawn · recorded: arrival_s of the trace · steps: when a live run had them · together: at 0."""
PS_PER_S = 10**12


def drawn(count: int, rate_per_s: float, seed: int, burstiness: float = 1.0) -> NDArray[np.int64]:
    """Arrivals with gamma-distributed gaps of mean 1 / rate, as `vllm bench serve` draws them.

    burstiness is the gamma's shape: 1 is a Poisson process, less comes in bursts, more comes evenly.
    """
    for name, value in (("--rate", rate_per_s), ("--burstiness", burstiness)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be greater than 0, got {value:g}")
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate_per_s * burstiness), size=count)
    at: NDArray[np.int64] = np.round(np.cumsum(gaps) * PS_PER_S).astype(np.int64)
    return at


def recorded(trace: Trace, speed: float = 1.0) -> NDArray[np.int64]:
    """arrival_s of the trace's requests, `speed` times as fast. Raises TraceError where they are out of order."""
    if not (math.isfinite(speed) and speed > 0):
        raise ConfigError(f"--speed must be greater than 0, got {speed:g}")
    seconds = trace.arrival_s
    if not np.isfinite(seconds).all() or (seconds < 0).any():
        raise TraceError("arrival times of the trace must be finite and at least 0")
    late = np.flatnonzero(np.diff(seconds) < 0)
    if len(late):
        first = int(late[0])
        raise TraceError(
            f"arrivals are out of order: request {first + 1} comes at {seconds[first + 1]:g} s, after request {first} "
            f"at {seconds[first]:g} s; number requests as they arrive"
        )
    at: NDArray[np.int64] = np.round(seconds / speed * PS_PER_S).astype(np.int64)
    return at


def of_steps(trace: Trace) -> NDArray[np.int64]:
    """End of the step before each request's first one, in picoseconds.

    Where a live run took requests as soon as they came, these are the arrivals. Raises TraceError where the trace is
    not of a live run.
    """
    start_ps, step_ps = trace.simulated_steps()
    steps, ends = trace.events["step"], np.concatenate([[0], start_ps + step_ps])
    ran = trace.phase != CACHED
    first = np.full(len(trace.prompt_len), np.iinfo(np.int64).max)
    np.minimum.at(first, trace.request[ran], trace.step[ran])
    at: NDArray[np.int64] = ends[np.searchsorted(steps, first)].astype(np.int64)
    return at
