"""The table printed at start-up: what is effective, where every byte lives. Asked for but not effective cannot hide."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table


def human_bytes(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def residency_table(status: dict[str, Any]) -> Table:
    table = Table(title="vllm-ndp: what is effective", title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value")
    rows = [
        ("MoE layers attached", f"{status['moe_layers']} of {status['model_layers']}"),
        ("experts per layer", f"{status['experts']}: {status['hot_experts']} hot, {status['cold_experts']} cold"),
        ("hot slots on GPU", f"{human_bytes(status['hot_bytes'])} + {human_bytes(status['staging_bytes'])} staging"),
        ("pool (memory map)", f"{human_bytes(status['pool_bytes'])}: {status['pool']}"),
        ("routing sidecar", f"{human_bytes(status['sidecar_bytes'])} beside the KV cache, resident as used"),
        ("cold precision", status["cold_precision"]),
        ("replicas", status["replicas"]),
        ("device", f"{status['device_address']} (pid {status['device_pid'] or 'external'}), kernel {status['kernel']}"),
        ("device runs on", f"cores {status['device_cores']}" if status["device_cores"] else "any core"),
        ("device holds", human_bytes(status["device_bytes"])),
        ("simulated hardware", f"{status['hardware']}, pe_mode {status['pe_mode']}{status['hardware_overrides']}"),
        (
            "policy",
            f"{status['policy']}, gain {status['gain']}, average {status['avg_bits']:g} bits per {status['bits_for']}",
        ),
        ("execution", status["execution"]),
        ("slot kernel", status["slot_kernel"]),
        ("routing trace", status["record"]),
        ("per-request report", status["report"]),
    ]
    for what, value in rows:
        table.add_row(what, value)
    return table


def show(status: dict[str, Any]) -> None:
    console = Console(file=sys.stderr, width=100)
    console.print(residency_table(status))
