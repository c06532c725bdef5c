"""The plugin's centre in one worker: owns slots, pool, sidecar, device and plan, and is told about every step.

    begin_step   apply the scheduler's message; replan for the prefills that ended in the step before
    (layers)     each LayerDispatch asks for the step and does its part
    end_step     note which prefills ended

One controller per worker; the layers attach themselves while vLLM loads the model.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm

from ndp_device.cache import default_cache_dir
from ndp_device.checkpoint.files import model_digest
from ndp_device.errors import ConfigError
from ndp_device.model_shape import WholeModel
from vllm_ndp.device.agreement import Agreement, PlannedReplicas
from vllm_ndp.integration import compat, device_link, residency
from vllm_ndp.integration.batch import RequestTracker, TrackedRequest
from vllm_ndp.integration.device_link import DeviceLink
from vllm_ndp.integration.dispatch import LayerDispatch
from vllm_ndp.integration.experts_pool import ExpertsPool
from vllm_ndp.integration.hot_slots import HotSlots, make_slot_kernel
from vllm_ndp.integration.migration import Migrator
from vllm_ndp.integration.planner import Planner
from vllm_ndp.integration.recording import RunRecorder
from vllm_ndp.integration.report import PAIR_KINDS, StepReport
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.integration.step import StepContext
from vllm_ndp.integration.streaming import PackedStreamer, StagingStreamer, Streamer
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.simulation.balance import Balancer
from vllm_ndp.simulation.costs import Costs
from vllm_ndp.simulation.gpu_timing import GpuModel, StepClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_ndp.config import NdpSettings

_current: NdpController | None = None
_numbers = itertools.count()


def current_controller() -> NdpController:
    """Of the engine that is being built or runs its step in this process. Raises when it runs without our worker."""
    if _current is None:
        raise ConfigError(
            "quantization 'ndp' needs the worker class vllm_ndp.integration.worker.NdpWorker, which is not running: "
            "drop --worker-cls, and check that VLLM_PLUGINS includes 'ndp'"
        )
    return _current


@dataclass
class Totals:
    """Counts since start-up."""

    steps: int = 0
    prefills: int = 0
    migrated_experts: int = 0
    kept_experts: int = 0
    preempted: int = 0
    row_checks: int = 0
    sidecar_mismatches: int = 0
    pairs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PAIR_KINDS, 0))


class NdpController:
    def __init__(self, settings: NdpSettings, model_dir: Path, vllm_config: VllmConfig) -> None:
        self.settings = settings
        self.model_dir = model_dir
        self.pool = ExpertsPool(model_dir)
        self.number = next(_numbers)
        self.totals = Totals()
        self.step: StepContext | None = None
        self.tracker = RequestTracker()
        self.hardware = compat.hardware_of(settings)
        self.shape = _whole_model(vllm_config, self.pool)
        self.clock = StepClock(GpuModel(self.hardware, self.shape))
        self.balancer: Balancer | None = None
        self.migrator = Migrator(compat.engine_cores())
        self.streamer: Streamer
        self.sidecar: RoutingSidecar
        self.device: DeviceLink
        self.planner: Planner
        self.runner: Any = None
        self._by_index: dict[int, HotSlots] = {}
        self.activation_bytes = torch.empty((), dtype=vllm_config.model_config.dtype).element_size()
        self.recorder: RunRecorder | None = None
        self._digest = ""
        self._step_start_s = 0.0
        self._report_on = vllm_config.kv_transfer_config is not None and settings.report
        self._replicas: Path | None = None
        self._planned: dict[str, dict[str, float]] = {}
        self._ended: list[TrackedRequest] = []
        self._reported = True

    @classmethod
    def create(cls, vllm_config: VllmConfig) -> NdpController:
        global _current
        _current = cls(compat.check(vllm_config), compat.model_dir(vllm_config), vllm_config)
        return _current

    # -- start-up -------------------------------------------------------------------------------------------------

    @property
    def pool_shape(self) -> tuple[int, int]:
        return self.pool.shape.num_layers, self.pool.shape.num_experts

    def slots(self, layer: int) -> HotSlots:
        return self._by_index[layer]

    def attach_layer(self, layer: Any) -> LayerDispatch:
        """Called once per MoE layer when its weights would be ready."""
        from vllm.model_executor.models.utils import extract_layer_index

        index = extract_layer_index(layer.layer_name)
        kernel = make_slot_kernel(layer, layer.w13_weight.dtype)
        slots = HotSlots(kernel, layer.w13_weight.data, layer.w2_weight.data, self.pool.shape.num_experts)
        self._by_index[index] = slots
        return LayerDispatch(index, slots, self)

    def start(self, runner: Any) -> None:
        """The model is loaded: find the device, make the first placement, print what is effective."""
        if len(self._by_index) != self.pool.shape.num_layers:
            raise ConfigError(
                f"quantization 'ndp' was asked for but only {len(self._by_index)} of {self.pool.shape.num_layers} "
                "MoE layers were attached: this model's layers do not go through vLLM's RoutedExperts"
            )
        self.runner = runner
        num_hot = self.settings.resolve_hot_experts(self.pool.shape.num_experts)
        identity = self.settings.cold_precision == "full"
        self._digest = digest = model_digest(self.model_dir)
        losses, planned = LossTable.nominal(*self.pool_shape), None
        quantized = not identity and num_hot < self.pool.shape.num_experts
        if quantized:
            self._replicas = device_link.find_replicas(self.settings, self.model_dir, digest)
        if self._replicas is not None:
            losses = device_link.load_losses(self._replicas, self.pool.shape)
            planned = PlannedReplicas.of(self._replicas)
        agreement = Agreement(
            self.pool.shape, self.hardware, full_precision=identity, quantized=quantized, replicas=planned
        )
        self.device = DeviceLink(self.settings, agreement, self.model_dir, digest, self._replicas)
        self.balancer = self._make_balancer(self.device.served.group_size)
        self.planner = Planner(
            self, compat.policy_of(self.settings), Budget(num_hot, self.settings.avg_bits), losses, identity=identity
        )
        self.streamer = self._make_streamer()
        self.planner.start()

    def _make_balancer(self, group_size: int) -> Balancer | None:
        """None: hot experts never leave the GPU."""
        spill_bits = self.settings.resolve_spill_bits(self.pool.shape.num_experts)
        return Balancer(Costs(self.hardware, self.shape, group_size=group_size), spill_bits) if spill_bits else None

    def _make_streamer(self) -> Streamer:
        slots = self._by_index[0]
        if self.settings.pool == "checkpoint":
            return StagingStreamer(self.pool, slots.kernel, slots.w13, slots.w2)
        return PackedStreamer(self._packed_dir(slots), self.pool, slots.kernel, slots.w13.dtype)

    def _packed_dir(self, slots: HotSlots) -> Path:
        """The layout depends on the kernel, the dtype and the build of vLLM: each combination has its own copy."""
        isa, dtype = getattr(slots.kernel, "isa", "none"), str(slots.w13.dtype).removeprefix("torch.")
        return default_cache_dir(self._digest).with_name(f"{self._digest}-packed-{isa}-{dtype}-{vllm.__version__}")

    def create_sidecar(self, kv_cache_config: Any) -> None:
        """The KV cache's size is known: put the routing sidecar beside it and say what is effective."""
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(
                f"quantization 'ndp' needs one KV cache group, this model has {len(groups)} (hybrid attention)"
            )
        self.sidecar = RoutingSidecar(
            self.pool.shape.num_layers,
            kv_cache_config.num_blocks,
            groups[0].kv_cache_spec.block_size,
            self.pool.shape.top_k,
            self._by_index[0].w13.device,
        )
        if self.settings.record is not None:
            self.recorder = RunRecorder(self, Path(self.settings.record), self._digest)
            self.recorder.note_plan(0)
        residency.show(self.status())

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        global _current
        _current = self  # vLLM keeps one connector per process, whichever engine's step it reports
        spans = self.tracker.update(scheduler_output)
        if not spans:
            return
        self._step_start_s = time.perf_counter()
        self.device.check()
        self.totals.steps += 1
        if self.recorder is not None:
            self.recorder.note_requests(self.totals.steps, spans)
        self._replan()
        self.totals.preempted += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        self.step = StepContext(self, self.totals.steps, spans)
        self._reported = False

    def _replan(self) -> None:
        """For the prefills that ended in the step before, if their requests are still there."""
        self._planned = {}
        ended, self._ended = self._ended, []
        alive = [r for r in ended if self.tracker.requests.get(r.request_id) is r]
        if not alive:
            if ended:
                restored = self.planner.restore()
                self.clock.migrate(restored)
                self.totals.migrated_experts += restored
            return
        running = [r for r in self.tracker.requests.values() if r.score is not None]
        done = self.planner.replan(running)
        self.clock.migrate(done.migrated_experts)
        self.totals.prefills += len(alive)
        self.totals.migrated_experts += done.migrated_experts
        self.totals.kept_experts += done.kept_experts
        if self.recorder is not None:
            self.recorder.note_plan(self.totals.steps)
        for request in running:
            if request.bits is not None:
                self._planned[request.request_id] = {
                    "epoch": done.epoch,
                    "hot_experts": self.planner.budget.num_hot,
                    "avg_bits": request.bits.average if self.planner.budget.num_hot < self.pool_shape[1] else 0.0,
                }

    def take_report(self) -> StepReport | None:
        """Close the step's simulated clock; what happened, once per step."""
        step = self.step
        if step is None or self._reported or not step.started:
            return None
        self._reported = True
        tokens = tuple(span.request.request_id for span in step.spans.values() if span.yields_token)
        simulated = self.clock.end_step(len(tokens))
        pairs = step.pairs_by_request()
        if self.recorder is not None:
            self.recorder.note_step(step, simulated, time.perf_counter() - self._step_start_s)
        for counts in pairs.values():
            for kind, count in counts.items():
                self.totals.pairs[kind] += count
        return StepReport(simulated.start_ps, simulated.end_ps, tuple(step.spans), tokens, pairs, self._planned)

    def end_step(self) -> None:
        step, self.step = self.step, None
        if step is None:
            return
        if not self._reported and step.started:
            self.step = step
            self.take_report()
            self.step = None
        for span in step.spans.values():
            if span.ends_prefill:
                self.planner.score(span.request)
                span.request.prefilled = True
                self._ended.append(span.request)
        if self._ended and self.settings.migration == "kept":
            self.planner.note_streamed(list(self.tracker.requests.values()), step.streamed)

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None
        self.migrator.close()
        if hasattr(self, "device"):
            self.device.close()

    # -- what is effective ----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        num_hot = self.planner.budget.num_hot
        device = self.device.description
        return {
            "plugin_active": True,
            "engine_pid": os.getpid(),
            "device_pid": self.device.pid,
            "device_cores": self.device.cores,
            "device_address": self.device.address,
            "moe_layers": len(self._by_index),
            "model_layers": self.pool.shape.num_layers,
            "experts": self.pool.shape.num_experts,
            "hot_experts": num_hot,
            "cold_experts": self.pool.shape.num_experts - num_hot,
            "hot_bytes": sum(slots.num_bytes for slots in self._by_index.values()),
            "staging_bytes": self.streamer.staging_bytes,
            "pool_bytes": self.pool.mapped_bytes,
            "pool": self.streamer.description,
            "sidecar_bytes": self.sidecar.num_bytes,
            "device_bytes": device.resident_bytes,
            "kernel": device.kernel + (" (a slow check)" if device.kernel == "reference" else ""),
            "cold_precision": self.settings.cold_precision,
            "replicas": f"{device.replicas} in {self._replicas}" if self._replicas else "none needed",
            "hardware": device.hardware,
            "pe_mode": device.pe_mode,
            "policy": self.settings.policy,
            "gain": self.settings.gain,
            "avg_bits": self.settings.avg_bits,
            "bits_for": self.settings.bits_for,
            "execution": self._execution(),
            "hardware_overrides": "".join(f", {k}={v}" for k, v in self.settings.hardware_overrides.items()),
            "slot_kernel": getattr(self._by_index[0].kernel, "isa", "triton"),
            "record": self.settings.record or "off",
            "report": "in kv_transfer_params['ndp']"
            if self._report_on
            else "off (a KV connector of yours, or report=false)",
        }

    def _execution(self) -> str:
        if self.balancer is not None:
            return f"balanced: hot experts also on the device, at {self.balancer.offload_bits} bits, where faster"
        return "paper: hot experts on the GPU only" if self.planner.budget.num_hot else "every expert on the device"

    def totals_dict(self) -> dict[str, Any]:
        totals = self.totals
        return {
            "steps": totals.steps,
            "prefills": totals.prefills,
            "migrated_experts": totals.migrated_experts,
            "kept_experts": totals.kept_experts,
            "preempted": totals.preempted,
            "row_checks": totals.row_checks,
            "sidecar_mismatches": totals.sidecar_mismatches,
            **{f"{kind}_pairs": count for kind, count in totals.pairs.items()},
            "device_state": self.device.client.state,
            "simulated_ps": self.clock.now_ps,
        }


def _whole_model(vllm_config: VllmConfig, pool: ExpertsPool) -> WholeModel:
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    return WholeModel.of_experts(
        pool.shape,
        dtype=str(model.dtype).removeprefix("torch."),
        num_heads=model.get_num_attention_heads(parallel),
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        vocab_size=model.get_vocab_size(),
    )
