"""What does `vllm-ndp quantize` take without the weights of layers, and what do these add: processor time and memory?

    python benchmarks/quantize_cost.py [--models tiny-mixtral tiny-qwen3-moe] [--json FILE]

Replicas of models/ as they are shipped: from the bundled text, 128 sequences of 512 tokens, on one thread. Each model
has a process of its own. `experts` is all until the last expert is quantized: what a manifest without weights takes.
`weights` is the pass behind it. Private memory is the largest of each stage, less what the libraries hold before
(calibration_memory.py). Processor time depends little on what else the machine does. Last line of stdout: JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measured
from calibration_memory import TEXT, Watch


def cost_of(model: Path) -> dict[str, Any]:
    """Processor seconds and private megabytes of both stages, of this process."""
    import torch
    import transformers  # noqa: F401  # its memory belongs to the libraries'

    from ndp_device.calibration import build, calibrated, gptq, streamed, weighing  # noqa: F401

    torch.set_num_threads(1)
    watch = Watch()
    before, ends = watch.look(), [time.process_time()]
    peaks: list[int] = []

    def end_stage() -> None:
        watch.look()
        ends.append(time.process_time())
        peaks.append(watch.peak)
        watch.peak = 0

    weigh = build.weigh

    def weigh_after_experts(*args: Any) -> Any:
        end_stage()
        return weigh(*args)

    build.weigh = weigh_after_experts
    with tempfile.TemporaryDirectory() as out:
        build.build_calibrated(model, Path(out) / "replicas", TEXT, device_name="cpu", show_progress=False)
    end_stage()
    return {
        name: {"processor_s": round(end - start, 1), "private_mb": round((peak - before) / 1e6)}
        for name, (start, end), peak in zip(("experts", "weights"), itertools.pairwise(ends), peaks, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-mixtral", "tiny-qwen3-moe"], help="under models/")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(cost_of(measured.ROOT / "models" / arguments.only)))
        return
    measurement = measured.Measurement(str(__doc__))
    figures = {}
    for name in arguments.models:
        child = subprocess.run(
            [sys.executable, __file__, "--only", name], stdout=subprocess.PIPE, text=True, check=True
        )
        figures[name] = json.loads(child.stdout.splitlines()[-1])
        print(name, figures[name], flush=True)
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
