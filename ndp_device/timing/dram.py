"""How long the DRAM takes to read bytes: from the first line offered to the last data returned, most loaded channel.

`stream` is the closed form used for every command: the undisturbed time of n lines plus one loss per refresh met. Its
three constants per device are the ramp of the first lines, the pace after it, and the loss of one refresh. They come
from the exact controller in dram_controller.py, never from a fit. `transfer` and `idle_ps` ask the controller itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ndp_device import _commands
from ndp_device.common.errors import ConfigError
from ndp_device.timing.dram_controller import Controller
from ndp_device.timing.spec import DramSpec
from ndp_device.timing.work import PS_PER_S, ceil_div

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
    return Stream(*closed_form(dram).read(lines, start_ps))


@lru_cache(maxsize=64)
def closed_form(dram: DramSpec) -> _commands.Dram:
    """What computes the streams of one device (csrc/commands.cpp)."""
    is_ideal = dram.kind == "ideal"
    constants = _Constants((0,), (0, 1), 0, (0, 1), (0, 1), 0, 0, 0, 0) if is_ideal else constants_of(dram)
    return _commands.Dram(
        channels=dram.channels,
        line_bytes=dram.line_bytes,
        lines_per_row=dram.lines_per_row,
        tck_fs=dram.tck_fs,
        ideal_bytes_per_s=dram.ideal_bytes_per_s if is_ideal else 0,
        **constants._asdict(),
    )


def idle_ps(dram: DramSpec, case: str) -> int:
    """One line from an idle channel whose bank has the row open (hit), no row (closed) or another row (conflict)."""
    if case not in IDLE_CASES:
        raise ConfigError(f"idle case must be one of {', '.join(IDLE_CASES)}, got {case!r}")
    if dram.kind == "ideal":
        return stream(dram, 1, 0).total_ps
    controller = Controller(replace(dram, refresh="off"), 1)
    bank, row = dram.place(0)
    if case != "closed":
        controller.channel.open_rows[bank] = row if case == "hit" else row + 1
    return dram.cycles_to_ps(controller.run() + _OFFER_CYCLES)


def transfer(dram: DramSpec, num_bytes: int) -> Transfer:
    """One sequential stream of num_bytes."""
    if num_bytes < 1:
        raise ConfigError(f"the number of bytes must be at least 1, got {num_bytes}")
    lines = channel_lines(dram, num_bytes)
    if dram.kind == "ideal":
        times = [stream(dram, lines, 0).total_ps]
    elif lines <= _EXACT_LINES:
        count = max(8, min(_SIMULATED_LINES // lines, 1024))
        # the simulation begins at the last refresh that falls due before the start
        starts = [0] if dram.refresh == "off" else _middles(dram.refi, count)
        times = [dram.cycles_to_ps(_exact_cycles(dram, lines, start=start)) for start in starts]
    else:
        interval, count = closed_form(dram).refresh_interval, 256
        times = [stream(dram, lines, dram.cycles_to_ps(start)).total_ps for start in _middles(interval, count)]
    mean = ceil_div(sum(times), len(times))
    rate = num_bytes * PS_PER_S / mean
    return Transfer(mean, min(times), max(times), rate / 1e9, rate / dram.peak_bytes_per_s)


def _middles(interval: int, count: int) -> list[int]:
    """Of equal parts of an interval."""
    return [(2 * part + 1) * interval // (2 * count) for part in range(count)]


def _exact_cycles(dram: DramSpec, end: int, *, to_refresh: int = 0, start: int = 0) -> int:
    return Controller(dram, end, to_refresh=to_refresh, start=start).run() + _OFFER_CYCLES


# -- the closed form ---------------------------------------------------------------------------------------------------


class _Constants(NamedTuple):
    """Timing of a sequential stream on one device, taken from the exact controller. Cycles."""

    ramp: tuple[int, ...]  # for the first 0, 1, 2 … lines without refresh
    pace: tuple[int, int]  # (cycles, lines) after the ramp, rows being opened in closed banks
    first_pass: int  # lines until every bank has a row open, if no refresh closes it before
    later_pace: tuple[int, int]  # after that
    loss: tuple[int, int]  # (cycles, refreshes): what meeting refreshes costs, which moves the last command by so much
    data_cycles: int  # from the last command to the last data
    refresh_interval: int  # 0 = no refresh; else they fall due from cycle 0 on
    blocked: int  # after a refresh falls due, an idle channel cannot start for so long
    rows_reopened: int  # by one refresh


def constants_of(dram: DramSpec) -> _Constants:
    """Those of banks, not of an ideal DRAM."""
    still = replace(dram, refresh="off")
    ramp = tuple(_exact_cycles(still, end) if end else 0 for end in range(_RAMP_LINES + 1))
    rank_lines = dram.row_span // dram.ranks
    after_rank = _exact_cycles(still, _RAMP_LINES + rank_lines)
    pace, data_cycles = (after_rank - ramp[-1], rank_lines), dram.cl + dram.burst
    if dram.refresh == "off":
        first_pass = max(dram.row_span, _RAMP_LINES)
        once, twice = (_exact_cycles(still, passes * first_pass) for passes in (1, 2))
        return _Constants(ramp, pace, first_pass, (twice - once, first_pass), (0, 1), data_cycles, 0, 0, 0)
    loss = _refresh_loss(dram)
    blocked = dram.ranks - 1 + dram.rfc - (dram.act_cycles - 1)
    return _Constants(ramp, pace, _NEVER, pace, loss, data_cycles, dram.refi, blocked, rows_reopened=dram.bank_groups)


def _refresh_loss(dram: DramSpec) -> tuple[int, int]:
    """One all-bank refresh in the middle of a stream: the mean over moments that meet every phase of the burst."""
    end = 8 * _RAMP_LINES
    alone = _exact_cycles(replace(dram, refresh="off"), end)
    moments = [alone // 2 + sample * (dram.burst + 1) for sample in range(_LOSS_SAMPLES)]
    return sum(_exact_cycles(dram, end, to_refresh=due) - alone for due in moments), _LOSS_SAMPLES
