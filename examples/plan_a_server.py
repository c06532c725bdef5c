"""What fits on a machine, from Python: hot experts, replica widths, KV cache, and the line that serves it.

python examples/plan_a_server.py mixtral-8x7b 24GB 64GB
"""

from __future__ import annotations

import sys

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.operating.proposal import propose
from vllm_ndp.operating.sizing import Sizing, human, parse_bytes
from vllm_ndp.operating.sources import source_named


def main(model: str, gpu_memory: str, host_memory: str) -> None:
    source = source_named(model)
    host_bytes, gpu_bytes = parse_bytes(host_memory, "host memory"), parse_bytes(gpu_memory, "GPU memory")
    sizing = Sizing(source.model, host_bytes, gpu_bytes, context=8192, batch=4)
    proposal = propose(source, sizing, Costs(load_hardware(), source.model))
    for way in proposal.ways:
        option, speed = way.option, way.simulated
        print(
            f"replicas up to {option.widest} bit: {option.num_hot} of {source.model.num_experts} experts hot "
            f"({human(sizing.hot(option.num_hot))} on the GPU), {speed.decode_tokens_per_s:.0f} simulated tokens/s"
        )
    print(proposal.serve_line())


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["mixtral-8x7b", "24GB", "64GB"]))
