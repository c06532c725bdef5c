"""A program: the tokens one tiny family model makes, on stock vLLM or with the plugin, and what the plugin counted.

python generate_family.py MODEL stock|ndp
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engines import PROMPTS, engine, greedy, token_ids

TOKENS = 32
PROMPT_COUNT = 3
REPEATS = 5  # 75 to 130 tokens each: longer than the budget of a chunk

SETTINGS = {"cold_precision": "full"}
"""Nothing is quantized, so every token must be stock's. Half of the experts are hot."""


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """What this model needs to run on vLLM's CPU build."""
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": PROMPT_COUNT, "max_model_len": 512}
    if "linear_num_value_heads" in config:  # its CPU kernel for linear attention computes in bfloat16 only
        options["dtype"] = "bfloat16"
    return options | {"enable_prefix_caching": True, "enable_chunked_prefill": True}


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    model, side = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((model / "config.json").read_text())
    prompts = [prompt * REPEATS for prompt in PROMPTS[:PROMPT_COUNT]]
    with engine(model, settings=SETTINGS if side == "ndp" else None, **options_of(config)) as llm:
        passes = [token_ids(greedy(llm, prompts, TOKENS)) for _ in range(2)]  # the second hits the prefix cache
        settled = llm.llm_engine.vllm_config
        result = {
            "passes": passes,
            "chunked_prefill": bool(settled.scheduler_config.enable_chunked_prefill),
            "prefix_cache": bool(settled.cache_config.enable_prefix_caching),
            "totals": llm.collective_rpc("ndp_totals")[0] if side == "ndp" else {},
        }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
