"""A recorded run of real vLLM, replayed under its own policy, takes the same simulated time to the picosecond."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engines import PROMPTS, ROOT, engine, greedy, replay_of, trace_of

from ndp_device.replicas.format import read_manifest, write_manifest
from ndp_device.timing.model import CommandEnergy
from vllm_ndp.cost_model.memory import DoesNotFit, beside_device_memory
from vllm_ndp.lab.cli.recorded import losses_of_run
from vllm_ndp.lab.exact.live import RecordedRun, recorded_rules, require_capacity
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm

SLOW_GPU = {"gpu.hbm_bytes_per_s": 300_000_000_000}
"""The test model's experts are read in less time than a message takes; with this GPU they are worth sending."""


FAST_LINK = {"link.dma_launch_ps": 0, "link.dma_latency_ps": 0} | dict.fromkeys(
    ("link.bulk_bytes_per_s", "link.raw_bytes_per_s"), 400_000_000_000
)
"""The same for copies: a launch alone takes longer than the device takes for its small experts."""


def record(directory: Path, settings: dict, **options) -> Trace:
    from vllm import SamplingParams

    """A trace of a few batches. Hot experts run on the device in it exactly where the settings let them."""
    with engine(settings={**settings, "record": str(directory)}, **options) as llm:
        lengths = [SamplingParams(temperature=0.0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(len(PROMPTS))]
        llm.generate(list(PROMPTS), lengths)
        llm.generate([PROMPTS[0] * 4, PROMPTS[0]], lengths[:2])  # a longer prompt, and one the prefix cache knows
        llm.generate(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=1))  # ends with its prefill
        llm.generate(PROMPTS[2], lengths[0])
        totals = llm.collective_rpc("ndp_totals")[0]
    has_kept = settings["hot_experts"] > 0
    assert (totals["kept_experts"] > 0) == has_kept
    has_spilled = settings.get("hardware_overrides") == SLOW_GPU and settings.get("execution") != "paper"
    assert (totals["spilled_pairs"] > 0) == has_spilled
    assert (totals["prefill_device_pairs"] > 0) == (settings.get("prefill") != "streamed")
    return trace_of(directory)


def weighed_replicas(directory: Path) -> Path:
    """The calibrated ones, as if the first layer's losses were the worst: other plans than with layers alike."""
    shutil.copytree(ROOT / "models" / "tiny-mixtral-replicas", directory)
    manifest = read_manifest(directory)
    write_manifest(directory, msgspec.structs.replace(manifest, layer_weights=(2.0, 0.2, 0.6, 1.2)))
    return directory


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"hot_experts": 4, "avg_bits": 2.0}, {}),
        ({"hot_experts": 3, "avg_bits": 2.5, "debug": {"bits_for": "batch"}}, {}),
        (
            {"hot_experts": 2, "avg_bits": 1.5, "policy": {"bit_rule": "mse"}, "hardware_overrides": FAST_LINK},
            {"max_num_batched_tokens": 32, "max_num_seqs": 3},
        ),
        ({"hot_experts": 0, "avg_bits": 3.0}, {"max_num_batched_tokens": 48}),
        ({"hot_experts": 2, "avg_bits": 2.0, "policy": {"bit_rule": "layers"}, "replicas": "weighed"}, {}),
        ({"hot_experts": 5, "avg_bits": 2.0, "prefill": "streamed", "hardware_overrides": SLOW_GPU}, {}),
    ],
    ids=["plain", "batch, difference", "chunked", "all-cold", "over-layers", "balanced"],
)
def test_replaying_a_live_run_gives_its_simulated_times_to_the_picosecond(tmp_path, settings, options):
    """Runs in full precision, of several tiers, and with widths of what is offloaded: test_integration_layouts.py."""
    if settings.get("replicas") == "weighed":
        settings = settings | {"replicas": str(weighed_replicas(tmp_path / "replicas"))}
    trace = record(tmp_path / "trace", settings, **options)
    replayed = replay_of(trace)
    assert len(replayed.steps) > 20
    assert replayed.fallback_steps == 0
    assert replayed.plan_mismatches == 0
    assert np.array_equal(replayed.start_ps, replayed.recorded_start_ps)
    assert np.array_equal(replayed.step_ps, replayed.recorded_step_ps)
    assert replayed.identical


def test_requests_report_the_energy_that_a_replay_of_their_commands_takes_by_part(tmp_path):
    """Three prompts, two of them together: each has the share of its pairs. What the commands of the recorded run take
    on the device model is what the reports add up to; and a GPU that is too small for the run is said to be."""
    settings = {"hot_experts": 2, "avg_bits": 2.0, "record": str(tmp_path / "trace")}
    with engine(settings=settings, max_num_seqs=2) as llm:
        reports = [output.kv_transfer_params["ndp"] for output in greedy(llm, PROMPTS[:3], 6)]
    trace = trace_of(tmp_path / "trace")
    setup, rules = trace.provenance.live, recorded_rules(trace, losses_of_run(trace, None))
    run = RecordedRun(trace, setup, rules)
    timings = [timing for step in run.steps.tolist() for timing in run.run(step).device if timing is not None]
    parts = {part: sum(report[f"simulated_{part}_uj"] for report in reports) for part in ("link", "dram", "arrays")}
    assert min(parts.values()) > 0
    assert sum(parts.values()) == pytest.approx(sum(timing.energy_pj for timing in timings) / 1e6, rel=1e-6)
    inside = CommandEnergy.of(
        run.engine.hardware.energy,
        wire_bytes=0,
        weight_bytes=sum(timing.weight_bytes for timing in timings),
        row_activations=sum(timing.row_activations for timing in timings),
    )
    assert parts["dram"] == pytest.approx(inside.dram_fj / 1e9, rel=0.01)  # accesses are rounded up once a step
    assert parts["arrays"] == pytest.approx(inside.arrays_fj / 1e9, rel=0.01)

    need = beside_device_memory(run.engine.costs, 2).gpu
    tiny = msgspec.structs.replace(setup, overrides={"gpu.hbm_capacity_bytes": need})
    with pytest.raises(DoesNotFit, match="the run with K 2 does not fit, gpu memory lacks"):
        require_capacity(RecordedRun(trace, tiny, rules).engine, trace, 2)
