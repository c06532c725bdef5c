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

from ndp_device.widths import FULL_PRECISION_BITS
from vllm_ndp.integration.batch import BatchRows, Span, TrackedRequest
from vllm_ndp.integration.few_rows import FewRows
from vllm_ndp.integration.pairs import Pairs, Split
from vllm_ndp.integration.report import PAIR_KINDS, DeviceWork, StepReport, energy_shares
from vllm_ndp.simulation.gpu_timing import StepClock, StepTime


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
    few: FewRows | None = None
    """Who splits, times and counts the layers natively; None when the step shows other rows than few decode rows."""
    rows: BatchRows = field(init=False)
    slot_mapping: torch.Tensor = field(init=False)  # i64 [T], the KV entry of each row
    started: bool = field(default=False, init=False)
    """Whether a layer has run: vLLM may schedule a step that needs no forward pass."""
    device: DeviceWork = field(default_factory=DeviceWork, init=False)
    streamed: NDArray[np.bool_] = field(init=False)  # [L, E], experts that this step's prefill rows streamed
    _bits: NDArray[np.uint8] | None = field(default=None, init=False)
    _tally: dict[str, NDArray[np.int64]] = field(default_factory=dict, init=False)
    """Kind -> [T], pairs of each row that did not run where rows of its phase usually do: in hot slots, or streamed."""
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
        few, self.few = self.few, None
        if few is not None and few.take(rows, slot_mapping):
            self.few = few

    def begin_layer(self) -> None:
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

    @property
    def bits(self) -> NDArray[np.uint8]:
        """Every request's plan, [R, L, E]; 0 = hot."""
        if self._bits is None:
            empty = np.zeros((self.sizes.num_layers, self.sizes.num_experts), dtype=np.uint8)
            plans = [span.request.plan for span in self.rows.spans]
            self._bits = np.stack([empty if plan is None else plan.bits.bits for plan in plans])
        return self._bits

    def bits_by_row(self, layer: int) -> NDArray[np.uint8]:
        """Each row's bits of every expert of one layer, [T, E]."""
        bits: NDArray[np.uint8] = self.bits[self.rows.owner, layer]
        return bits

    def bits_of(self, layer: int, pairs: Pairs) -> NDArray[np.uint8]:
        """The bits of each pair [P] on the device: those planned, 0 = its expert is hot; of prompts full precision."""
        bits: NDArray[np.uint8] = self.bits[self.rows.owner[pairs.rows], layer, pairs.experts]
        return bits if self.rows.all_decode else np.where(self.rows.decode[pairs.rows], bits, FULL_PRECISION_BITS)

    def end_layer(
        self, layer: int, split: Split, device_ps: int | None, host_ps: int = 0, hot_bytes: int | None = None
    ) -> None:
        """Account for where the pairs ran. device_ps: None where the device was not asked or gave nothing.

        host_ps: what the host's CPU takes for the warm pairs, simulated. hot_bytes: of the hot experts in use, where
        each has a width of its own.
        """
        if len(split.warm.rows):
            self._count("warm", split.warm.rows)
        streamed = [split.stream] if len(split.stream.rows) else []
        if streamed:
            self.streamed[layer, split.stream.experts] = True
        if len(split.device.rows):
            if device_ps is None:
                streamed.append(split.device)
                self._count_by_phase("fallback", "prefill_fallback", split.device.rows)
            elif split.offloaded:  # never in a step with prompts
                moved = np.array([expert in split.offloaded for expert in split.device.experts.tolist()])
                self._count("spilled", split.device.rows[moved])
                self._count("cold", split.device.rows[~moved])
            else:
                self._count_by_phase("cold", "prefill_device", split.device.rows)
        hot_pairs, hot_owners = split.loads or (split.hot.counts, ())
        self.clock.end_layer(
            hot_pairs,
            hot_owners=hot_owners,
            hot_bytes=hot_bytes,
            device_ps=device_ps or 0,
            streamed_experts=len(set().union(*(pairs.experts.tolist() for pairs in streamed))),
            streamed_pairs=sum(len(pairs.rows) for pairs in streamed),
            host_ps=host_ps,
        )

    def _count_by_phase(self, of_decode: str, of_prompts: str, rows: NDArray[np.int64]) -> None:
        decode = self.rows.decode[rows]
        self._count(of_decode, rows[decode])
        self._count(of_prompts, rows[~decode])

    def _count(self, kind: str, rows: NDArray[np.int64]) -> None:
        counts = np.bincount(rows, minlength=self.rows.num_rows)
        self._tally[kind] = self._tally[kind] + counts if kind in self._tally else counts

    # -- the end --------------------------------------------------------------------------------------------------

    def report(self, plans: dict[str, dict[str, Any]]) -> tuple[StepReport, StepTime] | None:
        """Close the simulated clock and say what happened, once per step; None if that was done or nothing ran.

        plans: what was planned before this step, by request.
        """
        if self._reported or not self.started:
            return None
        self._reported = True
        self._catch_up()
        if self.few is not None:
            self.clock.follow(self.few.native.now_ps)
        time = self.clock.end_step(sum(span.num_sampled_rows for span in self.spans.values()))
        drafts = {name: count for name, span in self.spans.items() if (count := span.num_drafts)}
        pairs = self.pairs_by_request()
        device = self.device.sums()
        report = StepReport(
            *(time.start_ps, time.end_ps, pairs, plans, drafts, self.sizes.pairs_per_row, self._rows_by_request()),
            device_pj=energy_shares(device, self.clock.model.hardware.energy, pairs),
            device=device,
            device_bounds=self.device.bounds(),
        )
        return report, time

    def abandon(self) -> None:
        """An error ended the step: its simulated time does not count."""
        if self.started and not self._reported:
            if self.few is not None:
                self.clock.follow(self.few.native.now_ps)
            self.clock.abandon_step()
        self._reported = True

    def pairs_by_request(self) -> dict[str, dict[str, int]]:
        """How many (row, expert) pairs of each request ran where, over all layers."""
        rows, per_row = self.rows, self.sizes.pairs_per_row
        if self.few is not None:
            return self.few.pairs_by_request(rows, per_row)
        elsewhere = sum(self._tally.values(), np.zeros(rows.num_rows, np.int64))
        tally = self._tally | {
            "hot": np.where(rows.decode, per_row - elsewhere, 0),
            "prefill": np.where(rows.decode, 0, per_row - elsewhere),
        }
        counts = {kind: np.add.reduceat(of_rows, rows.first_rows).tolist() for kind, of_rows in tally.items()}
        return {
            span.request.request_id: dict.fromkeys(PAIR_KINDS, 0) | {kind: found[i] for kind, found in counts.items()}
            for i, span in enumerate(rows.spans)
        }

    def _rows_by_request(self) -> dict[str, tuple[int, ...]]:
        """(decode rows, prompt rows) of each request."""
        counts = dict[str, tuple[int, ...]]()
        for span in self.rows.spans:
            prompt = min(max(span.first_decode - span.start, 0), span.num_tokens)
            counts[span.request.request_id] = span.num_tokens - prompt, prompt
        return counts


class RunningStep:
    """Which step runs now, for the layers: None outside of steps and while vLLM profiles memory."""

    def __init__(self) -> None:
        self.step: Step | None = None
