"""The offload rule against every other choice, and its three readers against each other."""

import numpy as np
import pytest
from balance_yardstick import load_of, offloaded
from hypothesis import given
from hypothesis import strategies as st

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.layer.balance import Balancer, LayerLoad
from vllm_ndp.layer.tiers import DEVICE, ELSEWHERE, NOBODY, WARM, Owners, Tiers, slots_per_gpu

COSTS = Costs(load_hardware("h100-ndp512", **{"dram.kind": "ideal"}), model_named("mixtral-8x7b"))
ROWS, TOP_K, EXPERTS = 6, 2, 8


def random_layer(rng: np.random.Generator, rows: int = ROWS):
    ids = np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :TOP_K]
    gates = rng.dirichlet([1.0] * TOP_K, rows).astype(np.float32)
    hot = rng.random(EXPERTS) < 0.6
    bits = np.where(hot, 0, rng.integers(1, 5, (rows, EXPERTS))).astype(np.uint8)
    return hot, ids, gates, bits


def layer_ps(load: LayerLoad, moved: frozenset[int], bits: int) -> float:
    """max(GPU, device) if `moved` run on the device, from the cost tables alone."""
    stay = [rows for expert, (rows, _) in load.hot.items() if expert not in moved]
    device = sum(COSTS.device_expert_ps(width, rows) for (_, width), rows in load.cold.items())
    device += sum(COSTS.device_expert_ps(bits, load.hot[expert][0]) for expert in moved)
    if load.cold:
        device += COSTS.link_ps(*load.message) + COSTS.device_fill_ps
    elif moved:
        device += COSTS.link_ps(1, 1) + COSTS.device_fill_ps
    gpu = sum(COSTS.gpu_expert_ps(rows) for rows in stay)
    return max(gpu + COSTS.launch_ps() if stay else 0, device)


@pytest.mark.parametrize("rows", [1, 2, 6, 40])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_spilled_experts_are_the_lightest_ones_and_no_other_number_of_them_is_faster(bits, rows):
    rng, rule = np.random.default_rng(10 * rows + bits), Balancer(COSTS, bits)
    moved_any = False
    for _ in range(40):
        hot, ids, gates, plan = random_layer(rng, rows)
        load = load_of(hot, ids, gates, plan)
        moved = offloaded(rule, load)
        lightest = sorted(load.hot, key=lambda expert: load.hot[expert][1])
        assert moved == set(lightest[: len(moved)])
        times = [layer_ps(load, frozenset(lightest[:n]), bits) for n in range(len(lightest) + 1)]
        assert layer_ps(load, moved, bits) == pytest.approx(min(times), rel=1e-12)
        assert all(time > times[len(moved)] * (1 - 1e-12) for time in times[: len(moved)])  # as few as possible
        moved_any |= bool(moved)
    assert moved_any or rows == 40  # there the cold experts keep the device busy longer than the GPU


def test_a_layer_without_hot_pairs_spills_nothing_and_a_lone_hot_expert_goes_where_it_is_faster():
    assert offloaded(Balancer(COSTS, 2), LayerLoad({}, {(1, 3): 1}, (1, 1))) == frozenset()
    alone = LayerLoad({4: (1, 1.0)}, {}, (0, 0))
    assert offloaded(Balancer(COSTS, 1), alone) == {4}
    assert offloaded(Balancer(COSTS, 4), alone) == frozenset()
    as_long_anyway = LayerLoad({4: (1, 1.0)}, {}, (0, 0), host_ps=10**12)
    assert Balancer(COSTS, 1).fewest(as_long_anyway, (0.0, 1.0)) == frozenset()


def test_each_host_of_a_device_expects_the_others_to_ask_for_as_much():
    """Two hot experts take 267 us on the GPU, one of them 142; the other takes 141 us on the device at 3 bits. Of two
    hosts each would wait for the other's: 2 x 141 us, longer than 267."""
    load = LayerLoad({1: (1, 0.4), 4: (1, 0.6)}, {}, (0, 0), 1)
    both, device = COSTS.resident_ps(2, 2), COSTS.device_expert_ps(3, 1) + COSTS.link_ps(1, 1) + COSTS.device_fill_ps
    assert max(device, COSTS.resident_ps(1, 1)) < both < 2 * device
    assert [offloaded(Balancer(COSTS, 3, hosts), load) for hosts in (1, 2, 8)] == [{1}, frozenset(), frozenset()]


def test_the_more_hosts_share_a_device_the_fewer_experts_go_there():
    rng = np.random.default_rng(0)
    for hosts in (1, 2, 3, 8):
        balancer = Balancer(COSTS, 3, hosts)
        for _ in range(50):
            is_hot, ids, gates, bits = random_layer(rng)
            load = load_of(is_hot, ids, gates, bits)
            fewer = offloaded(Balancer(COSTS, 3, hosts + 1), load)
            assert fewer <= offloaded(balancer, load)


# -- Whole hot experts shared out over GPUs: nobody moves for nothing, and nobody holds more than its slots ------------


def hot(num_experts: int, *experts: int) -> np.ndarray:
    row = np.zeros(num_experts, np.bool_)
    row[list(experts)] = True
    return row


def test_newcomers_go_where_fewest_are_and_the_others_stay():
    owners = Owners(2, 1, 6)
    assert owners.place(0, hot(6, 0, 1, 2)).tolist() == [0, 1, 0, NOBODY, NOBODY, NOBODY]
    assert owners.place(0, hot(6, 0, 2, 5)).tolist() == [0, NOBODY, 0, NOBODY, NOBODY, 1]
    assert owners.place(0, hot(6, 3, 4, 5)).tolist() == [NOBODY, NOBODY, NOBODY, 0, 0, 1]


def test_an_expert_passes_through_where_it_is_to_stay_and_else_in_turn():
    owners = Owners(2, 1, 6)
    owners.place(0, hot(6, 1, 3))
    assert owners.streaming(0).tolist() == [0, 0, 0, 1, 0, 1]


def test_a_hot_expert_without_a_slot_yet_runs_on_the_device_unless_another_gpu_has_it():
    """0 and 2 are this GPU's, 1 the other's. A plan that follows leaves nothing behind of the one before."""
    tiers = Tiers(1, 6, owners=Owners(2, 1, 6), rank=0)
    tiers.activate(hot(6, 0, 1, 2)[None], hot(6, 4)[None], np.array([[16, 8, 4, 0, 0, 0]], np.uint8))
    assert tiers.where.tolist() == [[DEVICE, ELSEWHERE, DEVICE, DEVICE, WARM, DEVICE]]
    tiers.name_all()
    assert tiers.where.tolist() == [[0, ELSEWHERE, 2, DEVICE, WARM, DEVICE]]
    tiers.activate(hot(6, 1, 3)[None])
    assert tiers.where.tolist() == [[DEVICE, ELSEWHERE, DEVICE, DEVICE, DEVICE, DEVICE]]
    assert tiers.gpus is not None
    assert tiers.gpus.tolist() == [[NOBODY, 1, NOBODY, 0, NOBODY, NOBODY]]
    assert not tiers.hot_bits.any()


@given(st.integers(1, 5), st.integers(0, 12), st.lists(st.randoms(use_true_random=False), max_size=8))
def test_every_hot_expert_has_one_gpu_and_no_gpu_more_than_its_slots(num_gpus: int, num_hot: int, draws: list):
    owners, before = Owners(num_gpus, 1, 12), np.full(12, NOBODY)
    for draw in draws:
        row = hot(12, *draw.sample(range(12), num_hot))
        now = owners.place(0, row)
        assert np.array_equal(now != NOBODY, row)
        assert np.bincount(now[row], minlength=num_gpus).max(initial=0) <= slots_per_gpu(num_hot, num_gpus)
        stays = row & (before != NOBODY)
        assert np.array_equal(now[stays], before[stays])
        before = now.copy()
