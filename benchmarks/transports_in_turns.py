"""What does a message cost by this transport and by that of an older commit, in turns: shared memory, socket, keys?

The older commit is a checkout with an environment of its own. Each round runs both, in either order by turns, so that
the machine's other work meets both alike; a ratio is the median of the rounds' ratios. `carried` and `round_trips` are
those of protocol_roundtrip.py and encrypted_roundtrip.py of each checkout: a peer that answers with the bytes it got.

    git worktree add --detach ../older 3db895e && cd ../older && python -m venv .venv && .venv/bin/pip install -e .[cpu]
    python benchmarks/transports_in_turns.py ../older [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from measured import ROOT, Measurement, add_json_option

SIZES = {0: 1000, 8 << 10: 1000, 64 << 10: 500, 1 << 20: 100, 16 << 20: 20}
WAYS = ("memory", "socket", "plain tcp", "tcp with keys")
ROUND = """
import json, sys, tempfile
from pathlib import Path
sys.path.insert(0, "benchmarks")
import encrypted_roundtrip, protocol_roundtrip
way, sizes = json.loads(sys.argv[1])
sizes = {int(size): count for size, count in sizes.items()}
if way in ("memory", "socket"):
    found = {s: [t / 1e3 for t in protocol_roundtrip.carried(s, n, slots=way == "memory")] for s, n in sizes.items()}
else:
    with tempfile.TemporaryDirectory() as folder:
        encrypted_roundtrip.make_keys(Path(folder, "keys"), encrypted_roundtrip.HOST)
        found = encrypted_roundtrip.round_trips(Path(folder, "keys"), encrypted=way != "plain tcp", sizes=sizes)
print(json.dumps(found))
"""
Times = dict[str, list[float]]


def one_round(tree: Path, way: str) -> Times:
    """Microseconds of each round trip, by the size of its body."""
    command = [str(tree / ".venv" / "bin" / "python"), "-c", ROUND, json.dumps([way, SIZES])]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def row(way: str, size: int, rounds: list[tuple[Times, Times]]) -> dict[str, Any]:
    both = [[np.percentile(times[str(size)], [50, 90]) for times in one] for one in rounds]
    older, this = (np.median([pair[which] for pair in both], axis=0).round(1).tolist() for which in (0, 1))
    ratios = [float(pair[1][0] / pair[0][0]) for pair in both]
    return {
        "way": way,
        "bytes": size,
        "older_p50_us": older[0],
        "older_p90_us": older[1],
        "this_p50_us": this[0],
        "this_p90_us": this[1],
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path, help="a checkout of the older commit, with .venv")
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    given = parser.parse_args()
    trees = given.older.resolve(), ROOT
    measurement = Measurement(__doc__ or "")
    taken: dict[str, list[tuple[Times, Times]]] = {way: [] for way in WAYS}
    for number in range(given.rounds):
        for way in WAYS:
            order = trees if number % 2 == 0 else trees[::-1]
            found = {tree: one_round(tree, way) for tree in order}
            taken[way].append((found[trees[0]], found[trees[1]]))
    rows = [row(way, size, rounds) for way, rounds in taken.items() for size in SIZES]
    print(f"{'way':14}{'bytes':>10}{'older':>10}{'this':>10}{'ratio':>7}   us, p50")
    for one in rows:
        print(f"{one['way']:14}{one['bytes']:>10}{one['older_p50_us']:>10}{one['this_p50_us']:>10}{one['ratio']:>7}")
    commit = ["git", "-C", str(trees[0]), "rev-parse", "--short", "HEAD"]
    older = subprocess.run(commit, capture_output=True, text=True).stdout.strip()
    measurement.end({"older": older, "rounds": given.rounds, "results": rows}, given.json)


if __name__ == "__main__":
    main()
