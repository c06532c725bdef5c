"""Warm experts: decode pairs that the host's CPU computes in full precision, from the checkpoint as it lies in memory.

Uses the device's own kernel, in this process, so a warm expert gives what it would give on a device in full precision.
Reads weights where the pool has mapped them: an expert that becomes warm is copied nowhere. Knows a kernel, the
checkpoint and what a pair costs on the simulated host. Does not know plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.kernels.kernel import Kernel
from ndp_device.replicas.store import ExpertStore
from ndp_device.widths import FULL_PRECISION_BITS
from vllm_ndp.integration.pairs import Pairs, add_sums
from vllm_ndp.simulation.costs import Costs
from vllm_ndp.simulation.host_cpu import HostCpu


@dataclass(frozen=True)
class WarmCall:
    """The warm pairs of one layer, their rows on the host already."""

    experts: WarmExperts
    layer: int
    pairs: Pairs
    x: NDArray[np.float32]  # [S, H]
    rows: NDArray[np.int64]  # [S], of the step
    local: NDArray[np.int32]  # [P], index into rows

    def add(self, out: torch.Tensor) -> int:
        """Compute, and add the weighted sums to the rows of out [T, H]; what it takes on the simulated host, in ps."""
        add_sums(out, self.experts.execute(self.layer, self.x, self.local, self.pairs), self.rows)
        return self.experts.pairs_ps(self.pairs.experts, self.pairs.rows)


class WarmExperts:
    def __init__(self, model_dir: Path, kernel: Kernel, layers: range, costs: Costs) -> None:
        """layers: of the model, which this worker counts from 0."""
        self._layers, self._costs, self._cpu = layers, costs, HostCpu.of(costs)
        self._kernel = kernel
        self._store = ExpertStore(model_dir, None, kernel=kernel)

    @cached_property
    def description(self) -> str:
        return f"the host's CPU, full precision, kernel {self._kernel.name}"

    def begin(self, layer: int, x: torch.Tensor, pairs: Pairs) -> WarmCall | None:
        """Bring the rows of x [T, H] that the pairs need to the host: before hot experts keep a GPU busy."""
        if not len(pairs.rows):
            return None
        rows, local = pairs.sent_rows
        if len(rows) < len(x):
            x = x.index_select(0, torch.from_numpy(rows).to(x.device))
        return WarmCall(self, layer, pairs, x.detach().float().cpu().numpy(), rows, local)

    def execute(self, layer: int, x: NDArray[np.float32], rows: NDArray[np.int32], pairs: Pairs) -> NDArray[np.float32]:
        """The weighted sum over the pairs of each row of x [S, H]; rows [P] index it. Raises ReplicaError where the
        checkpoint has been cut short."""
        layer = self._layers[layer]
        experts, places = np.unique(pairs.experts, return_inverse=True)
        prepared = [self._store.get(layer, expert, FULL_PRECISION_BITS) for expert in experts.tolist()]
        sums = self._kernel.execute(x, prepared, rows, places.astype(np.int32), pairs.topk_weights)
        self._store.check_used(layer, (FULL_PRECISION_BITS,))
        return sums

    def pairs_ps(self, experts: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
        """What pairs of one layer take on the simulated host. experts [P], rows [P]."""
        return self._cpu.pairs_ps(self._costs, experts, rows)

    def layer_ps(self, ids: NDArray[np.int64], warm: NDArray[np.bool_]) -> int:
        """What the warm pairs of a layer take on the simulated host. ids [T, k] of decode rows; warm [E]."""
        rows, columns = np.nonzero(warm[ids])
        return self.pairs_ps(ids[rows, columns], rows)
