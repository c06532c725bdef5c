"""How many experts are exchanged at once, those that gain the most; and bits that requests have in common."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget, Placement, limit_moves, top_experts
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules, Replanner

BY_IMPORTANCE = load_policy("prefill", PolicySettings(bit_rule="importance"))
"""Its bits differ from prompt to prompt, whatever the losses."""


def drawn(seed: int, layers: int, experts: int, num_hot: int) -> tuple[np.ndarray, Placement, np.ndarray]:
    """What the slots hold, what is wanted, and the importance behind it."""
    random = np.random.default_rng(seed)
    importance = random.random((layers, experts))
    resident = random.random((layers, experts)).argsort(axis=1) < num_hot
    return resident, top_experts(importance, num_hot), importance


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 12), st.integers(0, 12), st.integers(0, 20))
def test_as_many_experts_move_as_may_and_every_slot_stays_in_use(
    seed: int, layers: int, experts: int, hot: int, most: int
) -> None:
    resident, wanted, importance = drawn(seed, layers, experts, min(hot, experts))
    limited = limit_moves(resident, wanted, importance, most)
    moved = int((limited.hot & ~resident).sum())
    assert moved == min(most, int((wanted.hot & ~resident).sum()))
    assert (limited.num_hot == wanted.num_hot).all()
    assert not (limited.hot & ~resident & ~wanted.hot).any(), "an expert moved that no policy wanted"


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_of_as_many_moves_covers_more_importance(seed: int) -> None:
    """Against every placement of two layers with four experts, two hot each, that needs at most two copies."""
    resident, wanted, importance = drawn(seed, 2, 4, 2)
    limited = limit_moves(resident, wanted, importance, 2)
    rows = [np.isin(np.arange(4), pair) for pair in itertools.combinations(range(4), 2)]
    covered = [
        float(importance[hot].sum())
        for hot in (np.stack(pair) for pair in itertools.product(rows, rows))
        if (hot & ~resident).sum() <= 2
    ]
    assert float(importance[limited.hot].sum()) == pytest.approx(max(covered), rel=1e-12)


def test_an_empty_slot_is_filled_before_an_expert_is_exchanged_for_a_little_more() -> None:
    """Slots of layer 0 hold expert 0 (.1) and nothing, those of layer 1 experts 2 and 3. One move: .4 into the empty
    slot gains .4, .9 in place of .6 gains .3. Two moves: both, since .3 in place of .1 gains .2."""
    importance = np.array([[0.1, 0.4, 0.3, 0.2], [0.9, 0.1, 0.8, 0.6]])
    resident = np.array([[True, False, False, False], [False, False, True, True]])
    wanted = top_experts(importance, 2)
    one, two = (limit_moves(resident, wanted, importance, most).hot.tolist() for most in (1, 2))
    assert one == [[True, True, False, False], [False, False, True, True]]
    assert two == [[True, True, False, False], [True, False, True, False]]


def score(seed: int) -> ImportanceScore:
    return ImportanceScore.from_weights(np.random.default_rng(seed).random((3, 16)), 64)


def test_four_requests_get_common_bits_and_half_a_bit_more_and_three_their_own() -> None:
    generator = np.random.default_rng(5)
    loss = LossTable.nominal(2, 16)
    rules = PlannerRules(BY_IMPORTANCE, Budget(4, 2.0), loss, bits_for="auto")
    scores = {str(r): ImportanceScore.from_weights(generator.random((2, 16))) for r in range(4)}

    def plans(names: str) -> list[np.ndarray]:
        change = Replanner(rules, 2, 16).replan({name: scores[name] for name in names})
        return [plan.bits.bits for plan in change.plans.values()]

    three, four = plans("012"), plans("0123")
    assert any((bits != three[0]).any() for bits in three)
    assert all((bits == four[0]).all() for bits in four)
    assert (three[0].sum(), four[0].sum()) == (2 * 12 * 2.0, 2 * 12 * 2.5)


def test_bits_for_the_whole_batch_are_assigned_once() -> None:
    loss = LossTable.nominal(3, 16)
    rules = PlannerRules(BY_IMPORTANCE, Budget(8, 3.0), loss, bits_for="batch")
    plans = Replanner(rules, 3, 16).replan({"a": score(1), "b": score(2)}).plans
    assert plans["a"].bits is plans["b"].bits
    each = Replanner(PlannerRules(BY_IMPORTANCE, Budget(8, 3.0), loss), 3, 16)
    plans = each.replan({"a": score(1), "b": score(2)}).plans
    assert (plans["a"].bits.bits != plans["b"].bits.bits).any()
