"""The function between an expert's products, as four numbers: one formula for every family.

y = (clamp(up, -limit, limit) + up_bias) * g * sigmoid(linear * g + cubic * g^3),  g = min(gate, limit)
"""

from __future__ import annotations

import math

import msgspec

from ndp_device.common.errors import ConfigError

_CUBIC_OF_GELU = 0.044715
_LINEAR_OF_GELU = 2 * math.sqrt(2 / math.pi)
"""gelu_tanh(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))), and (1 + tanh(z)) / 2 = sigmoid(2 z)."""


class Activation(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """SiLU unless numbers say otherwise. limit: None = nothing is clamped."""

    linear: float = 1.0
    cubic: float = 0.0
    up_bias: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        numbers = (self.linear, self.cubic, self.up_bias, self.limit or 0.0)
        if not all(map(math.isfinite, numbers)) or (self.limit is not None and self.limit <= 0):
            raise ValueError(f"an activation must have finite numbers and a limit above 0 or none, got {self}")

    @property
    def largest(self) -> float:
        """The limit as a number."""
        return math.inf if self.limit is None else self.limit

    def __str__(self) -> str:
        form = next((name for name, form in NAMED.items() if form == msgspec.structs.replace(self, limit=None)), None)
        if self == NAMED["swigluoai"] or form is None:
            form = f"gate * sigmoid({self.linear:.6g} gate + {self.cubic:.6g} gate^3) * (up + {self.up_bias:.6g})"
        return form if self.limit is None else f"{form}, clamped at {self.limit:.6g}"


SILU = Activation()
GELU_TANH = Activation(linear=_LINEAR_OF_GELU, cubic=_LINEAR_OF_GELU * _CUBIC_OF_GELU)
GPT_OSS = Activation(linear=1.702, up_bias=1.0, limit=7.0)

NAMED = {"silu": SILU, "gelu_tanh": GELU_TANH, "swigluoai": GPT_OSS}
"""As vLLM names them. MiniMax-M3 calls its own swigluoai too, and gives the numbers beside it."""

_ALIASES = {"swish": "silu", "swiglu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "swigluoai_uninterleave": "swigluoai"}

_OTHERS = {
    "swiglustep": "which clamps after its SiLU",
    "situ": "whose gate goes through a tanh",
    "gelu": "which takes the error function; gelu_pytorch_tanh is served",
    "relu2": "which has no gate",
}


def activation_named(
    name: str, *, limit: float | None = None, linear: float | None = None, up_bias: float | None = None
) -> Activation:
    """The activation that a configuration names, with the numbers that it gives beside the name.

    Numbers alone say gpt-oss's form, whatever the name: transformers writes MiniMax-M3 as silu with them. Raises
    ConfigError with the reason for an activation that the formula does not cover.
    """
    known = NAMED.get(_ALIASES.get(name, name))
    if known is None:
        why = _OTHERS.get(name.removesuffix("_no_mul"), "which is not known here")
        raise ConfigError(
            f"its experts compute {name}, {why}; our kernels compute silu, gelu_tanh and gpt-oss's SwiGLU, "
            "with any limit"
        )
    if linear is not None or up_bias is not None:
        known = GPT_OSS
    given = {"limit": limit, "linear": linear, "up_bias": up_bias}
    try:
        return msgspec.structs.replace(known, **{key: value for key, value in given.items() if value is not None})
    except ValueError as error:
        raise ConfigError(str(error)) from None
