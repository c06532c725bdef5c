"""Steps as a Chrome / Perfetto trace: GPU, link, device and queue tracks on the simulated clock, steps on the measured.

Two processes, because the two clocks have nothing in common. Open the file in ui.perfetto.dev or chrome://tracing.
Knows StepRun and the JSON trace event format. Does not know how times were found.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_ndp.lab.exact.engine import StepRun

SIMULATED, MEASURED = 1, 2
GPU, LINK_IN, DEVICE, LINK_OUT, MIGRATION, HOST = 1, 2, 3, 4, 5, 6
_TRACKS = {
    GPU: "GPU",
    LINK_IN: "link to device",
    DEVICE: "NDP",
    LINK_OUT: "link from device",
    MIGRATION: "migration",
    HOST: "host CPU",
}
_PS_PER_US = 1e6


def chrome_trace(runs: Iterable[StepRun], measured_s: Iterable[float] = ()) -> dict[str, Any]:
    """measured_s: wall seconds of the same steps, if they ran live."""
    events: list[dict[str, Any]] = [_name("process_name", SIMULATED, 0, "simulated")]
    events += [_name("thread_name", SIMULATED, track, name) for track, name in _TRACKS.items()]
    for run in runs:
        if run.migrated_experts and (took := run.migration_ps):
            experts = f"{run.migrated_experts} experts"
            events.append(_slice(MIGRATION, experts, run.time.start_ps - took, took, step=run.step))
        events += _step(run)
    wall = 0.0
    walls = list(measured_s)
    if walls:
        events += [_name("process_name", MEASURED, 0, "measured"), _name("thread_name", MEASURED, 1, "engine steps")]
    for step, seconds in enumerate(walls):
        events.append({"ph": "X", "pid": MEASURED, "tid": 1, "name": f"step {step}", "ts": wall, "dur": seconds * 1e6})
        wall += seconds * 1e6
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _step(run: StepRun) -> list[dict[str, Any]]:
    events = []
    for layer, (time, timing) in enumerate(zip(run.time.layers, run.device, strict=True)):
        at = time.start_ps
        where = {"step": run.step, "layer": layer}
        events.append(_slice(GPU, "attention", at, time.attention_ps, **where))
        at += time.attention_ps
        if time.shared_ps:
            events.append(_slice(GPU, "shared experts", at, time.shared_ps, **where))
        if time.hot_ps:
            events.append(_slice(GPU, "hot experts", at + time.shared_ps, time.hot_ps, **where))
        if time.stream_ps:
            events.append(_slice(MIGRATION, "stream experts", at, time.stream_ps, **where))
        if time.host_ps:
            events.append(_slice(HOST, "warm experts", at, time.host_ps, **where))
        if timing is None:
            continue
        arrived = timing.submit_ps + timing.launch_ps + timing.link_in_ps
        events.append(_slice(LINK_IN, "activations", timing.submit_ps, arrived - timing.submit_ps, **where))
        busy = timing.done_ps - timing.link_out_ps - timing.completion_ps - timing.start_ps
        details = {"bound": timing.bound, "bytes": timing.weight_bytes, "dram_us": timing.dram_ps / _PS_PER_US}
        events.append(_slice(DEVICE, f"cold experts ({timing.bound})", timing.start_ps, busy, **where, **details))
        out = timing.done_ps - timing.link_out_ps - timing.completion_ps
        events.append(_slice(LINK_OUT, "partial sums", out, timing.link_out_ps + timing.completion_ps, **where))
        events.append(_counter("queue wait us", timing.submit_ps, timing.queue_ps / _PS_PER_US))
        events.append(_counter("queue wait us", timing.done_ps, 0.0))
    head = run.time.end_ps - run.time.head_ps
    events.append(_slice(GPU, "head", head, run.time.head_ps, step=run.step))
    return events


def _slice(track: int, name: str, start_ps: int, duration_ps: int, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": SIMULATED,
        "tid": track,
        "name": name,
        "ts": start_ps / _PS_PER_US,
        "dur": duration_ps / _PS_PER_US,
        "args": args,
    }


def _counter(name: str, at_ps: int, value: float) -> dict[str, Any]:
    return {"ph": "C", "pid": SIMULATED, "name": name, "ts": at_ps / _PS_PER_US, "args": {"value": value}}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
