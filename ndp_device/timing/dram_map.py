"""Where consecutive lines of a channel lie: bank and row of every position, for one stream or several.

In a channel, lowest bits first: bank group, column, bank, rank, row; without bank-group interleaving the column comes
before the bank group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from ndp_device.common.errors import ConfigError
from ndp_device.timing.spec import DramSpec
from ndp_device.timing.work import ceil_div

PLACEMENTS = ("natural", "staggered", "same-bank")


@dataclass(frozen=True)
class StreamMap:
    """One sequential stream from the beginning of a channel."""

    dram: DramSpec

    @cached_property
    def period(self) -> int:
        return self.dram.bank_groups if self.dram.bank_group_interleave else 1

    @cached_property
    def block(self) -> int:
        """Lines of the rows that are streamed at the same time: one per bank group, or one alone."""
        return self.period * self.dram.lines_per_row

    @cached_property
    def row_span(self) -> int:
        """Lines of one row of every bank."""
        return self.dram.ranks * self.dram.banks * self.dram.lines_per_row

    def at(self, position: int) -> tuple[int, int]:
        dram = self.dram
        if dram.bank_group_interleave:
            rest, group = divmod(position, dram.bank_groups)
            rest //= dram.lines_per_row
        else:
            rest, group = divmod(position // dram.lines_per_row, dram.bank_groups)
        rest, bank = divmod(rest, dram.banks_per_group)
        row, rank = divmod(rest, dram.ranks)
        return (rank * dram.bank_groups + group) * dram.banks_per_group + bank, row

    def block_end(self, position: int) -> int:
        return (position // self.block + 1) * self.block


@dataclass(frozen=True)
class ConcurrentStreams:
    """Sequential streams of `length` lines each on one channel, served in turn, one stripe at a time, a rest last.

    - natural: consecutive parts of one allocation; `parts_of` cuts it where the bytes are, between any two stripes
    - staggered: each in its own rows, its start shifted by one bank against the stream before
    - same-bank: each in its own rows, all starting in the same bank
    """

    dram: DramSpec
    streams: int
    placement: str
    length: int
    period: int = 0  # rows of several streams take turns: no short period
    parts: tuple[tuple[int, int], ...] = ()  # (first stripe, stripes) of each on the channel, if unequal

    @classmethod
    def parts_of(cls, dram: DramSpec, streams: int, num_bytes: int) -> ConcurrentStreams:
        """Equal parts of one allocation, as the first channel sees them, which is loaded most.

        A part begins on the channel where the part before left off. So a channel holds a stripe more of some parts than
        of others, never two.
        """
        if streams < 1:
            raise ConfigError(f"the number of streams must be at least 1, got {streams}")
        stripes = ceil_div(num_bytes, dram.stripe_bytes)
        cuts = [ceil_div(part * stripes // streams, dram.channels) for part in range(streams + 1)]
        parts = tuple((cut, until - cut) for cut, until in itertools.pairwise(cuts))
        length = min(count for _, count in parts) * (dram.stripe_bytes // dram.line_bytes)
        return cls(dram, streams, "natural", length, parts=parts)

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ConfigError(f"the number of streams must be at least 1, got {self.streams}")
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}")

    @cached_property
    def num_lines(self) -> int:
        """Number of lines of all streams together."""
        if not self.parts:
            return self.streams * self.length
        return sum(count for _, count in self.parts) * self._chunk

    @cached_property
    def one(self) -> StreamMap:
        return StreamMap(self.dram)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        if self.parts:
            return tuple(first * self._chunk for first, _ in self.parts)
        if self.placement == "natural":
            return tuple(stream * self.length for stream in range(self.streams))
        span = self.one.row_span
        apart = (ceil_div(self.length, span) + 1) * span
        shift = self.one.block if self.placement == "staggered" else 0
        return tuple(stream * apart + stream * shift % span for stream in range(self.streams))

    def at(self, position: int) -> tuple[int, int]:
        turn, within = divmod(position, self._chunk)
        index, stream = divmod(turn, self.streams)
        whole = self.length // self._chunk
        if index >= whole:  # the last turn: the rest of a length, or a stripe of the longer parts
            stream, within = divmod(position - whole * self.streams * self._chunk, self._rest)
            index, stream = whole, self._longer[stream] if self.parts else stream
        return self.one.at(self.starts[stream] + index * self._chunk + within)

    @cached_property
    def _chunk(self) -> int:
        return self.dram.stripe_bytes // self.dram.line_bytes

    @cached_property
    def _rest(self) -> int:
        """Number of lines that a stream's last turn has."""
        return self.length % self._chunk or self._chunk

    @cached_property
    def _longer(self) -> tuple[int, ...]:
        return tuple(i for i, (_, count) in enumerate(self.parts) if count * self._chunk > self.length)

    def block_end(self, position: int) -> int:
        return position
