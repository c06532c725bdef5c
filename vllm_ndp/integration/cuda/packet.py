"""Fixed memory for what a layer tells the host and what comes back, seen as arrays for any number of rows.

One flat buffer holds all of it, so that one copy carries it over the link whatever the router chose. Its size follows
from the number of rows, which the host knows. It does not depend on the number of cold pairs, which the host does not
know yet. Knows sizes and memory; does not know what is cold, nor streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNED = 16


class RowForm(NamedTuple):
    """Form of each row of a packet."""

    top_k: int
    hidden: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Fields:
    """The parts of a packet for T rows of k pairs, as tensors over its memory."""

    num_bytes: int  # that travel
    head: torch.Tensor  # i32 [4]: pairs that leave, rows that leave
    ids: torch.Tensor  # i32 [T, k]: what the router chose
    weights: torch.Tensor  # f32 [T, k]
    sent_rows: torch.Tensor  # i64 [T]: the rows that leave; what follows after head[1] of them means nothing
    x: torch.Tensor  # [T, H]: the rows that leave
    slots: torch.Tensor  # i32 [T, k]: where each pair runs here; stays


def lay_out(memory: torch.Tensor, num_rows: int, top_k: int, hidden: int, dtype: torch.dtype) -> Fields:
    """Cut a flat u8 buffer. x comes last of what travels, being the only part that is large."""
    at, parts = 0, []
    for kind, shape in _parts(num_rows, top_k, hidden, dtype):
        count = kind.itemsize * math.prod(shape)
        parts.append(memory[at : at + count].view(kind).view(shape))
        at += _aligned(count)
    travels = at - _aligned(4 * num_rows * top_k)
    return Fields(travels, *parts)


def packet_bytes(num_rows: int, top_k: int, hidden: int, dtype: torch.dtype) -> int:
    """Size of the memory for so many rows, rounded up part by part."""
    parts = _parts(num_rows, top_k, hidden, dtype)
    return sum(_aligned(kind.itemsize * math.prod(shape)) for kind, shape in parts)


def _parts(num_rows: int, top_k: int, hidden: int, dtype: torch.dtype) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    pairs = num_rows, top_k
    return [
        (torch.int32, (4,)),
        (torch.int32, pairs),
        (torch.float32, pairs),
        (torch.int64, (num_rows,)),
        (dtype, (num_rows, hidden)),
        (torch.int32, pairs),
    ]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class HostFields:
    """The same in the host's memory: what the sender reads once the packet has arrived."""

    def __init__(self, fields: Fields) -> None:
        self.addresses = fields.ids.data_ptr(), fields.weights.data_ptr()
        if fields.x.dtype == torch.bfloat16:  # as device_link sends it; numpy lacks it
            self.x: NDArray[np.generic] = fields.x.view(torch.int16).numpy().view(np.uint16)
        else:
            self.x = fields.x.numpy()
