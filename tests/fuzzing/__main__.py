"""`make fuzz SECONDS=600`: every target in turns for as long as it is told. What ends badly is kept and printed.

Peers are in peers.py, files in files.py. The last line is JSON: executions, executions a second and findings of each
target, in one process on one core. What was found lies in tests/data/fuzz/TARGET, and the suite runs it for ever.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from paths import DATA

from fuzzing.cases import Files, ended_badly
from fuzzing.files import Kind, kinds
from fuzzing.peers import Target, targets

SLOW_S = 20
KEPT = DATA / "fuzz"


class TooSlow(BaseException):
    """One input took SLOW_S: a hang, as far as a person is concerned."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all, shared by the targets")
    parser.add_argument("--target", action="append", help="only these; may be given several times")
    parser.add_argument("--seed", type=int, default=None, help="of the mutator; default: the clock")
    given = parser.parse_args()
    named: dict[str, Kind | Target] = {each.name: each for each in (*targets(), *kinds())}
    if unknown := set(given.target or ()) - set(named):
        parser.error(f"no target {sorted(unknown)[0]!r}: there are {', '.join(named)}")
    chosen = [named[name] for name in given.target or named]
    seed = int(time.time()) if given.seed is None else given.seed
    signal.signal(signal.SIGALRM, _too_slow)
    logging.disable()
    results = {}
    with tempfile.TemporaryDirectory(prefix="ndp-fuzz-") as folder:
        files = Files(Path(folder))
        for each in chosen:
            seconds = given.seconds / len(chosen)
            is_file = isinstance(each, Kind)
            result = _files(each, files, seed, seconds) if is_file else _mutated(each, seed, seconds)
            results[each.name] = result
            print(f"{each.name:18} {result['executions']:10} executions {result['per_s']:9.0f}/s "
                  f"{result['findings']} found", flush=True)  # fmt: skip
    print(json.dumps({"seed": seed, "targets": results}))
    return 1 if any(result["findings"] for result in results.values()) else 0


def _too_slow(number: int, frame: object) -> None:
    raise TooSlow


def _report(executions: int, started_s: float, findings: int) -> dict[str, Any]:
    seconds = time.monotonic() - started_s
    return {
        "executions": executions,
        "seconds": round(seconds, 1),
        "per_s": round(executions / max(seconds, 1e-9), 1),
        "findings": findings,
    }


def _files(kind: Kind, files: Files, seed: int, seconds: float) -> dict[str, Any]:
    files.original(kind)
    start, done, found = time.monotonic(), 0, 0
    while time.monotonic() - start < seconds:
        number = seed * 1_000_000 + done
        path = files.damaged(kind, number)
        signal.alarm(SLOW_S)
        try:
            end = ended_badly(kind, path)
        except TooSlow:
            end = f"it took more than {SLOW_S} s"
        signal.alarm(0)
        done += 1
        if end is not None:
            found += 1
            print(f"{kind.name} seed {number}: {end}", file=sys.stderr, flush=True)
    return _report(done, start, found)


def _mutated(target: Target, seed: int, seconds: float) -> dict[str, Any]:
    rng, seeds = random.Random(f"{target.name} {seed}"), target.seeds()
    start, done, found = time.monotonic(), 0, 0
    while time.monotonic() - start < seconds:
        data = rng.choice(seeds)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = target.mutated(rng, data)
        done += 1
        signal.alarm(SLOW_S)
        try:
            target.run(data)
        except (Exception, TooSlow):
            found += 1
            _keep(target.name, data)
        signal.alarm(0)
    return _report(done, start, found)


def _keep(name: str, data: bytes) -> None:
    folder = KEPT / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    print(f"{name}: kept {path}\n{traceback.format_exc(limit=-4)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
