"""A program: vLLM's own recording of routed experts, on CPU. Prints one answer of its server per line of stdout's JSON.

vLLM returns routing from its newer model runner only, which wants Triton with a CPU backend. Here Triton's interpreter
stands for one (TRITON_INTERPRET=1): the same kernels, run by numpy. Everything else is vLLM's: runner, capture, store,
scheduler, answer. Our plugin is in the engine because stock vLLM's CPU experts cannot be captured; it records too.

python routed_experts.py DIRECTORY
"""

import json
import os
import sys
import types
from pathlib import Path

from engines import IN_PROCESS, MODEL, PROMPTS, engine, greedy

TOKENS = (8, 3, 12, 1)


def _pretend_triton_has_a_cpu_backend() -> None:
    from triton.backends import backends

    backends["cpu"] = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True))


def main(directory: Path) -> list[str]:
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice, UsageInfo
    from vllm.utils.serial_utils import numpy2base64

    settings = {"hot_experts": 8, "cold_precision": "full", "record": str(directory)}
    lines = []
    with engine(MODEL, settings=settings, enable_return_routed_experts=True) as llm:
        for prompt, tokens in zip(PROMPTS, TOKENS, strict=True):
            (output,) = greedy(llm, [prompt], tokens)
            (said,) = output.outputs
            count = len(output.prompt_token_ids)
            choice = CompletionResponseChoice(
                index=0, text=said.text, finish_reason="length", routed_experts=numpy2base64(said.routed_experts)
            )
            usage = UsageInfo(prompt_tokens=count, completion_tokens=tokens, total_tokens=count + tokens)
            lines.append(CompletionResponse(model="tiny", choices=[choice], usage=usage).model_dump_json())
    return lines


if __name__ == "__main__":
    os.environ |= IN_PROCESS | {"OMP_NUM_THREADS": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    _pretend_triton_has_a_cpu_backend()
    print(json.dumps({"answers": main(Path(sys.argv[1]))}))
