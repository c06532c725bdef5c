"""A KV connector that moves no KV: it only lets a finished request carry its report back to the client that asked.

Worker side: hand over the step's report. Scheduler side: collect the reports and attach `{"ndp": {...}}` to the
finished request. Clients find it in `RequestOutput.kv_transfer_params`, and in the field of the same name in OpenAI
responses that do not stream. Every finished report also goes to the worker with the next step, where the front end can
ask for it. Counts of the step go to vLLM's own /metrics (serving/metrics.py).

Beside a connector of the user's it is a part of vLLM's MultiConnector, which here also says into which KV blocks the
other one loads: the routing of what is loaded was never noted (routing_sidecar.py), whatever role that connector has.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.request import RequestStatus

from vllm_ndp.cost_model.gpu_timing import PipelineClock
from vllm_ndp.integration.controller import LateReport, current_controller
from vllm_ndp.integration.report import RequestReport, StepReport, of_all_stages
from vllm_ndp.integration.serving.metrics import NdpMetrics, NdpStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


FINISHES = {
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "aborted",
    RequestStatus.FINISHED_ERROR: "error",
}
"""How a request ended, by the engine."""


@dataclass
class FinishedReports(KVConnectorMetadata):
    """Reports of requests that have ended since the step before, by vLLM's id."""

    reports: dict[str, dict[str, Any]]
    step: int
    """Number of the step that it comes with, by the scheduler."""


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    reports: list[StepReport | LateReport]
    """Reports of one step, one from the leader of each stage. Late ones never leave their process."""
    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return StepReports(self.reports + other.reports, self.step) if isinstance(other, StepReports) else self


class MovesNoKv(KVTransferConfig):
    """A connector's configuration whose engine still makes all KV itself, whatever role vLLM wants to be named.

    A consumer's prompts may come as embeddings, so vLLM would turn multimodal inputs on where the user turned them off.
    """

    @property
    def is_kv_consumer(self) -> bool:
        return False


def _count_appended(request: Request, report: RequestReport) -> None:
    """Count tokens as vLLM appends them: it forgets a part's before the report of its last step is in."""
    append = request.append_output_token_ids
    report.appended = 0

    def counted(token_ids: int | list[int]) -> None:
        append(token_ids)
        report.appended = (report.appended or 0) + (1 if isinstance(token_ids, int) else len(token_ids))

    request.append_output_token_ids = counted


def _finish_of_part(request: Request) -> str:
    """How the part of a session's input ended that was answered last; empty while it is being answered."""
    if request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
        return ""
    return "length" if request.num_output_tokens >= request.max_tokens else "stop"


class NdpConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._requests: dict[str, tuple[Request, RequestReport]] = {}
        self._pipeline = PipelineClock(vllm_config.parallel_config.pipeline_parallel_size)
        self._num_steps = 0  # scheduled
        self._reported_step = 0
        self._running_step = 0  # on the worker
        self._ended: dict[str, dict[str, Any] | None] = {}  # requests whose steps are not all in, and their answers
        self._untold: dict[str, dict[str, Any]] = {}  # complete reports that the worker has not got yet
        self._stats = NdpStats()

    # -- worker side ----------------------------------------------------------------------------------------------

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = current_controller().take_report()
        return None if report is None else StepReports([report], self._running_step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, FinishedReports):
            self._running_step = connector_metadata.step
            if connector_metadata.reports:
                current_controller().log.finished.note(connector_metadata.reports)

    def has_connector_metadata(self) -> bool:
        """Never, as attention layers see it: they then skip their two calls to us, in each layer of each step."""
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        current_controller().begin_forward(forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        current_controller().end_forward()

    # -- scheduler side -------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        told, self._untold = self._untold, {}
        self._num_steps += 1
        for request_id in scheduler_output.num_scheduled_tokens:
            if request_id in self._requests:
                request, report = self._requests[request_id]
                report.last_step = self._num_steps
                if request.num_prompt_tokens != report.prompt_end:  # what is computed here are parts before this one
                    report.begin_part(
                        request.num_prompt_tokens, request.num_prompt_tokens - request.num_computed_tokens
                    )
        return FinishedReports(told, self._num_steps)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must take one more step: reports go to the worker with the next."""
        return bool(self._untold)

    def on_new_request(self, request: Request) -> None:
        prompt_len = request.num_prompt_tokens
        report = RequestReport(request.arrival_time, prompt_len, prompt_end=prompt_len)
        if getattr(request, "resumable", False):
            _count_appended(request, report)
        self._requests[request.request_id] = request, report

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Runs once per step, after sampling and after `request_finished` of the requests that ended in it."""
        now = time.time()
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, StepReports):
            made = [report.get() if isinstance(report, LateReport) else report for report in meta.reports]
            step = of_all_stages(made, self._pipeline)
            self._reported_step = meta.step
            self._stats.add_step(step)
            for request_id, plan in step.plans.items():  # in a pipeline the step after a prompt's may be of others
                if request_id in self._requests:
                    self._requests[request_id][1].plan.update(plan)
            for request_id in step.pairs:
                if request_id in self._requests:
                    request, report = self._requests[request_id]
                    if report.add(request_id, step, request.num_output_tokens, now):
                        self._pipeline.note_token(request_id, step.end_ps)
                    if report.appended is not None:
                        report.part_finish = _finish_of_part(request)
            for request_id in [name for name in self._ended if self._requests[name][1].last_step <= meta.step]:
                self._close(request_id)
        for request_id, answer in self._ended.items():
            if answer is not None:  # it leaves now; a step that still runs is in the report that the worker gets
                answer.update(self._report(request_id))
                self._ended[request_id] = None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id not in self._requests:
            return False, None
        # Its last step may run still, so the report is complete when that step's is in (update_connector_output).
        # Aborted by the client, or by the front end that saw a stop string: the answer has left without a report.
        # The report is filled in where it lies: vLLM may have put it into an answer of several connectors.
        answer: dict[str, Any] | None = None if request.status is RequestStatus.FINISHED_ABORTED else {}
        self._ended[request.request_id] = answer
        if answer is None and self._requests[request.request_id][1].last_step <= self._reported_step:
            self._close(request.request_id)
        return False, None if answer is None else {"ndp": answer}

    def _report(self, name: str) -> dict[str, Any]:
        request, report = self._requests[name]
        finish = FINISHES.get(request.status, "stop")
        if finish == "aborted" and request.num_prompt_tokens == report.prompt_end:
            finish = report.part_finish or finish  # vLLM aborts a session that waits for input when there is no more
        if finish == "aborted" and request.sampling_params is not None and request.sampling_params.stop:
            finish = "stop"  # the front end found a stop string; a client that left looks the same from here
        return report.as_dict(request.num_output_tokens, finish)

    def _close(self, name: str) -> None:
        """A request has ended, and so have its steps: tell the client, /metrics and the worker."""
        report, answer = self._report(name), self._ended.pop(name)
        if answer is not None:
            answer.update(report)
        del self._requests[name]
        self._pipeline.forget(name)
        self._stats.add_request(report)
        self._untold[name] = report

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, list(block_ids[0]) if block_ids else [])

    # -- metrics: taken from the scheduler side, used in the front end ------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats, self._stats = self._stats, NdpStats()
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """For vLLM's log line of every ten seconds, which would show sums without a name: nothing."""
        return NdpStats()

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVConnectorPromMetrics:
        return NdpMetrics(*arguments)


# -- beside another connector ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """KV of one request that a connector brings."""

    blocks: tuple[list[int], ...]
    """All blocks of the request, for each group of KV blocks."""
    num_local: int
    """Tokens before it, whose KV was made here; whole blocks."""


@dataclass
class Loads(multi_connector.MultiKVConnectorMetadata):
    """What the parts say to their workers, and what is loaded from now on."""

    loads: tuple[Load, ...] = ()


class MultiConnector(multi_connector.MultiConnector):
    """The name is vLLM's, because vLLM asks for it in several places."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_local = 0  # of the request that is being scheduled
        self._loads: list[Load] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._num_local = num_computed_tokens
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:  # it was asked for in the same turn of the scheduler
            self._loads.append(Load(blocks.get_block_ids(), self._num_local))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> multi_connector.MultiKVConnectorMetadata:
        loads, self._loads = self._loads, []
        return Loads(**vars(super().build_connector_meta(scheduler_output)), loads=tuple(loads))
