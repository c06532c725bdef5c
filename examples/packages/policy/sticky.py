import numpy as np

from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.policies import prefill


class Sticky:
    """The paper's policy, but a hot expert stays unless a newcomer is `stickiness` times as important."""

    name = "sticky"

    def __init__(self, settings, *, stickiness: float = 2.0):
        if stickiness < 1:
            raise ValueError(f"stickiness must be at least 1, got {stickiness}")
        self.paper, self.stickiness = prefill(settings), stickiness

    def score(self, stats):  # RoutingStats -> ImportanceScore, once per prompt
        return self.paper.score(stats)

    def place(self, scores, current, budget):  # scores of all running requests -> Placement; current: None at first
        weight = 1.0 if current is None else np.where(current.hot, self.stickiness, 1.0)
        return self.paper.place([ImportanceScore.from_weights(s.values * weight) for s in scores], current, budget)

    def assign(self, score, placement, loss, budget):  # -> BitwidthPlan of one request
        return self.paper.assign(score, placement, loss, budget)
