"""Rows of a layer's input on their way to an executor elsewhere, and the sums that come back.

With few rows on a CPU each way is one native call: there torch's operators cost more than the work. Knows tensors of
one layer. Does not know pairs, devices or steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.layer import _split

FEW_ROWS = 128
_ON_HOST: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float16: np.dtype("<f2"),
    torch.bfloat16: np.dtype("<u2"),
}
"""numpy lacks bfloat16."""


class Gather:
    """Rows of tensors [T, H] as arrays on the host, in memory that the next call writes again."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        self._few: NDArray[Any] = np.empty((FEW_ROWS, hidden), _ON_HOST[dtype])
        self._bytes = self._few.view(np.uint8)

    def rows(self, x: torch.Tensor, rows: NDArray[np.int64]) -> NDArray[Any]:
        """These rows [S], in order: float32 and float16 as they are, bfloat16 as uint16."""
        if len(rows) <= FEW_ROWS and x.device.type == "cpu":
            x = x.contiguous()
            _split.gather(x.data_ptr(), self._bytes.shape[1], rows, self._bytes)
            return self._few[: len(rows)]
        return as_numpy(chosen(x, rows))


def chosen(x: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """These rows [S] of x [T, H], which are distinct and in order."""
    return x if len(rows) == len(x) else x.index_select(0, torch.from_numpy(rows).to(x.device))


def as_numpy(x: torch.Tensor) -> NDArray[Any]:
    """float32 and float16 as they are; bfloat16, which numpy lacks, as uint16."""
    host = x.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16)
    return host.numpy()


def as_float32(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Rows in float32, from rows as `as_numpy` has them."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32, copy=False)


def add_sums(out: torch.Tensor, sums: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
    """Add partial sums f32 [S, H] to these rows [S] of out [T, H], which are distinct and in order.

    Each element is rounded once: an answer does not depend on how many rows were sent beside its own.
    """
    if out.device.type == "cpu" and len(rows) <= FEW_ROWS and out.dtype is not torch.float16 and out.is_contiguous():
        _split.add_rows(out.data_ptr(), out.shape[0], sums, rows, out.dtype is torch.bfloat16)
        return
    partial = torch.from_numpy(sums).to(out.device)
    if len(rows) == out.shape[0]:
        out.add_(partial)
    else:
        index = torch.from_numpy(rows).to(out.device)
        out.index_copy_(0, index, out.index_select(0, index).add_(partial))
