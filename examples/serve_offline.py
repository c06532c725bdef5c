"""One request, three answers: tokens, a measured time, a simulated time. Starts a real vLLM and a real device process.

python examples/serve_offline.py models/tiny-mixtral models/tiny-mixtral-replicas
"""

from __future__ import annotations

import sys
from typing import Any

from vllm import LLM, SamplingParams


def main(model: str, replicas: str | None = None) -> None:
    settings: dict[str, Any] = {"hot_experts": 4, "avg_bits": 3}
    if replicas is not None:
        settings["replicas"] = replicas
    llm = LLM(
        model,
        quantization="ndp",
        additional_config={"ndp": settings},
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
    )
    (output,) = llm.generate(["def read_config(path):"], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    report = output.kv_transfer_params["ndp"]
    print(output.outputs[0].text)
    print(f"measured_tpot_ms {report['measured_tpot_ms']}")
    print(f"simulated_tpot_us {report['simulated_tpot_us']}")
    print(f"hot_pairs {report['hot_pairs']}, cold_pairs {report['cold_pairs']}, avg_bits {report['avg_bits']}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["models/tiny-mixtral", "models/tiny-mixtral-replicas"]))
