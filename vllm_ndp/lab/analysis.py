"""Predictability of a trace: skew, prefill -> decode similarity against a null, coverage with intervals.

The null resamples every request's tokens from all requests' tokens together: routing as it is, without anything that
belongs to one request. Knows routing statistics. Does not know hardware or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from vllm_ndp.lab.compare import bootstrap_means, popularity, split_requests
from vllm_ndp.planning.importance import ImportanceScore, importance
from vllm_ndp.planning.plan import highest
from vllm_ndp.planning.policies import PolicySettings
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.trace import Sequence as Request
from vllm_ndp.traces.trace import Trace

NULL_DRAWS = 100
FIRST_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Interval:
    """A mean over requests and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Interval:
        low, high = np.percentile(bootstrap_means(values), [2.5, 97.5])
        return cls(float(values.mean()), float(low), float(high))


@dataclass(frozen=True)
class Analysis:
    """Everything `analyze` prints; lists are per layer unless named otherwise."""

    num_requests: int
    num_hot: int
    gini: list[float]
    cosine: list[float]
    cosine_null_low: list[float]
    cosine_null_high: list[float]
    cosine_across: list[float]
    """Prefill of one request against decode of another."""
    coverage: dict[str, Interval]
    over_static: dict[str, Interval]
    """Coverage minus static's, paired by request."""
    first_tokens: dict[int, Interval]
    """Hot sets from the first n prompt tokens only."""

    @property
    def layers_outside_null(self) -> int:
        """Layers whose prefill -> decode cosine exceeds what independent tokens give."""
        return sum(c > high for c, high in zip(self.cosine, self.cosine_null_high, strict=True))


def analyse(trace: Trace, num_hot: int | None = None, *, prior: ImportanceScore | None = None) -> Analysis:
    """Raises TraceError when there are too few requests with a prompt and a decode."""
    if prior is None:
        known, trace = split_requests(trace)
        prior = popularity(known)
    requests = [s for s in trace.sequences if len(s.prompt_ids) and len(s.decode_ids)]
    if len(requests) < 2:
        raise TraceError(f"an analysis needs at least 2 requests with prompt and decode, the trace has {len(requests)}")
    num_experts = trace.provenance.num_experts
    hot = num_experts // 2 if num_hot is None else num_hot
    prompts = [trace.stats(s) for s in requests]
    decodes = [trace.stats(s, "decode") for s in requests]
    cosine, across = _cosines(prompts, decodes)
    low, high = _null_band(requests, num_experts)
    scores = {
        "prefill": [importance(stats) for stats in prompts],
        "prefill_prior": [importance(stats).shrunk_to(prior, PolicySettings.prior_tokens) for stats in prompts],
        "static": [prior] * len(requests),
        "random": _random_scores(prompts),
        "oracle": [importance(stats, 1.0) for stats in decodes],
    }
    covered = {name: _coverage(score, decodes, hot) for name, score in scores.items()}
    counts = np.sum([stats.counts for stats in (*prompts, *decodes)], axis=0)

    def of_first(tokens: int) -> Interval:
        picked = [
            RoutingStats.from_choices(s.prompt_ids[:tokens], s.prompt_weights[:tokens], num_experts) for s in requests
        ]
        return Interval.of(_coverage([importance(stats) for stats in picked], decodes, hot))

    longest = max(len(s.prompt_ids) for s in requests)
    return Analysis(
        num_requests=len(requests),
        num_hot=hot,
        gini=_gini(counts).tolist(),
        cosine=cosine.tolist(),
        cosine_null_low=low.tolist(),
        cosine_null_high=high.tolist(),
        cosine_across=across.tolist(),
        coverage={name: Interval.of(values) for name, values in covered.items()},
        over_static={
            name: Interval.of(values - covered["static"]) for name, values in covered.items() if name != "static"
        },
        first_tokens={n: of_first(n) for n in FIRST_TOKENS if n <= longest},
    )


def _coverage(scores: Sequence[ImportanceScore], decodes: Sequence[RoutingStats], num_hot: int) -> NDArray[np.float64]:
    """[requests], share of decode choices in the top num_hot of each score."""
    shares = [
        decode.counts[highest(score.values, num_hot)].sum() / decode.counts.sum()
        for score, decode in zip(scores, decodes, strict=True)
    ]
    return np.array(shares, np.float64)


def _cosines(
    prompts: Sequence[RoutingStats], decodes: Sequence[RoutingStats]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Per layer: (mean cosine of a request's prompt and decode counts, the same with another request's decode)."""
    a = np.stack([stats.counts for stats in prompts]).astype(np.float64)  # [R, L, E]
    b = np.stack([stats.counts for stats in decodes]).astype(np.float64)
    a /= np.maximum(np.linalg.norm(a, axis=2, keepdims=True), 1e-12)
    b /= np.maximum(np.linalg.norm(b, axis=2, keepdims=True), 1e-12)
    every = np.einsum("rle,sle->lrs", a, b)
    own = np.einsum("lrr->lr", every)
    others = (every.sum(axis=(1, 2)) - own.sum(axis=1)) / (len(a) * (len(a) - 1))
    return own.mean(axis=1), others


def _null_band(requests: Sequence[Request], num_experts: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Per layer, 95 % band of the mean cosine when every token is drawn from all requests' tokens together."""
    generator = np.random.default_rng(0)
    pool = np.concatenate([part for s in requests for part in (s.prompt_ids, s.decode_ids)]).astype(np.int64)
    layers = pool.shape[1]
    cells = pool + np.arange(layers)[:, None] * num_experts
    sizes = [(len(s.prompt_ids), len(s.decode_ids)) for s in requests]
    means = np.zeros((NULL_DRAWS, layers))
    for draw in range(NULL_DRAWS):
        for size in sizes:
            prompt, decode = (
                np.bincount(cells[generator.integers(0, len(cells), n)].ravel(), minlength=layers * num_experts)
                .reshape(layers, num_experts)
                .astype(np.float64)
                for n in size
            )
            norms = np.linalg.norm(prompt, axis=1) * np.linalg.norm(decode, axis=1)
            means[draw] += (prompt * decode).sum(axis=1) / norms
    low, high = np.percentile(means / len(sizes), [2.5, 97.5], axis=0)
    return low, high


def _random_scores(prompts: Sequence[RoutingStats]) -> list[ImportanceScore]:
    generator = np.random.default_rng(0)
    return [ImportanceScore.from_weights(generator.random(stats.counts.shape)) for stats in prompts]


def _gini(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Per layer, 0 = every expert equally often, towards 1 = one does it all."""
    ranked = np.sort(counts, axis=1).astype(np.float64)
    experts = counts.shape[1]
    weights = 2 * np.arange(1, experts + 1) - experts - 1
    gini: NDArray[np.float64] = (ranked * weights).sum(axis=1) / (experts * np.maximum(ranked.sum(axis=1), 1))
    return gini
