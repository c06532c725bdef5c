"""What does vLLM's fused CPU kernel take for one row and a few hot experts, over the bytes that it must read?

    python benchmarks/hot_kernel.py --shape qwen3-30b-a3b --slots 64 --hot 4

The same experts and rows, in turns inside one process, and equal to the bit (checked at every call):

    aliased    as many columns as the router chose, cold ones aliased to a hot slot with weight 0: how it was
    compact    as many columns as the row has hot experts

each with its slots on pages of 4 KiB and of 2 MiB (vllm_ndp/integration/huge_pages.py). Processor time of one thread.
The floor is the experts' bytes over what the same thread reads from one array (pages of 2 MiB), the best of several
ways to read it, between the calls. What compact / 2 MiB is above it is vLLM's kernel's own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
import vllm._C  # noqa: F401  # loads the operators
from measured import Measurement, add_json_option

from ndp_device.kernels.native import NativeKernel
from ndp_device.timing.shapes import SHAPES
from vllm_ndp.integration import huge_pages

STREAM_BYTES = 1 << 28
STREAMS = ((1, 2048), (2, 1024), (4, 512), (4, 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b", metavar="NAME")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--hot", type=int, default=4, help="of the experts that the router chose for the row")
    parser.add_argument("--rounds", type=int, default=60)
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(str(__doc__))
    torch.set_num_threads(1)
    shape = SHAPES[arguments.shape]
    sizes = shape.hidden_size, shape.intermediate_size, arguments.slots
    found = run(*sizes, shape.top_k, arguments.hot, arguments.rounds)
    measurement.end({"shape": arguments.shape, "slots": arguments.slots, "hot": arguments.hot, **found}, arguments.json)


def slots_of(hidden: int, inner: int, count: int, *, huge: bool) -> tuple[torch.Tensor, torch.Tensor]:
    held = (
        torch.empty(count, 2 * inner, hidden, dtype=torch.bfloat16),
        torch.empty(count, hidden, inner, dtype=torch.bfloat16),
    )
    generator = torch.Generator().manual_seed(0)
    for tensor in held:
        if huge:
            huge_pages.ask_for(tensor)
        one = torch.randn(1, *tensor.shape[1:], generator=generator).mul_(0.02).bfloat16()
        for slot in range(count):
            torch.ops._C.prepack_moe_weight(one.roll(slot, 1), tensor[slot : slot + 1], "vec")
    return held


def run(hidden: int, inner: int, count: int, top_k: int, num_hot: int, rounds: int) -> dict[str, Any]:
    pages = {name: slots_of(hidden, inner, count, huge=name == "2 MiB") for name in ("4 KiB", "2 MiB")}
    stream, data = NativeKernel(threads=1), np.ones(STREAM_BYTES, np.uint8)
    seconds_per_byte = float("inf")
    seconds: dict[str, list[float]] = {}
    rng = np.random.default_rng(0)
    for number in range(rounds):
        hot = torch.from_numpy(rng.choice(count, num_hot, replace=False).astype(np.int32))[None]
        weights, x = torch.rand(1, num_hot), torch.randn(1, hidden).bfloat16()
        aliases = hot.max().expand(1, top_k - num_hot).int()
        columns = {
            "aliased": (torch.cat([weights, torch.zeros(1, top_k - num_hot)], 1), torch.cat([hot, aliases], 1)),
            "compact": (weights, hot),
        }
        outputs = []
        for page, (w13, w2) in pages.items():
            for name, (gates, ids) in columns.items():
                out, start = torch.empty_like(x), time.thread_time()
                torch.ops._C.cpu_fused_moe(out, x, w13, w2, None, None, gates, ids, False, "silu", "vec")
                seconds.setdefault(f"{name}, {page}", []).append(time.thread_time() - start)
                outputs.append(out)
        assert all(torch.equal(out, outputs[0]) for out in outputs)
        streams, prefetch = STREAMS[number % len(STREAMS)]
        start = time.thread_time()
        stream.read_stream(data, streams=streams, prefetch_bytes=prefetch)
        seconds_per_byte = min(seconds_per_byte, (time.thread_time() - start) / STREAM_BYTES)
    floor_us = 1e6 * num_hot * 3 * hidden * inner * 2 * seconds_per_byte
    rows = {}
    for name, taken in seconds.items():
        least, middle = 1e6 * min(taken), 1e6 * statistics.median(taken)
        rows[name] = {
            "measured_min_us": round(least),
            "measured_p50_us": round(middle),
            "min_over_floor": round(least / floor_us, 2),
            "p50_over_floor": round(middle / floor_us, 2),
        }
        print(name, rows[name], flush=True)
    return {
        "measured_gb_per_s": round(1e-9 / seconds_per_byte, 1),
        "measured_floor_us": round(floor_us),
        "ways": rows,
    }


if __name__ == "__main__":
    main()
