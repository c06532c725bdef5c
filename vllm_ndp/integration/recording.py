"""`"record": DIR`: the routing of a real run, with what the plugin decided and what simulated time it took.

Reads the sidecar after each step, so recording costs the layers nothing. A trace that can no longer be written (a full
disk) ends the recording and no request.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from vllm_ndp.cost_model.gpu_timing import StepTime
from vllm_ndp.integration.assembly import LoadedWorker
from vllm_ndp.integration.batch import BatchRows, Span
from vllm_ndp.integration.compat import say
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.integration.step import Step
from vllm_ndp.layer.setup import Scheduling
from vllm_ndp.planning.plan import Placement, Plan
from vllm_ndp.traces.format import (
    CACHED,
    CHANGED,
    DECODE,
    DOWN,
    PREFILL,
    REJECTED,
    Provenance,
)
from vllm_ndp.traces.recorder import TraceWriter

P = ParamSpec("P")


@dataclass(frozen=True)
class _Drafted:
    """Rows of a step that are written once it is known which drafts among them were accepted."""

    step: int
    rows: BatchRows
    requests: NDArray[np.int64]
    phases: NDArray[np.int64]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]


def _until_it_fails(note: Callable[Concatenate[RunRecorder, P], None]) -> Callable[Concatenate[RunRecorder, P], None]:
    """What can no longer be written is said once, and ends the recording."""

    def noted(self: RunRecorder, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.has_failed:
            return
        try:
            note(self, *args, **kwargs)
        except TraceError as error:
            self.has_failed = True
            say(f"{error}; what was written before is whole, and requests go on without a trace")

    return noted


class RunRecorder:
    def __init__(self, directory: Path, provenance: Provenance, sidecar: RoutingSidecar) -> None:
        self._writer, self.has_failed = TraceWriter(directory, provenance), False
        self._sidecar = sidecar
        self._start_s = time.time()
        self._indices: dict[str, int] = {}  # of requests that have not ended
        self._prompt_lens: dict[str, int] = {}  # of the same
        self._num_requests = 0
        self._drafted: _Drafted | None = None

    @_until_it_fails
    def note_requests(self, step: int, spans: Mapping[str, Span], known: Collection[str]) -> None:
        """First sight of a request: who it is, and the routing that the prefix cache already holds for it. known: the
        requests that have not ended.

        A session whose input comes in parts is one request per part; what came before is cached to each.
        """
        for ended in self._indices.keys() - known:
            del self._indices[ended], self._prompt_lens[ended]
        for request_id, span in spans.items():
            if self._prompt_lens.get(request_id) == span.request.prompt_len:
                continue
            index = self._indices[request_id] = self._num_requests
            self._prompt_lens[request_id] = span.request.prompt_len
            self._num_requests += 1
            self._writer.add_request(index, request_id, span.request.prompt_len, time.time() - self._start_s)
            if span.start:
                positions, entries = self._sidecar.noted(span.request.blocks, span.start)
                ids, weights = self._sidecar.read(entries)
                owner, phases = np.full(len(positions), index), np.full(len(positions), CACHED)
                self._writer.append_step(step, owner, positions, phases, ids, weights)

    @_until_it_fails
    def note_plan(self, step: int, epoch: int, placement: Placement, plans: Mapping[str, Plan]) -> None:
        """The placement and every running request's plan, in force from this step on."""
        bits = {self._indices[name]: plan.bits.bits for name, plan in plans.items() if name in self._indices}
        self._writer.append_plan(step, epoch, placement.tiers, bits)

    @_until_it_fails
    def note_step(
        self,
        step: Step,
        epoch: int,
        simulated: StepTime | None,
        measured_s: float,
        devices_up: tuple[bool, ...] | None = (),
    ) -> None:
        """simulated: None where no simulated clock holds all that ran. devices_up: of DeviceLink.take_availability."""
        down = {-1: CHANGED} if devices_up is None else {}
        down |= {device: DOWN for device, is_up in enumerate(devices_up or ()) if not is_up}
        self._writer.append_devices(step.number, down)
        rows = step.rows
        indices = np.array([self._indices[span.request.request_id] for span in rows.spans])
        ids, weights = self._sidecar.read(rows.expected_slot_mapping(self._sidecar.block_size))
        phases = np.where(rows.decode, DECODE, PREFILL)
        self._write_drafted({})
        self._drafted = _Drafted(step.number, rows, indices[rows.owner], phases, ids, weights)
        if not any(span.num_drafts for span in rows.spans):
            self._write_drafted({})
        here = ("fallback", "prefill_fallback")
        fallback = sum(pairs[kind] for pairs in step.pairs_by_request().values() for kind in here)
        start_ps, step_ps = (None, None) if simulated is None else (simulated.start_ps, simulated.total_ps)
        self._writer.append_event(step.number, epoch, start_ps, step_ps, measured_s, fallback)

    @_until_it_fails
    def note_sampled(self, num_tokens: Mapping[str, int]) -> None:
        """How many tokens each request got from the step: which of its drafts were accepted."""
        self._write_drafted(num_tokens)

    def _write_drafted(self, num_tokens: Mapping[str, int]) -> None:
        """Write the rows that waited for this, if any do."""
        if (drafted := self._drafted) is None:
            return
        self._drafted = None
        rows = drafted.rows
        for span, first in zip(rows.spans, rows.first_rows.tolist(), strict=True):
            accepted = num_tokens.get(span.request.request_id, 0) - 1
            if 0 <= accepted < span.num_drafts:
                end = first + span.num_tokens
                drafted.phases[end - (span.num_drafts - accepted) : end] = REJECTED
        columns = drafted.requests, rows.positions, drafted.phases, drafted.ids, drafted.weights
        self._writer.append_step(drafted.step, *columns)

    @_until_it_fails
    def close(self) -> None:
        self._write_drafted({})
        self._writer.close()


def run_provenance(worker: LoadedWorker, scheduling: Scheduling) -> Provenance:
    """The leader's facts that a replay needs to make the same plans and the same simulated times again."""
    facts = worker.facts
    settings, shape = facts.settings, facts.pool.shape
    tokenizer = facts.model_dir / "tokenizer.json"
    return Provenance(
        model=shape.name,
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        model_digest=facts.digest,
        tokenizer_digest=hashlib.blake2b(tokenizer.read_bytes(), digest_size=16).hexdigest()
        if tokenizer.exists()
        else "",
        source="recorded",
        hardware=settings.preset,
        hardware_hash=facts.hardware.config_hash,
        policy=settings.policy,
        settings=settings.recorded(),
        live=msgspec.structs.replace(worker.run.setup, scheduling=scheduling),
    )
