"""What is effective and where every byte lives, as data; at start-up a table of it, in ten rows at most.

VLLM_LOGGING_LEVEL=DEBUG prints all rows, as `vllm-ndp top --all` does. Asked for but not effective cannot hide.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ndp_device.common.widths import BYTE_BITS, FULL_PRECISION_BITS
from ndp_device.replicas.format import load_layer_weights
from vllm_ndp.config import GPU_RUNGS, NdpSettings
from vllm_ndp.integration import compat, paced_scheduler, refusals
from vllm_ndp.integration.assembly import LoadedWorker
from vllm_ndp.integration.cuda.limits import Rung
from vllm_ndp.integration.cuda.messenger import Messenger
from vllm_ndp.integration.device_link import DeviceLink, DeviceView
from vllm_ndp.integration.device_members import DeviceMembers
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.integration.self_sizing import EXPECTED_STEP_S
from vllm_ndp.operating.sizing import human
from vllm_ndp.planning.bitwidths import BY_BITS_READ, OF_PAIRS, OVER_LAYERS, verdict_on, verdict_on_loss
from vllm_ndp.planning.importance import AUTO_MORE_BITS, AUTO_SHARES_FROM
from vllm_ndp.planning.plan import Budget

_PRICES = {
    "simulated": "the simulated hardware's",
    "measured": "this machine's, measured at start-up; simulated times stay those of the simulated hardware",
}
_SHORT = (
    *("settings in force", "experts per layer", "memory", "cold experts", "replicas", "predicted loss", "TOO FEW BITS"),
    *("expected speed", "device", "simulated hardware"),
)
"""Rows for the reader of a start: which experts are where, what that takes and costs, and who computes it."""
_OWN_CODES = "none: experts keep the checkpoint's codes of {} bits"


def status(worker: LoadedWorker, sidecar: RoutingSidecar, kv_cache_bytes: int) -> dict[str, Any]:
    """Return what is effective, as data."""
    facts, parts = worker.facts, worker.parts
    engine = "engine" if compat.on_cpu() else "GPU"
    settings, shape, hot, device = facts.settings, facts.pool.shape, parts.hot, parts.device
    num_hot, rules = settings.resolve_hot_experts(shape.num_experts), parts.planner.replanner.rules
    avg_bits = settings.avg_bits if settings.avg_bits == BYTE_BITS else min(settings.avg_bits, rules.loss.dealt[-1])
    return {
        "plugin_active": True,
        "settings": settings.changed(),
        "engine_pid": os.getpid(),
        "ranks": facts.ranks.description,
        "moe_layers": len(hot.layers),
        "model_layers": shape.num_layers,
        "experts": shape.num_experts,
        "top_k": shape.top_k,
        "hot_experts": num_hot,
        "plan": settings.plan,
        "joint_tiers": settings.joint_tiers,
        "warm_experts": settings.warm_experts,
        "warm": "" if parts.host is None else parts.host.description,
        "cold_experts": settings.num_cold(shape.num_experts),
        "slot_bits": settings.slot_bits,
        "linear_layers": "the checkpoint's, by vLLM" if facts.linears is None else facts.linears.description,
        "drafts": compat.drafts_in_words(facts.vllm_config),
        "engine": engine,
        "kv_cache_bytes": kv_cache_bytes,
        "hot_bytes": hot.num_bytes,
        "staging_bytes": hot.streamer.staging_bytes,
        "pool_bytes": hot.pool.mapped_bytes,
        "sidecar_bytes": sidecar.num_bytes,
        "cold_precision": settings.cold_precision,
        "policy": settings.policy,
        "bit_rule": settings.bit_rule_in_force,
        "avg_bits": avg_bits,
        "max_loss": settings.max_loss,
        "expected_step_s": getattr(facts.vllm_config, EXPECTED_STEP_S, None),
        "predicted_loss": _predicted_loss(
            settings, shape.num_experts, parts.planner.replanner.predicted_nats(settings.slot_bits)
        ),
        "too_few_bits": verdict_on(avg_bits) if settings.needs_replicas(shape.num_experts) else "",
        "bits_for": settings.bits_for,
        "execution": _execution(num_hot, device.setup.spill_bits, settings.device_hosts, engine),
        "prefill": _prefill(settings, num_hot, shape.num_experts, splits=device.setup.splits_prefill, engine=engine),
        "hardware_overrides": "".join(f", {k}={v}" for k, v in settings.hardware_overrides.items()),
        "prices": settings.prices,
        "slot_kernel": hot.layers[0].kernel_name,
        "decode_layers": _decode_layers(facts.rung, parts.messenger),
        "compilation": _compilation(facts.vllm_config),
        "step_tokens": paced_scheduler.description(facts.vllm_config, settings),
        "record": settings.record or "off",
        "report": _report(worker.unsimulated),
        **({} if device.link is None else _of_device(device.link, device, settings, hot.pool.mapped_bytes)),
        **({"replicas": _OWN_CODES.format(settings.slot_bits)} if facts.serves_its_codes else {}),
    }


def _speed(step_s: float) -> str:
    return f"{1 / step_s:.3g} tokens/s for one request; what is measured then: vllm-ndp top"


def _decode_layers(rung: Rung, messenger: Messenger | None) -> str:
    """By the name of the rung, and what of it is not in force."""
    name = GPU_RUNGS[rung]
    if messenger is None:
        return name
    sends = "a thread sends" if messenger.has_thread else "the host sends"
    return f"{name}, asynchronous up to {messenger.most_rows} rows, {sends}"


def _compilation(vllm_config: Any) -> str:
    compiled = vllm_config.compilation_config.mode
    return f"compiled by vLLM ({compiled.name})" if compiled else "eager; -O2 compiles, which takes a minute once"


def _report(unsimulated: str) -> str:
    return "in kv_transfer_params['ndp']" + (
        f", without simulated times of tokens: {unsimulated} is in no clock" if unsimulated else ""
    )


def _predicted_loss(settings: NdpSettings, num_experts: int, nats: float | None) -> str:
    """Empty where nothing is quantized."""
    if not settings.needs_replicas(num_experts):
        return ""
    if settings.is_joint:
        return "known for each plan, which is made from a prompt: `predicted_nats` of its report"
    if settings.losses != "relative":
        return "unknown: only relative losses are known in nats, and 'losses' is 'absolute'"
    is_less = nats is not None and settings.bit_rule_in_force == OF_PAIRS
    return verdict_on_loss(nats) + ("; less by single pairs, as each report says" if is_less else "")


def _layers(replicas: Path | None, losses: str) -> str:
    if losses != "relative":
        return ", all layers alike (their weights are of relative losses)"
    if replicas is not None and load_layer_weights(replicas)[0] is not None:
        return ", layers as weighed"
    return ", all layers alike, which loses more (`vllm-ndp quantize --calibration` weighs them)"


def _of_device(link: DeviceLink, device: DeviceView, settings: NdpSettings, pool_bytes: int) -> dict[str, Any]:
    description = link.members.description
    reads_checkpoint = device.setup.splits_prefill or settings.cold_precision == "full"
    return {
        "device_pid": link.members.pids[0],
        "device_pids": link.members.pids,
        "device_cores": link.members.cores,
        "device_address": link.members.address,
        "carrier": _carrier(link.members),
        "device_bytes": sum(one.resident_bytes for one in link.members.descriptions),
        "device_mapped_bytes": pool_bytes if reads_checkpoint else 0,
        "device_copies": 1 if device.devices is None else device.devices.rules.num_copies,
        "device_parts": 1 if device.devices is None else device.devices.num_parts,
        "kernel": description.kernel + (" (a slow check)" if description.kernel == "reference" else ""),
        "layers": _layers(link.members.replicas, settings.losses) if settings.bit_rule_in_force in BY_BITS_READ else "",
        "replicas": f"{description.replicas} in {link.members.replicas}" if link.members.replicas else "none needed",
        "hardware": description.hardware,
        "planned_hardware": settings.hardware,
        "pe_mode": description.pe_mode,
    }


def _carrier(members: DeviceMembers) -> str:
    """The way of the messages, as the greeting has decided: the kernel may refuse a shared segment."""
    shares = [client.uses_shared_memory for client in members.clients]
    return "shared memory" if all(shares) else "sockets" if not any(shares) else "shared memory or sockets"


def _hardware(status: dict[str, Any]) -> str:
    if status["pe_mode"]:
        return f"{status['hardware']}, pe_mode {status['pe_mode']}{status['hardware_overrides']}"
    planned = f"{status['planned_hardware']}{status['hardware_overrides']}"
    return f"none: the device is hardware and has no simulated time; plans are made as for {planned}"


def _device(status: dict[str, Any]) -> str:
    pids = ", ".join(str(pid or "external") for pid in status["device_pids"])
    where = f"{status['device_address']} (pid {pids}) by {status['carrier']}, kernel {status['kernel']}"
    if (count := len(status["device_pids"])) == 1:
        return where
    copies, parts = status["device_copies"], status["device_parts"]
    held = f"{copies} {'copy' if copies == 1 else 'copies'} of each expert" if parts == 1 else f"1/{parts} of every one"
    return f"{count} with {held}: {where}"


def _held(status: dict[str, Any]) -> str:
    mapped = status["device_mapped_bytes"]
    also = f"; maps {human(mapped)} of the checkpoint, in the page cache as used" if mapped else ""
    return f"{human(status['device_bytes'])} of replicas{also}"


def _slots(status: dict[str, Any]) -> str:
    width = "" if status["slot_bits"] == FULL_PRECISION_BITS else f" at {status['slot_bits']} bits"
    if status["plan"] == "joint":
        width = " at widths of their own"
    return f"{human(status['hot_bytes'])}{width} + {human(status['staging_bytes'])} staging"


def _tiers(status: dict[str, Any]) -> str:
    """How many experts of each layer live where, in the order in which the plan fills the tiers."""
    if status["plan"] == "joint":
        tiers = status["joint_tiers"].replace("+", ", ")
        host = f" ({status['warm']})" if status["warm"] else ""
        return (
            f"{status['experts']}: tier ({tiers}){host} and width by each joint plan, with the memory of "
            f"{status['hot_experts']} in full precision in the {status['engine']}"
        )
    warm = f"{status['warm_experts']} warm ({status['warm']}), " if status["warm_experts"] else ""
    return f"{status['experts']}: {status['hot_experts']} hot, {warm}{status['cold_experts']} cold"


def _bits(status: dict[str, Any]) -> str:
    bits = status["avg_bits"]
    if status["max_loss"] is not None:
        return f"bits for at most {status['max_loss']:g} nats a token, as predicted,"
    of = "read by a cold pair" if status["bit_rule"] in BY_BITS_READ else "kept by a cold expert"
    if status["bits_for"] != "auto":
        common = ", so one width for each expert" if status["bits_for"] == "batch" else ""
        return f"average {bits:g} bits {of}, per {status['bits_for']}{common},"
    more = Budget(0, bits).with_more_bits(AUTO_MORE_BITS).avg_bits
    rule = f" by {OVER_LAYERS}" if status["bit_rule"] == OF_PAIRS else ""  # with one width for each expert
    return f"average {bits:g} bits {of}, per request, {more:g} in common{rule} from {AUTO_SHARES_FROM} running ones on,"


def _execution(num_hot: int, offload_bits: int, device_hosts: int, engine: str) -> str:
    if offload_bits:
        beside = f" beside {device_hosts - 1} other hosts" if device_hosts > 1 else ""
        return f"balanced: hot experts also on the device, at {offload_bits} bits, where faster{beside}"
    return f"paper: hot experts in the {engine} only" if num_hot else "every expert on the device"


def _prefill(settings: NdpSettings, num_hot: int, num_experts: int, *, splits: bool, engine: str) -> str:
    if num_hot == num_experts:
        return f"every expert in the {engine}"
    if splits:
        return "split: cold experts streamed or on the device, in full precision, so that both end together"
    return f"streamed: cold experts through the {engine}" + (" (auto)" if settings.prefill == "auto" else "")


def _memory(status: dict[str, Any]) -> str:
    parts = {
        "hot slots": status["hot_bytes"] + status["staging_bytes"],
        "KV cache": status["kv_cache_bytes"],
        "routing": status["sidecar_bytes"],
        "device": status["device_bytes"],
    }
    listed = " + ".join(f"{what} {human(num_bytes)}" for what, num_bytes in parts.items() if num_bytes)
    return f"{listed} = {human(sum(parts.values()))}, beside the model's other weights and the programs"


def startup_table(status: dict[str, Any], *, whole: bool) -> Table:
    table = Table(title="vllm-ndp: what is effective", title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value")
    for what, value in rows(status):
        if whole or what in _SHORT:
            table.add_row(what, value)
    return table


def rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Everything that is effective, in words."""
    given = ", ".join(f"{name}={value}" for name, value in status["settings"].items())
    quantized = f"{status['avg_bits']:g} bits on average, by {status['policy']}"
    return [
        ("settings in force", given or "none beside defaults"),
        ("ranks", status["ranks"]),
        ("experts per layer", f"{_tiers(status)}; in {status['moe_layers']} of {status['model_layers']} MoE layers"),
        ("memory", _memory(status)),
        ("hot slots", _slots(status)),
        ("KV cache", human(status["kv_cache_bytes"])),
        ("linear layers", status["linear_layers"]),
        *([("drafts", status["drafts"])] if status["drafts"] else []),
        ("pool (memory map)", f"{human(status['pool_bytes'])}: the checkpoint, read page by page"),
        ("routing sidecar", f"{human(status['sidecar_bytes'])} beside the KV cache, resident as used"),
        ("cold precision", status["cold_precision"]),
        *([("cold experts", quantized)] if status["predicted_loss"] and status["max_loss"] is None else []),
        ("replicas", status["replicas"]),
        ("device", _device(status)),
        ("device runs on", f"cores {status['device_cores']}" if status["device_cores"] else "any core"),
        ("device holds", _held(status)),
        ("simulated hardware", _hardware(status)),
        ("policy", f"{status['policy']}, {_bits(status)} by {status['bit_rule']}{status['layers']}"),
        *([("predicted loss", status["predicted_loss"])] if status["predicted_loss"] else []),
        *([("TOO FEW BITS", status["too_few_bits"])] if status["too_few_bits"] else []),
        *([("expected speed", _speed(status["expected_step_s"]))] if status["expected_step_s"] else []),
        ("execution", status["execution"]),
        ("prefill", status["prefill"]),
        ("prices of plans", _PRICES[status["prices"]]),
        ("slot kernel", status["slot_kernel"]),
        ("decode layers", status["decode_layers"]),
        ("between MoE layers", status["compilation"]),
        ("tokens of a step", status["step_tokens"]),
        ("routing trace", status["record"]),
        ("per-request report", status["report"]),
    ]


def show(status: dict[str, Any]) -> None:
    console = Console(file=sys.stderr, width=100)
    console.print(startup_table(status, whole=not refusals.is_brief()))
