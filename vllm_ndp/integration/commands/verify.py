"""`vllm-ndp verify`: is the plugin stock vLLM when nothing is quantized? fp32, greedy, token by token.

Four ways through the same prompts: eager and compiled, each with a chunked prefill pass and a second pass that hits the
prefix cache. Every comparison is with stock vLLM on the same prompts in the same process.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

from ndp_device.checkpoint.opening import open_checkpoint
from vllm_ndp.config import NdpSettings
from vllm_ndp.integration.commands.engines import import_vllm, quiet_llm

PROMPT_WORDS = (
    "def parse(line):\n    parts = line.split(',')\n    for part in parts:\n        if not part:\n",
    "static void free_list(struct node *head)\n{\n    while (head) {\n        struct node *next = head->next;\n",
    "She had always wished to see the sea, and now that the carriage stood at the door she could hardly",
    "noun: a tool with a handle and a heavy head; synonyms: hammer, mallet; used for driving nails into",
    "CREATE TABLE orders (id integer PRIMARY KEY, total numeric); The table is created in the current schema",
    "Öffnen Sie das Dialogfeld und wählen Sie eine Option aus. Anschließend klicken Sie auf",
    '<rect x="4" y="8" width="40" height="32" rx="2" style="fill:#729fcf;stroke:#204a87"/>\n<g>',
    "import os\nimport sys\n\ndef main(argv=None):\n    if argv is None:\n        argv = sys.argv[1:]\n",
)
REPEATS = 6  # long enough that a 64-token budget cuts every prompt into chunks


def run(model: Path, hot_experts: int | None, tokens: int) -> dict[str, Any]:
    shape = open_checkpoint(model).shape
    settings = NdpSettings(cold_precision="full", hot_experts=hot_experts)
    settings.resolve_hot_experts(shape.num_experts)
    import_vllm()
    prompts = [words * REPEATS for words in PROMPT_WORDS]
    stock = _generate(model, prompts, tokens, enforce_eager=True, settings=None)[0][0]
    result: dict[str, Any] = {"tokens_total": 0, "tokens_identical": 0, "sidecar_mismatches": 0, "row_checks": 0}
    result |= {"cold_pairs": 0, "fallback_pairs": 0, "modes": {}}
    plugin = {"cold_precision": settings.cold_precision, "hot_experts": settings.hot_experts}
    for mode, eager in (("eager", True), ("compiled", False)):
        passes, totals = _generate(model, prompts, tokens, enforce_eager=eager, settings=plugin)
        for name, outputs in zip(("chunked prefill", "prefix cache"), passes, strict=True):
            same = sum(a == b for mine, theirs in zip(outputs, stock, strict=True) for a, b in zip(mine, theirs))  # noqa: B905
            total = sum(len(tokens_of_prompt) for tokens_of_prompt in stock)
            result["modes"][f"{mode}, {name}"] = f"{same}/{total}"
            result["tokens_identical"] += same
            result["tokens_total"] += total
            print(f"{mode}, {name}: {same} of {total} tokens identical", file=sys.stderr)
        for key in ("sidecar_mismatches", "row_checks", "cold_pairs", "fallback_pairs"):
            result[key] += totals[key]
    return result


def _generate(
    model: Path, prompts: list[str], tokens: int, *, enforce_eager: bool, settings: dict[str, Any] | None
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """Token ids of two passes (the second hits the prefix cache), and the plugin's totals."""
    from vllm import SamplingParams

    plugin: dict[str, Any] = {} if settings is None else {"quantization": "ndp", "additional_config": {"ndp": settings}}
    llm = quiet_llm(
        model,
        dtype="float32",
        enforce_eager=enforce_eager,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=64,
        max_num_seqs=len(prompts),
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        **plugin,
    )
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    passes = [
        [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
        for _ in range(2)
    ]
    totals = llm.collective_rpc("ndp_totals")[0] if settings is not None else {}
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return passes, totals
