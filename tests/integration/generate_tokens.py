"""A program: what a stock engine is made of, and the tokens it makes.

python generate_tokens.py MODEL
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from engines import PROMPTS, device_processes, engine, greedy, token_ids


def describe(llm: Any) -> dict[str, Any]:
    """Names of the classes at work, and which of our modules vLLM brought in."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    worker = executor.driver_worker.worker
    layer = worker.model_runner.model.model.layers[0]
    methods = {
        type(module.quant_method).__qualname__ for module in layer.modules() if "RoutedExperts" in type(module).__name__
    }
    return {
        "worker": f"{type(worker).__module__}.{type(worker).__qualname__}",
        "moe_methods": sorted(methods),
        "connector": llm.llm_engine.vllm_config.kv_transfer_config is not None,
        "devices": len(device_processes()),
        "our_modules": sorted(name for name in sys.modules if name.split(".")[0] in ("vllm_ndp", "ndp_device")),
    }


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with engine(Path(sys.argv[1]), settings=None) as llm:
        tokens = token_ids(greedy(llm, PROMPTS, 16))
        print(json.dumps(describe(llm) | {"tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
