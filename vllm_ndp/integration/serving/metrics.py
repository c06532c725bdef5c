"""Metrics of the plugin on `/metrics`: `vllm:ndp_*`, beside vLLM's own.

    StepReport -> NdpStats (scheduler) -> vLLM's stats of the step -> NdpMetrics (front end) -> /metrics

Names begin with `vllm:`, because only those are taken down when a second engine is made in a process. `simulated_*` and
`measured_*` are metrics of their own; no metric holds both. Knows reports; does not know workers or the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from ndp_device.common.errors import UNAVAILABLE
from vllm_ndp.integration import vllm_private
from vllm_ndp.integration.report import DEVICE_PARTS, DEVICE_STAGES, PAIR_KINDS, PHASES, StepReport

_FINE = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_COARSE = (*_FINE[3:], 10.0, 20.0, 60.0)
_STAGES = (*DEVICE_STAGES, "overlap_saved")
_BYTES = {"in": "bytes_in", "out": "bytes_out", "weights": "weight_bytes"}

COUNTERS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    # name: what it counts, its label, prefix of the keys, values of the label
    "ndp_pairs": ("(row, expert) pairs by where they ran", "where", "pairs", PAIR_KINDS),
    "ndp_fallback_causes": ("Pairs of decode and prompts that the device did not answer", "cause", "why", UNAVAILABLE),
    "ndp_rows": ("Rows of forward passes", "phase", "rows", PHASES),
    "ndp_steps": ("Forward passes with rows", "", "steps", ()),
    "ndp_device_messages": ("Messages that the device answered", "", "messages", ()),
    "ndp_planned_prompts": ("Prompts whose routing was planned from", "", "prefills", ()),
    "ndp_migrated_experts": ("Experts copied into hot slots for a plan", "", "migrated", ()),
    "ndp_kept_experts": ("Experts that became hot and were in a slot already", "", "kept", ()),
    "ndp_requests": ("Requests that ended, by how", "finish", "finish", ("stop", "length", "aborted", "error")),
    "ndp_simulated_seconds": ("Simulated time of all steps", "", "simulated_s", ()),
    "ndp_simulated_device_seconds": ("Simulated time of the device by stage", "stage", "stage_s", _STAGES),
    "ndp_simulated_device_bound": (
        "Device answers by what took the largest share of their simulated time",
        *("bound", "bound", ("link", "dram", "compute", "queue")),
    ),
    "ndp_simulated_device_bytes": (
        "Bytes over the simulated link, and of weights read",
        "what",
        "bytes",
        tuple(_BYTES),
    ),
    "ndp_simulated_energy_joules": (
        "Simulated energy of what moved, arithmetic not in it",
        "part",
        "joules",
        DEVICE_PARTS,
    ),
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "ndp_measured_plan_seconds": ("Making and announcing new plans", _COARSE),
    "ndp_measured_device_round_trip_seconds": ("From sending a message to having its answer in hand", _FINE),
    "ndp_measured_ttft_seconds": ("Time to first token on the wall, from arrival", _COARSE),
    "ndp_measured_tpot_seconds": ("Mean time per output token of a request on the wall", _FINE),
    "ndp_simulated_ttft_seconds": ("Simulated time to first token, from the first step", _FINE),
    "ndp_simulated_tpot_seconds": ("Mean simulated time per output token of a request", (1e-6, 2e-6, 5e-6, *_FINE)),
}
DEVICE_UP = "ndp_device_up"
_OF_REQUESTS = {  # histogram: key of the report, its unit in seconds
    "ndp_measured_ttft_seconds": ("measured_ttft_ms", 1e-3),
    "ndp_measured_tpot_seconds": ("measured_tpot_ms", 1e-3),
    "ndp_simulated_ttft_seconds": ("simulated_ttft_us", 1e-6),
    "ndp_simulated_tpot_seconds": ("simulated_tpot_us", 1e-6),
}


@dataclass
class NdpStats(KVConnectorStats):
    """Sums and observed values since the step before, under `KEY` or `KEY:LABEL`; plain, as they cross a process."""

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> NdpStats:
        for key, value in other.data.items():
            self.data[key] = self.data[key] + value if key in self.data and key != DEVICE_UP else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {key: value for key, value in self.data.items() if not isinstance(value, list)}

    def add_step(self, step: StepReport) -> None:
        device = step.device
        self._count("steps", 1)
        if not step.unsimulated:
            self._count("simulated_s", (step.end_ps - step.start_ps) / 1e12)
        for kinds in step.pairs.values():
            for kind, count in kinds.items():
                self._count(f"pairs:{kind}", count)
        for rows in step.rows.values():
            for phase, count in zip(PHASES, rows, strict=True):
                self._count(f"rows:{phase}", count)
        for key, count in (
            ("prefills", step.prefills),
            ("migrated", step.migrated_experts),
            ("kept", step.kept_experts),
        ):
            self._count(key, count)
        if device:
            for stage in _STAGES:
                self._count(f"stage_s:{stage}", device[f"{stage}_ps"] / 1e12)
            for what, key in _BYTES.items():
                self._count(f"bytes:{what}", device[key])
        self._count("messages", len(step.round_trips_s))
        for bound, count in step.device_bounds.items():
            self._count(f"bound:{bound}", count)
        for parts in step.device_pj.values():
            for part, picojoules in parts.items():
                self._count(f"joules:{part}", picojoules / 1e12)
        for cause, count in step.fallbacks.items():
            self._count(f"why:{cause}", count)
        if step.round_trips_s:
            self._observe("ndp_measured_device_round_trip_seconds", *step.round_trips_s)
        if step.plan_s is not None:
            self._observe("ndp_measured_plan_seconds", step.plan_s)
        self.data[DEVICE_UP] = int(step.device_up)

    def add_request(self, report: Mapping[str, Any]) -> None:
        """A finished request's report."""
        self._count(f"finish:{report['finish']}", 1)
        for name, (key, unit_s) in _OF_REQUESTS.items():
            if (value := report.get(key)) is not None:
                self._observe(name, value * unit_s)

    def _count(self, key: str, count: float) -> None:
        if count:
            self.data[key] = self.data.get(key, 0) + count

    def _observe(self, name: str, *values: float) -> None:
        self.data.setdefault(name, []).extend(values)


class NdpMetrics(KVConnectorPromMetrics):
    """Lives in the front end, or in an offline `LLM` with disable_log_stats=False."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        engines = per_engine_labelvalues
        counter_class, histogram_class, gauge_class = vllm_private.metric_classes(self)
        self._counters: dict[str, dict[int, Any]] = {}  # key of NdpStats -> engine -> counter
        for name, (about, label, key, values) in COUNTERS.items():
            labels = [*labelnames, label] if label else labelnames
            metric = counter_class(name=f"vllm:{name}", documentation=about, labelnames=labels)
            for value in values:
                of_value = {engine: [*own, value] for engine, own in engines.items()}
                self._counters[f"{key}:{value}"] = create_metric_per_engine(metric, of_value)
            if not label:
                self._counters[key] = create_metric_per_engine(metric, engines)
        self._histograms: dict[str, dict[int, Any]] = {}
        for name, (about, buckets) in HISTOGRAMS.items():
            histogram = histogram_class(
                name=f"vllm:{name}", documentation=about, labelnames=labelnames, buckets=buckets
            )
            self._histograms[name] = create_metric_per_engine(histogram, engines)
        gauge = gauge_class(
            name=f"vllm:{DEVICE_UP}",
            documentation="1 while the device answers, 0 while the host computes for it; as of the last step",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        self._device_up = create_metric_per_engine(gauge, engines)
        for of_engine in self._device_up.values():
            of_engine.set(1)  # without a device the engine would not have started

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            if key == DEVICE_UP:
                self._device_up[engine_idx].set(value)
            elif key in self._histograms:
                for seconds in value:
                    self._histograms[key][engine_idx].observe(seconds)
            elif key in self._counters:
                self._counters[key][engine_idx].inc(value)
