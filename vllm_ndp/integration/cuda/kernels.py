"""Triton kernels for routing.py, one for each of its steps: launches are what a small decode layer pays for.

About 25 torch operators to split and to gather become two launches, five to add become one. Imported on a GPU only, and
by tests in Triton's interpreter; they hold the results equal to routing.py's. Knows pointers of one layer.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_ndp.integration.cuda.packet import Fields
from vllm_ndp.layer.tiers import ELSEWHERE

BLOCK = 1024
"""Columns that one program copies or adds."""


@triton.jit
def split_rows(
    expert_map, ids, weights, slots, head, sent_rows, ids_out, weights_out,
    num_rows, elsewhere, STAYS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for all pairs. STAYS: the place that is no slot and whose pairs stay. ROWS and COLUMNS: T and k
    rounded up to powers of two."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    here = (row[:, None] < num_rows) & (column[None, :] < K)
    at = row[:, None] * K + column[None, :]
    expert = tl.load(ids + at, mask=here, other=0)
    where = tl.load(expert_map + expert, mask=here, other=0)
    tl.store(slots + at, tl.where(where >= 0, where, elsewhere), mask=here)
    tl.store(ids_out + at, expert.to(tl.int32), mask=here)
    tl.store(weights_out + at, tl.load(weights + at, mask=here, other=0.0), mask=here)
    in_row = tl.sum((here & (where < 0) & (where != STAYS)).to(tl.int32), axis=1)
    leaves = (in_row > 0).to(tl.int32)
    rank = tl.cumsum(leaves, axis=0) - leaves
    tl.store(sent_rows + rank, row.to(tl.int64), mask=leaves > 0)
    tl.store(head, tl.sum(in_row, axis=0))
    tl.store(head + 1, tl.sum(leaves, axis=0))
    tl.store(head + 2, 0)


@triton.jit
def gather_rows(x, stride, sent_rows, head, out, word, hidden, WIDTH: tl.constexpr):
    """Program (i, b): block b of the i-th row that leaves, into the host's memory. The last one to end tells the
    host that all of it is there. Each counts after it has written, and the word follows the last count."""
    i = tl.program_id(0)
    if i < tl.load(head + 1):
        row = tl.load(sent_rows + i)
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = column < hidden
        tl.store(out + i.to(tl.int64) * hidden + column, tl.load(x + row * stride + column, mask=inside), mask=inside)
    tl.debug_barrier()
    before = tl.atomic_add(head + 2, 1, sem="acq_rel", scope="sys")
    if before == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.atomic_xchg(word, 1, sem="release", scope="sys")


@triton.jit
def add_partial(out, stride, partial, rows, hidden, WIDTH: tl.constexpr):
    """Program (i, b): out[rows[i]] += partial[i] in block b; one rounding."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < hidden
    mine = out + row * stride + column
    total = tl.load(mine, mask=inside).to(tl.float32) + tl.load(partial + i.to(tl.int64) * hidden + column, mask=inside)
    tl.store(mine, total.to(out.dtype.element_ty), mask=inside)


def split(
    expert_map: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x: torch.Tensor,
    into: Fields,
    elsewhere: int,
) -> None:
    """As routing.split."""
    num_rows, top_k = topk_ids.shape
    split_rows[(1,)](
        expert_map, topk_ids.contiguous(), topk_weights.contiguous(), into.slots, into.head, into.sent_rows,
        into.ids, into.weights, num_rows, elsewhere,
        STAYS=ELSEWHERE, K=top_k, ROWS=triton.next_power_of_2(num_rows), COLUMNS=triton.next_power_of_2(top_k),
    )  # fmt: skip
    hidden = x.shape[1]
    grid = (num_rows, triton.cdiv(hidden, BLOCK))
    gather_rows[grid](x, x.stride(0), into.sent_rows, into.head, into.x, into.word, hidden, WIDTH=BLOCK)


def add_rows(out: torch.Tensor, partial: torch.Tensor, rows: torch.Tensor) -> None:
    """As routing.add_rows."""
    hidden = out.shape[1]
    grid = (len(rows), triton.cdiv(hidden, BLOCK))
    add_partial[grid](out, out.stride(0), partial, rows, hidden, WIDTH=BLOCK)
