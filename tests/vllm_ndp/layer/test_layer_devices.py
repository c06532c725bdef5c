"""Several devices as plugin and replay see them: capacity, who serves what, when a hot expert goes to one."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import MODEL

from ndp_device.common.errors import ConfigError
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.layer.balance import Balancer, LayerLoad
from vllm_ndp.layer.devices import NO_COPY, Devices, assign_copies, copies_that_fit, route, slowest, work_of

SHAPE = model_named(str(MODEL))
MIXTRAL = Costs(load_hardware("h100-ndp512"), model_named("mixtral-8x7b"))
BYTES = {bits: MIXTRAL.replica_bytes(bits) for bits in (1, 2, 3, 4, 16)}
REPLICA = 73_728  # bytes of a nested replica of the bundled model


def with_capacity(capacity: int) -> Costs:
    return Costs(load_hardware("h100-ndp512", **{"dram.capacity_bytes": capacity}), SHAPE)


def mixtral_on(num_devices: int, num_copies: int) -> Devices:
    return Devices(MIXTRAL, BYTES, num_devices, num_copies)


def test_two_copies_become_one_where_they_do_not_fit_and_one_that_does_not_fit_is_refused() -> None:
    """The bundled model has 32 experts of 196 608 bytes. Each of two devices holds 16 of them for prompts; the rest of
    its capacity is for replicas, of which 32 are needed for two copies and 16 for one."""
    assert MIXTRAL.shape.num_layers == 32
    half = 16 * 196_608
    ample, tight, small = (with_capacity(half + count * REPLICA) for count in (32, 31, 15))

    copies = [copies_that_fit(costs, 2, None, full_precision=False) for costs in (ample, tight, small)]
    assert copies == [2, 1, 1]
    assert Devices(ample, {3: 1}, 2, 2).held.sum(axis=(0, 1)).tolist() == [32, 32]
    assert Devices(tight, {3: 1}, 2, 1).held.sum(axis=(0, 1)).tolist() == [16, 16]
    with pytest.raises(ConfigError, match="1 copies of 32 experts do not fit 2 devices with room for"):
        Devices(small, {3: 1}, 2, 1)
    with pytest.raises(ConfigError, match="2 copies of 32 experts do not fit"):
        Devices(tight, {3: 1}, 2, copies_that_fit(tight, 2, 2, full_precision=False))


def test_experts_in_full_precision_are_copied_as_they_are() -> None:
    assert copies_that_fit(with_capacity(32 * 196_608 - 1), 2, None, full_precision=True) == 1


def test_what_five_devices_hold_is_counted_to_the_byte() -> None:
    """32 experts in full precision are 1 258 291.2 bytes for each of five, which are 1 258 292; of replicas two devices
    have 7 each and three 6, because a device that got more of one layer gets fewer of the next."""
    fits, small = (with_capacity(1_258_292 + 7 * REPLICA - missing) for missing in (0, 1))
    assert sorted(Devices(fits, {3: 1}, 5).held.sum(axis=(0, 1)).tolist()) == [6, 6, 6, 7, 7]
    with pytest.raises(ConfigError, match="with room for 6 of them each"):
        Devices(small, {3: 1}, 5)
    assert copies_that_fit(fits, 1, None, full_precision=False) == 1, "a lone device has nowhere for a second one"


def test_pairs_of_one_layer_go_to_the_copies_whose_devices_have_least_to_do() -> None:
    """Experts 0 to 3 at 3, 3, 2, 2 bits with a row each: each device gets a wide and a narrow one."""
    devices, bits = mixtral_on(2, 2), np.array([3, 3, 2, 2], np.uint8)
    (_, first), (_, second) = devices.messages(0, np.arange(4), bits, (True, True))
    assert bits[first].tolist() == bits[second].tolist() == [3, 2]
    ((device, pairs),) = devices.messages(0, np.arange(4), bits, (False, True))
    assert (device, pairs.tolist()) == (1, [0, 1, 2, 3])
    for expert in (0, 1):  # alone in its layer: not always on the first device
        assert devices.messages(0, np.array([expert]), bits[:1], (True, True)) == [(expert, [0])]
    ((device, pairs),) = mixtral_on(2, 1).messages(0, np.arange(4), bits, (False, True))
    assert (device, pairs.tolist()) == (1, [1, 3])  # nobody is sent the others


def test_rows_of_an_expert_count_by_the_passes_that_they_take() -> None:
    """Four rows share a pass of the arrays: 8 rows of one expert are as much as two experts with a row each."""
    found = mixtral_on(2, 2).route_groups(0, {(0, 3): 8, (1, 3): 4, (2, 3): 1}, (True, True))
    assert found[1, 3] == found[2, 3] != found[0, 3]
    found = mixtral_on(2, 2).route_groups(0, {(0, 3): 4, (1, 3): 1, (2, 3): 1, (3, 3): 1}, (True, True))
    assert sum(found.values()) == 2, "a pass each, two on each device"


@settings(max_examples=40)
@given(st.data())
def test_the_lightest_hot_experts_leave_and_no_other_number_of_them_is_faster(data) -> None:  # type: ignore[no-untyped-def]
    experts = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True))
    cut = data.draw(st.integers(1, len(experts)))
    hot = {expert: (1, data.draw(st.integers(1, 9)) / 10) for expert in experts[:cut]}
    cold = {(expert, data.draw(st.sampled_from([2, 3, 4]))): 1 for expert in experts[cut:]}
    rule, devices = Balancer(MIXTRAL, 3), mixtral_on(2, 2)
    found = devices.balancers(rule, lambda: (True, True))[0].offloaded(LayerLoad(hot, cold, (0, 0), 6))
    order = sorted(hot, key=lambda expert: (hot[expert][1], expert))
    assert found == set(order[: len(found)])

    def layer_ps(count: int) -> float:
        groups = cold | {(expert, 3): 1 for expert in order[:count]}
        at = devices.route_groups(0, groups, (True, True))
        each = [[bits for (expert, bits), device in at.items() if device == number] for number in range(2)]
        took = [sum(rule.device_ps(bits, 1) for bits in of) + rule.message_ps(len(of), len(of)) for of in each if of]
        launch = rule.prices.hot_ps(0) if order[count:] else 0.0
        return max(sum((rule.prices.hot_ps(1) for _ in order[count:]), launch), *took, 0.0)

    assert layer_ps(len(found)) == pytest.approx(min(layer_ps(count) for count in range(len(order) + 1)), rel=1e-12)


@settings(max_examples=60)
@given(st.data())
def test_a_division_counts_shared_experts_other_hosts_rows_and_what_does_not_overlap(data) -> None:  # type: ignore[no-untyped-def]
    """By prices that are no hardware's. A step of 5 rows; hot experts take 3 a row, cold ones as many as their bits."""
    experts = data.draw(st.permutations(range(8)))
    hosts, beside, shared = data.draw(st.tuples(st.integers(1, 3), st.sampled_from([1.0, 0.5]), st.integers(0, 20)))
    hot = {expert: (data.draw(st.integers(1, 5)), expert / 10) for expert in experts[:4]}
    cold = {(expert, 2): data.draw(st.integers(1, 5)) for expert in experts[4 : data.draw(st.integers(4, 8))]}
    prices: Any = SimpleNamespace(
        hot_ps=lambda rows: 3 * rows + 4,
        expert_ps=lambda tier, bits, rows: bits * rows,
        message_ps=lambda rows, pairs: 2 + rows + pairs,
        shared_ps=lambda rows: shared * rows / 5,
        beside=beside,
    )
    devices = mixtral_on(2, 1)
    found = devices.balancers(Balancer(prices, 3, hosts), lambda: (True, True))[0].offloaded(
        LayerLoad(hot, cold, (0, 0), 5)
    )
    order = sorted(hot)

    def layer_ps(count: int) -> float:
        there = cold | {(expert, 3): hot[expert][0] for expert in order[:count]}
        sides = []
        for device in range(2):
            own = {group: rows for group, rows in there.items() if devices.held[0, group[0], device]}
            pairs = sum(own.values())
            work = sum(bits * rows for (_, bits), rows in own.items()) + (2 + min(pairs, 5) + pairs if own else 0)
            sides.append(hosts * work)
        gpu = shared + sum(3 * hot[expert][0] + 4 for expert in order[count:]) + (4 if order[count:] else 0)
        return max(gpu, *sides) + (1 - beside) * min(gpu, max(sides))

    times = [layer_ps(count) for count in range(5)]
    assert found == set(order[: times.index(min(times))])


def test_an_expert_whose_device_is_down_keeps_the_heavier_ones_on_the_gpu() -> None:
    """The least of three is on the first device, which is down: all stay, though the others' is idle."""
    prices: Any = SimpleNamespace(
        hot_ps=lambda rows: 100.0 * rows,
        expert_ps=lambda tier, bits, rows: 1.0,
        message_ps=lambda rows, pairs: 0.0,
        shared_ps=lambda rows: 0.0,
        beside=1.0,
    )
    devices = mixtral_on(2, 1)
    first, *others = (np.flatnonzero(devices.held[0, :, device]).tolist() for device in range(2))
    load = LayerLoad({first[0]: (1, 0.1), others[0][0]: (1, 0.2), others[0][1]: (1, 0.3)}, {}, (0, 0), 1)
    assert devices.balancers(Balancer(prices, 3), lambda: (False, True))[0].offloaded(load) == frozenset()
    assert devices.balancers(Balancer(prices, 3), lambda: (True, False))[0].offloaded(load) == {first[0]}


def test_prices_measured_on_devices_with_parts_are_of_a_part_already() -> None:
    measured: Any = SimpleNamespace(expert_ps=lambda tier, bits, rows: 7.0, message_ps=lambda rows, pairs: 1.0)
    balancer, *_ = split_mixtral(2).balancers(Balancer(measured, 3), lambda: (True, True))
    assert balancer.on_device is balancer.rule


def test_the_slowest_device_gives_a_layers_times_and_all_of_them_its_bytes_and_energy() -> None:
    bits, rows = np.full(4, 3, np.uint8), np.arange(4)
    works = [work_of(MIXTRAL.shape, BYTES, 2, rows[:n], rows[:n], bits[:n]) for n in (1, 3, 2)]
    timings = [DeviceModel(MIXTRAL.hardware).execute(work, 0) for work in works]
    found = slowest(timings)
    assert (found.total_ps, found.done_ps) == (timings[1].total_ps, timings[1].done_ps)
    for name in ("weight_bytes", "bytes_in", "bytes_out", "row_activations", "energy_pj"):
        assert getattr(found, name) == pytest.approx(sum(getattr(timing, name) for timing in timings)), name


def test_a_message_to_one_of_the_devices_holds_no_more_rows_than_the_step_has() -> None:
    """A GPU expert takes 100, one on the device 10, a row in a message 45: both hot experts of one row leave."""
    prices: Any = SimpleNamespace(
        hot_ps=lambda rows: 100.0 * rows,
        expert_ps=lambda tier, bits, rows: 10.0 * rows,
        message_ps=lambda rows, pairs: 45.0 * rows,
        shared_ps=lambda rows: 0.0,
        beside=1.0,
    )
    load = LayerLoad({0: (1, 0.1), 1: (1, 0.2)}, {(2, 3): 1}, (0, 0), 1)
    balancer, *_ = mixtral_on(1, 1).balancers(Balancer(prices, 3), lambda: (True,))
    assert balancer.offloaded(load) == {0, 1}


def test_a_hot_expert_whose_copies_are_down_stays_on_the_gpu() -> None:
    load = LayerLoad({0: (1, 0.1), 1: (1, 0.2)}, {}, (0, 0), 2)
    devices = mixtral_on(4, 1)
    alive = [not held for held in devices.held[0, 0]]
    assert 0 in devices.balancers(Balancer(MIXTRAL, 3), lambda: (True,) * 4)[0].offloaded(load)
    assert devices.balancers(Balancer(MIXTRAL, 3), lambda: alive)[0].offloaded(load) == frozenset()


def split_mixtral(num_devices: int) -> Devices:
    of_part = {bits: size // num_devices for bits, size in BYTES.items()}
    copies = copies_that_fit(MIXTRAL, num_devices, None, full_precision=False, splits_experts=True)
    return Devices(MIXTRAL, of_part, num_devices, copies, splits_experts=True)


def test_every_device_of_those_with_parts_is_sent_every_pair_and_none_where_one_is_down() -> None:
    devices = split_mixtral(3)
    pairs, bits = np.array([4, 4, 1]), np.array([3, 3, 2], np.uint8)
    assert [(at, own.tolist()) for at, own in devices.messages(0, pairs, bits, (True,) * 3)] == [
        (device, [0, 1, 2]) for device in range(3)
    ]
    assert devices.messages(0, pairs, bits, (True, False, True)) == []
    assert devices.num_copies == 1


def test_experts_in_parts_fit_where_one_copy_of_each_does() -> None:
    half = 16 * 196_608
    fits, small = (with_capacity(half + count * REPLICA) for count in (16, 15))

    assert Devices(fits, {3: 1}, 2, splits_experts=True).num_parts == 2
    with pytest.raises(ConfigError, match="1 copies of 32 experts do not fit"):
        Devices(small, {3: 1}, 2, splits_experts=True)


def test_hot_experts_leave_for_devices_with_parts_as_their_own_times_make_best_and_stay_where_one_is_down() -> None:
    """The device's time is that of a half of each expert and a whole message."""
    load = LayerLoad({0: (1, 0.1), 1: (1, 0.2), 2: (1, 0.3), 3: (1, 0.4)}, {(4, 3): 1, (5, 3): 1}, (1, 2), 1)
    rule, devices = Balancer(MIXTRAL, 3), split_mixtral(2)
    found = devices.balancers(rule, lambda: (True, True))[0].offloaded(load)
    half = replace(MIXTRAL, shape=replace(MIXTRAL.shape, intermediate_size=MIXTRAL.shape.intermediate_size // 2))
    of_half = Balancer(half, 3)
    took = [
        max(
            rule.prices.shared_ps(1) + (4 - count) * rule.prices.hot_ps(1),
            (2 + count) * of_half.device_ps(3, 1) + of_half.message_ps(1, 2 + count),
        )
        for count in range(5)
    ]
    assert len(found) == int(np.argmin(took)) > 0
    assert devices.balancers(rule, lambda: (True, False))[0].offloaded(load) == frozenset()


def test_work_has_the_experts_of_its_pairs_in_the_order_of_their_first_and_each_row_once() -> None:
    rng = np.random.default_rng(1)
    rows, experts = np.sort(rng.integers(0, 900, 4000)), rng.integers(0, 300, 4000)
    bits = rng.choice(np.array([2, 4, 16], np.uint8), 4000)
    work, counted = work_of(MIXTRAL.shape, BYTES, 2, rows, experts, bits), dict[tuple[int, int], int]()
    for pair in zip(experts.tolist(), bits.tolist(), strict=True):
        counted[pair] = counted.get(pair, 0) + 1
    assert [(bits, tokens) for bits, tokens, _ in work.experts] == [(b, n) for (_, b), n in counted.items()]
    assert work.bytes_out == len(set(rows.tolist())) * MIXTRAL.shape.hidden_size * 2


SMALL = settings(max_examples=60)


def best_makespan(amounts: list[int], allowed: list[list[int]], num_devices: int) -> int:
    """Of every way to give each piece one of its devices."""
    best = sum(amounts)
    for choice in itertools.product(*allowed):
        sums = [0] * num_devices
        for amount, device in zip(amounts, choice, strict=True):
            sums[device] += amount
        best = min(best, max(sums))
    return best


@st.composite
def loads(draw):  # type: ignore[no-untyped-def]
    num_layers, num_experts = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    cells = st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts)
    return np.array([draw(cells) for _ in range(num_layers)], np.float64)


@SMALL
@given(loads(), st.integers(1, 4), st.data())
def test_every_expert_has_its_copies_on_different_devices_and_every_device_its_part(load, num_devices, data) -> None:  # type: ignore[no-untyped-def]
    num_copies = data.draw(st.integers(1, num_devices))
    held = assign_copies(len(load), load.shape[1], num_devices, num_copies)
    assert (held.sum(axis=2) == num_copies).all()
    of_layer = held.sum(axis=1)
    assert (of_layer.max(axis=1) - of_layer.min(axis=1) <= num_copies).all()


@SMALL
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(2, 3))
def test_with_copies_everywhere_a_layer_takes_a_third_more_than_the_best_at_most(amounts, num_devices) -> None:  # type: ignore[no-untyped-def]
    held = np.ones((len(amounts), num_devices), np.bool_)
    found = route(held, [True] * num_devices, {(expert, 3): amount for expert, amount in enumerate(amounts)})
    sums = np.bincount([found[expert, 3] for expert in range(len(amounts))], amounts, num_devices)
    best = best_makespan(amounts, [list(range(num_devices))] * len(amounts), num_devices)
    assert sums.max() <= best * (4 / 3 - 1 / (3 * num_devices)) + 1e-9


@SMALL
@given(loads(), st.integers(2, 4), st.data())
def test_of_two_copies_the_one_on_the_device_with_less_to_do_serves(load, num_devices, data) -> None:  # type: ignore[no-untyped-def]
    """Each piece goes where less was put before it. Azar, Naor, Rom (1995): that is at most 1 + log2(D) of the best."""
    copies = assign_copies(len(load), load.shape[1], num_devices, 2)
    wanted = data.draw(st.lists(st.integers(0, load.shape[1] - 1), max_size=6, unique=True))
    work = {(expert, 3): int(load[0, expert]) + 1 for expert in wanted}
    found = route(copies[0], [True] * num_devices, work)
    sums = [sum(work[name] for name, at in found.items() if at == device) for device in range(num_devices)]
    allowed = [np.flatnonzero(copies[0, expert]).tolist() for expert, _ in work]
    best = best_makespan(list(work.values()), allowed, num_devices)
    assert max(sums, default=0) <= (1 + np.ceil(np.log2(num_devices))) * best
    for name, device in found.items():
        other = next(at for at in np.flatnonzero(copies[0, name[0]]).tolist() if at != device)
        later = [one for one in work if (-work[one], one) > (-work[name], name)]
        before = {at: sums[at] - sum(work[one] for one in later if found[one] == at) for at in (device, other)}
        assert before[device] - work[name] <= before[other]


@SMALL
@given(loads(), st.integers(2, 4), st.data())
def test_a_lost_device_leaves_no_pair_behind_where_a_copy_lives(load, num_devices, data) -> None:  # type: ignore[no-untyped-def]
    num_copies = data.draw(st.integers(1, num_devices))
    held = assign_copies(len(load), load.shape[1], num_devices, num_copies)[0]
    alive = data.draw(st.lists(st.booleans(), min_size=num_devices, max_size=num_devices))
    found = route(held, alive, {(expert, 3): 1 for expert in range(len(held))})
    for (expert, _), device in found.items():
        living = np.flatnonzero(held[expert] & alive).tolist()
        assert (device in living) if living else (device == NO_COPY)
    if sum(alive) > num_devices - num_copies:
        assert NO_COPY not in found.values()


def test_more_copies_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 copies of each expert need as many devices, got 2"):
        assign_copies(1, 4, 2, 3)
