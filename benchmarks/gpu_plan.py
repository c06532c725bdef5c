"""What fits a machine that is lent call by call, and what each call of gpu_kit/go.sh does: sizes and times.

    python benchmarks/gpu_plan.py          size of tree and kit, and the calls

Knows the pieces' names; not how a piece runs.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PART = ROOT / ".gpu/part1"
ROOM_BYTES = 60 << 20
"""What tree and kit may take, so that a week's work still fits."""
KIT_BYTES = 26 << 20
"""The most that the kit may have."""


@dataclass(frozen=True)
class Call:
    """One command on the machine. minutes: None = as its user says, who knows what is left."""

    minutes: float | None
    pieces: tuple[str, ...]


CALLS = {
    1: Call(7.5, ("rungs", "identity")),
    2: Call(7.0, ("speed", "waits")),
    3: Call(
        None,
        (
            *("link", "timeline", "prefill", "speed_more", "closeness", "routing", "streams", "kernels"),
            *("device_killed", "narrow_slots", "quantizing"),
        ),
    ),
}
"""The first finds out whether it serves, as far as which rung; the second how fast; the third what else is asked."""


def tree_bytes() -> int:
    """What travels with every call: files that git tracks or does not ignore, and shared/."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    files = {ROOT / name for name in listed if name} | set((ROOT / "shared").rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file())


def part_bytes() -> int:
    """0 where it was not built."""
    return sum(path.stat().st_size for path in PART.glob("*"))


def main() -> int:
    tree, part = tree_bytes(), part_bytes()
    for path in sorted(PART.glob("*.tar.xz")):
        print(f"{path.name} {path.stat().st_size / 2**20:.1f} MiB")
    print(f"tree {tree / 2**20:.1f} MiB, kit {part / 2**20:.1f} MiB, together {(tree + part) / 2**20:.1f} of 64 MiB")
    for number, call in CALLS.items():
        print(f"go.sh {number}: {', '.join(call.pieces)}")
    if part > KIT_BYTES or tree + KIT_BYTES > ROOM_BYTES:
        print(f"wanted: a kit of at most {KIT_BYTES >> 20} MiB, and {ROOM_BYTES >> 20} with the tree", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
