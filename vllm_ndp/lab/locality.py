"""How a trace's routing repeats itself, and what caches of every size would make of it.

    repeats        share of a token's choices that the token before made too, beside the same tokens shuffled
    hits           share of choices found in a cache of C experts per layer, C = 0..E, under six rules
    concentration  how much of a request falls on its most used experts
    coverage       how much of a request's decode fixed sets of experts hold, with intervals

A cache looks up a token's experts together, before any of them enters or leaves. Under lru, lfu and random all of them
then enter. Under oracle the experts with the nearest next use stay. Caches are one per layer and request. Counts only:
the loops over tokens are in csrc/stacks.cpp.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from vllm_ndp.lab._stacks import stack_depths
from vllm_ndp.lab.compare import bootstrap_means
from vllm_ndp.planning.plan import highest
from vllm_ndp.traces.trace import Trace

RULES = ("random", "lfu", "lru", "oracle")
"""Rules of a cache that learns from the tokens as they come. `oracle` is Belady's, which knows the future."""
EARLY_TOKENS = 64
_SEED = 0


@dataclass(frozen=True)
class Interval:
    """A mean over requests and its 95 % bootstrap interval, which one request does not have."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Interval:
        if len(values) < 2:
            return cls(float(values.mean()), None, None)
        low, high = np.percentile(bootstrap_means(values), [2.5, 97.5])
        return cls(float(values.mean()), float(low), float(high))


@dataclass(frozen=True)
class Selected:
    """Tokens of some requests: rows[ends[r]:ends[r + 1]] of ids [N, L, k]."""

    ids: NDArray[np.uint16]
    rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    num_experts: int

    def shuffled(self) -> Selected:
        """Each request's tokens in another order."""
        generator = np.random.default_rng(_SEED)
        rows = self.rows.copy()
        for start, end in zip(self.ends[:-1].tolist(), self.ends[1:].tolist(), strict=True):
            generator.shuffle(rows[start:end])
        return Selected(self.ids, rows, self.ends, self.num_experts)

    def uses(self) -> NDArray[np.int64]:
        """[R, L, E], how often each request chose each expert."""
        shape = len(self.ends) - 1, self.ids.shape[1], self.num_experts
        requests = np.repeat(np.arange(len(self.ends) - 1), np.diff(self.ends))
        lanes = requests[:, None] * self.ids.shape[1] + np.arange(self.ids.shape[1])
        cells = lanes[:, :, None] * self.num_experts + self.ids[self.rows]  # (request, layer, expert) as one number
        return np.bincount(cells.ravel(), minlength=math.prod(shape)).reshape(shape)

    def repeats(self) -> NDArray[np.float64]:
        """[L], of the choices of all tokens but each request's first."""
        later = np.ones(len(self.rows), np.bool_)
        later[self.ends[:-1][np.diff(self.ends) > 0]] = False
        tokens = np.flatnonzero(later)
        now, before = self.ids[self.rows[tokens]], self.ids[self.rows[tokens - 1]]
        again = (now[..., None] == before[..., None, :]).any(axis=-1)  # [T, L, k]
        return _shares(again.sum(axis=(0, 2)), len(tokens) * self.ids.shape[2])

    def depths(self, rule: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Choices by the largest cache that does not hold them (E: no cache holds them), both [L, E + 1].

        First all choices, then those of the first EARLY_TOKENS tokens of each request.
        """
        counts, early = np.zeros((2, self.ids.shape[1], self.num_experts + 1), np.int64)
        stack_depths(self.ids, self.rows, self.ends, self.num_experts, rule, EARLY_TOKENS, counts, early)
        return counts, early


@dataclass(frozen=True)
class Locality:
    """Shares of choices, by layer."""

    num_experts: int
    top_k: int
    num_requests: int
    num_tokens: int
    repeats: NDArray[np.float64]  # [L], NaN where no token has one before it
    shuffled: NDArray[np.float64]  # [L]
    hits: dict[str, NDArray[np.float64]]  # rule -> [L, E + 1], by size of the cache
    early_misses: NDArray[np.float64]  # [L, E + 1], under lru, of the first EARLY_TOKENS of a request
    later_misses: NDArray[np.float64]  # [L, E + 1], of the others; NaN where there are none
    concentration: NDArray[np.float64]  # [L, E + 1], share of a request's C most used experts, mean over requests
    num_hot: int
    coverage: dict[str, Interval]
    """Share of decode choices among num_hot experts per layer: `prompt`, what the request's prompt used most; `static`,
    what the decode of other requests did, if any; `oracle`, what its own did; and `prompt - static`, paired."""

    def mean_hits(self, rule: str, places: int) -> float:
        """Over all layers."""
        return float(self.hits[rule][:, places].mean())

    def as_dict(self, places: tuple[int, ...]) -> dict[str, Any]:
        """JSON that the command prints: means over layers."""
        return {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "num_requests": self.num_requests,
            "num_tokens": self.num_tokens,
            "repeats": _mean(self.repeats),
            "shuffled": _mean(self.shuffled),
            "chance": self.top_k / self.num_experts,
            "hits": {rule: {str(c): self.mean_hits(rule, c) for c in places} for rule in self.hits},
            "early_misses": {str(c): _mean(self.early_misses[:, c]) for c in places},
            "later_misses": {str(c): _mean(self.later_misses[:, c]) for c in places},
            "concentration": {str(c): _mean(self.concentration[:, c]) for c in places},
            "num_hot": self.num_hot,
            "coverage": {name: asdict(value) for name, value in self.coverage.items()},
        }


def locality(trace: Trace, num_hot: int | None = None) -> Locality:
    """Of decode tokens; caches are empty at first. Raises TraceError where the trace has none. num_hot: None = half."""
    prompts, tokens = _selected(trace)
    if not len(tokens.rows):
        raise TraceError("the trace has no decode tokens")
    used, before = tokens.uses(), prompts.uses()
    found = {rule: tokens.depths(rule) for rule in RULES}
    hits = {rule: _hits(counts) for rule, (counts, _) in found.items()}
    counts, early = found["lru"]
    own, others = np.sort(used, axis=2)[:, :, ::-1], used.sum(axis=0) - used
    hot = tokens.num_experts // 2 if num_hot is None else num_hot
    there = (used.sum(axis=(1, 2)) > 0) & (before.sum(axis=(1, 2)) > 0)
    known = {"prompt": before, "static": others, "oracle": used}
    fixed = {"static": _fixed(used, others), "prompt": _fixed(used, before)}
    if not others.any():
        del known["static"], fixed["static"]
    shares = {name: _covered(used[there], of[there], hot) for name, of in known.items()} if there.any() else {}
    if "static" in shares:
        shares["prompt - static"] = shares["prompt"] - shares["static"]
    return Locality(
        num_experts=tokens.num_experts,
        top_k=tokens.ids.shape[2],
        num_requests=len(tokens.ends) - 1,
        num_tokens=len(tokens.rows),
        repeats=tokens.repeats(),
        shuffled=tokens.shuffled().repeats(),
        hits=hits | fixed,
        early_misses=1 - _hits(early),
        later_misses=1 - _hits(counts - early),
        concentration=_mean_of_requests(own),
        num_hot=hot,
        coverage={name: Interval.of(values) for name, values in shares.items()},
    )


def default_places(num_experts: int) -> tuple[int, ...]:
    """Sizes of caches worth a row: a sixteenth, an eighth, a quarter, a half of the experts, and all of them."""
    return tuple(sorted({max(num_experts // share, 1) for share in (16, 8, 4, 2, 1)}))


def _selected(trace: Trace) -> tuple[Selected, Selected]:
    """(prompts, decode)."""
    rows, ends, splits = trace.executed
    ids = np.ascontiguousarray(trace.ids, np.uint16)
    experts = trace.provenance.num_experts
    return _cut(ids, rows, ends[:-1], splits, experts), _cut(ids, rows, splits, ends[1:], experts)


def _cut(
    ids: NDArray[np.uint16], rows: NDArray[np.int64], first: NDArray[Any], last: NDArray[Any], experts: int
) -> Selected:
    """rows[first[r]:last[r]] of each request."""
    lengths = (last - first).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    return Selected(ids, rows[np.repeat(first, lengths) + within].astype(np.int64), ends, experts)


def _fixed(used: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.float64]:
    """[L, E + 1], hits of the C experts of highest count in known [R, L, E]; of equal ones the lower id first."""
    ranked = np.take_along_axis(used, np.argsort(-known, axis=2, kind="stable"), axis=2).sum(axis=0)
    return _hits(np.concatenate([ranked, np.zeros((len(ranked), 1), np.int64)], axis=1))


def _covered(used: NDArray[np.int64], known: NDArray[np.int64], num_hot: int) -> NDArray[np.float64]:
    """[R], share of each request's choices in the num_hot experts of highest count in known [R, L, E]."""
    shares: NDArray[np.float64] = (used * highest(known.astype(np.float64), num_hot)).sum(axis=(1, 2)) / used.sum(
        axis=(1, 2)
    )
    return shares


def _hits(depths: NDArray[np.int64]) -> NDArray[np.float64]:
    """[L, E + 1] by depth -> [L, E + 1] by size."""
    before = np.concatenate([np.zeros((len(depths), 1)), np.cumsum(depths[:, :-1], axis=1)], axis=1)
    return _shares(before, depths.sum(axis=1, keepdims=True))


def _mean_of_requests(ranked: NDArray[np.int64]) -> NDArray[np.float64]:
    """[L, E + 1] of counts [R, L, E] from the highest; requests without tokens left out."""
    sums = ranked.sum(axis=2, keepdims=True)
    there = sums[:, 0, 0] > 0
    shares = np.cumsum(ranked[there], axis=2) / sums[there]
    curve = np.zeros((ranked.shape[1], ranked.shape[2] + 1))
    curve[:, 1:] = shares.mean(axis=0)
    return curve


def _shares(part: NDArray[Any], whole: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """NaN of nothing."""
    return np.asarray(part / np.where(whole == 0, np.nan, whole))


def _mean(values: NDArray[np.float64]) -> float | None:
    mean = float(values.mean())
    return None if math.isnan(mean) else mean
