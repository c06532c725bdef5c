"""How a benchmark hands over what it found: figures in one envelope, printed last and, with `--json FILE`, kept.

The envelope says the question, the command, the machine, its load before and after, the date and the commit, so that a
figure can be judged and taken again. `docs/measured/` holds such files; `make docs` makes docs/performance.md of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEASURED = Path("docs", "measured")
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
LINE_WIDTH = 160


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the last line to FILE, for docs/measured/"
    )


class Measurement:
    """Begun before the first figure is taken, so that the load and the commit before are known."""

    def __init__(self, doc: str) -> None:
        """`doc` is the benchmark's docstring: its first line is the question."""
        self.question = doc.strip().splitlines()[0]
        self._load, self._commit = os.getloadavg()[0], commit()

    def end(self, figures: dict[str, Any], path: Path | None) -> None:
        print(json.dumps(self.save(figures, path)))

    def save(self, figures: dict[str, Any], path: Path | None) -> dict[str, Any]:
        """Keep what there is so far; the envelope with it."""
        envelope = {
            "question": self.question,
            "command": command_line(sys.argv),
            "origin": "measured",
            "date": datetime.date.today().isoformat(),
            "commit": self._commit,
            "machine": machine() | {"load": [round(self._load, 2), round(os.getloadavg()[0], 2)]},
            "figures": figures,
        }
        if path is not None:
            path.write_text(readable(envelope) + "\n")
        return envelope


def save_row(path: Path, question: str, command: str, name: str, row: dict[str, Any]) -> None:
    """Into a table that several runs fill. Each row says its commit."""
    known = json.loads(path.read_text())["figures"] if path.is_file() else {}
    now = commit()
    envelope = {
        "question": question,
        "command": command,
        "origin": "measured",
        "date": datetime.date.today().isoformat(),
        "commit": now,
        "machine": machine(),
        "figures": dict(sorted((known | {name: row | {"commit": now}}).items())),
    }
    path.write_text(readable(envelope) + "\n")


def command_line(argv: list[str]) -> str:
    """What to type to run this again. Of a path outside the repository only the name is kept."""
    words = [f"benchmarks/{Path(argv[0]).name}"]
    skip = False
    for word in argv[1:]:
        if skip or word == "--json" or word.startswith("--json="):
            skip = word == "--json"
            continue
        if os.path.isabs(word):
            path = Path(word)
            word = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        words.append(shlex.quote(word))
    return " ".join(["python", *words])


def commit() -> str:
    """With `-dirty` where more than kept figures was changed since; where there is no git, that of the kit
    (gpu_kit/)."""
    try:
        described = [_git("rev-parse", "--short", "HEAD")]
    except (FileNotFoundError, subprocess.CalledProcessError):
        return os.environ.get("NDP_COMMIT", "")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{MEASURED}")
    return "-".join([*described, *(["dirty"] if changed else [])])


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict[str, Any]:
    """The processor as this process may use it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    of = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = of.get("flags", "").split()
    return {
        "processor": of.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
    }


def readable(value: Any, indent: int = 0) -> str:
    """JSON with one row a line: a value stays on its line while it fits."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or not value or indent + len(flat) <= LINE_WIDTH - 20:
        return flat
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {readable(item, indent + 2)}" for key, item in value.items()]
    else:
        parts = [readable(item, indent + 2) for item in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n{inner}" + f",\n{inner}".join(parts) + f"\n{' ' * indent}{end}"
