"""How much memory and time does it take to read an expert in each quantized format, at the width of a real model?

    python benchmarks/format_reading.py                                   # 4096 x 1536: Qwen3-235B-A22B
    python benchmarks/format_reading.py --hidden 4096 --intermediate 14336 --formats mixtral-nvfp4 gguf-Q4_K

Writes a checkpoint of one layer per format (make_quantized_models.py, and llama.cpp's types) and reads each of its
experts in a process of its own: the time of each, from the page cache, and the largest number of private bytes beyond
those before the first one. `plain` is the same in bfloat16, which is read where it lies. Formats whose package is not
installed are left out by name. Values of blocks are drawn: neither time nor memory depends on them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import make_quantized_models as quantized
import measured
import numpy as np
import torch
from calibration_memory import Watch
from quantized_writers import write_gguf
from safetensors.torch import save_file

from ndp_device.checkpoint.gguf_files import TYPES
from ndp_device.replicas.checkpoint import CheckpointExperts

GGUF = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "IQ4_XS", "IQ3_S", "IQ2_XS", "IQ1_M", "MXFP4")
PER_MATRIX = [name for name in quantized.FORMATS if name.startswith("mixtral")]
ROLES = {"ffn_gate_exps": (1, 0), "ffn_up_exps": (1, 0), "ffn_down_exps": (0, 1)}
"""Which of (hidden, intermediate) are rows and columns."""


def write(name: str, directory: Path, sizes: tuple[int, int], experts: int) -> None:
    config: dict[str, Any] = {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "hidden_size": sizes[0],
        "intermediate_size": sizes[1],
    }
    directory.mkdir()
    if name.startswith("gguf-"):
        _write_gguf(name.removeprefix("gguf-"), directory / "model.gguf", sizes, experts)
    else:
        config["quantization_config"] = {} if name == "plain" else quantized.FORMATS[name][2]
        _write_safetensors(name, directory / "model.safetensors", sizes, experts)
    (directory / "config.json").write_text(json.dumps(config))


def _write_safetensors(name: str, path: Path, sizes: tuple[int, int], experts: int) -> None:
    hidden, intermediate = sizes
    stored: dict[str, Any] = {}
    for matrix, shape in (
        ("w1", (intermediate, hidden)),
        ("w3", (intermediate, hidden)),
        ("w2", (hidden, intermediate)),
    ):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        made = {"weight": weight} if name == "plain" else quantized.FORMATS[name][1]("weight", weight)[0]
        for expert in range(experts):
            prefix = f"model.layers.0.block_sparse_moe.experts.{expert}.{matrix}"
            stored |= {f"{prefix}.{part}": value.contiguous().clone() for part, value in made.items()}
    save_file(stored, path)


def _write_gguf(kind: str, path: Path, sizes: tuple[int, int], experts: int) -> None:
    _, values, size = next(row for row in TYPES.values() if row[0] == kind)
    tensors = {}
    for role, (rows, columns) in ROLES.items():
        shape = (experts, sizes[rows], sizes[columns] // values * size)
        tensors[f"blk.0.{role}.weight"] = np.random.default_rng(0).integers(0, 60, shape, np.uint8)
    write_gguf(path, tensors, dict.fromkeys(tensors, kind), "llama")


def read(directory: Path) -> dict[str, Any]:
    """Time of each expert and the largest private memory, in this process."""
    experts = CheckpointExperts(directory)  # reads one expert: pages are in the cache, tables are made
    watch = Watch()
    watch.peak = before = watch.look()
    seconds = []
    for expert in range(experts.shape.num_experts):
        begin = time.perf_counter()
        one = experts.expert(0, expert)
        touched = sum(
            int(np.bitwise_xor.reduce(w.reshape(-1).view(np.uint8)[::4096])) for w in (one.w1, one.w3, one.w2)
        )
        seconds.append(time.perf_counter() - begin)
        assert touched >= 0
    shape = experts.shape
    as_float = 3 * 4 * shape.hidden_size * shape.intermediate_size
    return {
        "measured_expert_ms": round(1000 * statistics.median(seconds), 1),
        "measured_least_ms": round(1000 * min(seconds), 1),
        "measured_private_mib": round((watch.peak - before) / 2**20, 1),
        "private_over_float32": round((watch.peak - before) / as_float, 2),
        "dtype": one.dtype,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--experts", type=int, default=6)
    every = ["plain", *PER_MATRIX, *(f"gguf-{kind}" for kind in GGUF)]
    parser.add_argument("--formats", nargs="*", choices=every, default=every, metavar="FORMAT", help=", ".join(every))
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)  # what the process of one format is told
    measured.add_json_option(parser)
    options = parser.parse_args()
    if options.read is not None:
        print(json.dumps(read(options.read)))
        return
    measurement, rows, left_out = measured.Measurement(__doc__), {}, []
    for name in options.formats:
        needed = "gguf" if name.startswith("gguf-") else quantized.NEEDS.get(name, "torch")
        if importlib.util.find_spec(needed) is None:
            left_out.append(name)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            write(name, Path(scratch) / "model", (options.hidden, options.intermediate), options.experts)
            stored = sum(file.stat().st_size for file in (Path(scratch) / "model").iterdir())
            command = [sys.executable, __file__, "--read", str(Path(scratch) / "model")]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows[name] = json.loads(said) | {"stored_mib_per_expert": round(stored / options.experts / 2**20, 2)}
        print(name, rows[name], file=sys.stderr)
    sizes = {"hidden": options.hidden, "intermediate": options.intermediate, "experts": options.experts}
    measurement.end(sizes | {"formats": rows, "left_out": left_out}, options.json)


if __name__ == "__main__":
    main()
