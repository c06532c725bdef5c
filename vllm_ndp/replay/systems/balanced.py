"""Ours: the paper's placement, but a hot expert's rows may run on the device when that shortens the layer.

The rule is Balancer's (replay/balance.py), here over a whole trace at once; the plugin's default. The copies are there
already: the device keeps replicas of every expert. Costs precision, which `loss` shows; the hot set, the bits of cold
experts and migration stay the policy's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.config import DEFAULT_SPILL_BITS
from vllm_ndp.replay.balance import Balancer
from vllm_ndp.replay.batches import Batches
from vllm_ndp.replay.costs import Costs
from vllm_ndp.replay.execution import run_pairs
from vllm_ndp.replay.outcome import Outcome
from vllm_ndp.replay.systems.context_aware import finish, plan_groups
from vllm_ndp.replay.systems.system import Placing, System


def spill(batches: Batches, widths: NDArray[np.uint8], costs: Costs, bits: int) -> NDArray[np.uint8]:
    """widths [G, B, D, L, k] with some of the zeros (GPU) turned into `bits`: Balancer's rule, for a whole trace."""
    b = batches.shape[1]
    device, gpu, links = costs.device_experts_ps(b)[bits], costs.gpu_experts_ps(b), costs.links_ps(b)
    base = run_pairs(batches, widths, costs)
    out = widths.copy()
    hot = (widths == 0) & batches.pairs
    for part in batches.chunks():
        here = hot[:, :, part]
        rows, gates = batches.tokens_in(part, here), batches.weight_in(part, here)
        span = int((rows > 0).sum(axis=3).max())
        if span < 1:
            continue
        order = np.argsort(np.where(rows > 0, gates, np.inf), axis=3, kind="stable")[..., :span]
        ranked = np.take_along_axis(rows, order, axis=3)  # least gate weight first
        zero = np.zeros((*rows.shape[:3], 1))
        moved = np.concatenate([zero, np.cumsum(device[ranked], axis=3)], axis=3)
        left = np.concatenate([np.cumsum(gpu[ranked][..., ::-1], axis=3)[..., ::-1], zero], axis=3)
        already = base.device_ps[:, part, :, None]
        # A layer without a cold pair pays for the message; one that has it pays only for the added experts.
        message = np.where((already == 0) & (moved > 0), costs.device_fill_ps + links[1, 1], 0.0)
        best = np.maximum(left, already + moved + message).argmin(axis=3)
        spilled = np.zeros(rows.shape, np.bool_)
        np.put_along_axis(spilled, order, np.arange(span) < best[..., None], axis=3)
        # [G, 1, C, L, E] looked up by [G, B, C, L, k]
        chosen = np.take_along_axis(spilled[:, None], batches.ids[:, :, part], axis=4)
        out[:, :, part] = np.where(here & chosen, bits, out[:, :, part])
    return out


def replay(batches: Batches, costs: Costs, placing: Placing) -> Outcome:
    bits = Balancer(costs, int(placing.options.get("spill_bits", DEFAULT_SPILL_BITS))).spill_bits
    hot, before, planned = plan_groups(batches, placing)
    widths = np.take_along_axis(planned[:, :, None], batches.ids, axis=4)
    spilled = spill(batches, widths, costs, bits)
    outcome = finish("balanced", batches, costs, placing, spilled, hot, before)
    outcome.policy += f", spill {bits}"
    outcome.notes["spilled_pairs"] = int(((spilled != widths) & batches.pairs).sum())
    return outcome


BALANCED = System(
    "balanced",
    (
        "the device holds replicas of hot experts too; the choice is made per layer from the router's output alone",
        "hot experts of least gate weight are spilled first, at 3 bits unless told otherwise",
    ),
    True,
    replay,
)
