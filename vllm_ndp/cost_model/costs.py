"""Costs of one piece of work on modelled hardware, as tables that replay can index. Simulated picoseconds.

    layer = attention + max( GPU , device ) + overhead      GPU = launch + sum over its experts, 0 without any
                                                            device = link + fill + sum over its experts

Every number comes out of ndp_device.timing and gpu_timing; this file only asks them, once per distinct case, and
averages over 16 moments of the refresh interval. The sum over experts is exact up to how the refresh falls
(a test holds it within 2 % of DeviceModel). The host's CPU is two rooflines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint.files import read_config
from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.checkpoint.spellings import text_config
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import WholeModel
from ndp_device.common.widths import BYTE_BITS, FULL_PRECISION_BITS, PLAN_BITS, WIDTHS, default_group_size
from ndp_device.model_config import whole_model
from ndp_device.timing.model import CommandEnergy, DeviceModel, bulk_ps, hop_in, hop_out, wire_bytes
from ndp_device.timing.public_models import SHAPES, public_shape
from ndp_device.timing.spec import Hardware
from ndp_device.timing.work import PS_PER_S, Work, ceil_div, execute_bytes, expert_bytes, transfer_ps
from vllm_ndp.cost_model.gpu_timing import GpuModel

_REFRESH_PHASES = 16
_LONG = 200
"""A command this many refresh intervals long meets one refresh more or less, which is below half a percent."""
_REPEATS = 8
P = ParamSpec("P")
R = TypeVar("R")


def model_named(model: str) -> WholeModel:
    """A public shape by name, or the model of a checkpoint directory."""
    if model in SHAPES or not Path(model).is_dir():
        return public_shape(model)
    checkpoint = open_checkpoint(Path(model))
    return whole_model(checkpoint.shape, text_config(read_config(Path(model))), checkpoint.layout.moe_index)


def _once(method: Callable[P, R]) -> Callable[P, R]:
    """A method of Costs computes each answer once; hashing a whole Hardware per question would cost more."""

    @wraps(method)
    def known(*args: P.args, **kwargs: P.kwargs) -> R:
        costs, *asked = args
        answers: dict[Any, R] = costs.known  # type: ignore[attr-defined]
        key = method.__name__, *asked, *kwargs.values()
        if key not in answers:
            answers[key] = method(*args, **kwargs)
        return answers[key]

    return known


@dataclass(frozen=True)
class Costs:
    """One model on one hardware."""

    hardware: Hardware
    shape: WholeModel
    scales: bool = True
    """Whether replicas carry a float16 scale and offset per group, as ours do; False leaves the codes alone."""
    group_size: int = 0
    """Weights that share a scale; 0 = by the rule that replicas are built with, which the constructor puts here."""
    num_gpus: int = 1
    """GPUs that split each layer; they share the device."""
    slot_bits: int = FULL_PRECISION_BITS
    """Bits of hot experts in GPU memory."""
    stored: tuple[int, int] | None = None
    """Width at which experts run by the checkpoint's own codes, and bytes of one; None: those below full precision are
    replicas."""
    has_bytes: bool = False
    """Whether replicas have 8 bits beside the nested widths."""

    beside = 1.0
    """0..1, how much of the shorter side, GPU or device, is over while the longer one runs: all of it (prices.py)."""

    def __post_init__(self) -> None:
        if self.group_size == 0:
            object.__setattr__(
                self, "group_size", default_group_size(self.shape.hidden_size, self.shape.intermediate_size)
            )

    @cached_property
    def known(self) -> dict[Any, Any]:
        """What was computed already."""
        return {}

    @cached_property
    def gpu(self) -> GpuModel:
        bits, num_bytes = self.stored or (0, 0)
        streamed_bytes = num_bytes if bits == self.slot_bits else 0  # prompts are computed as slots are
        return GpuModel(
            self.hardware, self.shape, self.num_gpus, slot_bytes=self.slot_bytes, streamed_bytes=streamed_bytes
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of a hot expert in GPU memory."""
        return self.replica_bytes(self.slot_bits)

    def replica_bytes(self, bits: int) -> int:
        """Bytes that one read of an expert moves in the device's DRAM."""
        if bits == FULL_PRECISION_BITS:
            return self.shape.expert_bytes
        if self.stored is not None and bits == self.stored[0]:
            return self.stored[1]
        return expert_bytes(
            self.shape.hidden_size, self.shape.intermediate_size, bits, self.group_size, scales=self.scales
        )

    @cached_property
    def bytes_of_width(self) -> NDArray[np.int64]:
        """Table [256] of replica_bytes for each width that the timing model knows; 0 for other widths."""
        return np.array([self.replica_bytes(bits) if bits in PLAN_BITS else 0 for bits in range(256)], np.int64)

    def stored_replica_bytes(self, widest: int = WIDTHS[-1]) -> int:
        """Bytes of one expert's nested replica: the planes of its widest width, scales and offsets of each; and of the
        one at 8 bits. Or of the checkpoint's own codes."""
        if self.stored is not None:
            return self.stored[1]
        at_8 = self.replica_bytes(BYTE_BITS) if self.has_bytes else 0
        scales = self.replica_bytes(widest) - ceil_div(self.shape.weights_per_expert * widest, 8)
        return self.replica_bytes(widest) + (widest - WIDTHS[0]) * scales + at_8

    def device_expert_ps(self, bits: int, tokens: int) -> float:
        """Time that one more expert with `tokens` rows adds to a command of the device."""
        rows = self.hardware.array.rows  # so many tokens share a pass of the arrays
        return self._expert_ps(bits, ceil_div(tokens, rows) * rows)

    @_once
    def _expert_ps(self, bits: int, tokens: int) -> float:
        many, one = (_device_mean_ps(self, bits, tokens, count) for count in (1 + _REPEATS, 1))
        return (many - one) / _REPEATS

    @cached_property
    def device_fill_ps(self) -> float:
        """Time of a command beyond link and experts: decoding it and filling the pipeline."""
        whole = _device_mean_ps(self, FULL_PRECISION_BITS, 1, 1) - self.link_ps(1, 1)
        return max(whole - self._expert_ps(FULL_PRECISION_BITS, 1), 0.0)

    @_once
    def link_ps(self, rows: int, pairs: int) -> int:
        """Both ways of one message with `rows` activations, and its launch."""
        if rows == 0:
            return 0
        bytes_in, bytes_out = execute_bytes(rows, pairs, self.shape.hidden_size, self.shape.dtype_bytes)
        inward, outward = hop_in(self.hardware.link, bytes_in), hop_out(self.hardware.link, bytes_out)
        return inward.launch_ps + inward.wire_ps + outward.launch_ps + outward.wire_ps + outward.completion_ps

    def hop_ps(self, rows: int) -> int:
        """Time of the activations of `rows` rows to the host's CPU and of their results back: a message without pairs.
        A hop is a hop."""
        return self.link_ps(rows, 0)

    @property
    def host_bytes_per_s(self) -> int:
        """At which the CPU reads experts from host memory."""
        host = self.hardware.host
        return host.memory_bytes_per_s * host.memory_efficiency_percent // 100

    def cpu_expert_ps(self, rows: int) -> int:
        """A full-precision expert with so many rows on the host's CPU, in whole picoseconds for the step clock."""
        flops = 2 * self.shape.weights_per_expert * rows
        read = transfer_ps(self.shape.expert_bytes, self.host_bytes_per_s)
        return max(read, ceil_div(flops * PS_PER_S, self.hardware.host.cpu_flops_per_s))

    def cpu_experts_ps(
        self, counts: NDArray[np.int64], weight_bytes: float, bytes_per_s: int | None = None
    ) -> NDArray[np.float64]:
        """[...]: an expert of that size multiplied by each of counts [...] rows; 0 rows cost nothing. bytes_per_s: of
        the memory that the CPU reads it from; None: the host's."""
        read = np.where(counts > 0, weight_bytes / (bytes_per_s or self.host_bytes_per_s), 0.0)
        compute = 2.0 * self.shape.weights_per_expert * counts / self.hardware.host.cpu_flops_per_s
        times: NDArray[np.float64] = np.maximum(read, compute) * PS_PER_S
        return times

    def cpu_layers_ps(self, counts: NDArray[np.int64], weight_bytes: float) -> NDArray[np.float64]:
        """[L]: all experts of counts [L, E] on the CPU, one after the other, and the rows' way there and back."""
        hop = [self.hop_ps(int(n)) for n in -(-counts.sum(axis=1) // self.shape.top_k)]
        times: NDArray[np.float64] = self.cpu_experts_ps(counts, weight_bytes).sum(axis=1) + np.array(hop, np.float64)
        return times

    def message_ps(self, rows: int, pairs: int) -> float:
        """A command of the device without its experts."""
        return self.link_ps(rows, pairs) + self.device_fill_ps

    def hot_ps(self, rows: int) -> float:
        """One more hot expert with so many rows; 0 rows: a layer with any, beside its experts."""
        return float(self.gpu_expert_ps(rows) if rows else self.launch_ps())

    def expert_ps(self, tier: str, bits: int, rows: int) -> float:
        """One more expert of this width with so many rows, in a tier."""
        if tier == "device":
            return self.device_expert_ps(bits, rows)
        num_bytes = self.replica_bytes(bits)
        if tier == "gpu":
            return float(self.gpu_expert_ps(rows, num_bytes))
        return float(self.cpu_experts_ps(np.array(rows), num_bytes))

    def opening_ps(self, tier: str, bits: int = FULL_PRECISION_BITS) -> float:
        """What a layer with any expert of this width in a tier takes beside its experts: a launch on the GPU, elsewhere
        the way of one row there and back."""
        if tier == "gpu":
            return float(self.launch_ps(self.replica_bytes(bits)))
        return float(self.hop_ps(1)) if tier == "host" else self.message_ps(1, 1)

    @_once
    def gpu_expert_ps(self, tokens: int, num_bytes: int | None = None) -> int:
        """What one more expert in GPU memory with that many rows adds to a layer. num_bytes: of the expert; None: those
        of a hot one."""
        return self.gpu.growing_ps(1, tokens, self.slot_bytes if num_bytes is None else num_bytes)

    def launch_ps(self, num_bytes: int | None = None) -> int:
        """What a layer with any expert of that size in GPU memory takes beside its experts."""
        return self.gpu.launch_ps(self.slot_bytes if num_bytes is None else num_bytes)

    @_once
    def resident_ps(self, touched: int, pairs: int) -> int:
        """A layer's experts in GPU memory, `touched` of them, serving `pairs` rows in all."""
        return self.gpu.experts_ps(touched, pairs, touched * self.slot_bytes)

    def streamed_ps(self, touched: int, pairs: int) -> int:
        """`touched` experts that come over the link to be computed at once; never less for more."""
        return self.gpu.prefill_stream_ps(touched, pairs)

    def fetch_ps(self, num_bytes: int | None = None) -> int:
        """Weights over the link to the GPU; a whole full-precision expert unless told otherwise."""
        return bulk_ps(self.hardware.link, self.shape.expert_bytes if num_bytes is None else num_bytes)

    @property
    def copy_opening_ps(self) -> int:
        """Before the first byte of copies that are handed over together: one launch and one latency, as for prompts."""
        return self.hardware.link.dma_launch_ps + self.hardware.link.dma_latency_ps

    @property
    def copy_ps(self) -> float:
        """One full-precision expert on the link, in a row of copies."""
        return self.shape.expert_bytes * PS_PER_S / self.hardware.link.bulk_bytes_per_s

    @_once
    def device_energy(self, max_tokens: int) -> NDArray[np.float64]:
        """[2, bits, tokens]: picojoules of DRAM and of scratchpads that one more expert with that many rows takes."""
        table, rows = np.zeros((2, FULL_PRECISION_BITS + 1, max_tokens + 1)), self.hardware.array.rows
        for bits in PLAN_BITS:
            for tokens in range(1, max_tokens + 1):
                table[:, bits, tokens] = self._expert_energy(bits, ceil_div(tokens, rows) * rows)
        return table

    @_once
    def _expert_energy(self, bits: int, tokens: int) -> tuple[float, float]:
        """(DRAM, scratchpads), like the time of an expert: the mean over several in one command."""

        def of(num_experts: int) -> CommandEnergy:
            timing = DeviceModel(self.hardware).execute(_equal_experts(self, bits, tokens, num_experts), 0)
            weights, rows = timing.weight_bytes, timing.row_activations
            return CommandEnergy.of(self.hardware.energy, wire_bytes=0, weight_bytes=weights, row_activations=rows)

        many, one = of(1 + _REPEATS), of(1)
        dram, arrays = many.dram_fj - one.dram_fj, many.arrays_fj - one.arrays_fj
        return dram / _REPEATS / 1000, arrays / _REPEATS / 1000

    def message_wire_bytes(self, rows: int, pairs: int) -> int:
        """Both ways of one message, headers and flit overhead included."""
        sizes = execute_bytes(rows, pairs, self.shape.hidden_size, self.shape.dtype_bytes)
        return sum(wire_bytes(self.hardware.link, size) for size in sizes)

    def attention_ps(self, rows: int, kv_tokens: int) -> float:
        """Time of attention before one MoE layer of a decode step with so many rows and so much context in all: mean
        over layers."""
        return sum(self.gpu.before_experts_ps(rows, kv_tokens)) / self.shape.num_layers

    @_once
    def shared_ps(self, rows: int) -> int:
        """The shared experts of one layer, which run on the GPU while the device works."""
        return self.gpu.shared_ps(rows)

    @property
    def overhead_ps(self) -> int:
        return self.hardware.gpu.layer_overhead_ps

    def require(self, num_experts: int, top_k: int) -> None:
        """Raises ConfigError unless a trace with these sizes can be replayed on this model."""
        if (num_experts, top_k) != (self.shape.num_experts, self.shape.top_k):
            raise ConfigError(
                f"the trace has {num_experts} experts top-{top_k}, the model {self.shape.num_experts} "
                f"top-{self.shape.top_k}: name a model of the trace's routing shape"
            )


def each_ps(counts: NDArray[np.int64], one_ps: Callable[[int], float]) -> NDArray[np.float64]:
    """one_ps of every count, asked once for each that occurs; 0 for 0."""
    table = np.zeros(int(counts.max(initial=0)) + 1)
    for rows in np.flatnonzero(np.bincount(counts.ravel())).tolist():
        table[rows] = one_ps(rows) if rows else 0.0
    times: NDArray[np.float64] = table[counts]
    return times


def each_case(
    first: NDArray[np.int64], second: NDArray[np.int64], one: Callable[[int, int], float]
) -> NDArray[np.float64]:
    """one(first, second) of every case, asked once for each that occurs."""
    most = int(second.max(initial=0)) + 1
    distinct, inverse = np.unique(first * most + second, return_inverse=True)
    found = [one(*divmod(case, most)) for case in distinct.tolist()]
    return np.array(found, np.float64)[inverse].reshape(first.shape)


def _equal_experts(costs: Costs, bits: int, tokens: int, num_experts: int) -> Work:
    """A command with num_experts equal experts and the bytes of one row."""
    shape = costs.shape
    bytes_in, bytes_out = execute_bytes(1, 1, shape.hidden_size, shape.dtype_bytes)
    return Work(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        experts=((bits, tokens, costs.replica_bytes(bits)),) * num_experts,
    )


def _device_mean_ps(costs: Costs, bits: int, tokens: int, num_experts: int) -> float:
    """Mean over the refresh interval of a command with num_experts equal experts and the bytes of one row."""
    dram, work = costs.hardware.dram, _equal_experts(costs, bits, tokens, num_experts)
    first = DeviceModel(costs.hardware).execute(work, 0).total_ps
    interval = dram.cycles_to_ps(dram.refi)
    if dram.kind == "ideal" or dram.refresh == "off" or first > _LONG * interval:
        return float(first)
    moments = [phase * interval // _REFRESH_PHASES for phase in range(1, _REFRESH_PHASES)]
    times = [DeviceModel(costs.hardware).execute(work, moment).total_ps for moment in moments]
    return (first + sum(times)) / _REFRESH_PHASES
