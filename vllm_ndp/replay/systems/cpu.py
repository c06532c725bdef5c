"""A host CPU that computes experts: two rooflines. Used by systems whose cold experts run on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.simulation.costs import Costs

PS_PER_S = 1e12


@dataclass(frozen=True)
class HostCpu:
    flops_per_s: float = 20e12  # source: seed 002, "20 TFLOPS" of AMX
    memory_bytes_per_s: float = 307.2e9  # source: arithmetic, 8 channels of DDR5-4800 x 8 B
    cxl_bytes_per_s: float = 64e9  # source: seed 002, a commodity CXL 2.0 expander

    def experts_ps(self, costs: Costs, max_tokens: int, weight_bytes: float, bytes_per_s: float) -> NDArray[np.float64]:
        """[tokens]: one expert read from a memory of that rate and multiplied by n rows; 0 rows cost nothing."""
        rows = np.arange(max_tokens + 1)
        read = weight_bytes / bytes_per_s
        compute = 2.0 * costs.shape.weights_per_expert * rows / self.flops_per_s
        times: NDArray[np.float64] = np.where(rows > 0, np.maximum(read, compute) * PS_PER_S, 0.0)
        return times
