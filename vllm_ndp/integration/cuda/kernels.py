"""Triton kernels for packet.py, one for each of its steps: launches are what a small decode layer pays for.

About 25 torch operators to split and to gather become one launch, five to add another. Imported on a GPU only, and by
tests in Triton's interpreter; they hold the results equal to packet.py's.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_ndp.integration.cuda.packet import Fields
from vllm_ndp.integration.routing_sidecar import Note, Routed
from vllm_ndp.layer.tiers import ELSEWHERE

BLOCK = 1024
"""Columns that one program copies or adds."""
INTERPRETED = triton.knobs.runtime.interpret
_TELL = tl.constexpr("""{
.reg .pred first; .reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first st.release.sys.global.u32 [$1], 1;
mov.u32 $0, 0;
}""")
"""One thread's store of 1, after all that the program has written: an atomic exchange on the host's memory is defined
only where the host has native atomics. Every thread runs this, and the others store nothing: by then the host may have
set the word back to 0."""


_WAIT = tl.constexpr("""{
.reg .pred done; .reg .u32 thread, seen;
mov.u32 thread, %tid.x;
setp.ne.u32 done, thread, 0;
@done bra over;
again:
ld.acquire.sys.global.u32 seen, [$1];
setp.ne.u32 done, seen, 1;
@done bra again;
st.relaxed.sys.global.u32 [$1], 0;
over:
mov.u32 $0, 0;
}""")
"""One thread looks until the host has stored 1, and clears the word for the layer after."""


@triton.jit
def split_rows(
    expert_map, ids, weights, x, stride, slots, x_here, weights_here, head, sent_rows, ids_out, weights_out, out, word,
    entries, noted_ids, noted_weights, live, num_rows, elsewhere, hidden,
    STAYS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    NOTES: tl.constexpr, TELLS: tl.constexpr, PADDED: tl.constexpr, BY_EXCHANGE: tl.constexpr,
):  # fmt: skip
    """Program (i, b): block b of row i, and of the i-th row that leaves, into the host's memory. STAYS: the place that
    is no slot and whose pairs stay. ROWS and COLUMNS: T and k rounded up to powers of two. NOTES: entries is where the
    routing is noted. TELLS: the host waits. PADDED: live has the rows that are none. BY_EXCHANGE: for Triton's
    interpreter.

    Each finds the rows for itself, since a second launch costs the host more; the first writes them. The last to end
    tells the host that all of it is there. Each counts after it has written, and the word follows the last count."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    every = (row[:, None] < num_rows) & (column[None, :] < K)
    here = every
    nowhere = tl.zeros([ROWS, COLUMNS], tl.int32) + elsewhere
    if PADDED:
        count = tl.load(live)
        here = every & (row[:, None] < count)
        nowhere = tl.where(row[:, None] < count, nowhere, tl.maximum(elsewhere, 0))
    at = row[:, None] * K + column[None, :]
    expert = tl.load(ids + at, mask=here, other=0)
    where = tl.load(expert_map + expert, mask=here, other=-1)
    in_row = tl.sum((here & (where < 0) & (where != STAYS)).to(tl.int32), axis=1)
    leaves = (in_row > 0).to(tl.int32)
    rank = tl.cumsum(leaves, axis=0) - leaves
    num_sent = tl.sum(leaves, axis=0)
    i = tl.program_id(0)
    if (i == 0) & (tl.program_id(1) == 0):
        tl.store(slots + at, tl.where(where >= 0, where, nowhere), mask=every)
        weight = tl.load(weights + at, mask=here, other=0.0)
        tl.store(weights_here + at, weight, mask=here)
        if NOTES:
            entry = tl.load(entries + row, mask=row < (count if PADDED else num_rows), other=0)
            noted = entry[:, None] * K + column[None, :]
            tl.store(noted_ids + noted, expert.to(tl.int16), mask=here)
            tl.store(noted_weights + noted, weight, mask=here)
        if TELLS:
            tl.store(ids_out + at, expert.to(tl.int32), mask=here)
            tl.store(weights_out + at, weight, mask=here)
            tl.store(sent_rows + rank, row.to(tl.int64), mask=leaves > 0)
            tl.store(head, tl.sum(in_row, axis=0))
            tl.store(head + 1, num_sent)
    part = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = part < hidden
    here_too = tl.load(x + i.to(tl.int64) * stride + part, mask=inside)
    tl.store(x_here + i.to(tl.int64) * hidden + part, here_too, mask=inside)
    if TELLS:
        if i < num_sent:
            mine = tl.sum(tl.where((rank == i) & (leaves > 0), row, 0), axis=0)
            value = tl.load(x + mine.to(tl.int64) * stride + part, mask=inside)
            tl.store(out + i.to(tl.int64) * hidden + part, value, mask=inside)
        tl.debug_barrier()
        before = tl.atomic_add(head + 2, 1, sem="acq_rel", scope="sys")
        if before == tl.num_programs(0) * tl.num_programs(1) - 1:
            tl.store(head + 2, 0)
            if BY_EXCHANGE:
                tl.atomic_xchg(word, 1, sem="release", scope="sys")
            else:
                tl.inline_asm_elementwise(_TELL, "=r,l", [word.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def add_partial(out, stride, partial, rows, head, hidden, WIDTH: tl.constexpr, COUNTED: tl.constexpr):
    """Program (i, b): out[rows[i]] += partial[i] in block b; one rounding. COUNTED: the packet's head says of how many
    rows."""
    i = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < hidden
    if COUNTED:
        inside = inside & (tl.zeros([WIDTH], tl.int32) + i < tl.load(head + 1))
    row = tl.load(rows + i)
    mine = out + row * stride + column
    total = tl.load(mine, mask=inside).to(tl.float32) + tl.load(partial + i.to(tl.int64) * hidden + column, mask=inside)
    tl.store(mine, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def wait_for(word, BY_EXCHANGE: tl.constexpr):
    """The host's answer is there when this has run."""
    if BY_EXCHANGE:
        tl.atomic_xchg(word, 0, sem="acquire", scope="sys")
    else:
        tl.inline_asm_elementwise(_WAIT, "=r,l", [word.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


def split(
    expert_map: torch.Tensor,
    routed: Routed,
    into: Fields,
    elsewhere: int,
    note: Note | None = None,
    tells: bool = True,
    live: torch.Tensor | None = None,
) -> None:
    """As packet.split."""
    x, topk_weights, topk_ids = routed
    num_rows, top_k = topk_ids.shape
    hidden, stride = x.shape[1], x.stride(0)
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.to(torch.float32).contiguous()
    is_so = note is not None, tells, live is not None
    noted = Note(into.sent_rows, into.slots, into.weights_here) if note is None else note  # of the same types
    _launch(
        split_rows,
        (num_rows, -(-hidden // BLOCK), 1),
        ("split", x.get_device(), num_rows, top_k, elsewhere, hidden, stride, topk_ids.dtype, x.dtype, *is_so),
        (expert_map, topk_ids, topk_weights, x, *noted),
        expert_map, topk_ids, topk_weights, x, stride, into.slots, into.x_here, into.weights_here, into.head,
        into.sent_rows, into.ids, into.weights, into.x, into.word, *noted,
        into.head if live is None else live, num_rows, elsewhere, hidden,
        ELSEWHERE, top_k, _rounded_up(num_rows), _rounded_up(top_k), BLOCK, *is_so, INTERPRETED,
    )  # fmt: skip


def add_rows(out: torch.Tensor, partial: torch.Tensor, rows: torch.Tensor) -> None:
    """As packet.add_rows."""
    hidden, stride = out.shape[1], out.stride(0)
    _launch(
        add_partial,
        (len(rows), -(-hidden // BLOCK), 1),
        ("add", out.get_device(), len(rows), hidden, stride, out.dtype),
        (out, partial, rows),
        out, stride, partial, rows, rows, hidden, BLOCK, False,
    )  # fmt: skip


def take_answer(answer: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, into: Fields) -> None:
    """As packet.take_answer. answer and sums are pinned memory of the host, which the GPU reads where it lies."""
    wait_for[1, 1, 1](answer, INTERPRETED, num_warps=1)
    grid = len(sums), -(-out.shape[1] // BLOCK), 1
    add_partial[grid](out, out.stride(0), sums, into.sent_rows, into.head, out.shape[1], BLOCK, True)


def _rounded_up(count: int) -> int:
    """To a power of two. Triton's own function takes longer than a launch."""
    return 1 << (count - 1).bit_length()


_compiled: dict[tuple[Any, ...], Callable[..., None]] = {}


def _launch(kernel, grid: tuple[int, int, int], key: tuple[Any, ...], pointers, *given) -> None:
    """Launch, and keep what Triton has compiled: to find it again takes Triton longer than to launch it.

    key: the device, and all that decides what Triton compiles, but the alignment of pointers. pointers: those that may
    lie at any address. Where 16 does not divide it, Triton decides.
    """
    addresses = 0
    for pointer in pointers:
        addresses |= pointer.data_ptr()
    aligned = addresses % 16 == 0
    if aligned and (run := _compiled.get(key)) is not None:
        run(*given)
        return
    compiled = kernel[grid](*given)
    if aligned and compiled is not None:  # None: Triton's interpreter
        _compiled[key] = compiled[grid]
