"""GPTQ for one matrix, at one or several widths at once.

A code of B bits serves every narrower width by its first bits. Each width ("track") maps its prefix of the code to a
level scale * prefix + offset of its own. Every weight gets the one code whose prefixes suit all widths best.

With H = M D M', M upper with ones on its diagonal and D diagonal, the loss E H E' of E = W - Q is the sum over columns
of D[c] * (E M)[c]**2. So GPTQ takes column by column the code nearest to W[c] + (E M of the columns before)[c]. Each
width has its own E. After that, coordinate descent passes over all columns with E H. Products of whole groups are BLAS,
on a GPU where there is one. What happens within a group of columns is C++ (csrc/columns.inc.h).

Where a processor multiplies bfloat16 (products_on), products of whole groups are of H, M and E so rounded: an error of
2**-9 is far below a level's step. E is exact where levels and codes are chosen, in float32.

Differences from the textbook, each of which measured better (docs/log/calibration.md):

- Offsets are floats.
- Levels of a group fit its weights as they are when the solver reaches the group, weighted by D[c].
- A group's levels and codes are fitted again, to what they cost once later columns answer, before the next group.
- Columns come in the order in which some rows lose least.

The Hessian is the second moment of the inputs. An expert that calibration text reached seldom borrows from its layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ndp_device.calibration import _fits
from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import NestedMatrix, QuantizedMatrix, pack

SWEEPS = {"fast": 0, "default": 1, "best": 3}
"""Passes of coordinate descent over all columns after GPTQ, by effort. Each costs twice GPTQ's own products."""
_ROWS_AT_ONCE = 1024
"""Rows of W that are solved together. They do not depend on each other: this bounds memory, and changes no value."""
_ORDER_ROWS = 128
"""Rows that choose an order of columns."""
_LEAST_GAIN = 0.01
"""What another order than by falling diagonal has to gain, in parts of the loss: less is chance."""


def products_on(device: torch.device) -> torch.dtype:
    """What large products are computed in: bfloat16 where a processor multiplies it, about twice as fast as float32."""
    able = torch.cpu.get_capabilities()
    return (
        torch.bfloat16 if device.type == "cpu" and (able.get("avx512_bf16") or able.get("amx_bf16")) else torch.float32
    )


class _Solver:
    """The widths a matrix is quantized to together, what an error at each costs, and how much of the machine works."""

    def __init__(self, track_weights: Mapping[int, float], threads: int | None) -> None:
        self.bits = tuple(sorted(track_weights))
        total = sum(track_weights.values())
        self._costs = [track_weights[b] / total for b in self.bits]
        self._threads = threads or len(os.sched_getaffinity(0))

    def group(
        self,
        weights: Tensor,
        product: Tensor,
        square: Tensor,
        factor: tuple[Tensor, Tensor] | None,
        solution: tuple[Tensor, Tensor, Tensor],
        sweeps: int,
    ) -> Tensor:
        """One group of columns [n, g]: fills its solution, codes [n, g] and levels [K, n]; returns E [K, n, g].

        factor: M and D of the group for GPTQ; None goes down from the solution that there is.
        """
        product = product.contiguous().cpu()
        feedback = importance = None
        if factor is not None:
            feedback, importance = (part.cpu().numpy() for part in (factor[0].T.contiguous(), factor[1].contiguous()))
        codes, scale, offset = solution
        _fits.solve_group(
            self.bits,
            self._costs,
            weights.contiguous().cpu().numpy(),
            product.numpy(),
            square.contiguous().cpu().numpy(),
            feedback,
            importance,
            codes.numpy(),
            scale.numpy(),
            offset.numpy(),
            sweeps,
            self._threads,
        )
        return product


def quantize(
    weights: Tensor,
    hessian: Tensor,
    *,
    group_size: int,
    track_weights: Mapping[int, float],
    damp: float,
    sweeps: int = SWEEPS["default"],
    threads: int | None = None,
) -> dict[int, QuantizedMatrix]:
    """W [N, C] and H [C, C] -> the matrix at every width in track_weights, narrow ones prefixes.

    threads: of what happens within a group; None: all cores.
    """
    solver = _Solver(track_weights, threads)
    diagonal = hessian.diagonal()
    if not diagonal.isfinite().all():  # an infinity or NaN of any input is in its own square
        raise ConfigError("the Hessian is not finite: the model produced NaN or infinity on the calibration text")
    mean = float(diagonal.mean())
    if mean <= 0:  # inputs that never came: the weights alone
        hessian, mean = torch.eye(len(hessian), device=hessian.device), 1.0
    order, problem = _ordered(weights, hessian, mean, group_size, solver, damp)
    num_rows, num_columns = weights.shape
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8)
    levels = torch.empty(2, -(-num_columns // group_size), len(solver.bits), num_rows)
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        _solve_rows(
            _columns(weights[rows].float(), order), problem, codes[rows], levels[..., rows], group_size, solver, sweeps
        )
    scale, offset = (part.permute(1, 2, 0).contiguous().numpy().astype(np.float16) for part in levels)
    perm = None if _is_natural(order) else order.cpu().numpy().astype(np.int32)
    return NestedMatrix(solver.bits, pack(codes.numpy(), solver.bits[-1]), scale, offset, group_size, perm).by_width()


def peak_bytes(num_rows: int, num_columns: int, group_size: int, num_tracks: int) -> int:
    """Most bytes that quantize() allocates, beside the weights and the Hessian that it is given."""
    rows, groups = min(num_rows, _ROWS_AT_ONCE), -(-num_columns // group_size)
    item: int = products_on(torch.device("cpu")).itemsize
    square = num_columns**2
    block = rows * num_columns * (item * num_tracks + 4 + 1) + 4 * rows * group_size * 4 * num_tracks
    results = 2 * num_rows * num_columns + 2 * 3 * 4 * num_tracks * groups * num_rows
    factored = (4 + (item if item < 4 else 0)) * square + 4 * 3 * _STRIP * num_columns
    return max(factored, 2 * item * square + block) + results


class _Problem(NamedTuple):
    """H [C, C] over its mean diagonal, and its unit factor: columns in the order that they are solved in."""

    hessian: Tensor  # for products, as the next
    mixing: Tensor
    importance: Tensor
    of_groups: list[tuple[Tensor, Tensor]]
    """Both [g, g] within each group of columns, float32."""


def _solve_rows(
    weights: Tensor, problem: _Problem, codes: Tensor, levels: Tensor, group_size: int, solver: _Solver, sweeps: int
) -> Tensor:
    """Fill codes [n, C] and levels [2, G, K, n], of scale and offset; returns E [K, n, C]."""
    num_rows, num_columns = weights.shape
    hessian, mixing, importance, of_groups = problem
    error = hessian.new_zeros(len(solver.bits), num_rows, num_columns)
    flat = error.view(-1, num_columns)
    for sweep in range(1 + sweeps):
        for index, start in enumerate(range(0, num_columns, group_size)):
            group = slice(start, min(start + group_size, num_columns))
            square, own_mixing = of_groups[index]
            own = None
            if sweep == 0:
                own = own_mixing, importance[group]
                product = flat[:, :start] @ mixing[:start, group]
                square = (own[0] * own[1]) @ own[0].T  # what a change costs once the columns behind answer
            else:
                product = flat @ hessian[:, group]
            solution = codes[:, group].contiguous(), *(part.contiguous() for part in levels[:, index])
            product = product.float().view(len(solver.bits), num_rows, -1)
            error[:, :, group] = solver.group(weights[:, group], product, square, own, solution, 1).to(error)
            codes[:, group] = solution[0]
            levels[0, index], levels[1, index] = solution[1:]
    return error


def _ordered(
    weights: Tensor, hessian: Tensor, mean: float, group_size: int, solver: _Solver, damp: float
) -> tuple[Tensor, _Problem]:
    """Which input each column multiplies, [C], and the problem in that order.

    The order decides which columns share levels. Falling diagonal puts like with like, and is mostly best. Where few
    columns carry the loss, groups fit these by having one each: the columns as they lie, or dealt out in turn. If some
    rows lose less so without feedback, GPTQ of these rows decides.
    """
    num_columns = weights.shape[1]
    some = weights[:: max(1, len(weights) // _ORDER_ROWS)][:_ORDER_ROWS].float()
    diagonal = hessian.diagonal() / mean + damp
    natural = torch.arange(num_columns, device=weights.device)
    falling = torch.argsort(diagonal, descending=True, stable=True)
    dealt = torch.empty_like(falling)
    dealt[torch.argsort(natural % group_size, stable=True)] = falling

    groups = [slice(start, start + group_size) for start in range(0, num_columns, group_size)]
    products = products_on(hessian.device)

    def problem(order: Tensor) -> _Problem:
        mixing, importance = unit_factor(lambda: _in_order(hessian, order, slice(None), mean), damp)
        of_mixing, mixing = [mixing[group, group].clone() for group in groups], mixing.to(products)
        square, squares = torch.empty_like(mixing), []
        for group in groups:  # a second one in float32 would be 0.8 GB at Mixtral's width
            rows = _in_order(hessian, order, group, mean)
            squares.append(rows[:, group].clone())
            square[group] = rows.to(products)
        return _Problem(square, mixing, importance, list(zip(squares, of_mixing, strict=True)))

    def loss(order: Tensor, among: _Problem) -> float:
        codes = torch.empty(some.shape, dtype=torch.uint8)
        levels = torch.empty(2, -(-num_columns // group_size), len(solver.bits), len(some))
        error = _solve_rows(_columns(some, order), among, codes, levels, group_size, solver, 0)
        return _mean_log(((error @ among.hessian).float() * error.float()).sum((1, 2)))

    alone = [_loss_alone(some, diagonal, order, group_size, solver) for order in (falling, natural, dealt)]
    if alone[0] - _LEAST_GAIN <= min(alone[1:]) or diagonal.max() <= (1 + _LEAST_GAIN) * diagonal.min():
        return falling, problem(falling)
    other = natural if alone[1] <= alone[2] else dealt
    of_other = loss(other, problem(other))
    found = problem(falling)
    if loss(falling, found) - _LEAST_GAIN <= of_other:
        return falling, found
    del found
    return other, problem(other)


def _loss_alone(weights: Tensor, diagonal: Tensor, order: Tensor, group_size: int, solver: _Solver) -> float:
    """What rows of W lose where each column counts by the Hessian's diagonal alone."""
    loss = torch.zeros(len(solver.bits), device=weights.device)
    for columns in order.split(group_size):
        none, importance = weights.new_zeros(len(columns), len(columns)), diagonal[columns].float()
        product = weights.new_zeros(len(solver.bits), len(weights), len(columns))
        levels = torch.empty(2, len(solver.bits), len(weights))
        solution = torch.empty(len(weights), len(columns), dtype=torch.uint8), *levels
        error = solver.group(weights[:, columns], product, none, (none, importance), solution, 0).to(weights.device)
        loss += (error**2 * importance).sum((1, 2))
    return _mean_log(loss)


def _mean_log(losses: Tensor) -> float:
    """One loss at each width as one number: by ratios, as narrow widths would outweigh the others."""
    return float(losses.clamp_min(1e-30).log().mean())


def _in_order(hessian: Tensor, order: Tensor, rows: slice, mean: float) -> Tensor:
    """Some rows of H over its mean diagonal, in an order; a new tensor each time."""
    return hessian[order[rows, None], order].float().div_(mean)


def _columns(weights: Tensor, order: Tensor) -> Tensor:
    return weights if _is_natural(order) else weights[:, order]


def _is_natural(order: Tensor) -> bool:
    return bool((order == torch.arange(len(order), device=order.device)).all())


_TOKENS_FOR_HALF = 512
"""An expert with this many tokens counts as much as its layer. Source: docs/replica-format.md, "few tokens"."""
_STRIP, _ROUNDED_ROWS = 512, 512


def second_moment(blocks: Iterable[Tensor], num_columns: int, device: torch.device | None = None) -> Tensor:
    """Rows in blocks of [n, C] -> mean of x x' [C, C] in float32; zeros without rows."""
    moment = Moment(num_columns, device)
    for rows in blocks:
        moment.add(rows)
    return moment.mean()


class Moment:
    """The mean of x x' of rows that come in blocks. Only what symmetry does not give is computed.

    Of rows in bfloat16, products of few at once: what each sum is rounded by is then below the chance in the sum.
    """

    def __init__(self, num_columns: int, device: torch.device | None = None) -> None:
        self._sum = torch.zeros(num_columns, num_columns, device=device)
        self._num_rows = 0

    def add(self, rows: Tensor) -> None:
        """Rows [n, C], float32 or bfloat16."""
        at_once = len(rows) if rows.dtype == torch.float32 else _ROUNDED_ROWS
        for some in rows.split(max(at_once, 1)):
            for first in range(0, some.shape[1], _STRIP):
                strip = slice(first, first + _STRIP)
                if some.dtype == torch.float32:
                    self._sum[first:, strip].addmm_(some[:, first:].T, some[:, strip])
                else:
                    self._sum[first:, strip] += some[:, first:].T @ some[:, strip]
        self._num_rows += len(rows)

    def mean(self) -> Tensor:
        """[C, C], once: it is handed over."""
        mean, self._sum = self._sum, torch.empty(0)
        for first in range(0, len(mean), _STRIP):
            behind = first + _STRIP
            mean[first:behind, behind:] = mean[behind:, first:behind].T
        return mean.div_(max(self._num_rows, 1))


def own_weight(num_tokens: int) -> float:
    """The share of an expert's own moment in its Hessian: 0 without tokens, towards 1 with many."""
    return num_tokens / (num_tokens + _TOKENS_FOR_HALF)


def blend(own: Tensor, layer: Tensor, weight: float) -> Tensor:
    """weight * own + (1 - weight) * layer, the layer's scaled to own's trace; the layer's alone where own is zero.

    Overwrites own, and returns it: at Mixtral's width each has 0.8 GB.
    """
    if weight == 0 or not own.trace() > 0:
        return own.copy_(layer)
    ratio = float(own.trace() / layer.trace().clamp_min(1e-30))
    return own.mul_(weight).add_(layer, alpha=(1 - weight) * ratio)


def unit_factor(hessian: Callable[[], Tensor], damp: float) -> tuple[Tensor, Tensor]:
    """M [C, C], upper with ones on its diagonal, and D [C], both float32: H + damp * mean(diag H) * I = M diag(D) M'.

    hessian: gives a float32 tensor that may be overwritten. In float32, or where H is not definite there in float64,
    where damp grows tenfold until H is definite. An M that is not exact makes worse codes, not wrong ones: E is exact,
    and so is what descent sees.
    """
    dtype = torch.float32
    while True:
        square = hessian().to(dtype)
        square.diagonal().add_(damp * square.diagonal().mean().clamp_min(1e-30))
        _flip(square)
        by_columns = square.T  # as LAPACK wants it: so the factor takes the place of H
        failed = torch.empty((), dtype=torch.int32, device=square.device)
        torch.linalg.cholesky_ex(by_columns, out=(by_columns, failed))
        if not failed:
            break
        damp, dtype = damp if dtype == torch.float32 else 10 * damp, torch.float64
    root = by_columns.diagonal().clone()
    by_columns /= root
    _flip(square)
    return by_columns.float(), (root**2).flip(0).float()


def _flip(square: Tensor) -> None:
    """Rows and columns in falling order, in place."""
    half = len(square) // 2
    for first in range(0, half, _STRIP):
        last = min(first + _STRIP, half)
        above, below = slice(first, last), slice(len(square) - last, len(square) - first)
        square[above], square[below] = square[below].flip(0, 1), square[above].flip(0, 1)
    if len(square) % 2:
        square[half] = square[half].flip(0)
