"""A placement policy of your own, with an option, on a recorded trace, beside ours and the oracle.

A policy scores each prompt, places K experts of every layer on the GPU and gives the others bits. This one is ours, but
an expert in place stays unless a newcomer is `stickiness` times as important.
Installed in a package of yours it is known to the server too (`"policy": "sticky"`), docs/extend.md:

    [project.entry-points."vllm_ndp.policies"]
    sticky = "your_package:Sticky"

    python examples/policy_of_your_own.py tests/data/tiny-mixtral-trace
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vllm_ndp.lab.compare import compare
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.planning import policies
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement
from vllm_ndp.planning.policies import PolicySettings
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.trace import Trace


class Sticky:
    """Ours with another `place`: to the ranking, an expert that is hot already counts `stickiness` times."""

    name = "sticky"

    def __init__(self, settings: PolicySettings, *, stickiness: float = 2.0) -> None:
        if stickiness < 1:
            raise ValueError(f"stickiness must be at least 1, got {stickiness}")
        self._ours = policies.POLICIES["prefill"](settings)
        self._stickiness = stickiness

    def score(self, stats: RoutingStats) -> ImportanceScore:
        return self._ours.score(stats)

    def place(self, scores: Sequence[ImportanceScore], current: Placement | None, budget: Budget) -> Placement:
        if current is not None:
            weight = np.where(current.hot, self._stickiness, 1.0)
            scores = [ImportanceScore.from_weights(score.values * weight, score.num_tokens) for score in scores]
        return self._ours.place(scores, current, budget)

    def assign(self, score: ImportanceScore, placement: Placement, loss: LossTable, budget: Budget) -> BitwidthPlan:
        return self._ours.assign(score, placement, loss, budget)


def main(trace: str) -> None:
    policies.POLICIES["sticky"] = Sticky  # in a package of yours the entry point does this
    recorded = Trace.load(Path(trace))
    for stickiness in (2.0, 8.0):
        settings = CompareSettings(
            model="models/tiny-mixtral",
            systems=("context_aware",),
            policies=("prefill", "sticky", "oracle"),
            policy_options={"stickiness": stickiness},
        )
        print(f"stickiness {stickiness:g}")
        for row in compare(recorded, settings).rows:
            print(
                f"{row.policy:8} {row.decode_tokens_per_s:10.0f} simulated tokens/s, {row.hit_mass:.2f} of the weight "
                "hot"
            )


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["tests/data/tiny-mixtral-trace"]))
