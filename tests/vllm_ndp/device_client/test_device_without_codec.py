"""Real devices in shared memory give the same sums and simulated times whether the codec is on the way or not."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from device_cases import MODEL
from numpy.typing import NDArray
from paths import ROOT

from ndp_device.timing.work import Timing
from ndp_device.transport.shm import Put, ShmChannel, Sound
from vllm_ndp.device_client.client import DeviceClient
from vllm_ndp.device_client.device_group import DeviceGroup
from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.layer.devices import slowest

LAYERS, EXPERTS, HIDDEN = 4, 8, 128
WIDTHS = (1, 2, 3, 4, 16)
DTYPES = (np.float32, np.float16, np.uint16)


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    with ExitStack() as ends:
        found = []
        for _ in range(2):
            device = DeviceProcess.spawn(MODEL, ROOT / "models/tiny-mixtral-replicas")
            ends.callback(device.terminate)
            found.append(device.address)
        yield found


def by_parity(
    layer: int, experts: NDArray[np.int32], bits: NDArray[np.uint8], usable: Sequence[bool]
) -> list[tuple[int, NDArray[np.int64]]]:
    places = [np.flatnonzero(experts % 2 == device) for device in range(2)]
    return [(device, of_device) for device, of_device in enumerate(places) if len(of_device)]


def layers(seed: int, count: int) -> Iterator[tuple[Any, ...]]:
    """Of random rows, routers' choices, widths and dtypes, as begin_execute takes them."""
    rng = np.random.default_rng(seed)
    for step in range(count):
        num_rows, top_k = int(rng.integers(1, 40)), int(rng.integers(1, EXPERTS))
        x = rng.standard_normal((num_rows, HIDDEN), np.float32)
        dtype = DTYPES[step % 3]
        sent = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype is np.uint16 else x.astype(dtype)
        rows = np.repeat(np.arange(num_rows, dtype=np.int32), top_k)
        experts = np.concatenate([rng.permutation(EXPERTS)[:top_k] for _ in range(num_rows)]).astype(np.int32)
        bits, gates = rng.choice(np.array(WIDTHS, np.uint8), len(rows)), rng.random(len(rows), np.float32)
        yield step % LAYERS, step, step * 10**7, sent, rows, experts, bits, gates


def outcome(addresses: Sequence[str]) -> list[tuple[bytes, Timing | None]]:
    clients = [DeviceClient(address, deadline_ms=60_000) for address in addresses]
    whole = np.ones((LAYERS, EXPERTS), np.bool_)
    several = DeviceGroup(clients, by_parity, lambda device: whole, slowest, num_copies=1, deadline_ms=60_000)
    try:
        for client in clients:
            client.connect(60)
            assert client.uses_shared_memory
        executes = clients[0] if len(clients) == 1 else several
        executes.begin_install_plan(1, np.full((LAYERS, EXPERTS), 31, np.uint8))
        assert executes.finish_install_plan() == []
        assert executes.activate_plan(1)
        answers = [executes.finish_execute(executes.begin_execute(*layer)) for layer in layers(len(clients), 90)]
        return [(answer.y.tobytes(), answer.timing) for answer in answers]
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("count", [1, 2])
def test_sums_and_simulated_times_are_the_same_with_and_without_the_codec(
    addresses: list[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counter[str]()
    put, take = ShmChannel.put_execute, ShmChannel.take_result

    def counted_put(*of_layer: Any) -> Put:
        counted["sent"] += (state := put(*of_layer)) is not Put.REFUSED
        return state

    def counted_take(channel: ShmChannel) -> Sound | None:
        counted["taken"] += (sound := take(channel)) is not None
        return sound

    monkeypatch.setattr(ShmChannel, "put_execute", counted_put)
    monkeypatch.setattr(ShmChannel, "take_result", counted_take)
    found = outcome(addresses[:count])
    assert counted["sent"] == counted["taken"] >= 90
    monkeypatch.setattr(ShmChannel, "put_execute", lambda *of_layer: Put.REFUSED)
    monkeypatch.setattr(ShmChannel, "take_result", lambda channel: None)
    assert found == outcome(addresses[:count])
    assert all(timing is not None for _, timing in found)
