"""Pairs that run beside the hot slots: on the device, on the host's CPU, or of experts that stream through.

Each executor is started when a layer is split and brings its part when the hot experts have run. Knows no tensors'
contents, nor who there is.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Pending(Protocol):
    """Pairs under way."""

    def add(self, out: torch.Tensor) -> bool:
        """Wait, and add the weighted sums to the rows of out [T, H]. False: nothing came, and nothing was added."""

    def abandon(self) -> None:
        """The step is lost: nothing is added, and nothing stays under way."""
