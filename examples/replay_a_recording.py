"""The same routing under other systems and on other hardware, without vLLM: simulated tokens per second of each.

python examples/replay_a_recording.py tests/data/tiny-mixtral-trace
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_ndp.lab.compare import compare
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.traces.trace import Trace


def main(trace: str) -> None:
    recorded = Trace.load(Path(trace))
    for hardware in ("h100-ndp512", "h200-gen5"):
        settings = CompareSettings(
            model="models/tiny-mixtral",
            hardware=hardware,
            systems=("context_aware", "balanced", "fiddler", "pregated"),
            policies=("prefill",),
        )
        print(hardware)
        for row in compare(recorded, settings).rows:
            print(f"  {row.system:14} {row.decode_tokens_per_s:10.0f} simulated tokens/s")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["tests/data/tiny-mixtral-trace"]))
