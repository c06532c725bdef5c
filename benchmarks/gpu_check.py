"""What does the plugin do on this GPU: is it right, how often does it wait, how fast is it, and beside what?

    python benchmarks/gpu_check.py --minutes 50            every piece that is missing, most valuable first
    python benchmarks/gpu_check.py --minutes 10            some of them; the next call goes on from there
    python benchmarks/gpu_check.py --call 1                what gpu_kit/go.sh 1 runs (gpu_plan.py), and what comes next
    python benchmarks/gpu_check.py --dry-run               what needs no GPU, small, on this machine

A piece is a process of its own that ends within ten minutes; what it found becomes `gpu_<piece>.json` in --out
(docs/measured, in a dry run a folder that is printed), with the machine and its GPU named. What is there, or in
docs/measured, is not run again (--again); of a table of several ways each is kept as soon as it is found, and the next
call goes on with those that are missing. A piece that fails or hangs leaves its last words in `gpu_<piece>.log` and
stops no other. docs/gpu.md: how to make the most of half an hour.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import gpu_engines as engines
import gpu_preset
import gpu_right as right
import gpu_speed as speed
from gpu_plan import CALLS
from measured import ROOT, Measurement, machine
from pieces import Piece, Pieces

KEPT = ROOT / "docs" / "measured"

# -- pieces ------------------------------------------------------------------------------------------------------------

OF_SPEED = tuple(speed.WAYS)
PIECES = {
    "rungs": Piece("With which rung does it serve?", 4.6, right.rungs, engines.RUNGS, apart=True, ladder=True),
    "identity": Piece(
        "Is it stock vLLM in fp32 when nothing is quantized?", 1.8, right.identity,
        ("4 hot", "8 hot", "4 hot in one graph", "8 hot in one graph", "4 hot in pieces"), 3,
    ),
    "wide": Piece("How long does it take to make and to quantize four layers at full width?", 2, speed.wide),
    "speed": Piece("How fast is it beside what a user has?", 4.5, speed.speed, OF_SPEED[: speed.FIRST], 2),
    "waits": Piece("How often does a layer wait for the GPU?", 1.5, speed.waits, tuple(speed.WAITS)),
    "link": Piece("What does a crossing cost?", 1.5, speed.link, speed.PROBED),
    "timeline": Piece("What lies beside what?", 1, speed.timeline),
    "prefill": Piece(
        "How soon is the first token, with experts that stream and without?", 3, speed.prefill, speed.PREFILLED, 2,
        apart=True,
    ),
    "speed_more": Piece(
        "How fast is it with more and fewer hot experts, and at 8 and 4 bits?", 5, speed.speed, OF_SPEED[speed.FIRST :],
        2,
    ),
    "closeness": Piece("How close is it in bf16?", 1.2, right.closeness),
    "routing": Piece("Do the routing kernels give what the operators give?", 0.7, right.routing),
    "streams": Piece("Do the tests of layers, streams and events pass on real streams?", 0.8, right.streams),
    "kernels": Piece("Do the host's kernels give what the reference gives, on this processor?", 1.5, right.kernels),
    "device_killed": Piece("Does a killed device cost a token?", 1.2, right.device_killed),
    "narrow_slots": Piece(
        "What do slots of 8 and 4 bits lose?", 2, right.narrow_slots, ("16 bits", "8 bits", "4 bits")
    ),
    "quantizing": Piece(
        "How long does quantizing take on the GPU, and is it as good as on the host?", 3, speed.quantizing,
    ),
}  # fmt: skip
"""Most valuable first: what fits into half an hour stands before what does not."""


# -- running them ------------------------------------------------------------------------------------------------------


@cache
def gpu_name() -> str:
    """Asked in another process, so that this one holds nothing of the GPU: the driver's own program, else torch."""
    driver = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    torch = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"]
    for ask in (driver, torch):
        try:
            done = subprocess.run(ask, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[0]
    return ""


def machine_and_rung() -> str:
    """What figures depend on beside the processor; empty without a GPU."""
    return f"{gpu_name()}, 'gpu': {engines.rung()!r}" if gpu_name() else ""


def make_wide_beside(out: Path) -> None:
    """While other pieces run, and for as long as it takes: the process has a session of its own."""
    command = [sys.executable, __file__, "--pieces", "wide", "--again", "--out", str(out)]
    with (out / "gpu_wide.out").open("a") as said:
        subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True)


@contextmanager
def archived(folder: Path, file: Path) -> Iterator[None]:
    """Meanwhile `file` holds the folder's results, renewed every ten seconds and at the end, whole or not at all: a
    machine that is lent gives few files back, and what a killed call had found is in it."""
    ended = threading.Event()

    def write() -> None:
        aside = file.with_suffix(".part")
        with tarfile.open(aside, "w:gz") as archive:
            for path in sorted(folder.glob("gpu_*")):
                if path.suffix != ".part":
                    archive.add(path, path.name)
        aside.replace(file)

    def renew() -> None:
        write()
        while not ended.wait(10):
            write()

    thread = threading.Thread(target=renew, name="archive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        write()


def is_outdated(piece: str, folders: list[Path]) -> bool:
    """Whether something failed, which may have been mended since; or was compared with another rung than the best."""
    rows, best = engines.kept_rows(piece, folders), engines.best_rung(folders)
    return any("failed" in row or row.get("rung", best) != best for row in rows)


def verdict(call: int, folders: list[Path], became: dict[str, str]) -> str:
    """One line on a call: what to do next."""
    rungs, best = engines.kept_rows("rungs", folders), engines.best_rung(folders)
    serves = "nothing of this project has served" if best == "auto" else f"{best} serves"
    for row in rungs:
        if "failed" in row:
            name = f"rung {engines.RUNGS.index(row['way'])}, {row['way']}"
            return f"STOP: {name}, fails in {row['at']} ({row['failed']}); {serves}"
    if to_go := [way for way in engines.RUNGS if way not in {row["way"] for row in rungs}]:
        return f"NEXT: go.sh 1 again, for {', '.join(to_go)} ({serves})"
    for row in engines.kept_rows("identity", folders):
        if "failed" in row:
            return f"STOP: {serves}, but identity with {row['way']} fails: {row['failed']}"
        if row["equal"] != row["of"]:
            return f"STOP: {serves}, but with {row['way']} {row['equal']} of {row['of']} tokens are stock vLLM's"
    failed = [f"{name}: {what}" for name, what in became.items() if "FAILED" in what]
    left = [f"no time for {name}" for name, what in became.items() if "no time left" in what]
    doing = ["go.sh 2", "go.sh 3 MINUTES", "unpack found.tar.gz in docs/measured"][call - 1]
    return f"NEXT: {doing} ({'; '.join([serves, *failed, *left])})"


def run_piece(name: str, arguments: argparse.Namespace) -> None:
    """In a process of its own: measure and write."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    pieces, file, dry = Pieces(Path(__file__), PIECES, machine_and_rung), arguments.out, arguments.dry_run
    os.environ.setdefault(engines.RUNG, engines.best_rung([file.parent, KEPT]))
    if arguments.way is not None:
        pieces.run_way(name, arguments.way, file, dry=dry, seconds=arguments.seconds)
        return
    pieces.run_here(name, file, dry=dry, seconds=arguments.seconds, earlier=arguments.earlier)
    if name == "link":
        print(gpu_preset.try_to_write(file, gpu_preset.FOLDER if file.parent == KEPT else file.parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="begin nothing that is expected to end later (60)")
    parser.add_argument(
        "--call", type=int, choices=CALLS, help="pieces and minutes of gpu_kit/go.sh; says what is next"
    )
    parser.add_argument("--pieces", help=f"of {', '.join(PIECES)}")
    parser.add_argument("--out", type=Path, help="folder for the results; docs/measured, in a dry run a new one")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="all results in one .tar.gz, renewed meanwhile")
    parser.add_argument("--again", action="store_true", help="ways that failed; of pieces without such, everything")
    parser.add_argument(
        "--dry-run", action="store_true", help="on a machine without a GPU, small; pieces that need one say so"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="what became of each piece")
    for hidden, kind in (
        ("--piece", str),
        ("--way", str),
        ("--earlier", Path),
        ("--seconds", float),
        ("--began", float),
    ):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.piece:
        run_piece(arguments.piece, arguments)
        return 0
    call = CALLS.get(arguments.call)
    names = list(PIECES if call is None else call.pieces)
    minutes = 60.0 if call is None else call.minutes
    if arguments.pieces is not None:
        names = arguments.pieces.split(",")
    if arguments.minutes is not None:
        minutes = arguments.minutes
    if minutes is None:
        parser.error(f"how many minutes may call {arguments.call} take?")
    if unknown := sorted(set(names) - set(PIECES)):
        parser.error(f"no piece is called {unknown[0]}: there are {', '.join(PIECES)}")
    dry = arguments.dry_run
    if not dry and not gpu_name():
        print("no NVIDIA GPU answers here: run this where one does, or with --dry-run what needs none")
        return 2
    out = arguments.out or (Path(tempfile.mkdtemp(prefix="gpu-check-")) if dry else KEPT)
    out.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(__doc__)
    print(f"{machine()['processor']}, {gpu_name() or 'no GPU'}; results go to {out}", flush=True)
    kept = None if dry else KEPT
    minutes -= waited_minutes(arguments.began)
    if call is not None and not dry and not speed.WIDE_REPLICAS.exists():
        make_wide_beside(out.resolve())
    folders, became, end_s = [out, *([] if kept is None else [kept])], dict[str, str](), time.time() + 60 * minutes
    pieces = Pieces(Path(__file__), PIECES, gpu_name)
    with nullcontext() if arguments.archive is None else archived(out, arguments.archive):
        for name in names:
            again = arguments.again or (call is not None and is_outdated(name, folders))
            left = (end_s - time.time()) / 60
            became |= pieces.run_all([name], out.resolve(), kept, minutes=left, again=again, dry=dry)
    if arguments.json is not None:
        rows = [{"piece": name, "question": PIECES[name].question, "became": what} for name, what in became.items()]
        measurement.end({"gpu": gpu_name() or "none", "pieces": rows}, arguments.json)
    if call is not None:
        print(verdict(arguments.call, folders, became), flush=True)
    return 1 if any("FAILED" in what for what in became.values()) else 0


def waited_minutes(began: float | None) -> float:
    """Since the call began, whose first seconds went into the installation."""
    return 0.0 if began is None else max(time.time() - began, 0.0) / 60


if __name__ == "__main__":
    sys.exit(main())
