"""How long full-precision weights take from the device's DRAM to the GPU: read and sent at the same time. Stateless."""

from __future__ import annotations

from dataclasses import dataclass

from ndp_device.timing.dram import channel_lines, stream
from ndp_device.timing.link import bulk_ps
from ndp_device.timing.spec import Hardware


@dataclass(frozen=True)
class Migration:
    num_bytes: int
    dram_ps: int  # the DRAM is busy for this long, somewhere within total_ps
    link_ps: int  # the outbound direction is busy for this long
    total_ps: int


def migration(hardware: Hardware, num_bytes: int) -> Migration:
    """DRAM and link work side by side, the slower one counts; the first stripe must be read before any is sent."""
    dram, link = hardware.dram, hardware.link
    if num_bytes == 0:
        return Migration(0, 0, 0, 0)
    dram_ps = stream(dram, channel_lines(dram, num_bytes), 0).total_ps
    first_ps = stream(dram, channel_lines(dram, min(num_bytes, dram.stripe_bytes)), 0).total_ps
    link_ps = bulk_ps(link, num_bytes)
    return Migration(num_bytes, dram_ps, link_ps, max(dram_ps + link.dma_launch_ps, first_ps + link_ps))
