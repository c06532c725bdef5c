"""DynaExq (arXiv 2511.15015): every expert in GPU memory, the hot ones at more bits, chosen by what was used lately.

A low width for all, and as many of the hottest per layer at a high width as the memory of num_hot full-precision
experts leaves. No expert is ever missing, so nothing waits; promotions run beside compute. The closest rival of
context-aware bits on a device: the same idea inside GPU memory. Hotness here: a prior worth 16 tokens and the group's
prompts, decided once per group (published: a long window of router traces, updated all the time).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory
from vllm_ndp.lab.systems.quantized import WEIGHT_BITS
from vllm_ndp.lab.systems.system import ReplayOptions, System, TooFewPlaces
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import gate_loss, on_gpu_ps, prompts_ps, without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic
from vllm_ndp.planning.plan import highest

PRIOR_TOKENS = 16.0


def widths(costs: Costs, options: ReplayOptions) -> tuple[int, int, int]:
    """(high, low, how many experts per layer at high). Unless told: 16 over 4 if all fit at 4 bits, else 4 over 2."""
    shape, room = costs.shape, options.budget.num_hot * costs.shape.expert_bytes
    all_at_four = shape.num_experts * costs.replica_bytes(4) <= room
    high = options.choice("high_bits", WEIGHT_BITS, 16 if all_at_four else 4)
    low = options.choice("low_bits", WEIGHT_BITS, 4 if all_at_four else 2)
    if high <= low:
        raise ConfigError(f"high_bits must be above low_bits, got {high} and {low}")
    spare = room - shape.num_experts * costs.replica_bytes(low)
    if spare < 0:
        raise TooFewPlaces(
            f"all {shape.num_experts} experts of a layer at {low} bits do not fit in the memory of "
            f"{options.budget.num_hot} full-precision ones: {-spare} bytes are missing"
        )
    return high, low, min(spare // (costs.replica_bytes(high) - costs.replica_bytes(low)), shape.num_experts)


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Narrow and wide experts on the GPU; the host keeps the wide ones to promote from."""
    high, low, num_high = widths(costs, options)
    shape = costs.shape
    layer = num_high * costs.replica_bytes(high) + (shape.num_experts - num_high) * costs.replica_bytes(low)
    return Memory(gpu=shape.num_layers * layer, host=shape.num_layers * shape.num_experts * costs.replica_bytes(high))


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    high, low, num_high = widths(costs, options)
    g, b, _, layers, k = batches.shape
    heat = batches.prompt_counts + PRIOR_TOKENS * k * options.prior.values
    loads = batches.loads
    is_wide = loads.look_up(highest(heat, num_high))
    tables = [on_gpu_ps(costs, np.arange(b + 1)[:, None], costs.replica_bytes(bits)) for bits in (low, high)]
    moe = add_up(np.where(is_wide, tables[1][loads.rows], tables[0][loads.rows]))
    used = loads.rows > 0
    wide_pairs, pairs = int(loads.rows[is_wide].sum()), int(loads.rows.sum())
    ran = np.where(is_wide.ravel()[loads.places], high, low)
    read = used.sum() * costs.replica_bytes(low) + (used & is_wide).sum() * (
        costs.replica_bytes(high) - costs.replica_bytes(low)
    )

    def layers_ps(prompt: NDArray[np.int64]) -> NDArray[np.float64]:
        return on_gpu_ps(costs, prompt, costs.replica_bytes(low))

    narrow = ran[np.broadcast_to(batches.pairs, ran.shape)]
    return without_device(
        f"{high} over {low} bits, {num_high} high",
        batches,
        costs,
        moe_ps=moe,
        gpu_ps=moe,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=float(g * layers * num_high * costs.replica_bytes(high) / costs.shape.expert_bytes),
        hot_pairs=wide_pairs,
        cold_bits=float(narrow[narrow < 16].sum()),
        cold_pairs=int((narrow < 16).sum()),
        loss=gate_loss(batches, np.where(ran < 16, ran, 0).astype(np.uint8), options.loss),
        traffic=Traffic(hbm_bytes=float(read)),
        notes={"high_per_layer": num_high, "pairs": pairs},
    )


DYNAEXQ = System(
    "dynaexq",
    (
        "hot set per group from a prior worth 16 tokens and the prompts; published: a long window, updated in decode",
        "promotions are copied beside compute and never waited for; prompts run at the low width",
        "widths and losses are our replicas'",
    ),
    False,
    replay,
    memory,
    options=("high_bits", "low_bits"),
)
