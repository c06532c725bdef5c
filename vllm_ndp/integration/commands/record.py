"""`vllm-ndp record`: run prompts through vLLM and keep every routing decision as a trace.

By default every expert is hot, so the run is stock vLLM's arithmetic and the trace holds routing only. With
`--hot-experts` the trace holds placements, bits and simulated times as well. A serving run records the same through the
setting `{"ndp": {"record": DIR}}`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.common.errors import ConfigError
from vllm_ndp.config import DEFAULT_HARDWARE, NdpSettings
from vllm_ndp.integration.commands.engines import import_vllm, quiet_llm


def run(
    model: Path, prompts_file: Path, out: Path, hot_experts: int | None, avg_bits: float, tokens: int, batch: int
) -> dict[str, Any]:
    shape = open_checkpoint(model).shape
    hot = shape.num_experts if hot_experts is None else hot_experts
    NdpSettings(hot_experts=hot, avg_bits=avg_bits).resolve_hot_experts(shape.num_experts)
    settings = {"hot_experts": hot, "avg_bits": avg_bits, "hardware": DEFAULT_HARDWARE, "record": str(out.resolve())}
    prompts = _read_prompts(prompts_file)
    found = f"{len(prompts)} prompt{'s' * (len(prompts) > 1)}"
    print(f"vllm-ndp: {prompts_file} holds {found} (blank lines stand between them)", file=sys.stderr)
    import_vllm()
    from vllm import SamplingParams

    llm = quiet_llm(
        model,
        quantization="ndp",
        additional_config={"ndp": settings},
        enforce_eager=True,
        max_num_seqs=batch,
        kv_cache_memory_bytes=1 << 30,
    )
    params = SamplingParams(temperature=0.8, seed=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    totals = llm.collective_rpc("ndp_totals")[0]
    llm.llm_engine.engine_core.shutdown()  # the worker closes the trace
    return {
        "trace": str(out),
        "requests": len(outputs),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "steps": totals["steps"],
        "sidecar_mismatches": totals["sidecar_mismatches"],
        "measured_seconds": round(seconds, 3),
    }


def _read_prompts(path: Path) -> list[str]:
    """Prompts separated by blank lines."""
    try:
        prompts = [part for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts must be a UTF-8 text file with blank lines between prompts: {error}") from None
    if not prompts:
        raise ConfigError(f"{path} holds no prompt: write at least one")
    return prompts
