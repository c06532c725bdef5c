"""A layer's hot experts as one launch: captured when a step of so many rows comes again, replayed ever after.

vLLM's operator launches its kernels one by one from Python, which costs the host more than the GPU. Rows, weights and
slots lie where a packet has them, and slots keep their places when experts move: a graph of one step serves the next.
Knows streams and memory; does not know what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from vllm_ndp.integration.cuda.streams import own_stream

MOST_ROWS = 32
"""Of a step that is captured: each layer keeps a graph for every number of rows that came."""

Compute = Callable[[], torch.Tensor]
"""Launches kernels on the current stream, from memory that stays where it is; [T, H]."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor  # [T, H]


class HotGraphs:
    """One per worker. All graphs share memory, because they run one after the other."""

    def __init__(self, device: torch.device, most_rows: int = MOST_ROWS) -> None:
        self._device, self._most_rows = device, most_rows
        self._stream: torch.cuda.Stream | None = None
        self._pool: tuple[int, int] | None = None
        self._out: torch.Tensor | None = None
        self._known: dict[Hashable, _Captured | None] = {}

    def run(self, key: Hashable, x: torch.Tensor, compute: Compute) -> torch.Tensor:
        """A fresh tensor like x [T, H]. key: what is computed from x."""
        num_rows = len(x)
        key = key, num_rows
        if num_rows > self._most_rows:
            return compute()
        if key not in self._known:  # Triton compiles what it has not seen, and vLLM takes memory that it keeps
            self._known[key] = None
            return compute()
        if (known := self._known[key]) is None:
            known = self._known[key] = self._capture(x, compute)
        known.graph.replay()
        return known.out.clone()

    def _capture(self, x: torch.Tensor, compute: Compute) -> _Captured:
        """Other threads may go on with copies meanwhile."""
        main = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream, self._pool = own_stream(self._device), torch.cuda.graph_pool_handle()
            self._out = x.new_empty(self._most_rows, x.shape[-1])
        assert self._out is not None
        graph, out = torch.cuda.CUDAGraph(), self._out[: len(x)]
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out.copy_(compute())
            finally:
                graph.capture_end()
        main.wait_stream(self._stream)
        return _Captured(graph, out)
