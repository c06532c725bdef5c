"""Requests whose lengths somebody tells, and whose routing is a trace's, read round and round.

The columns of a trace as far as the exact engine asks for them, made as they are asked for: there may be 10^8 rows.
Reads Mooncake's JSON lines: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from ndp_device.common.strict_files import read_lines
from ndp_device.timing.work import PS_PER_S
from vllm_ndp.lab.load.scheduler import ScheduledSpan
from vllm_ndp.traces.trace import Trace

HASHED_TOKENS = 512
"""Of the prompt that one of Mooncake's hash_ids stands for."""
MOST_REQUESTS = 1 << 20
Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]  # ms
    input_length: Length
    output_length: Length
    hash_ids: list[int] = []


@dataclass(frozen=True)
class Lengths:
    """R requests in the order in which they arrive."""

    arrivals_ps: NDArray[np.int64]  # [R]
    prompt_lens: NDArray[np.int64]  # [R]
    output_lens: NDArray[np.int64]  # [R]
    hashed: list[list[int]]
    """Names of the blocks of each prompt; empty where nobody tells."""

    def cached(self, room: int) -> NDArray[np.int64]:
        """Tokens of each prompt that a prefix cache of `room` tokens holds as it arrives, [R]: the blocks at its start
        that an earlier prompt had and that were not driven out, those asked for longest ago first. At least one token
        of a prompt is computed. An earlier prompt counts as computed."""
        held, found = OrderedDict[int, None](), []
        for names, length in zip(self.hashed, self.prompt_lens.tolist(), strict=True):
            hits = next((n for n, name in enumerate(names) if name not in held), len(names))
            found.append(min(hits * HASHED_TOKENS, length - 1))
            for name in reversed(names):  # the start of a prompt is the last to go
                held[name] = None
                held.move_to_end(name)
            while len(held) * HASHED_TOKENS > room:
                held.popitem(last=False)
        return np.array(found, np.int64)


def read_mooncake(path: Path, count: int | None = None, speed: float = 1.0) -> Lengths:
    """The first `count` requests, `speed` times as fast as they came. Raises TraceError with the line that is none."""
    decoder, lines = msgspec.json.Decoder(_Line), list[_Line]()
    for number, line in enumerate(read_lines(path), 1):
        if len(lines) == (MOST_REQUESTS if count is None else count):
            break
        try:
            lines.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"{path} line {number} is no request of Mooncake's: {error}") from None
        if len(lines) > 1 and lines[-1].timestamp < lines[-2].timestamp:
            raise TraceError(f"{path} line {number} comes at {lines[-1].timestamp:g} ms, before the line above it")
    if not lines or (count is not None and len(lines) < count):
        raise TraceError(f"{path} holds {len(lines)} requests, and {count or 'at least one'} were asked for")
    at_ps = np.round(np.array([line.timestamp for line in lines]) / 1000 / speed * PS_PER_S)
    return Lengths(
        at_ps.astype(np.int64),
        np.array([line.input_length for line in lines]),
        np.array([line.output_length for line in lines]),
        [line.hash_ids for line in lines],
    )


class _Column:
    """A column of a trace: rows -> values."""

    def __init__(self, of: Callable[[NDArray[np.int64]], NDArray[Any]]) -> None:
        self._of = of

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        return self._of(rows)


class Workload:
    """N rows of R requests, request by request. Request n has the routing of the trace's n-th, round and round: of its
    prompt's tokens and of those decoded, over and over where there are more than were recorded."""

    def __init__(
        self,
        trace: Trace,
        prompt_lens: NDArray[np.integer],
        output_lens: NDArray[np.integer],
        cached: NDArray[np.int64] | None = None,
    ) -> None:
        """output_lens: tokens, the last of which is never routed. cached: tokens of each prompt in the prefix cache.

        Raises TraceError where the trace cannot give them.
        """
        own = len(trace.prompt_len)
        if not own:
            raise TraceError("the trace has no requests")
        self.provenance, self.prompt_len = trace.provenance, np.asarray(prompt_lens, np.int64)
        self._order, begins, splits = trace.executed
        self._starts, self._splits, self._ends = begins[:-1], splits, begins[1:]
        of = np.arange(len(self.prompt_len)) % own
        self._of, self.num_rows = of, self.prompt_len + np.asarray(output_lens, np.int64) - 1
        self.cached = np.zeros(len(of), np.int64) if cached is None else cached
        lacks = (splits == self._starts)[of] | ((self._ends == splits)[of] & (self.num_rows > self.prompt_len))
        if lacks.any():
            raise TraceError(
                f"request {of[lacks.argmax()]} of the trace has no prompt or no decode to take routing from"
            )
        self.begins = np.concatenate([[0], np.cumsum(self.num_rows)])  # [R + 1]
        self.request = _Column(lambda rows: np.searchsorted(self.begins, rows, "right") - 1)
        self.position = _Column(lambda rows: rows - self.begins[self.request[rows]])
        self.ids = _Column(lambda rows: trace.ids[self._recorded(rows)])
        self.weights = _Column(lambda rows: trace.weights[self._recorded(rows)])
        self.phase = np.empty(0, np.uint8)  # nothing was rejected
        self.sequences = [trace.sequences[number] for number in of.tolist()]

    @classmethod
    def repeated(cls, trace: Trace, count: int) -> Workload:
        """So many requests, each as long as recorded."""
        _, begins, splits = trace.executed
        return cls(trace, np.resize(splits - begins[:-1], count), np.resize(begins[1:] - splits + 1, count))

    def of(self, spans: Sequence[ScheduledSpan]) -> NDArray[np.int64]:
        """Rows of a step in the order of its spans."""
        firsts = [int(self.begins[span.request]) + span.start for span in spans]
        return np.concatenate(
            [np.arange(first, first + span.num_tokens) for first, span in zip(firsts, spans, strict=True)]
        )

    def _recorded(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of the trace that each row has its routing from."""
        request = self.request[rows]
        of, position, prompt_len = self._of[request], rows - self.begins[request], self.prompt_len[request]
        start, split, end = self._starts[of], self._splits[of], self._ends[of]
        decoded = position - prompt_len
        at = np.where(decoded < 0, start + position % (split - start), split + decoded % np.maximum(end - split, 1))
        recorded: NDArray[np.int64] = self._order[at]
        return recorded
