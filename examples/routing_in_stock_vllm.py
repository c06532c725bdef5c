"""The routing of a recorded trace inside stock vLLM, whatever the weights: the engine's measured time for that trace.

python examples/routing_in_stock_vllm.py tests/data/tiny-mixtral-trace models/tiny-mixtral
vllm-ndp compare tests/data/tiny-mixtral-trace        # what is simulated for it
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from vllm_ndp.traces.trace import Trace


def main(trace: str, model: str) -> None:
    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = f"ndp:{trace}"
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    requests = Trace.load(Path(trace)).sequences
    longest = max(len(one.prompt_ids) + len(one.decode_ids) for one in requests)
    llm = LLM(
        model,
        load_format="dummy",
        max_model_len=longest + 1,
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3 if current_platform.is_cpu() else 0.9,  # stock vLLM asks for 92 % of a host's memory
    )
    # Tokens are of no account, lengths are: vLLM's n-th request is the trace's. An answer's last token is not routed.
    prompts = [{"prompt_token_ids": [1] * len(one.prompt_ids)} for one in requests]
    params = [SamplingParams(max_tokens=len(one.decode_ids) + 1, ignore_eos=True) for one in requests]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - start
    tokens = sum(one.max_tokens for one in params)
    print(f"measured: {len(requests)} requests and {tokens} tokens in {took:.2f} s, {tokens / took:.1f} tokens/s")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["tests/data/tiny-mixtral-trace", "models/tiny-mixtral"]))
