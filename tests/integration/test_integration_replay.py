"""A recorded run of real vLLM, replayed under its own policy, takes the same simulated time to the picosecond."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engines import PROMPTS, ROOT, engine, greedy, replay_of, trace_of

from ndp_device.replicas.format import read_manifest, write_manifest
from ndp_device.timing.model import DeviceModel
from vllm_ndp.cost_model.memory import DoesNotFit, beside_device_memory
from vllm_ndp.lab.cli.recorded import losses_of_run
from vllm_ndp.lab.exact.engine import alone
from vllm_ndp.lab.exact.live import RecordedRun, recorded_rules, require_capacity
from vllm_ndp.lab.load.latency import tokens_of
from vllm_ndp.lab.load.run import Host, ServedRequest, of_steps, serve_again
from vllm_ndp.traces.format import CACHED
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm

SLOW_GPU = {"gpu.hbm_bytes_per_s": 300_000_000_000}
"""The test model's experts are read in less time than a message takes; with this GPU they are worth sending."""


FAST_LINK = {"link.dma_launch_ps": 0, "link.dma_latency_ps": 0} | dict.fromkeys(
    ("link.bulk_bytes_per_s", "link.raw_bytes_per_s"), 400_000_000_000
)
"""The same for copies: a launch alone takes longer than the device takes for its small experts."""


def record(directory: Path, settings: dict, **options) -> tuple[Trace, int]:
    """A trace of a few batches and the energy counted. Hot experts run on the device where the settings let them."""
    with engine(settings={**settings, "record": str(directory)}, **options) as llm:
        greedy(llm, PROMPTS, [4, 7, 10, 13])
        greedy(llm, [PROMPTS[0] * 4, PROMPTS[0]], [4, 7])  # a longer prompt, and one the prefix cache knows
        greedy(llm, PROMPTS[1:2], 1)  # ends with its prefill
        greedy(llm, PROMPTS[2:3], 4)
        totals = llm.collective_rpc("ndp_totals")[0]
    has_kept = settings["hot_experts"] > 0
    assert (totals["kept_experts"] > 0) == has_kept
    assert (totals["spilled_pairs"] > 0) == (settings.get("hardware_overrides") == SLOW_GPU)
    assert (totals["prefill_device_pairs"] > 0) == (settings.get("prefill") != "streamed")
    return trace_of(directory), totals["simulated_device"]["energy_pj"]


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
def test_replaying_a_live_run_gives_its_simulated_times_to_the_picosecond_and_its_energy(tmp_path, settings, options):
    """Runs in full precision, of several tiers, and with widths of what is offloaded: test_integration_layouts.py.

    A GPU that is too small for the run is said to be.
    """
    if settings.get("replicas") == "weighed":
        settings = settings | {"replicas": str(weighed_replicas(tmp_path / "replicas"))}
    trace, counted_pj = record(tmp_path / "trace", settings, **options)
    replayed = replay_of(trace)
    assert len(replayed.steps) > 20
    assert replayed.fallback_steps == 0
    assert replayed.plan_mismatches == 0
    assert np.array_equal(replayed.start_ps, replayed.recorded_start_ps)
    assert np.array_equal(replayed.step_ps, replayed.recorded_step_ps)
    assert replayed.identical

    setup, rules = trace.provenance.live, recorded_rules(trace, losses_of_run(trace, None))
    run, num_hot = RecordedRun(trace, setup, rules), settings["hot_experts"]
    timings = [timing for step in run.steps.tolist() for timing in run.run(step).device if timing is not None]
    assert counted_pj == sum(timing.energy_pj for timing in timings) > 0
    need = beside_device_memory(run.engine.costs, num_hot).gpu
    tiny = msgspec.structs.replace(setup, overrides={**setup.overrides, "gpu.hbm_capacity_bytes": need})
    with pytest.raises(DoesNotFit, match=f"the run with K {num_hot} does not fit, gpu memory lacks"):
        require_capacity(RecordedRun(trace, tiny, rules).engine, trace, num_hot)


# -- Requests that join and leave a running batch of real vLLM: the scheduler's model makes the same steps, in the -----


ARRIVALS = [
    (0, 0, 9),
    (0, 1, 3),
    (2, 2, 14),
    (2, 3, 1),
    (3, 0, 6),
    (3, 1, 12),
    (4, 2, 2),
    (9, 3, 5),
    (9, 0, 8),
    (40, 1, 4),
]
"""(before which step, which prompt, how many tokens); step 40 lies behind the end of everything before it."""


def live_run(directory: Path, **options) -> tuple[Trace, list[int]]:
    """A trace, and before which step each of its requests was added."""
    from vllm import SamplingParams

    settings = {"hot_experts": 4, "avg_bits": 2.0, "record": str(directory)}
    with engine(settings=settings, enable_prefix_caching=False, **options) as llm:
        core, step, left = llm.llm_engine, 0, list(enumerate(ARRIVALS))
        added: dict[str, int] = {}
        while left or core.has_unfinished_requests():
            while left and (left[0][1][0] <= step or not core.has_unfinished_requests()):
                number, (_, prompt, tokens) = left.pop(0)
                text = PROMPTS[prompt] * (1 + number % 3)
                sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
                core.add_request(str(number), text, sampling)
                added[str(number)] = step
            core.step()
            step += 1
    trace = trace_of(directory)
    by_name = {name.split("-")[0]: step for name, step in added.items()}
    return trace, [by_name[name.split("-")[0]] for name in trace.request_ids]


def served(trace: Trace, arrivals_ps: np.ndarray) -> ServedRequest:
    setup = trace.provenance.live
    assert setup is not None
    assert setup.scheduling is not None
    host = Host(trace, setup, recorded_rules(trace, losses_of_run(trace, None)), arrivals_ps, setup.scheduling)
    return alone(host.whole(), DeviceModel(host.engine.hardware))


def recorded_steps(trace: Trace) -> list[list[tuple[int, int, int]]]:
    """(request, start, rows) of each step in the order of its rows."""
    steps = []
    for step in trace.events["step"].tolist():
        rows = np.flatnonzero((trace.step == step) & (trace.phase != CACHED))
        requests, positions = trace.request[rows], trace.position[rows]
        order = list(dict.fromkeys(requests.tolist()))
        steps.append([(r, int(positions[requests == r].min()), int((requests == r).sum())) for r in order])
    return steps


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 32, "max_num_seqs": 8, "num_gpu_blocks_override": 7, "max_model_len": 160}, True),
    ],
    ids=["roomy", "in chunks and preempting"],
)
def test_arrivals_alone_give_the_steps_of_vllm_and_their_simulated_times(tmp_path, options, preempts):
    trace, added = live_run(tmp_path / "trace", **options)
    ends = np.concatenate([[0], trace.events["simulated_start_ps"] + trace.events["simulated_step_ps"]])
    arrivals_ps = ends[np.array(added)]
    replay = served(trace, arrivals_ps)
    steps = [[(s.request, s.start, s.num_tokens) for s in step.spans] for step in replay.steps]
    assert steps == recorded_steps(trace)
    assert [step.run.time.start_ps for step in replay.steps] == trace.events["simulated_start_ps"].tolist()
    assert [step.run.time.total_ps for step in replay.steps] == trace.events["simulated_step_ps"].tolist()
    assert (replay.preemptions > 0) == preempts
    assert any(len(step) > 2 for step in steps)
    tokens = tokens_of(replay)
    assert len(tokens.at_ps) == sum(tokens for _, _, tokens in ARRIVALS)
    if not options:  # nobody had to wait for a place, so the recording itself says when requests came
        assert np.array_equal(of_steps(trace), arrivals_ps)
        assert serve_again(trace, losses_of_run(trace, None)).steps == replay.steps
