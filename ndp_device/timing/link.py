"""How long bytes take between host and device: activations by CXL.mem or DMA, weights in bulk. Stateless arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from ndp_device.timing.dram import channel_lines, stream
from ndp_device.timing.spec import Hardware, LinkSpec
from ndp_device.timing.work import ceil_div, transfer_ps


@dataclass(frozen=True)
class Hop:
    """One direction of one message: launch before the wire, wire, and seeing that it arrived."""

    launch_ps: int
    wire_ps: int  # latency and serialisation
    serial_ps: int  # the part of wire_ps that keeps the direction busy
    completion_ps: int


def wire_bytes(link: LinkSpec, num_bytes: int) -> int:
    """Bytes on the wire for a payload, headers and flit overhead included."""
    if link.launch == "cxlmem":
        return ceil_div(num_bytes, link.cxl_line_bytes) * link.cxl_line_wire_bytes
    return num_bytes + ceil_div(num_bytes, link.packet_payload_bytes) * link.packet_header_bytes


def hop_in(link: LinkSpec, num_bytes: int) -> Hop:
    """Host to device: a posted write travels half of load-to-use; a DMA copy is launched first."""
    serial = transfer_ps(wire_bytes(link, num_bytes), link.raw_bytes_per_s)
    if link.launch == "cxlmem":
        return Hop(0, link.load_to_use_ps // 2 + serial, serial, 0)
    return Hop(link.dma_launch_ps, link.dma_latency_ps + serial, serial, 0)


def hop_out(link: LinkSpec, num_bytes: int) -> Hop:
    """Device to host: the host's CXL.mem read pays load-to-use; a DMA copy is launched and polled."""
    serial = transfer_ps(wire_bytes(link, num_bytes), link.raw_bytes_per_s)
    if link.launch == "cxlmem":
        return Hop(0, link.load_to_use_ps + serial, serial, 0)
    return Hop(link.dma_launch_ps, link.dma_latency_ps + serial, serial, link.completion_ps)


def bulk_ps(link: LinkSpec, num_bytes: int) -> int:
    """Weights by DMA: one launch, one latency, then the rate long copies reach."""
    if num_bytes == 0:
        return 0
    return link.dma_launch_ps + link.dma_latency_ps + transfer_ps(num_bytes, link.bulk_bytes_per_s)


def migration_ps(hardware: Hardware, num_bytes: int) -> tuple[int, int]:
    """How long full-precision weights take from the device's DRAM to the GPU, and how long of it the DRAM is busy.

    DRAM and link work side by side, the slower one counts; the first stripe must be read before any is sent.
    """
    dram, link = hardware.dram, hardware.link
    if num_bytes == 0:
        return 0, 0
    dram_ps = stream(dram, channel_lines(dram, num_bytes), 0).total_ps
    first_ps = stream(dram, channel_lines(dram, min(num_bytes, dram.stripe_bytes)), 0).total_ps
    return max(dram_ps + link.dma_launch_ps, first_ps + bulk_ps(link, num_bytes)), dram_ps
