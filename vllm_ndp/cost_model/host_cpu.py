"""A processor that computes experts beside a memory, two rooflines: the host's CPU, or an expander that multiplies.

Tables and sums in floats are for systems that replay a whole trace at once. `expert_ps` is the same price in whole
picoseconds, for the step clock of the plugin and of the exact replay, which adds the rows' hop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.timing import units
from vllm_ndp.cost_model.costs import Costs

PS_PER_S = 1e12


@dataclass(frozen=True)
class HostCpu:
    flops_per_s: int
    memory_bytes_per_s: int

    @classmethod
    def of(cls, costs: Costs) -> HostCpu:
        host = costs.hardware.host
        return cls(host.cpu_flops_per_s, host.memory_bytes_per_s)

    @classmethod
    def on_expander(cls, costs: Costs) -> HostCpu:
        """The CPU with experts in the CXL expander's memory."""
        host = costs.hardware.host
        return cls(host.cpu_flops_per_s, host.cxl_bytes_per_s)

    @classmethod
    def expander(cls, costs: Costs) -> HostCpu:
        """A CXL expander that multiplies what it holds."""
        host = costs.hardware.host
        return cls(host.cxl_flops_per_s, host.cxl_bytes_per_s)

    def experts_ps(self, costs: Costs, max_tokens: int, weight_bytes: float, bytes_per_s: float) -> NDArray[np.float64]:
        """[tokens]: one expert read from a memory of that rate and multiplied by n rows; 0 rows cost nothing."""
        rows = np.arange(max_tokens + 1)
        read = weight_bytes / bytes_per_s
        compute = 2.0 * costs.shape.weights_per_expert * rows / self.flops_per_s
        times: NDArray[np.float64] = np.where(rows > 0, np.maximum(read, compute) * PS_PER_S, 0.0)
        return times

    def hops_ps(self, costs: Costs, max_rows: int) -> NDArray[np.float64]:
        """[rows]: activations of n rows to the CPU and their results back, over the link."""
        return np.array([costs.hop_ps(n) for n in range(max_rows + 1)], np.float64)

    def layers_ps(self, costs: Costs, counts: NDArray[np.int64], weight_bytes: float) -> NDArray[np.float64]:
        """[L]: all experts of counts [L, E] from host memory, one after the other, and the rows' way there and back."""
        hop = [costs.hop_ps(int(n)) for n in -(-counts.sum(axis=1) // costs.shape.top_k)]
        times: NDArray[np.float64] = self.each_ps(costs, counts, weight_bytes).sum(axis=1) + np.array(hop, np.float64)
        return times

    def expert_ps(self, costs: Costs, rows: int) -> int:
        """A full-precision expert with so many rows."""
        flops = 2 * costs.shape.weights_per_expert * rows
        read = units.transfer_ps(costs.shape.expert_bytes, self.memory_bytes_per_s)
        return max(read, units.ceil_div(flops * units.PS_PER_S, self.flops_per_s))

    def each_ps(self, costs: Costs, counts: NDArray[np.int64], weight_bytes: float) -> NDArray[np.float64]:
        """[...]: an expert from host memory for each of counts [...] rows; 0 rows cost nothing."""
        read = np.where(counts > 0, weight_bytes / self.memory_bytes_per_s, 0.0)
        compute = 2.0 * costs.shape.weights_per_expert * counts / self.flops_per_s
        times: NDArray[np.float64] = np.maximum(read, compute) * PS_PER_S
        return times
