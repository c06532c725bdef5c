"""What a layer tells the host and what stays on the GPU: fixed memory for any number of rows, and what fills it there.

The GPU writes what the host reads into pinned memory, and last a word that says so. Sizes follow from the number of
rows, which the host knows. They do not depend on the number of cold pairs, which the host does not know yet.

It is filled where the router's choices lie, by torch operators whose shapes no data decides. So no host waits for it,
and a graph may hold it. Rows that leave for the device or the host's CPU are compacted in order. The host finds which
of their pairs leave from the router's choices, which travel with them (layer/split.py). kernels.py does the same in one
Triton kernel each; tests hold the two equal.
"""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.transport.sender_thread import Places
from vllm_ndp.integration.cuda.streams import Pinned
from vllm_ndp.integration.routing_sidecar import Note, Routed
from vllm_ndp.layer.tiers import ELSEWHERE


class RowForm(NamedTuple):
    """Form of each row of a packet."""

    top_k: int
    hidden: int
    dtype: torch.dtype


class Fields(NamedTuple):
    """The parts of a packet for T rows of k pairs."""

    # on the GPU
    head: torch.Tensor  # i32 [4]: pairs that leave, rows that leave, programs that have written (0 between two layers)
    sent_rows: torch.Tensor  # i64 [T]: the rows that leave; what follows after head[1] of them means nothing
    slots: torch.Tensor  # i32 [T, k]: where each pair runs here
    x_here: torch.Tensor  # [T, H]: all rows, at an address that a captured graph knows
    weights_here: torch.Tensor  # f32 [T, k]
    # on the host, pinned
    word: torch.Tensor  # i32 [4]: the first is 1 when all of it is written; who reads it sets it to 0
    ids: torch.Tensor  # i32 [T, k]: what the router chose
    weights: torch.Tensor  # f32 [T, k]
    x: torch.Tensor  # [T, H]: the rows that leave

    @classmethod
    def allocate(cls, num_rows: int, form: RowForm, pinned: Pinned, device: torch.device) -> Fields:
        """Memory for up to so many rows, zeroed."""
        here, pairs, rows = partial(torch.zeros, device=device), (num_rows, form.top_k), (num_rows, form.hidden)
        return cls(
            head=here(4, dtype=torch.int32),
            sent_rows=here(num_rows, dtype=torch.int64),
            slots=here(pairs, dtype=torch.int32),
            x_here=here(rows, dtype=form.dtype),
            weights_here=here(pairs, dtype=torch.float32),
            word=pinned(4, dtype=torch.int32),
            ids=pinned(*pairs, dtype=torch.int32),
            weights=pinned(*pairs, dtype=torch.float32),
            x=pinned(*rows, dtype=form.dtype),
        )

    def of_rows(self, num_rows: int) -> Fields:
        """A packet of fewer rows in the same memory."""
        of_step = {name: part[:num_rows] for name, part in self._asdict().items() if name not in ("head", "word")}
        return self._replace(**of_step)


class HostFields:
    """The parts that the host reads, as arrays."""

    def __init__(self, fields: Fields) -> None:
        self.addresses = fields.ids.data_ptr(), fields.weights.data_ptr()
        self.word = fields.word.numpy()
        if fields.x.dtype == torch.bfloat16:  # as device_link sends it; numpy lacks it
            self.x: NDArray[np.generic] = fields.x.view(torch.int16).numpy().view(np.uint16)
        else:
            self.x = fields.x.numpy()

    def places(self, sums: torch.Tensor) -> Places:
        """For a thread that reads them. sums f32 [T, H]: where it puts the answer."""
        rows, hidden = self.x.shape
        at = self.word.ctypes.data, *self.addresses, self.x.ctypes.data, sums.data_ptr()
        return Places(*at, self.x.dtype.char, self.x.strides[0], rows, hidden)


# -- filling one by torch operators ------------------------------------------------------------------------------------


def split(
    expert_map: torch.Tensor,
    routed: Routed,
    into: Fields,
    elsewhere: int,
    note: Note | None = None,
    tells: bool = True,
    live: torch.Tensor | None = None,
) -> None:
    """Fill a packet. expert_map i32 [E]: slot or a place of tiers.py.

    elsewhere: a slot that is none. note: where the routing is written, too. tells: the host waits for the word. live:
    i32 [1] on the GPU, how many rows are no padding of a captured graph; None: all. Padding is neither noted nor sent.
    """
    x, topk_weights, topk_ids = routed
    num_rows, top_k = topk_ids.shape
    if live is not None:
        padding = torch.arange(num_rows, device=x.device) >= live
        topk_ids = topk_ids.masked_fill(padding.unsqueeze(1), 0)
    if note is not None:
        count = num_rows if live is None else int(live)
        Note(note.entries[:count], *note[1:]).write(Routed(x, topk_weights[:count], topk_ids[:count]))
    where = expert_map.index_select(0, topk_ids.reshape(-1).long()).view(num_rows, top_k)
    if live is not None:
        where = where.masked_fill(padding.unsqueeze(1), max(elsewhere, 0))
    into.slots.copy_(where.masked_fill(where < 0, elsewhere))
    into.ids.copy_(topk_ids, non_blocking=True)
    into.weights.copy_(topk_weights, non_blocking=True)
    leaves = (where < 0) & (where != ELSEWHERE)
    rows, num_sent = compacted(leaves.any(dim=1))
    into.head[0:1].copy_(leaves.sum())
    into.head[1:2].copy_(num_sent)
    into.sent_rows.copy_(rows)
    into.x_here.copy_(x)
    into.weights_here.copy_(topk_weights)
    if tells:
        into.x.copy_(x.index_select(0, rows), non_blocking=True)
        into.word[0:1].fill_(1)


def compacted(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the set ones among N flags, then zeros [N]; how many are set [1]."""
    total = chosen.cumsum(0)
    count = len(chosen)
    target = torch.where(chosen, total - 1, count)  # one place past the end takes what is not chosen
    places = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    places.scatter_(0, target, torch.arange(count, device=chosen.device))
    return places[:count], total[-1:]


def add_rows(out: torch.Tensor, partial: torch.Tensor, rows: torch.Tensor) -> None:
    """Add f32 [n, H] to these distinct rows i64 [n] of out [T, H]; one rounding, however many rows there are."""
    if len(rows) == out.shape[0]:  # then they are all of them, in order
        out.add_(partial)
    else:
        out.index_copy_(0, rows, out.index_select(0, rows).add_(partial))


def take_answer(answer: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, into: Fields) -> None:
    """Wait for the word `answer` i32 [1] of the host and clear it; add its sums f32 [T, H] to the rows that left.

    For memory of the host: this waits in its thread.
    """
    while not int(answer[0]):
        time.sleep(0)
    answer[0] = 0
    count = int(into.head[1])
    add_rows(out, sums[:count].to(out.device), into.sent_rows[:count])
