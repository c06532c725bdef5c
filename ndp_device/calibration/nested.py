"""Several widths in one code: what each track's levels are, how they are fitted, and how a row of them is refitted.

A code of B bits serves every narrower width by its first bits. Each width ("track") maps its prefix of the code to a
level scale * prefix + offset of its own. Knows weights, codes and levels; the order in which GPTQ visits columns and
passes errors on is gptq.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
