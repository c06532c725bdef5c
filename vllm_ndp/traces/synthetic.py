"""Traces with a known amount of skew, request-level signal, persistence and drift, and with none of it: the null.

    router logit of expert e = strength[l] * (log popularity[l, e] + signal * taste[request, l, e]) + noise (Gumbel)

The k largest logits are chosen, their softmax is the router weight. With signal 0 and persistence 0 every token is an
independent draw from one popularity. So any gain of a policy over static popularity on such a trace is an artefact.
Persistence is the part of a token's noise that the next token keeps. The Gumbel's Gaussian is sqrt(p) times an AR(1)
process plus sqrt(1 - p) times white noise. Logits are rounded to 2^-16, so that no choice hangs on the last digit of a
processor's logarithm.

Others publish a measured model's routing as repeats, hit rates and coverage. ROUTINGS has settings, each with its
source, with which a synthetic trace shows the same (tests/vllm_ndp/lab/test_routing_as_published.py has both, and the
tolerances). Every table marks rows of a routing that was not fitted to their model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError, nearest
from ndp_device.timing.public_models import SHAPES, public_shape
from vllm_ndp.traces.format import Provenance
from vllm_ndp.traces.rows import MOST_ROWS
from vllm_ndp.traces.trace import Sequence, Trace, from_sequences

_GRID = 2.0**16
_LIMITS = {
    **dict.fromkeys(("num_layers", "num_experts", "top_k", "num_requests", "prompt_len"), (1, math.inf)),
    "decode_len": (0, math.inf),
    "concentration": (1e-9, 1e9),
    "signal": (0, 1e9),
    "reach": (1e-9, 1),
    "memory": (0, 1 - 1e-9),
    **dict.fromkeys(("persistence", "drift"), (0, 1)),
}
_BEYOND_REACH = 3.0
"""Standard deviations of taste."""


@dataclass(frozen=True)
class SyntheticSettings:
    """Sizes default to those of a public shape where one is named."""

    num_layers: int
    num_experts: int
    top_k: int
    num_requests: int = 32
    prompt_len: int = 256
    decode_len: int = 256
    concentration: float = 5.0
    """Dirichlet parameter of each layer's popularity: small is skewed, large is even."""
    signal: float = 1.0
    """Standard deviation of a request's own logit offsets; 0 is the null. Router noise has 1.28."""
    persistence: float = 0.0
    """0..1: share of the noise's variance that a request carries from token to token."""
    memory: float = 0.97
    """How much of that a token keeps of the one before: the coefficient of the AR(1) process."""
    strength: tuple[float, ...] = ()
    """Strength of popularity, taste and persistence in each layer, 0 to 1. Empty: 1 in every layer."""
    reach: float = 1.0
    """0..1: share of a layer's experts that a request's taste admits; the others lie _BEYOND_REACH lower in it."""
    routing: str = "fitted to nothing"
    """Measured model that these settings resemble, if any; every row of a replay repeats it."""
    drift: float = 0.0
    """0..1: share of a request's taste that has turned into another one by its last token."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"synthetic trace: {name} must lie in {least:g}..{most:g}, got {value}")
        cells = self.num_requests * (self.prompt_len + self.decode_len) * self.num_layers
        if cells > MOST_ROWS:
            raise ConfigError(f"synthetic trace: tokens times layers must be at most {MOST_ROWS}, got {cells}")
        if self.top_k > self.num_experts:
            raise ConfigError(f"synthetic trace: top_k {self.top_k} must not exceed num_experts {self.num_experts}")
        if self.strength and (len(self.strength) != self.num_layers or not min(self.strength) >= 0):
            raise ConfigError(
                f"synthetic trace: strength must hold a number of at least 0 for each of {self.num_layers} layers, got "
                f"{list(self.strength)}"
            )
        if self.strength and self.persistence * max(self.strength) > 1:
            raise ConfigError(
                f"synthetic trace: strength times persistence must not exceed 1, got {max(self.strength)} times "
                f"{self.persistence}"
            )


def synthetic_trace(settings: SyntheticSettings, model: str = "synthetic") -> Trace:
    """The same settings give the same trace, to the bit."""
    s = settings
    generator = np.random.default_rng(s.seed)
    popularity = np.log(generator.dirichlet(np.full(s.num_experts, s.concentration), size=s.num_layers) + 1e-9)
    sequences = []
    for _ in range(s.num_requests):
        taste, noise = _taste_and_noise(s, generator)
        ids, weights = _chosen(_strength(s) * (popularity + s.signal * taste) + noise, s.top_k)
        label = "null" if s.signal == s.persistence == 0 else "synthetic"
        sequences.append(Sequence.of(label, ids, weights, s.prompt_len))
    provenance = Provenance(
        model=model,
        num_layers=s.num_layers,
        num_experts=s.num_experts,
        top_k=s.top_k,
        source="synthetic",
        settings={name: getattr(s, name) for name in s.__dataclass_fields__},
    )
    return from_sequences(provenance, sequences)


def _strength(s: SyntheticSettings) -> NDArray[np.float64]:
    """[L, 1]."""
    return np.array(s.strength or (1.0,) * s.num_layers, np.float64)[:, None]


def _taste_and_noise(
    s: SyntheticSettings, generator: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Taste and noise of one request, both [tokens, L, E]."""
    tokens = s.prompt_len + s.decode_len
    # The turn from one taste to another keeps its variance: cos^2 + sin^2 = 1.
    angle = np.linspace(0.0, np.pi / 2 * s.drift, tokens)[:, None, None]
    first, second = _two_tastes(s, generator)
    shape = (tokens, s.num_layers, s.num_experts)
    noise = _remembered(s, generator, shape) if s.persistence else generator.gumbel(size=shape)
    return np.cos(angle) * first + np.sin(angle) * second, noise


def _two_tastes(s: SyntheticSettings, generator: np.random.Generator) -> NDArray[np.float64]:
    """[2, L, E], normal, and lower where they are beyond the request's reach."""
    tastes = generator.standard_normal((2, s.num_layers, s.num_experts))
    if s.reach == 1:
        return tastes
    ranks = np.argsort(np.argsort(-tastes, axis=2), axis=2)
    return tastes - _BEYOND_REACH * (ranks >= s.reach * s.num_experts)


def _remembered(
    s: SyntheticSettings, generator: np.random.Generator, shape: tuple[int, int, int]
) -> NDArray[np.float64]:
    """Gumbel noise of that shape whose Gaussian is in part an AR(1) process along tokens."""
    kept = generator.standard_normal(shape)
    fresh = math.sqrt(1 - s.memory * s.memory)
    for token in range(1, shape[0]):
        kept[token] = s.memory * kept[token - 1] + fresh * kept[token]
    share = s.persistence * _strength(s)
    gaussian = np.sqrt(share) * kept + np.sqrt(1 - share) * generator.standard_normal(shape)
    return np.interp(gaussian, *_gumbel_of_gaussian())


@lru_cache(maxsize=1)
def _gumbel_of_gaussian() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(values of a Gaussian, the Gumbel's of the same rank): -log(-log(Phi(z))), straight lines between."""
    gaussian = np.linspace(-8.0, 8.0, 4097)
    above = [0.5 * math.erfc(z / math.sqrt(2)) for z in gaussian.tolist()]
    return gaussian, np.array([-math.log(-math.log1p(-tail)) for tail in above])


def _chosen(logits: NDArray[np.float64], top_k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(ids, weights), both [tokens, L, k]; of equal logits the lower id comes first."""
    num_experts = logits.shape[2]
    # Logit and id in one number, so that no two are equal and every sort gives the same.
    keys = np.rint(logits * _GRID).astype(np.int64) * num_experts + np.arange(num_experts)[::-1]
    keys.partition(num_experts - top_k, axis=2)
    rounded, back = np.divmod(np.sort(keys[:, :, num_experts - top_k :], axis=2)[:, :, ::-1], num_experts)
    chosen = rounded / _GRID
    weights = np.rint(np.exp(chosen - chosen[:, :, :1]) * 2**24) / 2**24
    weights /= weights.sum(axis=2, keepdims=True)
    return num_experts - 1 - back, weights.astype(np.float32)


# -- as measured models have it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoutingPreset:
    """How strongly and how long a model's tokens go on choosing the same experts."""

    name: str
    source: str
    """Source of the figures that the preset was fitted to; empty: fitted to nothing."""
    fitted_to: tuple[str, ...] = ()
    """Models whose figures those are."""
    choices: Mapping[str, float] = field(default_factory=dict)
    """Settings by which experts are chosen, where they are not the defaults."""
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
            **{"num_layers": layers, **shape, **sizes, **self.choices},
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
    """A preset by name. "": without memory; auto: the one fitted to the model, else the one without memory."""
    fitted = [routing for routing in ROUTINGS.values() if model in routing.fitted_to]
    return fitted[0] if fitted and name == "auto" else routing_named("memoryless" if name in ("", "auto") else name)


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
            {"concentration": 5.0, "signal": 1.1, "persistence": 0.6, "memory": 0.98, "reach": 0.6},
            _QWEN3,
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
            {"concentration": 40.0, "signal": 0.4, "persistence": 0.6, "memory": 0.2},
        ),
    )
}
