"""What does the plugin do on this GPU: is it right, how often does it wait, how fast is it, and beside what?

    python benchmarks/gpu_check.py --minutes 50            every piece that is missing, most valuable first
    python benchmarks/gpu_check.py --minutes 10            some of them; the next call goes on from there
    python benchmarks/gpu_check.py --dry-run               what needs no GPU, small, on this machine

A piece is a process of its own that ends within ten minutes; what it found becomes `gpu_<piece>.json` in --out
(docs/measured, in a dry run a folder that is printed), with the machine and its GPU named. What is there, or in
docs/measured, is not run again (--again); of a table of several ways each is kept as soon as it is found, and the next
call goes on with those that are missing. A piece that fails or hangs leaves its last words in `gpu_<piece>.log` and
stops no other. docs/gpu.md: how to make the most of half an hour. No line of this has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import gpu_preset
import gpu_right as right
import gpu_speed as speed
from measured import ROOT, Measurement, machine
from pieces import Piece, Pieces
from results_archive import Archive

KEPT = ROOT / "docs" / "measured"

# -- pieces ------------------------------------------------------------------------------------------------------------

OF_SPEED = tuple(speed.WAYS)
PIECES = {
    "kernels": Piece("Do the host's kernels give what the reference gives, on this processor?", 1.5, right.kernels),
    "versions": Piece("Does everything import, and what is it?", 0.7, right.versions),
    "routing": Piece("Do the routing kernels give what the operators give?", 0.7, right.routing),
    "streams": Piece("Do the tests of layers, lanes and marks pass on real streams?", 0.8, right.streams),
    "serves": Piece("Does it serve?", 1.2, right.serves),
    "identity": Piece(
        "Is it stock vLLM in fp32 when nothing is quantized?", 2.5, right.identity,
        ("4 hot, thread", "4 hot, plain", "8 hot, thread", "8 hot, plain"), dry_ways=2,
    ),
    "wide": Piece("How long does it take to make and to quantize eight layers at full width?", 2.5, speed.wide),
    "speed": Piece("How fast is it beside what a user has?", 8, speed.speed, OF_SPEED[:6], 2, apart=True),
    "waits": Piece("How often does a layer wait for the GPU?", 2, speed.waits, tuple(speed.WAITS)),
    "timeline": Piece("What lies beside what?", 1, speed.timeline),
    "closeness": Piece("How close is it in bf16?", 1.2, right.closeness),
    "prefill": Piece(
        "How soon is the first token, with experts that stream and without?", 4, speed.prefill, speed.PREFILLED, 2,
        apart=True,
    ),
    "link": Piece("What does a crossing cost?", 3, speed.link, speed.PROBED, apart=True),
    "device_killed": Piece("Does a killed device cost a token?", 1.2, right.device_killed),
    "graphs": Piece("Do pieces of graphs give the same tokens, and how fast?", 3, speed.graphs, ("NONE", "PIECEWISE")),
    "narrow_slots": Piece(
        "What do slots of 8 and 4 bits lose?", 2, right.narrow_slots, ("16 bits", "8 bits", "4 bits")
    ),
    "speed_more": Piece(
        "How fast is it with more and fewer hot experts, and at fewer bits?", 8, speed.speed, OF_SPEED[6:], 2,
        apart=True,
    ),
    "quantizing": Piece(
        "How long does quantizing take on the GPU, and is it as good as on the host?", 3, speed.quantizing,
    ),
    "training": Piece("How well does a larger fixture do that is trained here?", 9.5, speed.training),
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


def run_piece(name: str, arguments: argparse.Namespace) -> None:
    """In a process of its own: measure and write."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    pieces, file, dry = Pieces(Path(__file__), PIECES, gpu_name), arguments.out, arguments.dry_run
    if arguments.way is not None:
        pieces.run_way(name, arguments.way, file, dry=dry)
        return
    pieces.run_here(name, file, dry=dry, seconds=arguments.seconds, earlier=arguments.earlier)
    if name == "link":
        print(gpu_preset.try_to_write(file, gpu_preset.FOLDER if file.parent == KEPT else file.parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing that is expected to end later")
    parser.add_argument("--pieces", default=",".join(PIECES), help=f"of {', '.join(PIECES)}")
    parser.add_argument("--out", type=Path, help="folder for the results; docs/measured, in a dry run a new one")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="all results in one .tar.gz, renewed meanwhile")
    parser.add_argument("--again", action="store_true", help="ways that failed; of pieces without such, everything")
    parser.add_argument(
        "--dry-run", action="store_true", help="on a machine without a GPU, small; pieces that need one say so"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="what became of each piece, and of the kit in --kit")
    parser.add_argument("--kit", type=Path, help="folder that gpu_kit/make_bundle.sh has written, for --json")
    for hidden, kind in (("--piece", str), ("--way", str), ("--earlier", Path), ("--seconds", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.piece:
        run_piece(arguments.piece, arguments)
        return 0
    if unknown := sorted(set(arguments.pieces.split(",")) - set(PIECES)):
        parser.error(f"no piece is called {unknown[0]}: there are {', '.join(PIECES)}")
    dry = arguments.dry_run
    if not dry and not gpu_name():
        print("no NVIDIA GPU answers here: run this where one does, or with --dry-run what needs none")
        return 2
    out = arguments.out or (Path(tempfile.mkdtemp(prefix="gpu-check-")) if dry else KEPT)
    out.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(__doc__)
    print(f"{machine()['processor']}, {gpu_name() or 'no GPU'}; results go to {out}", flush=True)
    names, kept = arguments.pieces.split(","), None if dry else KEPT
    with nullcontext() if arguments.archive is None else Archive(out, arguments.archive):
        became = Pieces(Path(__file__), PIECES, gpu_name).run_all(
            names, out.resolve(), kept, minutes=arguments.minutes, again=arguments.again, dry=dry
        )
    if arguments.json is not None:
        pieces = [{"piece": name, "question": PIECES[name].question, "became": what} for name, what in became.items()]
        measurement.end({"gpu": gpu_name() or "none", "pieces": pieces, "kit": kit_in(arguments.kit)}, arguments.json)
    return 1 if any("FAILED" in what for what in became.values()) else 0


def kit_in(folder: Path | None) -> list[dict[str, Any]]:
    """The parts that were built: what each holds, and the bytes of it."""
    parts = sorted(path.parent for path in folder.rglob("install_part.sh")) if folder is not None else []
    return [
        {"part": part.name, "bytes": sum(file.stat().st_size for file in part.iterdir()),
         "holds": {file.name.removesuffix(".tar.xz"): file.stat().st_size for file in sorted(part.glob("*.tar.xz"))}}
        for part in parts
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
