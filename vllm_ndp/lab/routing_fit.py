"""Settings of synthetic routing that make a trace as local as a given one: what `analyze --routing-out` finds.

Each layer gets the strength at which its choices repeat as the trace's do. The other settings come from a grid: those
whose hits and concentration come nearest, mean over layers. Nothing but counts of choices decides. Knows localities.
Does not know time or hardware.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.lab.locality import Locality, locality
from vllm_ndp.traces.routing import RoutingPreset
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace

_CONCENTRATIONS = (0.5, 1.0, 5.0)
_SIGNALS = (0.5, 1.0, 1.5)
_PERSISTENCES = (0.0, 0.3, 0.6)
_MEMORIES = (0.9, 0.98)
_REACHES = (1.0, 0.6)
_STRENGTHS = tuple(np.linspace(0.0, 1.6, 9).tolist())
_MOST_TOKENS, _REQUESTS = 256, 6


def fit_routing(known: Locality, name: str) -> tuple[RoutingPreset, float]:
    """(the settings, root mean square of what is off in repeats, hits and concentration)."""
    found: list[tuple[float, int, SyntheticSettings, NDArray[np.float64]]] = []
    for settings in _candidates(known):
        tried = locality(synthetic_trace(settings))
        strengths = _strengths(known.repeats, tried.repeats, settings.strength)
        places = np.interp(strengths, settings.strength, np.arange(len(settings.strength)))
        off = _marks(known).mean(axis=0) - _between(_marks(tried), places).mean(axis=0)
        found.append((float(np.sqrt((off * off).mean())), len(found), settings, strengths))
    off_by, _, best, strengths = min(found, key=lambda each: each[:2])
    return RoutingPreset(
        name=name,
        source=f"fitted to {known.num_tokens} tokens of {known.num_requests} requests",
        fitted_to=(name,),
        concentration=best.concentration,
        signal=best.signal,
        persistence=best.persistence,
        memory=best.memory,
        reach=best.reach,
        strength=tuple(np.round(strengths, 3).tolist()),
    ), off_by


def _candidates(known: Locality) -> list[SyntheticSettings]:
    """A layer per strength, requests as long as the trace's."""
    length = max(min(known.num_tokens // known.num_requests, _MOST_TOKENS), 2)
    basis = SyntheticSettings(
        len(_STRENGTHS), known.num_experts, known.top_k, num_requests=_REQUESTS, prompt_len=16, decode_len=length
    )
    grid = itertools.product(_CONCENTRATIONS, _SIGNALS, _PERSISTENCES, _MEMORIES, _REACHES)
    return [
        replace(basis, concentration=c, signal=s, persistence=p, memory=m, reach=r, strength=_STRENGTHS)
        for c, s, p, m, r in grid
        if p or m == _MEMORIES[0]  # nothing is remembered: one of them stands for all
    ]


def _strengths(
    wanted: NDArray[np.float64], repeats: NDArray[np.float64], tried: tuple[float, ...]
) -> NDArray[np.float64]:
    """[L], where a rising curve through the tried layers meets each wanted share; its ends beyond them."""
    return np.asarray(np.interp(wanted, np.maximum.accumulate(repeats), tried))


def _marks(known: Locality) -> NDArray[np.float64]:
    """[L, marks]: repeats, LRU and LFU at an eighth and a quarter of the experts, share of the most used eighth."""
    eighth, quarter = max(known.num_experts // 8, 1), max(known.num_experts // 4, 1)
    curves = [known.hits[rule][:, size] for rule in ("lru", "lfu") for size in (eighth, quarter)]
    return np.stack([known.repeats, known.shuffled, *curves, known.concentration[:, eighth]], axis=1)


def _between(marks: NDArray[np.float64], places: NDArray[np.float64]) -> NDArray[np.float64]:
    """[len(places), marks], straight lines between the tried layers."""
    rows = np.arange(len(marks))
    return np.stack([np.interp(places, rows, column) for column in marks.T], axis=1)
