"""A KV connector that moves no KV: it only lets a finished request carry its report back to whoever asked.

Worker side: hand over the step's report. Scheduler side: collect them and attach `{"ndp": {...}}` to the finished
request (`RequestOutput.kv_transfer_params`, and the field of the same name in OpenAI responses that do not stream).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_ndp.integration.controller import current_controller
from vllm_ndp.integration.report import RequestReport, StepReport, of_all_stages
from vllm_ndp.simulation.pipeline import PipelineClock

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class NoMetadata(KVConnectorMetadata):
    """The scheduler has nothing to tell the worker."""


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    reports: list[StepReport]
    """Of one step: one of each stage, from its leader."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return StepReports(self.reports + other.reports) if isinstance(other, StepReports) else self


class NdpConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._requests: dict[str, tuple[Request, RequestReport]] = {}
        self._pipeline = PipelineClock(vllm_config.parallel_config.pipeline_parallel_size)
        self._finished: dict[str, tuple[dict[str, Any], int]] = {}  # answers to complete after the last step's report

    # -- worker side ----------------------------------------------------------------------------------------------

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = current_controller().take_report()
        return None if report is None else StepReports([report])

    def has_connector_metadata(self) -> bool:
        """Never, as attention layers see it: they then skip their two calls to us, in each layer of each step."""
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    # -- scheduler side -------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return NoMetadata()

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request, RequestReport(request.arrival_time, request.num_prompt_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Runs once per step, after sampling and after `request_finished` of the requests that ended in it."""
        now = time.time()
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, StepReports):
            step = of_all_stages(meta.reports, self._pipeline)
            for request_id in step.pairs:
                if request_id in self._requests:
                    request, report = self._requests[request_id]
                    if report.add(request_id, step, request.num_output_tokens, now):
                        self._pipeline.note_token(request_id, step.end_ps)
        for request_id, (answer, output_tokens) in self._finished.items():
            answer["ndp"] = self._requests.pop(request_id)[1].as_dict(output_tokens)
            self._pipeline.forget(request_id)
        self._finished.clear()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id not in self._requests:
            return False, None
        # vLLM asks now but sends the answer later in the same step: hand out the dict and fill it when the last
        # step's report is in (update_connector_output). An aborted request never gets one.
        answer: dict[str, Any] = {"ndp": {}}
        if request.status.name == "FINISHED_ABORTED":
            del self._requests[request.request_id]
            self._pipeline.forget(request.request_id)
            return False, None
        self._finished[request.request_id] = (answer, request.num_output_tokens)
        return False, answer

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, list(block_ids[0]) if block_ids else [])
