"""Experts prepared before a plan asks for them: which ones, within which memory, and never in anybody's way."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from caller import Caller
from numpy.typing import NDArray
from small_checkpoint import EXPERTS, LAYERS
from stepping_kernel import SteppingKernel

from ndp_device import server
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.experts.expert import Expert
from ndp_device.handler import DeviceConfig, Handler
from ndp_device.replicas.store import ExpertStore
from ndp_device.server import IdleCores, Look, look_at_cores
from ndp_device.shard_stores import PrefetchOrder
from ndp_device.timing.spec import load_hardware

EVERYWHERE = np.ones((LAYERS, EXPERTS), np.bool_)
HERE = {bits: 1 << flag for flag, bits in enumerate((1, 2, 3, 4, 16))}  # a plan's flags


@pytest.fixture
def store(model_dir: Path, built: Path) -> ExpertStore:
    return ExpertStore(model_dir, built, kernel=SteppingKernel())


def handler_over(store: ExpertStore, *, ahead: bool = True) -> Handler:
    return Handler(store, store._kernel, load_hardware("h100-ndp512"), prepares_ahead=ahead)


def one(layer: int, expert: int) -> NDArray[np.bool_]:
    mask = np.zeros((LAYERS, EXPERTS), np.bool_)
    mask[layer, expert] = True
    return mask


def order(prefetch_order: PrefetchOrder, store: ExpertStore) -> list[tuple[int, int, int]]:
    keys = []
    while (key := prefetch_order.next()) is not None:
        keys.append(key)
        for _ in store.prepare_ahead(*key):
            pass
    return keys


def test_before_any_plan_every_expert_is_prepared_at_three_bits(store: ExpertStore) -> None:
    everything = [(layer, expert, 3) for layer in range(LAYERS) for expert in range(EXPERTS)]
    prefetch_order = PrefetchOrder(store)
    keys = order(prefetch_order, store)
    assert keys[: len(everything)] == everything[: len(keys)]
    assert {bits for _, _, bits in keys} == {3}
    assert prefetch_order.is_done
    assert store.held_bytes <= store.resident_bytes


def test_what_most_plans_asked_for_comes_first_at_the_width_they_asked_for(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetch_order = PrefetchOrder(store)
    monkeypatch.setattr(store, "has_room", lambda *key: True)
    prefetch_order.note(2, EVERYWHERE)
    prefetch_order.note(4, one(1, 2))
    prefetch_order.note(4, one(1, 2))
    prefetch_order.note(3, one(0, 1))
    keys = order(prefetch_order, store)
    assert keys[0] == (1, 2, 4)  # in three plans, twice at 4 bits
    assert keys[1] == (0, 1, 2)  # in two, the lower of two equal counts
    assert len(keys) == LAYERS * EXPERTS + 2
    assert set(keys[-2:]) == {(0, 1, 3), (1, 2, 2)}  # other widths that were asked for, after one width of each


def test_an_expert_in_no_plan_gets_the_width_that_is_usual_elsewhere(store: ExpertStore) -> None:
    prefetch_order = PrefetchOrder(store)
    prefetch_order.note(1, one(0, 0))
    assert {bits for _, _, bits in order(prefetch_order, store)} == {1}


def test_full_precision_and_what_cannot_be_had_is_never_prepared_ahead(
    model_dir: Path, built: Path, store: ExpertStore
) -> None:
    prefetch_order = PrefetchOrder(store)
    prefetch_order.note(16, EVERYWHERE)
    prefetch_order.give_up(0, 0, 3)
    keys = order(prefetch_order, store)
    assert keys
    assert (0, 0, 3) not in keys
    assert {bits for _, _, bits in keys} == {3}
    without_replicas = PrefetchOrder(ExpertStore(model_dir, None, kernel=SteppingKernel()))
    assert without_replicas.is_done
    without_replicas.note(16, EVERYWHERE)
    assert without_replicas.next() is None


def test_it_ends_before_the_memory_of_the_packed_replicas_is_exceeded_and_drives_nothing_out(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.get(0, 0, 4)
    monkeypatch.setattr(type(store), "resident_bytes", before.nbytes + store.expert_bytes(0, 0, 3))
    assert order(PrefetchOrder(store), store) == [(0, 0, 3)]
    assert store.get(0, 0, 4) is before


def test_an_expert_that_turns_out_too_large_is_dropped_and_not_tried_again(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(store), "resident_bytes", 1)
    monkeypatch.setattr(store, "has_room", lambda *key: True)
    handler = handler_over(store)
    steps = 0
    while handler.prepare_ahead():
        steps += 1
        assert steps < 1000
    assert store.held_bytes == 0
    assert not store.prepared(3).any()


def test_what_was_never_asked_for_is_forgotten_first(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = store.get(0, 0, 3)
    order(PrefetchOrder(store), store)
    monkeypatch.setattr(type(store), "resident_bytes", asked.nbytes)
    assert store.trim({}) > 0
    assert store.get(0, 0, 3) is asked


def test_a_plan_finds_there_what_was_prepared_and_asking_makes_it_as_good_as_any(store: ExpertStore) -> None:
    handler = handler_over(store)
    while handler.prepare_ahead():
        pass
    ready = store.prepared(3)
    count = store._kernel.num_prepared
    assert count == ready.sum() > 0
    caller = Caller(handler)
    caller.hello()
    caller.install(1, np.where(ready, HERE[3], 0).astype(np.uint8))
    assert store._kernel.num_prepared == count
    assert handler.can_prepare_ahead  # a plan may have said something new


def test_a_plan_for_the_expert_that_is_half_prepared_is_served_at_once(store: ExpertStore) -> None:
    handler = handler_over(store)
    assert handler.prepare_ahead()
    assert not store.prepared(3).any()
    caller = Caller(handler)
    caller.hello()
    missing = caller.install(1, np.full((LAYERS, EXPERTS), HERE[3], np.uint8))
    assert not missing.any()
    assert store.prepared(3).all()


@pytest.mark.parametrize("known", [False, True])
def test_a_damaged_expert_is_given_up_and_the_others_are_prepared(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Its size is read first, where that is not known already."""
    read = store.expert

    def damaged(layer: int, expert: int, bits: int) -> Expert:
        if (layer, expert, bits) == (0, 1, 3):
            raise ReplicaError("its bytes are gone")
        return read(layer, expert, bits)

    if known:
        store.expert_bytes(0, 1, 3)
    monkeypatch.setattr(store, "expert", damaged)
    handler = handler_over(store)
    while handler.prepare_ahead():
        pass
    assert not store.prepared(3)[0, 1]
    assert store.prepared(3).sum() >= 2
    assert store.held_bytes <= store.resident_bytes


def test_only_a_device_that_is_told_to_and_has_a_bound_prepares_ahead(
    model_dir: Path, built: Path, store: ExpertStore
) -> None:
    assert not handler_over(store, ahead=False).can_prepare_ahead
    assert not handler_over(store, ahead=False).prepare_ahead()
    for kernel, prepare, expected in (
        ("reference", "idle", False),
        ("native", "asked", False),
        ("native", "idle", True),
    ):
        config = DeviceConfig("ipc:///x", model_dir, built, kernel=kernel, prepare=prepare)
        assert Handler.from_config(config).can_prepare_ahead is expected
    with pytest.raises(ConfigError, match="prepare must be one of idle, asked"):
        DeviceConfig("ipc:///x", model_dir, built, prepare="never")


# -- the server's part: when ---------------------------------------------------------------------------------------


class Loop:
    """A server whose socket, handler and cores are told what to do; `waits` are the times it was willing to wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, silent_s: float = 1.0, quiet: bool = True) -> None:
        self.waits: list[int] = []
        self.requests: list[Any] = []
        self.steps = 0
        self.left = 3
        handler = SimpleNamespace(
            forget=None, can_prepare_ahead=True, prepare_ahead=self.prepare_ahead, others_compute=None
        )
        transport = SimpleNamespace(offer_memory=None, others_compute=None, receive=self.receive)
        monkeypatch.setattr(server, "IdleCores", lambda: SimpleNamespace(are_idle=lambda: quiet))
        self.server = server.Server(transport, handler)  # type: ignore[arg-type]
        self.server._served_ns = time.monotonic_ns() - int(silent_s * 1e9)

    def receive(self, timeout_ms: int) -> Any:
        self.waits.append(timeout_ms)
        return [self.requests.pop()] if self.requests else []

    def prepare_ahead(self) -> bool:
        self.steps += 1
        self.left -= 1
        return self.left > 0


def test_an_idle_device_looks_at_its_socket_after_every_step_and_sleeps_when_all_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(monkeypatch)
    for _ in range(5):
        loop.server._wait()
        loop.server._handler.can_prepare_ahead = loop.left > 0
    assert loop.waits == [250, 0, 0, 250, 250]
    assert loop.steps == 3


def test_a_request_ends_it_until_the_device_has_been_idle_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    loop.server._wait()
    request = SimpleNamespace(client=b"host", frames=(b"", b""))
    loop.requests.append(request)
    assert loop.server._wait() is request  # type: ignore[comparison-overlap]
    loop.server._served_ns = time.monotonic_ns()
    loop.server._wait()
    assert loop.waits == [250, 0, 250]
    assert loop.steps == 1


@pytest.mark.parametrize(("silent_s", "quiet"), [(0.0, True), (1.0, False)])
def test_nothing_is_prepared_soon_after_a_request_or_on_cores_that_others_use(
    monkeypatch: pytest.MonkeyPatch, silent_s: float, quiet: bool
) -> None:
    loop = Loop(monkeypatch, silent_s=silent_s, quiet=quiet)
    for _ in range(3):
        loop.server._wait()
    assert loop.waits == [250, 250, 250]
    assert loop.steps == 0


@pytest.mark.parametrize(
    ("seconds", "busy", "own", "expected"),
    [
        (0.25, 0.0, 0.0, True),
        (0.25, 0.45, 0.40, True),  # we are the ones who are busy
        (0.25, 0.10, 0.0, True),  # a fifth of two cores
        (0.25, 0.25, 0.0, False),  # another program has one of two cores
        (0.25, 0.5, 0.25, False),
        (5.0, 0.0, 0.0, False),  # too long ago to say anything
    ],
)
def test_cores_are_idle_when_others_left_three_quarters_of_them(
    monkeypatch: pytest.MonkeyPatch, seconds: float, busy: float, own: float, expected: bool
) -> None:
    looks = iter([Look(10.0, 4.0, 2.0), Look(10.0 + seconds, 4.0 + busy, 2.0 + own), Look(10.01 + seconds, 99.0, 2.0)])
    monkeypatch.setattr(server, "look_at_cores", lambda: next(looks))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    cores = IdleCores()
    assert cores.are_idle() is expected
    assert cores.are_idle() is expected  # too soon to look again


def test_cores_of_which_nothing_is_known_count_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    first = look_at_cores()
    assert first.busy >= 0
    monkeypatch.setattr(server.Path, "read_text", lambda path: "cpu0 0 0 0 0 0 0 0 0\ncpu1 x\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 7})
    looks = look_at_cores(), look_at_cores()
    assert looks[1].busy - looks[0].busy == pytest.approx(2 * (looks[1].at - looks[0].at))


class Shelf:
    """What PrefetchOrder asks of a store; everything fits."""

    widths = frozenset((2, 3, 4, FULL_PRECISION_BITS))
    shape = SimpleNamespace(num_layers=3, num_experts=5)

    def __init__(self) -> None:
        self.ready = {bits: np.zeros((3, 5), np.bool_) for bits in self.widths}

    def prepared(self, bits: int) -> NDArray[np.bool_]:
        return self.ready[bits]

    def has_room(self, layer: int, expert: int, bits: int) -> bool:
        return True


@pytest.mark.parametrize("seed", range(20))
def test_thousands_are_ordered_at_once_as_one_at_a_time(seed: int) -> None:
    """Each expert's favourite width first, the one asked for most, ties to the narrower width and the lower expert;
    then the other widths that were asked for at all."""
    random = np.random.default_rng(seed)
    shelf = Shelf()
    order = PrefetchOrder(shelf)  # type: ignore[arg-type]
    asked = np.zeros((3, 3, 5), np.int64)
    for _ in range(4):
        for index, bits in enumerate((2, 3, 4)):
            wants = random.random((3, 5)) < 0.4
            order.note(bits, wants)
            asked[index] += wants
    usual = int(asked.sum((1, 2)).argmax())
    found = []
    while (key := order.next()) is not None:
        found.append(key)
        shelf.ready[key[2]][key[0], key[1]] = True
    cells = [(layer, expert) for layer in range(3) for expert in range(5)]
    best = {at: int(asked[:, *at].argmax()) if asked[:, *at].any() else usual for at in cells}
    first = sorted(((best[at], *at) for at in cells), key=lambda cell: (-asked[:, cell[1], cell[2]].sum(), cell))
    rest = [(w, *at) for w in range(3) for at in cells if w != best[at] and asked[w][at]]
    rest.sort(key=lambda cell: (-asked[cell], cell))
    assert found == [(layer, expert, (2, 3, 4)[width]) for width, layer, expert in (*first, *rest)]
    assert order.is_done
