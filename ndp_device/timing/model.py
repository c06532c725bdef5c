"""How long the device would have taken for one command: (hardware, works in order, submit times) fix every number.

    launch -> link in -> queue -> [ DRAM read || arrays ] -> link out -> completion

Commands are served one after the other in order of arrival. Inside one, weights stream from DRAM through double
buffers into the arrays, expert after expert, gate and up before down; both link directions run beside the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ndp_device.timing import arrays
from ndp_device.timing.dram import Stream, Streams, channel_lines
from ndp_device.timing.link import Hop, hop_in, hop_out, wire_bytes
from ndp_device.timing.migration import migration
from ndp_device.timing.spec import ArraySpec, Hardware
from ndp_device.timing.units import PS_PER_S, ceil_div
from ndp_device.timing.work import Timing, Work
from ndp_device.widths import FULL_PRECISION_BITS

_NOTHING = Stream(0, 0, 0)


class _Phase(NamedTuple):
    """One weight stream with nothing between its bytes: gate and up of an expert, or its down projection."""

    num_bytes: int
    lines: int
    compute_ps: int
    dequant_ps: int
    vector_ps: int  # after the phase, before the next may compute
    fp16_macs: int  # useful multiply-accumulates, each weighed by the part of an fp16 multiplier it occupies
    array_ps: int  # the unpacking unit feeds the arrays: the slower one counts
    tile_bytes: int  # of it, handed over to the arrays at a time
    beyond_bytes: int  # of it, that cannot lie ahead of the arrays
    tile_ps: int  # of array_ps, for a tile
    buffer_ps: int  # of array_ps, for what may lie ahead

    @classmethod
    def of(
        cls, array: ArraySpec, num_bytes: int, lines: int, time: arrays.MatrixTime, vector_ps: int, fp16_macs: int
    ) -> _Phase:
        tile = min(array.tile_bytes * array.units, num_bytes)
        buffer = min(array.scratchpad_bytes // 2 * array.units, num_bytes)
        return cls(
            num_bytes,
            lines,
            time.compute_ps,
            time.dequant_ps,
            vector_ps,
            fp16_macs,
            time.ps,
            tile,
            num_bytes - buffer,
            _share_ps(time.ps, tile, num_bytes),
            _share_ps(time.ps, buffer, num_bytes),
        )


@dataclass(frozen=True)
class _Command:
    """What one Work takes whenever it is submitted."""

    phases: tuple[_Phase, ...]
    inbound: Hop
    outbound: Hop
    compute_ps: int
    dequant_ps: int
    vector_ps: int
    weight_bytes: int
    fp16_macs: int
    femtojoule: int  # without the rows that are opened


@dataclass(frozen=True)
class _Bulk:
    """A migration under way: until when, and which part of the DRAM's time it takes."""

    until_ps: int = 0
    dram_ps: int = 0
    total_ps: int = 1

    def delay_ps(self, start_ps: int, read_ps: int) -> int:
        """How much longer a read of read_ps takes beside it: the DRAM serves both in turn."""
        beside = min(max(self.until_ps - start_ps, 0), read_ps)
        return ceil_div(beside * self.dram_ps, self.total_ps - self.dram_ps) if beside else 0


@dataclass
class _Pipeline:
    """DRAM and arrays of one command as they advance; times are absolute."""

    array: ArraySpec
    streams: Streams
    bulk: _Bulk  # the migration that shares the DRAM
    stream_start_ps: int  # of the DRAM stream now running
    stream_lines: int = 0  # read since then
    dram_free_ps: int = 0
    array_free_ps: int = 0
    dram_ps: int = 0  # time the DRAM was reading
    refresh_stall_ps: int = 0
    row_activations: int = 0
    _running: Stream = _NOTHING  # what was read since stream_start_ps

    def read_end_ps(self, lines: int) -> int:
        """When `lines` more lines of the running stream are complete."""
        self.stream_lines += lines
        self._running = self.streams.read(self.stream_lines, self.stream_start_ps)
        start, read = self.stream_start_ps, self._running.total_ps
        return start + read + (self.bulk.delay_ps(start, read) if self.bulk.until_ps > start else 0)

    def run(self, phase: _Phase) -> None:
        end = self.read_end_ps(phase.lines)
        dram_free, array_free = self.dram_free_ps, self.array_free_ps
        read_ps = end - dram_free
        self.dram_ps += read_ps
        if not self.array.double_buffered:
            array_end = end + phase.array_ps + phase.vector_ps
            self._restart_dram(array_end)
            self.array_free_ps = array_end
            return
        first_tile = dram_free + _share_ps(read_ps, phase.tile_bytes, phase.num_bytes)
        # a buffer full of weights at most may lie ahead of the arrays
        beyond = array_free + _share_ps(read_ps, phase.beyond_bytes, phase.num_bytes)
        read = end if end > beyond else beyond
        begin = array_free if array_free > first_tile else first_tile
        array_end = max(begin + phase.array_ps, read + phase.tile_ps)
        free = max(read, array_end - phase.buffer_ps)
        if free > end:
            self._restart_dram(free)
        else:
            self.dram_free_ps = free
        self.array_free_ps = array_end + phase.vector_ps

    def _restart_dram(self, at_ps: int) -> None:
        self._account()
        self.stream_start_ps, self.stream_lines, self.dram_free_ps = at_ps, 0, at_ps

    def _account(self) -> None:
        self.refresh_stall_ps += self._running.refresh_stall_ps
        self.row_activations += self._running.activations
        self._running = _NOTHING

    def finish(self) -> int:
        self._account()
        return max(self.array_free_ps, self.dram_free_ps)


class DeviceModel:
    """Simulated state of one device: when each resource is free again. Nothing else, and no clock."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._streams = Streams(hardware.dram)
        self._phases = lru_cache(maxsize=4096)(self._new_phases)  # a model has few sizes of experts,
        self._commands = lru_cache(maxsize=4096)(self._new_command)  # and decoding few sizes of commands
        self._macs_per_s = hardware.array.macs_per_s
        self._peak_bytes_per_s = hardware.dram.peak_bytes_per_s
        self._config_hash = hardware.config_hash
        self._link_in_free_ps = 0
        self._device_free_ps = 0
        self._link_out_free_ps = 0
        self._bulk = _Bulk()

    def execute(self, work: Work, submit_ps: int) -> Timing:
        """Serve one command submitted at absolute simulated time submit_ps; commands are served in call order."""
        hardware = self.hardware
        command = self._commands(
            work.hidden_size,
            work.intermediate_size,
            work.bytes_in,
            work.bytes_out,
            tuple([(expert.bits, expert.tokens, expert.dram_bytes) for expert in work.experts]),
        )
        inbound, outbound = command.inbound, command.outbound
        ready = submit_ps + inbound.launch_ps
        wire_start = max(ready, self._link_in_free_ps)
        self._link_in_free_ps = wire_start + inbound.serial_ps
        arrived = wire_start + inbound.wire_ps + hardware.array.command_ps

        start = max(arrived, self._device_free_ps)
        pipeline = _Pipeline(hardware.array, self._streams, self._bulk, start, dram_free_ps=start, array_free_ps=start)
        for phase in command.phases:
            pipeline.run(phase)
        end = pipeline.finish()
        self._device_free_ps = end

        out_start = max(end + outbound.launch_ps, self._link_out_free_ps)
        self._link_out_free_ps = out_start + outbound.serial_ps
        done = out_start + outbound.wire_ps + outbound.completion_ps

        compute, dequant, vector = command.compute_ps, command.dequant_ps, command.vector_ps
        queue = (wire_start - ready) + (start - arrived) + (out_start - end - outbound.launch_ps)
        launch = inbound.launch_ps + hardware.array.command_ps + outbound.launch_ps
        shares = {
            "link": launch + inbound.wire_ps + outbound.wire_ps + outbound.completion_ps,
            "queue": queue,
            "dram": pipeline.dram_ps,
            "compute": max(compute, dequant) + vector,
        }
        span = end - start
        energy_fj = command.femtojoule + pipeline.row_activations * hardware.energy.activate_fj
        return Timing(
            submit_ps=submit_ps,
            start_ps=start,
            done_ps=done,
            launch_ps=launch,
            link_in_ps=inbound.wire_ps,
            queue_ps=queue,
            dram_ps=pipeline.dram_ps,
            compute_ps=compute,
            dequant_ps=dequant,
            vector_ps=vector,
            overlap_saved_ps=pipeline.dram_ps + compute + dequant + vector - span,
            link_out_ps=outbound.wire_ps,
            completion_ps=outbound.completion_ps,
            total_ps=done - submit_ps,
            bound=max(shares, key=shares.__getitem__),
            weight_bytes=command.weight_bytes,
            bytes_in=work.bytes_in,
            bytes_out=work.bytes_out,
            row_activations=pipeline.row_activations,
            refresh_stall_ps=pipeline.refresh_stall_ps,
            array_utilisation=_ratio(command.fp16_macs * PS_PER_S, self._macs_per_s * span),
            dram_efficiency=_ratio(command.weight_bytes * PS_PER_S, self._peak_bytes_per_s * pipeline.dram_ps),
            energy_pj=energy_fj // 1000,
            pe_mode=hardware.array.pe_mode,
            config_hash=self._config_hash,
        )

    def migrate(self, num_bytes: int, submit_ps: int) -> int:
        """Weights leave for the GPU in bulk, one migration after the other; returns when the last byte has arrived.

        Commands go on meanwhile: their activations pass the bulk on the link, and both share the DRAM.
        """
        if num_bytes == 0:
            return submit_ps
        move = migration(self.hardware, num_bytes)
        done = max(submit_ps, self._bulk.until_ps) + move.total_ps
        self._bulk = _Bulk(done, min(move.dram_ps, move.total_ps - 1), move.total_ps)
        return done

    def _new_command(
        self, hidden: int, intermediate: int, bytes_in: int, bytes_out: int, experts: tuple[tuple[int, int, int], ...]
    ) -> _Command:
        """experts: bits, tokens and DRAM bytes of each, in the order in which they are read."""
        link = self.hardware.link
        phases = tuple(phase for expert in experts for phase in self._phases(hidden, intermediate, *expert))
        weight_bytes = sum(phase.num_bytes for phase in phases)
        return _Command(
            phases,
            hop_in(link, bytes_in),
            hop_out(link, bytes_out),
            sum(phase.compute_ps for phase in phases),
            sum(phase.dequant_ps for phase in phases),
            sum(phase.vector_ps for phase in phases),
            weight_bytes,
            sum(phase.fp16_macs for phase in phases),
            self._femtojoule(bytes_in, bytes_out, weight_bytes),
        )

    def _new_phases(
        self, hidden: int, intermediate: int, bits: int, tokens: int, dram_bytes: int
    ) -> tuple[_Phase, _Phase]:
        """Gate and up, then down, of one expert for `tokens` rows."""
        array, dram = self.hardware.array, self.hardware.dram
        num_bytes = dram_bytes * arrays.weight_passes(array, hidden, intermediate, tokens)
        down_bytes = num_bytes // 3
        lines = channel_lines(dram, num_bytes)
        down_lines = channel_lines(dram, down_bytes)
        gate_up = arrays.matrix_time(array, hidden, 2 * intermediate, tokens, bits)
        down = arrays.matrix_time(array, intermediate, hidden, tokens, bits)
        width = arrays.multiplier_bits(array.pe_mode, bits)
        macs = hidden * intermediate * tokens * width // FULL_PRECISION_BITS
        swiglu = arrays.swiglu_ps(array, intermediate, tokens)
        return (
            _Phase.of(array, num_bytes - down_bytes, lines - down_lines, gate_up, swiglu, 2 * macs),
            _Phase.of(array, down_bytes, down_lines, down, 0, macs),
        )

    def _femtojoule(self, bytes_in: int, bytes_out: int, weight_bytes: int) -> int:
        """DRAM reads without row openings, link bits, and each weight written to and read from the scratchpad once."""
        energy, link = self.hardware.energy, self.hardware.link
        link_bits = 8 * (wire_bytes(link, bytes_in) + wire_bytes(link, bytes_out))
        per_access = energy.dram_line32_fj + 2 * energy.scratchpad_access_fj
        return ceil_div(weight_bytes, 32) * per_access + link_bits * energy.link_bit_fj


def _share_ps(whole_ps: int, num_bytes: int, of_bytes: int) -> int:
    """The part of the duration of of_bytes that num_bytes of them take."""
    return -(-whole_ps * num_bytes // of_bytes) if of_bytes else 0


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0
