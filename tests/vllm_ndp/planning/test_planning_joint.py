"""Joint plans: against every plan there is on small cases, against their bound on large ones; what they refuse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndp_device.errors import ConfigError
from vllm_ndp.planning import joint
from vllm_ndp.planning.joint import least_loss, least_time
from vllm_ndp.planning.joint_problem import Choice, JointPlan, JointProblem

FULL = 1600
RATES = {"gpu": 30.0, "host": 3.0, "device": 5.0}  # bytes a picosecond


def is_on(plan: JointPlan, tier: str) -> np.ndarray:
    """[L, E]."""
    return np.array([choice.tier == tier for choice in plan.problem.choices])[plan.chosen]


def held(bits: int) -> int:
    return FULL * bits // 16 + (0 if bits == 16 else 25)


MENU = tuple(
    Choice(tier, bits, held(bits))
    for tier, widths in (("gpu", (16, 8, 4, 2)), ("host", (16, 4)), ("device", (16, 4, 3, 2, 1)))
    for bits in widths
)


def problem(
    seed: int, layers: int, experts: int, gpu: float, menu: tuple[Choice, ...] = MENU, **budgets: float
) -> JointProblem:
    """Skewed use; loss falls by 4.4 a bit, with an expert's own factor; half of what the GPU may hold is there."""
    generator = np.random.default_rng(seed)
    share = generator.dirichlet(np.full(experts, 0.5), size=layers)
    own = generator.lognormal(0.0, 0.3, size=share.shape)
    ps = np.array([np.minimum(2 * share, 1.0) * c.held_bytes / RATES[c.tier] for c in menu])
    loss = np.array([share * own * (0.0 if c.bits == 16 else 4.4 ** (1 - c.bits)) for c in menu])
    moved = np.array([generator.integers(0, 2, share.shape) * (c.held_bytes if c.tier == "gpu" else 0) for c in menu])
    room = {"gpu": gpu * FULL * share.size, **{name: part * FULL * share.size for name, part in budgets.items()}}
    return JointProblem(menu, ps, loss, room, moved)


def best_of_all(given: JointProblem, most: float, least: str) -> float:
    """Plan by plan, in plain Python: the least time (or loss) within every limit, infinite where there is none."""
    _, layers, experts = given.shape
    cells = list(itertools.product(range(layers), range(experts)))
    best = np.inf
    for plan in itertools.product(range(len(given.choices)), repeat=len(cells)):
        used = dict.fromkeys(("gpu", "host", "device", "link"), 0.0)
        time = loss = 0.0
        for c, (layer, expert) in zip(plan, cells, strict=True):
            used[given.choices[c].tier] += given.choices[c].held_bytes
            used["link"] += given.moved[c, layer, expert]
            time += given.ps[c, layer, expert]
            loss += given.loss[c, layer, expert]
        value, limited = (time, loss) if least == "time" else (loss, time)
        if limited <= most * (1 + 1e-9) and all(used[n] <= b * (1 + 1e-9) for n, b in given.budgets.items()):
            best = min(best, value)
    return best


SMALL = tuple(c for c in MENU if c.bits in (16, 4, 2) and c.tier != "host")


@settings(max_examples=25)
@given(
    seed=st.integers(0, 999),
    gpu=st.sampled_from([0.1, 0.3, 0.6, 1.0]),
    link=st.sampled_from([None, 0.0, 0.4]),
    most=st.floats(0.01, 0.6),
    least=st.sampled_from(["time", "loss"]),
)
def test_a_small_plan_is_the_best_of_all_there_are(seed, gpu, link, most, least):
    given = problem(seed, 1, 4, gpu, SMALL, **({} if link is None else {"link": link}))
    find, limit = (least_time, most) if least == "time" else (least_loss, most * 4 * FULL / 5)
    best = best_of_all(given, limit, least)
    if np.isinf(best):
        with pytest.raises(ConfigError):
            find(given, limit)
    else:
        plan = find(given, limit)
        assert plan.reached == pytest.approx(best, rel=1e-9)
        assert plan.gap == 0


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999),
    gpu=st.sampled_from([0.1, 0.3, 0.6]),
    most=st.floats(0.02, 0.5),
    least=st.sampled_from(["time", "loss"]),
)
def test_the_best_of_all_plans_lies_between_a_priced_plan_and_its_bound(seed, gpu, most, least):
    """The method for large problems, on cases so small that one expert is a quarter of everything."""
    given = problem(seed, 2, 2, gpu, SMALL)
    find, limit = (least_time, most) if least == "time" else (least_loss, most * 4 * FULL / 5)
    best = best_of_all(given, limit, least)
    tried, joint.MOST_TRIED = joint.MOST_TRIED, 1
    try:
        plan = find(given, limit)
    except ConfigError:
        plan = None
    finally:
        joint.MOST_TRIED = tried
    if plan is not None:
        assert plan.bound <= best * (1 + 1e-9)
        assert best <= plan.reached * (1 + 1e-9)


@pytest.mark.parametrize(("layers", "experts"), [(94, 128), (61, 256), (32, 8)])
@pytest.mark.parametrize("gpu", [0.05, 0.2, 0.5])
def test_a_large_plan_keeps_every_limit_and_is_within_a_few_percent_of_its_bound(layers, experts, gpu):
    given = problem(0, layers, experts, gpu, link=0.1)
    plan = least_time(given, 0.02 * layers)
    assert given.lost(plan.chosen) <= 0.02 * layers * (1 + 1e-9)
    uses = given.uses(plan.chosen)
    assert all(uses[name] <= budget * (1 + 1e-9) for name, budget in given.budgets.items())
    assert plan.gap < 0.005
    other = least_loss(given, plan.time_ps)
    assert other.time_ps <= plan.time_ps * (1 + 1e-9)
    assert other.loss <= plan.loss * 1.02
    assert other.gap < 0.03


def test_more_of_anything_never_makes_a_plan_slower():
    times = [least_time(problem(1, 32, 8, gpu), 0.02 * 32).time_ps for gpu in (0.05, 0.1, 0.2, 0.4)]
    assert times == sorted(times, reverse=True)
    times = [least_time(problem(1, 32, 8, 0.2), loss * 32).time_ps for loss in (0.01, 0.02, 0.05, 0.2)]
    assert times == sorted(times, reverse=True)


def test_the_papers_plan_quantization_alone_and_all_cold_are_points_of_the_space():
    """With the tiers and widths of each alone, the plan is that one; with all of them none of the three is better."""
    given = problem(2, 8, 8, 0.6)
    whole = {}
    for name, keep in (
        ("paper", lambda c: (c.tier, c.bits) == ("gpu", 16) or (c.tier == "device" and c.bits <= 4)),
        ("quantized", lambda c: c.tier == "gpu" and c.bits < 16),
        ("cold", lambda c: c.tier == "device"),
    ):
        which = [i for i, c in enumerate(MENU) if keep(c)]
        part = JointProblem(tuple(MENU[i] for i in which), given.ps[which], given.loss[which], given.budgets)
        whole[name] = least_time(part, 0.05 * 8)
    everything = least_time(JointProblem(MENU, given.ps, given.loss, given.budgets), 0.05 * 8)
    assert all(everything.time_ps <= plan.time_ps * 1.001 for plan in whole.values())
    assert is_on(whole["quantized"], "gpu").all()
    assert is_on(whole["cold"], "device").all()
    assert set(np.unique(whole["paper"].bits[is_on(whole["paper"], "gpu")])) == {16}


def test_narrow_experts_on_the_gpu_beat_full_precision_beside_the_device():
    """Room for half of the experts in 16 bits, or for all in 8 (with their scales 0.52): six times the rate, no loss
    to speak of. At the loss of the paper's 2 bits on the device all of them go to the GPU."""
    given = problem(3, 32, 8, 0.52)
    plan = least_time(given, 1e-4 * 32)
    assert is_on(plan, "gpu").mean() > 0.95
    assert (plan.bits == 8).mean() > 0.9


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: least_time(problem(0, 4, 8, 0.01, MENU[:4]), 0.1), "no plan fits: .* all of them take .* 2 bits on"),
        (lambda: least_time(problem(0, 4, 8, 0.0, SMALL[3:]), 0.0), "a budget|no plan"),
        (lambda: least_time(problem(0, 4, 8, 0.1, SMALL[:3], gpu_=1), 0.1), "a budget is for one of"),
        (lambda: Choice("tpu", 4, 1), "one of the tiers gpu, host, device, got 'tpu'"),
        (lambda: Choice("gpu", 5, 1), r"one of \[16, 8, 4, 3, 2, 1\] bits, got 5"),
        (lambda: problem(0, 1, 2, -1.0), "budget of gpu bytes must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(make, sentence):
    if sentence.startswith("a budget|"):
        make()  # no room on the GPU, and none needed
        return
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_a_limit_that_no_plan_keeps_is_refused_with_the_least_there_is():
    given = problem(4, 8, 8, 0.05, tuple(c for c in MENU if c.bits <= 4))
    with pytest.raises(ConfigError, match="loss of at most 1e-06: the least found is"):
        least_time(given, 1e-6)
    with pytest.raises(ConfigError, match="time of at most 1 ps: the least found is"):
        least_loss(given, 1.0)


def test_a_width_without_a_price_or_a_loss_is_refused_by_its_name():
    given = problem(5, 2, 2, 1.0)
    ps = given.ps.copy()
    ps[4] = np.nan
    with pytest.raises(ConfigError, match="16 bits on the host has no price"):
        JointProblem(MENU, ps, given.loss, given.budgets)
    with pytest.raises(ConfigError, match="at least one tier"):
        JointProblem((), given.ps, given.loss, given.budgets)
