"""How much memory and time does calibration take on a model that is larger than memory?

    python benchmarks/calibration_memory.py --hidden 4096 --intermediate 14336 --only 1 --rows 1024

Writes a random Mixtral of the given size (make_random_mixtral.py), calibrates it with the bundled text, and
watches the process: its private memory (anonymous pages; the mapped checkpoint is the system's to take back) every
20 ms, and when each stage of an expert ends. With --only N it stops after N experts of layer 0 and extrapolates: the
stages before the experts are those of a whole layer, and every expert takes what the mean one did. With --rows R each
matrix is solved for its first R rows only: rows do not depend on each other, so the time without the Hessian's factors,
which are made in full, is multiplied by N / R. What such a run writes is of no use. Times of stages are processor time,
of one thread: what a core of its own would take. Ended by SIGTERM it reports the stages that were over.

Random weights with random routing: every expert gets its share of the tokens, and what a replica loses says nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import make_random_mixtral
import measured
import numpy as np

TEXT = make_random_mixtral.TOKENIZER / "calibration.txt"
MIXTRAL_LAYERS = 32


class Watch:
    """The largest number of private bytes this process had, asked every 20 ms."""

    def __init__(self) -> None:
        self.peak = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.look()
            time.sleep(0.02)

    def look(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        now = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
        self.peak = max(self.peak, now)
        return now


def _tiled(matrix: Any, num_rows: int) -> Any:
    """The same rows again and again: of the right size for what comes behind the solver."""
    rows = np.arange(num_rows) % matrix.shape[0]
    parts = {"planes": matrix.planes[:, rows], "scale": matrix.scale[rows], "offset": matrix.offset[rows]}
    return dataclasses.replace(matrix, **parts)


class EnoughError(Exception):
    """As many experts as were asked for, or as there was time for."""


def _end_here(*_: object) -> None:
    raise EnoughError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=3584)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--memory", type=float, help="GB to stay within; default: of the machine's, as quantize does")
    parser.add_argument("--only", type=int, help="stop after this many experts of the first layer")
    parser.add_argument("--rows", type=int, help="solve for this many rows of each matrix only, 1024 or more")
    parser.add_argument("--keep-in", type=Path, help="where the model and its replicas are made; default: a temporary")
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    measurement = measured.Measurement(str(__doc__))
    with tempfile.TemporaryDirectory() as temporary:
        figures = run(arguments, arguments.keep_in or Path(temporary))
    measurement.end(figures, arguments.json)


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    watch = Watch()
    sizes = (arguments.hidden, arguments.intermediate, arguments.layers, arguments.experts)
    model = directory / "x".join(map(str, sizes))
    if not (model / "tokenizer_config.json").is_file():
        make_random_mixtral.write(model, make_random_mixtral.config_of(*sizes, 2), 0)

    from ndp_device.calibration import build

    with build.importing():
        import torch
        import transformers  # noqa: F401  # its memory belongs to the programs'

        from ndp_device.calibration import calibrated, gptq, memory, streamed

    said: list[memory.PeakMemory] = []
    side_by_side = memory.side_by_side
    memory.side_by_side = lambda *args: said.append(side_by_side(*args)) or said[-1]  # type: ignore[func-returns-value]
    stages: list[tuple[str, float]] = []
    started = time.monotonic()

    def timed(owner: Any, name: str, stage: str) -> None:
        inner = getattr(owner, name)

        def run_and_note(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            done = inner(*args, **kwargs)
            stages.append((stage, time.process_time() - before))
            so_far = f"{stages[-1][1]:.1f} s of processor time, {watch.peak / 1e9:.2f} GB private at most so far"
            print(f"{time.monotonic() - started:.0f} s: {stage}, {so_far}", flush=True)
            if stage == "quantize" and len([1 for stage, _ in stages if stage == "quantize"]) == arguments.only:
                raise EnoughError
            return done

        setattr(owner, name, run_and_note)

    signal.signal(signal.SIGTERM, _end_here)
    timed(gptq, "unit_factor", "factor")
    unsolved = 0.0
    if arguments.rows is not None:
        whole = gptq.quantize

        def first_rows(weights: Any, *args: Any, **kwargs: Any) -> dict[int, Any]:
            nonlocal unsolved
            before, already = time.process_time(), sum(taken for stage, taken in stages if stage == "factor")
            solved = whole(weights[: arguments.rows], *args, **kwargs)
            factors = sum(taken for stage, taken in stages if stage == "factor") - already
            unsolved += (time.process_time() - before - factors) * (len(weights) / arguments.rows - 1)
            return {bits: _tiled(matrix, len(weights)) for bits, matrix in solved.items()}

        gptq.quantize = first_rows
    timed(streamed.StreamedForward, "_to_the_experts", "up to the experts")
    timed(calibrated.FloatExpert, "answers", "answer")
    timed(gptq.Moment, "add", "moments")
    timed(gptq, "quantize", "solver")
    timed(calibrated, "expert_losses", "losses")
    timed(calibrated, "quantize_expert", "quantize")
    before = watch.look()
    watch.peak = 0
    with contextlib.suppress(EnoughError):
        build.build_calibrated(
            model,
            directory / "replicas",
            TEXT,
            num_sequences=arguments.samples,
            sequence_length=arguments.sequence_length,
            device_name="cpu",
            memory_bytes=None if arguments.memory is None else int(arguments.memory * 1e9),
        )
    watch.look()
    seconds: dict[str, list[float]] = {}
    for stage, taken in stages:
        seconds.setdefault(stage, []).append(taken)
    mean = {stage: sum(taken) / len(taken) for stage, taken in seconds.items()}
    per_expert = per_layer = None  # where it was ended before
    if "quantize" in mean:
        per_expert = mean["quantize"] + unsolved / len(seconds["quantize"])
        per_layer = 2 * mean["up to the experts"] + arguments.experts * per_expert
    return {
        "hidden": arguments.hidden,
        "intermediate": arguments.intermediate,
        "experts": arguments.experts,
        "checkpoint_gb": round((model / "model.safetensors").stat().st_size / 1e9, 2),
        "tokens": arguments.samples * arguments.sequence_length,
        "threads": torch.get_num_threads(),
        "experts_quantized": len(seconds.get("quantize", [])),
        "said_gb": round(said[0].total / 1e9, 2),
        "said_parts_gb": {name: round(size / 1e9, 2) for name, size in said[0].parts.items()},
        "private_before_gb": round(before / 1e9, 2),
        "peak_private_gb": round(watch.peak / 1e9, 2),
        "seconds": round(time.monotonic() - started, 1),
        "seconds_mean": {stage: round(value, 2) for stage, value in mean.items()},
        "times": {stage: len(taken) for stage, taken in seconds.items()},
        "factors_s": [round(taken, 1) for taken in seconds.get("factor", [])],
        "rows_solved": arguments.rows,
        "seconds_per_expert": per_expert and round(per_expert, 1),
        "seconds_per_layer": per_layer and round(per_layer, 1),
        "hours_for_32_layers": per_layer and round(MIXTRAL_LAYERS * per_layer / 3600, 2),
    }


if __name__ == "__main__":
    main()
