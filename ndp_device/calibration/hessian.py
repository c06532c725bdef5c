"""What quantization wants to know of a matrix's inputs: their second moment, and a factor of its inverse.

Knows activations, not weights or codes. An expert that calibration text reached seldom borrows from its layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS_AT_ONCE = 4096
_TOKENS_FOR_HALF = 512
"""An expert with this many tokens counts as much as its layer. Source: docs/replica-format.md, "few tokens"."""


def second_moment(inputs: Tensor) -> Tensor:
    """Inputs [n, C] -> mean of x x' [C, C] in float64; zeros when n is 0."""
    moment = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=torch.float64, device=inputs.device)
    for rows in inputs.split(_ROWS_AT_ONCE):
        rows = rows.float()
        moment += (rows.T @ rows).double()
    return moment / max(len(inputs), 1)


def own_weight(num_tokens: int) -> float:
    """The share of an expert's own moment in its Hessian: 0 without tokens, towards 1 with many."""
    return num_tokens / (num_tokens + _TOKENS_FOR_HALF)


def blend(own: Tensor, layer: Tensor, weight: float) -> Tensor:
    """weight * own + (1 - weight) * layer, the layer's scaled to own's trace; the layer's alone where own is zero."""
    if weight == 0 or not own.trace() > 0:
        return layer
    return weight * own + (1 - weight) * layer * (own.trace() / layer.trace().clamp_min(1e-30))


def inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """Upper U [C, C] float32 with (H + damp * mean(diag H) * I)^-1 = U'U; damp grows tenfold until H is definite."""
    if not hessian.isfinite().all():
        raise ValueError("the Hessian is not finite: the model produced NaN or infinity on the calibration text")
    identity = torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
    mean = hessian.diagonal().mean().clamp_min(1e-30)
    while True:
        lower, failed = torch.linalg.cholesky_ex(hessian + damp * mean * identity)
        if not failed:
            upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
            return upper.float()
        damp *= 10
