"""GPTQ for one matrix, at one or several widths at once. Knows a matrix and a Hessian, not experts, layers or files.

A code of B bits serves every narrower width by its first bits. Each width ("track") maps its prefix of the code to a
level scale * prefix + offset of its own.

With one width this is GPTQ: column by column, choose the nearest code and pass its error on to the open columns. The
error goes through a factor of the inverse Hessian. With several widths each width has its own
error-compensated copy of the weights and its own feedback. Every weight gets the one code whose prefixes suit all
widths best.

Differences from the textbook, each of which measured better (docs/replica-format.md, "recipe"):

- Offsets are floats.
- Levels of a group fit its weights as they are when the solver reaches the group, weighted by 1 / U[c, c]**2.
- Columns come in falling order of the Hessian's diagonal where that lowers the loss.
- At the end, the solver refits scales and polishes codes, in turns.

The Hessian is the second moment of the inputs. An expert that calibration text reached seldom borrows from its layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ndp_device.experts.expert import NestedMatrix, QuantizedMatrix, pack

_CLIPS = (1.0, 0.85, 0.7, 0.55)
"""Starting ranges of a group's levels, as parts of min..max; the best one per row stays."""
_ROUNDS = 4
_REFIT_ROWS = 2048
_RIDGE = 1e-4


@dataclass(frozen=True)
class Tracks:
    """The widths a matrix is quantized to together, and what an error at each of them costs."""

    bits: tuple[int, ...]
    cost: Tensor  # float32 [K], sums to 1

    @classmethod
    def of(cls, track_weights: Mapping[int, float], device: torch.device) -> Tracks:
        bits = tuple(sorted(track_weights))
        cost = torch.tensor([track_weights[b] for b in bits], dtype=torch.float32, device=device)
        return cls(bits, cost / cost.sum())

    def prefixes(self, codes: Tensor) -> Tensor:
        """Codes [...] -> each track's first bits of them, float32 [K, ...]."""
        return torch.stack([codes >> (self.bits[-1] - b) for b in self.bits]).float()


class LevelTable:
    """Levels of every code for every track in one group of columns; finds the code that suits given weights best."""

    def __init__(self, scale: Tensor, offset: Tensor, tracks: Tracks) -> None:
        prefixes = tracks.prefixes(torch.arange(1 << tracks.bits[-1], device=scale.device))
        self._levels = scale[:, :, None] * prefixes[:, None, :] + offset[:, :, None]  # [K, N, codes]
        # sum_k cost_k (w_k - level_k)**2 differs between codes only in these two terms
        self._slope = ((-2 * tracks.cost[:, None, None]) * self._levels).permute(1, 0, 2).contiguous()  # [N, K, codes]
        self._constant = (tracks.cost[:, None, None] * self._levels**2).sum(0)[:, None, :]  # [N, 1, codes]

    def nearest(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weights as each track sees them [K, N, m] -> (codes [N, m], their cost less a part common to all codes)."""
        cost, codes = torch.baddbmm(self._constant, weights.permute(1, 2, 0), self._slope).min(-1)
        return codes, cost

    def of(self, codes: Tensor) -> Tensor:
        """Codes [N, m] -> levels [K, N, m]."""
        return self._levels.gather(2, codes.expand(len(self._levels), -1, -1))


def fit_levels(block: Tensor, importance: Tensor, tracks: Tracks) -> tuple[Tensor, Tensor]:
    """Scale and offset [K, N] for a group's weights [K, N, g]: Lloyd's steps from several ranges, the best per row."""
    middle_track = (tracks.cost[:, None, None] * block).sum(0)
    low, high = middle_track.amin(1, keepdim=True), middle_track.amax(1, keepdim=True)
    span = (high - low).clamp_min(1e-12)
    top = (1 << tracks.bits[-1]) - 1
    fits = []
    for clip in _CLIPS:
        start = ((middle_track - (high + low) / 2) / (span * clip) + 0.5) * top
        codes = start.round().clamp(0, top).to(torch.int64)
        for _ in range(_ROUNDS):
            scale, offset = _least_squares(block, codes, importance, tracks)
            codes, cost = LevelTable(scale, offset, tracks).nearest(block)
        fits.append(((cost * importance).sum(1), scale, offset))
    errors, scales, offsets = (torch.stack(parts) for parts in zip(*fits, strict=True))
    best = errors.argmin(0).expand_as(scales[:1])
    return scales.gather(0, best)[0], offsets.gather(0, best)[0]


def refit(
    weights: Tensor, hessian: Tensor, codes: Tensor, scale: Tensor, offset: Tensor, group_of: Tensor, tracks: Tracks
) -> tuple[Tensor, Tensor]:
    """Given the codes, the scale and offset of each row and group that minimise (w - q) H (w - q)' of the whole row.

    Each row has 2G unknowns: the step away from the present values, solved with a little ridge. So a group stays as it
    is where all its codes are equal or the Hessian knows nothing of the group.
    """
    refitted = [
        _refit_rows(weights[rows], hessian, prefix[rows], scale[k, rows], offset[k, rows], group_of)
        for k, prefix in enumerate(tracks.prefixes(codes))
        for rows in (slice(first, first + _REFIT_ROWS) for first in range(0, len(weights), _REFIT_ROWS))
    ]
    scales, offsets = (as_stored(torch.cat(parts).view_as(scale)) for parts in zip(*refitted, strict=True))
    return scales, offsets


def as_stored(values: Tensor) -> Tensor:
    """Rounded to what float16 holds, as float32."""
    return values.half().float()


def _least_squares(block: Tensor, codes: Tensor, importance: Tensor, tracks: Tracks) -> tuple[Tensor, Tensor]:
    """Scale and offset [K, N] that fit each track's weights to its prefix of the codes."""
    share = importance / importance.sum()
    prefixes = tracks.prefixes(codes)
    prefix_mean, mean = (prefixes * share).sum(-1), (block * share).sum(-1)
    centred = (prefixes - prefix_mean[:, :, None]) * share
    variance = (centred * prefixes).sum(-1)
    scale = as_stored((centred * block).sum(-1) / torch.where(variance > 1e-12, variance, 1))
    return scale, as_stored(mean - scale * prefix_mean)


def _refit_rows(
    weights: Tensor, hessian: Tensor, prefix: Tensor, scale: Tensor, offset: Tensor, group_of: Tensor
) -> tuple[Tensor, Tensor]:
    """One track, rows [n]: weights and prefix [n, C], scale and offset [n, G].

    The code computes only the part of the normal equations that symmetry does not give: a group's prefixes against its
    own and later columns. The part of two offsets is the same for all rows.
    """
    num_groups = scale.shape[1]

    def sum_groups(values: Tensor, of: Tensor) -> Tensor:  # [n, c] -> [n, G]
        return values.new_zeros(len(values), num_groups).index_add_(1, of, values)

    prefix = prefix.double()
    residual = (weights - scale[:, group_of] * prefix - offset[:, group_of]) @ hessian
    wanted = torch.cat([sum_groups(residual * prefix, group_of), sum_groups(residual, group_of)], 1)
    del residual
    group_sums = hessian.new_zeros(num_groups, hessian.shape[1]).index_add_(0, group_of, hessian)
    normal = hessian.new_zeros(len(weights), 2, num_groups, 2, num_groups)
    normal[:, 1, :, 1] = sum_groups(group_sums, group_of)
    for group in range(num_groups):
        columns = (group_of == group).nonzero()[:, 0]
        first, own = int(columns[0]), prefix[:, columns]
        normal[:, 1, :, 0, group] = own @ group_sums[:, columns].T
        normal[:, 0, group, 1] = normal[:, 1, :, 0, group]
        product = own @ hessian[columns, first:]
        from_here = sum_groups(product * prefix[:, first:], group_of[first:])[:, group:]
        normal[:, 0, group, 0, group:] = from_here
        normal[:, 0, group:, 0, group] = from_here
    normal = normal.view(len(weights), 2 * num_groups, 2 * num_groups)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    diagonal += _RIDGE * diagonal + 1e-12 * diagonal.mean(1, keepdim=True) + 1e-30
    step = torch.linalg.solve(normal, wanted)
    return scale + step[:, :num_groups], offset + step[:, num_groups:]


POLISH_SWEEPS = 2
"""Passes of coordinate descent over all codes after GPTQ; measured: 5-15 % less loss, a third pass gives 1 %."""


_ROWS_AT_ONCE = 1024
"""Rows of W that are solved together. They do not depend on each other: this bounds memory, and changes no value."""


@dataclass(frozen=True)
class _Solution:
    """Column c multiplies input order[c]. loss[k] = trace((W - Q_k) H (W - Q_k)')."""

    order: Tensor  # int64 [C]
    codes: Tensor  # uint8 [N, C]
    scale: Tensor  # float32 [K, N, G]
    offset: Tensor
    loss: Tensor  # float64 [K]


def quantize(
    weights: Tensor, hessian: Tensor, *, group_size: int, track_weights: Mapping[int, float], damp: float
) -> dict[int, QuantizedMatrix]:
    """W [N, C] float32 and H [C, C] float64 -> the matrix at every width in track_weights, narrow ones prefixes."""
    tracks = Tracks.of(track_weights, weights.device)
    natural = torch.arange(weights.shape[1], device=weights.device)
    by_diagonal = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    solutions = [_solve(weights, hessian, order, group_size, tracks, damp) for order in (natural, by_diagonal)]
    # times 4 per bit, about what a bit buys: else the narrowest track alone would choose the order
    value = torch.tensor([4.0**b for b in tracks.bits], dtype=torch.float64, device=weights.device)
    best = min(solutions, key=lambda solution: float(solution.loss @ value))
    perm = None if best is solutions[0] else best.order.cpu().numpy().astype(np.int32)
    del solutions
    codes, scale, offset = _polished(weights, _ordered(hessian, best.order), best, group_size, tracks)
    planes = pack(codes.cpu().numpy(), tracks.bits[-1])
    scales, offsets = (values.cpu().numpy().astype(np.float16) for values in (scale, offset))
    return NestedMatrix(tuple(tracks.bits), planes, scales, offsets, group_size, perm).by_width()


def peak_bytes(num_rows: int, num_columns: int, group_size: int, num_tracks: int) -> int:
    """Most bytes that quantize() allocates, beside the weights and the Hessian that it is given."""
    rows, groups = min(num_rows, _ROWS_AT_ONCE), -(-num_columns // group_size)
    square = num_columns**2 * 8
    factoring = 3 * square  # the Hessian in order, and one factor out of another
    block = rows * num_columns * (6 * 4 * num_tracks + 3 * 8)  # each track's weights, errors and levels
    refitting = 3 * rows * (2 * groups) ** 2 * 8
    results = 2 * num_rows * (num_columns + 2 * 4 * num_tracks * groups)  # codes and levels in both orders
    return max(factoring, square + square + block + refitting) + results


def _ordered(hessian: Tensor, order: Tensor) -> Tensor:
    return hessian[order[:, None], order]


def _row_blocks(num_rows: int) -> list[slice]:
    return [slice(first, first + _ROWS_AT_ONCE) for first in range(0, num_rows, _ROWS_AT_ONCE)]


def _solve(weights: Tensor, hessian: Tensor, order: Tensor, group_size: int, tracks: Tracks, damp: float) -> _Solution:
    hessian = _ordered(hessian, order)
    upper, hessian32 = inverse_factor(hessian, damp), hessian.float()
    num_rows, num_columns = weights.shape
    group_of = torch.arange(num_columns, device=weights.device) // group_size
    codes = torch.empty_like(weights, dtype=torch.uint8)
    scales, offsets = [], []
    loss = hessian.new_zeros(len(tracks.bits))
    for rows in _row_blocks(num_rows):
        block = weights[rows][:, order]
        scale, offset = _quantize_rows(block, upper, codes[rows], group_size, tracks)
        scale, offset = refit(block, hessian, codes[rows], scale, offset, group_of, tracks)
        error = _dequantize(codes[rows], scale, offset, group_of, tracks) - block
        loss += ((error @ hessian32) * error).sum((1, 2), dtype=torch.float64)
        scales.append(scale)
        offsets.append(offset)
    return _Solution(order, codes, torch.cat(scales, 1), torch.cat(offsets, 1), loss)


def _quantize_rows(
    weights: Tensor, upper: Tensor, codes: Tensor, group_size: int, tracks: Tracks
) -> tuple[Tensor, Tensor]:
    """Fill codes [n, C]; returns scale and offset [K, n, G]."""
    num_columns = weights.shape[1]
    open_weights = weights.repeat(len(tracks.bits), 1, 1)  # [K, n, C], each track's own, errors passed on
    fits = []
    for start in range(0, num_columns, group_size):
        group = slice(start, min(start + group_size, num_columns))
        block, factor = open_weights[:, :, group], upper[group, group]
        fits.append(fit_levels(block, factor.diagonal() ** -2, tracks))
        errors = _quantize_group(block, factor, LevelTable(*fits[-1], tracks), codes[:, group])
        open_weights[:, :, group.stop :] -= errors @ upper[group, group.stop :]
    scale, offset = (torch.stack(parts, -1) for parts in zip(*fits, strict=True))
    return scale, offset


def _quantize_group(block: Tensor, factor: Tensor, table: LevelTable, codes: Tensor) -> Tensor:
    """Fill codes [N, g] column by column, passing errors on within block [K, N, g]; returns the errors [K, N, g]."""
    errors = torch.empty_like(block)
    for c in range(block.shape[2]):
        column = block[:, :, c : c + 1]
        chosen, _ = table.nearest(column)
        codes[:, c] = chosen[:, 0]
        errors[:, :, c : c + 1] = (column - table.of(chosen)) / factor[c, c]
        block[:, :, c:] -= errors[:, :, c : c + 1] * factor[c, c:]
    return errors


def _polished(
    weights: Tensor, hessian: Tensor, solution: _Solution, group_size: int, tracks: Tracks
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and offset after some passes of coordinate descent; the Hessian in the solution's order."""
    hessian32 = hessian.float()
    group_of = torch.arange(weights.shape[1], device=weights.device) // group_size
    scales, offsets = [], []
    for rows in _row_blocks(len(weights)):
        block, codes = weights[rows][:, solution.order], solution.codes[rows]
        scale, offset = solution.scale[:, rows], solution.offset[:, rows]
        for _ in range(POLISH_SWEEPS):
            _descend(block, hessian32, codes, scale, offset, group_of, tracks)
            scale, offset = refit(block, hessian, codes, scale, offset, group_of, tracks)
        scales.append(scale)
        offsets.append(offset)
    return solution.codes, torch.cat(scales, 1), torch.cat(offsets, 1)


def _descend(
    weights: Tensor, hessian32: Tensor, codes: Tensor, scale: Tensor, offset: Tensor, group_of: Tensor, tracks: Tracks
) -> None:
    """Choose each code again with all others fixed, in place.

    With R = (Q - W) H, the best real value of column c is q_c - R_c / H[c, c]. R is kept up to date within a group, and
    for the other groups when the group is done.
    """
    quantized = _dequantize(codes, scale, offset, group_of, tracks)
    residual = (quantized - weights) @ hessian32
    for group in range(scale.shape[2]):
        columns = (group_of == group).nonzero()[:, 0]
        table = LevelTable(scale[:, :, group], offset[:, :, group], tracks)
        before, own = quantized[:, :, columns], hessian32[columns][:, columns]
        after, local = before.clone(), residual[:, :, columns]
        for i, c in enumerate(columns.tolist()):
            if own[i, i] > 0:  # else an input that never came: any code is as good
                column = slice(i, i + 1)
                chosen, _ = table.nearest(before[:, :, column] - local[:, :, column] / own[i, i])
                codes[:, c] = chosen[:, 0]
                after[:, :, column] = table.of(chosen)
                local += (after[:, :, column] - before[:, :, column]) * own[i]
        residual += (after - before) @ hessian32[columns]
        quantized[:, :, columns] = after


def _dequantize(codes: Tensor, scale: Tensor, offset: Tensor, group_of: Tensor, tracks: Tracks) -> Tensor:
    return scale[:, :, group_of] * tracks.prefixes(codes) + offset[:, :, group_of]


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
