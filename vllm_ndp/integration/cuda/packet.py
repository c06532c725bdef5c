"""What a layer tells the host, and what comes back: fixed memory on both sides, seen as arrays for any number of rows.

One flat buffer holds all of it, so that one copy carries it over the link whatever the router chose: its size follows
from the number of rows, which the host knows, and not from the number of cold pairs, which it does not know yet. Knows
sizes and memory; does not know what is cold, nor streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNED = 16


@dataclass(frozen=True)
class Fields:
    """The parts of a packet for T rows of k pairs, as tensors over its memory."""

    num_bytes: int
    head: torch.Tensor  # i32 [4]: pairs that leave, rows that leave
    slots: torch.Tensor  # i32 [T, k]: where each pair runs here
    sent_rows: torch.Tensor  # i64 [T]: the rows that leave; what follows after head[1] of them means nothing
    pair_rows: torch.Tensor  # i32 [T * k]: index into sent_rows; what follows after head[0] pairs means nothing
    pair_experts: torch.Tensor  # i32 [T * k]
    pair_weights: torch.Tensor  # f32 [T * k]
    x: torch.Tensor  # [T, H]: the rows that leave


def lay_out(memory: torch.Tensor, num_rows: int, top_k: int, hidden: int, dtype: torch.dtype) -> Fields:
    """Cut a flat u8 buffer. x comes last, being the only part that is large."""
    pairs, at = num_rows * top_k, 0
    parts = []
    for kind, shape in (
        (torch.int32, (4,)),
        (torch.int32, (num_rows, top_k)),
        (torch.int64, (num_rows,)),
        (torch.int32, (pairs,)),
        (torch.int32, (pairs,)),
        (torch.float32, (pairs,)),
        (dtype, (num_rows, hidden)),
    ):
        count = kind.itemsize
        for length in shape:
            count *= length
        parts.append(memory[at : at + count].view(kind).view(shape))
        at += -(-count // _ALIGNED) * _ALIGNED
    return Fields(min(at, memory.numel()), *parts)


def packet_bytes(num_rows: int, top_k: int, hidden: int, dtype: torch.dtype) -> int:
    """Size of the memory for so many rows, rounded up part by part."""
    pairs = num_rows * top_k
    sizes = (16, 4 * pairs, 8 * num_rows, 4 * pairs, 4 * pairs, 4 * pairs, num_rows * hidden * dtype.itemsize)
    return sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


class HostFields:
    """The same in the host's memory, as numpy sees it: what the sender reads once the packet has arrived."""

    def __init__(self, fields: Fields) -> None:
        self.head: NDArray[np.int32] = fields.head.numpy()
        self.slots: NDArray[np.int32] = fields.slots.numpy()
        self.sent_rows: NDArray[np.int64] = fields.sent_rows.numpy()
        self.pair_rows: NDArray[np.int32] = fields.pair_rows.numpy()
        self.pair_experts: NDArray[np.int32] = fields.pair_experts.numpy()
        self.pair_weights: NDArray[np.float32] = fields.pair_weights.numpy()
        if fields.x.dtype == torch.bfloat16:  # as device_link sends it; numpy lacks it
            self.x: NDArray[np.generic] = fields.x.view(torch.int16).numpy().view(np.uint16)
        else:
            self.x = fields.x.numpy()
