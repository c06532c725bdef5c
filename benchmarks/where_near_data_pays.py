"""Which system decodes fastest on one GPU of 8 to 160 GB, and from which size of model does near-data computing win?

The cells of vllm_ndp/lab/frontier.py for five public models, on synthetic routing (signal 1) of each one's shape and
an ideal DRAM of the preset's rate; `vllm-ndp report` draws the same. Everything printed is simulated; the last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vllm_ndp.lab.compare import CompareSettings
from vllm_ndp.lab.frontier import AVG_BITS, MEMORY_GB, SHAPES, Cell, frontier_of_shapes


def as_dict(cell: Cell) -> dict[str, Any]:
    rows = [
        {
            "system": row.system,
            "policy": row.policy,
            "tokens_per_s": round(row.decode_tokens_per_s, 2),
            "loss": round(row.loss, 4),
            "num_hot": row.num_hot,
            "gpu_gb": round(row.gpu_gb, 1),
        }
        for row in cell.rows
    ]
    return {"model": cell.model, "memory_gb": cell.memory_gb, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--memory", default=",".join(map(str, MEMORY_GB)))
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    cells = []
    for model in arguments.models.split(","):
        for cell in frontier_of_shapes([model], CompareSettings(), [int(size) for size in arguments.memory.split(",")]):
            cells.append(as_dict(cell))
            named = [row for row in (cell.fastest, cell.fastest_alike, cell.device) if row is not None]
            words = [f"{row.system} {row.policy} {row.decode_tokens_per_s:.4g}" for row in named]
            print(f"{model:18} {cell.memory_gb:4} GB  " + " | ".join(words or ["nothing fits"]), file=sys.stderr)
    text = json.dumps({"avg_bits": AVG_BITS, "cells": cells})
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
