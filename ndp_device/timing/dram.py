"""How long the DRAM takes to read bytes: from the first line offered to the last data returned, most loaded channel.

`stream` is the closed form used for every command: the undisturbed time of n lines plus one loss per refresh met. Its
three constants per device are the ramp of the first lines, the pace after it, and the loss of one refresh. They come
from the exact controller in dram_controller.py, never from a fit. `transfer` and `idle_ps` ask the controller itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ndp_device.common.errors import ConfigError
from ndp_device.timing.dram_controller import Controller, Idle, StreamMap
from ndp_device.timing.spec import DramSpec
from ndp_device.timing.work import FS_PER_PS, PS_PER_S, ceil_div

IDLE_CASES = ("hit", "closed", "conflict")
_OFFER_CYCLES = 1  # the scheduler sees a line in the cycle after it was offered
_NEVER = 1 << 60  # more lines than any stream has
_RAMP_LINES = 32  # after these every bank group streams
_EXACT_LINES = 16_384  # transfers up to this length are simulated, longer ones computed
_SIMULATED_LINES = 32_768  # in all start times of one transfer together
_LOSS_SAMPLES = 8  # moments of a refresh over which its loss is averaged


class Stream(NamedTuple):
    """One sequential read on the most loaded channel."""

    total_ps: int
    refresh_stall_ps: int
    activations: int  # rows opened, all channels


@dataclass(frozen=True)
class Transfer:
    """A read of an idle device, begun at moments spread evenly over one refresh interval, also while it refreshes."""

    mean_ps: int
    min_ps: int
    max_ps: int
    gb_per_s: float
    efficiency: float  # of the peak rate


def channel_lines(dram: DramSpec, num_bytes: int) -> int:
    """Lines of the most loaded channel for an allocation that begins on a stripe."""
    full, rest = divmod(num_bytes, dram.channels * dram.stripe_bytes)
    return full * (dram.stripe_bytes // dram.line_bytes) + ceil_div(min(rest, dram.stripe_bytes), dram.line_bytes)


def stream(dram: DramSpec, lines: int, start_ps: int) -> Stream:
    """Read `lines` consecutive lines on every channel, beginning at absolute simulated time start_ps."""
    return Streams(dram).read(lines, start_ps)


class Streams:
    """The streams of one device, for frequent callers: its constants are looked up once."""

    def __init__(self, dram: DramSpec) -> None:
        self._dram = dram
        self._profile = _profile(dram) if dram.kind == "bank" else None
        if self._profile is not None:  # a model has few sizes of experts
            self._undisturbed = lru_cache(maxsize=4096)(self._profile.undisturbed)

    def read(self, lines: int, start_ps: int) -> Stream:
        """See `stream`."""
        dram, profile = self._dram, self._profile
        if lines == 0:
            return Stream(0, 0, 0)
        if profile is None:
            num_bytes = lines * dram.line_bytes * dram.channels
            return Stream(ceil_div(num_bytes * PS_PER_S, dram.ideal_bytes_per_s), 0, 0)
        undisturbed = self._undisturbed(lines)
        cycles, met = profile.cycles_and_refreshes(undisturbed, start_ps * FS_PER_PS // dram.tck_fs)
        rows = dram.channels * (ceil_div(lines, dram.lines_per_row) + met * profile.rows_reopened)
        return Stream(dram.cycles_to_ps(cycles), dram.cycles_to_ps(cycles - undisturbed), rows)

    def constants(self) -> dict[str, Any]:
        """All that `read` depends on, for the same closed form in another language (csrc/commands.cpp)."""
        dram = self._dram
        profile = self._profile or _Profile((0,), (0, 1), 0, (0, 1), (0, 1), 0, 0, 0, 0)
        return {
            "channels": dram.channels,
            "line_bytes": dram.line_bytes,
            "lines_per_row": dram.lines_per_row,
            "tck_fs": dram.tck_fs,
            "ideal_bytes_per_s": dram.ideal_bytes_per_s if self._profile is None else 0,
            **vars(profile),
        }


def idle_ps(dram: DramSpec, case: str) -> int:
    """One line from an idle channel whose bank has the row open (hit), no row (closed) or another row (conflict)."""
    if case not in IDLE_CASES:
        raise ConfigError(f"idle case must be one of {', '.join(IDLE_CASES)}, got {case!r}")
    if dram.kind == "ideal":
        return stream(dram, 1, 0).total_ps
    lines = StreamMap(dram)
    controller = Controller(replace(dram, refresh="off"), lines, Idle(0), end=1)
    bank, row = lines.at(0)
    if case != "closed":
        controller.channel.open_rows[bank] = row if case == "hit" else row + 1
    return dram.cycles_to_ps(controller.run().cycles + _OFFER_CYCLES)


def transfer(dram: DramSpec, num_bytes: int) -> Transfer:
    """One sequential stream of num_bytes."""
    if num_bytes < 1:
        raise ConfigError(f"the number of bytes must be at least 1, got {num_bytes}")
    lines = channel_lines(dram, num_bytes)
    if dram.kind == "ideal":
        times = [stream(dram, lines, 0).total_ps]
    elif lines <= _EXACT_LINES:
        count = max(8, min(_SIMULATED_LINES // lines, 1024))
        times = [_exact_cycles(dram, StreamMap(dram), lines, idle) for idle in _moments(dram, count)]
    else:
        profile, count = _profile(dram), 256
        parts = [(2 * part + 1) * profile.refresh_interval // (2 * count) for part in range(count)]
        undisturbed = profile.undisturbed(lines)
        times = [profile.cycles_and_refreshes(undisturbed, since)[0] for since in parts]
    if dram.kind == "bank":
        times = [dram.cycles_to_ps(cycles) for cycles in times]
    mean = ceil_div(sum(times), len(times))
    rate = num_bytes * PS_PER_S / mean
    return Transfer(mean, min(times), max(times), rate / 1e9, rate / dram.peak_bytes_per_s)


def _moments(dram: DramSpec, count: int) -> list[Idle]:
    """An idle device that refreshes itself, offered lines in the middles of `count` equal parts of a refresh interval.

    The simulation begins at the last refresh that falls due before the start.
    """
    if dram.refresh == "off":
        return [Idle(0)]
    return [Idle(0, start=(2 * part + 1) * dram.refi // (2 * count)) for part in range(count)]


def _exact_cycles(dram: DramSpec, lines: StreamMap, end: int, idle: Idle) -> int:
    return Controller(dram, lines, idle, end, dram.outstanding).run().cycles + _OFFER_CYCLES


# -- the closed form ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Profile:
    """Timing of a sequential stream on one device, taken from the exact controller. Cycles."""

    ramp: tuple[int, ...]  # for the first 0, 1, 2 … lines without refresh
    pace: tuple[int, int]  # (cycles, lines) after the ramp, rows being opened in closed banks
    first_pass: int  # lines until every bank has a row open, if no refresh closes it before
    later_pace: tuple[int, int]  # after that
    loss: tuple[int, int]  # (cycles, refreshes): what meeting refreshes costs
    data_cycles: int  # from the last command to the last data
    refresh_interval: int  # 0 = no refresh
    blocked: int  # after a refresh falls due, an idle channel cannot start for so long
    rows_reopened: int  # by one refresh

    def undisturbed(self, lines: int) -> int:
        if lines < len(self.ramp):
            return self.ramp[lines]
        first = min(lines, self.first_pass)
        (cycles, per), (later_cycles, later_per) = self.pace, self.later_pace
        opening = ceil_div(cycles * (first - len(self.ramp) + 1), per)
        return self.ramp[-1] + opening + ceil_div(later_cycles * (lines - first), later_per)

    def cycles_and_refreshes(self, undisturbed: int, start: int) -> tuple[int, int]:
        """(cycles, refreshes met) of a stream of `undisturbed` cycles that begins at absolute cycle `start`.

        Refreshes fall due from cycle 0.
        One that is under way is waited for. One is met if it falls due before the last command, and moves that
        command by the loss.
        """
        if not self.refresh_interval:
            return undisturbed, 0
        since = start % self.refresh_interval
        wait = max(self.blocked - since, 0)
        beyond = wait + undisturbed - self.data_cycles - (self.refresh_interval - since)
        if beyond <= 0:
            return wait + undisturbed, 0
        cycles, per = self.loss
        met = ceil_div(beyond * per, self.refresh_interval * per - cycles)
        return wait + undisturbed + ceil_div(met * cycles, per), met


@lru_cache(maxsize=64)
def _profile(dram: DramSpec) -> _Profile:
    still, lines, idle = replace(dram, refresh="off"), StreamMap(dram), Idle(0)
    ramp = tuple(_exact_cycles(still, lines, end, idle) if end else 0 for end in range(_RAMP_LINES + 1))
    rank_lines = lines.row_span // dram.ranks
    after_rank = _exact_cycles(still, lines, _RAMP_LINES + rank_lines, idle)
    pace, data_cycles = (after_rank - ramp[-1], rank_lines), dram.cl + dram.burst
    if dram.refresh == "off":
        first_pass = max(lines.row_span, _RAMP_LINES)
        once, twice = (_exact_cycles(still, lines, passes * first_pass, idle) for passes in (1, 2))
        return _Profile(ramp, pace, first_pass, (twice - once, first_pass), (0, 1), data_cycles, 0, 0, 0)
    loss = _refresh_loss(dram, lines)
    blocked = dram.ranks - 1 + dram.rfc - (dram.act_cycles - 1)
    return _Profile(ramp, pace, _NEVER, pace, loss, data_cycles, dram.refi, blocked, rows_reopened=dram.bank_groups)


def _refresh_loss(dram: DramSpec, lines: StreamMap) -> tuple[int, int]:
    """One all-bank refresh in the middle of a stream: the mean over moments that meet every phase of the burst."""
    end = 8 * _RAMP_LINES
    alone = _exact_cycles(replace(dram, refresh="off"), lines, end, Idle(0))
    moments = [Idle(alone // 2 + sample * (dram.burst + 1)) for sample in range(_LOSS_SAMPLES)]
    return sum(_exact_cycles(dram, lines, end, idle) - alone for idle in moments), _LOSS_SAMPLES
