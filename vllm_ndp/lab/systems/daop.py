"""DAOP (arXiv 2501.10375): per-sequence hot experts on the GPU, and cold ones computed by the CPU a layer ahead.

After the prompt the num_hot experts that it used most move to the GPU. In decode DAOP predicts the next layer's experts
from this layer's activations. The CPU computes predicted cold ones from those activations while this layer runs. A cold
expert that was not predicted is not computed: the published graceful degradation takes the best expert that is there
instead. A computed one uses the activations of a layer before, which costs precision too.
"""

from __future__ import annotations

import numpy as np

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, HostCpu
from vllm_ndp.lab.systems.system import ReplayOptions, System, beside_host_memory
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import LOSS_OF_SKIPPING, without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic, time_before
from vllm_ndp.planning.plan import highest

ACCURACY = 0.9  # [O] of predicting the next layer's experts, as for MoEpic


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    accuracy = options.number("predicted", ACCURACY, 0.0, 1.0)
    _, b, _, layers, _ = batches.shape
    hot = highest(batches.prompt_counts, options.budget.num_hot)
    loads, cpu = batches.loads, HostCpu.of(costs)
    here = loads.look_up(hot)
    used = loads.rows > 0
    on_gpu = add_up(costs.gpu_experts_ps(b)[np.where(here, loads.rows, 0)])
    cold = np.where(here, 0, loads.rows)
    on_cpu = cpu.experts_ps(costs, b, costs.shape.expert_bytes, cpu.memory_bytes_per_s)
    busy = accuracy * (
        add_up(on_cpu[cold]) + np.where(add_up(cold) > 0, cpu.hops_ps(costs, b)[batches.rows][..., None], 0)
    )
    late = np.maximum(busy - time_before(on_gpu, batches, costs), 0.0)
    cold_pairs = int(cold.sum())
    is_cold = ~here.ravel()[loads.places] & batches.pairs
    lost = (1 - accuracy) * LOSS_OF_SKIPPING * float((batches.weights * is_cold).sum())
    return without_device(
        "per sequence, CPU a layer ahead",
        batches,
        costs,
        moe_ps=np.maximum(on_gpu, late),
        gpu_ps=on_gpu,
        resident=options.popular(options.budget.num_hot),
        fetched_experts=float(hot.sum()),
        hot_pairs=int(loads.rows[here].sum()),
        cold_bits=float(FULL_PRECISION_BITS * cold_pairs),
        cold_pairs=cold_pairs,
        loss=lost / (float(batches.valid.sum()) * layers),
        traffic=Traffic(
            hbm_bytes=float((used & here).sum()) * costs.shape.expert_bytes,
            host_bytes=accuracy * float((cold > 0).sum()) * costs.shape.expert_bytes,
        ),
    )


DAOP = System(
    "daop",
    (
        "the prompt's most used experts move to the GPU, beside the prompt that streams them anyway: no extra time",
        "90 % of cold experts are predicted (a guess), the others are replaced: counted as skipped, the worst",
        "computing from the activations of a layer before also loses; how much is not known and not counted",
    ),
    False,
    replay,
    beside_host_memory,
    options=("predicted",),
)
