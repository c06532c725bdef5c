"""Traces with a known amount of skew, request-level signal and drift, and with none of it: the null.

    router logit of expert e = log popularity[l, e] + signal * taste[request, l, e] + noise (Gumbel)

The k largest logits are chosen, their softmax is the router weight. With signal 0 every token is an independent draw
from one popularity, so whatever a policy wins on such a trace over static popularity is an artefact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ndp_device.errors import ConfigError
from ndp_device.timing.shapes import public_shape
from vllm_ndp.traces.format import Provenance
from vllm_ndp.traces.trace import Sequence, Trace, from_sequences


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
    drift: float = 0.0
    """0..1: share of a request's taste that has turned into another one by its last token."""
    turns: int = 0
    """How often a request's subject changes at once: its tokens are as many equal parts and one, each of a taste of its
    own."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "top_k", "num_requests", "prompt_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"synthetic trace: {name} must be at least 1, got {getattr(self, name)}")
        if self.top_k > self.num_experts:
            raise ConfigError(f"synthetic trace: top_k {self.top_k} must not exceed num_experts {self.num_experts}")
        if self.turns < 0:
            raise ConfigError(f"synthetic trace: turns must be at least 0, got {self.turns}")
        if self.decode_len < 0 or self.concentration <= 0 or self.signal < 0 or not 0 <= self.drift <= 1:
            raise ConfigError(
                "synthetic trace: decode_len >= 0, concentration > 0, signal >= 0 and drift in 0..1 are needed, got "
                f"{self.decode_len}, {self.concentration}, {self.signal}, {self.drift}"
            )

    @classmethod
    def of_shape(cls, model: str, **settings: float) -> SyntheticSettings:
        shape = public_shape(model)
        sizes = {"num_layers": shape.num_layers, "num_experts": shape.num_experts, "top_k": shape.top_k}
        return cls(**{**sizes, **settings})  # type: ignore[arg-type]


def synthetic_trace(settings: SyntheticSettings, model: str = "synthetic") -> Trace:
    """The same settings give the same trace, to the bit."""
    s = settings
    generator = np.random.default_rng(s.seed)
    popularity = np.log(generator.dirichlet(np.full(s.num_experts, s.concentration), size=s.num_layers) + 1e-9)
    tokens = s.prompt_len + s.decode_len
    # The turn from one taste to another keeps its variance: cos^2 + sin^2 = 1.
    angle = np.linspace(0.0, np.pi / 2 * s.drift, tokens)[:, None, None]
    sequences = []
    for request in range(s.num_requests):
        first, second = generator.standard_normal((2, s.num_layers, s.num_experts))
        noise = generator.gumbel(size=(tokens, s.num_layers, s.num_experts))
        taste = np.cos(angle) * first + np.sin(angle) * second
        if s.turns:
            others = generator.standard_normal((s.turns, s.num_layers, s.num_experts))
            part = np.arange(tokens) * (s.turns + 1) // tokens
            taste = np.where(part[:, None, None] > 0, others[np.maximum(part, 1) - 1], taste)
        logits = popularity + s.signal * taste + noise
        ids = np.argsort(-logits, axis=2, kind="stable")[:, :, : s.top_k]
        chosen = np.take_along_axis(logits, ids, axis=2)
        weights = np.exp(chosen - chosen[:, :, :1])
        weights /= weights.sum(axis=2, keepdims=True)
        sequences.append(
            Sequence(
                request=request,
                label="null" if s.signal == 0 else "synthetic",
                arrival_s=0.0,
                prompt_ids=ids[: s.prompt_len],
                prompt_weights=weights[: s.prompt_len].astype(np.float32),
                decode_ids=ids[s.prompt_len :],
                decode_weights=weights[s.prompt_len :].astype(np.float32),
            )
        )
    provenance = Provenance(
        model=model,
        num_layers=s.num_layers,
        num_experts=s.num_experts,
        top_k=s.top_k,
        source="synthetic",
        settings={name: getattr(s, name) for name in s.__dataclass_fields__},
    )
    return from_sequences(provenance, sequences)
