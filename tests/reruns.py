"""Tests that needed a second run in the last ten runs of .ci/run: one that needed it in two of them fails the run.

python tests/reruns.py NAMES_FILE [LEDGER]

NAMES_FILE: a test a line, those that failed in this run and passed when they ran again alone; empty for none. The
ledger lies in the cache of the user who runs CI, so that it outlives a checkout. Where that cache does not last either,
nothing is counted over several runs, and the line that this prints is all there is.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

RUNS = 10
LEDGER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-ndp" / "reruns.json"


def read(ledger: Path) -> list[list[str]]:
    """For each of the last runs, oldest first, the tests that needed a second one."""
    try:
        runs: list[list[str]] = json.loads(ledger.read_text())
    except (OSError, ValueError):
        return []
    return runs


def add(ledger: Path, names: list[str]) -> list[str]:
    """Keep this run; which of its tests needed a second run before."""
    runs = [*read(ledger), sorted(set(names))][-RUNS:]
    ledger.parent.mkdir(parents=True, exist_ok=True)
    ledger.write_text(json.dumps(runs, indent=1) + "\n")
    counts = Counter(name for run in runs for name in run)
    return [name for name in runs[-1] if counts[name] > 1]


def main(names_file: str, ledger: str = str(LEDGER)) -> int:
    names = Path(names_file).read_text().split("\n")
    names = [name for name in names if name]
    again = add(Path(ledger), names)
    print(f"ci: needed a second run: {', '.join(sorted(set(names))) or 'none'}; runs known: {len(read(Path(ledger)))}")
    for name in again:
        print(f"ci: {name} needed a second run twice in the last {RUNS} runs: mend it, or what it tests ({ledger})")
    return 1 if again else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
