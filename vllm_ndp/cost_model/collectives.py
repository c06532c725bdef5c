"""Time of collectives between GPUs that run one model: NVLink between the GPUs of one host. Simulated, stateless.

    all-reduce = latency + 2 (n - 1) / n * bytes / bandwidth          gather = latency + (n - 1) / n * bytes / bandwidth

A stage of a pipeline sends its rows to the next: latency + bytes / bandwidth. At the few rows of a decode step the
latency is nearly all of it. Knows bytes. Does not know models.
"""

from __future__ import annotations

from ndp_device.timing.units import ceil_div, transfer_ps

LATENCY_PS = 6_000_000
"""Latency of 128 B to 64 KiB between two H100 in a CUDA graph, measured: github.com/NVIDIA/nccl/issues/1259. More GPUs
take longer, so it is optimistic beyond two."""
BYTES_PER_S = 370_000_000_000
"""Rate of one direction of NVLink 4 after protocol overhead, out of 450 GB/s:
github.com/NVIDIA/nccl-tests/issues/212."""


def all_reduce_ps(num_gpus: int, num_bytes: int) -> int:
    """Each GPU has num_bytes of partial sums, and gets the sum."""
    return 0 if num_bytes == 0 else gather_ps(num_gpus, 2 * num_bytes)


def gather_ps(num_gpus: int, num_bytes: int) -> int:
    """Each GPU has its part of num_bytes, and gets all."""
    if num_gpus == 1 or num_bytes == 0:
        return 0
    return LATENCY_PS + transfer_ps(ceil_div(num_bytes * (num_gpus - 1), num_gpus), BYTES_PER_S)


def send_ps(num_bytes: int) -> int:
    """Time from one GPU to another; the latency of a collective of two stands for it."""
    return 0 if num_bytes == 0 else LATENCY_PS + transfer_ps(num_bytes, BYTES_PER_S)
