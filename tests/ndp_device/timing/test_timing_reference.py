"""The command-level controller against cycles taken from Ramulator 2.1 (commit c5b1c3a), one channel, to the cycle.

tests/data/dram-cycles.csv: `lines` in all were offered as fast as a 32-entry queue takes them, the scheduler saw the
first in cycle `start_cycle` after a refresh fell due on a device idle before; `cycles` is the time from the cycle of
the offer to the last data returned. Numbers only: the simulator itself is no part of this repository.
"""

from __future__ import annotations

import csv
from typing import Any

import pytest
from paths import DATA

from ndp_device.timing.dram_controller import Controller, Idle
from ndp_device.timing.dram_map import ConcurrentStreams, StreamMap
from ndp_device.timing.spec import density_overrides, load_hardware

TABLE = DATA / "dram-cycles.csv"
ROWS = list(csv.DictReader(TABLE.open()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_the_controller_takes_the_cycles_of_the_public_simulator(row: dict[str, str]) -> None:
    options: dict[str, Any] = {
        **density_overrides(row["preset"], int(row["density_gbit"])),
        "dram.refresh": row["refresh"],
        "dram.bank_group_interleave": row["bank_group_interleave"],
        "dram.outstanding": row["outstanding"],
    }
    dram = load_hardware(row["preset"], **options).dram
    end, streams = int(row["lines"]), int(row["streams"])
    lines = StreamMap(dram) if streams == 1 else ConcurrentStreams(dram, streams, row["placement"], end // streams)
    served = Controller(dram, lines, Idle(0, start=int(row["start_cycle"])), end, dram.outstanding).run()
    assert served.cycles + 1 == int(row["cycles"])  # the scheduler sees a line in the cycle after the offer
