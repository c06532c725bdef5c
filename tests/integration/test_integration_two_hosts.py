"""Two real engines that share one device, each told so: their simulated times are those of the exact replay of their
traces, and what the two traces take on one simulated clock is that and the wait for each other."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import one_engine
import pytest
from engines import MODEL, PROMPTS, REPLICAS, replay_of, trace_of

from ndp_device.timing.model import DeviceModel
from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.lab.cli.recorded import losses_of_run
from vllm_ndp.lab.exact.engine import StepRun, alone, together
from vllm_ndp.lab.exact.live import RecordedRun, recorded_rules
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm

TOKENS = 20
PROMPTS_OF = (PROMPTS[:3], PROMPTS[3:])
SLOW_GPU = {"gpu.hbm_bytes_per_s": 300_000_000_000}
"""So slow that some hot experts are worth sending to half a device, and more of them to a whole one."""

Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> tuple[Said, list[Trace]]:
    """What both engines say, and their traces. They run at the same time."""
    folder = tmp_path_factory.mktemp("traces")
    device = DeviceProcess.spawn(MODEL, REPLICAS, hardware_overrides=SLOW_GPU)
    settings = {"hot_experts": 4, "prefill": "streamed", "devices": device.address, "debug": {"device_hosts": 2}}
    settings |= {"replicas": str(REPLICAS), "hardware_overrides": SLOW_GPU}

    def run(host: int) -> dict[str, Any]:
        return one_engine.run(settings | {"record": str(folder / str(host))}, PROMPTS_OF[host], TOKENS, passes=2)

    try:
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(run, (0, 1)))
    finally:
        device.terminate()
    return said, [trace_of(folder / str(host)) for host in (0, 1)]


def host_of(trace: Trace) -> RecordedRun:
    setup = trace.provenance.live
    assert setup is not None
    return RecordedRun(trace, setup, recorded_rules(trace, losses_of_run(trace, None)))


def alone_in_a_room(trace: Trace, device_hosts: int) -> Trace:
    """The trace as if its engine had been told of so many hosts."""
    live = msgspec.structs.replace(trace.provenance.live, device_hosts=device_hosts)
    return dataclasses.replace(trace, provenance=msgspec.structs.replace(trace.provenance, live=live))


def times(runs: list[StepRun]) -> list[tuple[int, int]]:
    return [(run.time.start_ps, run.time.total_ps) for run in runs]


@pytest.mark.parametrize("host", [0, 1])
def test_each_of_two_live_hosts_takes_the_simulated_times_of_its_replay(live: tuple[Said, list[Trace]], host: int):
    (totals,) = live[0][host]["totals"]
    trace = live[1][host]
    assert trace.provenance.live.device_hosts == 2
    assert totals["fallback_pairs"] == 0
    replayed = replay_of(trace)
    assert len(replayed.steps) >= 2 * TOKENS
    assert replayed.identical
    assert totals["simulated_ps"] == replayed.start_ps[-1] + replayed.step_ps[-1]


def test_a_host_that_knows_of_the_other_sends_fewer_hot_experts(live: tuple[Said, list[Trace]]):
    for said, trace in zip(*live, strict=True):
        told = said["totals"][0]["spilled_pairs"]
        assert told > 0
        assert not replay_of(alone_in_a_room(trace, 1)).identical


def test_on_one_clock_the_two_hosts_take_their_live_times_and_wait_for_each_other(live: tuple[Said, list[Trace]]):
    """A live report cannot contain that wait: an engine's simulated clock stands still while it has no request."""
    traces = live[1]
    device = DeviceModel(host_of(traces[0]).engine.hardware)
    shared = together([host_of(trace).whole() for trace in traces], device)
    waited = 0
    for trace, runs in zip(traces, shared, strict=True):
        own = alone(host_of(trace).whole(), DeviceModel(host_of(trace).engine.hardware))
        recorded = zip(trace.events["simulated_start_ps"], trace.events["simulated_step_ps"], strict=True)
        assert times(own) == [(int(start), int(lasted)) for start, lasted in recorded]
        waited += sum(run.time.total_ps for run in runs) - sum(run.time.total_ps for run in own)
        assert [run.migrated_experts for run in runs] == [run.migrated_experts for run in own]
    assert waited > 0
