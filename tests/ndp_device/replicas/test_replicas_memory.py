"""What a device keeps in memory: no page of a file that was only converted, and no more than the packed replicas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caller import Caller, pairs_of
from numpy.typing import NDArray
from paths import resident_bytes_of
from small_checkpoint import EXPERTS, LAYERS, write_small_checkpoint
from stepping_kernel import SteppingKernel

from ndp_device.calibration.build import build_data_free
from ndp_device.common.errors import ReplicaError
from ndp_device.handler import Handler
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.mapped import MappedFile
from ndp_device.replicas.store import ExpertStore
from ndp_device.timing.spec import load_hardware


@pytest.fixture
def store(model_dir: Path, built: Path) -> ExpertStore:
    return ExpertStore(model_dir, built, kernel=SteppingKernel())


def every_width(store: ExpertStore) -> dict[tuple[int, int, int], Any]:
    keys = [(layer, expert, bits) for layer in range(LAYERS) for expert in range(EXPERTS) for bits in (1, 2, 3, 4)]
    return {key: store.get(*key) for key in keys}


@pytest.mark.parametrize("at_once", [False, True])
def test_more_than_the_packed_replicas_is_forgotten_longest_unused_first(store: ExpertStore, at_once: bool) -> None:
    before = every_width(store)
    first, latest = (0, 0, 1), (0, 0, 2)
    if at_once:
        store.get_all(0, [0], [2])
    else:
        store.get(*latest)
    assert store.trim({}) > 0
    assert store.held_bytes <= store.resident_bytes
    assert store.get(*latest) is before[latest]
    assert store.get(*first) is not before[first]


def test_what_is_in_use_and_cannot_be_masked_stays_whatever_it_takes(store: ExpertStore) -> None:
    before = every_width(store)
    everything = np.ones((LAYERS, EXPERTS), np.bool_)
    assert store.trim(dict.fromkeys((1, 2, 3, 4), everything)) == 0
    layer_0 = (np.arange(LAYERS)[:, None] == 0) & everything
    assert store.trim(dict.fromkeys((1, 2, 3, 4), layer_0)) > 0
    for key, prepared in before.items():
        if key[0] == 0:
            assert store.get(*key) is prepared


def test_asking_again_for_many_at_once_is_asking_for_each(store: ExpertStore) -> None:
    before = every_width(store)
    first = np.zeros((LAYERS, EXPERTS), np.bool_)
    first[0] = True
    for bits in (1, 2):
        store.ask_again(bits, first)
    forgotten = store.trim({})
    assert 0 < forgotten <= len(before) - 2 * EXPERTS
    kept = [key for key in before if store.prepared(key[2])[key[:2]]]
    assert len(kept) == len(before) - forgotten
    assert {(0, expert, bits) for expert in range(EXPERTS) for bits in (1, 2)} <= set(kept)
    assert sum(before[key].nbytes for key in kept) == store.held_bytes <= store.resident_bytes


@pytest.mark.parametrize("place", [(-1, 0), (0, -1), (LAYERS, 0), (0, EXPERTS)])
def test_an_expert_that_the_model_does_not_have_is_refused(store: ExpertStore, place: tuple[int, int]) -> None:
    for bits in (3, 16):
        with pytest.raises(ReplicaError, match=f"expert {place[1]} of layer {place[0]} cannot be had"):
            store.get(*place, bits)


# -- masked widths: of the native kernel, over shapes that it stores without padding --------------------------------

ALL_WIDTHS = (1, 2, 3, 4)
EVERYWHERE = np.ones((LAYERS, EXPERTS), np.bool_)
NOWHERE = ~EVERYWHERE


@pytest.fixture(scope="module")
def unpadded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model = write_small_checkpoint(tmp_path_factory.mktemp("checkpoints") / "unpadded", hidden=64, intermediate=96)
    out = tmp_path_factory.mktemp("replicas") / "unpadded"
    build_data_free(model, out, group_size=32, show_progress=False)
    return model, out


def native_store(directories: tuple[Path, Path]) -> ExpertStore:
    return ExpertStore(*directories, kernel=NativeKernel())


def bytes_of_parts(store: ExpertStore) -> int:
    """What is held, counted afresh."""
    return sum(dict(part for prepared in store._prepared.values() for part in store._kernel.parts(prepared)).values())


def answer(store: ExpertStore, key: tuple[int, int, int], rows: int) -> NDArray[np.float32]:
    x = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)
    each = np.arange(rows, dtype=np.int32)
    y: NDArray[np.float32] = store._kernel.execute(x, [store.get(*key)], each, 0 * each, np.ones(rows, np.float32))
    return y


def test_all_widths_in_use_at_once_take_no_more_than_the_packed_replicas(unpadded: tuple[Path, Path]) -> None:
    store = native_store(unpadded)
    keys = list(every_width(store))
    assert store.held_bytes > 1.2 * store.resident_bytes
    assert store.trim(dict.fromkeys(ALL_WIDTHS, EVERYWHERE)) == 0
    assert store.held_bytes == bytes_of_parts(store) <= store.resident_bytes
    assert all(store.prepared(bits).all() for bits in ALL_WIDTHS)
    assert store.masked(3).all()
    roomy = native_store(unpadded)
    for key in keys:
        for rows in (1, 3, 17):
            np.testing.assert_array_equal(answer(store, key, rows), answer(roomy, key, rows))
    assert not any(roomy.masked(bits).any() for bits in ALL_WIDTHS)


def test_three_bits_are_masked_before_one_and_no_more_than_needed(
    unpadded: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = native_store(unpadded)
    every_width(store)
    for bits in ALL_WIDTHS:
        store.get(0, 0, bits)  # asked for last, so masked last
    masked = []
    for _ in range(2 * LAYERS * EXPERTS):
        monkeypatch.setattr(ExpertStore, "resident_bytes", store.held_bytes - 1)
        assert store.trim(dict.fromkeys(ALL_WIDTHS, EVERYWHERE)) == 0
        assert store.held_bytes == bytes_of_parts(store) <= store.resident_bytes
        masked.append((int(store.masked(3).sum()), int(store.masked(1).sum())))
        assert not store.masked(2).any()
        assert not store.masked(4).any()
        assert not store.masked(3)[0, 0] or store.masked(3).all()
    count = LAYERS * EXPERTS
    assert masked == [(n, 0) for n in range(1, count + 1)] + [(count, n) for n in range(1, count + 1)]


def test_idle_widths_are_forgotten_before_anything_in_use_is_masked(unpadded: tuple[Path, Path]) -> None:
    store = native_store(unpadded)
    every_width(store)
    in_use = {1: EVERYWHERE, 2: NOWHERE, 3: EVERYWHERE, 4: np.arange(LAYERS)[:, None] == EVERYWHERE}
    assert store.trim(in_use) > 0
    assert store.held_bytes <= store.resident_bytes
    assert all((store.prepared(bits) >= used).all() for bits, used in in_use.items())
    assert not any(store.masked(bits).any() for bits in ALL_WIDTHS)


def test_a_masked_width_is_whole_again_after_plans_have_done_without_it(unpadded: tuple[Path, Path]) -> None:
    store = native_store(unpadded)
    every_width(store)
    store.trim(dict.fromkeys(ALL_WIDTHS, EVERYWHERE))
    assert store.masked(3).all()
    assert store.trim({4: EVERYWHERE}) >= LAYERS * EXPERTS
    assert not store.prepared(3).any()
    assert store.held_bytes == bytes_of_parts(store)
    store.get(0, 0, 3)
    store.trim({3: EVERYWHERE, 4: EVERYWHERE})
    assert store.prepared(3)[0, 0]
    assert not store.masked(3)[0, 0]


def test_whatever_plans_come_and_go_the_bytes_are_counted_and_within_the_packed_replicas(
    unpadded: tuple[Path, Path],
) -> None:
    store = native_store(unpadded)
    rng = np.random.default_rng(0)
    for _ in range(60):
        density = rng.uniform(0.2, 1)
        in_use = {bits: rng.random((LAYERS, EXPERTS)) < density for bits in (*ALL_WIDTHS, 16)}
        for bits, used in in_use.items():
            for layer, expert in zip(*used.nonzero(), strict=True):
                store.get(int(layer), int(expert), bits)
        store.trim(in_use)
        assert store.held_bytes == bytes_of_parts(store) <= store.resident_bytes
        assert all((store.prepared(bits) >= used).all() for bits, used in in_use.items())
        store._ahead = 0
        while store.prepare_ahead():
            assert store.held_bytes == bytes_of_parts(store) <= store.resident_bytes
        assert all((store.masked(bits) <= store.prepared(bits)).all() for bits in ALL_WIDTHS)


def test_a_device_whose_plans_name_everything_answers_with_the_same_bits_within_its_memory(
    unpadded: tuple[Path, Path],
) -> None:
    """Two clients with two widths each, compared with a device that one client asks for one width."""
    store, roomy = native_store(unpadded), native_store(unpadded)
    flags = {bits: np.uint8(1 << flag) for flag, bits in enumerate(ALL_WIDTHS)}
    full = Handler(store, store._kernel, load_hardware("h100-ndp512"))
    clients = [Caller(full, b"a"), Caller(full, b"b")]
    for client, widths in zip(clients, ((1, 3), (2, 4)), strict=True):
        client.ready(np.full((LAYERS, EXPERTS), sum(flags[bits] for bits in widths), np.uint8))
        assert store.held_bytes == bytes_of_parts(store) <= store.resident_bytes
    assert store.masked(3).any()
    rng = np.random.default_rng(1)
    for client, bits in ((clients[0], 1), (clients[1], 2), (clients[0], 3), (clients[1], 4)):
        alone = Caller(Handler(roomy, roomy._kernel, load_hardware("h100-ndp512")))
        alone.ready(np.full((LAYERS, EXPERTS), flags[bits], np.uint8))
        x = rng.standard_normal((4, 64), np.float32)
        tensors = pairs_of(x, [0, 0, 1, 2, 3, 3], [0, 1, 2, 2, 0, 2], [bits] * 6, rng.uniform(0, 1, 6))
        for layer in range(LAYERS):
            got, wanted = (caller.execute(tensors, layer=layer)[1] for caller in (client, alone))
            np.testing.assert_array_equal(got, wanted)
    assert not any(roomy.masked(bits).any() for bits in ALL_WIDTHS)


def test_no_moment_of_a_plan_takes_much_more_than_the_packed_replicas(
    unpadded: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 2 % more, and then the expert that is prepared next."""
    store = native_store(unpadded)
    get, held = store.get, []

    def watched(*key: int) -> Any:
        prepared = get(*key)
        held.append(store.held_bytes)
        return prepared

    monkeypatch.setattr(store, "get", watched)
    caller = Caller(Handler(store, store._kernel, load_hardware("h100-ndp512")))
    caller.ready(np.full((LAYERS, EXPERTS), 0b1111, np.uint8))
    assert len(held) == 4 * LAYERS * EXPERTS
    assert max(held) <= 1.02 * store.resident_bytes + get(0, 0, 4).nbytes
    assert store.held_bytes <= store.resident_bytes


def test_a_released_file_takes_no_memory_and_reads_the_same(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    values = np.random.default_rng(0).integers(0, 256, 4 << 20, dtype=np.uint8)
    save_file({"x": values}, tmp_path / "file.safetensors")
    file = MappedFile(tmp_path / "file.safetensors")
    assert np.array_equal(file.tensor("x"), values)
    assert resident_bytes_of(file.path) >= values.nbytes
    file.release()
    assert resident_bytes_of(file.path) == 0
    assert np.array_equal(file.tensor("x"), values)
