"""Engines that the pieces of gpu_check.py ask: stock vLLM or the plugin, in this process, and the tokens they gave.

Knows vLLM and the bundled model. Does not know what is asked.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

from measured import ROOT
from pieces import LeftOutError, Row

from vllm_ndp.config import GPU_RUNGS

MODEL, REPLICAS = ROOT / "models/tiny-mixtral", ROOT / "models/tiny-mixtral-replicas"
PATIENT_MS = 20_000.0  # Triton compiles for seconds in first calls; a cold expert on a CPU takes its time too
PROMPTS = (
    "def parse(line):\n    parts = line.split(',')\n",
    "static void free_list(struct node *head)\n{\n",
    "She had always wished to",
    "CREATE TABLE orders (id integer PRIMARY KEY",
)
HALF = {"hot_experts": 4, "replicas": str(REPLICAS), "execution": "paper", "deadline_ms": PATIENT_MS}
RUNGS = ("stock", *GPU_RUNGS)
IN_PIECES: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}
"""Options of an engine that captures graphs between MoE layers."""
IN_ONE: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
"""Of one that makes one graph of a decode step."""
RUNG = "NDP_GPU_RUNG"
"""In the environment: the setting `gpu` of engines that name none."""


def kept_rows(piece: str, folders: list[Path]) -> list[Row]:
    """What a piece has found, in the first of the folders that has any."""
    file = next((path for folder in folders if (path := folder / f"gpu_{piece}.json").exists()), None)
    rows: list[Row] = [] if file is None else json.loads(file.read_text())["figures"]["results"]
    return rows


def rung() -> str:
    return os.environ.get(RUNG, "auto")


def best_rung(folders: list[Path]) -> str:
    """The last that a run of the piece `rungs` has passed; `auto` where none has."""
    passed = [row["way"] for row in kept_rows("rungs", folders) if "decode_layers" in row]
    return passed[-1] if passed else "auto"


def on_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def engine(settings: dict[str, Any] | None = None, model: Path = MODEL, **options: Any) -> Any:
    """A `vllm.LLM` in this process: stock, or with the plugin where settings are given."""
    from vllm import LLM
    from vllm.platforms import current_platform

    if not on_gpu() and not current_platform.is_cpu():
        raise LeftOutError("this vLLM is built for a GPU, and none is here")
    base: dict[str, Any] = {
        "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "seed": 0, "disable_log_stats": True,
        "dtype": "bfloat16", "enable_prefix_caching": False,  # a prompt that was seen costs no prefill
    }  # fmt: skip
    if model == MODEL:
        base["kv_cache_memory_bytes"] = 64 << 20  # several engines of one process must fit beside each other
    base |= {"attention_backend": "TRITON_ATTN"} if on_gpu() else {"block_size": 32}
    if settings is not None:
        settings = {"debug": {"gpu": rung()}, **settings}
        base |= {"quantization": "ndp", "additional_config": {"ndp": settings}}
    return LLM(str(model), **(base | options))


def end(llm: Any) -> None:
    """Its memory is free for the next engine of this process."""
    llm.llm_engine.engine_core.shutdown()
    del llm.llm_engine
    gc.collect()
    if on_gpu():
        import torch

        torch.cuda.empty_cache()


def greedy(llm: Any, prompts: Any, tokens: int, **params: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **params)
    return list(llm.generate(list(prompts), sampling, use_tqdm=False))


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def equal_tokens(mine: list[list[int]], theirs: list[list[int]]) -> dict[str, int]:
    """How many tokens agree before the first that does not, of how many."""
    agree = 0
    for a, b in zip(mine, theirs, strict=True):
        differing = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        agree += differing[0] if differing else len(a)
    return {"equal": agree, "of": sum(map(len, theirs))}


def chosen_logprobs(outputs: list[Any]) -> list[list[float]]:
    return [
        [step[token].logprob for step, token in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]
        for o in outputs
    ]
