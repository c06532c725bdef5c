"""How long the DRAM takes to read bytes: from the first line offered to the last data returned, most loaded channel.

`stream` is the closed form used for every command: the undisturbed time of n lines plus one loss per refresh met.
Its three constants per device (the ramp of the first lines, the pace after it, the loss of one refresh) are taken from
the exact controller in dram_controller.py, never fitted. `transfer` and `idle_ps` ask the controller itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ndp_device.errors import ConfigError
from ndp_device.timing.dram_controller import Controller, Idle, Lines
from ndp_device.timing.dram_map import ConcurrentStreams, StreamMap
from ndp_device.timing.spec import DramSpec
from ndp_device.timing.units import FS_PER_PS, PS_PER_S, ceil_div

IDLE_CASES = ("hit", "closed", "conflict")
_OFFER_CYCLES = 1  # the scheduler sees a line in the cycle after it was offered
_RAMP_LINES = 32  # after these every bank group streams
_EXACT_LINES = 256  # transfers up to this length are simulated, longer ones computed
_CONCURRENT_REFRESHES = 6  # concurrent streams are simulated for so many refresh intervals, then go on at their pace
_LOSS_SAMPLES = 8  # moments of a refresh over which its loss is averaged


@dataclass(frozen=True)
class Stream:
    """One sequential read on the most loaded channel."""

    total_ps: int
    refresh_stall_ps: int
    activations: int  # rows opened, all channels


@dataclass(frozen=True)
class Transfer:
    """A read begun at moments spread evenly over the interval before the first refresh of an idle device."""

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
    if lines == 0:
        return Stream(0, 0, 0)
    if dram.kind == "ideal":
        num_bytes = lines * dram.line_bytes * dram.channels
        return Stream(ceil_div(num_bytes * PS_PER_S, dram.ideal_bytes_per_s), 0, 0)
    profile = _profile(dram)
    wait, to_refresh = 0, 0
    if profile.refresh_interval:
        since = start_ps * FS_PER_PS // dram.tck_fs % profile.refresh_interval
        wait = max(profile.blocked - since, 0)
        to_refresh = profile.refresh_interval - since - wait
    cycles, met = profile.cycles_and_refreshes(lines, to_refresh)
    stall = wait + cycles - profile.undisturbed(lines)
    rows = dram.channels * (ceil_div(lines, dram.lines_per_row) + met * profile.rows_reopened)
    return Stream(dram.cycles_to_ps(wait + cycles), dram.cycles_to_ps(stall), rows)


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


def transfer(dram: DramSpec, num_bytes: int, streams: int = 1, placement: str = "natural") -> Transfer:
    """num_bytes in all, read by `streams` sequential streams; see dram_map.py for the placements."""
    if num_bytes < 1:
        raise ConfigError(f"the number of bytes must be at least 1, got {num_bytes}")
    lines = channel_lines(dram, num_bytes)
    if dram.kind == "ideal":
        times = [stream(dram, lines, 0).total_ps]
    elif streams != 1:
        chunk = dram.stripe_bytes // dram.line_bytes
        length = ceil_div(lines, max(streams, 1) * chunk) * chunk
        concurrent = ConcurrentStreams(dram, streams, placement, length)
        times = _concurrent_cycles(dram, concurrent)
    elif lines <= _EXACT_LINES:
        times = [
            _exact_cycles(dram, StreamMap(dram), lines, idle) for idle in _moments(dram, min(16_384 // lines, 1024))
        ]
    else:
        profile = _profile(dram)
        times = [profile.cycles(lines, idle.to_refresh) for idle in _moments(dram, 256)]
    if dram.kind == "bank":
        times = [dram.cycles_to_ps(cycles) for cycles in times]
    mean = ceil_div(sum(times), len(times))
    rate = num_bytes * PS_PER_S / mean
    return Transfer(mean, min(times), max(times), rate / 1e9, rate / dram.peak_bytes_per_s)


def _moments(dram: DramSpec, count: int) -> list[Idle]:
    """The idle device at `count` moments in the middles of equal parts of one refresh interval (of every bank)."""
    if dram.refresh != "per-bank":
        return [Idle(dram.refi - (2 * part + 1) * dram.refi // (2 * count)) for part in range(count)]
    banks = dram.ranks * dram.banks
    moments = []
    for part in range(count):
        turn, since = divmod((2 * part + 1) * dram.refi_pb * banks // (2 * count), dram.refi_pb)
        moments.append(Idle(dram.refi_pb - since, next_bank=turn % banks))
    return moments


def _exact_cycles(dram: DramSpec, lines: Lines, end: int, idle: Idle) -> int:
    return Controller(dram, lines, idle, end, dram.outstanding).run().cycles + _OFFER_CYCLES


def _concurrent_cycles(dram: DramSpec, lines: ConcurrentStreams) -> list[int]:
    """Simulated until every stream has crossed a row boundary and some refreshes are over; then the pace goes on.

    The pace is that between the first and the last refresh simulated: whole refresh intervals.
    """
    end = lines.streams * lines.length
    simulated = max(lines.streams * (lines.one.block + _RAMP_LINES), _CONCURRENT_REFRESHES * dram.refi // dram.burst)
    if end <= simulated:
        return [_exact_cycles(dram, lines, end, idle) for idle in _moments(dram, 8 if end <= 2048 else 4)]
    times = []
    for idle in _moments(dram, 2):
        controller = Controller(dram, lines, idle, simulated, dram.outstanding)
        cycles = controller.run().cycles + _OFFER_CYCLES
        marks = controller.refresh_marks
        (since, before), (until, after) = (marks[0], marks[-1]) if len(marks) > 1 else ((0, 0), (cycles, simulated))
        times.append(cycles + ceil_div((until - since) * (end - simulated), after - before))
    return times


# -- the closed form ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Profile:
    """What a sequential stream on one device looks like, taken from the exact controller. Cycles."""

    ramp: tuple[int, ...]  # for the first 0, 1, 2 … lines without refresh
    pace: tuple[int, int]  # (cycles, lines) after the ramp
    loss: tuple[int, int]  # (cycles, refreshes): what meeting refreshes costs
    data_cycles: int  # from the last command to the last data
    refresh_interval: int  # 0 = no refresh
    blocked: int  # after a refresh falls due, an idle channel cannot start for so long
    rows_reopened: int  # by one refresh

    def undisturbed(self, lines: int) -> int:
        if lines < len(self.ramp):
            return self.ramp[lines]
        cycles, per = self.pace
        return self.ramp[-1] + ceil_div(cycles * (lines - len(self.ramp) + 1), per)

    def cycles_and_refreshes(self, lines: int, to_refresh: int) -> tuple[int, int]:
        """(cycles, refreshes met) of a stream that begins to_refresh cycles before a refresh falls due.

        A refresh is met if it falls due before the last command; each one met moves that command by the loss.
        """
        undisturbed = self.undisturbed(lines)
        beyond = undisturbed - self.data_cycles - to_refresh
        if not self.refresh_interval or beyond <= 0:
            return undisturbed, 0
        cycles, per = self.loss
        met = ceil_div(beyond * per, self.refresh_interval * per - cycles)
        return undisturbed + ceil_div(met * cycles, per), met

    def cycles(self, lines: int, to_refresh: int) -> int:
        return self.cycles_and_refreshes(lines, to_refresh)[0]


@lru_cache(maxsize=64)
def _profile(dram: DramSpec) -> _Profile:
    still, lines, idle = replace(dram, refresh="off"), StreamMap(dram), Idle(0)
    ramp = tuple(_exact_cycles(still, lines, end, idle) if end else 0 for end in range(_RAMP_LINES + 1))
    rank_lines = lines.row_span // dram.ranks
    after_rank = _exact_cycles(still, lines, _RAMP_LINES + rank_lines, idle)
    pace = (after_rank - ramp[-1], rank_lines)
    data_cycles = dram.cl + dram.burst
    if dram.refresh == "off":
        return _Profile(ramp, pace, (0, 1), data_cycles, refresh_interval=0, blocked=0, rows_reopened=0)
    if dram.refresh == "per-bank":
        return _Profile(ramp, pace, _bank_refresh_loss(dram, lines), data_cycles, dram.refi_pb, 0, rows_reopened=1)
    loss = _refresh_loss(dram, lines)
    blocked = dram.ranks - 1 + dram.rfc - (dram.act_cycles - 1)
    return _Profile(ramp, pace, loss, data_cycles, dram.refi, blocked, rows_reopened=lines.period)


def _refresh_loss(dram: DramSpec, lines: StreamMap) -> tuple[int, int]:
    """One all-bank refresh in the middle of a stream: the mean over moments that meet every phase of the burst."""
    end = 8 * _RAMP_LINES
    alone = _exact_cycles(replace(dram, refresh="off"), lines, end, Idle(0))
    moments = [Idle(alone // 2 + sample * (dram.burst + 1)) for sample in range(_LOSS_SAMPLES)]
    return sum(_exact_cycles(dram, lines, end, idle) - alone for idle in moments), _LOSS_SAMPLES


def _bank_refresh_loss(dram: DramSpec, lines: StreamMap) -> tuple[int, int]:
    """Mean over a stream long enough for every bank to be refreshed several times."""
    end = 8 * lines.row_span
    served = Controller(dram, lines, Idle(dram.refi_pb), end, dram.outstanding).run()
    alone = _exact_cycles(replace(dram, refresh="off"), lines, end, Idle(0))
    return served.cycles + _OFFER_CYCLES - alone, served.refreshes
