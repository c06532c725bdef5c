"""The proposal of `vllm-ndp plan`: ways to serve a model that fit, the speed of each, and the lines to start it.

And the size that `vllm serve MODEL --quantization ndp` gives itself on a machine without a GPU:

    every expert in slots at the widest width that fits beside one request  ->  KV cache

Prompts are computed as decode is, by the same kernel from the same replicas. Experts that are left to the device would
be read from the checkpoint for every prompt, which takes minutes at a real size.
Linear layers have 8 bits. The KV cache, up to the most tokens that the server may need at once, gets half of
the remaining memory; files the rest.

Puts sizing.py and speed.py together.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_ndp.config import DEFAULT_OFFLOAD_BITS, as_options
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.operating.sizing import GPU_SHARE, Option, Sizing, bytes_as_stored, human
from vllm_ndp.operating.sources import CheckpointSource
from vllm_ndp.operating.speed import PROMPT, Measured, Simulated, simulated
from vllm_ndp.planning.bitwidths import verdict_on

REPLICAS = "REPLICAS"
"""Stands for the directory that `vllm-ndp quantize` is to write."""


@dataclass(frozen=True)
class Way:
    """One option with its two speeds."""

    option: Option
    simulated: Simulated
    measured_decode_step_s: float | None
    """Best step time of one request, if this machine was probed for the option's width."""
    measured_first_token_s: float | None
    """Likewise, of a short prompt whose experts are in slots."""


@dataclass(frozen=True)
class Proposal:
    """Ways from the widest replicas down; the first one is recommended."""

    source: CheckpointSource
    sizing: Sizing
    hardware: str
    ways: Sequence[Way]
    measured: Measured | None

    @property
    def too_few_bits(self) -> str:
        """Warning against the recommended way where only its narrowest replicas fit; else empty."""
        return verdict_on(self.ways[0].option.read_bits)

    @property
    def is_as_stored(self) -> bool:
        """Whether the recommended way serves quantized experts by the codes that the checkpoint stores."""
        option = self.ways[0].option
        return option.keeps_codes and self._is_quantized

    @property
    def _is_quantized(self) -> bool:
        option = self.ways[0].option
        return option.is_in_slots or option.num_hot < self.sizing.model.num_experts

    @property
    def needs_replicas(self) -> bool:
        """Not where the checkpoint's codes are served, or every expert is hot in full precision."""
        return self._is_quantized and not self.is_as_stored

    def quantize_line(self) -> str | None:
        """The replicas of the recommended way: nested, so that they serve narrower widths too; of slots their own. None
        where it needs none."""
        if not self.needs_replicas:
            return None
        option = self.ways[0].option
        narrowest = option.widest if option.is_in_slots else 1
        widths = ",".join(str(width) for width in range(narrowest, option.widest + 1))
        return shlex.join(["vllm-ndp", "quantize", self.source.served_as, "--out", REPLICAS, "--bits", widths])

    @property
    def advice(self) -> str:
        """Advice for a user who cannot serve what is proposed, or does not need it; else empty."""
        return self._unserved or self.sizing.advice

    @property
    def _unserved(self) -> str:
        return self.source.unserved or (self.source.unserved_on_cpu if self.sizing.gpu_bytes is None else "")

    @property
    def lines(self) -> dict[str, str | None]:
        """Commands that make the recommended way, by what they do; None where there is nothing to do."""
        return {"quantize": self.quantize_line(), "serve": None if self._unserved else self.serve_line()}

    def serve_line(self) -> str:
        return shlex.join(["vllm", "serve", self.source.served_as, *self.serve_options()])

    def serve_options(self) -> list[str]:
        """Options of `vllm serve` for the recommended way."""
        option, sizing = self.ways[0].option, self.sizing
        num_experts = sizing.model.num_experts
        settings: dict[str, Any] = {"replicas": REPLICAS} if self.needs_replicas else {}
        settings["hot_experts"] = option.num_hot
        if self._is_quantized:
            settings["avg_bits"] = option.avg_bits
        if sizing.gpu_bytes is None:
            settings |= settings_of(sizing, option)
        if 0 < option.num_hot < num_experts and option.widest < DEFAULT_OFFLOAD_BITS:
            settings["debug"] = {"offload_bits": option.widest}
        words = ["--quantization", "ndp", "--dtype", sizing.model.dtype]
        words += ["--max-model-len", str(sizing.context), "--max-num-seqs", str(sizing.batch)]
        words += ["--max-num-batched-tokens", str(max(sizing.step_tokens, sizing.batch))]
        if sizing.gpu_bytes is None:
            words += ["--kv-cache-memory-bytes", str(self.sizing.kv_cache_with_spare)]
        else:
            words += ["--gpu-memory-utilization", f"{GPU_SHARE:g}"]
        return [*words, *as_options(settings)]

    def as_dict(self) -> dict[str, Any]:
        """Plain values; simulated_* is the modelled hardware's, measured_* this machine's."""
        sizing, model = self.sizing, self.sizing.model
        return {
            "model": model.name,
            "read_from": self.source.read_from,
            "layers": model.num_layers,
            "experts": model.num_experts,
            "top_k": model.top_k,
            "dtype": model.dtype,
            "parameters": model.num_parameters,
            "checkpoint_bytes": sizing.checkpoint_bytes,
            "stored_bytes": self.source.stored_bytes,
            "kv_bytes_per_request": sizing.kv_per_request,
            "context": sizing.context,
            "batch": sizing.batch,
            "gpu_memory_bytes": sizing.gpu_bytes,
            "host_memory_bytes": sizing.host_bytes,
            "hardware": self.hardware,
            "advice": self.advice,
            "too_few_bits": self.too_few_bits,
            "ways": [self._way(way) for way in self.ways],
            "as_stored": self.is_as_stored,
            **self.lines,
            "probe": None if self.measured is None else asdict(self.measured),
        }

    def _way(self, way: Way) -> dict[str, Any]:
        option = way.option
        return {
            "hot_experts": option.num_hot,
            "widest_bits": option.widest,
            "slot_bits": option.slot_bits,
            "avg_bits": option.avg_bits,
            "read_bits": option.read_bits,
            "gpu_bytes": dict(option.gpu),
            "host_bytes": dict(option.host),
            "mapped_bytes": 0 if option.is_in_slots else self.sizing.mapped_experts,
            "kv_tokens_left": option.kv_tokens_left,
            "pool_cached": round(option.pool_cached, 3),
            "moved_bytes": self.sizing.moved(option),
            "simulated_tpot_us": way.simulated.decode_step_ps / 1e6,
            "simulated_decode_tokens_per_s": round(way.simulated.decode_tokens_per_s, 1),
            "simulated_ttft_us": way.simulated.prefill_ps / 1e6,
            "measured_tpot_ms_at_best": None
            if way.measured_decode_step_s is None
            else round(1e3 * way.measured_decode_step_s, 3),
            "measured_first_token_s": way.measured_first_token_s,
        }


def propose(
    source: CheckpointSource, sizing: Sizing, costs: Costs, measure: Callable[[int], Measured] | None = None
) -> Proposal:
    """measure: asked once, at the width that the recommended way uses on average. Raises ConfigError: nothing fits."""
    options = sizing.require()
    measured = None if measure is None else measure(round(options[0].read_bits))
    ways = []
    for option in options:
        speed = simulated(
            _costs_of(costs, sizing, option), option.num_hot, option.avg_bits, sizing.batch, sizing.context
        )
        expected: tuple[float | None, float | None] = None, None
        if measured is not None and sizing.gpu_bytes is None and round(option.read_bits) == measured.bits:
            expected = forecast(sizing, measured)
        ways.append(Way(option, speed, *expected))
    return Proposal(source, sizing, costs.hardware.preset, ways, measured)


def _costs_of(costs: Costs, sizing: Sizing, option: Option) -> Costs:
    stored = None
    if option.keeps_codes and sizing.stored_form is not None:
        stored = option.widest, bytes_as_stored(sizing.model.weights_per_expert, sizing.stored_form)
    return replace(costs, slot_bits=option.slot_bits, stored=stored)


# -- the size that a server gives itself -------------------------------------------------------------------------------


_KV_SHARE = 2
"""One part in so many of the memory that is left goes to the KV cache: a guess, half for it and half for files."""


@dataclass(frozen=True)
class OwnSize:
    sizing: Sizing
    """Sizes of one request."""
    option: Option
    measured: Measured
    kv_cache_bytes: int

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.sizing, self.option)

    def words(self, *, with_kv: bool) -> list[str]:
        """Options that set the same size by hand. with_kv: add the KV cache's size, which the user did not give."""
        kv = ["--kv-cache-memory-bytes", str(self.kv_cache_bytes)] if with_kv else []
        return [*kv, *as_options(self.settings)]

    def said(self, loss: float | None, *, with_kv: bool) -> list[str]:
        """Lines for the log: the chosen size, what to expect of it, and the options to set it by hand.

        loss: of an expert's output, relative, at the width; None: the replicas do not exist yet.
        """
        option, model = self.option, self.sizing.model
        lost = "unknown before the replicas are built" if loss is None else f"{loss:.1%} of an expert's output"
        kept = f", KV cache {human(self.kv_cache_bytes)}" if with_kv else ""
        stock = self.sizing.without_plugin(self.kv_cache_bytes)
        mapped = human(self.sizing.stored_bytes or self.sizing.checkpoint_bytes)
        experts = f"all {model.num_experts} experts of a layer at {option.slot_bits} bits, for prompts and decode"
        linear, form = f"linear layers at {self.sizing.linear_bits or 8 * model.dtype_bytes}", self.sizing.linear_form
        if self.sizing.linear_bits is not None and form is not None:
            linear = f"linear layers at {form.bits} as stored, the output matrix at {self.sizing.linear_bits}"
        return [
            f"sized to {human(self.sizing.host_bytes)} of memory: {experts}, {linear}{kept}; held {human(self._held)}; "
            f"the checkpoint's {mapped} are read at the start only",
            f"expected: {self._speed}; loss {lost}{stock and f'. {stock}'}",
            f"by hand: {shlex.join(self.words(with_kv=with_kv))}",
        ]

    @property
    def _speed(self) -> str:
        measured, (step_s, first_s) = self.measured, forecast(self.sizing, self.measured)
        return (
            f"the first token of a prompt of {PROMPT} after {first_s:.2g} s, then {1 / step_s:.1f} tokens/s for one "
            f"request (this machine reads {human(measured.read_bytes_per_s)}/s and takes "
            f"{1e3 * measured.expert_s:.2f} ms for an expert at {measured.bits} bits)"
        )

    @property
    def _held(self) -> int:
        return sum(self.option.host.values()) - self.sizing.kv_cache + self.kv_cache_bytes


def forecast(sizing: Sizing, measured: Measured) -> tuple[float, float]:
    """Seconds of a decode step of one request, and to the first token of a prompt of PROMPT tokens."""
    beside = sizing.linear_layers, sizing.head
    return measured.decode_step_s(sizing.model, *beside), measured.prompt_s(sizing.model, *beside)


def settings_of(sizing: Sizing, option: Option) -> dict[str, Any]:
    """The settings that make an option on a machine without a GPU: nothing is left to the device, not even where it
    would be faster."""
    slots = {"slot_bits": option.slot_bits, "execution": "paper", "linear_bits": sizing.linear_bits}
    return {"hot_experts": option.num_hot, "avg_bits": option.avg_bits} | slots


def own_size(sizing: Sizing, batch: int, measured: Measured) -> OwnSize:
    """Choose a size for this machine. sizing: of one request. batch: requests that may run at once. Raises ConfigError
    if not even one fits."""
    option = sizing.require()[0]
    return OwnSize(sizing, option, measured, kv_cache_bytes(sizing, option, batch))


def kv_cache_bytes(sizing: Sizing, option: Option | None, batch: int) -> int:
    """For `batch` requests, in at most half of the memory that an option leaves; for one where it leaves none (None).

    sizing: of one request.
    """
    per_request = sizing.kv_per_request + sizing.sidecar
    left = 0 if option is None else sizing.host_bytes - sum(option.host.values())
    more = min((batch - 1) * per_request, left // _KV_SHARE)
    return sizing.kv_cache_with_spare + more * sizing.kv_per_request // per_request
