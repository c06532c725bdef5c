"""Status of a running server or device, read again and again: samples, and the rates between two of them.

A server is asked over HTTP: `/metrics`, which every vLLM has, and `/v1/ndp/status`, where its middleware serves it. A
device is asked for its Description.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ndp_device.common.errors import ConfigError
from ndp_device.transport import is_address
from vllm_ndp.operating.server import DECODE_KINDS, Server, ServerRefusal

STATUS = "/v1/ndp/status"
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Sample:
    """One look. `sums` only grow, `levels` go up and down; `status` is what the middleware or the device says."""

    at_s: float
    sums: Mapping[str, float]
    levels: Mapping[str, float]
    status: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates:
    """Rates per second between two looks, and means over the events that ended in between. None: no event ended."""

    seconds: float
    per_s: Mapping[str, float]
    means: Mapping[str, float | None]
    hot_share: float | None


# -- a server ----------------------------------------------------------------------------------------------------------

SUMS = {
    "vllm:prompt_tokens_total": "prompt tokens",
    "vllm:generation_tokens_total": "output tokens",
    "vllm:request_success_total": "requests",
    "vllm:ndp_device_messages_total": "device messages",
    "vllm:ndp_planned_prompts_total": "plans",
    "vllm:ndp_migrated_experts_total": "experts moved",
    "vllm:ndp_simulated_seconds_total": "simulated seconds",
}
LEVELS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "KV cache used",
    "vllm:ndp_device_up": "device up",
}
MEANS = {
    "vllm:time_to_first_token_seconds": "measured TTFT",
    "vllm:inter_token_latency_seconds": "measured TPOT",
    "vllm:ndp_simulated_ttft_seconds": "simulated TTFT",
    "vllm:ndp_simulated_tpot_seconds": "simulated TPOT",
    "vllm:ndp_measured_device_round_trip_seconds": "measured device round trip",
    "vllm:ndp_measured_plan_seconds": "measured planning",
}
"""Histograms, read as sum and count. Simulated and measured stay names of their own."""
_PAIRS = "vllm:ndp_pairs_total"


class WatchedServer(Server):
    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key, _TIMEOUT_S)
        self._has_status = True

    def look(self) -> Sample:
        sums, levels = read_metrics(self.text("/metrics"))
        return Sample(time.monotonic(), sums, levels, self._status())

    def _status(self) -> Mapping[str, Any]:
        """Empty where this server has no such path; asked once then."""
        if not self._has_status:
            return {}
        try:
            status = self.json(STATUS)
        except ServerRefusal as refusal:
            if refusal.wants_key:
                raise
            self._has_status = False
            return {}
        return status if isinstance(status, dict) else {}


def read_metrics(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """(sums, levels) of a page in Prometheus' text format; engines and models are added up, a share is their mean."""
    sums: defaultdict[str, float] = defaultdict(float)
    levels: defaultdict[str, list[float]] = defaultdict(list)
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise ConfigError(f"what /metrics answers is not in Prometheus' text format: {error}") from None
    for family in families:
        for sample in family.samples:
            base = sample.name.removesuffix("_sum").removesuffix("_count")
            if sample.name in SUMS:
                sums[SUMS[sample.name]] += sample.value
            elif sample.name in LEVELS:
                levels[LEVELS[sample.name]].append(sample.value)
            elif base in MEANS and base != sample.name:
                sums[f"{MEANS[base]} {sample.name.removeprefix(base + '_')}"] += sample.value
            elif sample.name == _PAIRS:
                sums[f"{sample.labels['where'].removesuffix('_pairs')} pairs"] += sample.value
    shared = ("KV cache used",)
    return dict(sums), {
        name: sum(values) / len(values) if name in shared else min(values) if name == "device up" else sum(values)
        for name, values in levels.items()
    }


START = Sample(0.0, {}, {})
"""Before everything: what `rates` since then are means of."""


def rates(before: Sample, after: Sample) -> Rates:
    """Rates between two readings of one server. A counter that fell counts from zero, because its server restarted."""
    seconds = max(after.at_s - before.at_s, 1e-9)
    grown = {
        name: value - (old if (old := before.sums.get(name, 0.0)) <= value else 0.0)
        for name, value in after.sums.items()
    }
    means = {}
    for name in MEANS.values():
        count = grown.get(f"{name} count", 0.0)
        means[name] = grown[f"{name} sum"] / count if count else None
    plain = {name: value / seconds for name, value in grown.items() if not name.endswith((" sum", " count"))}
    decoded = [grown.get(f"{place} pairs", 0.0) for place in DECODE_KINDS]
    return Rates(seconds, plain, means, decoded[0] / sum(decoded) if sum(decoded) else None)


# -- a device ----------------------------------------------------------------------------------------------------------


class Device:
    """`ndp-device serve`, by its address."""

    def __init__(self, address: str, key: Path | None = None) -> None:
        self.name, self._key = address, key

    def look(self) -> Sample:
        import msgspec

        from ndp_device.probe import Probe

        with Probe(self.name, timeout_s=_TIMEOUT_S, keys=self._key) as probe:
            fields: dict[str, Any] = msgspec.to_builtins(probe.describe())
        counts = {name.removeprefix("num_"): float(fields[name]) for name in ("num_executed", "num_refused")}
        kept = {name: value for name, value in fields.items() if name not in ("id", "ndp", "tensors", "crc", "type")}
        return Sample(time.monotonic(), counts, {"sessions": float(fields["num_sessions"])}, kept)


Watched = WatchedServer | Device
"""What has a name and can be looked at."""


def watched(target: str, *, api_key: str | None = None, key: Path | None = None) -> Watched:
    """HOST:PORT is a server's. Raises ConfigError for what is neither a server's address nor a device's."""
    if target.startswith(("http://", "https://")):
        if key is not None:
            raise ConfigError("--key is for devices behind tcp://: a server takes --api-key")
        return WatchedServer(target, api_key)
    if is_address(target):
        return Device(target, key)
    if re.fullmatch(r"[\w.-]+:\d{1,5}/?|\[[0-9a-fA-F:]+\]:\d{1,5}/?", target):
        return watched(f"http://{target}", api_key=api_key, key=key)
    raise ConfigError(
        f"what to watch must be http://HOST:PORT of vllm serve, or ipc:// or tcp:// of a device, got {target!r}"
    )
