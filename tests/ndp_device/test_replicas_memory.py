"""What a device keeps in memory: no page of a file that was only converted, and no more than the packed replicas."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_checkpoint import EXPERTS, LAYERS, write_small_checkpoint

from ndp_device.calibration.build import build_data_free
from ndp_device.kernels import load_kernel
from ndp_device.replicas.mapped import MappedFile
from ndp_device.replicas.replica import Expert
from ndp_device.replicas.store import ExpertStore


class KeepingKernel:
    """Keeps experts as they lie in the file and says so."""

    name = "keeping"

    def prepare(self, expert: Expert) -> Expert:
        return expert

    def parts(self, prepared: Expert) -> Iterable[tuple[int, int]]:
        return [(id(prepared), prepared.nbytes)]

    def execute(self, *arguments: Any) -> Any:
        raise AssertionError("nothing is computed here")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model = write_small_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small")
    out = tmp_path_factory.mktemp("replicas") / "small"
    build_data_free(model, out, group_size=8, show_progress=False)
    return model, out


def every_width(store: ExpertStore) -> dict[tuple[int, int, int], Any]:
    keys = [(layer, expert, bits) for layer in range(LAYERS) for expert in range(EXPERTS) for bits in (1, 2, 3, 4)]
    return {key: store.get(*key) for key in keys}


def test_more_than_the_packed_replicas_is_forgotten_longest_unused_first(directories: tuple[Path, Path]) -> None:
    store = ExpertStore(*directories, kernel=KeepingKernel())
    before = every_width(store)
    first, latest = (0, 0, 1), (0, 0, 2)
    store.get(*latest)
    assert store.trim({}) > 0
    assert store.held_bytes <= store.resident_bytes
    assert store.get(*latest) is before[latest]
    assert store.get(*first) is not before[first]


def test_what_is_in_use_stays_whatever_it_takes(directories: tuple[Path, Path]) -> None:
    store = ExpertStore(*directories, kernel=KeepingKernel())
    before = every_width(store)
    everything = np.ones((LAYERS, EXPERTS), np.bool_)
    assert store.trim(dict.fromkeys((1, 2, 3, 4), everything)) == 0
    layer_0 = (np.arange(LAYERS)[:, None] == 0) & everything
    assert store.trim(dict.fromkeys((1, 2, 3, 4), layer_0)) > 0
    for key, prepared in before.items():
        if key[0] == 0:
            assert store.get(*key) is prepared


def test_a_store_that_fits_forgets_nothing(directories: tuple[Path, Path]) -> None:
    store = ExpertStore(*directories, kernel=KeepingKernel())
    prepared = store.get(0, 0, 4)
    assert store.trim({}) == 0
    assert store.get(0, 0, 4) is prepared


def test_asking_again_for_many_at_once_is_asking_for_each(directories: tuple[Path, Path]) -> None:
    store = ExpertStore(*directories, kernel=KeepingKernel())
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


def test_the_native_kernel_counts_components_that_widths_share_once(directories: tuple[Path, Path]) -> None:
    pytest.importorskip("ndp_device.kernels._native", reason="the kernels are not built")
    kernel = load_kernel("native")
    store = ExpertStore(*directories, kernel=kernel)
    two, three, four = (store.get(0, 0, bits) for bits in (2, 3, 4))
    shared = sum(component.nbytes for component in two.components)
    assert store.held_bytes == two.nbytes + three.nbytes + four.nbytes - 2 * shared
    store.get(0, 0, 16)
    assert store.held_bytes == two.nbytes + three.nbytes + four.nbytes - 2 * shared
    store._forget((0, 0, 2))
    assert store.held_bytes == three.nbytes + four.nbytes - shared


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


def resident_bytes_of(path: Path) -> int:
    """Bytes of this process's memory that are pages of the file."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            ours = words[-1] == str(path)
        elif ours and words[0] == "Rss:":
            total += int(words[1]) << 10
    return total
