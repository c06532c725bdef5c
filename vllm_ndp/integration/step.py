"""One forward pass as data: whose rows run, where each pair ran, its simulated time, its report.

Lives from the worker's `execute_model` to its end; all layers of a step run under one plan epoch. Acts on nothing:
layers tell it what they did. Knows no tensors but the step's KV entries and those that a layer leaves to be read later;
no device, no slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.device.calls import ExecuteResult
from vllm_ndp.integration.batch import BatchRows, Span, TrackedRequest
from vllm_ndp.integration.report import PAIR_KINDS, DeviceWork, StepReport, energy_shares
from vllm_ndp.layer import account
from vllm_ndp.layer.split import COUNTED, Split, Splitter
from vllm_ndp.simulation.gpu_timing import StepClock, StepTime

_REPORTED = {
    "hot": ("hot",),
    "spilled": ("offloaded",),
    "warm": ("warm",),
    "cold": ("cold",),
    "fallback": ("fallback",),
    "prefill": ("prompt_hot", "prompt_streamed"),
    "prefill_device": ("prompt_device",),
    "prefill_fallback": ("prompt_fallback",),
}
"""Kinds of pairs in reports, by what layers count."""


@dataclass
class ModelSizes:
    """What a step must know of the model: L MoE layers, E experts, k of them per token."""

    num_layers: int
    num_experts: int
    top_k: int

    @property
    def pairs_per_row(self) -> int:
        return self.num_layers * self.top_k


@dataclass
class Step:
    number: int
    spans: dict[str, Span]
    sizes: ModelSizes
    clock: StepClock
    splitter: Splitter
    rows: BatchRows = field(init=False)
    slot_mapping: torch.Tensor = field(init=False)  # i64 [T], the KV entry of each row
    started: bool = field(default=False, init=False)
    """Whether a layer has run: vLLM may schedule a step that needs no forward pass."""
    device: DeviceWork = field(default_factory=DeviceWork, init=False)
    streamed: NDArray[np.bool_] = field(init=False)  # [L, E], experts that this step's prefill rows streamed
    counts: NDArray[np.int64] = field(init=False)
    """[R, kinds], pairs of each request over all layers so far, as split.COUNTED names them."""
    _reported: bool = field(default=False, init=False)
    _later: list[tuple[torch.Tensor, Callable[[NDArray[Any]], None]]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.streamed = np.zeros((self.sizes.num_layers, self.sizes.num_experts), dtype=np.bool_)

    @property
    def ending(self) -> list[TrackedRequest]:
        """Requests whose prefill ends in this step."""
        return [span.request for span in self.spans.values() if span.ends_prefill]

    # -- layers ---------------------------------------------------------------------------------------------------

    def start(self, rows: BatchRows, slot_mapping: torch.Tensor) -> None:
        """The first layer runs: the order of the rows is known."""
        self.rows, self.slot_mapping, self.started = rows, slot_mapping, True
        self.clock.begin_step(rows.num_rows, rows.kv_tokens, rows.attended, rows.positions_by_request)
        none = np.zeros((self.sizes.num_layers, self.sizes.num_experts), np.uint8)
        plans = [none if (plan := span.request.plan) is None else plan.bits.bits for span in rows.spans]
        entries = slot_mapping.numpy() if slot_mapping.device.type == "cpu" else None
        self.counts = self.splitter.begin_step(rows.owner, rows.decode, plans, entries)

    def begin_layer(self) -> None:
        if self._later:
            self._catch_up()
        self.clock.begin_layer()

    def end_later(self, found: torch.Tensor, end: Callable[[NDArray[Any]], None]) -> None:
        """A layer has run, and what it found is not on the host yet: `end` begins and ends it, when somebody asks.

        found: of one shape in all layers of a step, because they arrive in one copy.
        """
        self._later.append((found, end))

    def _catch_up(self) -> None:
        if not self._later:
            return
        later, self._later = self._later, []
        arrived = torch.stack([found for found, _ in later]).cpu().numpy()
        for (_, end), found in zip(later, arrived, strict=True):
            end(found)

    def split(self, layer: int, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, with_device: bool) -> Split:
        """Where each pair of a layer runs. topk_ids and topk_weights [T, k]: as the router gave them."""
        ids, weights = _on_host(topk_ids, topk_weights)
        return self.splitter.split(layer, ids.data_ptr(), weights.data_ptr(), with_device=with_device)

    def end_layer(self, layer: int, split: Split, answer: ExecuteResult | None, *, answered: bool = True) -> None:
        """Account for where the pairs ran. answer: the device's, if it was asked here and gave one."""
        if split.stream:
            self.streamed[layer, split.stream.experts] = True
        timing = None if answer is None else answer.timing
        device_ps = 0 if timing is None else timing.total_ps
        account.end_layer(self.clock, self.splitter, split, device_ps if answered else None)
        if answer is not None:
            self.device.add(timing)

    # -- the end --------------------------------------------------------------------------------------------------

    def report(self, plans: dict[str, dict[str, Any]]) -> tuple[StepReport, StepTime] | None:
        """Close the simulated clock and say what happened, once per step; None if that was done or nothing ran.

        plans: what was planned before this step, by request.
        """
        if self._reported or not self.started:
            return None
        self._reported = True
        self._catch_up()
        time = self.clock.end_step(sum(span.num_sampled_rows for span in self.spans.values()))
        drafts = {name: count for name, span in self.spans.items() if (count := span.num_drafts)}
        pairs = self.pairs_by_request()
        device = self.device.sums()
        report = StepReport(
            *(time.start_ps, time.end_ps, pairs, plans, drafts, self.sizes.pairs_per_row, self._rows_by_request()),
            device_pj=energy_shares(device or {}, self.clock.model.hardware.energy, pairs),
            device=device,
            device_bounds=self.device.bounds(),
        )
        return report, time

    def abandon(self) -> None:
        """An error ended the step: its simulated time does not count."""
        if self.started and not self._reported:
            self.clock.abandon_step()
        self._reported = True

    def pairs_by_request(self) -> dict[str, dict[str, int]]:
        """How many (row, expert) pairs of each request ran where, over all layers."""
        place = {kind: at for at, kind in enumerate(COUNTED)}
        return {
            span.request.request_id: {kind: sum(counts[place[part]] for part in _REPORTED[kind]) for kind in PAIR_KINDS}
            for span, counts in zip(self.rows.spans, self.counts.tolist(), strict=True)
        }

    def _rows_by_request(self) -> dict[str, tuple[int, ...]]:
        """(decode rows, prompt rows) of each request."""
        counts = dict[str, tuple[int, ...]]()
        for span in self.rows.spans:
            prompt = min(max(span.first_decode - span.start, 0), span.num_tokens)
            counts[span.request.request_id] = span.num_tokens - prompt, prompt
        return counts


def _on_host(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """i32 and f32 [T, k], contiguous, in the host's memory: from a GPU in one copy.

    A conversion to what a tensor is already costs more than the split of few rows.
    """
    ids = topk_ids if topk_ids.dtype is torch.int32 else topk_ids.to(torch.int32)
    weights = topk_weights if topk_weights.dtype is torch.float32 else topk_weights.to(torch.float32)
    if ids.is_cpu:
        return ids.contiguous(), weights.contiguous()
    ids, bits = torch.stack([ids, weights.view(torch.int32)]).cpu()
    return ids, bits.view(torch.float32)


class RunningStep:
    """Which step runs now, for the layers: None outside of steps and while vLLM profiles memory."""

    def __init__(self) -> None:
        self.step: Step | None = None
