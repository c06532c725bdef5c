"""Traces as hosts of one device: requests drawn or recorded, one simulation, latencies per host.

Knows what a user asks for and what fits. Does not know how steps are made or timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError, TraceError
from ndp_device.common.widths import DEFAULT_AVG_BITS
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from vllm_ndp.config import DEFAULT_OFFLOAD_BITS
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.cost_model.memory import CAPACITY_OF, Footprint, beside_device_memory
from vllm_ndp.lab.exact.clients import alone, together
from vllm_ndp.lab.exact.live import recorded_rules
from vllm_ndp.lab.exact.modelled import modelled_host, with_layers
from vllm_ndp.lab.serving import arrivals
from vllm_ndp.lab.serving.host import Host, ServedRequest
from vllm_ndp.lab.serving.scheduler import SchedulerRules
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import policy_with
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.trace import Trace, from_sequences

EXECUTIONS = ("balanced", "paper")
MIGRATIONS = ("kept", "difference")


@dataclass(frozen=True)
class ServingSettings:
    """How requests arrive, and the host that serves them."""

    model: str = "mixtral-8x7b"
    hardware: str = "h100-ndp512"
    overrides: dict[str, str | int] = field(default_factory=dict)
    process: str = "poisson"
    rate_per_s: float = 1.0
    burstiness: float = 0.25
    """Burstiness of `bursty` arrivals; that of `poisson` is 1."""
    speed: float = 1.0
    """Speed of `recorded` arrivals."""
    num_requests: int | None = None
    """Requests in all, the trace's taken round and round; None: each once."""
    seed: int = 0
    policy: str = "prefill"
    policy_options: dict[str, Any] = field(default_factory=dict)
    num_hot: int | None = None
    """None: half of the experts."""
    avg_bits: float = DEFAULT_AVG_BITS
    execution: str = "balanced"
    migration: str = "kept"
    scheduling: SchedulerRules = field(default_factory=SchedulerRules)
    """kv_blocks None: as many as GPU memory holds beside the weights."""

    def __post_init__(self) -> None:
        for name, known in (("process", arrivals.PROCESSES), ("execution", EXECUTIONS), ("migration", MIGRATIONS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"there must be at least 1 request, got {self.num_requests}")


def serve(
    traces: Sequence[Trace],
    settings: ServingSettings,
    *,
    prior: ImportanceScore | None = None,
    loss: LossTable | None = None,
) -> list[ServedRequest]:
    """Serve each trace on a host of its own; all hosts share one device. Raises before anything is simulated."""
    hosts = [_host(trace, settings, number, prior, loss, len(traces)) for number, trace in enumerate(traces)]
    device = DeviceModel(load_hardware(settings.hardware, **settings.overrides))
    return together([host.whole() for host in hosts], device)


def serve_again(trace: Trace, loss: LossTable) -> ServedRequest:
    """A recorded live run, as it was: its own hardware, plans and scheduler, requests arriving with its steps."""
    setup, at_ps = trace.provenance.live, arrivals.of_steps(trace)
    if setup is None or setup.scheduling is None:
        raise TraceError("the trace does not say how its requests were scheduled: record it with this version")
    told = setup.scheduling
    rules = SchedulerRules(told.max_num_batched_tokens, told.max_num_seqs, told.block_size, told.kv_blocks)
    host = Host(trace, setup, recorded_rules(trace, loss), at_ps, rules)
    return alone(host.whole(), *(DeviceModel(host.engine.hardware) for _ in range(setup.num_devices)))


def repeated(trace: Trace, count: int | None) -> Trace:
    """Lengthen or cut the trace to so many requests, by repeating its own in order."""
    if count is None:
        return trace
    own = len(trace.prompt_len)
    if not own:
        raise TraceError("the trace has no requests")
    if count <= own:
        return trace.select(range(count))
    sequences = [dataclasses.replace(trace.sequences[n % own], request=n) for n in range(count)]
    provenance = trace.provenance
    return from_sequences(provenance, sequences)


def _host(
    trace: Trace,
    settings: ServingSettings,
    number: int,
    prior: ImportanceScore | None,
    loss: LossTable | None,
    device_hosts: int = 1,
) -> Host:
    if settings.process == "recorded" and settings.num_requests is not None:
        raise ConfigError("recorded arrivals are those of the trace's own requests: leave --requests out")
    trace = repeated(trace, settings.num_requests)
    at_ps = _arrivals(trace, settings, number)
    p = trace.provenance
    costs = Costs(load_hardware(settings.hardware, **settings.overrides), model_named(settings.model))
    costs.require(p.num_experts, p.top_k)
    trace, loss = with_layers(trace, loss or LossTable.nominal(p.num_layers, p.num_experts), costs.shape.num_layers)
    if prior is not None and len(prior.values) != costs.shape.num_layers:
        prior = ImportanceScore(
            prior.values[np.arange(costs.shape.num_layers) * p.num_layers // costs.shape.num_layers]
        )
    num_hot = p.num_experts // 2 if settings.num_hot is None else settings.num_hot
    policy = policy_with(settings.policy, {"prior": prior, **settings.policy_options})[0]
    keeps = settings.migration == "kept"
    rules = PlannerRules(policy, Budget(num_hot, settings.avg_bits), loss, keeps_streamed=keeps)
    setup = modelled_host(
        *(trace.provenance, settings.model, settings.hardware, settings.overrides, rules),
        offload_bits=DEFAULT_OFFLOAD_BITS if settings.execution == "balanced" and num_hot else 0,
        device_hosts=device_hosts,
    )
    scheduling = settings.scheduling
    if scheduling.kv_blocks is None:
        blocks = kv_room(costs, num_hot, min(scheduling.max_num_seqs, len(at_ps))) // scheduling.block_size
        scheduling = dataclasses.replace(scheduling, kv_blocks=blocks)
    return Host(trace, setup, rules, at_ps, scheduling)


def kv_room(costs: Costs, num_hot: int, requests: int) -> int:
    """Tokens of KV cache that GPU memory holds beside the weights and the states of so many requests.

    Raises DoesNotFit where it does not hold one.
    """
    experts = beside_device_memory(costs, num_hot)
    one = Footprint.of(experts, costs.shape, 1, requests)
    one.require(costs.hardware, f"{costs.shape.name} with K {num_hot}", "give fewer --hot-experts")
    held = Footprint.of(experts, costs.shape, 0, requests)
    left = int(costs.hardware.values()[CAPACITY_OF["gpu"]]) - held.gpu
    return left // (one.gpu - held.gpu)


def _arrivals(trace: Trace, settings: ServingSettings, number: int) -> NDArray[np.int64]:
    count = len(trace.prompt_len)
    if settings.process == "recorded":
        return arrivals.recorded(trace, settings.speed)
    if settings.process == "together":
        return np.zeros(count, np.int64)
    burstiness = settings.burstiness if settings.process == "bursty" else 1.0
    return arrivals.drawn(count, settings.rate_per_s, settings.seed + number, burstiness)
