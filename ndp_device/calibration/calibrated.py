"""One layer's experts quantized against the inputs that calibration text sends them. Knows experts and solvers.

gate and up read the same input, so they are one matrix with one Hessian and one column order. The column order of down
costs nothing at run time: it becomes the row order of gate and up. An expert that few tokens reached borrows from its
layer, see hessian.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ndp_device.calibration import auto_gptq, gptq
from ndp_device.calibration.capture import RoutedInputs
from ndp_device.calibration.hessian import blend, own_weight, second_moment
from ndp_device.calibration.loss_table import expert_losses
from ndp_device.kernels.reference import to_float32
from ndp_device.model_shape import Activation
from ndp_device.replicas.format import LayerReplicas
from ndp_device.replicas.replica import Biases, FullExpert, QuantizedExpert, QuantizedMatrix

Solver = Callable[[Tensor, Tensor, float], dict[int, QuantizedMatrix]]
"""(W [N, C], H [C, C], damp) -> the matrix at every width, its column order in perm."""

DAMP = 0.01
DAMP_FEW_TOKENS = 0.1
"""Of the mean diagonal; the second where there were fewer tokens than columns."""
_LAYER_ROWS = 4096
_MIN_HELD_OUT = 32


def load_solver(name: str, group_size: int, track_weights: Mapping[int, float]) -> Solver:
    def nested(weights: Tensor, hessian: Tensor, damp: float) -> dict[int, QuantizedMatrix]:
        return gptq.quantize(weights, hessian, group_size=group_size, track_weights=track_weights, damp=damp)

    def independent(weights: Tensor, hessian: Tensor, damp: float) -> dict[int, QuantizedMatrix]:
        matrices: dict[int, QuantizedMatrix] = {}
        for bits in track_weights:
            alone = {bits: 1.0}
            matrices |= gptq.quantize(weights, hessian, group_size=group_size, track_weights=alone, damp=damp)
        return matrices

    def through_auto_gptq(weights: Tensor, hessian: Tensor, damp: float) -> dict[int, QuantizedMatrix]:
        return {
            bits: auto_gptq.quantize(weights, hessian, bits=bits, group_size=group_size, damp=damp)
            for bits in track_weights
        }

    return {"nested": nested, "independent": independent, "auto-gptq": through_auto_gptq}[name]


@dataclass(frozen=True)
class QuantizedLayerExpert:
    """One expert with what is recorded beside it."""

    replicas: dict[int, QuantizedExpert]
    loss: NDArray[np.float64]
    relative_loss: NDArray[np.float64]
    num_tokens: int
    own_weight: float


def quantize_layer(
    experts: Sequence[FullExpert],
    inputs: RoutedInputs,
    held_out: RoutedInputs,
    solver: Solver,
    *,
    device: torch.device,
    advance: Callable[[], None],
) -> LayerReplicas:
    """All experts of a layer; `advance` is called after each."""
    done = []
    for expert, full in enumerate(experts):
        done.append(_quantize_expert(full, expert, inputs, held_out, solver, device))
        advance()
    return LayerReplicas(
        tuple(one.replicas for one in done),
        np.stack([one.loss for one in done]),
        np.stack([one.relative_loss for one in done]),
        np.array([one.num_tokens for one in done], dtype=np.int64),
        np.array([one.own_weight for one in done]),
    )


def _quantize_expert(
    full: FullExpert, expert: int, inputs: RoutedInputs, held_out: RoutedInputs, solver: Solver, device: torch.device
) -> QuantizedLayerExpert:
    w1, w3, w2 = (torch.tensor(to_float32(w, full.dtype), device=device) for w in (full.w1, full.w3, full.w2))
    own = inputs.of(expert).to(device).float()
    layer = inputs.hidden[:: -(-len(inputs.hidden) // _LAYER_ROWS)].to(device).float()
    share = own_weight(len(own))

    def solve(weights: Tensor, own_inputs: Tensor, layer_inputs: Tensor) -> dict[int, QuantizedMatrix]:
        hessian = blend(second_moment(own_inputs), second_moment(layer_inputs), share)
        return solver(weights, hessian, DAMP if len(own_inputs) >= weights.shape[1] else DAMP_FEW_TOKENS)

    def intermediate(hidden: Tensor) -> Tensor:
        gate, up = hidden @ w1.T, hidden @ w3.T
        if full.biases is not None:
            gate, up = gate + torch.from_numpy(full.biases.gate).to(gate), up + torch.from_numpy(full.biases.up).to(up)
        if full.activation == "silu":
            return torch.nn.functional.silu(gate) * up
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    w13s = solve(torch.cat([w1, w3]), own, layer)
    w2s = solve(w2, intermediate(own), intermediate(layer))
    replicas = {bits: fold_order(bits, w13s[bits], w2s[bits], full.biases, full.activation) for bits in w13s}
    test_rows = held_out.of(expert)
    if len(test_rows) < _MIN_HELD_OUT:  # too few to tell widths apart: everything the layer saw
        test_rows = held_out.hidden
    loss, relative_loss = expert_losses(test_rows.float().numpy(), full, replicas)
    return QuantizedLayerExpert(replicas, loss, relative_loss, len(own), share)


def fold_order(
    bits: int,
    w13: QuantizedMatrix,
    w2: QuantizedMatrix,
    biases: Biases | None = None,
    activation: Activation = "silu",
) -> QuantizedExpert:
    """w2's column order becomes the order of w13's gate rows and of its up rows, and of their biases."""
    if w2.perm is None:
        return QuantizedExpert(bits, w13, w2, biases, activation)
    rows = np.concatenate([w2.perm, w2.perm + w2.shape[1]])
    w13 = QuantizedMatrix(bits, w13.planes[:, rows], w13.scale[rows], w13.offset[rows], w13.group_size, w13.perm)
    w2_in_order = QuantizedMatrix(bits, w2.planes, w2.scale, w2.offset, w2.group_size)
    return QuantizedExpert(bits, w13, w2_in_order, biases and biases.reordered(w2.perm), activation)
