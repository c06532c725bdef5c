"""One worker of the plugin: builds its parts, frames every step, and closes them. The only owner.

while the model loads    attach      each MoE layer hands over its hot slots
model loaded             start       find the device, make the first placement, connect the layers
KV cache sized           allocate    put the routing sidecar beside it, say what is effective
every step               step        replan, run, report, score
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ndp_device.errors import ConfigError, NdpError
from vllm_ndp.integration import compat, startup_table
from vllm_ndp.integration.assembly import Assembly
from vllm_ndp.integration.batch import RequestTracker, RowLocator, TrackedRequest
from vllm_ndp.integration.checkpoint_dir import model_dir
from vllm_ndp.integration.compat import say
from vllm_ndp.integration.cuda import limits
from vllm_ndp.integration.cuda.layer import FixedOutput
from vllm_ndp.integration.cuda.messenger import Messenger
from vllm_ndp.integration.device_link import DeviceLink
from vllm_ndp.integration.host_cpu import HostCpuExperts
from vllm_ndp.integration.leaders_device import Device
from vllm_ndp.integration.moe_layer import LAYERS, LayerParts, MoELayer
from vllm_ndp.integration.planner import PlanRunner
from vllm_ndp.integration.recording import RunRecorder, run_provenance
from vllm_ndp.integration.report import StepCosts, StepReport
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.integration.serving import live
from vllm_ndp.integration.serving.finished import FinishedRequests, made_of
from vllm_ndp.integration.slot_pairs import HotViews
from vllm_ndp.integration.step import ModelSizes, RunningStep, Step
from vllm_ndp.integration.streamed_experts import StreamedExperts
from vllm_ndp.integration.totals import Totals
from vllm_ndp.layer.split import Splitter
from vllm_ndp.planning.replanner import Replanner
from vllm_ndp.simulation.balance import Balancer
from vllm_ndp.simulation.costs import Costs
from vllm_ndp.simulation.devices import DeviceRules, DevicesBalancer
from vllm_ndp.simulation.gpu_timing import StepClock
from vllm_ndp.simulation.live_rules import on_hardware
from vllm_ndp.simulation.prefill_split import PrefillSplit
from vllm_ndp.simulation.prices import MeasuredPrices
from vllm_ndp.traces.format import Provenance, Scheduling

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


class NdpController:
    def __init__(self, settings: NdpSettings, model_dir: Path, vllm_config: VllmConfig) -> None:
        self.settings, self.model_dir = settings, model_dir
        self.number = next(_numbers)
        self._make = make = Assembly(settings, model_dir, vllm_config)
        self.ranks, self.pool, self.layers, self.hot = make.ranks, make.pool, make.layers, make.hot
        self.hardware, self.shape = make.hardware, make.shape
        shape = self.pool.shape
        self.sizes = ModelSizes(shape.num_layers, shape.num_experts, shape.top_k)
        self.clock = StepClock(make.gpu_model)
        self.requests = RequestTracker()
        self.running = RunningStep()
        self.sidecar: RoutingSidecar
        self.locator: RowLocator
        self.device: Device
        self.planner: PlanRunner
        self.recorder: RunRecorder | None = None
        self.splitter: Splitter
        self._device_rules: DeviceRules | None = None  # where there are several
        self._operators: dict[int, str] = {}  # layer -> name
        self._layers: list[MoELayer] = []  # as long as the engine lives
        self._activation_bytes = torch.empty((), dtype=vllm_config.model_config.dtype).element_size()
        self._scheduler_config = vllm_config.scheduler_config
        self._messenger: Messenger | None = None
        self._host: HostCpuExperts | None = None
        self._graph_rows = limits.rows_in_graphs(vllm_config)
        self._has_report = vllm_config.kv_transfer_config is not None and settings.report
        self._unsimulated = compat.unsimulated(vllm_config)
        self._weighs_input = False
        self._prices: MeasuredPrices | None = None  # simulated ones
        self._planned: dict[str, dict[str, Any]] = {}  # before the running step, for its report
        self._step_start_s = 0.0
        self._ended_ps = 0
        self._left: StepReport | None = None  # of the step that has ended, where nobody has asked for it yet
        self.totals = Totals()
        self._opened = ExitStack()  # what is closed with the worker, the last first
        self.finished = FinishedRequests()
        self._last_planned: list[TrackedRequest] = []  # under the plan in force; they may have ended
        self._plan_s: float | None = None
        self._counted = (0, 0, 0)  # of the planner, by the reports so far

    @classmethod
    def create(cls, vllm_config: VllmConfig) -> NdpController:
        global _current
        _current = cls(compat.check(vllm_config), model_dir(vllm_config), vllm_config)
        return _current

    # -- start-up -------------------------------------------------------------------------------------------------

    def attach_layer(self, layer: Any) -> str:
        """Take a MoE layer whose weights would be ready; returns the name that its operator is called by."""
        index = compat.moe_index(layer, self.pool.layout, self.ranks.share) - self.layers.start
        self.hot.attach(index, layer)
        self._weighs_input = bool(layer.apply_router_weight_on_input)
        self._operators[index] = f"{self.number}:{layer.layer_name}"
        return self._operators[index]

    def start(self, runner: Any) -> None:
        """The model is loaded: find the device, make the first placement, connect the layers."""
        shape, settings = self.pool.shape, self.settings
        if len(self.hot.layers) != shape.num_layers:
            raise ConfigError(
                f"quantization 'ndp' was asked for but only {len(self.hot.layers)} of {shape.num_layers} "
                "MoE layers were attached: this model's layers do not go through vLLM's RoutedExperts"
            )
        make = self._make
        replicas, planned = make.agree_on_replicas()
        self.device = make.open_device(replicas, planned)
        self._opened.callback(self.device.close)
        offload_bits = self.device.offload_bits
        make.open_pool(replicas)
        self.sidecar = RoutingSidecar(shape.num_layers, shape.top_k, self.hot.layers[0].held.w13.device)
        self.locator = RowLocator(runner, make.make_late_check())
        losses, costs = make.load_losses(replicas), make.make_costs(self.device)
        self.clock.model = replace(self.clock.model, slot_bytes=costs.slot_bytes)
        shared = compat.shared_experts(runner.model)
        prices = self._prices = make.measure_prices(self.device, replicas, next(iter(shared.values()), None))
        rules = on_hardware(settings.planner_rules(shape.num_experts, losses), costs, settings.joint_tiers, prices)
        replanner = Replanner(rules, shape.num_layers, shape.num_experts)
        self.planner = PlanRunner(replanner, self.requests, self.sidecar, self.hot, self.device, self.clock)
        self.planner.start()
        self._device_rules = make.share_among_devices(self.device, costs)
        if self._graph_rows:
            limits.refuse_shared_experts_in_pieces(shared)
        self._host = make.make_host()
        self._messenger = make.make_messenger(offload_bits)
        if self._messenger is not None:
            self._opened.callback(self._messenger.close)
        held = self.hot.layers[0].held
        self.splitter = Splitter(
            self.hot.tiers,
            shape.top_k,
            balancers=self._balancers(costs, prices),
            prompts=PrefillSplit(costs, prices) if self.device.computes_prompts else None,
            host=costs if settings.has_warm_experts else None,
            bytes_of_width=costs.bytes_of_width if settings.plan == "joint" else None,
            weighs_input=self._weighs_input,
            aliases=self.hot.layers[0].aliases,
        )
        parts = LayerParts(
            self.hot,
            self.device,
            self.planner,
            self.sidecar,
            self.locator,
            self.running,
            HotViews(self.splitter, held.w13.device),
            StreamedExperts(self.hot, self.planner),
            self._host,
            self._messenger,
            self._weighs_input,
        )
        for index, name in self._operators.items():
            fixed = FixedOutput(self._graph_rows, held.w13) if self._graph_rows else None
            layer = MoELayer(index, parts, shared=shared.get(name.partition(":")[2]), fixed=fixed)
            self._layers.append(layer)
            LAYERS[name] = layer

    def _balancers(self, costs: Costs, prices: MeasuredPrices | None) -> list[Balancer | DevicesBalancer] | None:
        """The rule of each layer; None where hot experts never leave the GPU."""
        device, num_layers = self.device, self.sizes.num_layers
        if not device.offload_bits:
            return None
        rule = Balancer(costs, device.offload_bits, self.settings.device_hosts, prices)
        if device.devices is None:
            return [rule] * num_layers
        return [device.devices.balancer(rule, layer, device.counted_on) for layer in range(num_layers)]

    def allocate(self, kv_cache_config: Any) -> None:
        """The KV cache's size is known: put the routing sidecar beside it and say what is effective."""
        group = compat.full_attention_group(kv_cache_config)
        self.sidecar.allocate(kv_cache_config.num_blocks, group.block_size)
        self.requests.kv_group = group.index
        self.locator.group = group
        if self.sidecar.on_host is not None and self._messenger is None:
            self.splitter.note_into(*self.sidecar.on_host)
        if self.settings.record is not None and self.ranks.leads:
            scheduling = Scheduling(
                max_num_batched_tokens=self._scheduler_config.max_num_batched_tokens,
                max_num_seqs=self._scheduler_config.max_num_seqs,
                block_size=group.block_size,
                kv_blocks=kv_cache_config.num_blocks - 1,
            )
            directory = Path(self.settings.record)
            if self.ranks.stage.count > 1:
                directory /= f"stage-{self.ranks.stage.index}"
            self.recorder = RunRecorder(directory, self._provenance(scheduling), self.sidecar)
            self._record_plan(0)
        if self.ranks.leads:
            startup_table.show(self.status())

    # -- steps ----------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Frame one forward pass: every MoELayer.forward happens inside."""
        global _current
        _current = self  # vLLM keeps one connector per process, whichever engine's step it reports
        spans = self.requests.update(scheduler_output)
        if not spans:
            yield
            return
        self._step_start_s = time.perf_counter()
        self.totals.steps += 1
        self.totals.preempted += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        self.device.revive()
        if self.recorder is not None:
            self.recorder.note_requests(self.totals.steps, spans)
        planned = self.planner.replan()
        self._plan_s = time.perf_counter() - self._step_start_s if planned else None
        self._last_planned = list(planned.values()) or self._last_planned
        self._planned = self._describe(planned)
        if self.ranks.size > 1:
            plans = self.planner.checksum
            self.device.steer(self.ranks.agree(devices_up=self.device.up, plans=plans))
        self.running.step = Step(self.totals.steps, spans, self.sizes, self.clock, self.splitter)
        try:
            yield
            self._left = self._close_report()  # unless the connector already did: model runner V2 asks when it samples
            self.planner.score_ended(self.running.step)
        except BaseException:
            self.running.step.abandon()
            raise
        finally:
            self.running.step = None

    def note_sampled(self, output: Any) -> None:
        """The tokens of the step are known: a recording of drafts needs to know which of them were accepted.

        Model runner V2 hands over what is still on its way to the host, without names: there it is not known yet.
        """
        names = getattr(output, "req_ids", None)
        if self.recorder is not None and names and (sampled := output.sampled_token_ids):
            self.recorder.note_sampled({name: len(tokens) for name, tokens in zip(names, sampled, strict=True)})

    def take_report(self) -> StepReport | None:
        """What happened in the running step, or in the last one, once, as the leader tells it."""
        if self.running.step is not None:
            return self._close_report()
        left, self._left = self._left, None
        return left

    def _close_report(self) -> StepReport | None:
        """Close the running step's simulated clock; what happened in it, once."""
        step = self.running.step
        if step is not None and step.started:
            self.locator.settle()
        closed = None if step is None else step.report(self._planned)
        if step is None or closed is None:
            return None
        report, time_of_step = closed
        report.stage, report.before_ps, self._ended_ps = self.ranks.stage.index, self._ended_ps, report.end_ps
        report.costs = self._costs()
        if self.recorder is not None:
            epoch = self.planner.replanner.epoch
            assert isinstance(self.device, DeviceLink)  # the leader's
            took_s, devices_up = time.perf_counter() - self._step_start_s, self.device.take_presence()
            self.recorder.note_step(step, epoch, time_of_step, took_s, devices_up)
        self.totals.add(report)
        return report if self.ranks.leads else None

    def _costs(self) -> StepCosts:
        """Of the running step: what the planner did before it, and how long the device's answers took."""
        planner = self.planner
        before = self._counted
        self._counted = planner.migrated_experts, planner.kept_experts, planner.prefills
        migrated, kept, prefills = (now - then for now, then in zip(self._counted, before, strict=True))
        round_trips, is_up = self.device.take_round_trips(), any(self.device.up)
        return StepCosts(self._plan_s, round_trips, migrated, kept, prefills, is_up, self.device.take_fallbacks())

    def _describe(self, planned: dict[str, TrackedRequest]) -> dict[str, dict[str, Any]]:
        """New plans for the report and the recording, by request."""
        if not planned:
            return {}
        if self.recorder is not None:
            self._record_plan(self.totals.steps)
        placement = self.planner.replanner.placement
        num_hot, num_warm = live.per_layer(placement.hot), live.per_layer(placement.warm)
        return {
            name: {
                "epoch": request.plan.epoch,
                "hot_experts": num_hot,
                "warm_experts": num_warm,
                "prices": self.settings.prices,
                "avg_bits": request.plan.average_bits if placement.num_cold.any() else 0.0,
            }
            for name, request in planned.items()
            if request.plan is not None
        }

    def _record_plan(self, step: int) -> None:
        assert self.recorder is not None
        replanner = self.planner.replanner
        plans = {name: r.plan for name, r in self.requests.requests.items() if r.plan is not None}
        self.recorder.note_plan(step, replanner.epoch, replanner.placement, plans)

    def close(self) -> None:
        global _current
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None
        self.hot.close()
        self._opened.close()
        self._layers.clear()
        if _current is self:
            _current = None

    def add_device(self, address: str, keys: str | None) -> dict[str, Any]:
        """Between steps: one device more, which gets its part of the experts. Every rank must be asked.

        Where any rank cannot use it, all is as before, and `refused` says why in one sentence: to raise in one worker
        would leave the answers of the others in vLLM's queues.
        """
        refusal = ""
        if not self.settings.may_join:
            whole = ", and 'device_experts' as 'copies'" if self.settings.splits_experts else ""
            refusal = (
                f"the device at {address} cannot be added to this engine: start it with ndp setting 'devices' as a "
                f"list of addresses, perhaps of one{whole}"
            )
        elif isinstance(self.device, DeviceLink):
            try:
                self.device.members.reach_another(address, keys)
            except (NdpError, OSError) as error:
                refusal = str(error)
        if self.ranks.any_says(bool(refusal)):
            if isinstance(self.device, DeviceLink):
                self.device.members.leave_newcomer()
            return {"address": address, "refused": refusal or f"another rank refused the device at {address}"}
        devices = self.device.devices
        assert devices is not None
        self.clock.wait_until(self.clock.now_ps + devices.join(self.settings.device_copies))
        self.device.join()
        self._device_rules = devices.rules
        if self.recorder is not None:
            self.recorder.note_joined(self.totals.steps + 1, devices.rules.num_devices - 1)
        held = devices.copies
        if self.ranks.leads:
            copies = f"{held.num_copies} copies" if held.num_copies > 1 else "1 copy"
            say(f"the device at {address} has joined: {held.num_devices} devices, {copies} of each expert")
        return {"address": address, "refused": "", "copies_held": held.per_device.tolist()}

    # -- what is effective ----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return startup_table.status(
            self.settings,
            self.hot,
            self.device,
            self.sidecar,
            self.ranks,
            host=self._host,
            decode_layers=self._describe_layers(),
            has_report=self._has_report,
            unsimulated=self._unsimulated,
        )

    def _describe_layers(self) -> str:
        return "native" if self._messenger is None else f"asynchronous up to {self._messenger.most_rows} rows"

    def totals_dict(self) -> dict[str, Any]:
        return {
            "steps": self.totals.steps,
            "prefills": self.planner.prefills,
            "migrated_experts": self.planner.migrated_experts,
            "kept_experts": self.planner.kept_experts,
            "exchanges": self.planner.exchanges,
            "preempted": self.totals.preempted,
            "row_checks": self.locator.row_checks,
            "sidecar_mismatches": self.locator.mismatches,
            **{f"{phase}_rows": count for phase, count in self.totals.rows.items()},
            **{f"{kind}_pairs": count for kind, count in self.totals.pairs.items()},
            "fallback_causes": dict(self.totals.fallbacks),
            "device_state": self.device.state,
            "simulated_ps": None if self._unsimulated else self.clock.now_ps,
            "simulated_device": dict(self.totals.device),
            "simulated_device_bound": dict(self.totals.device_bounds),
        }

    def live(self) -> dict[str, Any] | None:
        """What goes on now, for a status page; None where another rank tells."""
        if not self.ranks.leads:
            return None
        assert isinstance(self.device, DeviceLink)
        return {
            "effective": self.status(),
            "totals": self.totals_dict(),
            "device": self.device.members.look(self.device.state),
            "memory": live.memory(self.device.members.pids),
            "plan": live.plan_in_force(self.planner.replanner, self._last_planned),
            "running": live.running(self.requests),
        }

    def requests_of(self, client_id: str) -> dict[str, Any]:
        """Reports of what was made of a client's request, and which of it the scheduler has not taken back yet."""
        return {
            "finished": self.finished.find(client_id),
            "running": made_of(client_id, self.requests.requests),
        }

    def experts(self) -> dict[str, Any] | None:
        """Who is hot where, layer by layer, of the layers that this worker runs; None where another rank tells."""
        if not self.ranks.leads:
            return None
        return live.experts(self.planner.replanner, self._last_planned, self.layers)

    def _provenance(self, scheduling: Scheduling) -> Provenance:
        assert isinstance(self.device, DeviceLink)  # the leader's
        return run_provenance(
            self.settings,
            self.pool.shape,
            self.model_dir,
            self._make.digest,
            hardware=self.hardware,
            model=self.shape,
            device=self.device,
            num_gpus=self.ranks.size,
            whole_experts=self.ranks.holds_whole_experts,
            stage=self.ranks.stage,
            device_rules=self._device_rules,
            activation_bytes=self._activation_bytes,
            scheduling=scheduling,
            prices=self._prices,
        )
