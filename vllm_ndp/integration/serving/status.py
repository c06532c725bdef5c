"""State of a worker as plain values: what is effective, its plan, its requests, who is hot where. Only reads.

At start-up what is effective is a table for its reader, in nine rows at most: which experts are where, what that takes
and costs, and who computes it. Asked for but not effective cannot hide.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ndp_device.common.widths import BYTE_BITS
from vllm_ndp.config import GPU_RUNGS, NdpSettings
from vllm_ndp.integration import compat, paced_scheduler
from vllm_ndp.integration.assembly import LoadedWorker
from vllm_ndp.integration.batch import RequestTracker, TrackedRequest
from vllm_ndp.integration.cuda.limits import Rung
from vllm_ndp.integration.cuda.messenger import MOST_ROWS, Messenger
from vllm_ndp.integration.device_link import DeviceLink, DeviceView
from vllm_ndp.integration.device_members import DeviceMembers
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.operating.sizing import human
from vllm_ndp.planning.bitwidths import OF_PAIRS, verdict_on, verdict_on_loss
from vllm_ndp.planning.replanner import Replanner

_OWN_CODES = "none: experts keep the checkpoint's codes of {} bits"
_ROUNDED = 1.001
"""Times a limit of loss that a plan within it may seem to lose."""


def status(worker: LoadedWorker, sidecar: RoutingSidecar, kv_cache_bytes: int) -> dict[str, Any]:
    """Return what is effective, as data."""
    facts, parts = worker.facts, worker.parts
    settings, shape, hot, device = facts.settings, facts.pool.shape, parts.hot, parts.device
    num_hot, rules = settings.resolve_hot_experts(shape.num_experts), worker.run.planner.rules
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
        "linear_layers": "" if facts.linears is None else facts.linears.description,
        "drafts": compat.drafts_in_words(facts.vllm_config),
        "engine": "engine" if compat.on_cpu() else "GPU",
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
        "predicted_loss": _predicted_loss(
            settings, shape.num_experts, worker.run.planner.predicted_nats(settings.slot_bits)
        ),
        "too_few_bits": verdict_on(avg_bits) if settings.needs_replicas(shape.num_experts) else "",
        "bits_for": settings.bits_for,
        "spill_bits": device.setup.spill_bits,
        "splits_prefill": device.setup.splits_prefill,
        "hardware_overrides": "".join(f", {k}={v}" for k, v in settings.hardware_overrides.items()),
        "prices": settings.prices,
        "slot_kernel": hot.layers[0].kernel_name,
        "decode_layers": _decode_layers(facts.rung, parts.messenger),
        "itl_factor": paced_scheduler.factor_in_force(facts.vllm_config, settings),
        "record": settings.record,
        "unsimulated": worker.unsimulated,
        **({} if device.link is None else _of_device(device.link, device, settings)),
        **({"replicas": _OWN_CODES.format(device.setup.stored_bits)} if facts.serves_its_codes else {}),
    }


def _decode_layers(rung: Rung, messenger: Messenger | None) -> str:
    """By the name of the rung, and what of it is not in force."""
    name = GPU_RUNGS[rung]
    if messenger is None:
        return name
    sends = "a thread sends" if messenger.has_thread else "the host sends"
    return f"{name}, asynchronous up to {MOST_ROWS} rows, {sends}"


def _predicted_loss(settings: NdpSettings, num_experts: int, nats: float | None) -> str:
    """Empty where nothing is quantized."""
    if not settings.needs_replicas(num_experts):
        return ""
    if nats == 0:  # the checkpoint's own codes
        return "0 nats a token"
    if settings.is_joint:
        return "known for each plan, which is made from a prompt: `predicted_nats` of its report"
    if settings.losses != "relative":
        return "unknown: only relative losses are known in nats, and 'losses' is 'absolute'"
    is_less = nats is not None and settings.bit_rule_in_force == OF_PAIRS
    said = verdict_on_loss(nats) + ("; less by single pairs, as each report says" if is_less else "")
    most = settings.max_loss
    if nats is None or most is None or nats <= _ROUNDED * most:
        return said
    return f"{said}; above the max_loss of {most:g}, which needs more hot_experts, or wider replicas or slots"


def _of_device(link: DeviceLink, device: DeviceView, settings: NdpSettings) -> dict[str, Any]:
    description, planned = link.members.description, link.members.planned
    return {
        "device_pid": link.members.pids[0],
        "device_pids": link.members.pids,
        "device_cores": link.members.cores,
        "device_address": link.members.address,
        "carrier": _carrier(link.members),
        "device_bytes": sum(one.resident_bytes for one in link.members.descriptions),
        "device_copies": 1 if device.devices is None else device.devices.num_copies,
        "device_parts": 1 if device.devices is None else device.devices.num_parts,
        "kernel": description.kernel,
        "replicas": "none needed" if planned is None else f"{planned.source} in {planned.directory}",
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


def _memory(status: dict[str, Any]) -> str:
    parts = {
        "hot slots": status["hot_bytes"] + status["staging_bytes"],
        "KV cache": status["kv_cache_bytes"],
        "routing": status["sidecar_bytes"],
        "device": status["device_bytes"],
    }
    listed = " + ".join(f"{what} {human(num_bytes)}" for what, num_bytes in parts.items() if num_bytes)
    return f"{listed} = {human(sum(parts.values()))}, beside the model's other weights and the programs"


def _cold(status: dict[str, Any]) -> str:
    has_average = status["predicted_loss"] and status["max_loss"] is None
    may_be = status["cold_experts"] or status["joint_tiers"]
    return f"{status['avg_bits']:g} bits on average, by {status['policy']}" if has_average and may_be else ""


def rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    """In words; none where there is nothing to say."""
    given = ", ".join(f"{name}={value}" for name, value in status["settings"].items())
    every = [
        ("settings in force", given or "none beside defaults"),
        ("experts per layer", f"{_tiers(status)}; in {status['moe_layers']} of {status['model_layers']} MoE layers"),
        ("memory", _memory(status)),
        ("cold experts", _cold(status)),
        ("replicas", status["replicas"]),
        ("device", _device(status)),
        ("simulated hardware", _hardware(status)),
        ("predicted loss", status["predicted_loss"]),
        ("TOO FEW BITS", status["too_few_bits"]),
    ]
    return [(what, value) for what, value in every if value]


def show(status: dict[str, Any]) -> None:
    table = Table(title="vllm-ndp: what is effective", title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value")
    for row in rows(status):
        table.add_row(*row)
    Console(file=sys.stderr, width=100, markup=False, emoji=False).print(table)


# -- what goes on now --------------------------------------------------------------------------------------------------


def plan_in_force(replanner: Replanner, planned: Sequence[TrackedRequest]) -> dict[str, Any]:
    """planned: the requests that were planned last. Averages are over them."""
    known = [(one.plan, one.score) for one in planned if one.plan is not None and one.score is not None]
    bits = [plan.bits_read(score.values, score.weights) for plan, score in known]
    average = float(np.mean(bits)) if bits else math.nan  # where every expert is hot, too
    return {
        "epoch": replanner.epoch,
        "hot_experts": per_layer(replanner.placement.hot),
        "warm_experts": per_layer(replanner.placement.warm),
        "avg_bits": None if math.isnan(average) else round(average, 3),
    }


def per_layer(experts: NDArray[np.bool_]) -> int | float:
    """How many of the marked experts [L, E] a layer has, on average where layers differ."""
    mean = float(experts.sum(axis=1).mean())
    return int(mean) if mean.is_integer() else round(mean, 3)


def running(requests: RequestTracker) -> list[dict[str, Any]]:
    return [
        {
            "id": request.request_id,
            "prompt_tokens": request.prompt_len,
            "output_tokens": request.num_output_tokens,
            "phase": "decode" if request.prefilled else "prefill",
        }
        for request in requests.requests.values()
    ]


def experts(replanner: Replanner, planned: Sequence[TrackedRequest], layers: range) -> dict[str, Any]:
    """Per layer and expert: hot, warm or neither, and average bits of the requests planned last (0 where hot). Also
    their importance, and widths of hot experts where each has its own (else 0).

    Importance is a share: a layer adds up to 1. Before the first prompt nothing is known of either.
    """
    plans = [request.plan for request in planned if request.plan is not None]
    scores = [request.score for request in planned if request.score is not None]
    importance = bits = None
    if scores:
        importance = np.mean([score.values for score in scores], axis=0).round(4).tolist()
    if plans:
        bits = np.mean([plan.bits.bits for plan in plans], axis=0).round(2).tolist()
    return {
        "epoch": replanner.epoch,
        "layers": list(layers),
        "hot": replanner.placement.hot.astype(int).tolist(),
        "warm": replanner.placement.warm.astype(int).tolist(),
        "widths": replanner.placement.widths.astype(int).tolist(),
        "bits": bits,
        "importance": importance,
    }


class FinishedRequests:
    """By vLLM's own ids. Client's X: `cmpl-X-0-1a2b3c4d` of its first prompt, `1_cmpl-X-0-1a2b3c4d` the second of n,
    `cmpl-X-0-1a2b3c4d5e6f7a8b-beam-1-1a2b3c4d` the second beam of one token of a beam search."""

    def __init__(self, kept: int = 1024) -> None:
        self._kept = kept
        self._reports: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def note(self, reports: Mapping[str, dict[str, Any]]) -> None:
        self._reports.update(reports)
        while len(self._reports) > self._kept:
            self._reports.popitem(last=False)

    def find(self, client_id: str) -> dict[str, dict[str, Any]]:
        """Every request that vLLM made of the client's: an answer of n choices or of several prompts has several."""
        return {name: self._reports[name] for name in made_of(client_id, self._reports)}

    def latest(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        """The last reports, newest first, without their lists of single tokens."""
        newest = islice(reversed(self._reports.items()), count)
        return [(name, {key: value for key, value in of.items() if not isinstance(value, list)}) for name, of in newest]


def made_of(client_id: str, names: Iterable[str]) -> list[str]:
    """Ids that vLLM made from the client's id."""
    of_beam = r"-[0-9a-f]{16,32}-beam-\d+"
    pattern = re.compile(rf"(\d+_)?([a-z]+-)?{re.escape(client_id)}([-_]\d+)?({of_beam})?(-[0-9a-f]{{8}})?")
    return [name for name in names if pattern.fullmatch(name)]
