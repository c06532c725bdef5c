"""Bits that requests have in common."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules, Replanner

BY_IMPORTANCE = load_policy("prefill", PolicySettings(bit_rule="importance"))
"""Its bits differ from prompt to prompt, whatever the losses."""


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


def test_what_a_prefill_streamed_stays_until_its_request_is_gone_and_is_no_move() -> None:
    """Experts 0 and 1 are hot, the prompt wants 2 and 3, and 3 passed through: into the slot of 0."""
    loss = LossTable(np.array([[[0.4, 0.2, 0.1, 0.05]] * 6]), nats=1.0)
    planner = Replanner(PlannerRules(BY_IMPORTANCE, Budget(2, 3.0), loss), 1, 6)
    prompt, streamed = ImportanceScore.from_weights(np.array([[0, 0, 1, 2, 0, 0]])), np.arange(6)[None] == 3
    planner.keep([prompt], streamed)
    assert [planner.restore().nonzero()[1].tolist() for _ in range(2)] == [[0], []]
    planner.keep([prompt], streamed)
    change = planner.replan({"a": prompt})
    assert (change.moved.nonzero()[1].tolist(), change.num_kept) == ([2], 1)
    lost = [planner.predicted_nats(bits, prompt, change.plans["a"]) for bits in (16, 4)]
    assert lost == pytest.approx([0, 0.05])


def test_bits_for_the_whole_batch_are_assigned_once() -> None:
    loss = LossTable.nominal(3, 16)
    rules = PlannerRules(BY_IMPORTANCE, Budget(8, 3.0), loss, bits_for="batch")
    plans = Replanner(rules, 3, 16).replan({"a": score(1), "b": score(2)}).plans
    assert plans["a"].bits is plans["b"].bits
    each = Replanner(PlannerRules(BY_IMPORTANCE, Budget(8, 3.0), loss), 3, 16)
    plans = each.replan({"a": score(1), "b": score(2)}).plans
    assert (plans["a"].bits.bits != plans["b"].bits.bits).any()
