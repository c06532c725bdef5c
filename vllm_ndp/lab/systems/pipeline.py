"""Copies for the next layer while this one computes, on a link that carries each byte once.

A layer's copies are early or late. Early ones are ordered at the gate of the layer before, whose activations predict
them. Late ones are known only at the layer's own gate, and then go first on the link. Wrong predictions keep the link
busy as well; what has not begun when the gate is known is dropped. Compute that needs no copy (`ready`) runs while
copies arrive, the rest (`waiting`) after the last one.

Between two layers lie attention and shared experts. The first layer of a step has no layer before: all its copies are
late. A trace with fewer layers than the model repeats each of its layers, and only the first of all is such a one.
Knows times. Does not know why anything is copied.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import shared_ps
from vllm_ndp.lab.vectorised.outcome import attention_ps


def pipelined_ps(
    batches: Batches,
    costs: Costs,
    *,
    early_ps: NDArray[np.float64],
    late_ps: NDArray[np.float64],
    wrong_ps: NDArray[np.float64],
    ready_ps: NDArray[np.float64],
    waiting_ps: NDArray[np.float64],
) -> NDArray[np.float64]:
    """[G, D, L], what the experts of each layer take; all arguments [G, D, L], copies in link time.

    Raises ValueError for a trace with more layers than the model.
    """
    attention = attention_ps(batches, costs) + costs.overhead_ps + shared_ps(batches, costs)[:, :, 0]
    layers = early_ps.shape[2]
    if layers > costs.shape.num_layers:
        raise ValueError(f"a trace with {layers} layers cannot stand for a model with {costs.shape.num_layers}")
    repeats = np.bincount(np.arange(costs.shape.num_layers) * layers // costs.shape.num_layers, minlength=layers)
    took = np.zeros(early_ps.shape)
    gate = np.zeros(attention.shape)  # when the gate of the layer is known
    free = np.zeros(attention.shape)  # when the link has carried all that earlier layers needed
    for place, layer in enumerate(np.repeat(np.arange(layers), repeats).tolist()):
        right, wrong, late = early_ps[:, :, layer], wrong_ps[:, :, layer], late_ps[:, :, layer]
        if place == 0:
            missing = right + late
        else:
            ordered = right + wrong
            carried = np.minimum(gate - free, ordered) / np.where(ordered > 0, ordered, 1.0)
            missing = right * (1 - carried) + late
        free = gate + missing
        done = np.maximum(gate + ready_ps[:, :, layer], free) + waiting_ps[:, :, layer]
        took[:, :, layer] += done - gate
        gate = done + attention
    return took / repeats
