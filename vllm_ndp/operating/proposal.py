"""The proposal of `vllm-ndp plan`: ways to serve a model that fit, the speed of each, and the lines to start it.

Puts sizing.py and speed.py together. Knows the command lines of vLLM and of ours; reads nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.config import DEFAULT_OFFLOAD_BITS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.operating.own_size import decode_step_s, first_token_s, settings_of
from vllm_ndp.operating.sizing import Option, Sizing
from vllm_ndp.operating.sources import CheckpointSource
from vllm_ndp.operating.speed import Measured, Simulated, simulated
from vllm_ndp.planning.bitwidths import verdict_on
from vllm_ndp.setting_names import as_options

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
        return verdict_on(self.ways[0].option.avg_bits)

    def quantize_line(self) -> str:
        """The replicas of the recommended way: nested, so that they serve narrower widths too; of slots, their own."""
        option = self.ways[0].option
        narrowest = 1 if option.slot_bits == FULL_PRECISION_BITS else option.slot_bits
        widths = ",".join(str(width) for width in range(narrowest, option.widest + 1))
        return shlex.join(["vllm-ndp", "quantize", self.source.served_as, "--out", REPLICAS, "--bits", widths])

    def serve_line(self) -> str:
        return shlex.join(["vllm", "serve", self.source.served_as, *self.serve_options()])

    def serve_options(self) -> list[str]:
        """Options of `vllm serve` for the recommended way."""
        option, demand, machine = self.ways[0].option, self.sizing.demand, self.sizing.machine
        num_experts = self.sizing.model.num_experts
        settings: dict[str, Any] = {"replicas": REPLICAS, "hot_experts": option.num_hot, "avg_bits": option.avg_bits}
        if machine.gpu_bytes is None:
            settings |= settings_of(option, num_experts)
        if 0 < option.num_hot < num_experts and option.widest < DEFAULT_OFFLOAD_BITS:
            settings["debug"] = {"offload_bits": option.widest}
        words = ["--quantization", "ndp", "--dtype", self.sizing.model.dtype]
        words += ["--max-model-len", str(demand.context), "--max-num-seqs", str(demand.batch)]
        words += ["--max-num-batched-tokens", str(max(demand.step_tokens, demand.batch))]
        if machine.gpu_bytes is None:
            words += ["--kv-cache-memory-bytes", str(self.sizing.kv_cache_with_spare)]
        else:
            words += ["--gpu-memory-utilization", f"{machine.gpu_share:g}"]
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
            "context": sizing.demand.context,
            "batch": sizing.demand.batch,
            "gpu_memory_bytes": sizing.machine.gpu_bytes,
            "host_memory_bytes": sizing.machine.host_bytes,
            "hardware": self.hardware,
            "advice": sizing.advice,
            "too_few_bits": self.too_few_bits,
            "ways": [self._way(way) for way in self.ways],
            "quantize": self.quantize_line(),
            "serve": self.serve_line(),
            "probe": None if self.measured is None else asdict(self.measured),
        }

    def _way(self, way: Way) -> dict[str, Any]:
        option = way.option
        return {
            "hot_experts": option.num_hot,
            "widest_bits": option.widest,
            "slot_bits": option.slot_bits,
            "avg_bits": option.avg_bits,
            "gpu_bytes": dict(option.gpu),
            "host_bytes": dict(option.host),
            "mapped_bytes": self.sizing.mapped_experts if option.slot_bits == FULL_PRECISION_BITS else 0,
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
    measured = None if measure is None else measure(round(options[0].avg_bits))
    if measured is not None and measured.hot_is_faster(sizing.model):
        sizing = replace(sizing, hot_is_faster=True)
        options = sizing.require()
    ways = []
    for option in options:
        of_slots = replace(costs, slot_bits=option.slot_bits)
        speed = simulated(of_slots, option.num_hot, option.avg_bits, sizing.demand.batch, sizing.demand.context)
        known = measured is not None and sizing.machine.gpu_bytes is None and round(option.avg_bits) == measured.bits
        step_s = first_s = None
        if known and measured is not None:
            step_s, first_s = decode_step_s(sizing, option, measured), first_token_s(sizing, option, measured)
        ways.append(Way(option, speed, step_s, first_s))
    return Proposal(source, sizing, costs.hardware.preset, ways, measured)
