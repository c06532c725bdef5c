"""A DRAM controller that is slow and obviously right: it looks at every cycle and checks every rule against the past.

The rules are written down as pairs (earlier command, later command, where, gap), as the standards print them. Used
only to test ndp_device/timing/dram_controller.py, with which it shares no code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ndp_device.timing.spec import DramSpec

Where = Callable[["ByCycle", int, int], bool]
NEVER = -(10**9)


def same_bank(_: ByCycle, a: int, b: int) -> bool:
    return a == b


def same_group(model: ByCycle, a: int, b: int) -> bool:
    return a // model.dram.banks_per_group == b // model.dram.banks_per_group


def same_rank(model: ByCycle, a: int, b: int) -> bool:
    return a // model.dram.banks == b // model.dram.banks


def other_rank(model: ByCycle, a: int, b: int) -> bool:
    return not same_rank(model, a, b)


def rules(dram: DramSpec) -> list[tuple[str, str, Where, int]]:
    """Gaps between the cycles in which two commands act. PREab and REFab are noted at the first bank of their rank."""
    return [
        ("ACT", "RD", same_bank, dram.rcd),
        ("ACT", "PRE", same_bank, dram.ras),
        ("ACT", "PREab", same_rank, dram.ras),
        ("ACT", "ACT", same_bank, dram.rc),
        ("ACT", "ACT", same_group, dram.rrd_l),
        ("ACT", "ACT", same_rank, dram.rrd_s),
        ("ACT", "REFab", same_rank, dram.rc),
        ("ACT", "REFpb", same_bank, dram.rc),
        ("RD", "RD", same_group, dram.ccd_l),
        ("RD", "RD", same_rank, dram.ccd_s),
        ("RD", "RD", other_rank, dram.burst + dram.rank_switch),
        ("RD", "PRE", same_bank, dram.rtp),
        ("RD", "PREab", same_rank, dram.rtp),
        ("PRE", "ACT", same_bank, dram.rp),
        ("PRE", "REFab", same_rank, dram.rp),
        ("PRE", "REFpb", same_bank, dram.rp),
        ("PREab", "ACT", same_rank, dram.rp_ab),
        ("PREab", "REFab", same_rank, dram.rp),
        *((one, two, same_rank, dram.ppd) for one in ("PRE", "PREab") for two in ("PRE", "PREab")),
        ("REFab", "ACT", same_rank, dram.rfc),
        ("REFpb", "ACT", same_bank, dram.rfc_pb),
        ("REFpb", "ACT", same_rank, dram.pbr_to_act),
        ("REFpb", "REFpb", same_rank, dram.pbr_to_pbr),
    ]


@dataclass
class Request:
    bank: int
    row: int


@dataclass
class ByCycle:
    """Serves `lines` offered at cycle 0 and returns the cycle at which the last data has returned."""

    dram: DramSpec
    lines: list[tuple[int, int]]
    to_refresh: int
    lines_in_flight: int = 0
    row_of: dict[int, int] = field(default_factory=dict)
    last: dict[tuple[str, int], int] = field(default_factory=dict)  # (command, bank) -> cycle
    acts: list[tuple[int, int]] = field(default_factory=list)  # (cycle, bank)
    bus_busy_until: int = 0
    synced_until: int = NEVER
    half_open: int | None = None  # the cycle of an ACT-1 whose ACT-2 has not been sent
    clocked: Request | None = None  # the data clock was started for it in the cycle before

    def run(self) -> int:
        dram = self.dram
        constraints: dict[str, dict[str, list[tuple[Where, int]]]] = {}
        for earlier, later, where, gap in rules(dram):
            constraints.setdefault(later, {}).setdefault(earlier, []).append((where, gap))
        waiting, queue, active, returns = list(self.lines), [], [], []
        refreshes: list[int] = []
        turn, cycle, last_return = 0, -1, 0
        while waiting or queue or active or self.clocked:
            cycle += 1
            if dram.refresh != "off" and cycle >= self.to_refresh:
                period = dram.refi_pb if dram.refresh == "per-bank" else dram.refi
                self.to_refresh += period
                if dram.refresh == "all-bank":
                    refreshes += [rank * dram.banks for rank in range(dram.ranks)]
                else:
                    refreshes.append(turn % (dram.ranks * dram.banks))
                    turn += 1
            while waiting and len(queue) < dram.queue_entries:
                in_flight = len(queue) + len(active) + bool(self.clocked) + sum(1 for back in returns if back >= cycle)
                if self.lines_in_flight and in_flight >= self.lines_in_flight:
                    break
                queue.append(Request(*waiting.pop(0)))
            if cycle < self.bus_busy_until:
                continue
            if self.clocked:
                done, self.clocked = self.clocked, None
                self.issue("RD", done.bank, cycle, dram.read_cycles)
                last_return = self.data_back(cycle)
                returns.append(last_return)
                continue
            if self.half_open is not None and cycle == self.half_open + dram.aad:
                self.second_activate(cycle)
                continue

            def may(command: str, bank: int, now: int = cycle) -> bool:
                return self.legal(constraints[command], command, bank, now)

            chosen = next((r for r in active if may("RD", r.bank)), None)
            if chosen:
                if self.read(chosen, cycle):
                    active.remove(chosen)
                    if not self.clocked:
                        last_return = self.data_back(cycle)
                        returns.append(last_return)
                continue
            if refreshes:
                self.refresh(refreshes, active, cycle, may)
                if self.half_open is not None and cycle >= self.bus_busy_until:
                    self.second_activate(cycle)
                continue
            for request in queue:
                row = self.row_of.get(request.bank)
                if row == request.row and may("RD", request.bank):
                    if self.read(request, cycle):
                        queue.remove(request)
                        if not self.clocked:
                            last_return = self.data_back(cycle)
                            returns.append(last_return)
                    break
                if row is None and self.half_open is None and may("ACT", request.bank):
                    self.issue("ACT", request.bank, cycle, dram.act_cycles)
                    self.half_open = cycle if dram.aad else None
                    self.acts.append((cycle, request.bank))
                    self.row_of[request.bank] = request.row
                    queue.remove(request)
                    active.append(request)
                    break
                opened = any(r.bank == request.bank for r in active)
                if row not in (None, request.row) and not opened and may("PRE", request.bank):
                    self.issue("PRE", request.bank, cycle, 1)
                    del self.row_of[request.bank]
                    break
            if self.half_open is not None and cycle >= self.bus_busy_until:
                self.second_activate(cycle)
        return last_return

    def refresh(self, due: list[int], active: list[Request], cycle: int, may: Callable[[str, int], bool]) -> None:
        dram, target = self.dram, due[0]
        per_bank = dram.refresh == "per-bank"
        covered = {target} if per_bank else set(range(target, target + dram.banks))
        if covered & self.row_of.keys():
            close = "PRE" if per_bank else "PREab"
            if not any(r.bank in covered for r in active) and may(close, target):
                self.issue(close, target, cycle, 1)
                for bank in covered:
                    self.row_of.pop(bank, None)
            return
        command = "REFpb" if per_bank else "REFab"
        if may(command, target):
            self.issue(command, target, cycle, 1)
            due.pop(0)

    def read(self, request: Request, cycle: int) -> bool:
        """Whether the request is served: in this cycle, or in the next where the data clock must be started first."""
        if self.dram.wck_sync and cycle >= self.synced_until:
            if self.half_open is not None and cycle + 1 >= self.half_open + self.dram.aad:
                self.second_activate(cycle)
                return False
            self.bus_busy_until = cycle + 1
            self.clocked = request
            return True
        self.issue("RD", request.bank, cycle, self.dram.read_cycles)
        return True

    def data_back(self, cycle: int) -> int:
        """The cycle at which a line read in `cycle` has returned; the data clock runs on for a while."""
        back = cycle + self.dram.cl + self.dram.burst
        self.synced_until = back + self.dram.wck_sync
        return back

    def second_activate(self, cycle: int) -> None:
        self.half_open = None
        self.bus_busy_until = cycle + 1

    def issue(self, command: str, bank: int, cycle: int, bus_cycles: int) -> None:
        self.last[command, bank] = cycle
        self.bus_busy_until = cycle + bus_cycles

    def legal(self, constraints: dict[str, list[tuple[Where, int]]], command: str, bank: int, cycle: int) -> bool:
        late = {"ACT": self.dram.act_cycles - 1, "RD": self.dram.read_cycles - 1}
        acting = cycle + late.get(command, 0)
        for (earlier, at), when in self.last.items():
            acted = when + late.get(earlier, 0)
            for where, gap in constraints.get(earlier, ()):
                if acting < acted + gap and where(self, at, bank):
                    return False
        if command == "ACT":
            recent = [when for when, at in self.acts[-64:] if same_rank(self, at, bank)]
            return len(recent) < 4 or cycle >= recent[-4] + self.dram.faw
        return True
