"""State of a worker now, as plain values: its plan, its requests, who is hot where. Only reads."""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.machine_memory import process_memory
from vllm_ndp.integration.batch import RequestTracker, TrackedRequest
from vllm_ndp.planning.replanner import Replanner


def plan_in_force(replanner: Replanner, planned: Sequence[TrackedRequest]) -> dict[str, Any]:
    """planned: the requests that were planned last. Averages are over them."""
    known = [(one.plan, one.score) for one in planned if one.plan is not None and one.score is not None]
    bits = [plan.bits_read(score.values, score.weights) for plan, score in known]
    average = float(np.mean(bits)) if bits else math.nan  # where every expert is hot, too
    return {
        "epoch": replanner.epoch,
        "hot_experts": per_layer(replanner.placement.hot),
        "warm_experts": per_layer(replanner.placement.warm),
        "avg_bits": None if math.isnan(average) else round(average, 3),
    }


def memory(devices: Sequence[int | None]) -> dict[str, dict[str, int]]:
    """Memory of this process, and of the devices that it has started: bytes held, and mapped from files."""
    return {"engine": process_memory([os.getpid()]), "device": process_memory(devices)}


def per_layer(experts: NDArray[np.bool_]) -> int | float:
    """How many of the marked experts [L, E] a layer has, on average where layers differ."""
    mean = float(experts.sum(axis=1).mean())
    return int(mean) if mean.is_integer() else round(mean, 3)


def running(requests: RequestTracker) -> list[dict[str, Any]]:
    return [
        {
            "id": request.request_id,
            "prompt_tokens": request.prompt_len,
            "output_tokens": request.num_output_tokens,
            "phase": "decode" if request.prefilled else "prefill",
        }
        for request in requests.requests.values()
    ]


def experts(replanner: Replanner, planned: Sequence[TrackedRequest], layers: range) -> dict[str, Any]:
    """Per layer and expert: hot, warm or neither, and average bits of the requests planned last (0 where hot). Also
    their importance, and widths of hot experts where each has its own (else 0).

    Importance is a share: a layer adds up to 1. Before the first prompt nothing is known of either.
    """
    plans = [request.plan for request in planned if request.plan is not None]
    scores = [request.score for request in planned if request.score is not None]
    importance = bits = None
    if scores:
        importance = np.mean([score.values for score in scores], axis=0).round(4).tolist()
    if plans:
        bits = np.mean([plan.bits.bits for plan in plans], axis=0).round(2).tolist()
    return {
        "epoch": replanner.epoch,
        "layers": list(layers),
        "hot": replanner.placement.hot.astype(int).tolist(),
        "warm": replanner.placement.warm.astype(int).tolist(),
        "widths": replanner.placement.widths.astype(int).tolist(),
        "bits": bits,
        "importance": importance,
    }


KEPT = 1024
Report = dict[str, Any]


class FinishedRequests:
    """By vLLM's own ids. Client's X: `cmpl-X-0-1a2b3c4d` of its first prompt, `1_cmpl-X-0-1a2b3c4d` the second of n,
    `cmpl-X-0-1a2b3c4d5e6f7a8b-beam-1-1a2b3c4d` the second beam of one token of a beam search."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._reports: OrderedDict[str, Report] = OrderedDict()

    def note(self, reports: Mapping[str, Report]) -> None:
        for request_id, report in reports.items():
            self._reports[request_id] = report
        while len(self._reports) > self._kept:
            self._reports.popitem(last=False)

    def find(self, client_id: str) -> dict[str, Report]:
        """Every request that vLLM made of the client's: an answer of n choices or of several prompts has several."""
        return {name: self._reports[name] for name in made_of(client_id, self._reports)}

    def latest(self, count: int) -> list[tuple[str, Report]]:
        """The last reports, newest first, without their lists of single tokens."""
        newest = islice(reversed(self._reports.items()), count)
        return [(name, {key: value for key, value in of.items() if not isinstance(value, list)}) for name, of in newest]


def made_of(client_id: str, names: Iterable[str]) -> list[str]:
    """Ids that vLLM made from the client's id."""
    of_beam = r"-[0-9a-f]{16,32}-beam-\d+"
    pattern = re.compile(rf"(\d+_)?([a-z]+-)?{re.escape(client_id)}([-_]\d+)?({of_beam})?(-[0-9a-f]{{8}})?")
    return [name for name in names if pattern.fullmatch(name)]
