"""Where copies of experts lie on several devices, and which one serves: bounds, capacity, what a lost device costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.copies import NO_COPY, Copies, add_device, assign_copies, rebalance, route

SMALL = settings(max_examples=60)


def busiest(copies: Copies, load: np.ndarray) -> np.ndarray:
    """[L], what the busiest device of each layer has to do where the copies of an expert share its load."""
    each: np.ndarray = (load[:, :, None] * copies.held).sum(axis=1) / copies.num_copies
    return each.max(axis=1)


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
def loads(draw, max_experts: int = 7):  # type: ignore[no-untyped-def]
    num_layers, num_experts = draw(st.integers(1, 3)), draw(st.integers(1, max_experts))
    cells = st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts)
    return np.array([draw(cells) for _ in range(num_layers)], np.float64)


@SMALL
@given(loads(), st.integers(1, 4), st.data())
def test_every_expert_has_its_copies_on_different_devices_that_have_room(load, num_devices, data) -> None:  # type: ignore[no-untyped-def]
    num_copies = data.draw(st.integers(1, num_devices))
    need = load.size * num_copies
    room = data.draw(st.lists(st.integers(0, load.size + 2), min_size=num_devices, max_size=num_devices))
    possible = sum(min(count, load.size) for count in room) >= need  # each device holds an expert at most once
    if not possible:
        with pytest.raises(ConfigError, match="do not fit devices with room for"):
            assign_copies(load, num_devices, num_copies, room)
        return
    copies = assign_copies(load, num_devices, num_copies, room)
    assert (copies.held.sum(axis=2) == num_copies).all()
    assert (copies.per_device <= room).all()


@SMALL
@given(loads(), st.integers(2, 3))
def test_one_copy_each_is_within_a_third_of_the_best_assignment_there_is(load, num_devices) -> None:  # type: ignore[no-untyped-def]
    """Graham: longest first is at most 4/3 - 1/(3 D) of the best, which exhaustive search finds here."""
    found = busiest(assign_copies(load, num_devices, 1), load)
    anywhere = [list(range(num_devices))] * load.shape[1]
    for layer, longest in enumerate(found):
        best = best_makespan(load[layer].astype(int).tolist(), anywhere, num_devices)
        assert longest <= best * (4 / 3 - 1 / (3 * num_devices)) + 1e-9


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
    copies = assign_copies(load, num_devices, 2)
    wanted = data.draw(st.lists(st.integers(0, load.shape[1] - 1), max_size=6, unique=True))
    work = {(expert, 3): int(load[0, expert]) + 1 for expert in wanted}
    found = route(copies.held[0], [True] * num_devices, work)
    sums = [sum(work[name] for name, at in found.items() if at == device) for device in range(num_devices)]
    allowed = [np.flatnonzero(copies.held[0, expert]).tolist() for expert, _ in work]
    best = best_makespan(list(work.values()), allowed, num_devices)
    assert max(sums, default=0) <= (1 + np.ceil(np.log2(num_devices))) * best
    for name, device in found.items():
        other = next(at for at in np.flatnonzero(copies.held[0, name[0]]).tolist() if at != device)
        later = [one for one in work if (-work[one], one) > (-work[name], name)]
        before = {at: sums[at] - sum(work[one] for one in later if found[one] == at) for at in (device, other)}
        assert before[device] - work[name] <= before[other]


@SMALL
@given(loads(), st.integers(2, 4), st.data())
def test_a_lost_device_leaves_no_pair_behind_where_a_copy_lives(load, num_devices, data) -> None:  # type: ignore[no-untyped-def]
    num_copies = data.draw(st.integers(1, num_devices))
    held = assign_copies(load, num_devices, num_copies).held[0]
    alive = data.draw(st.lists(st.booleans(), min_size=num_devices, max_size=num_devices))
    found = route(held, alive, {(expert, 3): 1 for expert in range(len(held))})
    for (expert, _), device in found.items():
        living = np.flatnonzero(held[expert] & alive).tolist()
        assert (device in living) if living else (device == NO_COPY)
    if sum(alive) > num_devices - num_copies:
        assert NO_COPY not in found.values()


@SMALL
@given(loads(max_experts=6), st.integers(2, 4), st.data())
def test_a_new_expectation_moves_few_copies_makes_no_layer_worse_and_no_device_fuller(load, num_devices, data) -> None:  # type: ignore[no-untyped-def]
    num_copies, most = data.draw(st.integers(1, num_devices)), data.draw(st.integers(0, 6))
    before = assign_copies(np.ones_like(load), num_devices, num_copies)
    after, arrived = rebalance(before, load, most)
    assert arrived.sum() <= most
    assert (after.per_device == before.per_device).all()
    assert (after.held & ~before.held).sum() <= arrived.sum()
    assert (busiest(after, load) <= busiest(before, load) + 1e-9).all()


def test_the_copies_of_the_layer_that_gains_most_are_exchanged_first() -> None:
    """Four experts on two devices, 0 and 2 on the first. Layer 0 expects 8 + 8 there and 1 + 1 on the other: with one
    exchange both have 9. Layer 1 gains 2 - 1.5 only."""
    before = Copies(np.array([[[1, 0], [0, 1], [1, 0], [0, 1]]] * 2, np.bool_))
    load = np.array([[8.0, 1.0, 8.0, 1.0], [1.0, 0.5, 1.0, 0.5]])
    after, arrived = rebalance(before, load, 2)
    assert busiest(after, load).tolist() == [9.0, 2.0]
    assert arrived.tolist() == [1, 1]
    again, arrived = rebalance(after, load, 10)
    assert busiest(again, load).tolist() == [9.0, 1.5]
    assert arrived.tolist() == [1, 1]


def test_more_copies_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 copies of each expert need as many devices, got 2"):
        assign_copies(np.ones((1, 4)), 2, 3)


@SMALL
@given(loads(), st.integers(1, 4), st.data())
def test_a_device_that_joins_takes_its_part_from_the_others_and_nothing_else_moves(load, num_devices, data) -> None:  # type: ignore[no-untyped-def]
    num_copies = data.draw(st.integers(1, num_devices))
    before = assign_copies(load, num_devices, num_copies)
    after, arrived = add_device(before, load, num_copies, [load.size] * (num_devices + 1))
    assert after.num_copies == num_copies
    assert not (after.held[:, :, :-1] & ~before.held).any(), "a copy came to a device that was there before"
    assert arrived.tolist() == [0] * num_devices + [after.held[:, :, -1].sum()]
    part = load.shape[1] * num_copies // (num_devices + 1)
    assert (after.held[:, :, -1].sum(axis=1) == part).all()


def test_a_second_device_brings_every_expert_its_second_copy() -> None:
    one = assign_copies(np.ones((4, 8)), 1, 1)
    two, arrived = add_device(one, np.ones((4, 8)), 2, [32, 32])
    assert two.held.all()
    assert arrived.tolist() == [0, 32]


def test_a_further_copy_that_finds_no_room_is_left_out_and_the_new_device_shares_those_there_are() -> None:
    """Two devices are full; a third has room for 20 of 32 experts, not for all."""
    full = assign_copies(np.ones((4, 8)), 2, 1, [16, 16])
    three, arrived = add_device(full, np.ones((4, 8)), 2, [16, 16, 20])
    assert three.num_copies == 1
    assert three.per_device.tolist() == [12, 12, 8]
    assert arrived.tolist() == [0, 0, 8]


def test_a_device_without_room_gets_nothing() -> None:
    same, arrived = add_device(assign_copies(np.ones((2, 4)), 2, 1), np.ones((2, 4)), 1, [8, 8, 0])
    assert same.per_device.tolist() == [4, 4, 0]
    assert arrived.tolist() == [0, 0, 0]
