"""How long the GPU side of a step would have taken on one hardware preset, and the clock that adds it up.

    step = sum over MoE layers(
               attention -> max( shared and hot experts | streamed experts over PCIe | device | host's CPU ) + overhead
           ) + head

"Attention" is all that runs before a layer's experts: attention of any form, the router, and the dense layers since the
MoE layer before.

A preset says whose measured kernels give the times (silicon.py): routed experts, attention's products and its heads,
latent attention in decode as a whole (in steps with prompts it is the least that attention takes), dense and shared
experts, the output projection. Rooflines give the rest: copies that are computed as they come, states
of linear attention, presets of a card that was not measured, and models whose hidden size is below 1024 or whose
numbers are not of 16 bits.

Several GPUs that split each layer (tensor parallelism) are one GPU of their bandwidth and arithmetic, plus what their
collectives take. The collectives are an all-reduce after the embedding, after each attention and after
each layer's experts, and a gather of the logits. The GPUs share one device and its link. A stage of a pipeline
(pipeline parallelism) has a clock of its own. It ends a step by sending its rows on instead of computing the head.
PipelineClock puts the stages' steps one after the other.

The live plugin and replay use the same objects, so that replaying a trace gives the live run's simulated times to the
picosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec

from ndp_device.common.decoder_layers import DecoderLayer, GroupedQuery, Latent
from ndp_device.common.model_shape import WholeModel
from ndp_device.timing.model import bulk_ps, migration_ps
from ndp_device.timing.spec import MEASURED, Hardware
from ndp_device.timing.work import PS_PER_S, ceil_div, transfer_ps
from vllm_ndp.cost_model import silicon

_MOST_KNOWN = 4096
"""Loads whose time is remembered."""


COLLECTIVE_PS = 6_000_000
"""Latency of 128 B to 64 KiB between two H100 in a CUDA graph, measured: github.com/NVIDIA/nccl/issues/1259. Where
all-reduces of the card were measured (silicon.py), those stand for it."""
NVLINK_BYTES_PER_S = 370_000_000_000
"""Rate of one direction of NVLink 4 after protocol overhead, out of 450 GB/s:
github.com/NVIDIA/nccl-tests/issues/212."""


def all_reduce_ps(num_gpus: int, num_bytes: int, card: str = "") -> int:
    """Each GPU has num_bytes of partial sums, and gets the sum: latency + 2 (n - 1) / n * bytes / bandwidth.

    card: whose measured all-reduces tell; empty, or beyond the GPUs that were measured: the formula.
    """
    if num_gpus == 1 or num_bytes == 0:
        return 0
    measured = silicon.all_reduce_ps(card, num_gpus, num_bytes) if card else None
    return measured or COLLECTIVE_PS + transfer_ps(
        ceil_div(2 * num_bytes * (num_gpus - 1), num_gpus), NVLINK_BYTES_PER_S
    )


def gather_ps(num_gpus: int, num_bytes: int, card: str = "") -> int:
    """Each GPU has its part of num_bytes, and gets all: an all-reduce of half as much."""
    return all_reduce_ps(num_gpus, ceil_div(num_bytes, 2), card)


def send_ps(num_bytes: int) -> int:
    """Time from one GPU to another; the latency of a collective of two stands for it."""
    return 0 if num_bytes == 0 else COLLECTIVE_PS + transfer_ps(num_bytes, NVLINK_BYTES_PER_S)


class Context(NamedTuple):
    """The rows of a step and what they look back at, over all its requests."""

    rows: int
    requests: int
    kv_tokens: int
    """Cached tokens, each counted once for its request."""
    attended: int
    """(row, cached token) pairs."""
    spans: Sequence[tuple[int, int]] | None = None
    """First position and the one after the last that each request computes; None: not known."""

    def within(self, window: int, *, chunked: bool) -> tuple[int, int]:
        """kv_tokens and attended where a row sees only `window` tokens, or the chunk of so many that it lies in.

        Without spans the context counts as that of one row per request.
        """
        if not window:
            return self.kv_tokens, self.attended
        if self.spans is None:
            most = self.rows * window
            return min(self.kv_tokens, most), min(self.attended, most)
        kv_tokens = attended = 0
        for start, end in self.spans:
            first = start // window * window if chunked else max(start + 1 - window, 0)
            kv_tokens += end - first
            attended += _seen(end, window, chunked) - _seen(start, window, chunked)
        return kv_tokens, attended


def _seen(rows: int, window: int, chunked: bool) -> int:
    """Pairs of the first `rows` rows of a text."""
    if chunked:
        whole, rest = divmod(rows, window)
        return whole * (window * (window + 1) // 2) + rest * (rest + 1) // 2
    ramp = min(rows, window)
    return ramp * (ramp + 1) // 2 + (rows - ramp) * window


@dataclass(frozen=True)
class GpuModel:
    """Stateless: sizes in, picoseconds out."""

    hardware: Hardware
    shape: WholeModel
    num_gpus: int = 1
    """GPUs that split each layer. Small matrices that each GPU holds whole (the router) count as split, too."""
    stage: int = 0
    num_stages: int = 1
    """Stages of a pipeline, whose layers are `shape`'s."""
    slot_bytes: int = 0
    """Bytes of a hot expert in GPU memory; 0: full precision. Widening narrow experts on the way to the arrays costs
    nothing, as everywhere in the lab."""
    streamed_bytes: int = 0
    """Bytes of an expert that comes for a prompt; 0: full precision."""
    whole_experts: bool = False
    """Each GPU holds some of the hot experts whole, and not a part of each."""
    decode: str = "decode"
    """Measured kernel of attention in decode."""

    @property
    def hot_expert_bytes(self) -> int:
        return self.slot_bytes or self.shape.expert_bytes

    def roofline_ps(self, num_bytes: int, flops: int) -> int:
        """The slower of HBM (at the preset's efficiency) and the tensor cores."""
        gpu, n = self.hardware.gpu, self.num_gpus
        memory = ceil_div(num_bytes * PS_PER_S * 100, n * gpu.hbm_bytes_per_s * gpu.hbm_efficiency_percent)
        return max(memory, ceil_div(flops * PS_PER_S, n * gpu.flops_per_s))

    @cached_property
    def card(self) -> str:
        """Whose measured kernels give the times; empty: rooflines do."""
        times, shape = self.hardware.gpu.times, self.shape
        known = shape.hidden_size >= silicon.SMALLEST_HIDDEN and shape.dtype_bytes == 2
        return times.removeprefix(MEASURED) if known and times.startswith(MEASURED) else ""

    @property
    def _rates(self) -> silicon.Rates:
        return self.hardware.gpu.hbm_bytes_per_s, self.hardware.gpu.flops_per_s

    def _layer(self, expert_bytes: int) -> silicon.Layer:
        """The measured layer whose kernel stands for experts of that size."""
        shape = self.shape
        width = next((bits for bits in (16, 8) if 4 * 8 * expert_bytes > 3 * bits * shape.weights_per_expert), 4)
        wide = ceil_div(shape.intermediate_size, self.num_gpus)
        return silicon.layer(self.card, width, (shape.hidden_size, wide, shape.top_k, shape.num_experts), self._rates)

    def experts_ps(self, touched: int, pairs: int, num_bytes: int) -> int:
        """`touched` experts of a layer in GPU memory, with `pairs` rows in all and `num_bytes` together."""
        return self.launch_ps(num_bytes // touched) + self.growing_ps(touched, pairs, num_bytes) if touched else 0

    def launch_ps(self, expert_bytes: int) -> int:
        """What a layer with any expert in GPU memory takes beside its experts; experts that run elsewhere take none of
        it away."""
        return self._layer(expert_bytes).fixed_ps if self.card else 0

    def growing_ps(self, touched: int, pairs: int, num_bytes: int) -> int:
        """What so many experts add to a layer's launch."""
        if not self.card or not touched:
            return self.roofline_ps(num_bytes, 2 * self.shape.weights_per_expert * pairs)
        return self._layer(num_bytes // touched).growing_ps(touched, pairs, ceil_div(num_bytes, self.num_gpus))

    def _products_ps(self, rows: int, *matrices: tuple[int, int]) -> int:
        """Matrices (columns, depth) of which each GPU has its columns, one after the other."""
        n = self.num_gpus
        return sum(
            silicon.product_ps(self.card, ceil_div(wide, n), depth, rows, self._rates) for wide, depth in matrices
        )

    def _heads_ps(self, attention: GroupedQuery, context: Context, num_bytes: int, flops: int) -> int:
        """Scores, softmax and the sum of values, over what is cached."""
        n, new = self.num_gpus, context.rows > context.requests
        load = silicon.attention(
            context.requests,
            ceil_div(attention.num_heads, n),
            ceil_div(attention.kv_values, n),
            ceil_div(num_bytes, n),
            ceil_div(flops, n),
            (context.rows if new else context.kv_tokens) // context.requests,
        )
        return silicon.kernel(self.card, "prefill" if new else self.decode).ps(load, self._rates)

    def _latent_ps(self, attention: Latent, context: Context, num_bytes: int) -> int:
        """Of one decode row of each request. Every GPU has all of the cache and of the compression."""
        own = msgspec.structs.replace(attention, num_heads=ceil_div(attention.num_heads, self.num_gpus))
        requests, kv_tokens = context.requests, context.kv_tokens
        flops = own.flops(requests, kv_tokens, kv_tokens)
        weights = own.weights(self.shape.hidden_size)
        load = silicon.latent(requests, weights, num_bytes, flops, kv_tokens // requests)
        return silicon.kernel(self.card, "latent").ps(load, self._rates)

    def reduce_ps(self, rows: int) -> int:
        """One all-reduce of so many rows of activations."""
        return all_reduce_ps(self.num_gpus, rows * self.shape.hidden_size * self.shape.dtype_bytes, self.card)

    def attention_ps(self, rows: int, kv_tokens: int) -> int:
        """Mean over the MoE layers of what runs before their experts in decode, rounded up."""
        return ceil_div(sum(self.before_experts_ps(rows, kv_tokens)), self.shape.num_layers)

    def before_experts_ps(
        self, rows: int, kv_tokens: int, attended: int | None = None, spans: Sequence[tuple[int, int]] | None = None
    ) -> tuple[int, ...]:
        """[L] for `rows` new tokens of all requests, and `kv_tokens` cached tokens, read once each.

        `attended` counts the (row, cached token) pairs; without it each cached token is attended once, as in decode.
        `spans`: the positions [start, end) that each request computes. Spans are needed where a layer has a window or a
        state, and rows are not decode rows. Without them every row counts as a request of its own.
        """
        if rows == 0:
            return (0,) * self.shape.num_layers
        requests = rows if spans is None else len(spans)
        context = Context(rows, requests, kv_tokens, kv_tokens if attended is None else attended, spans)
        known = [self._decoder_layer_ps(kind, context) for kind in self.shape.kinds]
        before = {kinds: sum(known[kind] for kind in kinds) for kinds in set(self.shape.before_experts)}
        return tuple(before[kinds] for kinds in self.shape.before_experts)

    def _decoder_layer_ps(self, layer: DecoderLayer, context: Context) -> int:
        """Its attention and router, then its dense FFN if it has one; routed and shared experts apart.

        With several GPUs two all-reduces are in it: of the sums that it begins with, and of attention's own.
        """
        shape, attention = self.shape, layer.attention
        kv_tokens, pairs = context.within(attention.window, chunked=attention.is_chunked)
        weights = attention.weights(shape.hidden_size) + (shape.router_weights if layer.has_experts else 0)
        cached = attention.values_read(context.rows, kv_tokens)
        cached += 2 * context.requests * attention.state_values  # both ways
        num_bytes, flops = cached * shape.dtype_bytes, attention.flops(context.rows, kv_tokens, pairs)
        took = 2 * self.reduce_ps(context.rows)
        if not self.card:
            took += self.roofline_ps(weights * shape.dtype_bytes + num_bytes, 2 * context.rows * weights + flops)
        elif isinstance(attention, GroupedQuery):
            out = attention.num_heads * attention.head_dim
            inward = ceil_div(weights, shape.hidden_size) - out
            took += self._products_ps(context.rows, (inward, shape.hidden_size), (shape.hidden_size, out))
            took += self._heads_ps(attention, context._replace(kv_tokens=kv_tokens), num_bytes, flops)
        else:
            half = ceil_div(weights, 2 * shape.hidden_size)
            apart = self._products_ps(context.rows, (half, shape.hidden_size), (shape.hidden_size, half))
            apart += self.roofline_ps(num_bytes, flops)
            if isinstance(attention, Latent):
                apart = max(apart, self._latent_ps(attention, context, num_bytes))
            took += apart
        if layer.dense_weights:
            took += self.weights_ps(layer.dense_weights, context.rows)
        return took

    def weights_ps(self, weights: int, rows: int) -> int:
        """An FFN with gate, read once and multiplied with each row."""
        if self.card:
            hidden = self.shape.hidden_size
            wide = ceil_div(weights, 3 * hidden)
            return self._products_ps(rows, (2 * wide, hidden), (hidden, wide))
        return self.roofline_ps(weights * self.shape.dtype_bytes, 2 * rows * weights)

    def shared_ps(self, rows: int) -> int:
        """The shared experts of one MoE layer, in GPU memory; they run beside the device, as hot experts do."""
        return self.weights_ps(self.shape.shared_weights, rows) if rows and self.shape.shared_weights else 0

    def hot_ps(self, loads: Sequence[tuple[int, int]], num_bytes: int | None = None) -> int:
        """Experts in GPU memory: each one with at least a row is read once.

        `loads`: (experts with a row, their rows). There is one for each GPU where GPUs hold whole experts, of which the
        busiest counts; else one, of all GPUs together. `num_bytes`: of those experts, where each has a width of its
        own.
        """
        one = replace(self, num_gpus=1) if self.whole_experts else self
        size = self.hot_expert_bytes
        return max((one.experts_ps(n, p, n * size if num_bytes is None else num_bytes) for n, p in loads), default=0)

    def prefill_stream_ps(self, num_cold_experts: int, pairs: int) -> int:
        """Experts that come over PCIe to be computed at once on the GPU: copy and compute overlap."""
        if num_cold_experts == 0:
            return 0
        num_bytes = num_cold_experts * (self.streamed_bytes or self.shape.expert_bytes)
        compute = self.roofline_ps(num_bytes, 2 * self.shape.weights_per_expert * pairs)
        return max(bulk_ps(self.hardware.link, num_bytes), compute)

    def migration_ps(self, num_experts: int, num_bytes: int | None = None) -> int:
        return migration_ps(self.hardware, num_experts * self.hot_expert_bytes if num_bytes is None else num_bytes)[0]

    def head_ps(self, rows: int, of_rows: int = 0) -> int:
        """Embedding rows and the output projection; rows = tokens whose logits are wanted, of so many in the step.

        With several GPUs the time includes the all-reduce of the last layer's experts and the gather of the logits. In
        a pipeline it includes the way to the next stage (activations and their residual), where the head is computed.
        """
        # what attention_ps says of the first layer is, in a stage after the first, the last layer's here
        reduce_ps = 0 if self.stage else self.reduce_ps(of_rows)
        shape = self.shape
        if self.stage < self.num_stages - 1:
            return reduce_ps + send_ps(2 * of_rows * shape.hidden_size * shape.dtype_bytes)
        if rows == 0:
            return reduce_ps
        values = shape.head_weights + rows * shape.hidden_size
        logits = rows * shape.vocab_size * shape.dtype_bytes
        if self.card:
            compute = self._products_ps(rows, (shape.vocab_size, shape.hidden_size))
        else:
            compute = self.roofline_ps(values * shape.dtype_bytes, 2 * rows * shape.head_weights)
        return reduce_ps + compute + gather_ps(self.num_gpus, logits, self.card)


class LayerTime(NamedTuple):
    """One layer of one step; total = attention + max(shared + hot, stream, device, host) + overhead."""

    attention_ps: int
    shared_ps: int
    hot_ps: int
    stream_ps: int
    device_ps: int
    overhead_ps: int
    host_ps: int = 0

    @property
    def total_ps(self) -> int:
        beside = max(self.shared_ps + self.hot_ps, self.stream_ps, self.device_ps, self.host_ps)
        return self.attention_ps + beside + self.overhead_ps


@dataclass(frozen=True)
class StepTime:
    """One forward pass and its layers in order."""

    start_ps: int
    end_ps: int
    layers: tuple[LayerTime, ...]

    @property
    def total_ps(self) -> int:
        return self.end_ps - self.start_ps


@dataclass
class StepClock:
    """Simulated time of one engine. Per step: begin_step, then begin_layer and end_layer per layer, then end_step."""

    model: GpuModel
    now_ps: int = 0
    _step_start_ps: int = 0
    _rows: int = 0
    _before_ps: tuple[int, ...] = ()
    _shared_ps: int = 0
    _layer: tuple[int, int] = (0, 0)  # that runs: when it began, and what passes before its experts
    _layers: list[LayerTime] = field(default_factory=list)

    def __post_init__(self) -> None:
        once = lru_cache(_MOST_KNOWN)  # decode steps bring the same few loads and rows again and again
        self._hot_once, self._shared_once = once(self.model.hot_ps), once(self.model.shared_ps)
        self._head_once = once(self.model.head_ps)

    def begin_step(
        self, rows: int, kv_tokens: int, attended: int | None = None, spans: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Arguments as for GpuModel.before_experts_ps; they hold for every layer of the step."""
        self._step_start_ps, self._rows = self.now_ps, rows
        self._before_ps = self.model.before_experts_ps(rows, kv_tokens, attended, spans)
        self._shared_ps = self._shared_once(rows)
        self._layers = []

    def begin_layer(self) -> int:
        """Attention passes; returns the simulated time at which the layer's work is handed to the device."""
        start_ps, before_ps = self.now_ps, self._before_ps
        attention_ps = before_ps[len(self._layers) % len(before_ps)]  # of more layers than the model has: begin again
        self._layer, self.now_ps = (start_ps, attention_ps), start_ps + attention_ps
        return self.now_ps

    def end_layer(
        self,
        hot: Sequence[tuple[int, int]] = (),
        *,
        hot_bytes: int | None = None,
        device_ps: int = 0,
        streamed_experts: int = 0,
        streamed_pairs: int = 0,
        host_ps: int = 0,
    ) -> LayerTime:
        """hot and hot_bytes: as for GpuModel.hot_ps.

        `device_ps`: Timing.total_ps of the layer's message, 0 without one. `streamed_experts`: cold experts that came
        over PCIe, in prefill or because the device did not answer. `host_ps`: what the host's CPU takes for warm
        experts.
        """
        (start_ps, attention_ps), shared_ps = self._layer, self._shared_ps
        hot_ps = self._hot_once(tuple(hot), hot_bytes)
        stream_ps = self.model.prefill_stream_ps(streamed_experts, streamed_pairs)
        overhead_ps = self.model.hardware.gpu.layer_overhead_ps
        layer = LayerTime(attention_ps, shared_ps, hot_ps, stream_ps, device_ps, overhead_ps, host_ps)
        self.now_ps = start_ps + layer.total_ps
        self._layers.append(layer)
        return layer

    def end_step(self, head_rows: int) -> StepTime:
        self.now_ps += self._head_once(head_rows, self._rows)
        return StepTime(self._step_start_ps, self.now_ps, tuple(self._layers))

    def migrate(self, num_experts: int, num_bytes: int | None = None) -> int:
        """The hot set moves between two steps; returns what it took. num_bytes: where experts have their own widths."""
        took = self.model.migration_ps(num_experts, num_bytes)
        self.now_ps += took
        return took

    def wait_until(self, now_ps: int) -> None:
        """Nothing runs before then: a migration of this host beside others, or no request."""
        self.now_ps = max(self.now_ps, now_ps)


class PipelineClock:
    """When each step leaves a pipeline of stages, from what each stage took for it, in ps.

    begin[s][n] = max( end[s][n - 1] , end[s - 1][n] )

    begin[0][n] waits for the tokens that step n goes on from.
    """

    def __init__(self, num_stages: int) -> None:
        self._free_ps = [0] * num_stages
        self._token_ps: dict[str, int] = {}

    @property
    def ended_ps(self) -> int:
        """When the last step left the last stage."""
        return self._free_ps[-1]

    def run(self, took_ps: Sequence[int], requests: Iterable[str]) -> tuple[int, int]:
        """One step of these requests, which takes took_ps[s] in stage s; when it began and when it left the last."""
        at = start = max([self._free_ps[0], *(self._token_ps.get(name, 0) for name in requests)])
        for stage, took in enumerate(took_ps):
            at = self._free_ps[stage] = max(at, self._free_ps[stage]) + took
        return start, at

    def note_token(self, request: str, at_ps: int) -> None:
        """A step that ended then made a token, without which the request's next step cannot begin."""
        self._token_ps[request] = at_ps

    def forget(self, request: str) -> None:
        self._token_ps.pop(request, None)
