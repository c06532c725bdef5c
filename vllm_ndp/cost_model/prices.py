"""Prices of an expert by place, as planners ask for them: of the simulated hardware, or as measured on this machine.

    expert     one more expert with so many rows, in a tier at a width       message   what a command takes beside them
    streamed   an expert of a prompt that passes through GPU memory           copied    one on its way to stay there

Prices decide who runs where. They never become part of a simulated time: the step clock and the device's model know
their own. Those of the simulated hardware are methods of Costs, of the same names. Measured ones are whole picoseconds
of the wall clock, taken once at start-up (integration/price_probe.py) and recorded with a run, so a replay decides
alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ndp_device.common.errors import ConfigError
from ndp_device.timing.work import PS_PER_S
from vllm_ndp.cost_model.costs import Costs


def together_ps(one: float, other: float, beside: float) -> float:
    """Time of two sides that begin at once; the longer one hides the share `beside` of the shorter one."""
    return max(one, other) + (1 - beside) * min(one, other)


@dataclass(frozen=True)
class MeasuredPrices:
    """Prices of this machine, by number of rows. Between two measured numbers of rows a price is a straight line,
    beyond the last one the line goes on."""

    rows: tuple[int, ...]
    """Ascending, from 1 on, at least two."""
    experts: Mapping[str, tuple[int, ...]]
    """`tier:bits` -> ps of one more expert at each of `rows`; tiers gpu, host and device."""
    slot_bits: int
    messages: tuple[int, ...]
    """Ps of a command to the device and back, with so many rows and next to no work."""
    streamed: tuple[int, ...]
    """Ps of one expert of a prompt through GPU memory."""
    copied: int
    """Ps of one expert into GPU memory, in full precision."""
    expert_bytes: int
    """Bytes of the expert that was copied."""
    beside: float = 1.0
    """Below 1 where engine and device have to share cores or memory."""
    shared: tuple[int, ...] = ()
    """Ps of the shared experts of a layer; empty where there are none."""

    def __post_init__(self) -> None:
        series = [*self.experts.values(), self.messages, self.streamed, *([self.shared] if self.shared else [])]
        if len(self.rows) < 2 or self.rows[0] != 1 or list(self.rows) != sorted(set(self.rows)):
            raise ConfigError(f"prices are measured for ascending numbers of rows from 1 on, got {list(self.rows)}")
        if any(len(each) != len(self.rows) for each in series) or min(map(min, series)) <= 0 or self.copied <= 0:
            raise ConfigError(f"measured prices must be above 0, one for each of {len(self.rows)} numbers of rows")
        if not 0 <= self.beside <= 1:
            raise ConfigError(f"the shorter side runs beside the longer one by a share in 0..1, got {self.beside}")

    def expert_ps(self, tier: str, bits: int, rows: int) -> float:
        """Raises ConfigError where that was never measured."""
        if (known := self.experts.get(f"{tier}:{bits}")) is None:
            raise ConfigError(
                f"prices are to be measured ones, and {bits} bits on the {tier} was never measured: measured are "
                f"{', '.join(self.experts)}; use 'prices': 'simulated', or a run that has measured it"
            )
        return _at(self.rows, known, rows)

    def opening_ps(self, tier: str, bits: int) -> float:
        """The CPU's own experts need neither a launch nor a message."""
        return self.message_ps(1, 1) if tier == "device" else 0.0

    def hot_ps(self, rows: int) -> float:
        return self.expert_ps("gpu", self.slot_bits, rows) if rows else 0.0

    def shared_ps(self, rows: int) -> float:
        return _at(self.rows, self.shared, rows) if self.shared and rows else 0.0

    def message_ps(self, rows: int, pairs: int) -> float:
        return _at(self.rows, self.messages, max(rows, 1))

    def streamed_ps(self, experts: int, pairs: int) -> int:
        """A straight line over the rows of an expert, so that it does not matter which expert has which."""
        if not experts:
            return 0
        each = max((self.streamed[-1] - self.streamed[0]) // (self.rows[-1] - self.rows[0]), 0)
        return experts * max(self.streamed[0] - each, 1) + pairs * each

    @property
    def bulk_bytes_per_s(self) -> float:
        """Bytes per second of experts on their way to stay in GPU memory."""
        return self.expert_bytes * PS_PER_S / self.copied


Prices = Costs | MeasuredPrices


def _at(rows: Sequence[int], prices: Sequence[int], wanted: int) -> float:
    after = min(max(bisect_left(rows, wanted), 1), len(rows) - 1)
    (low, high), (cheap, dear) = (rows[after - 1], rows[after]), (prices[after - 1], prices[after])
    return max(cheap + (dear - cheap) * (wanted - low) / (high - low), 0.0)
