"""A program: what a stock engine is made of, and the tokens it makes; then the same of one with our layer.

python generate_tokens.py MODEL [--then-with-a-replaced-layer]
"""

from __future__ import annotations

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
        "layers": sorted({type(one).__qualname__ for one in layer.modules() if "RoutedExperts" in type(one).__name__}),
        "connector": llm.llm_engine.vllm_config.kv_transfer_config is not None,
        "devices": len(device_processes()),
        "our_modules": sorted(name for name in sys.modules if name.split(".")[0] in ("vllm_ndp", "ndp_device")),
    }


def replace_layer() -> None:
    """As the plugin does where vLLM's methods no longer execute; ours would fail here if it were called."""
    from vllm_ndp.integration import vllm_private
    from vllm_ndp.integration.moe_method import NdpMoEMethod, NdpRoutedExperts

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("vLLM called the method")

    NdpMoEMethod.apply = never  # type: ignore[assignment]
    vllm_private.replace_routed_experts(NdpRoutedExperts)


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    tell(None)
    if "--then-with-a-replaced-layer" in sys.argv:
        replace_layer()
        tell({"hot_experts": 3, "cold_precision": "full"})


def tell(settings: dict[str, Any] | None) -> None:
    with engine(Path(sys.argv[1]), settings=settings) as llm:
        tokens = token_ids(greedy(llm, PROMPTS, 16))
        print(json.dumps(describe(llm) | {"tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
