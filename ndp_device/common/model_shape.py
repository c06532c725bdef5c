"""Sizes of a Mixture-of-Experts model. Values only: no file, no torch, no time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import msgspec

from ndp_device.common.decoder_layers import DecoderLayer
from ndp_device.common.errors import ConfigError

MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 16
MAX_EXPERTS_IN_ALL = 1 << 20
"""Layers times experts, 45 times Kimi K2's: tables over all experts stay small whatever a file claims."""
MAX_WIDTH = 1 << 24
_LARGEST = {"num_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS}


def _check_sizes(model: ModelShape, *names: str) -> None:
    for name in names:
        value, largest = getattr(model, name), _LARGEST.get(name, MAX_WIDTH)
        if type(value) is not int or not 1 <= value <= largest:
            raise ConfigError(
                f"model {model.name!r}: {name} must be at least 1 and at most {largest}, got {value!r:.80}"
            )


@dataclass(frozen=True)
class ModelShape:
    """The routed experts, all that a device, a plan and a replica directory know of a model: L layers, E experts, top_k
    of them per token, H x I weights."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _check_sizes(self, "num_layers", "num_experts", "top_k", "hidden_size", "intermediate_size")
        if self.num_layers * self.num_experts > MAX_EXPERTS_IN_ALL:
            raise ConfigError(
                f"model {self.name!r}: {self.num_layers} layers of {self.num_experts} experts are more than the "
                f"{MAX_EXPERTS_IN_ALL} that tables are made for"
            )
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
    """A model as the GPU sees it; `dtype` is that of weights, KV cache and state.

    A family with more to compute beside its routed experts adds a form of attention to decoder_layers.py. Or it adds a
    field here with a default that means "has none". Times depend on nothing else.
    """

    vocab_size: int
    decoder: tuple[DecoderLayer, ...]
    """All decoder layers in order; L of them have routed experts."""
    shared_weights: int = 0
    """Weights of the shared experts of one MoE layer. Every row goes through them."""
    tied: bool = False
    """Whether the output projection is the embedding table."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(self, "vocab_size")
        with_experts = sum(layer.has_experts for layer in self.decoder)
        if with_experts != self.num_layers:
            raise ConfigError(
                f"model {self.name!r}: {with_experts} decoder layers have routed experts, but num_layers is "
                f"{self.num_layers}"
            )

    @property
    def router_weights(self) -> int:
        """Router weights of one MoE layer."""
        return self.hidden_size * self.num_experts

    @cached_property
    def kinds(self) -> tuple[DecoderLayer, ...]:
        """The distinct decoder layers, in order of first appearance."""
        return tuple(dict.fromkeys(self.decoder))

    @cached_property
    def before_experts(self) -> tuple[tuple[int, ...], ...]:
        """[L]: which kinds run from the experts of the MoE layer before to those of this one.

        Dense layers after the last MoE layer count before the first: a step takes as long.
        """
        parts: list[list[int]] = [[]]
        for layer in self.decoder:
            parts[-1].append(self.kinds.index(layer))
            if layer.has_experts:
                parts.append([])
        tail = parts.pop()
        return (tuple(tail + parts[0]), *map(tuple, parts[1:]))

    @property
    def windows(self) -> frozenset[tuple[int, bool]]:
        """(tokens, whether it is a chunk) of every window that some layer has."""
        return frozenset((kind.attention.window, kind.attention.is_chunked) for kind in self.kinds) - {(0, False)}

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of one token in the KV cache of all layers, windows aside."""
        return self.dtype_bytes * sum(layer.attention.kv_values for layer in self.decoder)

    @cached_property
    def state_bytes(self) -> int:
        """The state of one request in all layers that have one instead of a KV cache."""
        return self.dtype_bytes * sum(layer.attention.state_values for layer in self.decoder)

    @property
    def head_weights(self) -> int:
        """The output projection."""
        return self.hidden_size * self.vocab_size

    @cached_property
    def beside_weights(self) -> int:
        """Weights of all decoder layers without routed experts."""
        layers = sum(layer.attention.weights(self.hidden_size) + layer.dense_weights for layer in self.decoder)
        return layers + self.num_layers * (self.router_weights + self.shared_weights)

    @property
    def other_weights(self) -> int:
        """Weights of all but the routed experts, a tied embedding once."""
        return self.beside_weights + (1 if self.tied else 2) * self.head_weights

    @property
    def num_parameters(self) -> int:
        """All but norms and biases."""
        return self.other_weights + self.num_layers * self.num_experts * self.weights_per_expert

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token is multiplied with, the output projection included; an embedding is only looked up."""
        return self.beside_weights + self.num_layers * self.top_k * self.weights_per_expert + self.head_weights

    @classmethod
    def of_experts(cls, experts: ModelShape, **beside: Any) -> WholeModel:
        """The same experts; `beside`: the other fields, and any of the experts' that a run changes, such as dtype."""
        return cls(**{field.name: getattr(experts, field.name) for field in fields(ModelShape)} | beside)

    @classmethod
    def of_recorded(cls, sizes: Mapping[str, Any], name: str = "recorded") -> WholeModel:
        """Make the model from the sizes that `recorded` gave in the run of a trace."""
        if set(sizes) != {*_FIELD_OF_RECORDED, *_BESIDE} or sizes["dtype_bytes"] not in _DTYPE_OF_BYTES:
            raise ConfigError(
                f"a trace must record the sizes {', '.join([*_FIELD_OF_RECORDED, *_BESIDE])} (dtype_bytes one of "
                f"{', '.join(map(str, _DTYPE_OF_BYTES))}), got {dict(sizes)}"
            )
        given: dict[str, Any] = {field: sizes[key] for key, field in _FIELD_OF_RECORDED.items()}
        given |= {"name": name, "dtype": _DTYPE_OF_BYTES[sizes["dtype_bytes"]]}
        try:
            kinds = msgspec.convert(sizes["kinds"], tuple[DecoderLayer, ...])
            order = [kinds[index] for index in sizes["decoder"]]
        except (msgspec.ValidationError, IndexError, TypeError) as error:
            raise ConfigError(f"a trace's decoder layers must be sizes that some model has: {error}") from None
        return cls(**given, decoder=tuple(order), shared_weights=sizes["shared_weights"], tied=sizes["tied"])

    def recorded(self) -> dict[str, Any]:
        """The sizes of which `of_recorded` makes the model, as JSON holds them."""
        return {
            **{key: getattr(self, field) for key, field in _FIELD_OF_RECORDED.items()},
            "dtype_bytes": self.dtype_bytes,
            "kinds": msgspec.to_builtins(self.kinds),
            "decoder": [self.kinds.index(layer) for layer in self.decoder],
            "shared_weights": self.shared_weights,
            "tied": self.tied,
        }


_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_DTYPE_OF_BYTES = {4: "float32", 2: "bfloat16", 1: "float8_e4m3fn"}
"""Traces record bytes only; which of the 16-bit types it was changes no time."""

_FIELD_OF_RECORDED = {
    "hidden": "hidden_size",
    "num_layers": "num_layers",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "num_experts": "num_experts",
    "top_k": "top_k",
}
_BESIDE = ("dtype_bytes", "kinds", "decoder", "shared_weights", "tied")
