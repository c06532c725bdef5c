"""Warm experts: decode pairs that the host's CPU computes in full precision, from the checkpoint as it lies in memory.

Uses the device's own kernel, in this process, so a warm expert gives what it would give on a device in full precision.
Reads weights where the pool has mapped them: an expert that becomes warm is copied nowhere. Knows a kernel and the
checkpoint. Does not know plans or prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.kernels.kernel import Kernel
from vllm_ndp.integration.device_link import add_sums, chosen
from vllm_ndp.integration.host_replicas import LocalReplicas
from vllm_ndp.layer.split import Pairs


@dataclass(frozen=True)
class WarmPending:
    """The warm pairs of one layer, their rows on the host already."""

    cpu: HostCpuExperts
    layer: int
    pairs: Pairs
    x: NDArray[np.float32]  # [S, H]

    def add(self, out: torch.Tensor) -> bool:
        """Compute, and add the weighted sums to the rows of out [T, H]."""
        add_sums(out, self.cpu.execute(self.layer, self.x, self.pairs), self.pairs.sent_rows)
        return True

    def abandon(self) -> None:
        """Nothing has begun."""


class HostCpuExperts:
    def __init__(self, model_dir: Path, kernel: Kernel, layers: range) -> None:
        """layers: of the model, which this worker counts from 0."""
        self._layers, self._local = layers, LocalReplicas(model_dir, None, kernel)
        self.description = f"the host's CPU, full precision, kernel {kernel.name}"

    def start(self, layer: int, x: torch.Tensor, pairs: Pairs) -> WarmPending:
        """Bring the rows of x [T, H] that the pairs need to the host: before hot experts keep a GPU busy."""
        return WarmPending(self, layer, pairs, chosen(x, pairs.sent_rows).detach().float().cpu().numpy())

    def execute(self, layer: int, x: NDArray[np.float32], pairs: Pairs) -> NDArray[np.float32]:
        """The weighted sum over the pairs of each row of x [S, H]. Raises ReplicaError where the checkpoint has been
        cut short."""
        _, local, experts, bits, topk_weights = pairs
        return self._local.execute(self._layers[layer], x, local, experts, bits, topk_weights)
