"""Ours: the paper's placement, but a hot expert's rows may run on the device when that shortens the layer.

The rule is Balancer's (layer/balance.py), here over a whole trace at once; the plugin's default. The copies exist
already: the device keeps replicas of every expert. Costs precision, which `loss` shows; the hot set, the bits of cold
experts and migration stay the policy's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import WIDTHS
from vllm_ndp.config import DEFAULT_OFFLOAD_BITS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab import _lanes
from vllm_ndp.lab.systems.context_aware import finish, memory, plan_groups
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import run_pairs, shared_ps
from vllm_ndp.lab.vectorised.outcome import Outcome


def offload(batches: Batches, widths: NDArray[np.uint8], costs: Costs, bits: int) -> NDArray[np.uint8]:
    """widths [G, B, D, L, k] with some of the zeros (GPU) turned into `bits`: Balancer's rule, for a whole trace."""
    b = batches.shape[1]
    device, gpu, links = costs.device_experts_ps(b)[bits], costs.gpu_experts_ps(b), costs.links_ps(b)
    already = run_pairs(batches, widths, costs).device_ps
    # A layer without a cold pair pays for the message; one that has it pays only for the added experts.
    opening = float(costs.device_fill_ps + links[1, 1])
    hot = (widths == 0) & batches.pairs
    loads = batches.loads
    rows, gates = loads.count(hot), loads.total(batches.weights, hot)
    offloaded = np.zeros(rows.shape, np.bool_)
    beside = np.ascontiguousarray(shared_ps(batches, costs)[:, :, 0])
    already, device = np.ascontiguousarray(already), np.ascontiguousarray(device)
    _lanes.spill(rows, gates, already, device, gpu, beside, opening, offloaded)
    # [G, D, L, S] looked up by [G, B, D, L, k]
    return np.where(hot & offloaded.ravel()[loads.places], bits, widths).astype(np.uint8)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    bits = options.whole("spill_bits", DEFAULT_OFFLOAD_BITS, WIDTHS[0], WIDTHS[-1])
    bits = min(bits, options.widest)
    hot, before, planned = plan_groups(batches, options)
    widths = np.take_along_axis(planned[:, :, None], batches.ids, axis=4)
    offloaded = offload(batches, widths, costs, bits)
    outcome = finish("balanced", batches, costs, options, offloaded, hot, before)
    outcome.policy += f", spill {bits}"
    outcome.notes["spilled_pairs"] = int(((offloaded != widths) & batches.pairs).sum())
    return outcome


BALANCED = System(
    "balanced",
    (
        "the device holds replicas of hot experts too; the choice is made per layer from the router's output alone",
        "hot experts of least gate weight go first, at 3 bits unless told otherwise",
    ),
    True,
    replay,
    memory,
    is_bounded=True,
)
