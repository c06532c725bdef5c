"""A program: the tokens tiny family models make on stock vLLM and with the plugin, and what the plugin counted.

python family_tokens.py MODEL... [stock] [ndp] [hot] [quantized] [bfloat16] [avx2]

avx2: on vLLM's library for processors without AVX-512.

Prints of each: side -> passes, totals, reports of the first pass, what the plugin warned of, or its refusal.

One process for all of them: to import vLLM takes longer than to start an engine of such a model.
"""

import json
import logging
import os
import sys
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

if "avx2" in sys.argv:
    import torch

    torch.cpu._is_avx512_supported = lambda: False  # by which vLLM chooses among its libraries
    torch.cpu._is_amx_tile_supported = lambda: False  # its operators are not in that library

from engines import PROMPTS, engine, greedy, token_ids

from ndp_device.checkpoint.opening import open_checkpoint

TOKENS = 32
PROMPT_COUNT = 3
REPEATS = 5  # 75 to 130 tokens each: longer than the budget of a chunk

SETTINGS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "ndp": {"cold_precision": "full"},  # nothing is quantized; half of the experts are hot
    "hot": {"cold_precision": "full", "hot_experts": "all"},
    "quantized": {"avg_bits": 3.0},
}

PENALTIES = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
"""Greedy text of random weights soon repeats one word for ever, which a wrong expert would repeat as well."""


OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": PROMPT_COUNT,
    "max_model_len": 512,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
}


def dtype_of(config: dict[str, Any]) -> str:
    """What vLLM's CPU build can run this model in: its kernel for linear attention computes in bfloat16 only."""
    text = config.get("text_config", config)
    return "bfloat16" if "linear_num_value_heads" in text else "float32"


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """A multimodal model without its towers; one that brings the class of its config.json, with that."""
    is_multimodal = any(key in config for key in ("text_config", "vision_config", "thinker_config"))
    return {"language_model_only": is_multimodal, "trust_remote_code": "auto_map" in config}


def run(model: Path, side: str, dtype: str) -> dict[str, Any]:
    prompts = [prompt * REPEATS for prompt in PROMPTS[:PROMPT_COUNT]]
    warned = BufferingHandler(10_000)
    warned.setLevel(logging.WARNING)
    logging.getLogger("vllm_ndp").addHandler(warned)
    try:
        settings = SETTINGS[side]
        if settings and settings.get("hot_experts") == "all":
            settings = settings | {"hot_experts": open_checkpoint(model).shape.num_experts}
        options = OPTIONS | options_of(json.loads((model / "config.json").read_text()))
        with engine(model, settings=settings, dtype=dtype, **options) as llm:
            settled = llm.llm_engine.vllm_config
            # the second pass hits the prefix cache
            passes = [greedy(llm, prompts, TOKENS, **PENALTIES) for _ in range(2)]
            return {
                "passes": [token_ids(outputs) for outputs in passes],
                "reports": [(output.kv_transfer_params or {}).get("ndp") for output in passes[0]],
                "chunked_prefill": bool(settled.scheduler_config.enable_chunked_prefill),
                "prefix_cache": bool(settled.cache_config.enable_prefix_caching),
                "totals": llm.collective_rpc("ndp_totals")[0] if settings is not None else {},
                "warnings": [record.getMessage() for record in warned.buffer],
            }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        logging.getLogger("vllm_ndp").removeHandler(warned)


def said(model: Path, *words: str) -> dict[str, Any]:
    config = json.loads((model / "config.json").read_text())
    dtype = "bfloat16" if "bfloat16" in words else dtype_of(config)
    asked = [side for side in SETTINGS if side in words]
    # of a model that was trained, what low bits do says something
    more = ["hot"] * (dtype != "float32") + ["quantized"] * (model / "train_log.json").is_file()
    sides = asked or ["stock", "ndp", *more]
    return {"model": str(model), "dtype": dtype} | {side: run(model, side, dtype) for side in sides}


def main() -> None:
    for model in [Path(word) for word in sys.argv[1:] if word not in (*SETTINGS, "bfloat16", "avx2")]:
        print(json.dumps(said(model, *sys.argv[1:])), flush=True)


if __name__ == "__main__":
    main()
