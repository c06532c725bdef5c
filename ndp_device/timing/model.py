"""How long the device would have taken for one command: (hardware, works in order, submit times) fix every number.

    launch -> link in -> queue -> [ DRAM read || arrays ] -> link out -> completion

Commands are served one after the other in order of arrival. Inside a command, weights stream from DRAM through double
buffers into the arrays: expert after expert, gate and up before down. Both link directions run beside the device.

One pass of the arrays holds `rows` tokens and `units x cols` output columns and takes one cycle per fp16 weight row. A
mode that splits its multipliers passes 16 / width narrow weights in the same cycle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ndp_device import _commands
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.dram import channel_lines, closed_form, stream
from ndp_device.timing.spec import ArraySpec, EnergySpec, Hardware, LinkSpec
from ndp_device.timing.work import FS_PER_PS, PS_PER_S, Timing, Work, ceil_div, cycles_ps, transfer_ps

_FP16_BITS = 16


def multiplier_bits(pe_mode: str, bits: int) -> int:
    """Width of the multipliers that a weight of `bits` bits occupies."""
    if pe_mode == "fp16_dequant":
        return _FP16_BITS
    if pe_mode == "int8":
        return 8 if bits <= 8 else _FP16_BITS
    if pe_mode == "bit_scalable_pow2":
        return 1 << (bits - 1).bit_length()
    return bits


def matrix_ps(array: ArraySpec, inputs: int, outputs: int, tokens: int, bits: int) -> tuple[int, int]:
    """`tokens` rows of `inputs` elements times a matrix [inputs, outputs] of `bits`-bit weights: how long in the
    arrays, and in the unit that unpacks weights for them."""
    if tokens == 0:
        return 0, 0
    passes = ceil_div(tokens, array.rows) * ceil_div(outputs, array.units * array.cols)
    depth = ceil_div(inputs * multiplier_bits(array.pe_mode, bits), _FP16_BITS)
    compute = passes * depth + array.fill_cycles
    dequant = 0
    if array.pe_mode == "fp16_dequant" and bits < _FP16_BITS:
        dequant = ceil_div(inputs * outputs, array.units * array.dequant_weights_per_cycle)
    return cycles_ps(compute, array.clock_hz), cycles_ps(dequant, array.clock_hz)


def swiglu_ps(array: ArraySpec, intermediate: int, tokens: int) -> int:
    return cycles_ps(ceil_div(intermediate * tokens, array.units * array.vector_lanes), array.clock_hz)


def weight_passes(array: ArraySpec, hidden: int, intermediate: int, tokens: int) -> int:
    """How often the weights are read: once per group of tokens whose activations fit half of the scratchpads."""
    token_bytes = 2 * (hidden + intermediate)
    fitting = max(array.units * array.scratchpad_bytes // 2 // token_bytes, 1)
    return ceil_div(tokens, fitting)


# -- the link: activations by CXL.mem or DMA, weights in bulk ----------------------------------------------------------


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


# -- a command ---------------------------------------------------------------------------------------------------------


class CommandEnergy(NamedTuple):
    """Energy of the data that one command moves, in femtojoules. Neither arithmetic nor idle power is in it."""

    link_fj: int  # bits on the wire, headers and flit overhead included
    dram_fj: int  # accesses of 32 B and row openings of the device's or the host's DRAM
    arrays_fj: int  # scratchpads of the device: each weight is written to and read from them once

    @classmethod
    def of(cls, energy: EnergySpec, *, wire_bytes: int, weight_bytes: int, row_activations: int) -> CommandEnergy:
        lines = ceil_div(weight_bytes, 32)
        return cls(
            8 * wire_bytes * energy.link_bit_fj,
            lines * energy.dram_line32_fj + row_activations * energy.activate_fj,
            lines * 2 * energy.scratchpad_access_fj,
        )


class _Bulk(NamedTuple):
    """A migration under way: until when, and which part of the DRAM's time it takes."""

    until_ps: int = 0
    dram_ps: int = 0
    total_ps: int = 1


class DeviceModel:
    """Simulated state of one device: when each resource is free again. Nothing else, and no clock."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        dram = closed_form(hardware.dram)
        array = hardware.array
        tile_bytes, buffer_bytes = array.tile_bytes * array.units, array.scratchpad_bytes // 2 * array.units
        self._native = _commands.Commands(dram, array.double_buffered, tile_bytes, buffer_bytes)
        refresh_fs = dram.refresh_interval * hardware.dram.tck_fs or FS_PER_PS
        self._repeats_ps = math.lcm(refresh_fs, FS_PER_PS) // FS_PER_PS  # whole refresh intervals
        self._hops = lru_cache(maxsize=4096)(self._new_hops)  # decoding has few sizes of messages
        self._macs_per_s = hardware.array.macs_per_s
        self._peak_bytes_per_s = hardware.dram.peak_bytes_per_s
        self._config_hash = hardware.config_hash
        self._link_in_free_ps = 0
        self._device_free_ps = 0
        self._link_out_free_ps = 0
        self._bulk = _Bulk()
        self._num_migrations = 0
        self._migration_ends: dict[int, int] = {}

    def execute(self, work: Work, submit_ps: int) -> Timing:
        """Serve one command submitted at absolute simulated time submit_ps; commands are served in call order."""
        array = self.hardware.array
        inbound, outbound, wire_num_bytes = self._hops(work.bytes_in, work.bytes_out)
        ready = submit_ps + inbound.launch_ps
        wire_start = max(ready, self._link_in_free_ps)
        arrived = wire_start + inbound.wire_ps + array.command_ps

        start = max(arrived, self._device_free_ps)
        end, dram_ps, refresh_stall, rows, compute, dequant, vector, weight_bytes, fp16_macs = self._run(work, start)
        self._link_in_free_ps = wire_start + inbound.serial_ps
        self._device_free_ps = end

        out_start = max(end + outbound.launch_ps, self._link_out_free_ps)
        self._link_out_free_ps = out_start + outbound.serial_ps
        if self._bulk.until_ps > out_start:
            self._pass_migrations(out_start, outbound.serial_ps)
        done = out_start + outbound.wire_ps + outbound.completion_ps

        queue = (wire_start - ready) + (start - arrived) + (out_start - end - outbound.launch_ps)
        launch = inbound.launch_ps + array.command_ps + outbound.launch_ps
        shares = {
            "link": launch + inbound.wire_ps + outbound.wire_ps + outbound.completion_ps,
            "queue": queue,
            "dram": dram_ps,
            "compute": max(compute, dequant) + vector,
        }
        span = end - start
        energy = CommandEnergy.of(
            self.hardware.energy, wire_bytes=wire_num_bytes, weight_bytes=weight_bytes, row_activations=rows
        )
        return Timing(
            submit_ps=submit_ps,
            start_ps=start,
            done_ps=done,
            launch_ps=launch,
            link_in_ps=inbound.wire_ps,
            queue_ps=queue,
            dram_ps=dram_ps,
            compute_ps=compute,
            dequant_ps=dequant,
            vector_ps=vector,
            overlap_saved_ps=dram_ps + compute + dequant + vector - span,
            link_out_ps=outbound.wire_ps,
            completion_ps=outbound.completion_ps,
            total_ps=done - submit_ps,
            bound=max(shares, key=shares.__getitem__),
            weight_bytes=weight_bytes,
            bytes_in=work.bytes_in,
            bytes_out=work.bytes_out,
            row_activations=rows,
            refresh_stall_ps=refresh_stall,
            array_utilisation=_ratio(fp16_macs * PS_PER_S, self._macs_per_s * span),
            dram_efficiency=_ratio(weight_bytes * PS_PER_S, self._peak_bytes_per_s * dram_ps),
            energy_pj=sum(energy) // 1000,
            pe_mode=array.pe_mode,
            config_hash=self._config_hash,
        )

    def begin_migration(self, num_bytes: int, submit_ps: int) -> int:
        """Weights leave for the GPU in bulk; returns the migration's number.

        The migration begins when everything submitted before it has left the device. Commands submitted later run
        beside the migration and read with the DRAM bandwidth that it leaves. Their activations pass it on the link,
        which moves its end.
        """
        number, self._num_migrations = self._num_migrations, self._num_migrations + 1
        self._migration_ends = {n: end for n, end in self._migration_ends.items() if end >= submit_ps}
        total_ps, dram_ps = migration_ps(self.hardware, num_bytes)
        start = max(submit_ps, self._bulk.until_ps, self._link_out_free_ps) if num_bytes else submit_ps
        self._migration_ends[number] = done = start + total_ps
        if num_bytes:
            self._bulk = _Bulk(done, min(dram_ps, total_ps - 1), total_ps)
        return number

    def migration_end_ps(self, number: int) -> int:
        """When the last byte of a migration arrives, unless a command submitted before then passes it.

        Not to be asked once something was submitted after that moment.
        """
        return self._migration_ends[number]

    def _pass_migrations(self, from_ps: int, serial_ps: int) -> None:
        """Results go out at from_ps: what is still to be sent of every migration waits for them."""
        for number, end in self._migration_ends.items():
            if end > from_ps:
                self._migration_ends[number] = end + serial_ps
        self._bulk = self._bulk._replace(until_ps=self._bulk.until_ps + serial_ps)

    def _run(self, work: Work, start_ps: int) -> tuple[int, ...]:
        """The experts of one command through DRAM and arrays, from start_ps on (csrc/commands.cpp).

        Counted from a moment at which DRAM and refresh stand as at 0, so that no time is too large for 64 bits.
        """
        native, bulk = self._native, self._bulk
        before = start_ps - start_ps % self._repeats_ps
        bits, tokens, dram_bytes = zip(*work.experts, strict=True) if work.experts else ((), (), ())
        sizes = (work.hidden_size, work.intermediate_size, bits, tokens, dram_bytes)
        times = (start_ps - before, max(bulk.until_ps - before, 0), bulk.dram_ps, bulk.total_ps)
        while isinstance(run := native.run(*sizes, *times), int):  # the place of an expert it has not seen
            size = (work.hidden_size, work.intermediate_size, *work.experts[run])
            native.add(size, *self._phases(*size))
        return before + run[0], *run[1:]

    def _new_hops(self, bytes_in: int, bytes_out: int) -> tuple[Hop, Hop, int]:
        """A message's way, that of its answer, and bytes of both on the wire."""
        link = self.hardware.link
        on_the_wire = wire_bytes(link, bytes_in) + wire_bytes(link, bytes_out)
        return hop_in(link, bytes_in), hop_out(link, bytes_out), on_the_wire

    def _phases(
        self, hidden: int, intermediate: int, bits: int, tokens: int, dram_bytes: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Gate and up, then down, of one expert for `tokens` rows: weight streams with nothing between their bytes.

        Of each: bytes, lines, time in the arrays and in the unpacking unit, time after it before the next may compute,
        and useful multiply-accumulates, each weighed by the part of an fp16 multiplier it occupies.
        """
        array, dram = self.hardware.array, self.hardware.dram
        num_bytes = dram_bytes * weight_passes(array, hidden, intermediate, tokens)
        down_bytes = num_bytes // 3
        lines = channel_lines(dram, num_bytes)
        down_lines = channel_lines(dram, down_bytes)
        gate_up = matrix_ps(array, hidden, 2 * intermediate, tokens, bits)
        down = matrix_ps(array, intermediate, hidden, tokens, bits)
        width = multiplier_bits(array.pe_mode, bits)
        macs = hidden * intermediate * tokens * width // FULL_PRECISION_BITS
        swiglu = swiglu_ps(array, intermediate, tokens)
        return (
            (num_bytes - down_bytes, lines - down_lines, *gate_up, swiglu, 2 * macs),
            (down_bytes, down_lines, *down, 0, macs),
        )


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0
