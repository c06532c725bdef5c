"""Statistics of a matrix's inputs for quantization: their second moment, and a factor of its inverse.

Knows activations, not weights or codes. An expert that calibration text reached seldom borrows from its layer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_TOKENS_FOR_HALF = 512
"""An expert with this many tokens counts as much as its layer. Source: docs/replica-format.md, "few tokens"."""


def second_moment(blocks: Iterable[Tensor], num_columns: int, device: torch.device | None = None) -> Tensor:
    """Rows in blocks of [n, C] -> mean of x x' [C, C] in float64; zeros without rows."""
    moment = torch.zeros(num_columns, num_columns, dtype=torch.float64, device=device)
    num_rows = 0
    for rows in blocks:
        moment += rows.T @ rows
        num_rows += len(rows)
    return moment.div_(max(num_rows, 1))


def own_weight(num_tokens: int) -> float:
    """The share of an expert's own moment in its Hessian: 0 without tokens, towards 1 with many."""
    return num_tokens / (num_tokens + _TOKENS_FOR_HALF)


def blend(own: Tensor, layer: Tensor, weight: float) -> Tensor:
    """weight * own + (1 - weight) * layer, the layer's scaled to own's trace; the layer's alone where own is zero.

    Overwrites both: at Mixtral's width each has 1.6 GB.
    """
    if weight == 0 or not own.trace() > 0:
        return layer
    ratio = own.trace() / layer.trace().clamp_min(1e-30)
    return own.mul_(weight).add_(layer.mul_(1 - weight).mul_(ratio))


def inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """Upper U [C, C] float32 with (H + damp * mean(diag H) * I)^-1 = U'U; damp grows tenfold until H is definite."""
    diagonal = hessian.diagonal()
    if not diagonal.isfinite().all():  # an infinity or NaN of any input is in its own square
        raise ValueError("the Hessian is not finite: the model produced NaN or infinity on the calibration text")
    undamped, mean = diagonal.clone(), diagonal.mean().clamp_min(1e-30)
    try:
        while True:
            diagonal.copy_(undamped + damp * mean)
            lower, failed = torch.linalg.cholesky_ex(hessian)
            if not failed:
                break
            damp *= 10
    finally:
        diagonal.copy_(undamped)
    inverse = torch.cholesky_inverse(lower)
    del lower
    return torch.linalg.cholesky(inverse, upper=True).float()
