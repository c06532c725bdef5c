"""How long does the host take to say where the pairs of one MoE layer run, to lay them out, and to account for them?

    python benchmarks/split_speed.py                       # 1 .. 64 decode rows of qwen3-30b-a3b, half of it hot
    python benchmarks/split_speed.py --shape mixtral-8x7b --rows 1,8

No engine, no device: the calls that a layer makes between the router and the kernel, and after the answer.

    split      which pair runs where, offloading decided, the message laid out, pairs counted, routing noted
    hot        the hot pairs as tensors
    account    the layer's end on the simulated clock, with an answer of the device

Timed in blocks of 200 calls, each with other routing; the fastest block counts, since other programs only add to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from measured import Measurement, add_json_option

from ndp_device.timing.shapes import SHAPES, public_shape
from ndp_device.timing.spec import load_hardware
from vllm_ndp.integration.batch import BatchRows, Span, TrackedRequest
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.integration.slot_pairs import HotViews
from vllm_ndp.integration.step import ModelSizes, Step, StepParts
from vllm_ndp.layer import account
from vllm_ndp.layer.split import SplitRules, Splitter
from vllm_ndp.layer.tiers import Tiers
from vllm_ndp.planning.plan import BitwidthPlan, Placement, Plan
from vllm_ndp.simulation.balance import Balancer
from vllm_ndp.simulation.costs import Costs
from vllm_ndp.simulation.gpu_timing import GpuModel, StepClock

CALLS = 200
BLOCKS = 60
ENTRIES = 4096


@dataclass
class Layers:
    """Amid a step of so many decode rows: the routing of its layers, each of which is split."""

    step: Step
    views: HotViews
    routing: list[tuple[torch.Tensor, torch.Tensor]]  # of each call, ids and weights [T, k]

    @classmethod
    def of(cls, name: str, num_rows: int, *, offloads: bool) -> Layers:
        hardware, shape = load_hardware("h100-ndp512"), public_shape(name)
        costs, random = Costs(hardware, shape), np.random.default_rng(num_rows)
        tiers = Tiers(shape.num_layers, shape.num_experts)
        hot = np.argsort(random.random(tiers.where.shape), axis=1) < shape.num_experts // 2
        tiers.activate(hot)
        tiers.name_all()
        balancers = [Balancer(costs, 2)] * shape.num_layers if offloads else None
        splitter = Splitter(tiers, shape.top_k, SplitRules(balancers))
        noted = shape.num_layers, ENTRIES, shape.top_k
        splitter.note_into(np.zeros(noted, np.int16), np.zeros(noted, np.float32))
        sizes = ModelSizes(shape.num_layers, shape.num_experts, shape.top_k)
        plan = Plan(0, Placement(hot), BitwidthPlan((3 * ~hot).astype(np.uint8)))
        requests = [TrackedRequest(str(row), 1, [0], prefilled=True, plan=plan) for row in range(num_rows)]
        spans = {request.request_id: Span(request, 1000, 1) for request in requests}
        locator: Any = SimpleNamespace(locate=lambda spans: (BatchRows(tuple(spans.values())), torch.arange(num_rows)))
        clock, sidecar = StepClock(GpuModel(hardware, shape)), RoutingSidecar(*noted[::2], torch.device("cpu"), 0, 16)
        step = Step(1, spans, StepParts(sizes, clock, splitter, locator, sidecar))
        step.start()
        ranks = np.argsort(random.random((CALLS, num_rows, shape.num_experts)), axis=2)
        ids = torch.from_numpy(ranks[:, :, : shape.top_k].astype(np.int32))
        weights = torch.rand(ids.shape)
        return cls(step, HotViews(splitter, torch.device("cpu")), list(zip(ids, weights, strict=True)))

    def us(self) -> dict[str, float]:
        """Of each part: the parts up to it, less those before it."""
        step, views, answer = self.step, self.views, account.end_layer

        def split(*, is_viewed: bool, ends: bool) -> None:
            for ids, weights in self.routing:
                step.begin_layer()
                found = step.split(0, ids, weights, with_device=True)
                if is_viewed:
                    views.of(found, None, ids, weights)  # type: ignore[arg-type]  # slots are looked at on a GPU
                if ends:
                    answer(step.parts.clock, step.parts.splitter, found, 5_000_000)
                else:
                    step.parts.clock._layer = None

        one = fastest_us(lambda: split(is_viewed=False, ends=False))
        two = fastest_us(lambda: split(is_viewed=True, ends=False))
        three = fastest_us(lambda: split(is_viewed=True, ends=True))
        return {"measured_split_us": one, "measured_hot_us": two - one, "measured_account_us": three - two}


def fastest_us(act: Callable[[], None]) -> float:
    """Of one call."""
    least = float("inf")
    for _ in range(BLOCKS):
        start = time.perf_counter()
        act()
        least = min(least, time.perf_counter() - start)
    return 1e6 * least / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b", metavar="NAME")
    parser.add_argument("--rows", default="1,2,4,8,16,64")
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(__doc__ or "")
    results: list[dict[str, Any]] = []
    for num_rows in map(int, arguments.rows.split(",")):
        for offloads in (False, True):
            found = Layers.of(arguments.shape, num_rows, offloads=offloads).us()
            row = {"rows": num_rows, "offloads": offloads, **{name: round(us, 2) for name, us in found.items()}}
            print(row, flush=True)
            results.append(row)
    measurement.end({"shape": arguments.shape, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
