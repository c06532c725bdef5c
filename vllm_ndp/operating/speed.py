"""How fast an option would decode: simulated by the tables that plugin and replay price with, and measured by a probe.

Routing is assumed even: every row chooses its experts as if none were preferred. That is the worst case for a hot set;
prompts that prefer some experts are faster. A test holds the simulated figure against a replay of such a trace. The
two clocks stay apart: `Simulated` holds picoseconds of modelled hardware, `Measured` seconds of this machine.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint.values import MXFP4, StoredForm
from ndp_device.common.model_shape import WholeModel
from ndp_device.common.widths import BYTE_BITS, default_group_size
from ndp_device.experts.expert import (
    ByteExpert,
    ByteMatrix,
    Fp4Expert,
    Fp4Matrix,
    QuantizedExpert,
    QuantizedMatrix,
    StoredExpert,
)
from ndp_device.kernels.native import NativeExpert, NativeKernel, NativeMatrix
from ndp_device.timing.work import PS_PER_S
from vllm_ndp.cost_model.costs import Costs

_LAYERS_DRAWN = 4096
"""Steps of one layer that are averaged over: the mean of a step is then within 1 % of a replay."""
_PROBE_BYTES = 256 << 20
_KERNEL_S = 0.3
_ENOUGH = 5
PROMPT = 64
"""Tokens of the prompt whose time is told."""
_AT_ONCE_BYTES = 64 << 20
"""Of experts that one call computes, as it does those of a row. Qwen3-30B-A3B's take .7 of the time of a call each,
and gpt-oss-20b's .9 (two cores of a Xeon with AMX, 2026-11-29)."""
_LINEAR_BYTES, _BLOCK = 32 << 20, 128
"""A matrix as integration/linear_layers.py makes them."""
LAYER_PASSES, PROMPT_LAYER_PASSES = 52, 7.7
"""What a layer takes beside its matrices (norms, rotary embedding, attention of a short context, the router, Python),
in times of `layer_pass_s` with one row and with PROMPT rows. Twelve layers of gpt-oss-20b take 1.95 and 7.8 ms each (54
and 8.3 passes), eight of Qwen3-30B-A3B 1.5 and 5.0 ms (48 and 7.1): two cores of a Xeon with AMX, 2026-11-29."""
_PASSES = 50


@dataclass(frozen=True)
class Simulated:
    """Speeds of the modelled hardware, at even routing."""

    decode_step_ps: int
    decode_tokens_per_s: float
    prefill_ps: int
    """Time of one prompt as long as the context, cold experts streamed."""


@dataclass(frozen=True)
class Measured:
    """Speeds of this machine: bytes read per second, and seconds for one expert of the model in the device kernel,
    which no cache holds."""

    read_bytes_per_s: float
    expert_s: float
    """For one row, among as many as a row chooses."""
    prompt_expert_s: float
    """For as many rows as a prompt of PROMPT tokens gives it."""
    linear_bytes_per_s: float
    """Of a linear layer, for one row."""
    prompt_linear_bytes_per_s: float
    """For PROMPT rows."""
    layer_s: float
    """What a layer takes beside its matrices, for one row."""
    prompt_layer_s: float
    """For PROMPT rows."""
    bits: int
    isa: str

    def decode_step_s(self, model: WholeModel, linear_layers: int, head: int) -> float:
        """One request at even routing on these cores: weights are read once, experts one after another. linear_layers,
        head: bytes beside experts."""
        experts_s = model.num_layers * model.top_k * self.expert_s
        return experts_s + (linear_layers + head) / self.linear_bytes_per_s + model.num_layers * self.layer_s

    def prompt_s(self, model: WholeModel, linear_layers: int, head: int) -> float:
        """First token of a prompt of PROMPT tokens at even routing, every expert at `bits` in this process. Only the
        last row meets the output matrix."""
        beside_s = linear_layers / self.prompt_linear_bytes_per_s + head / self.linear_bytes_per_s
        layer_s = _touched(model) * self.prompt_expert_s + self.prompt_layer_s
        return beside_s + model.num_layers * layer_s


def _touched(model: WholeModel) -> float:
    """Experts of a layer that a prompt of PROMPT tokens chooses, at even routing."""
    return model.num_experts * (1 - (1 - model.top_k / model.num_experts) ** PROMPT)


def simulated(costs: Costs, num_hot: int, avg_bits: float, batch: int, context: int) -> Simulated:
    """One decode step of `batch` requests with `context` tokens each, every layer as the mean of many."""
    model, rng = costs.shape, np.random.default_rng(0)
    layers = []
    for _ in range(max(_LAYERS_DRAWN // batch, 16)):
        chosen = np.argsort(rng.random((batch, model.num_experts)), axis=1)[:, : model.top_k]
        layers.append(_layer(costs, chosen, num_hot, avg_bits))
    attention = costs.attention_ps(batch, batch * context)
    step = model.num_layers * (attention + float(np.mean(layers)) + costs.overhead_ps) + costs.gpu.head_ps(batch)
    return Simulated(
        decode_step_ps=round(step),
        decode_tokens_per_s=batch * PS_PER_S / step,
        prefill_ps=_prefill_ps(costs, num_hot, context),
    )


def _layer(costs: Costs, chosen: NDArray[np.int64], num_hot: int, avg_bits: float) -> float:
    """The experts of one layer; the first K are hot. chosen: [batch, top_k], distinct in a row."""
    rows_of = np.bincount(chosen.ravel(), minlength=costs.shape.num_experts)
    hot = rows_of[:num_hot]
    gpu = costs.resident_ps(int((hot > 0).sum()), int(hot.sum()))
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


def measure(
    model: WholeModel, bits: int, form: StoredForm | None = None, linear_form: StoredForm | None = None
) -> Measured:
    """Two seconds of reading and computing on the cores that this process may use. form: of experts that are served as
    they are stored at its own width; linear_form: of linear layers."""
    if form is not None and form.bits != bits:
        form = None
    kernel = NativeKernel()
    at_once = max(1, min(model.top_k, _AT_ONCE_BYTES // (model.weights_per_expert * bits // 8)))
    expert = random_expert(model.hidden_size, model.intermediate_size, bits, form)
    experts = [kernel.prepare(copy.deepcopy(expert)) for _ in range(at_once)]
    prompt_rows = round(PROMPT * model.top_k / _touched(model))
    one, many = (_expert_s(kernel, experts, model.hidden_size, rows) for rows in (1, prompt_rows))
    linear_rows = max(_LINEAR_BYTES // model.hidden_size, 32)
    matrix = kernel.prepare_matrix(_random_stored(linear_rows, model.hidden_size, linear_form))
    linear, prompt_linear = (_linear_bytes_per_s(kernel, matrix, rows) for rows in (1, PROMPT))
    layer = LAYER_PASSES * layer_pass_s(model.hidden_size, 1)
    prompt_layer = PROMPT_LAYER_PASSES * layer_pass_s(model.hidden_size, PROMPT)
    read = read_bytes_per_s(kernel.threads)
    return Measured(read, one, many, linear, prompt_linear, layer, prompt_layer, bits, kernel.isa)


def layer_pass_s(hidden: int, rows: int) -> float:
    """Of two norms and a rotation in numpy: small operators, whose calls take as long as their bytes."""
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((rows, hidden), np.float32), np.ones(hidden, np.float32)
    half, times = hidden // 2, []
    for _ in range(_PASSES):
        start = time.perf_counter()
        for _ in range(2):
            normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * scale
        a, b, c, s = normed[:, :half], normed[:, half : 2 * half], scale[:half], scale[half : 2 * half]
        np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def read_bytes_per_s(threads: int | None = None) -> float:
    """The median of several passes over more memory than caches hold, every thread over a part of its own."""
    threads = threads or len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(_PROBE_BYTES // 8, np.int64), threads)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(2 * _ENOUGH):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            times.append(time.perf_counter() - start)
    return _PROBE_BYTES / float(np.median(times))


def _expert_s(kernel: NativeKernel, experts: list[NativeExpert], hidden: int, rows: int) -> float:
    """Of one among these in one call, each with so many rows."""
    x = np.random.default_rng(0).standard_normal((rows, hidden), np.float32)
    owner, chosen = (pairs.ravel().astype(np.int32) for pairs in np.indices((rows, len(experts))))
    weights = np.ones(len(owner), np.float32)
    return _cold_s(lambda: kernel.execute(x, experts, owner, chosen, weights)) / len(experts)


def random_expert(hidden: int, inner: int, bits: int, form: StoredForm | None) -> QuantizedExpert | StoredExpert:
    """Of this width, or with codes of this form."""
    if form is not None and form.bits == BYTE_BITS:
        w1, w3, w2 = (_random_bytes(form, *shape) for shape in ((inner, hidden), (inner, hidden), (hidden, inner)))
        return ByteExpert(w1, w3, w2)
    if form is not None and form.numbers == "fp4":
        return Fp4Expert(_random_fp4(form, 2 * inner, hidden), _random_fp4(form, hidden, inner))
    group = default_group_size(hidden, inner) if form is None else form.group
    return QuantizedExpert(bits, _random(2 * inner, hidden, bits, group), _random(hidden, inner, bits, group))


def _linear_bytes_per_s(kernel: NativeKernel, matrix: NativeMatrix, rows: int) -> float:
    x = np.random.default_rng(0).standard_normal((rows, matrix.shape[1]), np.float32)
    return matrix.nbytes / _cold_s(lambda: kernel.multiply(x, matrix))


def _cold_s(run: Callable[[], object]) -> float:
    """The median: a server decodes beside the same programs. Memory that caches do not hold is read before each."""
    beside, until = np.ones(_PROBE_BYTES // 8, np.int64), time.perf_counter() + _KERNEL_S
    times: list[float] = []
    while len(times) < _ENOUGH or time.perf_counter() < until:
        beside.max()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def _random_stored(rows: int, columns: int, form: StoredForm | None) -> QuantizedMatrix | Fp4Matrix | ByteMatrix:
    if form is not None and form.bits == BYTE_BITS:
        return _random_bytes(form, rows, columns)
    if form is not None and form.numbers == "fp4":
        return _random_fp4(form, rows, columns)
    return _random(rows, columns, *((BYTE_BITS, _BLOCK) if form is None else (form.bits, form.group)))


def _random_bytes(form: StoredForm, rows: int, columns: int) -> ByteMatrix:
    codes = np.random.default_rng(0).integers(0, 127, (rows, columns), np.uint8)
    block = form.group or _BLOCK
    grid = -(-rows // block), -(-columns // block)
    return ByteMatrix(form.numbers, codes, np.full(grid, 1e-3, np.float32), (block, block))


def _random_fp4(form: StoredForm, rows: int, columns: int) -> Fp4Matrix:
    codes = np.random.default_rng(0).integers(0, 256, (rows, columns // 2), np.uint8)
    of_rows = None if form == MXFP4 else np.full(rows, 1e-3, np.float32)
    return Fp4Matrix(codes, np.full((rows, columns // form.group), 118, np.uint8), of_rows)


def _random(rows: int, columns: int, bits: int, group: int) -> QuantizedMatrix:
    groups = (rows, -(-columns // group))
    return QuantizedMatrix(
        bits=bits,
        planes=np.random.default_rng(0).integers(0, 256, (bits, rows, columns // 8), np.uint8),
        scale=np.full(groups, 1e-3, np.float16),
        offset=np.zeros(groups, np.float16),
        group_size=group,
    )
