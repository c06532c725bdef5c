"""A program: start one engine, generate a little, print what the process keeps in anonymous memory.

    python resident_memory.py MODEL [HOT_EXPERTS]        without HOT_EXPERTS: stock vLLM

Anonymous memory is what only this process holds and no file backs: weights that were copied are in it, pages of a
mapped checkpoint are not.
"""

import json
import os
import sys
from pathlib import Path

for absent in ("sklearn", "scipy", "pandas", "datasets"):
    sys.modules[absent] = None  # type: ignore[assignment]  # lm-eval brings them, and transformers imports what it finds

from engines import engine, greedy  # noqa: E402

PARTS = ("hot_bytes", "staging_bytes", "sidecar_bytes", "pool_bytes")


def anonymous_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("smaps_rollup has no line Anonymous")


def main() -> None:
    model, hot = Path(sys.argv[1]), sys.argv[2:]
    settings = {"hot_experts": int(hot[0]), "cold_precision": "full"} if hot else None
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with engine(model, settings=settings, dtype="bfloat16", max_model_len=128, max_num_batched_tokens=128) as llm:
        after_start = anonymous_bytes()
        status = llm.collective_rpc("ndp_status")[0] if hot else {}
        parts = {name: status[name] for name in PARTS if name in status}
        tokens = sum(len(output.outputs[0].token_ids) for output in greedy(llm, ["The sea", "def f(x):"], 8))
        print(
            json.dumps({"start_bytes": after_start, "run_bytes": anonymous_bytes(), "tokens": tokens, **parts}),
            flush=True,
        )


if __name__ == "__main__":
    main()
