"""Experts prepared before a plan asks for them: which ones, within which memory, and never in anybody's way."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from caller import Caller
from stepping_kernel import SteppingKernel

from ndp_device import server
from ndp_device.common.errors import ReplicaError
from ndp_device.experts.expert import Expert
from ndp_device.handler import Handler
from ndp_device.replicas.store import ExpertStore
from ndp_device.timing.spec import load_hardware

AT_THREE_BITS = 1 << 2  # a plan's flag


@pytest.fixture
def store(model_dir: Path, built: Path) -> ExpertStore:
    return ExpertStore(model_dir, built, kernel=SteppingKernel())


def prepared_ahead(store: ExpertStore) -> int:
    """How many experts."""
    count = 0
    while store.prepare_ahead():
        count += 1
    return count


def handler_over(store: ExpertStore) -> Handler:
    return Handler(store, store._kernel, load_hardware("h100-ndp512"))


def test_before_any_plan_experts_are_prepared_at_three_bits(store: ExpertStore) -> None:
    steps = prepared_ahead(store)
    assert store.prepared(3).sum() == steps == store._kernel.num_prepared > 0
    assert store.prepared(3).ravel()[:steps].all(), "in their order"
    assert not store.prepared(16).any()
    assert store.held_bytes <= store.resident_bytes


def test_without_replicas_nothing_is_prepared_ahead(model_dir: Path) -> None:
    assert not prepared_ahead(ExpertStore(model_dir, None, kernel=SteppingKernel()))


def test_it_ends_before_the_memory_of_the_packed_replicas_is_exceeded_and_drives_nothing_out(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.get(0, 0, 4)
    monkeypatch.setattr(type(store), "resident_bytes", before.nbytes + store.expert_bytes(0, 0, 3))
    assert prepared_ahead(store) == 1
    monkeypatch.setattr(store, "expert", None)
    assert not prepared_ahead(store), "and what has no room is read once"
    assert store.get(0, 0, 4) is before


def test_what_was_never_asked_for_is_forgotten_first(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = store.get(0, 0, 3)
    assert prepared_ahead(store)
    monkeypatch.setattr(type(store), "resident_bytes", asked.nbytes)
    assert store.trim({}) > 0
    assert store.get(0, 0, 3) is asked


def test_a_plan_finds_there_what_was_prepared_and_asking_makes_it_as_good_as_any(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = handler_over(store)
    while handler.prepare_ahead():
        pass
    ready = store.prepared(3)
    count = store._kernel.num_prepared
    assert count == ready.sum() > 0
    caller = Caller(handler)
    caller.hello()
    caller.install(1, np.where(ready, AT_THREE_BITS, 0).astype(np.uint8))
    assert store._kernel.num_prepared == count
    first = np.zeros_like(ready)
    first[0, 0] = True
    caller.install(2, np.where(first, AT_THREE_BITS, 0).astype(np.uint8))
    monkeypatch.setattr(type(store), "resident_bytes", store.expert_bytes(0, 0, 3))
    store.trim({})
    assert (store.prepared(3) == first).all(), "the first one would be forgotten first"


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


# -- the server's part: when ---------------------------------------------------------------------------------------


class Loop:
    """A server whose socket and handler are told what to do; `waits` are the times it was willing to wait."""

    def __init__(self) -> None:
        self.waits: list[int] = []
        self.requests: list[Any] = []
        self.steps = 0
        self.left = 3
        handler = SimpleNamespace(forget=None, prepare_ahead=self.prepare_ahead, others_compute=None)
        transport = SimpleNamespace(offer_memory=None, others_compute=None, receive=self.receive)
        self.server = server.Server(transport, handler)  # type: ignore[arg-type]
        self.server._served_ns = time.monotonic_ns() - 10**9

    def receive(self, timeout_ms: int) -> Any:
        self.waits.append(timeout_ms)
        return [self.requests.pop()] if self.requests else []

    def prepare_ahead(self) -> bool:
        self.steps += 1
        self.left -= 1
        return self.left > 0


def test_an_idle_device_looks_at_its_socket_after_every_step_and_sleeps_when_all_is_done() -> None:
    loop = Loop()
    for _ in range(5):
        loop.server._wait()
    assert loop.waits == [250, 0, 0, 250, 250]
    assert loop.left <= 0


def test_a_request_ends_it_and_nothing_is_prepared_until_the_device_has_been_idle_again() -> None:
    loop = Loop()
    loop.server._wait()
    request = SimpleNamespace(client=b"host", frames=(b"", b""))
    loop.requests.append(request)
    assert loop.server._wait() is request  # type: ignore[comparison-overlap]
    loop.server._served_ns = time.monotonic_ns()
    loop.server._wait()
    assert loop.waits == [250, 0, 250]
    assert loop.steps == 1
