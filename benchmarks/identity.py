"""Does the plugin give stock vLLM's tokens when nothing is quantized?

    python benchmarks/identity.py [--model DIR] [--json FILE]

What `vllm-ndp verify` compares: 8 prompts of 32 tokens, eager and compiled, chunked prefill and prefix-cache hits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from measured import ROOT, Measurement, add_json_option

from vllm_ndp.integration import commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-mixtral")
    add_json_option(parser)
    given = parser.parse_args()
    measurement = Measurement(__doc__ or "")
    found = commands.verify(given.model, None, 32)
    figures = {
        "tokens": found["tokens_total"],
        "equal": found["tokens_identical"],
        "row_checks": found["row_checks"],
        "row_mismatches": found["sidecar_mismatches"],
        "fallback_pairs": found["fallback_pairs"],
        "modes": found["modes"],
    }
    measurement.end(figures, given.json)


if __name__ == "__main__":
    main()
