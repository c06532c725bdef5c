"""Energy of moved data, by part, from the constants of one hardware. Neither arithmetic nor idle power is in it.

- link: bits on the wire, headers and flit overhead included
- dram: accesses of 32 B and row openings of the device's or the host's DRAM
- arrays: scratchpads of the device: each weight is written to and read from them once
- gpu: bits read from or written to HBM
"""

from __future__ import annotations

from typing import NamedTuple

from ndp_device.timing.spec import EnergySpec
from ndp_device.timing.units import ceil_div

PARTS = ("link", "dram", "arrays", "gpu")


class CommandEnergy(NamedTuple):
    """Energy of one command on the link and on the device, in femtojoules."""

    link_fj: int
    dram_fj: int
    arrays_fj: int

    @classmethod
    def of(cls, energy: EnergySpec, *, wire_bytes: int, weight_bytes: int, row_activations: int) -> CommandEnergy:
        lines = ceil_div(weight_bytes, 32)
        return cls(
            8 * wire_bytes * energy.link_bit_fj,
            lines * energy.dram_line32_fj + row_activations * energy.activate_fj,
            lines * 2 * energy.scratchpad_access_fj,
        )

    @property
    def total_fj(self) -> int:
        return self.link_fj + self.dram_fj + self.arrays_fj
