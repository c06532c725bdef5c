"""The usual alternative: every expert in GPU memory, all at one width. No device, no link, no migration.

The GPU memory is that of every other row: num_hot full-precision experts per layer. The GPU reads experts from HBM at
their width, scales included, and multiplies in 16 bits, as weight-only kernels do. Option `weight_bits`: 16, 8, 4, 3, 2
or "widest", the widest of these that fits. The system refuses a width that does not fit.
"""

from __future__ import annotations

import numpy as np

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory
from vllm_ndp.lab.systems.system import ReplayOptions, System, TooFewPlaces
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import gate_loss, on_gpu_ps, prompts_ps, shared_ps
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic

WEIGHT_BITS = (FULL_PRECISION_BITS, 8, 4, 3, 2)
WIDEST = "widest"


def widest_that_fits(costs: Costs, num_hot: float) -> int | None:
    """The widest of WEIGHT_BITS at which all experts of a layer fit where num_hot of full precision do."""
    room = num_hot * costs.shape.expert_bytes
    return next((b for b in WEIGHT_BITS if costs.shape.num_experts * costs.replica_bytes(b) <= room), None)


def chosen_bits(costs: Costs, options: ReplayOptions) -> int:
    """The width that the options name, or the widest; raises TooFewPlaces where the GPU memory is too small for it."""
    wanted = options.choice("weight_bits", (WIDEST, *WEIGHT_BITS))
    widest = widest_that_fits(costs, options.budget.num_hot)
    bits = int(wanted) if wanted != WIDEST else widest or WEIGHT_BITS[-1]
    if widest is None or bits > widest:
        need = costs.shape.num_experts * costs.replica_bytes(bits)
        have = options.budget.num_hot * costs.shape.expert_bytes
        raise TooFewPlaces(
            f"all {costs.shape.num_experts} experts of a layer at {bits} bits take {need / 1e9:.3f} GB, "
            f"{options.budget.num_hot} hot ones leave room for {have / 1e9:.3f} GB"
        )
    return bits


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    shape = costs.shape
    return Memory(gpu=shape.num_layers * shape.num_experts * costs.replica_bytes(chosen_bits(costs, options)))


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    bits = chosen_bits(costs, options)
    g, b, d, layers, _ = batches.shape
    expert_bytes = costs.replica_bytes(bits)
    table = on_gpu_ps(costs, np.arange(b + 1)[:, None], expert_bytes)
    moe = add_up(table[batches.loads.rows]) + shared_ps(batches, costs)
    pairs = int(np.broadcast_to(batches.pairs, batches.ids.shape).sum())
    quantized = bits < FULL_PRECISION_BITS
    widths = np.full(batches.ids.shape, bits if quantized else 0, np.uint8)
    return Outcome(
        policy=f"{bits} bits",
        moe_ps=moe,
        device_ps=np.zeros((g, d, layers)),
        gpu_ps=moe,
        prefill_ps=prompts_ps(batches, costs, lambda counts: on_gpu_ps(costs, counts, expert_bytes)),
        migration_ps=np.zeros(g),
        migrated_bytes=0.0,
        hot_pairs=pairs,
        cold_bits=float(bits * pairs) if quantized else 0.0,
        cold_pairs=pairs if quantized else 0,
        loss=gate_loss(batches, widths, options.loss),
        traffic=Traffic(hbm_bytes=float((batches.loads.rows > 0).sum()) * expert_bytes),
    )


QUANTIZED = System(
    "quantized",
    (
        "all experts in GPU memory at one width, with a float16 scale and offset per group as replicas have; no device",
        "dequantising is free beside the read (weight-only kernels at small batches); multiplied in 16 bits",
        "loss at 8 bits is extrapolated from 4 bits at 4.4x per bit",
    ),
    False,
    replay,
    memory,
    options=("weight_bits",),
)
