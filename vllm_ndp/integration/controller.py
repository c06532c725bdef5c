"""One worker of the plugin, whose model is loaded and whose KV cache exists: frames every step, and tells of it.

* while the model loads    assembly.attach    each MoE layer hands over its hot slots
* model loaded             assembly.finish    find the device, make the first placement, connect the layers
* KV cache sized           NdpController      put the routing sidecar beside it, say what is effective
* every step               step               replan, run, report, score
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.machine_memory import process_memory
from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.integration import compat, vllm_private
from vllm_ndp.integration.assembly import LoadedWorker
from vllm_ndp.integration.batch import RowLocator, TrackedRequest
from vllm_ndp.integration.cuda import limits
from vllm_ndp.integration.cuda.layer import WholeStep
from vllm_ndp.integration.cuda.streams import Arrival, make_stream, pinned_for
from vllm_ndp.integration.device_link import DeviceView
from vllm_ndp.integration.host_replicas import HostExperts
from vllm_ndp.integration.recording import RunRecorder, run_provenance
from vllm_ndp.integration.report import DEVICE_TIME, PHASES, StepReport, counts_of
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.integration.serving import status
from vllm_ndp.integration.serving.status import FinishedRequests
from vllm_ndp.integration.step import Step, StepParts
from vllm_ndp.layer.setup import Scheduling
from vllm_ndp.layer.split import PAIR_KINDS, Pairs

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_current: NdpController | None = None


def current_controller() -> NdpController:
    """Return the controller of the engine that runs its step in this process."""
    if _current is None:
        raise ConfigError("no engine with quantization 'ndp' runs in this process")
    return _current


class NdpController:
    def __init__(self, worker: LoadedWorker, kv_cache_config: Any) -> None:
        global _current
        facts, parts, self.worker = worker.facts, worker.parts, worker
        group = compat.full_attention_group(kv_cache_config, facts.vllm_config.model_config.max_model_len)
        shape = facts.pool.shape
        held, num_blocks = parts.hot.layers[0].held, kv_cache_config.num_blocks
        sidecar = RoutingSidecar(shape.num_layers, shape.top_k, held.w13.device, num_blocks, group.block_size)
        locator = RowLocator(worker.runner, group, worker.late_check)
        send = None
        if parts.messenger is not None:
            send = partial(Arrival, make_stream(held.w13.device), pinned_for(held.w13.device))
        self._kv_cache_bytes = compat.kv_cache_bytes(kv_cache_config)
        self.steps = StepParts(shape.num_layers * shape.top_k, worker.run, locator, sidecar, send)
        if sidecar.on_host is not None and send is None:
            worker.run.splitter.note_into(*sidecar.on_host)
        if parts.running.captures_whole_steps:
            parts.running.whole = self._make_whole_step()
        self.log = StepLog(worker, self._open_recorder(num_blocks, group.block_size))
        self.log.note_plan(0)
        self.last_planned: list[TrackedRequest] = []  # under the plan in force; they may have ended
        _current = self
        facts.opened.callback(self._close)
        if facts.ranks.leads:
            status.show(self.status())

    def _open_recorder(self, num_blocks: int, block_size: int) -> RunRecorder | None:
        facts = self.worker.facts
        if facts.settings.record is None or not facts.ranks.leads:
            return None
        limits, stage = facts.vllm_config.scheduler_config, facts.ranks.stage
        tokens, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
        scheduling = Scheduling(
            max_num_batched_tokens=tokens, max_num_seqs=sequences, block_size=block_size, kv_blocks=num_blocks - 1
        )
        directory = Path(facts.settings.record)
        if stage.count > 1:
            directory /= f"stage-{stage.index}"
        return RunRecorder(directory, run_provenance(self.worker, scheduling), self.steps.sidecar)

    def _make_whole_step(self) -> WholeStep:
        """What vLLM captures with our layers in it. Raises ConfigError where a layer cannot be captured."""
        facts, parts, locator, sidecar = self.worker.facts, self.worker.parts, self.steps.locator, self.steps.sidecar
        layers = [layer.aside for layer in self.worker.layers if layer.aside is not None]
        if parts.weighs_input:
            raise ConfigError(limits.cannot_capture("layers whose router weighs their input"))
        if parts.messenger is None:
            raise ConfigError(
                limits.cannot_capture(f"execution {facts.settings.execution!r}, which waits for the host")
            )
        stand_in: list[HostExperts] = []

        def compute(layer: int, x: NDArray[np.float32], pairs: Pairs) -> NDArray[np.float32]:
            if (link := parts.device.link) is not None and (found := link.stand_in(layer, x, pairs)) is not None:
                return found
            if not stand_in:
                stand_in.append(HostExperts(facts.model_dir, None, facts.kernel, facts.layers))
            return stand_in[0].execute(layer, x, pairs._replace(bits=np.full_like(pairs.bits, FULL_PRECISION_BITS)))

        vllm_private.full_graphs_where(self.worker.runner, self._fits_a_graph)
        return WholeStep(
            layers,
            parts.messenger,
            lambda layer: sidecar.note(layer, locator.entries()),
            parts.hot.wait_for_all,
            compute,
        )

    def _fits_a_graph(self) -> bool:
        """Whether the running step, if there is one, may be a captured one: each of its rows decodes a request."""
        step = self.worker.parts.running.step
        return step is None or all(
            span.num_tokens == 1 and span.start >= span.first_decode for span in step.spans.values()
        )

    def begin_forward(self, forward_context: Any) -> None:
        """vLLM is about to run the model: if it replays a graph with our layers in it, get ready to answer them."""
        running = self.worker.parts.running
        if running.whole is None or running.step is None:
            return
        if getattr(forward_context.cudagraph_runtime_mode, "name", "") == "FULL":
            running.whole.begin(running.step, forward_context.batch_descriptor.num_tokens)

    def end_forward(self) -> None:
        """It has launched it."""
        if (whole := self.worker.parts.running.whole) is not None:
            whole.serve()

    def _close(self) -> None:
        global _current
        if self.log.recorder is not None:
            self.log.recorder.close()
        if _current is self:
            _current = None

    @property
    def device(self) -> DeviceView:
        return self.worker.parts.device

    # -- steps ----------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Frame one forward pass: every MoELayer.forward happens inside."""
        global _current
        _current = self  # vLLM keeps one connector per process, whichever engine's step it reports
        parts, log = self.worker.parts, self.log
        group, sidecar = self.steps.locator.group, self.steps.sidecar
        for load in getattr(scheduler_output.kv_connector_metadata, "loads", ()):  # of another connector
            sidecar.forget(load.blocks[group.index][load.num_local // group.block_size :])
        if copies := getattr(scheduler_output, "kv_cache_block_copies", None):  # of later versions
            sidecar.copy_blocks(copies)
        spans = self.worker.requests.update(scheduler_output, group.index)
        if not spans:
            yield
            return
        began_s = time.perf_counter()
        log.steps += 1
        log.preempted += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        if parts.device.link is not None:
            parts.device.link.revive()
        if log.recorder is not None:
            log.recorder.note_requests(log.steps, spans, self.worker.requests.requests.keys())
        planned = parts.planner.replan()
        plan_s = time.perf_counter() - began_s if planned else None
        plans = self._describe(planned)
        if (ranks := self.worker.facts.ranks).size > 1:
            self.device.agreed = ranks.agree(devices_up=self.device.up, plans=parts.planner.checksum)
        step = parts.running.step = Step(log.steps, spans, self.steps, began_s, plan_s, plans, log.settle)
        try:
            with self.worker.threads.of(spans.values()):
                yield
            log.leave(step)
            parts.planner.score_ended(step)
        except BaseException:
            step.abandon()
            raise
        finally:
            parts.running.step = None

    def take_report(self) -> StepReport | LateReport | None:
        """Return the report of the running step, or of the last one, once, as the leader tells it."""
        running = self.worker.parts.running.step
        return self.log.take_left() if running is None else self.log.close(running)

    def _describe(self, planned: dict[str, TrackedRequest]) -> dict[str, dict[str, Any]]:
        """New plans for the report and the recording, by request."""
        if not planned:
            return {}
        self.last_planned = list(planned.values())
        self.log.note_plan(self.log.steps)
        replanner, slot_bits = self.worker.run.planner, self.worker.facts.settings.slot_bits
        placement = replanner.placement
        num_hot, num_warm = status.per_layer(placement.hot), status.per_layer(placement.warm)
        return {
            name: {
                "epoch": request.plan.epoch,
                "hot_experts": num_hot,
                "warm_experts": num_warm,
                "loaded_tokens": request.num_loaded,
                "prices": self.worker.facts.settings.prices,
                "avg_bits": round(request.plan.bits_read(request.score.values, request.score.weights), 6)
                if placement.num_cold.any()
                else 0.0,
                "predicted_nats": replanner.predicted_nats(slot_bits, request.score, request.plan),
            }
            for name, request in planned.items()
            if request.plan is not None and request.score is not None
        }

    # -- what is effective ----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return status.status(self.worker, self.steps.sidecar, self._kv_cache_bytes)

    def totals_dict(self) -> dict[str, Any]:
        """Sums since the start."""
        planner, locator, log = self.worker.parts.planner, self.steps.locator, self.log
        log.settle()

        def labelled(key: str) -> dict[str, float]:
            return {name.partition(":")[2]: count for name, count in log.sums.items() if name.startswith(f"{key}:")}

        return {
            "prefills": planner.prefills,
            "migrated_experts": planner.migrated_experts,
            "kept_experts": planner.kept_experts,
            "row_checks": locator.row_checks,
            "sidecar_mismatches": locator.mismatches,
            "device_state": self.device.state,
            "simulated_ps": None if log.unsimulated else self.worker.run.clock.now_ps,
            "steps": log.steps,
            "preempted": log.preempted,
            **{f"{phase}_rows": log.sums[f"rows:{phase}"] for phase in PHASES},
            **{f"{kind}_pairs": log.sums[f"pairs:{kind}"] for kind in PAIR_KINDS},
            "fallback_causes": labelled("why"),
            "simulated_device": labelled("device") if log.has_device_times else None,
            "simulated_device_bound": labelled("bound"),
        }

    def live(self, latest: int) -> dict[str, Any] | None:
        """Return what goes on now, and the reports of requests that ended last; None where another rank tells."""
        if (link := self.device.link) is None:
            return None
        return {
            "effective": self.status(),
            "totals": self.totals_dict(),
            "device": link.members.look(link.state),
            "memory": {"engine": process_memory([os.getpid()]), "device": process_memory(link.members.pids)},
            "plan": status.plan_in_force(self.worker.run.planner, self.last_planned),
            "running": status.running(self.worker.requests),
            "finished": self.log.finished.latest(latest),
        }


# -- the log of steps --------------------------------------------------------------------------------------------------


_MOST_LATE = 2
"""Reports: vLLM launches one step while another one's tokens are on their way."""


class LateReport:
    """Report of a step that waited for nothing: made when the scheduler reads it, which has the step's tokens then."""

    def __init__(self, step: Step, settle: Callable[[int], None]) -> None:
        self.step, self._settle = step, settle
        self.made: StepReport | None = None

    def get(self) -> StepReport:
        self._settle(self.step.number)
        assert self.made is not None
        return self.made


class StepLog:
    def __init__(self, worker: LoadedWorker, recorder: RunRecorder | None) -> None:
        """recorder: None where nothing is recorded."""
        self._worker, self.recorder = worker, recorder
        self.finished = FinishedRequests()
        self.steps = 0  # that have begun
        self.preempted = 0  # requests that came back after a preemption
        self.sums: defaultdict[str, float] = defaultdict(int)  # counts_of
        self.has_device_times = True  # every answer of the device so far had one
        self.unsimulated = worker.unsimulated  # what ran so far and is in no simulated clock
        self._late = deque[LateReport]()  # in the order of their steps
        self._left: StepReport | LateReport | None = None  # of the step that has ended, if nobody has asked for it yet
        self._ended_ps = 0
        self._counted = (0, 0, 0)  # of the planner, by the reports so far

    def close(self, step: Step) -> StepReport | LateReport | None:
        """Report of a step, once, as the leader tells it. Waits for no step that waited for nothing itself."""
        if self._late and self._late[-1].step is step:
            return None
        if not (step.waits_for_nothing and self._may_be_late):
            self.settle()
            return self._close(step)
        step.send_routing()
        if len(self._late) == _MOST_LATE:
            self.settle(self._late[0].step.number)
        self._late.append(LateReport(step, self.settle))
        return self._late[-1]

    @property
    def _may_be_late(self) -> bool:
        """Nobody reads the step's entries before the next one, and the scheduler is in this process."""
        facts = self._worker.facts
        is_here = facts.vllm_config.parallel_config.distributed_executor_backend == "uni"
        return is_here and self.recorder is None

    def settle(self, last: int | None = None) -> None:
        """Make the reports that are late, in order, up to that of this step."""
        while self._late and (last is None or self._late[0].step.number <= last):
            late = self._late.popleft()
            late.made = self._close(late.step)

    def _close(self, step: Step) -> StepReport | None:
        """Close the step's simulated clock."""
        if (closed := step.report()) is None:
            return None
        report, time_of_step = closed
        ranks = self._worker.facts.ranks
        report.stage, report.before_ps, self._ended_ps = ranks.stage.index, self._ended_ps, report.end_ps
        self._note_costs(step, report)
        if report.device is None:
            self.unsimulated = self.unsimulated or DEVICE_TIME
        report.unsimulated = self.unsimulated
        if self.recorder is not None:
            device, epoch = self._worker.parts.device, self._worker.run.planner.epoch
            assert device.link is not None  # the leader's
            took_s = time.perf_counter() - step.began_s
            simulated = None if self.unsimulated else time_of_step
            self.recorder.note_step(step, epoch, simulated, took_s, device.link.take_availability())
        for key, count in counts_of(report).items():
            self.sums[key] += count
        self.has_device_times &= report.device is not None
        return report if ranks.leads else None

    def leave(self, step: Step) -> None:
        """The step has ended, whether or not somebody asked for its report: model runner V2 asks when it samples."""
        self._left = self.close(step)

    def take_left(self) -> StepReport | LateReport | None:
        left, self._left = self._left, None
        return left

    def _note_costs(self, step: Step, report: StepReport) -> None:
        """Costs of the planner before the step, and times of the device's answers."""
        planner, device, before = self._worker.parts.planner, self._worker.parts.device, self._counted
        self._counted = planner.migrated_experts, planner.kept_experts, planner.prefills
        spent = (now - then for now, then in zip(self._counted, before, strict=True))
        report.migrated_experts, report.kept_experts, report.prefills = spent
        report.plan_s, report.device_up = step.plan_s, any(device.up)
        if device.link is not None:
            report.round_trips_s, report.fallbacks = device.link.take_round_trips(), device.link.take_fallbacks()

    def note_plan(self, step: int) -> None:
        """A plan is in force from this step on."""
        if self.recorder is not None:
            replanner, requests = self._worker.run.planner, self._worker.requests.requests
            plans = {name: request.plan for name, request in requests.items() if request.plan is not None}
            self.recorder.note_plan(step, replanner.epoch, replanner.placement, plans)

    def note_sampled(self, output: Any) -> None:
        """The tokens of the step are known: a recording of drafts needs to know which of them were accepted.

        Model runner V2 hands over what is still on its way to the host, without names: there it is not known yet.
        """
        names = getattr(output, "req_ids", None)
        if self.recorder is not None and names and (sampled := output.sampled_token_ids):
            self.recorder.note_sampled({name: len(tokens) for name, tokens in zip(names, sampled, strict=True)})
