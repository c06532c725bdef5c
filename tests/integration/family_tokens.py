"""A program: the tokens one tiny family model makes on stock vLLM and with the plugin, and what the plugin counted.

python family_tokens.py MODEL [stock] [ndp]     prints JSON: side -> passes, totals, or its refusal
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from engines import PROMPTS, engine, greedy, token_ids

TOKENS = 32
PROMPT_COUNT = 3
REPEATS = 5  # 75 to 130 tokens each: longer than the budget of a chunk

SETTINGS = {"cold_precision": "full"}
"""Nothing is quantized, so every token must be stock's. Half of the experts are hot."""

PENALTIES = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
"""Greedy text of random weights soon repeats one word for ever, which a wrong expert would repeat as well."""


def options_of(model: Path) -> dict[str, Any]:
    """What this model needs to run on vLLM's CPU build."""
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": PROMPT_COUNT, "max_model_len": 512}
    if "linear_num_value_heads" in json.loads((model / "config.json").read_text()):
        options["dtype"] = "bfloat16"  # the CPU kernel for linear attention computes in nothing else
    return options | {"enable_prefix_caching": True, "enable_chunked_prefill": True}


def run(model: Path, side: str) -> dict[str, Any]:
    prompts = [prompt * REPEATS for prompt in PROMPTS[:PROMPT_COUNT]]
    try:
        with engine(model, settings=SETTINGS if side == "ndp" else None, **options_of(model)) as llm:
            settled = llm.llm_engine.vllm_config
            return {
                # the second pass hits the prefix cache
                "passes": [token_ids(greedy(llm, prompts, TOKENS, **PENALTIES)) for _ in range(2)],
                "chunked_prefill": bool(settled.scheduler_config.enable_chunked_prefill),
                "prefix_cache": bool(settled.cache_config.enable_prefix_caching),
                "totals": llm.collective_rpc("ndp_totals")[0] if side == "ndp" else {},
            }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    model = Path(sys.argv[1])
    print(json.dumps({side: run(model, side) for side in sys.argv[2:] or ("stock", "ndp")}), flush=True)


if __name__ == "__main__":
    main()
