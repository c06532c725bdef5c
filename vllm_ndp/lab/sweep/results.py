"""Rows of a sweep on disk as they are found, so that a sweep that was stopped goes on where it was.

    sweep.jsonl    one line about the sweep (what it varies, on which traces, by which program), then one line per row

A line that a crash cut off is dropped and its row found again. Numbers are written so that they read back the same to
the digit. Knows one file. Does not know what is varied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from ndp_device.common import durable
from ndp_device.common.errors import ConfigError
from vllm_ndp.lab.compare import Replayed
from vllm_ndp.lab.sweep.grid import Result
from vllm_ndp.lab.vectorised.outcome import Summary

FORMAT = "vllm-ndp-sweep"
NAME = "sweep.jsonl"


class Heading(msgspec.Struct, frozen=True):
    """The first line."""

    format: str
    about: dict[str, Any]


class Line(msgspec.Struct, frozen=True):
    """Every other line: the row, or why there is none."""

    key: str
    row: dict[str, Any] = {}
    decode_ps: list[float] = []
    num_decisions: int = 0
    measured_seconds: float = 0.0
    refused: str = ""

    @classmethod
    def of(cls, key: str, result: Result) -> Line:
        if isinstance(result, str):
            return cls(key, refused=result)
        decode_ps = result.decode_ps.tolist()
        return cls(key, result.row.as_dict(), decode_ps, result.num_decisions, result.measured_seconds)

    @property
    def result(self) -> Result:
        if self.refused:
            return self.refused
        values: dict[str, Any] = {name: math.nan if value is None else value for name, value in self.row.items()}
        row = msgspec.convert(values, Summary)
        return Replayed(row, np.array(self.decode_ps, np.float64), self.num_decisions, self.measured_seconds)


class SweepFile:
    """The file of one sweep, open for more rows. `known` is what it held when it was opened."""

    def __init__(self, directory: Path, about: Mapping[str, Any]) -> None:
        """about: everything that the rows depend on; a file about something else is refused."""
        path = directory / NAME
        heading = msgspec.json.encode(Heading(FORMAT, dict(about)))
        self.known: dict[str, Result] = {}
        durable.make_directory(directory)
        whole = 0
        if path.exists() and path.stat().st_size:
            lines = path.read_bytes().splitlines(keepends=True)
            _require_same(path, lines[0], msgspec.json.decode(heading, type=Heading))
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break  # cut off: found again
                whole += len(line)
                if number > 1:
                    self._know(path, number, line)
        self._file = path.open("r+b" if whole else "wb")
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._write(heading)
            durable.sync(directory)

    def add(self, key: str, result: Result) -> None:
        """Keep a row. It is on disk when this returns."""
        self._write(msgspec.json.encode(Line.of(key, result)))

    def _know(self, path: Path, number: int, line: bytes) -> None:
        try:
            found = msgspec.json.decode(line, type=Line)
            self.known[found.key] = found.result
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} line {number} is damaged ({error}): delete that line or the file") from None

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> SweepFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _require_same(path: Path, line: bytes, wanted: Heading) -> None:
    try:
        found = msgspec.json.decode(line, type=Heading)
    except msgspec.DecodeError:
        found = None
    if found is None or found.format != FORMAT:
        raise ConfigError(f"{path} is not a file of a sweep: give --out a directory of its own")
    different = sorted(
        name for name in {*found.about, *wanted.about} if found.about.get(name) != wanted.about.get(name)
    )
    if different:
        raise ConfigError(
            f"{path} holds another sweep, with other {', '.join(different)}: give --out a directory of its own"
        )
