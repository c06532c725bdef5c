"""Prompt pairs of experts without a slot: in full precision through the kernel, some of them to stay.

Nothing is under way: all of it runs when it is collected. Knows the pool's streams and the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ndp.integration.hot_experts import HotExperts
from vllm_ndp.integration.planner import PlanRunner
from vllm_ndp.integration.step import Step
from vllm_ndp.layer.split import Pairs


@dataclass(frozen=True)
class StreamedExperts:
    hot: HotExperts
    planner: PlanRunner

    def start(self, step: Step, layer: int, x: torch.Tensor, pairs: Pairs) -> StreamPending:
        return StreamPending(self, step, layer, x, pairs)


@dataclass(frozen=True)
class StreamPending:
    experts: StreamedExperts
    step: Step
    layer: int
    x: torch.Tensor
    pairs: Pairs

    def add(self, out: torch.Tensor) -> bool:
        """out: f32 [T, H]."""
        keep = self.experts.planner.slots_to_keep(self.step, self.layer, self.pairs)
        out.add_(self.experts.hot.stream(self.layer, self.x, self.pairs, keep))
        return True

    def abandon(self) -> None:
        """Nothing has begun."""
