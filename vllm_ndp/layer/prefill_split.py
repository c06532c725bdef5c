"""Which cold experts of a prompt are streamed to the GPU and which the device computes, so that both end together.

    layer = attention + max( shared and hot experts | streamed experts | device )

To stream an expert costs one copy, however few rows need it; what the device takes for it grows with its rows. So the
experts that would take the device longest are streamed, the others stay where they are, without a loss on either
side: in full precision, or by the checkpoint's own codes. A pure function of integers, so the live plugin and every
replay split alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.work import PAIR_BYTES
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.prices import Prices, together_ps

_MOST_ROWS, _MOST_BYTES = 8192, 64 << 20
"""Largest message that the protocol allows."""


def num_streamed(
    device_ps: Sequence[int],
    stream_ps: Callable[[int], int],
    *,
    beside_ps: int = 0,
    opening_ps: int = 0,
    least: int = 0,
    beside: float = 1.0,
) -> int:
    """How many of the first experts to stream, so that the later of both sides ends soonest.

    `device_ps`: what each expert adds to the device's command, the longest first. `stream_ps(n)`: copies of the first
    n. `beside_ps`: what the device computes in any case. `opening_ps`: what a command costs that
    would not be sent otherwise. `beside`: how much of the shorter side is over while the longer one runs, 0 to 1.

    Among equally good answers it is the one that streams most, since what is streamed can stay.

    No other choice is better where a copy of one expert takes as long as of any other. Exchanging a streamed expert for
    one that the device would compute sooner only makes the device slower.
    """
    count = len(device_ps)
    rest = [*accumulate(reversed(device_ps), initial=beside_ps)][::-1]  # [count + 1], what is left to the device
    rest[:-1] = [ps + opening_ps for ps in rest[:-1]]
    return min(range(count, least - 1, -1), key=lambda n: together_ps(stream_ps(n), rest[n], beside))


@dataclass(frozen=True)
class PrefillSplit:
    """The rule for one model on one hardware."""

    costs: Costs
    prices: Prices | None = None
    """Prices of this machine; None: those of the simulated hardware."""
    bits: int = FULL_PRECISION_BITS
    """Width at which the device computes prompts."""

    def of_counts(
        self,
        ids: NDArray[np.int64],
        rows: NDArray[np.int64],
        decode_experts: NDArray[np.int64] | None = None,
        decode_bits: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.int64]:
        """The experts that the device computes for the prompt rows of a layer, lower ids first.

        `ids` [N]: cold experts that prompt rows ask for, in order, each with so many `rows` [N]. `decode_experts` and
        `decode_bits`: of each pair that the same message holds for decode rows, if there are any.
        """
        if not len(ids):
            return ids
        already = np.zeros_like(rows)  # rows of these experts that are there at this width anyway
        beside_ps, opening_ps = 0, self._opening_ps
        if decode_experts is not None and decode_bits is not None and len(decode_experts):
            beside_ps, opening_ps = self._decode_ps(decode_experts, decode_bits), 0
            alike = decode_experts[decode_bits == self.bits]
            already = np.bincount(alike, minlength=int(ids[-1]) + 1)[ids]
        device_ps = self._added_ps(rows, already)
        order = np.argsort(-device_ps, kind="stable")
        pairs = np.cumsum(rows[order])
        too_many = int(pairs[-1]) - self.most_pairs + (0 if decode_experts is None else len(decode_experts))
        streamed = num_streamed(
            device_ps[order].tolist(),
            lambda n: self._prices.streamed_ps(n, int(pairs[n - 1])) if n else 0,
            beside_ps=beside_ps,
            opening_ps=opening_ps,
            least=int(np.searchsorted(pairs, too_many)) + 1 if too_many > 0 else 0,
            beside=self._prices.beside,
        )
        kept_there: NDArray[np.int64] = np.sort(ids[order[streamed:]])
        return kept_there

    @cached_property
    def most_pairs(self) -> int:
        """Most pairs of one message, if each is of another row: float32 rows come back."""
        return min(_MOST_ROWS, _MOST_BYTES // (4 * self.costs.shape.hidden_size + PAIR_BYTES) - 1)

    def _added_ps(self, rows: NDArray[np.int64], already: NDArray[np.int64]) -> NDArray[np.int64]:
        """Time that experts with so many rows [N] beyond those already there add to a command."""
        together, alone = (self._experts_ps(self.bits, count) for count in (rows + already, already))
        return together - alone + rows * self._pair_ps

    def _decode_ps(self, experts: NDArray[np.int64], bits: NDArray[np.uint8]) -> int:
        """The device's part of decode rows, whose message is sent in any case."""
        keys, rows = np.unique((experts << 8) | bits, return_counts=True)
        total = self._opening_ps + len(experts) * self._pair_ps
        for width in np.unique(keys & 255).tolist():
            total += int(self._experts_ps(width, rows[keys & 255 == width]).sum())
        return total

    def _experts_ps(self, bits: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Time that experts with so many rows [N] add to a command of the device; 0 for none."""
        distinct, places = np.unique(rows, return_inverse=True)
        prices = np.array([self._known(bits, count) if count else 0 for count in distinct.tolist()], np.int64)
        return prices[places]

    @property
    def _prices(self) -> Prices:
        return self.prices or self.costs

    @cached_property
    def _known(self) -> Callable[[int, int], int]:
        return lru_cache(4096)(lambda bits, rows: round(self._prices.expert_ps("device", bits, rows)))

    @cached_property
    def _pair_ps(self) -> int:
        """Time of a pair on the link, both ways. Every pair counts as a row of its own, although a message sends a row
        once."""
        return max(round(self._prices.message_ps(2, 2) - self._prices.message_ps(1, 1)), 0)

    @cached_property
    def _opening_ps(self) -> int:
        """Time of a message without its experts and rows."""
        return round(self._prices.message_ps(1, 1))
