"""How long the GPU side of a step would have taken: rooflines of one hardware preset, and the clock that adds them up.

    step = sum over layers( attention -> max( hot experts | streamed experts over PCIe | device ) + overhead ) + head

The live plugin and replay use the same objects, so that replaying a trace gives the live run's simulated times to the
picosecond. Knows nothing of vLLM, devices' insides or wall clocks; every number here is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ndp_device.model_shape import WholeModel
from ndp_device.timing.link import bulk_ps
from ndp_device.timing.migration import Migration, migration
from ndp_device.timing.spec import Hardware
from ndp_device.timing.units import PS_PER_S, ceil_div


@dataclass(frozen=True)
class GpuModel:
    """Stateless: sizes in, picoseconds out."""

    hardware: Hardware
    shape: WholeModel

    def roofline_ps(self, num_bytes: int, flops: int) -> int:
        """The slower of HBM (at the preset's efficiency) and the tensor cores."""
        gpu = self.hardware.gpu
        memory = ceil_div(num_bytes * PS_PER_S * 100, gpu.hbm_bytes_per_s * gpu.hbm_efficiency_percent)
        return max(memory, ceil_div(flops * PS_PER_S, gpu.flops_per_s))

    def attention_ps(self, rows: int, kv_tokens: int, attended: int | None = None) -> int:
        """One layer before its experts: `rows` new tokens of all requests, `kv_tokens` cached tokens read once each.

        attended counts the (row, cached token) pairs; without it each cached token is attended once, as in decode.
        """
        if rows == 0:
            return 0
        shape = self.shape
        pairs = kv_tokens if attended is None else attended
        values = shape.attention_weights + kv_tokens * shape.kv_values
        flops = 2 * rows * shape.attention_weights + 4 * pairs * shape.num_heads * shape.head_dim
        return self.roofline_ps(values * shape.dtype_bytes, flops)

    def hot_experts_ps(self, pairs_per_hot_expert: Sequence[int]) -> int:
        """Experts in GPU memory: each one with at least a row is read once."""
        touched = sum(1 for pairs in pairs_per_hot_expert if pairs)
        return self.roofline_ps(
            touched * self.shape.expert_bytes, 2 * self.shape.weights_per_expert * sum(pairs_per_hot_expert)
        )

    def prefill_stream_ps(self, num_cold_experts: int, pairs: int) -> int:
        """Experts that come over PCIe to be computed at once on the GPU: copy and compute overlap."""
        if num_cold_experts == 0:
            return 0
        num_bytes = num_cold_experts * self.shape.expert_bytes
        compute = self.roofline_ps(num_bytes, 2 * self.shape.weights_per_expert * pairs)
        return max(bulk_ps(self.hardware.link, num_bytes), compute)

    def migration(self, num_experts: int) -> Migration:
        return migration(self.hardware, num_experts * self.shape.expert_bytes)

    def migration_ps(self, num_experts: int) -> int:
        return self.migration(num_experts).total_ps

    def head_ps(self, rows: int) -> int:
        """Embedding rows and the output projection; rows = tokens whose logits are wanted."""
        if rows == 0:
            return 0
        shape = self.shape
        values = shape.head_weights + rows * shape.hidden_size
        return self.roofline_ps(values * shape.dtype_bytes, 2 * rows * shape.head_weights)


@dataclass(frozen=True)
class LayerTime:
    """One layer of one step; total = attention + max(hot, stream, device) + overhead."""

    start_ps: int
    attention_ps: int
    hot_ps: int
    stream_ps: int
    device_ps: int
    overhead_ps: int

    @property
    def total_ps(self) -> int:
        return self.attention_ps + max(self.hot_ps, self.stream_ps, self.device_ps) + self.overhead_ps


@dataclass(frozen=True)
class StepTime:
    """One forward pass: its layers in order and the head."""

    start_ps: int
    end_ps: int
    head_ps: int
    layers: tuple[LayerTime, ...]

    @property
    def total_ps(self) -> int:
        return self.end_ps - self.start_ps


@dataclass
class StepClock:
    """Simulated time of one engine. Per step: begin_step, then begin_layer and end_layer per layer, then end_step."""

    model: GpuModel
    now_ps: int = 0
    _step_start_ps: int | None = None
    _attention_ps: int = 0
    _layer_start_ps: int | None = None
    _layers: list[LayerTime] = field(default_factory=list)

    def begin_step(self, rows: int, kv_tokens: int, attended: int | None = None) -> None:
        """rows and kv_tokens as for GpuModel.attention_ps; they hold for every layer of the step."""
        if self._step_start_ps is not None:
            raise RuntimeError("begin_step: the step before has not ended; call end_step first")
        self._step_start_ps = self.now_ps
        self._attention_ps = self.model.attention_ps(rows, kv_tokens, attended)
        self._layers = []

    @property
    def attention_ps(self) -> int:
        """What attention takes in each layer of the running step."""
        return self._attention_ps

    def follow(self, now_ps: int) -> None:
        """Layers of the running step were timed elsewhere, by the same rule, up to now_ps; StepTime lists none."""
        if self._step_start_ps is None or self._layer_start_ps is not None or now_ps < self.now_ps:
            raise RuntimeError("follow: only forward, between begin_step and end_step and not inside a layer")
        self.now_ps = now_ps

    def begin_layer(self) -> int:
        """Attention passes; returns the simulated time at which the layer's work is handed to the device."""
        if self._step_start_ps is None or self._layer_start_ps is not None:
            raise RuntimeError("begin_layer: call it once per layer, between begin_step and end_step")
        self._layer_start_ps = self.now_ps
        self.now_ps += self._attention_ps
        return self.now_ps

    def end_layer(
        self,
        hot_pairs: Sequence[int] = (),
        *,
        device_ps: int = 0,
        streamed_experts: int = 0,
        streamed_pairs: int = 0,
    ) -> LayerTime:
        """hot_pairs: rows of each hot expert. device_ps: Timing.total_ps of the layer's message, 0 without one.

        streamed_experts: cold experts that came over PCIe, in prefill or because the device did not answer.
        """
        if self._layer_start_ps is None:
            raise RuntimeError("end_layer: begin_layer must come first")
        layer = LayerTime(
            start_ps=self._layer_start_ps,
            attention_ps=self._attention_ps,
            hot_ps=self.model.hot_experts_ps(hot_pairs),
            stream_ps=self.model.prefill_stream_ps(streamed_experts, streamed_pairs),
            device_ps=device_ps,
            overhead_ps=self.model.hardware.gpu.layer_overhead_ps,
        )
        self.now_ps = layer.start_ps + layer.total_ps
        self._layers.append(layer)
        self._layer_start_ps = None
        return layer

    def end_step(self, head_rows: int) -> StepTime:
        if self._step_start_ps is None or self._layer_start_ps is not None:
            raise RuntimeError("end_step: every layer must have ended, and begin_step must come first")
        head = self.model.head_ps(head_rows)
        self.now_ps += head
        step = StepTime(self._step_start_ps, self.now_ps, head, tuple(self._layers))
        self._step_start_ps = None
        return step

    def abandon_step(self) -> None:
        """The running step ended in an error: it has no time of its own, the next one begins where it stopped."""
        self._step_start_ps = self._layer_start_ps = None

    def migrate(self, num_experts: int) -> int:
        """The hot set moves between two steps; returns what it took."""
        if self._step_start_ps is not None:
            raise RuntimeError("migrate: only between two steps")
        took = self.model.migration_ps(num_experts)
        self.now_ps += took
        return took

    def wait_until(self, now_ps: int) -> None:
        """Nothing runs before then: a migration of this host beside others, or no request."""
        if self._step_start_ps is not None:
            raise RuntimeError("wait_until: only between two steps")
        self.now_ps = max(self.now_ps, now_ps)
