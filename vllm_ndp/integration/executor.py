"""Executors of pairs beside the hot slots: the device, the host's CPU, or experts that stream through. One protocol.

Each is started when a layer is split and brings its part when the hot experts have run. Knows no tensors' contents,
nor who there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from vllm_ndp.layer.split import Pairs

if TYPE_CHECKING:
    from vllm_ndp.integration.step import Step


class Pending(Protocol):
    """Pairs under way."""

    def add(self, out: torch.Tensor) -> bool:
        """Wait, and add the weighted sums to the rows of out [T, H]. False: nothing came, and nothing was added."""

    def abandon(self) -> None:
        """The step is lost: nothing is added, and nothing stays under way."""


class Executor(Protocol):
    def start(self, step: Step, layer: int, x: torch.Tensor, pairs: Pairs) -> Pending:
        """Begin to compute these pairs, at least one, of rows of x [T, H]."""
