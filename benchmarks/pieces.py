"""Pieces of a long measurement: each in a process of its own, within a limit, kept as soon as something is found.

A machine that is lent for half an hour is lost at its end, or when a kernel hangs: so a piece that takes three times as
long as expected is ended and the next one begins, a piece may be cut into ways (rows of one table) whose results are
kept one by one, and what is kept is not run again. A way that hung, crashed or failed says so in every call; --again
runs it once more. The ways behind it run in a new process. Knows processes, files and the clock; not what is measured.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from measured import Measurement, readable

LIMIT_S = 600
PATIENCE = 3.0
"""How many times longer than expected a piece or a way may take."""
LEAST_S = 90.0
"""Of patience: a first start compiles, and reads files that no cache holds."""
GRACE_S = 5.0
"""For a piece to look at the clock itself, before it is ended."""
UNFINISHED = "ways that are left"
"""In the figures of a piece that is to be gone on with."""
NOT_ENDED = "it did not end: its process was stopped"

Row = dict[str, Any]


class LeftOutError(Exception):
    """Raised by a piece that means nothing on this machine, or without a file that is not here."""


@dataclass(frozen=True)
class Run:
    """What a piece is told."""

    dry: bool  # small, to see whether it runs at all
    folder: Path  # for files beside its figures
    before: list[Row] = field(default_factory=list)
    """Rows of the ways before, of this process with keys that begin with an underscore, which are not kept."""

    def earlier(self, name: str) -> Any:
        """What the first way before this one left under a name; None where none did."""
        return next((row[name] for row in self.before if name in row), None)


@dataclass(frozen=True)
class Piece:
    """run: (Run) -> figures; with `ways` (Run, way) -> rows."""

    question: str
    minutes: float  # expected of a machine that it is meant for, of all ways
    run: Callable[..., Any]
    ways: tuple[str, ...] = ()
    dry_ways: int | None = None  # the first so many of them in a dry run
    apart: bool = False  # each way in a process of its own, because what the one before held must be free
    ladder: bool = False  # each way has what the ones before it have: none is run after one that failed

    def ways_of(self, *, dry: bool) -> tuple[str, ...]:
        return self.ways[: self.dry_ways] if dry else self.ways

    def limit_s(self, share: float = 1.0) -> float:
        """How long a share of it may take."""
        return min(max(PATIENCE * 60 * self.minutes * share, LEAST_S), LIMIT_S)


class Pieces:
    """All of them, by name, most valuable first. script: a program that calls `run_here` for its --piece."""

    def __init__(self, script: Path, pieces: dict[str, Piece], name_machine: Callable[[], str]) -> None:
        """name_machine: what figures depend on beside the processor."""
        self._script, self.pieces, self._name_machine = script, pieces, name_machine

    # -- all of them, each in a process ---------------------------------------------------------------------------

    def run_all(
        self, names: list[str], out: Path, kept: Path | None, *, minutes: float, again: bool = False, dry: bool = False
    ) -> dict[str, str]:
        """One sentence on each piece. kept: a folder whose results count as well.

        Begins nothing that is expected to end later than in so many minutes, and ends what has not ended by then.
        """
        end_s, became = time.monotonic() + 60 * minutes, dict[str, str]()
        for name in names:
            became[name] = self._run(name, out, kept, end_s, again=again, dry=dry)
            print(f"{name}: {became[name]}", flush=True)
        return became

    def _run(self, name: str, out: Path, kept: Path | None, end_s: float, *, again: bool, dry: bool) -> str:
        file, piece = out / f"gpu_{name}.json", self.pieces[name]
        folders = [out, *([] if kept is None else [kept])]
        earlier = next((path for folder in folders if (path := folder / file.name).exists()), None)
        if again and earlier is not None:
            earlier = _without_failed(earlier, file)
        ways = piece.ways_of(dry=dry)
        to_go = ways if earlier is None else _to_go(earlier)
        if earlier is not None and not to_go:
            failed = _failed(json.loads(earlier.read_text())["figures"])
            return f"FAILED before: {', '.join(failed)}; --again runs these" if failed else "there already"
        one_s, started = 60 * piece.minutes / max(len(piece.ways), 1), time.monotonic()
        if one_s > end_s - started:
            return "no time left: run this again"
        while True:
            left_s = end_s - time.monotonic()
            limit_s = min(LIMIT_S if dry else piece.limit_s(len(to_go) / len(ways) if ways else 1.0), left_s)
            command = [sys.executable, str(self._script), "--piece", name, "--out", str(file)]
            command += ["--seconds", str(limit_s), *(["--dry-run"] if dry else [])]
            command += ["--earlier", str(earlier)] if earlier is not None else []
            words, status = run_within(command, limit_s + GRACE_S, file.with_suffix(".log"))
            took = f"{time.monotonic() - started:.0f} s"
            if status and words.startswith(f"{name}: left out"):
                return words.removeprefix(f"{name}: ")
            if not (piece.ways and file.exists()):
                return f"FAILED after {took}: {words}" if status else f"ran in {took}"
            before, to_go, earlier = len(to_go), _to_go(file), file
            if not to_go or len(to_go) == before or one_s > end_s - time.monotonic():
                return f"{_of_ways(json.loads(file.read_text())['figures'])} in {took}"

    # -- one of them, in this process -----------------------------------------------------------------------------

    def run_here(self, name: str, file: Path, *, dry: bool, seconds: float, earlier: Path | None) -> dict[str, Any]:
        """Measure and write."""
        piece, end_s = self.pieces[name], time.monotonic() + seconds
        measurement = Measurement(f"{piece.question}\n")
        keep = partial(self._keep, name, measurement, file, dry=dry)
        try:
            if not piece.ways:
                return keep(piece.run(Run(dry, file.parent)))
            figures: dict[str, Any] = {}
            rows = [] if earlier is None else json.loads(earlier.read_text())["figures"]["results"]
            for figures in self._ways(name, rows, file, end_s, dry=dry):
                figures = keep(figures)
            return figures
        except LeftOutError as error:
            if file.exists() and not json.loads(file.read_text())["figures"]["results"]:
                file.unlink()
            raise SystemExit(f"{name}: left out, {error}") from None

    def _ways(self, name: str, rows: list[Row], file: Path, end_s: float, *, dry: bool) -> Iterator[dict[str, Any]]:
        """The figures after each step forward."""
        piece = self.pieces[name]
        ways = piece.ways_of(dry=dry)
        found = {way: [row for row in rows if row["way"] == way] for way in ways}
        mine: list[Row] = []
        began_s, done = time.monotonic(), 0
        for way in ways:
            if piece.ladder and any("failed" in row for rows_of in found.values() for row in rows_of):
                break
            if found[way]:
                continue
            so_far_s = (time.monotonic() - began_s) / done if done else 0.0
            if time.monotonic() + so_far_s > end_s:
                break
            found[way] = [{"way": way, "failed": NOT_ENDED}]
            yield _figures(found, to_go=[later for later in ways if not found[later]])
            run = Run(dry, file.parent, mine)
            try:
                found[way] = self._apart(name, way, file, run, end_s) if piece.apart else _attempt(piece, run, way)
            except LeftOutError:  # as if it had not begun
                found[way] = []
                yield _figures(found, to_go=[later for later in ways if not found[later]])
                raise
            mine += found[way]
            done += 1
            yield _figures(found, to_go=[later for later in ways if not found[later]])
            if not piece.apart and any("failed" in row for row in found[way]):
                break  # a GPU whose kernel has failed fails for ever in this process: the others get a new one
        if not done:  # of a piece that was stopped behind its last way, or of a ladder
            yield _figures(found, to_go=[way for way in ways if not found[way]])

    def _apart(self, name: str, way: str, file: Path, run: Run, end_s: float) -> list[Row]:
        """A way in a process of its own."""
        piece = self.pieces[name]
        rows = file.with_suffix(".rows")
        limit_s = min(LIMIT_S if run.dry else piece.limit_s(1 / len(piece.ways)), end_s - time.monotonic())
        command = [sys.executable, str(self._script), "--piece", name, "--way", way, "--out", str(rows)]
        command += ["--seconds", str(limit_s), *(["--dry-run"] if run.dry else [])]
        log = file.with_suffix(".log")
        words, status = run_within(command, limit_s + GRACE_S, log, is_group=False)  # it ends with this one
        if status and words.startswith("left out"):
            raise LeftOutError(words.removeprefix("left out, "))
        if status:
            return [{"way": way, **failure(log.read_text(errors="replace"), words)}]
        found: list[Row] = json.loads(rows.read_text())
        rows.unlink()
        return found

    def run_way(self, name: str, way: str, rows: Path, *, dry: bool, seconds: float) -> None:
        """In the process of a way, which says where it was if it crashes or takes longer."""
        piece = self.pieces[name]
        faulthandler.enable()
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            found = [{"way": way, **row} for row in piece.run(Run(dry, rows.parent), way)]
        except LeftOutError as error:
            raise SystemExit(f"left out, {error}") from None
        rows.write_text(json.dumps(found))

    def _keep(
        self, name: str, measurement: Measurement, file: Path, figures: dict[str, Any], *, dry: bool
    ) -> dict[str, Any]:
        """Whole or not at all, whenever the process is ended."""
        machine = self._name_machine()
        content = measurement.save({"gpu": machine or "none: a dry run", **figures}, None)
        content["machine"]["gpu"] = machine or "none"
        content["command"] = f"python benchmarks/{self._script.name} --pieces {name}{' --dry-run' if dry else ''}"
        _write_whole(file, readable(content) + "\n")
        return figures


def _attempt(piece: Piece, run: Run, way: str) -> list[Row]:
    """A way in this process, which ends if it takes too long: a kernel that hangs cannot be interrupted."""
    limit_s = LIMIT_S if run.dry else piece.limit_s(1 / len(piece.ways))
    watch = threading.Timer(limit_s, lambda: (faulthandler.dump_traceback(), os._exit(124)))
    watch.daemon = True
    watch.start()
    try:
        return [{"way": way, **row} for row in piece.run(run, way)]
    except LeftOutError:
        raise
    except Exception as error:  # one way that fails must not cost the others
        return [{"way": way, "failed": f"{type(error).__name__}: {error}"[-300:]}]
    finally:
        watch.cancel()


def _figures(found: dict[str, list[Row]], to_go: list[str]) -> dict[str, Any]:
    rows = [
        {key: value for key, value in row.items() if not key.startswith("_")} for rows in found.values() for row in rows
    ]
    return {"results": rows} | ({UNFINISHED: to_go} if to_go else {})


def _to_go(file: Path) -> list[str]:
    found: list[str] = json.loads(file.read_text())["figures"].get(UNFINISHED, [])
    return found


def _failed(figures: dict[str, Any]) -> list[str]:
    return sorted({row["way"] for row in figures.get("results", []) if "failed" in row})


def _without_failed(earlier: Path, file: Path) -> Path | None:
    """The ways that failed are still to be run, and no others; None where none did: then all are."""
    content = json.loads(earlier.read_text())
    figures = content["figures"]
    if not (failed := _failed(figures)):
        return None
    figures["results"] = [row for row in figures["results"] if row["way"] not in failed]
    figures[UNFINISHED] = [*failed, *figures.get(UNFINISHED, [])]
    _write_whole(file, readable(content) + "\n")
    return file


def _write_whole(file: Path, text: str) -> None:
    """Or not at all, whenever the process is ended."""
    aside = file.with_suffix(".part")
    aside.write_text(text)
    aside.replace(file)


def _of_ways(figures: dict[str, Any]) -> str:
    ways = {row["way"] for row in figures["results"]}
    failed = set(_failed(figures))
    total = len(ways) + len(figures.get(UNFINISHED, []))
    return f"{len(ways - failed)} of {total} ways" + (f", FAILED: {', '.join(sorted(failed))}" if failed else "")


_OWN = r'File "[^"\n]*?((?:vllm_ndp|ndp_device)/[^"\n]+)", line (\d+)'
_ANY = r'File "([^"\n]+)", line (\d+)'
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FIRST = "Traceback (most recent call last):"
_LAST = "(most recent call first):"


def failure(log: str, words: str) -> Row:
    """What the last program of a log failed of, and at which FILE:LINE: in the plugin or the device if it was there,
    else anywhere. Of errors that followed each other it is the first one; of a hang it is the main thread's place.

    words: what failed where the log holds neither an error nor a crash.
    """
    said = re.sub(r"^\[rank\d+\]: ?", "", log.rpartition("\n$ ")[2], flags=re.MULTILINE)  # as torch writes it
    if _LAST in said:  # of faulthandler: it names the thread that crashed, and ends with the main one
        words = next(line for line in said.splitlines() if line.startswith(("Fatal Python error", "Timeout")))
        places, which = said.rpartition("Current thread")[2].partition("\n\n")[0], slice(0, 1)
        places = places if "Current thread" in said else said.rpartition(_LAST)[2]
    else:
        errors = said.split(_FIRST)
        first = len(errors) - 1
        while first > 1 and any(chained in errors[first - 1] for chained in _CHAINED):
            first -= 1
        places, which = errors[first], slice(-1, None)
        if first:
            words = next((line for line in places.splitlines() if line.strip() and line[0] != " "), words)
    found = re.findall(_OWN, places)[which] or re.findall(_ANY, places)[which]
    return {"failed": words[-300:], "at": ":".join(found[0]) if found else "an unknown place"}


def run_within(command: list[str], limit_s: float, log: Path, *, is_group: bool = True) -> tuple[str, int]:
    """The last line that it wrote, and its status; it is ended at the limit, and with it the group that it is."""
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=is_group)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL) if is_group else process.kill()
            process.wait()
            return f"it took longer than {limit_s:.0f} s", 124
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:500], status
