"""Where copies of experts lie on several devices, and which one serves: bounds, capacity, what a lost device costs."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndp_device.common.errors import ConfigError
from vllm_ndp.layer.devices import NO_COPY, assign_copies, route

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
def loads(draw, max_experts: int = 7):  # type: ignore[no-untyped-def]
    num_layers, num_experts = draw(st.integers(1, 3)), draw(st.integers(1, max_experts))
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
