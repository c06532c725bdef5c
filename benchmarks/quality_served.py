"""Does a served request lose on held-out text exactly what benchmarks/quality.py says it loses?

    python benchmarks/quality_served.py [--replicas DIR] [--sequences 2] [--cells 2:2:importance 3:4:mse …]

The same sequences go through vLLM with `quantization="ndp"`: 256 tokens as the prompt, the rest forced token by token,
so every decode step runs the plugin's own plan, its hot slots and the device process, and vLLM's raw log-probabilities
are the decode path's. A cell is AVERAGE_BITS:HOT_EXPERTS:GAIN. One request at a time: with several, they would share
one hot set. float32. Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from quality import (
    MODEL,
    PROMPT_TOKENS,
    SELECTORS,
    Cell,
    MixedModel,
    held_out_sequences,
    loss_tables,
    plan_of,
    replicas_of,
    stacked,
)
from torch import Tensor
from vllm import LLM, SamplingParams

from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.config import DEFAULT_HARDWARE
from vllm_ndp.integration.forced_tokens import FORCED, ForcedTokens
from vllm_ndp.planning.importance import ImportanceScore

DEADLINE_MS = 60_000.0
"""A busy machine may miss the default deadline, and the fallback computes in full precision: a flattered result."""


def served_nll(
    sequences: Tensor, settings: dict[str, Any], model_dir: Path = MODEL
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Mean decode nll of each sequence [N, T] when the plugin serves it, and the plugin's totals."""
    llm = LLM(
        str(model_dir),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=Path)
    parser.add_argument("--sequences", type=int, default=2, help="per domain")
    parser.add_argument("--cells", nargs="+", default=["2:0:importance", "2:2:mse", "1.5:2:importance"])
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(1)
    replicas = arguments.replicas or replicas_of(MODEL)
    began = time.monotonic()
    model = MixedModel(MODEL, ExpertStore(MODEL, replicas, kernel=ReferenceKernel()))
    sequences = torch.cat(list(held_out_sequences(MODEL, arguments.sequences).values()))
    model.prefill(sequences)
    full = model.decode(None)
    rows = []
    for text in arguments.cells:
        avg_bits, hot_experts, gain = text.split(":")
        cell = Cell(float(avg_bits), int(hot_experts), gain, "prefill")
        settings = {
            "avg_bits": cell.avg_bits,
            "hot_experts": cell.hot_experts,
            "bit_rule": SELECTORS[gain][0],
            "losses": "relative" if SELECTORS[gain][1] == "relative" else "absolute",
            "replicas": str(replicas),
        }
        served, totals = served_nll(sequences, settings)
        harness = harness_nll(model, sequences, cell, replicas)
        row = {
            "cell": text,
            "harness_delta_nll": round(float((harness - full).mean()), 5),
            "served_delta_nll": round(float((served - full).mean()), 5),
            "largest_difference": float(f"{np.abs(served - harness).max():.1e}"),
            "cold_pairs": totals["cold_pairs"],
            "fallback_pairs": totals["fallback_pairs"],
        }
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    print(json.dumps({"sequences": len(sequences), "measured_seconds": round(time.monotonic() - began), "cells": rows}))


if __name__ == "__main__":
    main()
