"""A trace in memory: arrays of rows, a table of requests, and what the live run did, if it was one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ndp_device.common import kept
from ndp_device.common.errors import TraceError
from ndp_device.common.outputs import require_own_folder
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.format import (
    ALL_REQUESTS,
    DECODE,
    MAY_LACK,
    PHASES,
    PRIVATE_DIRECTORY,
    REJECTED,
    TABLES,
    UNTIMED,
    Provenance,
    read_manifest,
    read_table,
    require_choices,
    write_chunk,
    write_manifest,
)

ROUTING = ("step", "request", "position", "phase", "ids", "weights")
"""Columns of rows."""


@dataclass(frozen=True)
class Sequence:
    """One request: P prompt tokens and D decoded ones, each routed once."""

    label: str
    arrival_s: float
    prompt_ids: NDArray[Any]  # [P, L, k]
    prompt_weights: NDArray[np.float32]
    decode_ids: NDArray[Any]  # [D, L, k]
    decode_weights: NDArray[np.float32]

    @classmethod
    def of(
        cls, label: str, ids: NDArray[Any], weights: NDArray[Any], prompt_len: int, arrival_s: float = 0.0
    ) -> Sequence:
        """Of all its tokens [P + D, L, k]."""
        prompt, decode = slice(prompt_len), slice(prompt_len, None)
        return cls(label, arrival_s, ids[prompt], weights[prompt], ids[decode], weights[decode])


@dataclass(frozen=True)
class Trace:
    """N rows in the order they were executed; R requests."""

    provenance: Provenance
    step: NDArray[np.int32]  # [N]
    request: NDArray[np.int32]  # [N], index into the request columns
    position: NDArray[np.int32]  # [N]
    phase: NDArray[np.uint8]  # [N]
    ids: NDArray[Any]  # [N, L, k]
    weights: NDArray[np.float32]  # [N, L, k]
    prompt_len: NDArray[np.int32]  # [R]
    arrival_s: NDArray[np.float64]  # [R]
    request_ids: Seq[str]  # [R]
    labels: Seq[str]  # [R]
    events: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Columns of the `steps` table; empty where nothing ran live. Simulated times: `simulated_steps`."""
    plans: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Columns of the `plans` table; cells is [rows, L, E]."""
    devices: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Columns of the `devices` table."""
    complete: bool = True
    """False: the recording was cut off; what is here is good, what came after is lost."""

    def __post_init__(self) -> None:
        p, rows, requests = self.provenance, len(self.step), len(self.prompt_len)
        planned = self.plans.get("request", self.request[:0])
        for what, least, named in (("routing row", 0, self.request), ("plan", ALL_REQUESTS, planned)):
            if len(wrong := named[(named < least) | (named >= requests)]):
                raise TraceError(f"a {what} names request {wrong[0]} but the trace has {requests}: number them from 0")
        if rows and int(self.phase.max()) >= len(PHASES):
            raise TraceError(f"phases must be 0..{len(PHASES) - 1}, got {int(self.phase.max())}")
        require_choices(self.ids, self.weights, p)
        for name in ("step", "position", "prompt_len", "arrival_s"):
            if len(values := getattr(self, name)) and not values.min() >= 0:
                raise TraceError(f"column {name!r} of a trace must hold numbers of at least 0, got {values.min()}")
        if not np.isfinite(self.arrival_s).all():
            raise TraceError("the arrivals of a trace must be finite")
        if len(back := np.flatnonzero(np.diff(self.step) < 0)):
            row = int(back[0]) + 1
            raise TraceError(
                f"rows must stand in the order of their steps: row {row} is of step {self.step[row]}, after step "
                f"{self.step[row - 1]}"
            )
        self._require_every_token()

    def _require_every_token(self) -> None:
        """Without a hole: a token that is not there would bring its neighbours together."""
        order, ends, _ = self.executed
        position = self.position[order]
        hole = np.diff(position) != 1
        hole[ends[1:-1][(ends[1:-1] > 0) & (ends[1:-1] < len(order))] - 1] = False  # from request to request
        if hole.any():
            at = int(np.argmax(hole))
            raise TraceError(
                f"a request must have each of its tokens: request {self.request[order[at]]} has token "
                f"{position[at + 1]} after {position[at]} (row {order[at + 1]})"
            )

    @cached_property
    def executed(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(rows [M], requests [R + 1], decodes [R]): the rows that count, request by request, positions ascending.

        Indices into rows: where each request begins and the last one ends, and where each decode begins. If a position
        ran twice (preemption), the last run counts; drafted tokens count if accepted.
        """
        order = np.lexsort((np.arange(len(self.step)), self.position, self.request))
        order = order[self.phase[order] != REJECTED]
        request, position = self.request[order], self.position[order]
        last = np.ones(len(order), np.bool_)
        last[:-1] = (request[1:] != request[:-1]) | (position[1:] != position[:-1])
        order = order[last]
        request, position = self.request[order], self.position[order]
        ends = np.searchsorted(request, np.arange(len(self.prompt_len) + 1))
        splits = [
            start + int(np.searchsorted(position[start:end], length))
            for (start, end), length in zip(itertools.pairwise(ends.tolist()), self.prompt_len.tolist(), strict=True)
        ]
        return order, ends, np.array(splits, np.int64)

    @cached_property
    def sequences(self) -> list[Sequence]:
        """One per request, positions ascending."""
        order, ends, splits = self.executed
        out = []
        for index, (start, end) in enumerate(itertools.pairwise(ends.tolist())):
            rows, prompt_len = order[start:end], int(splits[index]) - start
            told = self.ids[rows], self.weights[rows], prompt_len, float(self.arrival_s[index])
            out.append(Sequence.of(self.labels[index], *told))
        return out

    def simulated_steps(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(start_ps, step_ps) of every step of a live run. Raises TraceError where a step has none."""
        if not len(self.events.get("step", ())):
            raise TraceError("the trace holds no steps of a live run: record one with the plugin's 'record' setting")
        if self.lacks:
            raise TraceError(self.lacks)
        return self.events["simulated_start_ps"], self.events["simulated_step_ps"]

    @property
    def lacks(self) -> str:
        """Gaps of a live run's trace, in one sentence; empty where it has everything."""
        steps = len(self.events.get("step", ()))
        untimed = int((self.events["simulated_step_ps"] == UNTIMED).sum()) if steps else 0
        if not untimed:
            return ""
        return (
            f"the trace has no simulated times of {untimed} of its {steps} steps, because its device, real hardware, "
            "has none: compare measured times, or record the run beside a device that simulates"
        )

    def stats(self, sequence: Sequence, phase: str = "prefill") -> RoutingStats:
        """Routing statistics of a sequence's prompt or decode."""
        if phase == "prefill":
            ids, weights = sequence.prompt_ids, sequence.prompt_weights
        else:
            ids, weights = sequence.decode_ids, sequence.decode_weights
        return RoutingStats.from_choices(ids, weights, self.provenance.num_experts)

    def select(self, requests: Seq[int]) -> Trace:
        """The same trace with some of its requests, renumbered in the order given; without live events."""
        new_index = np.full(len(self.prompt_len), -1, np.int32)
        new_index[list(requests)] = np.arange(len(requests), dtype=np.int32)
        keep = new_index[self.request] >= 0
        rows = {name: getattr(self, name)[keep] for name in ROUTING}
        return Trace(
            provenance=self.provenance,
            **rows | {"request": new_index[rows["request"]]},
            prompt_len=self.prompt_len[list(requests)],
            arrival_s=self.arrival_s[list(requests)],
            request_ids=[self.request_ids[r] for r in requests],
            labels=[self.labels[r] for r in requests],
            complete=self.complete,
        )

    @classmethod
    def load(cls, directory: Path, *, model_digest: str | None = None) -> Trace:
        """Read a trace. Raises TraceError when it is damaged, foreign, or of another model than model_digest."""
        manifest = read_manifest(directory)
        p = manifest.provenance
        if model_digest and p.model_digest and model_digest != p.model_digest:
            raise TraceError(
                f"{directory} was recorded on model {p.model!r} with digest {p.model_digest}, "
                f"this model has {model_digest}: record a trace of this one"
            )
        tables = {table: read_table(directory, table, manifest) for table in TABLES}
        try:
            return cls._of_tables(p, tables, complete=manifest.chunks is not None)
        except TraceError as error:
            raise TraceError(f"{directory}: {error}") from None

    @classmethod
    def _of_tables(cls, p: Provenance, tables: dict[str, pa.Table], *, complete: bool) -> Trace:
        requests = _columns(tables["requests"], p)
        order = np.argsort(requests["request"], kind="stable")
        if not np.array_equal(requests["request"][order], np.arange(len(order))):
            raise TraceError(f"requests must be numbered 0..{len(order) - 1}, each once")
        routing = _columns(tables["routing"], p)
        return cls(
            provenance=p,
            **{name: routing[name] for name in ROUTING},
            prompt_len=requests["prompt_len"][order],
            arrival_s=requests["arrival_s"][order],
            request_ids=[str(v) for v in requests["id"][order]],
            labels=[str(v) for v in requests["label"][order]],
            events=_columns(tables["steps"], p),
            plans=_columns(tables["plans"], p),
            devices=_columns(tables["devices"], p),
            complete=complete,
        )

    def save(self, directory: Path) -> None:
        """Write the whole trace at once, one chunk per table. What was cut off stays known to be."""
        require_own_folder(directory)
        kept.make_directory(directory, PRIVATE_DIRECTORY)
        write_manifest(directory, self.provenance, None)
        columns: dict[str, dict[str, Any]] = {
            "requests": {
                "request": np.arange(len(self.prompt_len), dtype=np.int32),
                "id": list(self.request_ids),
                "label": list(self.labels),
                "prompt_len": self.prompt_len,
                "arrival_s": self.arrival_s,
            },
            "routing": {name: getattr(self, name) for name in ROUTING},
            "steps": self.events,
            "plans": self.plans,
            "devices": self.devices,
        }
        chunks = dict.fromkeys(TABLES, 0)
        for table in TABLES:
            if columns[table] and len(next(iter(columns[table].values()))):
                write_chunk(directory, table, 0, columns[table], self.provenance)
                chunks[table] = 1
        if self.complete:
            write_manifest(directory, self.provenance, chunks)


def from_sequences(provenance: Provenance, sequences: Seq[Sequence]) -> Trace:
    """A trace of requests that ran one after the other: one prefill step each, then one step per decoded token."""
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in ("step", "request", "position", "phase")}
    next_step = 0
    for index, s in enumerate(sequences):
        prompt, decoded = len(s.prompt_ids), len(s.decode_ids)
        parts["step"].append(next_step + np.r_[np.zeros(prompt, int), 1 + np.arange(decoded)])
        parts["request"].append(np.full(prompt + decoded, index))
        parts["position"].append(np.arange(prompt + decoded))
        parts["phase"].append(np.r_[np.zeros(prompt, int), np.full(decoded, DECODE)])
        next_step += 1 + decoded
    empty = np.zeros((0, provenance.num_layers, provenance.top_k), np.float32)
    ids = np.concatenate([empty.astype(np.uint8), *(a for s in sequences for a in (s.prompt_ids, s.decode_ids))])
    weights = np.concatenate([empty, *(a for s in sequences for a in (s.prompt_weights, s.decode_weights))])
    require_choices(ids, weights, provenance)  # before the cast, which wraps
    kinds = {"step": np.int32, "request": np.int32, "position": np.int32, "phase": np.uint8}
    return Trace(
        provenance=provenance,
        **{name: np.concatenate([*parts[name], np.zeros(0)]).astype(kind) for name, kind in kinds.items()},
        ids=ids.astype(provenance.id_type),
        weights=weights.astype(np.float32),
        prompt_len=np.array([len(s.prompt_ids) for s in sequences], np.int32),
        arrival_s=np.array([s.arrival_s for s in sequences], np.float64),
        request_ids=[str(i) for i in range(len(sequences))],
        labels=[s.label for s in sequences],
    )


def _columns(table: pa.Table, provenance: Provenance) -> dict[str, NDArray[Any]]:
    shapes = {
        "ids": (-1, provenance.num_layers, provenance.top_k),
        "weights": (-1, provenance.num_layers, provenance.top_k),
        "cells": (-1, provenance.num_layers, provenance.num_experts),
    }
    out = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        column = column.fill_null(UNTIMED) if name in MAY_LACK else column
        values = column.flatten() if name in shapes else column
        if column.null_count or values.null_count:
            raise TraceError(f"column {name!r} of a trace must have a value in every row, and has none in some")
        array = values.to_numpy(zero_copy_only=False)
        out[name] = array.reshape(shapes[name]) if name in shapes else array
    return out
