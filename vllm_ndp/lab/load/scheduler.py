"""vLLM's scheduler and batch, as far as they decide which rows a step has and in which order. No time in it.

Source: vllm/v1/core/sched/scheduler.py (first come first served) and worker/gpu_input_batch.py of 0.32. Running
requests come first, each with all its missing tokens or the step's remaining tokens. Then the scheduler admits waiting
ones while tokens, places and KV blocks last. A running request that gets no block sends the one admitted last back to
the head of the queue. Left out: priorities, drafts, encoder inputs, the sliding window, sharing of KV blocks.
tests/integration/test_integration_replay.py holds it to vLLM's own steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from ndp_device.common.errors import ConfigError
from ndp_device.timing.work import ceil_div
from vllm_ndp.layer.setup import Scheduling


@dataclass
class Request:
    """One request and how far it has come. Its last token needs no row, so rows end one before its output does."""

    number: int
    prompt_len: int
    num_rows: int
    """Positions that are ever computed, of prompt and output together."""
    cached: int = 0
    """Prompt tokens that the prefix cache holds when it is admitted."""
    computed: int = 0
    outputs: int = 0
    blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + self.outputs


class ScheduledSpan(NamedTuple):
    """Rows that one request contributes to a step: positions start .. start + num_tokens - 1."""

    request: int
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Scheduler:
    """Waiting requests, running requests and the next step. Per step: schedule, then end_step."""

    def __init__(self, rules: Scheduling) -> None:
        """Raises ConfigError for a rule below 1."""
        for name in rules.__struct_fields__:
            if (value := getattr(rules, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.rules = rules
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._free_blocks = rules.kv_blocks
        self._places: list[int | None] = []  # of the runner's batch
        self._scheduled: dict[int, tuple[Request, ScheduledSpan]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """A request has arrived. Raises ConfigError if the KV cache could never hold it."""
        needed = ceil_div(request.num_rows, self.rules.block_size)
        if needed > self.rules.kv_blocks:
            raise ConfigError(
                f"request {request.number} needs {needed} blocks of KV cache for {request.num_rows} tokens, there are "
                f"{self.rules.kv_blocks}: give more GPU memory, or fewer hot experts"
            )
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledSpan]:
        """The next step's spans in the order of the batch; empty if nobody is there."""
        self._scheduled = {}
        tokens, preemptions = self.rules.max_num_batched_tokens, self.preemptions
        index = 0
        while index < len(self.running) and tokens > 0:
            request = self.running[index]
            num = min(request.num_tokens - request.computed, tokens)
            if not self._allocate_running(request, num):
                break
            tokens -= self._take(request, num)
            index += 1
        while (
            self.waiting
            and tokens > 0
            and self.preemptions == preemptions
            and len(self.running) < self.rules.max_num_seqs
        ):
            request = self.waiting[0]
            num = min(request.num_tokens - request.cached, tokens)
            if not (self._fits(request, request.num_tokens) and self._allocate(request, request.cached + num)):
                break
            request.computed = request.cached
            self.running.append(self.waiting.popleft())
            tokens -= self._take(request, num)
        return [self._scheduled[number][1] for number in self._in_places(self._scheduled)]

    def end_step(self) -> tuple[list[int], list[int]]:
        """(requests that got a token, those that are done) of the step just scheduled."""
        yielded, done = [], []
        for number, (request, span) in self._scheduled.items():
            request.computed = span.end
            if span.end >= request.num_tokens:
                request.outputs += 1
                yielded.append(number)
            if span.end >= request.num_rows:
                done.append(number)
                self._free(request)
                self.running.remove(request)
        return yielded, done

    def _take(self, request: Request, num: int) -> int:
        self._scheduled[request.number] = request, ScheduledSpan(request.number, request.computed, num)
        return num

    def _allocate_running(self, request: Request, num: int) -> bool:
        """Whether it has its blocks now; for them others are sent back, and at last itself."""
        while not self._allocate(request, request.computed + num):
            last = self.running.pop()
            self._free(last)
            self.waiting.appendleft(last)
            self.preemptions += 1
            if last is request:
                return False
        return True

    def _fits(self, request: Request, num_tokens: int) -> bool:
        return ceil_div(num_tokens, self.rules.block_size) - request.blocks <= self._free_blocks

    def _allocate(self, request: Request, num_tokens: int) -> bool:
        if not self._fits(request, num_tokens):
            return False
        missing = max(ceil_div(num_tokens, self.rules.block_size) - request.blocks, 0)
        request.blocks += missing
        self._free_blocks -= missing
        return True

    def _free(self, request: Request) -> None:
        self._free_blocks += request.blocks
        request.blocks = 0

    def _in_places(self, wanted: Collection[int]) -> list[int]:
        """The requests of a step, given in the scheduler's order, in that of their places in the runner's batch:
        newcomers fill gaps first, then the last ones move down."""
        places = [number if number in wanted else None for number in self._places]
        here = set(places)
        for number in wanted:
            if number in here:
                continue
            if None in places:
                places[places.index(None)] = number
            else:
                places.append(number)
        while None in places:
            if (last := places.pop()) is not None:
                places[places.index(None)] = last
        self._places = places
        return [number for number in places if number is not None]
