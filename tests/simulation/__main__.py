"""`make simulate SEEDS=1000`: as many histories as it is told, from a seed on. A seed that fails is printed and kept.

    PYTHONPATH=tests python -m simulation --seeds 1000 [--first N] [--jobs N] [--seconds S]
    PYTHONPATH=tests python -m simulation --replay SEED

The last line is JSON: histories, histories a second, calls and faults in them. Seeds that failed lie in
tests/data/simulation-seeds.txt once they are fixed, and the suite runs them for ever.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import sys
import time
import traceback

from simulation.life import History, silence


def one(seed: int) -> tuple[int, dict[str, int], int, str]:
    """(seed, what happened how often, nanoseconds of simulated time, what went wrong)."""
    history = History(seed)
    try:
        world = history.run()
    except Exception:
        return seed, history.counted, 0, traceback.format_exc(limit=-6)
    return seed, history.counted, world.now_ns, ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--replay", type=int, help="one seed, with its error")
    given = parser.parse_args()
    silence()
    if given.replay is not None:
        history = History(given.replay)
        world = history.run()
        print(json.dumps({"seed": given.replay, "digest": world.digest, "counted": history.counted}))
        return 0
    start, done, simulated_ns, failed = time.monotonic(), 0, 0, []
    counted: collections.Counter[str] = collections.Counter()
    with multiprocessing.Pool(given.jobs, initializer=silence) as pool:
        for seed, what, lasted_ns, error in pool.imap_unordered(one, range(given.first, given.first + given.seeds), 8):
            done += 1
            counted.update(what)
            simulated_ns += lasted_ns
            if error:
                failed.append(seed)
                print(f"seed {seed}:\n{error}", file=sys.stderr, flush=True)
            if time.monotonic() > start + given.seconds:
                pool.terminate()
                break
    seconds = time.monotonic() - start
    print(json.dumps({
        "first": given.first, "seeds": done, "seconds": round(seconds, 1), "per_s": round(done / seconds, 1),
        "simulated_hours": round(simulated_ns / 3.6e12, 2), "failed": failed[:100], "counted": dict(counted),
    }))  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
