"""Fixed memory for what a layer tells the host and what stays on the GPU, seen as arrays for any number of rows.

The GPU writes what the host reads into pinned memory, and last a word that says so. Sizes follow from the number of
rows, which the host knows. They do not depend on the number of cold pairs, which the host does not know yet. Knows
sizes and memory; does not know what is cold, nor streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.transport.sender_thread import Places

_ALIGNED = 16


class RowForm(NamedTuple):
    """Form of each row of a packet."""

    top_k: int
    hidden: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Fields:
    """The parts of a packet for T rows of k pairs, as tensors over its memory."""

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


def lay_out(here: torch.Tensor, there: torch.Tensor, num_rows: int, form: RowForm) -> Fields:
    """Cut flat u8 buffers of the GPU and of the host."""
    return Fields(*_cut(here, _here(num_rows, form)), *_cut(there, _there(num_rows, form)))


def packet_bytes(num_rows: int, form: RowForm) -> tuple[int, int]:
    """Size of the memory for so many rows, on the GPU and on the host, rounded up part by part."""
    here, there = (
        sum(_aligned(kind.itemsize * math.prod(shape)) for kind, shape in parts)
        for parts in (_here(num_rows, form), _there(num_rows, form))
    )
    return here, there


_Parts = list[tuple[torch.dtype, tuple[int, ...]]]


def _here(num_rows: int, form: RowForm) -> _Parts:
    pairs = num_rows, form.top_k
    rows = form.dtype, (num_rows, form.hidden)
    return [(torch.int32, (4,)), (torch.int64, (num_rows,)), (torch.int32, pairs), rows, (torch.float32, pairs)]


def _there(num_rows: int, form: RowForm) -> _Parts:
    pairs = num_rows, form.top_k
    return [(torch.int32, (4,)), (torch.int32, pairs), (torch.float32, pairs), (form.dtype, (num_rows, form.hidden))]


def _cut(memory: torch.Tensor, parts: _Parts) -> Iterator[torch.Tensor]:
    at = 0
    for kind, shape in parts:
        count = kind.itemsize * math.prod(shape)
        yield memory[at : at + count].view(kind).view(shape)
        at += _aligned(count)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


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
