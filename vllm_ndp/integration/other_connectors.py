"""vLLM's MultiConnector, which also says into which KV blocks another connector loads.

The routing of what is loaded was never noted here (routing_sidecar.py), whatever role the connector has. Scheduler
side: remember the blocks of every load that vLLM admits. Worker side: find them in the scheduler's message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


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


def loads_of(scheduler_output: SchedulerOutput) -> Sequence[Load]:
    """What a connector loads in this step or beside it."""
    meta = scheduler_output.kv_connector_metadata
    return meta.loads if isinstance(meta, Loads) else ()
