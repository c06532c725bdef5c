"""How fast an option would decode: simulated by the tables that plugin and replay price with, and measured by a probe.

Routing is assumed even: every row chooses its experts as if none were preferred. That is the worst case for a hot set;
prompts that prefer some experts are faster. A test holds the simulated figure against a replay of such a trace. The
two clocks stay apart: `Simulated` holds picoseconds of modelled hardware, `Measured` seconds of this machine.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import WholeModel
from ndp_device.common.widths import WIDTHS, default_group_size
from ndp_device.experts.expert import QuantizedExpert, QuantizedMatrix
from ndp_device.kernels.native import NativeKernel
from ndp_device.timing.units import PS_PER_S
from vllm_ndp.cost_model.costs import Costs

_LAYERS_DRAWN = 4096
"""Steps of one layer that are averaged over: the mean of a step is then within 1 % of a replay."""
_PROBE_BYTES = 256 << 20
_KERNEL_S = 0.3
_ENOUGH = 3


@dataclass(frozen=True)
class Simulated:
    """Speeds of the modelled hardware, at even routing."""

    decode_step_ps: int
    decode_tokens_per_s: float
    prefill_ps: int
    """Time of one prompt as long as the context, cold experts streamed."""
    hot_share: float


@dataclass(frozen=True)
class Measured:
    """Speeds of this machine: bytes read per second, and seconds for one expert of the model in the device kernel."""

    read_bytes_per_s: float
    expert_s: float
    bits: int
    isa: str

    def hot_is_faster(self, model: WholeModel) -> bool:
        """Whether to read an expert in full precision takes less than a cold one takes."""
        return model.expert_bytes / self.read_bytes_per_s < self.expert_s

    def decode_step_s(self, model: WholeModel, num_hot: int, other_weights: int) -> float:
        """Least time of one request at even routing on these cores: weights are read once, experts one after
        another."""
        hot = model.num_layers * model.top_k * num_hot / model.num_experts
        cold = model.num_layers * model.top_k - hot
        return (other_weights + hot * model.expert_bytes) / self.read_bytes_per_s + cold * self.expert_s


def simulated(costs: Costs, num_hot: int, avg_bits: float, batch: int, context: int, seed: int = 0) -> Simulated:
    """One decode step of `batch` requests with `context` tokens each, every layer as the mean of many."""
    model, rng = costs.shape, np.random.default_rng(seed)
    layers = [_layer(costs, _choices(model, batch, rng), num_hot, avg_bits) for _ in range(_draws(batch))]
    attention = float(costs.attention_ps(batch, np.array([batch * context]))[0])
    step = model.num_layers * (attention + float(np.mean(layers)) + costs.overhead_ps) + costs.gpu.head_ps(batch)
    return Simulated(
        decode_step_ps=round(step),
        decode_tokens_per_s=batch * PS_PER_S / step,
        prefill_ps=_prefill_ps(costs, num_hot, context),
        hot_share=num_hot / model.num_experts,
    )


def bits_in_time(costs: Costs, num_hot: int, tokens_per_s: float, context: int) -> float:
    """Most bits on average, 1 to 4 in quarters, with which one request decodes so fast on the modelled hardware.

    Routing is even. Raises ConfigError where 1 bit is too slow.
    """
    reached = 0.0
    for quarters in range(4 * WIDTHS[-1], 4 * WIDTHS[0] - 1, -1):
        reached = simulated(costs, num_hot, quarters / 4, 1, context).decode_tokens_per_s
        if reached >= tokens_per_s:
            return quarters / 4
    raise ConfigError(
        f"ndp setting 'avg_bits' asks for {tokens_per_s:g} simulated tokens/s, and 1 bit with {num_hot} hot experts "
        f"per layer reaches {reached:.0f}: ask for less, or for more 'hot_experts'"
    )


def _draws(batch: int) -> int:
    return max(_LAYERS_DRAWN // batch, 16)


def _choices(model: WholeModel, batch: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """[batch, top_k], distinct in a row."""
    return np.argsort(rng.random((batch, model.num_experts)), axis=1)[:, : model.top_k]


def _layer(costs: Costs, chosen: NDArray[np.int64], num_hot: int, avg_bits: float) -> float:
    """The experts of one layer; the first K are hot."""
    rows_of = np.bincount(chosen.ravel(), minlength=costs.shape.num_experts)
    gpu = sum(costs.resident_ps(1, int(rows)) for rows in rows_of[:num_hot] if rows)
    cold = [int(rows) for rows in rows_of[num_hot:] if rows]
    on_device = chosen >= num_hot
    device = 0.0
    if cold:
        device = sum(_device_ps(costs, rows, avg_bits) for rows in cold) + costs.device_fill_ps
        device += costs.link_ps(int(on_device.any(axis=1).sum()), int(on_device.sum()))
    return max(gpu + costs.shared_ps(len(chosen)), device)


def _device_ps(costs: Costs, rows: int, avg_bits: float) -> float:
    """Between two widths: as many experts at each as the average asks for."""
    low = int(avg_bits)
    share = avg_bits - low
    own = costs.device_expert_ps(low, rows)
    return own if not share else (1 - share) * own + share * costs.device_expert_ps(low + 1, rows)


def _prefill_ps(costs: Costs, num_hot: int, rows: int) -> int:
    """Every expert is wanted by a prompt: hot ones run in their slots while cold ones stream through."""
    model = costs.shape
    pairs = rows * model.top_k
    hot_pairs = pairs * num_hot // model.num_experts
    experts = max(
        costs.resident_ps(num_hot, hot_pairs) + costs.shared_ps(rows),
        costs.streamed_ps(model.num_experts - num_hot, pairs - hot_pairs),
    )
    before = sum(costs.gpu.before_experts_ps(rows, rows, rows * (rows + 1) // 2, [(0, rows)]))
    return before + model.num_layers * (experts + costs.overhead_ps) + costs.gpu.head_ps(1, rows)


def measure(model: WholeModel, bits: int) -> Measured:
    """A second of reading and computing on the cores that this process may use."""
    kernel = NativeKernel()
    return Measured(read_bytes_per_s(kernel.threads), _expert_s(kernel, model, bits), bits, kernel.isa)


def read_bytes_per_s(threads: int | None = None) -> float:
    """The best of several passes over more memory than caches hold, every thread over a part of its own."""
    threads = threads or len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(_PROBE_BYTES // 8, np.int64), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(2 * _ENOUGH):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return _PROBE_BYTES / best


def _expert_s(kernel: NativeKernel, model: WholeModel, bits: int) -> float:
    """One row through experts of this size that take turns, so that none of them stays in a cache; the best."""
    group = default_group_size(model.hidden_size, model.intermediate_size)
    prepared = [kernel.prepare(_random_expert(model, bits, group, seed)) for seed in range(_ENOUGH)]
    x = np.random.default_rng(0).standard_normal((1, model.hidden_size), np.float32)
    one, gate = np.zeros(1, np.int32), np.ones(1, np.float32)
    best, until = float("inf"), time.perf_counter() + _KERNEL_S
    while time.perf_counter() < until or best == float("inf"):
        for expert in prepared:
            start = time.perf_counter()
            kernel.execute(x, [expert], one, one, gate)
            best = min(best, time.perf_counter() - start)
    return best


def _random_expert(model: WholeModel, bits: int, group: int, seed: int) -> QuantizedExpert:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> QuantizedMatrix:
        groups = (rows, -(-columns // group))
        return QuantizedMatrix(
            bits=bits,
            planes=rng.integers(0, 256, (bits, rows, columns // 8), np.uint8),
            scale=np.full(groups, 1e-3, np.float16),
            offset=np.zeros(groups, np.float16),
            group_size=group,
        )

    hidden, inner = model.hidden_size, model.intermediate_size
    return QuantizedExpert(bits, matrix(2 * inner, hidden), matrix(hidden, inner))
