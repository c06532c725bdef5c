"""Metrics of the plugin on `/metrics`: `vllm:ndp_*`, beside vLLM's own.

    StepReport -> NdpStats (scheduler) -> vLLM's stats of the step -> NdpMetrics (front end) -> /metrics

Names begin with `vllm:`, because only those are taken down when a second engine is made in a process. `simulated_*` and
`measured_*` are metrics of their own; no metric holds both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from ndp_device.common.errors import UNAVAILABLE
from ndp_device.timing.work import BOUNDS
from vllm_ndp.integration import vllm_private
from vllm_ndp.integration.report import DEVICE_STAGES, PHASES, StepReport, counts_of
from vllm_ndp.layer.split import PAIR_KINDS

_FINE = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_COARSE = (*_FINE[3:], 10.0, 20.0, 60.0)


def _each(key: str, labels: Iterable[str]) -> dict[str, str]:
    return {label: f"{key}:{label}" for label in labels}


COUNTERS: dict[str, tuple[str, str, Mapping[str, str], float]] = {
    # name: what it counts, its label, value of the label -> key of NdpStats, unit
    "ndp_pairs": ("(row, expert) pairs by where they ran", "where", _each("pairs", PAIR_KINDS), 1),
    "ndp_fallback_causes": (
        "Pairs of decode and prompts that the device did not answer",
        "cause",
        _each("why", UNAVAILABLE),
        1,
    ),
    "ndp_rows": ("Rows of forward passes", "phase", _each("rows", PHASES), 1),
    "ndp_steps": ("Forward passes with rows", "", {"": "steps"}, 1),
    "ndp_device_messages": ("Messages that the device answered", "", {"": "messages"}, 1),
    "ndp_planned_prompts": ("Prompts whose routing was planned from", "", {"": "prefills"}, 1),
    "ndp_migrated_experts": ("Experts copied into hot slots for a plan", "", {"": "migrated"}, 1),
    "ndp_kept_experts": ("Experts that became hot and were in a slot already", "", {"": "kept"}, 1),
    "ndp_requests": (
        "Requests that ended, by how",
        "finish",
        _each("finish", ("stop", "length", "aborted", "error")),
        1,
    ),
    "ndp_simulated_seconds": (
        "Simulated time of all steps and of experts that moved between them",
        "",
        {"": "simulated_ps"},
        1e-12,
    ),
    "ndp_simulated_device_seconds": (
        "Simulated time of the device by stage",
        "stage",
        {stage: f"device:{stage}_ps" for stage in (*DEVICE_STAGES, "overlap_saved")},
        1e-12,
    ),
    "ndp_simulated_device_bound": (
        "Device answers by what took the largest share of their simulated time",
        "bound",
        _each("bound", BOUNDS),
        1,
    ),
    "ndp_simulated_device_bytes": (
        "Bytes over the simulated link, and of weights read",
        "what",
        {"in": "device:bytes_in", "out": "device:bytes_out", "weights": "device:weight_bytes"},
        1,
    ),
    "ndp_simulated_energy_joules": (
        "Simulated energy of what moved, arithmetic not in it",
        "",
        {"": "device:energy_pj"},
        1e-12,
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
        for key, count in counts_of(step).items():
            self._count(key, count)
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
        self._counters: dict[str, tuple[dict[int, Any], float]] = {}  # key of NdpStats -> engine -> counter, its unit
        for name, (about, label, keys, unit) in COUNTERS.items():
            labels = [*labelnames, label] if label else labelnames
            metric = counter_class(name=f"vllm:{name}", documentation=about, labelnames=labels)
            for value, key in keys.items():
                of_value = {engine: [*own, value] if label else own for engine, own in engines.items()}
                self._counters[key] = create_metric_per_engine(metric, of_value), unit
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
                counter, unit = self._counters[key]
                counter[engine_idx].inc(value * unit)
