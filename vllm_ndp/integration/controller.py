"""One worker of the plugin, whose model is loaded and whose KV cache exists: frames every step, and tells of it.

* while the model loads    assembly.attach    each MoE layer hands over its hot slots
* model loaded             assembly.finish    find the device, make the first placement, connect the layers
* KV cache sized           NdpController      put the routing sidecar beside it, say what is effective
* every step               step               replan, run, report, score
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.integration import compat, startup_table, vllm_private
from vllm_ndp.integration.assembly import LoadedWorker
from vllm_ndp.integration.batch import RowLocator, TrackedRequest
from vllm_ndp.integration.cuda import limits
from vllm_ndp.integration.cuda.streams import Arrival, make_stream, pinned_for
from vllm_ndp.integration.cuda.whole_step import WholeStep
from vllm_ndp.integration.device_link import DeviceView
from vllm_ndp.integration.host_replicas import HostExperts
from vllm_ndp.integration.recording import RunRecorder, run_provenance
from vllm_ndp.integration.report import StepReport
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.integration.serving import live
from vllm_ndp.integration.serving.live import made_of
from vllm_ndp.integration.step import Before, Step, StepParts
from vllm_ndp.integration.step_log import LateReport, StepLog
from vllm_ndp.layer.setup import Scheduling
from vllm_ndp.layer.split import Pairs

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
        self._kv_cache_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
        self.steps = StepParts(shape.num_layers * shape.top_k, worker.run, locator, sidecar, send)
        if sidecar.on_host is not None and send is None:
            worker.run.splitter.note_into(*sidecar.on_host)
        if parts.running.captures_whole_steps:
            parts.running.whole = self._make_whole_step()
        self.log = StepLog(worker, self._open_recorder(num_blocks, group.block_size))
        self.log.note_plan(0)
        self._last_planned: list[TrackedRequest] = []  # under the plan in force; they may have ended
        _current = self
        facts.opened.callback(self._close)
        if facts.ranks.leads:
            startup_table.show(self.status())

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
        before = Before(began_s, plan_s, self._describe(planned))
        self._agree_among_ranks()
        step = parts.running.step = Step(log.steps, spans, self.steps, before, log.settle)
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

    def _agree_among_ranks(self) -> None:
        ranks, device = self.worker.facts.ranks, self.device
        if ranks.size > 1:
            device.agreed = ranks.agree(devices_up=device.up, plans=self.worker.parts.planner.checksum)

    def take_report(self) -> StepReport | LateReport | None:
        """Return the report of the running step, or of the last one, once, as the leader tells it."""
        running = self.worker.parts.running.step
        return self.log.take_left() if running is None else self.log.close(running)

    def _describe(self, planned: dict[str, TrackedRequest]) -> dict[str, dict[str, Any]]:
        """New plans for the report and the recording, by request."""
        if not planned:
            return {}
        self._last_planned = list(planned.values())
        self.log.note_plan(self.log.steps)
        replanner, slot_bits = self.worker.parts.planner.replanner, self.worker.facts.settings.slot_bits
        placement = replanner.placement
        num_hot, num_warm = live.per_layer(placement.hot), live.per_layer(placement.warm)
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
        return startup_table.status(self.worker, self.steps.sidecar, self._kv_cache_bytes)

    def totals_dict(self) -> dict[str, Any]:
        self.log.settle()
        planner, locator, is_simulated = self.worker.parts.planner, self.steps.locator, not self.log.unsimulated
        return {
            "prefills": planner.prefills,
            "migrated_experts": planner.migrated_experts,
            "kept_experts": planner.kept_experts,
            "row_checks": locator.row_checks,
            "sidecar_mismatches": locator.mismatches,
            "device_state": self.device.state,
            "simulated_ps": self.worker.run.clock.now_ps if is_simulated else None,
            **self.log.totals(),
        }

    def live(self) -> dict[str, Any] | None:
        """Return what goes on now, for a status page; None where another rank tells."""
        if (link := self.device.link) is None:
            return None
        status = self.status()
        return {
            "effective": status,
            "table": startup_table.rows(status),
            "totals": self.totals_dict(),
            "device": link.members.look(link.state),
            "memory": live.memory(link.members.pids),
            "plan": live.plan_in_force(self.worker.parts.planner.replanner, self._last_planned),
            "running": live.running(self.worker.requests),
        }

    def requests_of(self, client_id: str) -> dict[str, Any]:
        """Reports of what was made of a client's request, and which of it the scheduler has not taken back yet."""
        return {
            "finished": self.log.finished.find(client_id),
            "running": made_of(client_id, self.worker.requests.requests),
        }

    def experts(self) -> dict[str, Any] | None:
        """Return which experts are hot where, for each layer of this worker; None where another rank tells."""
        facts = self.worker.facts
        return (
            live.experts(self.worker.parts.planner.replanner, self._last_planned, facts.layers)
            if facts.ranks.leads
            else None
        )
