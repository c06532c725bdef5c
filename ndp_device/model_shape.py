"""Sizes of a Mixture-of-Experts model, and what its experts compute. Values only: no file, no torch, no time.

ModelShape     the routed experts: all that a device, a plan and a replica directory know of a model
WholeModel     and what a GPU computes beside them: attention and the output projection
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one full-precision weight."""
        if self.dtype not in _DTYPE_BYTES:
            raise ConfigError(
                f"model {self.name!r}: dtype must be one of {', '.join(_DTYPE_BYTES)}, got {self.dtype!r}"
            )
        return _DTYPE_BYTES[self.dtype]

    @property
    def expert_bytes(self) -> int:
        """One expert in full precision."""
        return self.weights_per_expert * self.dtype_bytes


@dataclass(frozen=True, kw_only=True)
class WholeModel(ModelShape):
    """A model as the GPU sees it; `dtype` is that of weights and KV cache.

    A family with more to compute beside its routed experts adds a field here, with a default that means "has none", and
    its share to the properties below: no time is computed from anything else.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"model {self.name!r}: {field} must be at least 1, got {getattr(self, field)}")

    @property
    def attention_weights(self) -> int:
        """Query, key, value and output projections and the router of one layer."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * query + 2 * key_value + self.num_experts)

    @property
    def kv_values(self) -> int:
        """Numbers that the KV cache of one layer holds for one token."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def head_weights(self) -> int:
        """The output projection."""
        return self.hidden_size * self.vocab_size

    @classmethod
    def of_experts(cls, experts: ModelShape, **beside: Any) -> WholeModel:
        """The same experts; `beside`: the other fields, and any of the experts' that a run changes, such as dtype."""
        return cls(**{**vars(experts), **beside})

    @classmethod
    def of_config(cls, experts: ModelShape, config: Mapping[str, Any]) -> WholeModel:
        """What a checkpoint's config.json says beside its experts."""
        for key in ("num_attention_heads", "vocab_size"):
            if key not in config:
                raise ConfigError(f"model {experts.name!r}: its config.json must give {key}, of which there is none")
        heads = int(config["num_attention_heads"])
        return cls.of_experts(
            experts,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads", heads)),
            head_dim=int(config.get("head_dim") or experts.hidden_size // heads),
            vocab_size=int(config["vocab_size"]),
        )

    @classmethod
    def of_recorded(cls, sizes: Mapping[str, int], name: str = "recorded") -> WholeModel:
        """From what `recorded` gave, in the run that made a trace."""
        fields = dict(sizes)
        num_bytes = fields.pop("dtype_bytes", 0)
        if set(fields) != set(_FIELD_OF_RECORDED) or num_bytes not in _DTYPE_OF_BYTES:
            raise ConfigError(
                f"a trace must record the sizes {', '.join(_FIELD_OF_RECORDED)} and dtype_bytes "
                f"({', '.join(map(str, _DTYPE_OF_BYTES))}), got {dict(sizes)}"
            )
        renamed: dict[str, Any] = {_FIELD_OF_RECORDED[key]: value for key, value in fields.items()}
        return cls(name=name, dtype=_DTYPE_OF_BYTES[num_bytes], **renamed)

    def recorded(self) -> dict[str, int]:
        """The sizes by the names that traces have had from the first on."""
        sizes: dict[str, int] = {key: getattr(self, field) for key, field in _FIELD_OF_RECORDED.items()}
        return sizes | {"dtype_bytes": self.dtype_bytes}


_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_DTYPE_OF_BYTES = {4: "float32", 2: "bfloat16", 1: "float8_e4m3fn"}
"""Traces record bytes only; which of the 16-bit types it was changes no time."""

_FIELD_OF_RECORDED = {
    "hidden": "hidden_size",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "num_experts": "num_experts",
    "top_k": "top_k",
}
