"""Writes a trace while a run is going on: rows are copied into a list, which one background thread turns into chunks.

The list is bounded: a disk that cannot keep up slows the run down instead of filling its memory.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ndp_device.common import kept
from ndp_device.common.errors import TraceError, why_unwritable
from ndp_device.common.outputs import require_own_folder
from vllm_ndp.traces.format import (
    ALL_REQUESTS,
    PRIVATE_DIRECTORY,
    TABLES,
    Provenance,
    require_choices,
    schema,
    write_chunk,
    write_manifest,
)

_BUFFER_TOKEN_LAYERS = 1 << 22
"""Rows that wait at most, times layers, beside those on their way to the disk: 50 MB at top-2."""
_FLUSH_SECONDS = 2.0
"""The oldest row waits this long in memory: what a crash can lose."""


def require_writable(directory: Path) -> None:
    """Before a run that is to be recorded there: raises TraceError where no trace can be written."""
    with _writing_to(directory), tempfile.TemporaryFile(dir=directory):
        pass


@contextmanager
def _writing_to(directory: Path) -> Iterator[None]:
    """Write in a directory that exists then and holds nothing. Raises TraceError."""
    try:
        kept.make_directory(directory, PRIVATE_DIRECTORY)
        require_own_folder(directory)
        yield
    except OSError as error:
        raise TraceError(f"no trace can be written to {directory}: {why_unwritable(error)}") from None


class TraceWriter:
    """Appends to one trace directory; close() waits for the disk. Use from one thread."""

    def __init__(self, directory: Path, provenance: Provenance, *, flush_seconds: float = _FLUSH_SECONDS) -> None:
        self._provenance = provenance
        self._directory = directory
        with _writing_to(directory):
            write_manifest(directory, provenance, None)
        self._flush_seconds = flush_seconds
        self._most_rows = _BUFFER_TOKEN_LAYERS // provenance.num_layers
        self._changed = threading.Condition()
        self._rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in TABLES}
        self._waiting = 0  # rows of routing; an item of its list holds those of a step
        self._chunks = dict.fromkeys(TABLES, 0)
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ndp-trace-writer", daemon=True)
        self._thread.start()

    def add_request(
        self, request: int, request_id: str, prompt_len: int, arrival_s: float = 0.0, label: str = ""
    ) -> None:
        """`request` is the index that the other tables use; arrival_s is measured from the start of the recording."""
        self._add("requests", (request, request_id, label, prompt_len, arrival_s))

    def append_step(
        self,
        step: int,
        request_index: ArrayLike,
        positions: ArrayLike,
        phases: ArrayLike,
        ids: NDArray[Any],
        weights: NDArray[Any],
    ) -> None:
        """The routing of one forward pass: one entry per row, ids and weights [rows, L, k]. Everything is copied."""
        rows = len(ids)
        require_choices(ids, weights, self._provenance)
        told = np.full(rows, step, np.int32), np.array(request_index, np.int32), np.array(positions, np.int32)
        p = self._provenance
        columns = *told, np.array(phases, np.uint8), ids.astype(p.id_type), weights.astype(np.float32)
        with self._changed:
            self._refuse_if_over()
            while self._waiting and self._waiting + rows > self._most_rows:
                self._changed.notify_all()
                self._changed.wait()
                self._refuse_if_over()
            self._rows["routing"].append(columns)
            self._waiting += rows
            if 2 * self._waiting > self._most_rows:
                self._changed.notify_all()

    def append_plan(
        self, step: int, epoch: int, tiers: NDArray[np.uint8], bits: Mapping[int, NDArray[np.uint8]]
    ) -> None:
        """Placement [L, E] (0 cold, 1 hot, 2 warm) and bits [L, E] per request index, in force from `step` on."""
        for request, cells in {ALL_REQUESTS: tiers, **bits}.items():
            self._add("plans", (step, epoch, request, np.array(cells, np.uint8)))

    def append_event(
        self,
        step: int,
        epoch: int,
        simulated_start_ps: int | None,
        simulated_step_ps: int | None,
        measured_step_s: float,
        fallback_pairs: int = 0,
    ) -> None:
        """Record the times of this step on the live run's two clocks; None: it had no simulated time."""
        self._add("steps", (step, epoch, simulated_start_ps, simulated_step_ps, measured_step_s, fallback_pairs))

    def append_devices(self, step: int, changes: Mapping[int, int]) -> None:
        """Record changes of several devices in or before this step: device -> DOWN or CHANGED."""
        for device, change in changes.items():
            self._add("devices", (step, device, change))

    def close(self) -> None:
        """Write what waits and mark the trace complete. Raises TraceError if anything could not be written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._failure is not None:
            self._refuse_if_over()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, table: str, row: tuple[Any, ...]) -> None:
        with self._changed:
            self._refuse_if_over()
            self._rows[table].append(row)

    def _refuse_if_over(self) -> None:
        if self._failure is not None:
            raise TraceError(f"recording to {self._directory} stopped: {self._failure}") from self._failure
        if self._closed:
            raise TraceError(f"the trace {self._directory} is closed: nothing more can be recorded into it")

    def _run(self) -> None:
        closed = False
        try:
            while not closed:
                with self._changed:
                    if not self._closed and 2 * self._waiting <= self._most_rows:
                        self._changed.wait(self._flush_seconds)
                    closed = self._closed
                    taken, self._rows = self._rows, {table: [] for table in TABLES}
                    self._waiting = 0
                    self._changed.notify_all()
                self._flush(taken)
            write_manifest(self._directory, self._provenance, self._chunks)
        except Exception as error:  # kept for the owner of the recording, who meets it at the next call
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _flush(self, taken: Mapping[str, list[tuple[Any, ...]]]) -> None:
        for table in TABLES:
            if rows := taken[table]:
                join: Any = np.concatenate if table == "routing" else list
                names = schema(table, self._provenance).names
                columns = {name: join(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
                write_chunk(self._directory, table, self._chunks[table], columns, self._provenance)
                self._chunks[table] += 1
