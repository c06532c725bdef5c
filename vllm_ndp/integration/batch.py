"""Finds who owns which row of a step, and where each request stands. Mirrors vLLM's scheduler from its own messages.

A row is prefill while its position lies inside the prompt, decode after it. Recomputing a preempted request therefore
repeats exactly what its first pass did. Drafts that are checked in the step that ends the prompt are prefill: no plan
exists yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.forward_context import get_forward_context

from vllm_ndp.integration.cuda.streams import LateCheck
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Plan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput


@dataclass(frozen=True)
class KvGroup:
    """The group of KV blocks that holds every position of a request: that of the layers with full attention."""

    index: int  # among the groups of this model, whose blocks a request has side by side
    block_size: int
    layer_name: str  # of one of its layers


@dataclass
class TrackedRequest:
    """One running request. `score` appears when its prefill has ended, `plan` before the step after that."""

    request_id: str
    prompt_len: int
    blocks: list[int]
    start: int = 0
    """Position of the first row of its last step."""
    num_output_tokens: int = 0
    prefilled: bool = False
    score: ImportanceScore | None = None
    num_loaded: int = 0
    """Tokens of the prompt whose KV a connector loaded, so that `score` does not know their routing."""
    plan: Plan | None = None


@dataclass(frozen=True)
class Span:
    """Rows that one request contributes to a step: positions start .. start + num_tokens - 1."""

    request: TrackedRequest
    start: int
    num_tokens: int
    is_drafted: bool = False  # whether the scheduler has handed it guesses of a proposer to check

    @property
    def ends_prefill(self) -> bool:
        return not self.request.prefilled and self.start + self.num_tokens >= self.request.prompt_len

    @property
    def first_decode(self) -> int:
        """The position from which on rows are decode rows."""
        return self.request.prompt_len if self.request.prefilled else self.start + self.num_tokens

    @property
    def num_drafts(self) -> int:
        """Rows after the last known token: guesses of a proposer, which this step checks."""
        return max(self.start + self.num_tokens - self._num_known, 0)

    @property
    def num_sampled_rows(self) -> int:
        """Rows whose logits are wanted: the last known token and the drafts; none where a chunk ends before it."""
        return self.num_drafts + 1 if self.start + self.num_tokens >= self._num_known else 0

    @property
    def _num_known(self) -> int:
        return self.request.prompt_len + self.request.num_output_tokens


class RequestTracker:
    def __init__(self) -> None:
        self.requests: dict[str, TrackedRequest] = {}

    def update(self, scheduler_output: SchedulerOutput, kv_group: int = 0) -> dict[str, Span]:
        """Apply one scheduler message; the spans it schedules, by request id. kv_group: whose blocks count."""
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            known, prompt_len = self.requests.get(new.req_id), _prompt_len(new)
            if known is None or known.prompt_len != prompt_len:
                known = self.requests[new.req_id] = TrackedRequest(new.req_id, prompt_len, [])
            known.blocks = list(new.block_ids[kv_group])
            known.start = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            blocks = cached.new_block_ids[index]
            start, is_resumed = cached.num_computed_tokens[index], request_id in cached.resumed_req_ids
            if request.prefilled and not is_resumed and start < min(request.start, request.prompt_len):
                # It goes back without a preemption, so loaded KV was bad: its end, score and plan do not count
                request = self.requests[request_id] = TrackedRequest(request_id, request.prompt_len, request.blocks)
            if is_resumed:
                request.blocks = list(blocks[kv_group]) if blocks else []
            elif blocks:
                request.blocks.extend(blocks[kv_group])
            request.num_output_tokens = cached.num_output_tokens[index]
            request.start = start
        drafts = scheduler_output.scheduled_spec_decode_tokens
        scheduled = ((self.requests[name], count) for name, count in scheduler_output.num_scheduled_tokens.items())
        return {
            request.request_id: Span(request, request.start, count, bool(drafts.get(request.request_id)))
            for request, count in scheduled
        }


def _prompt_len(new: NewRequestData) -> int:
    """Prompt length of a new request, whose message does not say it before vLLM 0.30."""
    if (length := getattr(new, "prompt_len", None)) is not None:
        return int(length)
    return len(new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds)


def row_order(runner: Any, spans: Mapping[str, Span]) -> list[str]:
    """Whose rows come first in the running step, by vLLM's runner, once it has updated its own state."""
    if (batch := getattr(runner, "input_batch", None)) is not None:  # model runner V1
        return [request_id for request_id in batch.req_ids if request_id in spans]
    from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids  # V2 keeps no batch: it sorts, and so do we

    tokens = {request_id: span.num_tokens for request_id, span in spans.items()}
    if "draft_tokens" not in inspect.signature(sort_batch_req_ids).parameters:  # before 0.28
        return list(sort_batch_req_ids(tokens, decode_query_len=runner.decode_query_len))
    drafted = {request_id: [0] for request_id, span in spans.items() if span.is_drafted}  # whether, not which
    return list(sort_batch_req_ids(tokens, drafted, decode_query_len=runner.decode_query_len))


@dataclass(frozen=True)
class BatchRows:
    """The rows of one step in the runner's order: T rows of R requests. Arrays are made when somebody asks for them."""

    spans: tuple[Span, ...]  # [R], row order

    @cached_property
    def num_rows(self) -> int:
        return sum(span.num_tokens for span in self.spans)

    @cached_property
    def all_decode(self) -> bool:
        return all(span.start >= span.first_decode for span in self.spans)

    @cached_property
    def owner(self) -> NDArray[np.int32]:
        """[T], index into spans."""
        return np.arange(len(self.spans), dtype=np.int32).repeat([span.num_tokens for span in self.spans])

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """[T]"""
        return np.concatenate([np.arange(s.start, s.start + s.num_tokens, dtype=np.int64) for s in self.spans])

    @cached_property
    def decode(self) -> NDArray[np.bool_]:
        """[T]"""
        if self.all_decode:
            return np.ones(self.num_rows, np.bool_)
        first = np.array([span.first_decode for span in self.spans], dtype=np.int64)
        return self.positions >= first[self.owner]

    @cached_property
    def first_rows(self) -> NDArray[np.int64]:
        """First row of each request [R]."""
        return np.cumsum([0, *(span.num_tokens for span in self.spans[:-1])], dtype=np.int64)

    @property
    def positions_by_request(self) -> list[tuple[int, int]]:
        """[R], the positions [start, end) that each request computes."""
        return [(span.start, span.start + span.num_tokens) for span in self.spans]

    def expected_slot_mapping(self, block_size: int) -> NDArray[np.int64]:
        """The KV entry that each row must write if we know its request and position correctly [T]."""
        parts = [
            slot_mapping(span.request.blocks, self.positions[first : first + span.num_tokens], block_size)
            for span, first in zip(self.spans, self.first_rows.tolist(), strict=True)
        ]
        return np.concatenate(parts)


def slot_mapping(blocks: Sequence[int], positions: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """KV entries of a request's positions, from its block table."""
    table = np.asarray(blocks, dtype=np.int64)
    entries: NDArray[np.int64] = table[positions // block_size] * block_size + positions % block_size
    return entries


class RowLocator:
    """Which row of the running forward pass belongs to whom; known only once vLLM's runner has ordered its batch."""

    def __init__(self, runner: Any, group: KvGroup, late: LateCheck | None = None) -> None:
        """late: where entries lie on a GPU, so that to look at them at once would wait for it."""
        self._runner, self.group, self._late = runner, group, late
        self.row_checks = 0
        self.mismatches = 0

    def locate(self, spans: dict[str, Span]) -> tuple[BatchRows, torch.Tensor]:
        """The rows in the runner's order and their KV entries i64 [T], which must be where we expect them.

        A late check says so when `settle` is called.
        """
        rows = BatchRows(tuple(spans[request_id] for request_id in row_order(self._runner, spans)))
        entries = get_forward_context().slot_mapping[self.group.layer_name]
        if len(entries) != rows.num_rows or entries.dtype is not torch.int64:  # each of the two costs some us
            entries = entries[: rows.num_rows].to(torch.int64)
        self.row_checks += 1
        if self._late is not None:
            self.settle()  # of a step that ended in an error
            self._late.begin(entries, rows.expected_slot_mapping(self.group.block_size))
        elif not np.array_equal(entries.cpu().numpy(), rows.expected_slot_mapping(self.group.block_size)):
            self._refuse()
        return rows, entries

    def entries(self) -> torch.Tensor:
        """Where the runner writes the KV entries of a forward pass, padding included: i64 [T], the same for a graph."""
        return get_forward_context().slot_mapping[self.group.layer_name]

    def settle(self) -> None:
        """The step has run: raise if its rows were not whose we took them for, before its tokens are handed out."""
        if self._late is not None and not self._late.settle():
            self._refuse()

    def _refuse(self) -> NoReturn:
        self.mismatches += 1
        raise RuntimeError(
            "the rows of this step do not belong to the requests vllm-ndp expected (KV slots differ): "
            "this vLLM version orders its batch differently; see docs/compatibility.md"
        )
