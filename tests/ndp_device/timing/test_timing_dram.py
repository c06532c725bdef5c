"""The DRAM model against arithmetic, against the cycles of a public simulator, and against itself."""

import csv
from dataclasses import asdict, replace
from typing import Any

import pytest
from paths import DATA

from ndp_device.common.errors import ConfigError
from ndp_device.timing.dram import channel_lines, idle_ps, stream, transfer
from ndp_device.timing.dram_controller import ACTIVATE, PRECHARGE, PRECHARGE_ALL, READ, REFRESH, Channel, Controller
from ndp_device.timing.spec import DramSpec, load_hardware

DDR5 = load_hardware("h100-ndp512").dram
LPDDR5 = load_hardware("h100-ndp512-lpddr5").dram


def exact(dram: DramSpec, lines: int, to_refresh: int) -> int:
    return Controller(dram, lines, to_refresh=to_refresh).run()


def efficiency(num_bytes: int, dram: DramSpec) -> float:
    return transfer(dram, num_bytes).efficiency


STREAMED = [
    DDR5,
    replace(DDR5, rfc=1315),
    replace(DDR5, refresh="off"),
    LPDDR5,
    replace(LPDDR5, refresh="off"),
]


@pytest.mark.parametrize("dram", STREAMED)
@pytest.mark.parametrize("lines", [300, 1500, 8192, 20_000])
def test_the_closed_form_equals_the_simulation(dram: DramSpec, lines: int) -> None:
    """Within 0.15 % (a refresh that falls on a row boundary costs a few cycles more or less than the mean loss)."""
    start = 5000
    to_refresh = dram.refi - start % dram.refi
    simulated = exact(dram, lines, to_refresh) + 1
    computed = stream(dram, lines, dram.cycles_to_ps(start)).total_ps
    assert computed == pytest.approx(dram.cycles_to_ps(simulated), rel=0.0015)


def test_idle_latencies_are_the_standard_s_sums() -> None:
    """DDR5: hit 46 + 8, closed + 46, conflict + 46 - 1 (a precharge acts one cycle earlier than an activate); LPDDR5:
    one cycle to start the data clock, 17 + 2, closed + 15, conflict + 15. One cycle in which the line is offered."""
    cycles = {"hit": 46 + 8, "closed": 46 + 46 + 8, "conflict": 45 + 46 + 46 + 8}
    for case, expected in cycles.items():
        assert idle_ps(DDR5, case) == DDR5.cycles_to_ps(1 + expected)
    for case, expected in {"hit": 20, "closed": 35, "conflict": 50}.items():
        assert idle_ps(LPDDR5, case) == LPDDR5.cycles_to_ps(1 + expected)


def test_refresh_costs_its_own_time_and_reopening_the_rows() -> None:
    """DDR5: tRFC 946 of every 12500 cycles; closing (24 + 46) and reopening the rows (46 + the ramp) on top."""
    lost = 1 - efficiency(352 * 10**6, DDR5)
    assert 946 / 12_500 < lost < (946 + 24 + 46 + 46 + 8 * 16) / 12_500


def test_the_map_puts_bank_group_lowest_then_column_bank_rank_row() -> None:
    """Eight bank groups, 128 lines, four banks, two ranks: the bank changes after 1024 lines, the rank after 4096."""
    where = DDR5.place
    assert where(0) == (0, 0)
    assert where(1) == (4, 0)  # the next bank group
    assert where(8) == (0, 0)  # the same row again
    assert where(1024) == (1, 0)
    assert where(4096) == (32, 0)
    assert where(8192) == (0, 1)


@pytest.mark.parametrize(("num_bytes", "lines"), [(0, 0), (1, 1), (64, 1), (65, 2), (256, 4), (5120, 4), (5121, 5)])
def test_lines_of_the_most_loaded_channel(num_bytes: int, lines: int) -> None:
    """20 channels x 256 B: 5120 bytes give every channel one stripe of four lines."""
    assert channel_lines(DDR5, num_bytes) == lines


class LastRank(DramSpec):
    """Whose stream begins in the rank which is refreshed last."""

    def place(self, position: int) -> tuple[int, int]:
        return super().place(position + self.row_span // self.ranks * (self.ranks - 1))


@pytest.mark.parametrize("dram", [DDR5, replace(DDR5, rfc=1315), LPDDR5])
def test_a_start_in_a_refresh_takes_what_the_simulation_says_to_the_cycle(dram: DramSpec) -> None:
    """Every start until the refresh is over everywhere, those just after, and some until the next falls due."""
    for start in [*range(dram.rfc + 10), *range(dram.rfc, dram.refi - 200, 97)]:
        simulated = Controller(LastRank(**asdict(dram)), 4, start=start).run() + 1
        read = stream(dram, 4, -(-start * dram.tck_fs // 1000))
        assert (start, read.total_ps) == (start, dram.cycles_to_ps(simulated))


@pytest.mark.parametrize("dram", [DDR5, LPDDR5])
def test_a_stream_that_waits_for_one_refresh_may_meet_the_next_for_it(dram: DramSpec) -> None:
    """Without the wait, these lines would have been read before the next falls due."""
    lines = (dram.refi - dram.rfc // 2) // dram.burst
    still = stream(replace(dram, refresh="off"), lines, 0).total_ps
    simulated = Controller(dram, lines)
    cycles = simulated.run()
    assert simulated.refreshes == 2 * dram.ranks
    assert still < dram.cycles_to_ps(dram.refi)
    assert stream(dram, lines, 0).total_ps == pytest.approx(dram.cycles_to_ps(cycles + 1), rel=0.003)


@pytest.mark.parametrize(("dram", "lines", "to_refresh", "rows"), [(DDR5, 300, 1000, 8), (LPDDR5, 500, 1000, 4)])
def test_a_refresh_opens_again_as_many_rows_as_the_simulation_opens(
    dram: DramSpec, lines: int, to_refresh: int, rows: int
) -> None:
    """One of each bank group. Here it comes in the middle of them, so that no row would have been opened anyway."""
    still = replace(dram, refresh="off")
    both = [Controller(one, lines, to_refresh=to_refresh) for one in (dram, still)]
    for one in both:
        one.run()
    refreshed, undisturbed = (one.channel.activations for one in both)
    assert refreshed - undisturbed == rows
    begun = dram.cycles_to_ps(dram.refi - to_refresh)
    assert stream(dram, lines, begun).activations - stream(still, lines, begun).activations == rows * dram.channels


APART = replace(DDR5, rc=300, rp_ab=50, rrd_s=9, rrd_l=17, ppd=3, rank_switch=5)
SAME, GROUP, RANK, OTHER_RANK = 0, 1, 4, 32
"""Banks beside bank 0: itself, one of its group, one of another group, one of another rank."""


@pytest.mark.parametrize(
    ("first", "second", "bank", "cycles"),
    [
        (ACTIVATE, READ, SAME, 46),
        (ACTIVATE, ACTIVATE, SAME, 300),
        (ACTIVATE, ACTIVATE, GROUP, 17),
        (ACTIVATE, ACTIVATE, RANK, 9),
        (ACTIVATE, PRECHARGE, SAME, 103 + 1),
        (ACTIVATE, PRECHARGE_ALL, RANK, 103 + 1),
        (ACTIVATE, REFRESH, RANK, 300 + 1),
        (READ, PRECHARGE, SAME, 24 + 1),
        (READ, PRECHARGE_ALL, RANK, 24 + 1),
        (READ, READ, GROUP, 16),
        (READ, READ, RANK, 8),
        (READ, READ, OTHER_RANK, 8 + 5),
        (PRECHARGE, ACTIVATE, SAME, 46 - 1),
        (PRECHARGE, PRECHARGE, RANK, 3),
        (PRECHARGE, PRECHARGE_ALL, RANK, 3),
        (PRECHARGE, REFRESH, RANK, 46),
        (PRECHARGE_ALL, ACTIVATE, RANK, 50 - 1),
        (PRECHARGE_ALL, PRECHARGE, RANK, 3),
        (REFRESH, ACTIVATE, RANK, 946 - 1),
    ],
)
def test_commands_keep_the_standard_s_distance_where_it_is_the_only_one(
    first: int, second: int, bank: int, cycles: int
) -> None:
    """An activate or a read acts in the second of its two cycles. The presets' rc is ras + rp, which would hide it."""
    channel = Channel(APART)
    channel.issue(first, 0, 1000)
    assert channel.ready(second, bank) == 1000 + cycles


def test_a_fifth_activate_of_a_rank_waits_for_the_first_of_four() -> None:
    channel = Channel(replace(APART, faw=100))
    for number in range(4):
        channel.issue(ACTIVATE, number * RANK, 20 * number)
    assert channel.ready(ACTIVATE, 4 * RANK) == 100
    assert channel.ready(ACTIVATE, OTHER_RANK) < 100


class WatchedChannel(Channel):
    """Whose reads say which row was open, and whose activates when they came."""

    def __init__(self, dram: DramSpec) -> None:
        super().__init__(dram)
        self.reads: list[tuple[int, int | None]] = []
        self.acts: list[int] = []

    def issue(self, command: int, bank: int, now: int, row: int | None = None) -> None:
        if command == READ:
            self.reads.append((bank, self.open_rows[bank]))
        elif command == ACTIVATE:
            self.acts.append(now)
        super().issue(command, bank, now, row)


@pytest.mark.parametrize(("ras", "rc"), [(103, 149), (46, 92)])
def test_every_line_is_read_once_from_its_own_open_row(ras: int, rc: int) -> None:
    """Rows of one line are closed as soon as they may be, which a short ras allows before their read is due."""
    dram = replace(DDR5, lines_per_row=1, ras=ras, rc=rc)
    controller, channel = Controller(dram, 400, to_refresh=1000), WatchedChannel(dram)
    controller.channel = channel
    controller.run()
    assert sorted(channel.reads, key=str) == sorted((dram.place(line) for line in range(400)), key=str)


@pytest.mark.parametrize("dram", [DDR5, LPDDR5])
def test_a_long_transfer_meets_a_refresh_more_or_less_by_when_it_begins(dram: DramSpec) -> None:
    """Its fastest start is just after one, its slowest just before."""
    found = transfer(dram, 100 * 10**6)
    one = dram.cycles_to_ps(dram.rfc)
    assert found.min_ps < found.mean_ps < found.max_ps
    assert one / 2 < found.max_ps - found.min_ps < 3 * one


def test_a_data_clock_that_stays_in_sync_spares_each_read_its_start() -> None:
    """Line after line, each offered when the one before it has returned: the clock stops in between, or does not."""
    stops, stays = (replace(LPDDR5, outstanding=1, refresh="off", wck_sync=cycles) for cycles in (1, 100))
    assert exact(stops, 10, 0) - exact(stays, 10, 0) == 9


class WatchedHalves(Controller):
    """Which says when the second halves of activates came."""

    def __init__(self, dram: DramSpec, end: int) -> None:
        super().__init__(dram, end)
        self.halves: list[int] = []

    def _activate_second(self) -> None:
        self.halves.append(self.now)
        super()._activate_second()


@pytest.mark.parametrize("aad", [1, 2, 3, 8])
@pytest.mark.parametrize("wck_sync", [1, 0])
def test_an_activate_s_second_half_comes_in_time_and_before_any_other_activate(aad: int, wck_sync: int) -> None:
    """Where reads take each cycle of the command bus, and rows of a few lines have to be opened beside them."""
    fast = dict.fromkeys(("burst", "ccd_s", "ccd_l", "rrd_s", "rrd_l", "faw"), 1)
    dram = replace(LPDDR5, lines_per_row=4, aad=aad, wck_sync=wck_sync, refresh="off", **fast)
    controller, channel = WatchedHalves(dram, 600), WatchedChannel(dram)
    controller.channel = channel
    controller.run()
    assert len(channel.reads) == 600
    assert len(controller.halves) >= len(channel.acts) - 1
    for first, second in zip(channel.acts, controller.halves, strict=False):
        assert first < second <= first + aad
    for second, first in zip(controller.halves, channel.acts[1:], strict=False):
        assert second < first


def test_half_of_the_channels_read_half_as_fast_with_the_same_efficiency() -> None:
    half = transfer(replace(DDR5, channels=10), 10**7)
    whole = transfer(DDR5, 2 * 10**7)
    assert half.efficiency == pytest.approx(whole.efficiency, rel=1e-3)
    assert half.gb_per_s == pytest.approx(whole.gb_per_s / 2, rel=1e-3)


def test_an_ideal_dram_reads_at_its_rate() -> None:
    ideal = load_hardware("h100-ndp512", **{"dram.kind": "ideal"}).dram
    assert stream(ideal, 4, 77).total_ps == 10_000  # 20 channels x 256 B at 512 GB/s
    assert efficiency(512 * 10**6, ideal) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("dram", [DDR5, LPDDR5])
def test_start_times_in_a_refresh_wait_for_its_end(dram: DramSpec) -> None:
    """One start in refi / rfc falls into a refresh and waits for half of it on average: rfc^2 / (2 refi). As long as
    that again at most is lost by reads that a refresh cuts in two, or that begin just before it."""
    alone, spread = transfer(replace(dram, refresh="off"), 4096), transfer(dram, 4096)
    assert spread.min_ps == alone.mean_ps
    waiting = dram.cycles_to_ps(dram.rfc * dram.rfc // (2 * dram.refi))
    assert waiting < spread.mean_ps - alone.mean_ps < 2 * waiting
    assert spread.max_ps >= alone.mean_ps + dram.cycles_to_ps(dram.rfc - dram.refi // 1024 - 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: transfer(DDR5, 0), "at least 1"),
        (lambda: idle_ps(DDR5, "warm"), "hit, closed, conflict"),
    ],
)
def test_impossible_questions_are_refused_in_one_sentence(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


# -- cycles of a public simulator --------------------------------------------------------------------------------------


REFRESH_OF_32_GBIT: dict[str, dict[str, Any]] = {
    "h100-ndp512": {"dram.rfc": 1315},
    "h100-ndp512-lpddr5": {"dram.rfc": 304},
}
ROWS = list(csv.DictReader((DATA / "dram-cycles.csv").open()))
"""Cycles taken from Ramulator 2.1 (commit c5b1c3a), one channel: `lines` in all were offered as fast as a 32-entry
queue takes them, the scheduler saw the first in cycle `start_cycle` after a refresh fell due on a device idle before;
`cycles` is the time from the cycle of the offer to the last data returned."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_the_controller_takes_the_cycles_of_the_public_simulator(row: dict[str, str]) -> None:
    options: dict[str, Any] = {
        **(REFRESH_OF_32_GBIT[row["preset"]] if row["density_gbit"] == "32" else {}),
        "dram.refresh": row["refresh"],
        "dram.outstanding": row["outstanding"],
    }
    dram = load_hardware(row["preset"], **options).dram
    cycles = Controller(dram, int(row["lines"]), start=int(row["start_cycle"])).run()
    assert cycles + 1 == int(row["cycles"])  # the scheduler sees a line in the cycle after the offer
