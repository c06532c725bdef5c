"""A host whose plans follow decode, step by step: what it costs, and that it is nothing where nothing changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.exact.engine import StepRun, modelled_host
from vllm_ndp.lab.exact.live import RecordedRun
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.follower import FollowRules
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace
from vllm_ndp.traces.trace import Trace

COSTS = Costs(load_hardware("h100-ndp512", **{"dram.kind": "ideal"}), model_named("mixtral-8x7b"))
LAYERS, EXPERTS, PROMPT, DECODE = 32, 8, 64, 160


def trace_of(turns: int, requests: int = 2) -> Trace:
    sizes = {"num_requests": requests, "prompt_len": PROMPT, "decode_len": DECODE}
    return synthetic_trace(SyntheticSettings(LAYERS, EXPERTS, 2, **sizes, signal=1.5, turns=turns, seed=5))


def run(trace: Trace, *, follow: bool) -> tuple[list[StepRun], RecordedRun]:
    loss = LossTable.nominal(LAYERS, EXPERTS)
    rules = PlannerRules(load_policy("prefill", PolicySettings()), Budget(4, 3.0), loss)
    setup = modelled_host(COSTS, rules)
    host = RecordedRun(trace, setup, replace(rules, follow=FollowRules() if follow else None))
    return [host.run(step) for step in host.steps.tolist()], host


def covered(trace: Trace, host: RecordedRun) -> float:
    """Of the last request's decode by the placement that its run ended with, in its last forty tokens."""
    ids = trace.sequences[-1].decode_ids[-40:]
    return float(host.engine.hot[np.arange(LAYERS)[:, None], ids].mean())


def test_where_the_subject_stays_a_run_that_would_follow_takes_the_same_picoseconds():
    trace = trace_of(0)
    (plain, _), (following, host) = run(trace, follow=False), run(trace, follow=True)
    assert [step.time for step in following] == [step.time for step in plain]
    assert [step.migration_ps for step in following] == [step.migration_ps for step in plain]
    assert host.engine.epoch == 2  # one plan for each prompt


def test_after_a_change_of_subject_experts_come_beside_decode_and_hardly_cost_it_time():
    """A copy of 352 MB takes 13.8 ms, a step about 7: the clock waits only where the guess of a step was too bold."""
    trace = trace_of(1)
    (plain, stays), (following, host) = run(trace, follow=False), run(trace, follow=True)
    assert host.engine.epoch > 2 + 10
    assert covered(trace, host) > covered(trace, stays) + 0.03
    waited = sum(step.migration_ps for step in following) - sum(step.migration_ps for step in plain)
    whole = following[-1].time.end_ps
    assert 0 <= waited < 0.05 * whole
    assert sum(step.replanned for step in following) == host.engine.epoch


@pytest.mark.parametrize("seed", range(3))
def test_no_expert_is_in_force_before_its_copy_is_there(seed: int):
    """Between two exchanges lies at least what the copies for the second one take."""
    trace = trace_of(2 + seed, requests=1)
    steps, host = run(trace, follow=True)
    changed = [step.time.start_ps for step in steps if step.replanned][1:]  # the first is the prompt's own plan
    copy_ps = host.engine.clock.model.migration_ps(1)
    assert len(changed) > 3
    assert min(np.diff(changed)) >= copy_ps
