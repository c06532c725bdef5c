"""One layer's way to the device and back: a packet to the host, partial sums to the GPU.

    main stream   split -> packet, packet out               hot experts ............   sums in, add
    host          launches ................ wait | send | launches ......... receive | launches

The host waits for the packet, which is the only wait for the GPU in a layer. The longest work begins first: the
device computes while the host launches the hot experts. One thread does all of it, because launches hold the
interpreter, so that another thread would send only after them. Each buffer exists once: a packet has arrived only when
the main stream has added what came back for the layer before. Knows buffers. Does not know what is hot, nor how the
device is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.integration.cuda.lanes import Pinned
from vllm_ndp.integration.cuda.packet import Fields, HostFields, RowForm, lay_out, packet_bytes

MOST_ROWS = 256
"""Most rows of a step whose layers go this way. A step with more rows computes for so long that waiting costs
little."""


@dataclass(frozen=True)
class Packet:
    """For steps of T rows, on both sides."""

    here: Fields
    arrays: HostFields
    _source: torch.Tensor
    _target: torch.Tensor

    def fetch(self) -> HostFields:
        """Wait until the main stream has written the packet and the host has it."""
        self._target.copy_(self._source)
        return self.arrays


class Messenger:
    """One per worker."""

    def __init__(self, pinned: Pinned, device: torch.device, form: RowForm, *, most_rows: int = MOST_ROWS) -> None:
        self.most_rows = most_rows
        self._form = form
        size = packet_bytes(most_rows, *form)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host_memory = pinned(size, dtype=torch.uint8)
        self._sums = torch.zeros(most_rows, form.hidden, dtype=torch.float32, device=device)
        self._host_sums = pinned(most_rows, form.hidden, dtype=torch.float32)
        self._by_rows: dict[int, Packet] = {}
        self._sums_by_rows: dict[int, tuple[NDArray[np.float32], torch.Tensor, torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return int(self._memory.nbytes + self._sums.nbytes)

    def packet(self, num_rows: int) -> Packet:
        """For so many rows: the main stream writes into it what `fetch` brings."""
        if num_rows not in self._by_rows:
            here = lay_out(self._memory, num_rows, *self._form)
            host = lay_out(self._host_memory, num_rows, *self._form)
            size = here.num_bytes
            self._by_rows[num_rows] = Packet(here, HostFields(host), self._memory[:size], self._host_memory[:size])
        return self._by_rows[num_rows]

    def bring(self, sums: NDArray[np.float32]) -> torch.Tensor:
        """[n, H] on the device, for the main stream. The caller may write over `sums` at once, as a device does that
        lends the memory of its answer."""
        array, pinned, there = self._sums_of(len(sums))
        np.copyto(array, sums)
        return there.copy_(pinned, non_blocking=True)

    def _sums_of(self, num_rows: int) -> tuple[NDArray[np.float32], torch.Tensor, torch.Tensor]:
        """Memory for the sums of so many rows: on the host, as an array and pinned, and on the device. Made once, since
        to cut a tensor takes longer than to copy a row."""
        if num_rows not in self._sums_by_rows:
            pinned = self._host_sums[:num_rows]
            self._sums_by_rows[num_rows] = pinned.numpy(), pinned, self._sums[:num_rows]
        return self._sums_by_rows[num_rows]
