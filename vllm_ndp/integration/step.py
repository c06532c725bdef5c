"""One forward pass as data: whose rows run, where each pair ran, its simulated time, its report.

All layers of a step run under one plan epoch. Acts on nothing: layers act, by the `Run` that the step lends them. Where
layers waited for nothing, clock and splitter stay alone until somebody asks for the step's report. The next step may
have run then. Knows no tensors but the step's KV entries; no device, no slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.timing.work import Timing
from vllm_ndp.cost_model.gpu_timing import StepTime
from vllm_ndp.device_client.connection import ExecuteResult
from vllm_ndp.integration.batch import BatchRows, RowLocator, Span, TrackedRequest
from vllm_ndp.integration.cuda.streams import Arrival
from vllm_ndp.integration.report import StepReport, device_sums
from vllm_ndp.integration.routing_sidecar import Note, RoutingSidecar
from vllm_ndp.layer.run import Run
from vllm_ndp.layer.split import PAIR_KINDS, Split


@dataclass(frozen=True)
class StepParts:
    """Parts that the steps of a worker share."""

    pairs_per_row: int  # of all layers
    run: Run[str]
    locator: RowLocator
    sidecar: RoutingSidecar
    send: Callable[[torch.Tensor], Arrival] | None = None
    """To the host; None where no layer is asynchronous."""


@dataclass
class Step:
    number: int
    spans: dict[str, Span]
    parts: StepParts
    began_s: float = 0.0
    """On the wall, the worker's part before it included."""
    plan_s: float | None = None
    """Making and announcing new plans before it; None where there were none."""
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    """New ones by request, as a report has them."""
    close_until: Callable[[int], object] = lambda number: None
    """Is called with the number of the step before, when this one takes the clock and the splitter: they serve one step
    at a time."""
    started: bool = field(default=False, init=False)
    """Whether a layer has run: vLLM may schedule a step that needs no forward pass."""
    answers: list[Timing | None] = field(default_factory=list, init=False)
    """Simulated times of the device's answers so far; None: without one."""
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, len(PAIR_KINDS)), np.int64), init=False)
    """[R, kinds], pairs of each request over all layers so far, as split.PAIR_KINDS names them."""
    _begun: bool = field(default=False, init=False)
    _reported: bool = field(default=False, init=False)
    _later: list[tuple[int, Callable[[NDArray[np.int32]], None]]] = field(default_factory=list, init=False)
    _arriving: Arrival | None = field(default=None, init=False)
    """Experts that routers chose, as the sidecar has them: i16 [L, T, k]."""

    @cached_property
    def located(self) -> tuple[BatchRows, torch.Tensor]:
        """The rows, and the KV entry of each, i64 [T]: vLLM's runner orders them before the first layer."""
        return self.parts.locator.locate(self.spans)

    @cached_property
    def rows(self) -> BatchRows:
        return self.located[0]

    @property
    def ending(self) -> list[TrackedRequest]:
        """Requests whose prefill ends in this step."""
        return [span.request for span in self.spans.values() if span.ends_prefill]

    # -- layers ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The first layer runs."""
        rows, entries = self.located
        _ = self._sampled  # as requests are now, not as the next step has them
        if (sidecar := self.parts.sidecar).lacks_some:
            sidecar.note_written(entries.numpy() if entries.is_cpu else rows.expected_slot_mapping(sidecar.block_size))
        self.started = True

    @cached_property
    def _sampled(self) -> tuple[int, dict[str, int]]:
        """Rows whose logits are wanted, and the drafts of each request that has any."""
        drafts = {name: count for name, span in self.spans.items() if (count := span.num_drafts)}
        return sum(span.num_sampled_rows for span in self.spans.values()), drafts

    def _begin(self) -> None:
        self.close_until(self.number - 1)
        self._begun = True
        rows, slot_mapping = self.located
        plans = [None if (plan := span.request.plan) is None else plan.bits for span in rows.spans]
        entries = slot_mapping.numpy() if slot_mapping.device.type == "cpu" else None
        self.counts = self.parts.run.begin_step(
            rows.owner,
            rows.decode,
            plans,
            rows.positions_by_request,
            entries,
        )

    def note_of(self, layer: int) -> Note | None:
        """Where a layer's routing is noted beside the KV cache; None where the host's split does it."""
        return None if self.parts.run.splitter.notes else self.parts.sidecar.note(layer, self.located[1])

    def end_later(self, layer: int, end: Callable[[NDArray[np.int32]], None]) -> None:
        """Remember a layer that runs before its router's choices [T, k] are on the host. `end` gets the choices later,
        when a caller needs the layer's counts."""
        self._later.append((layer, end))

    @property
    def waits_for_nothing(self) -> bool:
        """Whether all layers so far were handed to `end_later`, so that the step has waited for none."""
        return self.started and not self._begun

    def send_routing(self) -> None:
        """Every layer has been launched: the routers' choices set off to the host. They come from the sidecar, because
        pieces of a graph write over each other's memory."""
        assert self.parts.send is not None
        self._arriving = self.parts.send(self.parts.sidecar.ids_at(self.located[1]))

    def take(self) -> Run[str]:
        """Take the clock and the splitter, and end the layers that ran without them."""
        if not self._begun:
            self._begin()
        if self._later:
            self._end_later()
        return self.parts.run

    def _end_later(self) -> None:
        if self._arriving is None:
            self.send_routing()
        assert self._arriving is not None
        later, self._later = self._later, []
        arrived, self._arriving = self._arriving.values().astype(np.int32), None
        for layer, end in later:
            end(arrived[layer])

    def end_layer(self, layer: int, split: Split, answer: ExecuteResult | None, *, answered: bool = True) -> None:
        """Account for where the pairs ran. answer: the device's, if it was asked here and gave one."""
        timing = None if answer is None else answer.timing
        device_ps = 0 if timing is None else timing.total_ps
        self.parts.run.end_layer(layer, split, device_ps if answered else None)
        if answer is not None:
            self.answers.append(timing)

    # -- the end --------------------------------------------------------------------------------------------------

    def report(self) -> tuple[StepReport, StepTime] | None:
        """Close the simulated clock and say what happened, once per step; None if that was done or nothing ran."""
        if self._reported or not self.started:
            return None
        self.parts.locator.settle()
        self._reported = True
        run, per_row = self.take(), self.parts.pairs_per_row
        num_sampled, drafts = self._sampled
        time = run.clock.end_step(num_sampled)
        pairs = self.pairs_by_request()
        report = StepReport(
            *(time.start_ps, time.end_ps, pairs, self.plans, drafts, per_row, self._rows_by_request()),
            device=device_sums(self.answers),
            device_bounds=dict(Counter(answer.bound for answer in self.answers if answer is not None)),
        )
        return report, time

    def abandon(self) -> None:
        """An error ended the step: its simulated time does not count."""
        self._reported = True

    def pairs_by_request(self) -> dict[str, dict[str, int]]:
        """How many (row, expert) pairs of each request ran where, over all layers."""
        return {
            span.request.request_id: dict(zip(PAIR_KINDS, counts, strict=True))
            for span, counts in zip(self.rows.spans, self.counts.tolist(), strict=True)
        }

    def _rows_by_request(self) -> dict[str, tuple[int, ...]]:
        """(decode rows, prompt rows) of each request."""
        counts = dict[str, tuple[int, ...]]()
        for span in self.rows.spans:
            prompt = min(max(span.first_decode - span.start, 0), span.num_tokens)
            counts[span.request.request_id] = span.num_tokens - prompt, prompt
        return counts
