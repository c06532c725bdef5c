"""Settings of synthetic routing that resemble measured models, by name, each with its source.

Others publish a model's routing as repeats, hit rates and coverage. With these settings a synthetic trace shows the
same (tests/vllm_ndp/lab/test_routing_as_published.py has both, and the tolerances). Every table marks rows of a routing
that was not fitted to their model. Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ndp_device.common.errors import ConfigError, nearest
from ndp_device.timing.public_models import SHAPES, public_shape
from vllm_ndp.traces.synthetic import SyntheticSettings


@dataclass(frozen=True)
class RoutingPreset:
    """How strongly and how long a model's tokens go on choosing the same experts."""

    name: str
    source: str
    """Source of the figures that the preset was fitted to; empty: fitted to nothing."""
    fitted_to: tuple[str, ...] = ()
    """Models whose figures those are."""
    concentration: float = SyntheticSettings.concentration
    signal: float = SyntheticSettings.signal
    persistence: float = SyntheticSettings.persistence
    memory: float = SyntheticSettings.memory
    reach: float = SyntheticSettings.reach
    strength: tuple[float, ...] = ()
    """Strength of each layer of the fitted model, first to last; empty: all alike."""

    def label(self, model: str) -> str:
        """Label of rows on a trace of that model."""
        if model in self.fitted_to:
            return f"{self.name}, fitted"
        return f"{self.name}, not fitted to {model}" if self.source else f"{self.name}, fitted to nothing"

    def settings(self, model: str, *, num_layers: int = 0, **sizes: Any) -> SyntheticSettings:
        """Settings for a public shape or for given sizes. num_layers: so many that stand for all of the model's."""
        known = public_shape(model) if model in SHAPES or "num_experts" not in sizes else None
        shape = {} if known is None else {"num_experts": known.num_experts, "top_k": known.top_k}
        layers = num_layers or (0 if known is None else known.num_layers)
        return SyntheticSettings(
            **{"num_layers": layers, **shape, **sizes},
            concentration=self.concentration,
            signal=self.signal,
            persistence=self.persistence,
            memory=self.memory,
            reach=self.reach,
            strength=self._spread(layers),
            routing=self.label(model),
        )

    def _spread(self, layers: int) -> tuple[float, ...]:
        """The strengths of so many layers, each at the middle of its part of the fitted model's."""
        known = len(self.strength)
        return tuple(self.strength[(2 * layer + 1) * known // (2 * layers)] for layer in range(layers)) if known else ()


def routing_named(name: str) -> RoutingPreset:
    if name not in ROUTINGS:
        raise ConfigError(f"routing must be one of {', '.join(ROUTINGS)}, got {name!r}{nearest(name, ROUTINGS)}")
    return ROUTINGS[name]


def read_routing(name: str, model: str) -> RoutingPreset:
    """A preset by name. "": without memory; auto: fitted to the model."""
    return routing_of(model) if name == "auto" else routing_named(name or "memoryless")


def routing_of(model: str) -> RoutingPreset:
    """Preset fitted to that model, else the one without memory."""
    return next((routing for routing in ROUTINGS.values() if model in routing.fitted_to), ROUTINGS["memoryless"])


_IN_HUNDREDTHS = (
    "9 12 22 39 61 86 119 125 125 126 124 123 123 122 121 121 120 119 120 118 118 118 118 118 "
    "118 118 118 118 118 118 118 124 111 103 93 87 81 75 69 65 62 59 57 55 54 50 50 50"
)
_QWEN3 = tuple(int(strength) / 100 for strength in _IN_HUNDREDTHS.split())
"""Strengths with which layers 0, 6, 7, 18, 19, 30, 31 and 47 repeat as published, and all layers as their published
mean."""

ROUTINGS: Mapping[str, RoutingPreset] = {
    routing.name: routing
    for routing in (
        RoutingPreset("memoryless", ""),
        RoutingPreset(
            "qwen3-30b-a3b",
            "github.com/gajsanders/moe-trace, findings 004 to 007: 25 prompts, 3225 decode tokens",
            ("qwen3-30b-a3b",),
            concentration=5.0,
            signal=1.1,
            persistence=0.6,
            memory=0.98,
            reach=0.6,
            strength=_QWEN3,
        ),
        RoutingPreset(
            "gpt-oss-120b",
            "BigMoeOnEdge issue 33: 8 to 9 % hits of a cache of 3 % of the experts",
            ("gpt-oss-120b",),
        ),
        RoutingPreset(
            "qwen3.8-flash-next",
            "imp issue 2061: hits of LRU caches of 93, 186, 279, 372 and 512 of 512 experts, top-10",
            ("qwen3.8-flash-next",),
        ),
        RoutingPreset(
            "near-chance",
            "public logs of single layers of fine-grained models of 2024: hits and repeats of Qwen1.5-MoE and OLMoE",
            ("near-chance",),
            concentration=40.0,
            signal=0.4,
            persistence=0.6,
            memory=0.2,
        ),
    )
}
