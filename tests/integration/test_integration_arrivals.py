"""Requests that join and leave a running batch of real vLLM: the scheduler's model makes the same steps, in the same
order of rows, and the replay the same simulated times to the picosecond, with the arrival times as its only input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engines import PROMPTS, engine, trace_of

from ndp_device.timing.model import DeviceModel
from vllm_ndp.lab.cli.recorded import losses_of_run
from vllm_ndp.lab.exact.engine import alone
from vllm_ndp.lab.exact.live import recorded_rules
from vllm_ndp.lab.load.host import Host, ServedRequest
from vllm_ndp.lab.load.latency import tokens_of
from vllm_ndp.lab.load.run import of_steps, serve_again
from vllm_ndp.lab.load.scheduler import SchedulerRules
from vllm_ndp.traces.format import CACHED
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm

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
    told = setup.scheduling
    assert told is not None
    rules = SchedulerRules(told.max_num_batched_tokens, told.max_num_seqs, told.block_size, told.kv_blocks)
    host = Host(trace, setup, recorded_rules(trace, losses_of_run(trace, None)), arrivals_ps, rules)
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
