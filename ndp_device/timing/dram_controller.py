"""The controller of one DRAM channel serving a stream of line reads, command by command: exact.

    one command a cycle:  read of a row just opened  >  refresh  >  oldest queued request whose next command is ready

First-ready first-come-first-served over a queue of queue_entries, open rows. A row opened for a request is not closed
before that request is read. A refresh that is due lets no queued request begin before it is issued. Where an activate
is two commands (LPDDR5), the second takes the first cycle that nothing else wants, and no other activate comes between.

Time jumps from command to command.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ndp_device.timing.spec import DramSpec

LONG_AGO, _FOREVER = -(1 << 60), 1 << 60
ACTIVATE, READ, PRECHARGE, PRECHARGE_ALL, REFRESH = range(5)
_BANK, _GROUP, _RANK, _OTHER_RANKS = range(4)


def gaps(dram: DramSpec) -> Iterator[tuple[int, int, int, int]]:
    """(command, scope, next command there, least cycles between them), by the standard's parameters.

    A command that takes two bus cycles acts in its second; the standard's gaps run from act to act.
    """
    late_act, late_read = dram.act_cycles - 1, dram.read_cycles - 1
    yield ACTIVATE, _BANK, READ, dram.rcd + late_act - late_read
    yield ACTIVATE, _BANK, ACTIVATE, dram.rc
    yield ACTIVATE, _BANK, PRECHARGE, dram.ras + late_act
    yield ACTIVATE, _GROUP, ACTIVATE, dram.rrd_l
    yield ACTIVATE, _RANK, ACTIVATE, dram.rrd_s
    yield ACTIVATE, _RANK, PRECHARGE_ALL, dram.ras + late_act
    yield ACTIVATE, _RANK, REFRESH, dram.rc + late_act
    yield READ, _BANK, PRECHARGE, dram.rtp + late_read
    yield READ, _GROUP, READ, dram.ccd_l
    yield READ, _RANK, READ, dram.ccd_s
    yield READ, _RANK, PRECHARGE_ALL, dram.rtp + late_read
    yield READ, _OTHER_RANKS, READ, dram.burst + dram.rank_switch
    yield PRECHARGE, _BANK, ACTIVATE, dram.rp - late_act
    yield PRECHARGE_ALL, _RANK, ACTIVATE, dram.rp_ab - late_act
    for precharge in (PRECHARGE, PRECHARGE_ALL):
        yield precharge, _RANK, PRECHARGE, dram.ppd
        yield precharge, _RANK, PRECHARGE_ALL, dram.ppd
        yield precharge, _RANK, REFRESH, dram.rp
    yield REFRESH, _RANK, ACTIVATE, dram.rfc - late_act


class Channel:
    """The timing state of one channel. Banks are counted over all ranks; a command to a rank names its first bank."""

    def __init__(self, dram: DramSpec) -> None:
        self.dram = dram
        ranks, banks = range(dram.ranks), range(dram.ranks * dram.banks)
        self.rank_of = [bank // dram.banks for bank in banks]
        others = [tuple(other for other in ranks if other != rank) for rank in ranks]
        self._places = [
            ((bank,), (bank // dram.banks_per_group,), (rank,), others[rank]) for bank, rank in enumerate(self.rank_of)
        ]
        # by command: the earliest cycle for it in each bank, bank group and rank
        self._earliest = [[[LONG_AGO] * len(banks) for _ in range(3)] for _ in range(5)]
        self._gaps: list[list[tuple[int, list[int], int]]] = [[] for _ in range(5)]
        for command, scope, following, cycles in gaps(dram):
            self._gaps[command].append((scope, self._earliest[following][min(scope, _RANK)], cycles))
        self._bus_cycles = {ACTIVATE: dram.act_cycles, READ: dram.read_cycles}
        self.read_to_data = dram.cl + dram.burst
        self.open_rows: list[int | None] = [None] * len(banks)
        self.recent_acts = [deque([LONG_AGO] * 4, maxlen=4) for _ in ranks]
        self.bus_free = LONG_AGO  # command bus
        self.data_clock_until = LONG_AGO  # LPDDR5: the data clock is in sync before this cycle
        self.activations = 0

    def ready(self, command: int, bank: int) -> int:
        """The earliest cycle for this command, the bus aside."""
        by_bank, by_group, by_rank = self._earliest[command]
        (_,), (group,), (rank,), _ = self._places[bank]
        return max(by_bank[bank], by_group[group], by_rank[rank])

    def issue(self, command: int, bank: int, now: int, row: int | None = None) -> None:
        """row: that an activate opens."""
        places, rank, dram = self._places[bank], self.rank_of[bank], self.dram
        for scope, earliest, cycles in self._gaps[command]:
            for place in places[scope]:
                earliest[place] = max(earliest[place], now + cycles)
        self.bus_free = now + self._bus_cycles.get(command, 1)
        if command == READ:
            self.data_clock_until = now + self.read_to_data + dram.wck_sync
        elif command == ACTIVATE:
            self.recent_acts[rank].append(now)
            acts = self._earliest[ACTIVATE][_RANK]
            acts[rank] = max(acts[rank], self.recent_acts[rank][0] + dram.faw)
            self.activations += 1
        if command in (ACTIVATE, PRECHARGE):
            self.open_rows[bank] = row
        elif command == PRECHARGE_ALL:
            self.open_rows[bank : bank + dram.banks] = [None] * dram.banks


class Controller:
    """Serves lines [0, end) on a channel with every row closed."""

    def __init__(self, dram: DramSpec, end: int, *, to_refresh: int = 0, start: int = 0) -> None:
        """Cycles until the next refresh falls due, and until the scheduler sees the first line."""
        self.dram = dram
        self.channel = Channel(dram)
        self.end = end
        self.now = 0
        self.start = start
        self.offered = 0
        self.queue: dict[int, dict[int, deque[int]]] = {}  # bank -> row -> positions, oldest first
        self.queued = 0
        self.active: dict[int, int] = {}  # bank -> position of the request its row was opened for
        self.second_activate_by = _FOREVER  # the last cycle for the other half of an activate; _FOREVER = none is open
        self.returns: deque[int] = deque()  # cycles at which lines in flight have returned
        self.last_return = 0
        self.next_refresh = _FOREVER if dram.refresh == "off" else to_refresh
        self.refresh_due: deque[int] = deque()  # ranks
        self.refreshes = 0

    def run(self) -> int:
        """Cycles from the first in which the scheduler saw a line until the last one has returned."""
        while self.queued or self.active or self.offered < self.end:
            self._step()
        return self.last_return - self.start

    def _refill(self) -> None:
        if self.now < self.start:
            return
        room = min(self.dram.queue_entries - self.queued, self.end - self.offered)
        if self.dram.outstanding:
            while self.returns and self.returns[0] < self.now:
                self.returns.popleft()
            room = min(room, self.dram.outstanding - self.queued - len(self.active) - len(self.returns))
        for _ in range(room):
            bank, row = self.dram.place(self.offered)
            self.queue.setdefault(bank, {}).setdefault(row, deque()).append(self.offered)
            self.queued += 1
            self.offered += 1

    def _step(self) -> None:
        """Issue the next command, or move to the moment at which a refresh falls due or lines return."""
        self.now = max(self.now, self.channel.bus_free)
        self._refill()
        while self.next_refresh <= self.now:
            self.refresh_due.extend(range(self.dram.ranks))
            self.next_refresh += self.dram.refi
        at, _, number, command, bank = min(self._possible(), default=(_FOREVER, 0, 0, READ, 0))
        if self.second_activate_by != _FOREVER and (at > self.now or self.second_activate_by <= self.now):
            self._activate_second()
            return
        wake = self.next_refresh if self.now >= self.start else min(self.next_refresh, self.start)
        if self.dram.outstanding and self.returns:
            wake = min(wake, self.returns[0] + 1)
        if wake <= at:
            self.now = wake
            return
        self.now = at
        if command == READ:
            if self._read(bank) and self.active.pop(bank, None) is None:
                self._take(number)
        elif command == ACTIVATE:
            self.active[bank] = number
            self.channel.issue(ACTIVATE, bank, at, self._take(number))
            if self.dram.aad:
                self.second_activate_by = at + self.dram.aad
        else:
            self.channel.issue(command, bank, at)
            if command == REFRESH:
                self.refresh_due.popleft()
                self.refreshes += 1

    def _possible(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(cycle, turn among those of one cycle, request, command, bank) of each command that may come next."""
        channel, now = self.channel, self.now
        for bank, number in self.active.items():
            yield max(now, channel.ready(READ, bank)), 0, number, READ, bank
        if self.refresh_due:
            rank = self.refresh_due[0]
            first = rank * self.dram.banks
            if all(row is None for row in channel.open_rows[first : first + self.dram.banks]):
                yield max(now, channel.ready(REFRESH, first)), 1, 0, REFRESH, first
            elif not any(channel.rank_of[bank] == rank for bank in self.active):  # else after these reads
                yield max(now, channel.ready(PRECHARGE_ALL, first)), 1, 0, PRECHARGE_ALL, first
            return
        for bank, rows in self.queue.items():
            open_row = channel.open_rows[bank]
            for row, numbers in rows.items():
                command = READ if row == open_row else ACTIVATE if open_row is None else PRECHARGE
                if command == ACTIVATE and self.second_activate_by != _FOREVER:
                    continue
                if command == PRECHARGE and bank in self.active:
                    continue
                yield max(now, channel.ready(command, bank)), 2, numbers[0], command, bank

    def _activate_second(self) -> None:
        self.channel.bus_free = self.now + 1
        self.second_activate_by = _FOREVER

    def _take(self, number: int) -> int:
        """Take the oldest request for its row out of the queue; which row that is."""
        bank, row = self.dram.place(number)
        rows = self.queue[bank]
        rows[row].popleft()
        if not rows[row]:
            del rows[row]
            if not rows:
                del self.queue[bank]
        self.queued -= 1
        return row

    def _read(self, bank: int) -> bool:
        """Read a line. A stopped data clock starts in this cycle, and the read follows in the next. False if even that
        must wait for the second half of an activate."""
        channel = self.channel
        if self.dram.wck_sync and self.now >= channel.data_clock_until:
            if self.second_activate_by <= self.now + 1:
                self._activate_second()
                return False
            self.now += 1
        channel.issue(READ, bank, self.now)
        self.last_return = self.now + channel.read_to_data
        if self.dram.outstanding:
            self.returns.append(self.last_return)
        return True
