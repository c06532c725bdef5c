"""Loss of served requests on held-out text, beside what benchmarks/quality.py computes for the same plans.

The same sequences go through vLLM with `quantization="ndp"`: 256 tokens as the prompt, the rest forced token by token,
so every decode step runs the plugin's own plan, its hot slots and the device process, and vLLM's raw log-probabilities
are the decode path's. One request at a time: with several, they would share one hot set. float32.
"""

import gc
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quality import (
    MODEL,
    PROMPT_TOKENS,
    Cell,
    MixedModel,
    loss_tables,
    plan_of,
    stacked,
)
from torch import Tensor
from vllm import LLM, SamplingParams

from vllm_ndp.config import DEFAULT_HARDWARE
from vllm_ndp.integration.forced_tokens import FORCED, ForcedTokens
from vllm_ndp.planning.importance import ImportanceScore

DEADLINE_MS = 60_000.0
"""A busy machine may miss the default deadline, and the fallback computes in full precision: a flattered result."""


def served_nll(sequences: Tensor, settings: dict[str, Any]) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Mean decode nll of each sequence [N, T] when the plugin serves it, and the plugin's totals."""
    llm = LLM(
        str(MODEL),
        dtype="float32",
        quantization="ndp",
        additional_config={"ndp": {"deadline_ms": DEADLINE_MS, "hardware": DEFAULT_HARDWARE, **settings}},
        logits_processors=[ForcedTokens],
        enforce_eager=True,
        async_scheduling=False,
        max_num_seqs=1,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        disable_log_stats=True,
    )
    nll = []
    for tokens in sequences.tolist():
        forced = tokens[PROMPT_TOKENS:]
        params = SamplingParams(
            temperature=0.0, max_tokens=len(forced), ignore_eos=True, logprobs=0, extra_args={FORCED: forced}
        )
        output = llm.generate({"prompt_token_ids": tokens[:PROMPT_TOKENS]}, params, use_tqdm=False)[0].outputs[0]
        if list(output.token_ids) != forced:
            raise SystemExit(f"the engine was to generate the {len(forced)} given tokens, it generated others")
        by_token = [step[token].logprob for step, token in zip(output.logprobs, forced, strict=True)]
        nll.append(-np.mean(by_token[1:]))  # the first generated token is the prefill's
    totals = llm.collective_rpc("ndp_totals")[0]
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return np.array(nll), totals


def harness_nll(model: MixedModel, sequences: Tensor, cell: Cell, replicas: Path) -> NDArray[np.float64]:
    """What quality.py measures for the same sequences."""
    prompts = model.prefill(sequences)
    nobody = ImportanceScore.from_weights(np.ones(prompts[0].counts.shape))
    losses = loss_tables(replicas)
    return model.decode(*stacked([plan_of(cell, prompt, prompt, nobody, losses) for prompt in prompts]))
