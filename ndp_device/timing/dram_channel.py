"""The timing state of one DRAM channel: which command may be issued when, by the standard's parameters.

    ACT -> tRCD -> RD -> tCL + burst -> data;  RD -> tRTP -> PRE -> tRP -> ACT;  all rows closed -> REF -> tRFC -> ACT

Knows one channel and no requests; dram_controller.py decides what to issue. Time is in cycles of the DRAM clock. Every
array is named after a command, and holds the earliest cycle at which that command may be issued.
"""

from __future__ import annotations

from collections import deque

from ndp_device.timing.spec import DramSpec

LONG_AGO = -(1 << 60)


class Channel:
    """Banks are counted over all ranks; a bank's open row is None when it is closed."""

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
        self.bank_refresh_to_act = dram.rfc_pb - late_act
        self.bank_refresh_to_other_act = dram.pbr_to_act - late_act
        self.read_to_data = dram.cl + dram.burst

        self.open_rows: list[int | None] = [None] * banks
        self.bank_act = [LONG_AGO] * banks
        self.bank_read = [LONG_AGO] * banks
        self.bank_pre = [LONG_AGO] * banks
        self.bank_refresh = [LONG_AGO] * banks
        self.group_act = [LONG_AGO] * groups
        self.group_read = [LONG_AGO] * groups
        self.rank_act = [LONG_AGO] * dram.ranks
        self.rank_read = [LONG_AGO] * dram.ranks
        self.rank_pre = [LONG_AGO] * dram.ranks
        self.rank_pre_all = [LONG_AGO] * dram.ranks
        self.rank_refresh = [LONG_AGO] * dram.ranks
        self.rank_bank_refresh = [LONG_AGO] * dram.ranks
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
        self.bank_refresh[bank] = max(self.bank_refresh[bank], now + self.act_to_refresh)
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
        self.bank_refresh[bank] = max(self.bank_refresh[bank], now + self.dram.rp)
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

    def refresh_bank(self, bank: int, now: int) -> None:
        rank = self.rank_of[bank]
        self.bank_act[bank] = max(self.bank_act[bank], now + self.bank_refresh_to_act)
        self.rank_act[rank] = max(self.rank_act[rank], now + self.bank_refresh_to_other_act)
        self.rank_bank_refresh[rank] = now + self.dram.pbr_to_pbr
        self.bus_free = now + 1

    def banks_of(self, rank: int) -> range:
        return range(rank * self.dram.banks, (rank + 1) * self.dram.banks)

    def all_closed(self, rank: int) -> bool:
        return all(self.open_rows[bank] is None for bank in self.banks_of(rank))

    def signature(self, now: int) -> tuple[object, ...]:
        """Equal signatures at two moments: from then on, equal requests are served in equal time."""
        times = (
            *(self.bank_act + self.bank_read + self.bank_pre + self.bank_refresh + self.group_act + self.group_read),
            *(self.rank_act + self.rank_read + self.rank_pre + self.rank_pre_all + self.rank_refresh),
            *self.rank_bank_refresh,
            *(act + self.dram.faw for acts in self.recent_acts for act in acts),
            self.bus_free,
            self.data_clock_until,
        )
        return (tuple(time - now if time > now else 0 for time in times), tuple(self.open_rows))
