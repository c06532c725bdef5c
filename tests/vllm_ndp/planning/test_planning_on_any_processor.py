"""What planners decide on scores of every kind, as digests that test_same_everywhere.py compares."""

import hashlib

import numpy as np
from balance_yardstick import load_of, offloaded
from numpy.typing import NDArray

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.layer.balance import Balancer
from vllm_ndp.layer.joint_rule import LIVE_WIDTHS, OF_ONE_BIT, Menu, losses_by_width
from vllm_ndp.layer.prefill_split import PrefillSplit
from vllm_ndp.planning.bitwidths import LossTable, bits_over_layers, select_bitwidths
from vllm_ndp.planning.importance import importance, repeats
from vllm_ndp.planning.joint import Choice, JointProblem, least_time
from vllm_ndp.planning.plan import Budget, top_experts
from vllm_ndp.planning.policies import load_policy
from vllm_ndp.planning.stats import RoutingStats

LAYERS, EXPERTS, TOP = 6, 16, 2


def digest(*values: object) -> str:
    taken = hashlib.sha256()
    for value in values:
        taken.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return taken.hexdigest()


def routing(seed: int, tokens: int) -> NDArray[np.int64]:
    """[T, L, k] of whole numbers only, so that every processor draws the same."""
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.integers(0, 1 << 30, (tokens, LAYERS, EXPERTS)) >> generator.integers(0, 9, (LAYERS, EXPERTS))
    return np.argsort(-drawn, axis=2, kind="stable")[:, :, :TOP]


def decisions() -> dict[str, str]:
    ids = [routing(seed, 40 + seed) for seed in range(6)]
    gates = [1.0 / (3 + (each * 7919) % 101) for each in ids]
    stats = [RoutingStats.from_choices(a, b, EXPERTS) for a, b in zip(ids, gates, strict=True)]
    scores = [importance(each) for each in stats]
    load = np.sum([score.values for score in scores], axis=0)
    loss = LossTable.from_measured(1.0 / (3 + np.arange(LAYERS * EXPERTS * 4) * 7919 % 997).reshape(LAYERS, EXPERTS, 4))
    budget = Budget(4, 2.5)
    hot = top_experts(load, 4)
    costs = Costs(load_hardware("h100-ndp512", **{"dram.kind": "ideal"}), model_named("mixtral-8x7b"))
    menu = Menu(costs, {tier: LIVE_WIDTHS[tier] for tier in ("gpu", "host", "device")}, 8)
    choices = tuple(Choice(tier, bits, bits * 1000) for tier, bits in [("gpu", 16), ("gpu", 4), ("device", 3)])
    work = np.array([1.0, 1.5, 3.0])[:, None, None] * load
    lost = np.array([0.0, 0.01, 0.07])[:, None, None] * loss.mse[:, :, 0] * load
    sizes = {"gpu": 5000.0 * LAYERS * EXPERTS}
    problem = JointProblem(choices, work, lost, sizes, 0 * work, 0.0, np.ones((LAYERS, EXPERTS)), np.zeros(3))
    nothing_moves = np.zeros((len(menu.choices), LAYERS, EXPERTS))
    room = {"gpu": 0.2 * costs.shape.expert_bytes * LAYERS * EXPERTS}
    whole = menu.problem(scores[0].values, 8, losses_by_width(loss, OF_ONE_BIT), room, nothing_moves, 0.0)
    balancer = Balancer(costs, 2)
    split = PrefillSplit(costs)
    bits = np.full((8, 8), 3, np.uint8)
    eight = [each[:8, 0] % 8 for each in ids]
    weights = [each[:8, 0].astype(np.float32) for each in gates]
    loads = [load_of(np.arange(8) < 4, a, b, bits) for a, b in zip(eight, weights, strict=True)]
    return {
        "scores": digest(*[score.values for score in scores]),
        "repeats": digest([repeats(each, scores[0]) for each in stats]),
        "hot": digest(load_policy("prefill").place(scores, None, Budget(5, 3.0)).hot),
        "bits": digest(select_bitwidths(scores[0], hot, loss, budget).bits),
        "bits over layers": digest(bits_over_layers(scores[0], hot, loss, budget).bits),
        "menu": digest(whole.ps, whole.used),
        "sides at once": digest(least_time(whole, 0.02).chosen),
        "least time": digest(least_time(problem, problem.lost(np.full((LAYERS, EXPERTS), 1))).chosen),
        "offloaded": digest([sorted(offloaded(balancer, each)) for each in loads]),
        "split": digest(
            [split.of_counts(*np.unique(np.repeat(each.ravel(), 3), return_counts=True)).tolist() for each in eight]
        ),
    }


def test_a_decision_is_made_again_alike():
    assert decisions() == decisions()
