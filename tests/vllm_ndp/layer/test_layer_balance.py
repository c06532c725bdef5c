"""The offload rule against every other choice, and its three readers against each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ndp_device.common.errors import ConfigError
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.systems.balanced import offload
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.layer.balance import Balancer, LayerLoad
from vllm_ndp.traces.format import Provenance
from vllm_ndp.traces.trace import Sequence, from_sequences

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
    return max(sum(COSTS.resident_ps(1, rows) for rows in stay), device)


@pytest.mark.parametrize("rows", [1, 2, 6, 40])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_spilled_experts_are_the_lightest_ones_and_no_other_number_of_them_is_faster(bits, rows):
    rng, rule = np.random.default_rng(10 * rows + bits), Balancer(COSTS, bits)
    moved_any = False
    for _ in range(40):
        hot, ids, gates, plan = random_layer(rng, rows)
        load = LayerLoad.of_arrays(hot, ids, gates, plan)
        offloaded = rule.offloaded(load)
        lightest = sorted(load.hot, key=lambda expert: load.hot[expert][1])
        assert offloaded == set(lightest[: len(offloaded)])
        times = [layer_ps(load, frozenset(lightest[:n]), bits) for n in range(len(lightest) + 1)]
        assert layer_ps(load, offloaded, bits) == pytest.approx(min(times), rel=1e-12)
        assert all(time > times[len(offloaded)] * (1 - 1e-12) for time in times[: len(offloaded)])  # as few as possible
        moved_any |= bool(offloaded)
    assert moved_any or rows == 40  # there the cold experts keep the device busy longer than the GPU


@pytest.mark.parametrize(("requests", "bits"), [(1, 1), (1, 2), (1, 3), (3, 1), (3, 2), (3, 3)])
def test_a_whole_trace_at_once_spills_what_the_rule_spills_layer_by_layer(requests, bits):
    rng = np.random.default_rng(requests + bits)
    layers, steps, prompt = 3, 60, 4
    sequences = []
    for request in range(requests):
        ids = np.argsort(rng.random((prompt + steps - 3 * request, layers, EXPERTS)), axis=2)[:, :, :TOP_K].astype(
            np.uint8
        )
        weights = rng.dirichlet([1.0] * TOP_K, ids.shape[:2]).astype(np.float32)
        parts = ids[:prompt], weights[:prompt], ids[prompt:], weights[prompt:]
        sequences.append(Sequence(request, "", 0.0, *parts))
    provenance = Provenance(model="m", num_layers=layers, num_experts=EXPERTS, top_k=TOP_K)
    batches = Batches.of(from_sequences(provenance, sequences), requests)
    plan = np.where(rng.random((1, layers, EXPERTS)) < 0.6, 0, rng.integers(1, 5, (requests, layers, EXPERTS)))
    plan = plan.astype(np.uint8)  # [B, L, E], the same experts hot for every request
    widths = np.take_along_axis(plan[None, :, None], batches.ids, axis=4)
    after = offload(batches, widths, COSTS, bits)
    rule, moved = Balancer(COSTS, bits), 0
    for step, layer in itertools.product(range(batches.shape[2]), range(layers)):
        here = batches.pairs[0, :, step, 0, 0]
        load = LayerLoad.of_arrays(
            plan[0, layer] == 0,
            batches.ids[0, here, step, layer],
            batches.weights[0, here, step, layer],
            plan[here, layer],
        )
        offloaded = rule.offloaded(load)
        ids, before = batches.ids[0, here, step, layer], widths[0, here, step, layer]
        wanted = np.where(np.isin(ids, sorted(offloaded)), bits, before)
        assert np.array_equal(after[0, here, step, layer], wanted)
        moved += len(offloaded)
    assert moved > 10


def test_a_layer_without_hot_pairs_spills_nothing_and_a_lone_hot_expert_goes_where_it_is_faster():
    assert Balancer(COSTS, 2).offloaded(LayerLoad({}, {(1, 3): 1}, (1, 1))) == frozenset()
    alone = LayerLoad({4: (1, 1.0)}, {}, (0, 0))
    assert Balancer(COSTS, 1).offloaded(alone) == {4}
    assert Balancer(COSTS, 4).offloaded(alone) == frozenset()


def test_each_host_of_a_device_expects_the_others_to_ask_for_as_much():
    """Two hot experts take 210 us on the GPU; one of them 117 us and a message on the device at 3 bits, shorter beside
    the 105 us of the other. Of two hosts each would wait for the other's: 2 x 129 us, longer than 210."""
    load = LayerLoad({1: (1, 0.4), 4: (1, 0.6)}, {}, (0, 0), 1)
    gpu, device = COSTS.resident_ps(1, 1), COSTS.device_expert_ps(3, 1) + COSTS.link_ps(1, 1) + COSTS.device_fill_ps
    assert gpu < device < 2 * gpu < 2 * device
    assert [Balancer(COSTS, 3, hosts).offloaded(load) for hosts in (1, 2, 8)] == [{1}, frozenset(), frozenset()]


def test_the_more_hosts_share_a_device_the_fewer_experts_go_there():
    rng = np.random.default_rng(0)
    for hosts in (1, 2, 3, 8):
        balancer = Balancer(COSTS, 3, hosts)
        for _ in range(50):
            is_hot, ids, gates, bits = random_layer(rng)
            load = LayerLoad.of_arrays(is_hot, ids, gates, bits)
            fewer = Balancer(COSTS, 3, hosts + 1).offloaded(load)
            assert fewer <= balancer.offloaded(load)


def test_an_impossible_width_is_refused_and_a_device_without_hosts():
    with pytest.raises(ConfigError, match="offload_bits must be one of"):
        Balancer(COSTS, 5)
    with pytest.raises(ConfigError, match="at least 1 host, got 0"):
        Balancer(COSTS, 3, 0)
