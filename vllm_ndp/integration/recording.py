"""`"record": DIR`: the routing of a real run, with what the plugin decided and what simulated time it took.

Reads the sidecar after each step, so recording costs the layers nothing. Knows the trace writer and the controller's
values; does not know files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_ndp.integration import compat
from vllm_ndp.integration.batch import Span
from vllm_ndp.traces.format import CACHED, DECODE, PREFILL, LiveSetup, Provenance
from vllm_ndp.traces.recorder import TraceWriter

if TYPE_CHECKING:
    from vllm_ndp.integration.controller import NdpController
    from vllm_ndp.integration.step import StepContext
    from vllm_ndp.simulation.gpu_timing import StepTime


class RunRecorder:
    def __init__(self, controller: NdpController, directory: Path, model_digest: str) -> None:
        self._controller = controller
        self._writer = TraceWriter(directory, _provenance(controller, model_digest))
        self._start_s = time.time()
        self._indices: dict[str, int] = {}

    def note_requests(self, step: int, spans: dict[str, Span]) -> None:
        """First sight of a request: who it is, and the routing that the prefix cache already holds for it."""
        for request_id, span in spans.items():
            if request_id in self._indices:
                continue
            index = self._indices[request_id] = len(self._indices)
            self._writer.add_request(index, request_id, span.request.prompt_len, time.time() - self._start_s)
            if span.start:
                positions = np.arange(span.start)
                ids, weights = self._controller.sidecar.read(
                    self._controller.sidecar.slots(span.request.blocks, positions)
                )
                owner, phases = np.full(span.start, index), np.full(span.start, CACHED)
                self._writer.append_step(step, owner, positions, phases, ids, weights)

    def note_plan(self, step: int) -> None:
        """The placement and every running request's bits, in force from this step on."""
        planner = self._controller.planner
        assert planner.placement is not None
        bits = {
            self._indices[request.request_id]: request.bits.bits
            for request in self._controller.tracker.requests.values()
            if request.bits is not None and request.request_id in self._indices
        }
        self._writer.append_plan(step, planner.epoch, planner.placement.hot, bits)

    def note_step(self, step: StepContext, simulated: StepTime, measured_s: float) -> None:
        rows = step.rows
        indices = np.array([self._indices[span.request.request_id] for span in rows.spans])
        ids, weights = step.routing()
        phases = np.where(rows.decode, DECODE, PREFILL)
        self._writer.append_step(step.number, indices[rows.owner], rows.positions, phases, ids, weights)
        fallback = sum(pairs["fallback"] for pairs in step.pairs_by_request().values())
        self._writer.append_event(
            step.number, self._controller.planner.epoch, simulated.start_ps, simulated.total_ps, measured_s, fallback
        )

    def close(self) -> None:
        self._writer.close()


def _provenance(controller: NdpController, model_digest: str) -> Provenance:
    shape, settings = controller.pool.shape, controller.settings
    tokenizer = controller.model_dir / "tokenizer.json"
    return Provenance(
        model=shape.name,
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        model_digest=model_digest,
        tokenizer_digest=hashlib.blake2b(tokenizer.read_bytes(), digest_size=16).hexdigest()
        if tokenizer.exists()
        else "",
        source="recorded",
        hardware=settings.hardware,
        hardware_hash=controller.hardware.config_hash,
        policy=settings.policy,
        settings=dataclasses.asdict(settings),
        live=LiveSetup(
            preset=settings.hardware,
            overrides=compat.hardware_overrides(settings),
            host_dims=controller.clock.model.shape.recorded(),
            hot_experts=controller.planner.budget.num_hot,
            expert_bytes=controller.device.served.expert_bytes,
            group_size=controller.device.served.group_size,
            activation_bytes=controller.activation_bytes,
            migration=settings.migration,
            bits_for=settings.bits_for,
            spill_bits=0 if controller.balancer is None else controller.balancer.offload_bits,
        ),
    )
