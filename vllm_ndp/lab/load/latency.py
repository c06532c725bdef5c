"""Causes of each token's latency: every picosecond between two tokens of a request has one cause, and they add up.

    queue               not in a step: before its first one, or running without tokens left in the step
    migration           experts moving into GPU memory before a step it is in
    prefill             prompt rows of its own
    prefill of others   prompt rows of others in its steps: what the step would not have taken without them
    device              the device computed longer than the GPU
    other hosts         … because it served another host first
    gpu                 the rest: attention, experts in GPU memory, the head

Prefill of a step is shared out by rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.lab.exact.engine import StepRun
from vllm_ndp.lab.load.run import ServedRequest

CAUSES = ("queue", "migration", "prefill", "prefill of others", "device", "other hosts", "gpu")
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
QUEUE, MIGRATION, OWN, OTHERS, DEVICE, HOSTS, GPU = range(len(CAUSES))


@dataclass(frozen=True)
class Tokens:
    """N tokens in the order in which they came; a token's latency is the sum of its causes."""

    request: NDArray[np.int64]  # [N]
    index: NDArray[np.int64]  # [N], 0: the first one, whose latency counts from the arrival (TTFT)
    at_ps: NDArray[np.int64]  # [N]
    causes_ps: NDArray[np.int64]  # [N, causes]

    @property
    def latency_ps(self) -> NDArray[np.int64]:
        total: NDArray[np.int64] = self.causes_ps.sum(axis=1)
        return total

    def first(self) -> Tokens:
        return self._where(self.index == 0)

    def later(self) -> Tokens:
        return self._where(self.index > 0)

    def _where(self, chosen: NDArray[np.bool_]) -> Tokens:
        return Tokens(self.request[chosen], self.index[chosen], self.at_ps[chosen], self.causes_ps[chosen])


@dataclass(frozen=True)
class Percentile:
    """The token at this rank: not an average, so its causes are what one token really waited for."""

    percent: float
    latency_ps: int
    causes_ps: dict[str, int]


def tokens_of(served: ServedRequest) -> Tokens:
    """Every token of a run with what it waited for."""
    steps = served.steps
    step = np.repeat(np.arange(len(steps)), [len(one.spans) for one in steps])  # [M], of each span of a request
    spans = np.fromiter(chain.from_iterable(chain.from_iterable(one.spans for one in steps)), np.int64)
    request, start, rows = spans.reshape(-1, 3).T
    own = np.clip(served.prompt_lens[request] - start, 0, rows)  # its prompt rows
    decodes = np.bincount(step, own < rows, len(steps)) > 0
    decided, starts, ends = np.array([(one.decided_ps, one.start_ps, one.end_ps) for one in steps], np.int64).T
    decode_ps, prefill_ps = np.zeros((len(steps), len(CAUSES)), np.int64), np.zeros(len(steps), np.int64)
    for number, (one, has) in enumerate(zip(steps, decodes.tolist(), strict=True)):
        decode_ps[number], prefill_ps[number] = _parts(one.run, decodes=has)
    prompts = np.bincount(step, own, len(steps)).astype(np.int64)

    order = np.lexsort((step, request))
    request, step, own = request[order], step[order], own[order]
    first = np.append(True, np.diff(request) != 0)
    before = np.where(first, served.arrivals_ps[request], ends[np.roll(step, 1)])  # up to when its time has a cause
    own_ps = prefill_ps[step] * own // np.maximum(prompts[step], 1)
    of = {QUEUE: decided[step] - before, MIGRATION: (starts - decided)[step], OWN: own_ps}
    of[OTHERS] = prefill_ps[step] - own_ps

    came_in = np.repeat(np.arange(len(steps)), [len(one.yielded) for one in steps])  # [N], of each token
    asked = np.fromiter(chain.from_iterable(one.yielded for one in steps), np.int64)
    by_request = np.lexsort((came_in, asked))
    last = np.searchsorted(request * len(steps) + step, (asked * len(steps) + came_in)[by_request])  # its span
    index = np.arange(len(asked)) - np.searchsorted(asked[by_request], asked[by_request])
    begin = np.where(index > 0, np.roll(last, 1) + 1, np.searchsorted(request, asked[by_request]))
    causes, indices = np.zeros((len(asked), len(CAUSES)), np.int64), np.zeros(len(asked), np.int64)
    indices[by_request] = index
    for cause in range(len(CAUSES)):
        waited = of.get(cause, 0) + decode_ps[step, cause]
        sums = np.append(0, np.cumsum(waited))  # may wrap around, and differences are right even then
        causes[by_request, cause] = sums[last + 1] - sums[begin]
    return Tokens(asked, indices, ends[came_in], causes)


def as_bench_serve(tokens: Tokens, served: ServedRequest, goodput: Mapping[str, float]) -> dict[str, float]:
    """Figures of the simulated clock under the names of `vllm bench serve`.

    goodput: limits in ms by `ttft`, `tpot`, `e2el`. TPOT is of a request, over its tokens behind the first one; ITL
    is of a token.
    """
    order = np.lexsort((tokens.index, tokens.request))
    latency, request, first = tokens.latency_ps[order] / 1e9, tokens.request[order], tokens.index[order] == 0
    starts = np.flatnonzero(first)
    whole, count = np.add.reduceat(latency, starts), np.diff(np.append(starts, len(latency)))
    ttft, several = latency[first], count > 1
    tpot = (whole - ttft) / np.maximum(count - 1, 1)
    seconds = (int(tokens.at_ps.max()) - int(served.arrivals_ps.min())) / 1e12
    prompts = int(served.prompt_lens[request[starts]].sum())
    found = {
        "completed": len(starts),
        "total_input_tokens": prompts,
        "total_output_tokens": len(latency),
        "request_throughput": len(starts) / seconds,
        "output_throughput": len(latency) / seconds,
        "total_token_throughput": (len(latency) + prompts) / seconds,
    }
    kinds = {"ttft": ttft, "tpot": tpot[several], "itl": latency[~first], "e2el": whole}
    for name, values in kinds.items():
        if len(values):
            found[f"mean_{name}_ms"], found[f"median_{name}_ms"] = float(values.mean()), float(np.median(values))
            found[f"p99_{name}_ms"] = float(np.percentile(values, 99))
    if goodput:
        by_request = {"ttft": ttft, "tpot": tpot, "e2el": whole}
        good = np.logical_and.reduce([by_request[name] <= limit for name, limit in goodput.items()])
        found["request_goodput"] = int(good.sum()) / seconds
    return found


def percentiles(tokens: Tokens) -> Iterator[Percentile]:
    """By nearest rank; none where there are no tokens."""
    latency = tokens.latency_ps
    order = np.argsort(latency, kind="stable")
    for percent in PERCENTILES if len(order) else ():
        rank = max(-(-round(10 * percent) * len(order) // 1000), 1) - 1  # in whole numbers: 0.999 * 1000 is not 999
        token = int(order[rank])
        by_cause = dict(zip(CAUSES, tokens.causes_ps[token].tolist(), strict=True))
        yield Percentile(percent, int(latency[token]), by_cause)


def _parts(run: StepRun, *, decodes: bool) -> tuple[NDArray[np.int64], int]:
    """(causes of a step's decode rows, what its prefill rows added)."""
    causes = np.zeros(len(CAUSES), np.int64)
    if not decodes:
        return causes, run.time.total_ps
    base = run.time if run.decode_only is None else run.decode_only
    for layer, timing in zip(base.layers, run.device, strict=True):
        longer = layer.total_ps - layer._replace(device_ps=0).total_ps
        waited = min(longer, timing.queue_ps) if timing is not None else 0
        causes[DEVICE] += longer - waited
        causes[HOSTS] += waited
    causes[GPU] = base.total_ps - causes[DEVICE] - causes[HOSTS]
    return causes, run.time.total_ps - base.total_ps
