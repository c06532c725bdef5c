"""Sizes of a Mixture-of-Experts model, and what its experts compute. Values only: no file, no torch, no time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ndp_device.errors import ConfigError

Activation = Literal["silu", "swigluoai"]
"""What stands between the products. silu: silu(gate) * up. swigluoai: gpt-oss's clamped one, with gate at most 7:
(clamp(up, -7, 7) + 1) * gate * sigmoid(1.702 * gate)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one Mixture-of-Experts model: L layers, E experts, top_k of them per token, H x I weights."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_experts", "top_k", "hidden_size", "intermediate_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"model {self.name!r}: {field} must be at least 1, got {getattr(self, field)}")
        if self.top_k > self.num_experts:
            raise ConfigError(f"model {self.name!r}: top_k {self.top_k} must not exceed num_experts {self.num_experts}")

    @property
    def weights_per_expert(self) -> int:
        """Gate, up and down projections together."""
        return 3 * self.hidden_size * self.intermediate_size
