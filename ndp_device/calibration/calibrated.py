"""One expert quantized against the inputs that calibration text sends it.

gate and up read the same input, so they are one matrix with one Hessian and one column order. The column order of down
costs nothing at run time: it becomes the row order of gate and up. An expert that few tokens reached borrows from its
layer, see gptq.py. Rows are taken in blocks, so that memory does not grow with the text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from ndp_device.calibration import auto_gptq, gptq
from ndp_device.calibration.data_free import expert_losses, round_to_bytes
from ndp_device.calibration.gptq import Moment, blend, own_weight, second_moment
from ndp_device.calibration.job import Work
from ndp_device.common.activation import SILU, Activation
from ndp_device.common.widths import BYTE_BITS
from ndp_device.experts.expert import Biases, FullExpert, QuantizedExpert, QuantizedMatrix, to_float32
from ndp_device.replicas.format import LayerReplicas

Solver = Callable[[Tensor, Tensor, float], dict[int, QuantizedMatrix]]
"""(W [N, C], H [C, C] float32, damp) -> the matrix at every width, its column order in perm."""

DAMP = 0.01
DAMP_FEW_TOKENS = 0.1
"""Parts of the Hessian's mean diagonal that are added to it; the second is for experts with fewer tokens than
columns."""
LAYER_ROWS = 4096
ROWS_AT_ONCE = 2048
_MIN_HELD_OUT = 32
TEST_ROWS = 1024
"""Held-out rows that the loss table of an expert rests on, at most."""


@dataclass(frozen=True)
class RoutedInputs:
    """Inputs to the experts of one layer: hidden states [T, H] and the experts chosen for them [T, top_k]."""

    hidden: Tensor
    expert_ids: Tensor

    def rows_of(self, expert: int) -> Tensor:
        """Which rows were routed to one expert, [n]."""
        return (self.expert_ids == expert).any(1).nonzero()[:, 0]

    def of(self, expert: int) -> Tensor:
        """The rows that were routed to one expert, [n, H]."""
        return self.hidden[self.rows_of(expert)]

    @property
    def sample(self) -> Tensor:
        """Which rows stand for the layer, [at most LAYER_ROWS]."""
        return torch.arange(0, len(self.hidden), -(-len(self.hidden) // LAYER_ROWS))

    @cached_property
    def layer_moment(self) -> Tensor:
        """Second moment [H, H] of what enters any expert of the layer: computed once for all of them."""
        rows = (self.hidden[part].float() for part in self.sample.split(ROWS_AT_ONCE))
        return second_moment(rows, self.hidden.shape[1])


class FloatExpert:
    """One expert where it is computed: w13 [2I, H], gate rows first, and w2 [H, I], in the dtype of its products.

    Those of an expert in bfloat16 may be: `products`.
    """

    def __init__(self, full: FullExpert, device: torch.device, products: torch.dtype = torch.float32) -> None:
        self.full = full
        as_stored = full.dtype == "bfloat16" and products == torch.bfloat16

        def values(matrix: NDArray[Any]) -> NDArray[Any]:
            return matrix.view(np.int16) if as_stored else to_float32(matrix, full.dtype)

        dtype = products if as_stored else torch.float32
        gate_and_up = np.concatenate([values(full.w1), values(full.w3)])
        self.w13, self.w2 = (
            torch.from_numpy(part).view(dtype).to(device)
            for part in (gate_and_up, np.array(values(full.w2), order="C"))
        )
        self._biases = tuple(torch.tensor(value, device=device) for value in full.biases or ())

    def between(self, hidden: Tensor) -> Tensor:
        """Rows [n, H] -> what down multiplies, [n, I]."""
        w1, w3 = self.w13.chunk(2)
        gate, up = (hidden @ w1.T).float(), (hidden @ w3.T).float()
        if self._biases:
            gate, up = gate + self._biases[0], up + self._biases[1]
        return activated(gate, up, self.full.activation).to(hidden)

    def down(self, between: Tensor) -> Tensor:
        """What down multiplies [n, I] -> the expert's outputs [n, H]."""
        out = between @ self.w2.T
        return out + self._biases[2] if self._biases else out

    def answers(
        self, inputs: RoutedInputs, expert: int, seen: Callable[[Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """To the rows that were routed to one expert, [n, H]; `seen` gets each block of them and what is between."""
        chosen = inputs.rows_of(expert)
        out = inputs.hidden.new_empty(len(chosen), inputs.hidden.shape[1])
        for some, into in zip(chosen.split(ROWS_AT_ONCE), out.split(ROWS_AT_ONCE), strict=True):
            rows = inputs.hidden[some].to(self.w2)
            between = self.between(rows)
            if seen is not None:
                seen(rows, between)
            into.copy_(self.down(between))
        return out


def activated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Products of gate and of up [n, I], biases added -> what down multiplies, [n, I]."""
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    argument = gate  # of SiLU: the same bits in fewer passes over memory
    if (activation.linear, activation.cubic) != (1.0, 0.0):
        argument = gate * (activation.linear + activation.cubic * gate * gate)
    return gate * torch.sigmoid(argument) * (up + activation.up_bias if activation.up_bias else up)


def load_solver(
    name: str,
    group_size: int,
    track_weights: Mapping[int, float],
    sweeps: int = gptq.SWEEPS["default"],
    *,
    shrink: float = 0.0,
    has_bytes: bool = False,
) -> Solver:
    """The solver of that name; has_bytes: which makes a matrix of 8 bits, too.

    With `shrink` it solves for H + shrink * mean(diag H) * I, over H: it trusts the text less, and a weight's own error
    counts more. In directions that the text hardly uses, other text contradicts it first (docs/log/calibration.md).
    """

    def ours(weights: Tensor, hessian: Tensor, damp: float, tracks: Mapping[int, float]) -> dict[int, QuantizedMatrix]:
        return gptq.quantize(
            weights,
            hessian,
            group_size=group_size,
            track_weights=tracks,
            damp=damp,
            sweeps=sweeps,
            threads=torch.get_num_threads(),
        )

    def solve(weights: Tensor, hessian: Tensor, damp: float) -> dict[int, QuantizedMatrix]:
        if shrink:
            hessian.diagonal().add_(shrink * hessian.diagonal().mean())
        if name == "auto-gptq":
            made = {
                bits: auto_gptq.quantize(weights.float(), hessian, bits=bits, group_size=group_size, damp=damp)
                for bits in track_weights
            }
        elif name == "independent":
            made = {bits: ours(weights, hessian, damp, {bits: 1.0})[bits] for bits in track_weights}
        else:
            made = ours(weights, hessian, damp, track_weights)
        if has_bytes:
            made[BYTE_BITS] = round_to_bytes(weights.float().cpu().numpy(), group_size)
        return made

    return solve


@contextlib.contextmanager
def side_by_side(num_experts: int, threads_each: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that make an expert each, and compute in that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_each)
    try:
        # each thread has a number of its own; the other BLAS has one for all
        with (
            threadpool_limits(threads_each, "blas"),
            ThreadPoolExecutor(num_experts, initializer=torch.set_num_threads, initargs=(threads_each,)) as threads,
        ):
            yield threads
    finally:
        torch.set_num_threads(before)


def quantize_expert(
    weights: FloatExpert,
    expert: int,
    inputs: RoutedInputs,
    held_out: RoutedInputs,
    solver: Solver,
    did: Callable[[Callable[[Work], float]], object] = lambda amount: None,
) -> tuple[LayerReplicas, Tensor]:
    """One expert, solved, with what each width loses on what the solver did not see; and its outputs in full precision
    for the rows that were routed to it, those of the solver first, [n, H]. `did` is told each part of the work.
    """
    device, full = weights.w2.device, weights.full
    num_tokens = len(inputs.rows_of(expert))
    share = own_weight(num_tokens)
    of_hidden, of_between = (Moment(matrix.shape[1], device) for matrix in (weights.w13, weights.w2))

    def seen(rows: Tensor, between: Tensor) -> None:
        of_hidden.add(rows)
        of_between.add(between)
        did(lambda work: len(rows) * (work.moments + work.answers))

    answers = [weights.answers(inputs, expert, seen)]

    def solve(matrix: Tensor, hessian: Tensor) -> dict[int, QuantizedMatrix]:
        damp = DAMP if num_tokens >= matrix.shape[1] else DAMP_FEW_TOKENS
        solved = solver(matrix, hessian, damp)
        did(lambda work: work.solver(*matrix.shape))
        return solved

    w13s = solve(weights.w13, blend(of_hidden.mean(), inputs.layer_moment.to(device), share))
    # a layer that counts little is known well enough from fewer rows
    sample = inputs.sample if share < 0.5 else inputs.sample[::4]
    rows = (weights.between(inputs.hidden[part].to(weights.w2)) for part in sample.split(ROWS_AT_ONCE))
    # of squares this large, one lives while the solver runs, and none behind it
    hessian = blend(of_between.mean(), second_moment(rows, weights.w2.shape[1], device), share)
    did(lambda work: work.of_layer)
    w2s = solve(weights.w2, hessian)
    del hessian
    replicas = {bits: fold_order(bits, w13s[bits], w2s[bits], full.biases, full.activation) for bits in w13s}
    loss, relative_loss = expert_losses(test_rows(held_out, expert).float().numpy(), full, replicas)
    did(lambda work: work.losses)
    answers.append(weights.answers(held_out, expert))
    did(lambda work: len(answers[1]) * work.answers)
    made = LayerReplicas((replicas,), loss[None], relative_loss[None], np.array([num_tokens], dtype=np.int64))
    return made, torch.cat(answers)


def test_rows(held_out: RoutedInputs, expert: int) -> Tensor:
    """Rows to compare an expert's widths on: its own, or where they are too few the layer's."""
    own = held_out.of(expert)
    rows = own if len(own) >= _MIN_HELD_OUT else held_out.hidden
    return rows[:: -(-len(rows) // TEST_ROWS)]


def fold_order(
    bits: int,
    w13: QuantizedMatrix,
    w2: QuantizedMatrix,
    biases: Biases | None = None,
    activation: Activation = SILU,
) -> QuantizedExpert:
    """w2's column order becomes the order of w13's gate rows and of its up rows, and of their biases."""
    if w2.perm is None:
        return QuantizedExpert(bits, w13, w2, biases, activation)
    rows = np.concatenate([w2.perm, w2.perm + w2.shape[1]])
    return QuantizedExpert(
        bits, w13.at_rows(rows), replace(w2, perm=None), biases and biases.reordered(w2.perm), activation
    )
