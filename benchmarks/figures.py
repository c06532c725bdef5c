"""Takes kept figures again, unattended: files of docs/measured for which figures.toml has a command.

    python benchmarks/figures.py                     stale figures, short ones first
    python benchmarks/figures.py --all --hours 8     fresh ones, too; nothing starts that would end after 8 hours
    python benchmarks/figures.py kernel_lowbit --dry-run

Each command runs in this repository with `--json` and its file: alone, or, with `alone = false`, two at a time at the
end. A command that fails leaves its old file, as does one that takes three times its minutes and three more; its output
is in build/figures/NAME.log. The last line counts what was taken, failed and left; docs/measured/night.json
keeps the minutes of each. Then: `make docs`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

from figure_sources import MEASURED, Figure, FigureTable, changed_sources, read_table
from measured import ROOT, save_row

WORK = ROOT / "build" / "figures"
BIN = Path(sys.executable).parent
NIGHT = "How long does it take to take the figures again that need no special machine?"
WRITE = "python benchmarks/make_random_mixtral.py"
_NARROW = "-DGGML_NATIVE=OFF;" + ";".join(f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2"))
_WIDE = ";".join(f"-DGGML_AVX512{name}=ON" for name in ("", "_VBMI", "_VNNI", "_BF16"))
_BUILD = "python -m pip install --no-cache-dir --quiet --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36"
INPUTS = {
    "WIDE": f"{WRITE} WIDE --hidden 4096 --intermediate 14336 --layers 2 --experts 8",
    "WIDE1": f"{WRITE} WIDE1 --hidden 4096 --intermediate 14336 --layers 1 --experts 8",
    "WIDE_REPLICAS": "vllm-ndp quantize WIDE --out WIDE_REPLICAS",
    "WIDE_GGUF": "python benchmarks/gguf_mixtral.py WIDE WIDE_GGUF",
    "FINE": f"{WRITE} FINE --shape qwen3-30b-a3b --layers 2",
    "FINE_REPLICAS": "vllm-ndp quantize FINE --out FINE_REPLICAS",
    "FINE_GGUF": "python benchmarks/gguf_mixtral.py FINE FINE_GGUF",
    "LLAMA_AVX512": f"{_BUILD} --target LLAMA_AVX512 -C 'cmake.args={_NARROW};{_WIDE}'",
    "LLAMA_AVX2": f"{_BUILD} --target LLAMA_AVX2 -C 'cmake.args={_NARROW}'",
    "BEFORE": "sh benchmarks/older_code.sh 3db895e BEFORE",
}
"""Files that commands read: the word in figures.toml, and what writes it below build/figures."""


def is_stale(name: str, root: Path = ROOT) -> bool:
    path = root / MEASURED / f"{name}.json"
    taken = json.loads(path.read_text()).get("sources") if path.is_file() else None
    return bool(changed_sources(name, taken, root))


def wanted(table: FigureTable, names: Sequence[str], everything: bool) -> dict[str, Figure]:
    """Figures to take: those that run alone, then the others, short ones first. Raises SystemExit for a name that has
    no command."""
    known = {name: figure for name, figure in table.figures.items() if figure.command}
    if unknown := sorted(set(names) - known.keys()):
        raise SystemExit(f"no figure with a command is called {unknown[0]}: give some of {', '.join(sorted(known))}")
    chosen = names or [name for name in known if everything or is_stale(name)]
    return {name: known[name] for name in sorted(chosen, key=lambda name: (not known[name].alone, known[name].minutes))}


def words_of(command: str) -> list[str]:
    """The command with programs of this environment and inputs below build/figures."""
    words = [str(WORK / word) if word in INPUTS else word for word in shlex.split(command)]
    program = BIN / words[0]
    return [str(program) if program.is_file() else words[0], *words[1:]]


def run(command: str, log: Path, more: Sequence[str] = (), patience_s: float | None = None) -> bool:
    """Whether it ended well, and in time. A late one ends with the processes of its group."""
    with log.open("w") as file:
        words = [*words_of(command), *more]
        done = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return done.wait(patience_s) == 0
        except subprocess.TimeoutExpired:
            file.write(f"\nended after {patience_s:.0f} s\n")
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(done.pid, signal.SIGKILL)
            done.wait()


def prepare(command: str) -> bool:
    """Write the inputs that are missing; INPUTS lists an input after those that it reads."""
    read = set(shlex.split(command))
    for word in reversed(INPUTS):
        read |= set(shlex.split(INPUTS[word])) if word in read else set()
    return all((WORK / word).exists() or run(INPUTS[word], WORK / f"{word}.log") for word in INPUTS if word in read)


def take(name: str, figure: Figure) -> bool:
    kept = ROOT / MEASURED / f"{name}.json"
    more = [] if figure.command.startswith("make ") else ["--json", str(kept)]
    before = kept.read_bytes() if kept.is_file() else None
    patience_s = 60 * (3 * figure.minutes + 3)
    if prepare(figure.command) and run(figure.command, WORK / f"{name}.log", more, patience_s):
        return True
    if before is not None:
        kept.write_bytes(before)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="figures of docs/measured/figures.toml; default: the stale ones")
    parser.add_argument("--all", action="store_true", help="those that are not stale, too")
    parser.add_argument("--hours", type=float, default=8.0, help="start nothing that would end later (8)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and their minutes")
    given = parser.parse_args()
    figures = wanted(read_table(ROOT), given.names, given.all)
    if given.dry_run:
        for name, figure in figures.items():
            print(f"{figure.minutes:5.0f} min  {name}: {figure.command}")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end, outcomes = time.monotonic() + 3600 * given.hours, dict[str, list[str]](taken=[], failed=[], left=[])
    kept = Lock()

    def take_in_time(name: str) -> None:
        figure = figures[name]
        if time.monotonic() + 60 * figure.minutes > end:
            outcomes["left"].append(name)
            return
        began = time.monotonic()
        outcome = "taken" if take(name, figure) else "failed"
        outcomes[outcome].append(name)
        minutes = round((time.monotonic() - began) / 60, 1)
        print(f"{name}: {outcome} in {minutes} min (about {figure.minutes:.0f})", flush=True)
        if outcome == "taken":
            night, row = ROOT / MEASURED / "night.json", {"minutes": minutes, "load": round(os.getloadavg()[0], 1)}
            with kept:
                save_row(night, NIGHT, "make figures", name, row)

    for at_once in (1, 2):
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(take_in_time, [name for name in figures if figures[name].alone == (at_once == 1)]))
    print("; ".join(f"{outcome}: {', '.join(names) or 'none'}" for outcome, names in outcomes.items()))
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
