"""Whether a step's rows write the KV entries that were expected, found out while it runs and asked when it ends.

The comparison lies on the GPU before the first layer, and its verdict arrives beside the layers: no layer waits for it.
Still no token of a step that mixed up its requests is handed out. Knows entries and memory; does not know requests.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.integration.cuda.lanes import Lane, Mark, Pinned


class LateCheck:
    """In turns: `begin` once per step, `settle` before the next."""

    def __init__(self, lane: Lane, pinned: Pinned, device: torch.device, most_rows: int) -> None:
        self._lane = lane
        self._expected = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._host_expected = pinned(most_rows, dtype=torch.int64)
        self._differ = torch.zeros(1, dtype=torch.bool, device=device)
        self._host_differ = pinned(1, dtype=torch.bool)
        self._arrived: Mark | None = None

    def begin(self, entries: torch.Tensor, expected: NDArray[np.int64]) -> None:
        """entries i64 [T] on the GPU, expected [T]."""
        if self._arrived is not None:
            raise RuntimeError("the check before this one was not settled")
        count = len(expected)
        self._host_expected.numpy()[:count] = expected
        self._expected[:count].copy_(self._host_expected[:count], non_blocking=True)
        self._differ.copy_((entries != self._expected[:count]).any().view(1))
        self._lane.follow_main()
        self._lane.copy(self._host_differ, self._differ)
        self._arrived = self._lane.mark()

    def settle(self) -> bool:
        """Whether they were the expected ones; True where nothing was begun."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return True
        arrived.wait_on_host()
        return not self._host_differ.numpy()[0]
