"""A placement policy of your own, on a recorded trace, beside ours and the oracle.

A policy scores each prompt, places K experts of every layer on the GPU and gives the others bits. This one is ours, but
an expert in place stays unless a newcomer is twice as important.
Installed in a package of yours it is known to the server too (`"policy": "sticky"`):

    [project.entry-points."vllm_ndp.policies"]
    sticky = "your_package:Sticky"

    python examples/policy_of_your_own.py tests/data/tiny-mixtral-trace
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ndp.lab.compare import CompareSettings, compare
from vllm_ndp.planning import policies
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget, Placement
from vllm_ndp.planning.policies import PolicySettings
from vllm_ndp.traces.trace import Trace


class Sticky:
    """Ours with another `place`: to the ranking, an expert that is hot already counts twice."""

    name = "sticky"

    def __init__(self, settings: PolicySettings) -> None:
        self._ours = policies.POLICIES["prefill"](settings)

    def place(self, scores: Sequence[ImportanceScore], current: Placement, budget: Budget) -> Placement:
        doubled = [ImportanceScore.from_weights(score.values * np.where(current.hot, 2.0, 1.0)) for score in scores]
        return self._ours.place(doubled, current, budget)

    def __getattr__(self, name: str) -> Any:  # score, assign, at_layer: as ours
        return getattr(self._ours, name)


def main(trace: str) -> None:
    policies.POLICIES["sticky"] = Sticky  # in a package of yours the entry point does this
    recorded = Trace.load(Path(trace))
    settings = CompareSettings(
        model="models/tiny-mixtral", systems=("context_aware",), policies=("prefill", "sticky", "oracle")
    )
    for row in compare(recorded, settings).rows:
        print(
            f"{row.policy:8} {row.decode_tokens_per_s:10.0f} simulated tokens/s, {row.hit_mass:.2f} of the weight hot"
        )


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["tests/data/tiny-mixtral-trace"]))
