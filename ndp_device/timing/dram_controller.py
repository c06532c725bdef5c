"""The controller of one DRAM channel serving a stream of line reads, command by command: exact.

    one command a cycle:  read of a row just opened  >  refresh  >  oldest queued request whose next command is ready

First-ready first-come-first-served over a queue of queue_entries, open rows. A row opened for a request is not closed
before that request is read. A refresh that is due lets no queued request begin before it is issued. Where an activate
is two commands (LPDDR5), the second takes the first cycle that nothing else wants, and no other activate comes between.

Time jumps from command to command.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ndp_device.timing.spec import DramSpec

LONG_AGO = -(1 << 60)


class Channel:
    """The timing state of one channel: which command may be issued when, by the standard's parameters.

        ACT -> tRCD -> RD -> tCL + burst -> data;  RD -> tRTP -> PRE -> tRP -> ACT
        all rows closed -> REF -> tRFC -> ACT

    Every array is named after a command, and holds the earliest cycle at which that command may be issued. Banks are
    counted over all ranks; a bank's open row is None when it is closed.
    """

    def __init__(self, dram: DramSpec) -> None:
        self.dram = dram
        banks, groups = dram.ranks * dram.banks, dram.ranks * dram.bank_groups
        self.rank_of = [bank // dram.banks for bank in range(banks)]
        self.group_of = [bank // dram.banks_per_group for bank in range(banks)]
        # A command that takes two bus cycles acts in its second; the standard's gaps run from act to act.
        late_act, late_read = dram.act_cycles - 1, dram.read_cycles - 1
        self.act_to_read = dram.rcd + late_act - late_read
        self.act_to_pre = dram.ras + late_act
        self.act_to_refresh = dram.rc + late_act
        self.read_to_pre = dram.rtp + late_read
        self.pre_to_act = dram.rp - late_act
        self.pre_all_to_act = dram.rp_ab - late_act
        self.refresh_to_act = dram.rfc - late_act
        self.read_to_data = dram.cl + dram.burst

        self.open_rows: list[int | None] = [None] * banks
        self.bank_act = [LONG_AGO] * banks
        self.bank_read = [LONG_AGO] * banks
        self.bank_pre = [LONG_AGO] * banks
        self.group_act = [LONG_AGO] * groups
        self.group_read = [LONG_AGO] * groups
        self.rank_act = [LONG_AGO] * dram.ranks
        self.rank_read = [LONG_AGO] * dram.ranks
        self.rank_pre = [LONG_AGO] * dram.ranks
        self.rank_pre_all = [LONG_AGO] * dram.ranks
        self.rank_refresh = [LONG_AGO] * dram.ranks
        self.recent_acts = [deque([LONG_AGO] * 4, maxlen=4) for _ in range(dram.ranks)]
        self.bus_free = LONG_AGO  # command bus
        self.data_clock_until = LONG_AGO  # LPDDR5: the data clock is in sync before this cycle
        self.activations = 0

    def read(self, bank: int, now: int) -> None:
        dram = self.dram
        rank = self.rank_of[bank]
        for other in range(dram.ranks):
            gap = dram.ccd_s if other == rank else dram.burst + dram.rank_switch
            self.rank_read[other] = max(self.rank_read[other], now + gap)
        self.group_read[self.group_of[bank]] = now + dram.ccd_l
        close = now + self.read_to_pre
        if close > self.bank_pre[bank]:
            self.bank_pre[bank] = close
        if close > self.rank_pre_all[rank]:
            self.rank_pre_all[rank] = close
        self.data_clock_until = now + self.read_to_data + dram.wck_sync
        self.bus_free = now + dram.read_cycles

    def activate(self, bank: int, row: int, now: int) -> None:
        dram = self.dram
        rank = self.rank_of[bank]
        recent = self.recent_acts[rank]
        recent.append(now)
        self.open_rows[bank] = row
        self.bank_read[bank] = now + self.act_to_read
        self.bank_act[bank] = now + dram.rc
        self.bank_pre[bank] = now + self.act_to_pre
        self.group_act[self.group_of[bank]] = now + dram.rrd_l
        self.rank_act[rank] = max(self.rank_act[rank], now + dram.rrd_s, recent[0] + dram.faw)
        self.rank_pre_all[rank] = max(self.rank_pre_all[rank], now + self.act_to_pre)
        self.rank_refresh[rank] = max(self.rank_refresh[rank], now + self.act_to_refresh)
        self.activations += 1
        self.bus_free = now + dram.act_cycles

    def precharge(self, bank: int, now: int) -> None:
        rank = self.rank_of[bank]
        self.open_rows[bank] = None
        self.bank_act[bank] = max(self.bank_act[bank], now + self.pre_to_act)
        self._after_precharge(rank, now)

    def precharge_all(self, rank: int, now: int) -> None:
        for bank in self.banks_of(rank):
            self.open_rows[bank] = None
        self.rank_act[rank] = max(self.rank_act[rank], now + self.pre_all_to_act)
        self._after_precharge(rank, now)

    def _after_precharge(self, rank: int, now: int) -> None:
        ppd = now + self.dram.ppd
        self.rank_pre[rank] = max(self.rank_pre[rank], ppd)
        self.rank_pre_all[rank] = max(self.rank_pre_all[rank], ppd)
        self.rank_refresh[rank] = max(self.rank_refresh[rank], now + self.dram.rp)
        self.bus_free = now + 1

    def refresh_all(self, rank: int, now: int) -> None:
        self.rank_act[rank] = max(self.rank_act[rank], now + self.refresh_to_act)
        self.bus_free = now + 1

    def banks_of(self, rank: int) -> range:
        return range(rank * self.dram.banks, (rank + 1) * self.dram.banks)

    def all_closed(self, rank: int) -> bool:
        return all(self.open_rows[bank] is None for bank in self.banks_of(rank))


_FOREVER = 1 << 60
_READ, _ACTIVATE, _PRECHARGE = range(3)


@dataclass(frozen=True)
class StreamMap:
    """Bank and row of every line of one sequential stream from the beginning of a channel.

    Lowest bits first: bank group, column, bank, rank, row.
    """

    dram: DramSpec

    @property
    def row_span(self) -> int:
        """Lines of one row of every bank."""
        return self.dram.ranks * self.dram.banks * self.dram.lines_per_row

    def at(self, position: int) -> tuple[int, int]:
        dram = self.dram
        rest, group = divmod(position, dram.bank_groups)
        rest, bank = divmod(rest // dram.lines_per_row, dram.banks_per_group)
        row, rank = divmod(rest, dram.ranks)
        return (rank * dram.bank_groups + group) * dram.banks_per_group + bank, row


class Controller:
    """Serves lines [0, end) on a channel with every row closed."""

    def __init__(self, dram: DramSpec, lines: StreamMap, end: int, *, to_refresh: int = 0, start: int = 0) -> None:
        """Cycles until the next refresh falls due, and until the scheduler sees the first line."""
        self.dram = dram
        self.channel = Channel(dram)
        self.lines = lines
        self.end = end
        self.in_flight_limit = dram.outstanding
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

    # -- offering ------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        if self.now < self.start:
            return
        room = min(self.dram.queue_entries - self.queued, self.end - self.offered)
        if self.in_flight_limit:
            while self.returns and self.returns[0] < self.now:
                self.returns.popleft()
            room = min(room, self.in_flight_limit - self.queued - len(self.active) - len(self.returns))
        for _ in range(room):
            self._enqueue(self.offered)
            self.offered += 1

    def _enqueue(self, number: int) -> None:
        bank, row = self.lines.at(number)
        self.queue.setdefault(bank, {}).setdefault(row, deque()).append(number)
        self.queued += 1

    # -- one command ---------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Issue the next command, or move to the moment at which a refresh falls due or lines return."""
        self.now = max(self.now, self.channel.bus_free)
        self._refill()
        while self.next_refresh <= self.now:
            self._refresh_falls_due()
        active_at, active_bank = self._next_active()
        refresh_at = queue_at = _FOREVER
        if self.refresh_due:
            refresh_at = self._refresh_ready()
        else:
            queue_at, bank, row, kind = self._next_queued()
        at = min(active_at, refresh_at, queue_at)
        if self.second_activate_by != _FOREVER and (at > self.now or self.second_activate_by <= self.now):
            self._activate_second()
            return
        wake = self.next_refresh if self.now >= self.start else min(self.next_refresh, self.start)
        if self.in_flight_limit and self.returns:
            wake = min(wake, self.returns[0] + 1)
        if wake <= at:
            self.now = wake
            return
        self.now = at
        if active_at == at:
            if self._read(active_bank):
                del self.active[active_bank]
        elif refresh_at == at:
            self._advance_refresh()
        elif kind == _READ:
            if self._read(bank):
                self._take(bank, row)
        elif kind == _ACTIVATE:
            self.active[bank] = self._take(bank, row)
            self.channel.activate(bank, row, at)
            if self.dram.aad:
                self.second_activate_by = at + self.dram.aad
        else:
            self.channel.precharge(bank, at)

    def _activate_second(self) -> None:
        self.channel.bus_free = self.now + 1
        self.second_activate_by = _FOREVER

    def _next_active(self) -> tuple[int, int]:
        channel = self.channel
        best, oldest, chosen = _FOREVER, _FOREVER, -1
        for bank, number in self.active.items():
            ready = max(
                self.now,
                channel.bank_read[bank],
                channel.group_read[channel.group_of[bank]],
                channel.rank_read[channel.rank_of[bank]],
            )
            if ready < best or (ready == best and number < oldest):
                best, oldest, chosen = ready, number, bank
        return best, chosen

    def _next_queued(self) -> tuple[int, int, int, int]:
        """(cycle, bank, row, kind) of the earliest ready command; the oldest request among equals."""
        channel, now = self.channel, self.now
        may_activate = self.second_activate_by == _FOREVER
        best, oldest = _FOREVER, _FOREVER
        chosen = (-1, -1, _READ)
        for bank, rows in self.queue.items():
            open_row = channel.open_rows[bank]
            for row, numbers in rows.items():
                if row == open_row:
                    kind = _READ
                    ready = channel.bank_read[bank]
                    other = channel.group_read[channel.group_of[bank]]
                    last = channel.rank_read[channel.rank_of[bank]]
                elif open_row is None:
                    if not may_activate:
                        continue
                    kind = _ACTIVATE
                    ready = channel.bank_act[bank]
                    other = channel.group_act[channel.group_of[bank]]
                    last = channel.rank_act[channel.rank_of[bank]]
                elif bank in self.active:
                    continue
                else:
                    kind = _PRECHARGE
                    ready = channel.bank_pre[bank]
                    other = last = channel.rank_pre[channel.rank_of[bank]]
                if other > ready:
                    ready = other
                if last > ready:
                    ready = last
                if now > ready:
                    ready = now
                if ready < best or (ready == best and numbers[0] < oldest):
                    best, oldest, chosen = ready, numbers[0], (bank, row, kind)
        return (best, *chosen)

    def _take(self, bank: int, row: int) -> int:
        rows = self.queue[bank]
        number = rows[row].popleft()
        if not rows[row]:
            del rows[row]
            if not rows:
                del self.queue[bank]
        self.queued -= 1
        return number

    def _read(self, bank: int) -> bool:
        """Read a line. A stopped data clock starts in this cycle, and the read follows in the next. False if even that
        must wait for the second half of an activate."""
        channel = self.channel
        if self.dram.wck_sync and self.now >= channel.data_clock_until:
            if self.second_activate_by <= self.now + 1:
                self._activate_second()
                return False
            self.now += 1
        channel.read(bank, self.now)
        self.last_return = self.now + channel.read_to_data
        if self.in_flight_limit:
            self.returns.append(self.last_return)
        return True

    # -- refresh -------------------------------------------------------------------------------------------------

    def _refresh_falls_due(self) -> None:
        self.refresh_due.extend(range(self.dram.ranks))
        self.next_refresh += self.dram.refi

    def _refresh_ready(self) -> int:
        """When the next command towards the first refresh due may be issued."""
        channel, rank = self.channel, self.refresh_due[0]
        if channel.all_closed(rank):
            return max(self.now, channel.rank_refresh[rank])
        if any(channel.rank_of[bank] == rank for bank in self.active):
            return _FOREVER  # after the read, which is an event of its own
        return max(self.now, channel.rank_pre_all[rank])

    def _advance_refresh(self) -> None:
        channel, rank = self.channel, self.refresh_due[0]
        if not channel.all_closed(rank):
            channel.precharge_all(rank, self.now)
            return
        channel.refresh_all(rank, self.now)
        self.refresh_due.popleft()
        self.refreshes += 1
