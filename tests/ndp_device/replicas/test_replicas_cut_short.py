"""A file that is cut short or rewritten while it is mapped: no process ends, no number is made of what is gone."""

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from caller import Caller, pairs_of
from small_checkpoint import write_small_checkpoint
from stopped_disk import StoppedDisk

from ndp_device.calibration.build import build_data_free
from ndp_device.common import kept
from ndp_device.common.errors import DeviceError, ReplicaError
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.handler import Handler
from ndp_device.kernels.native import NativeKernel
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.replicas.format import ReplicaFiles, check_layer_file, read_manifest
from ndp_device.replicas.mapped import MappedFile
from ndp_device.replicas.store import ExpertStore
from ndp_device.timing.spec import load_hardware

PAGE = os.sysconf("SC_PAGESIZE")
WIDE = 128  # experts of several pages


def execute_tensors(bits: int) -> codec.Tensors:
    x = np.random.default_rng(0).standard_normal((2, WIDE)).astype(np.float32)
    return pairs_of(x, [0, 1], [0, 2], [bits, bits], [0.5, 0.25])


def _cut_to_nothing(path: Path) -> None:
    os.truncate(path, 8)


def _cut_within_the_last_page(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _cut_and_grown_again(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 8)
    os.truncate(path, size)


def _rewritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x55" * 8)


def _rewritten_with_its_time_put_back(path: Path) -> None:
    """As rsync --inplace --times and cp --preserve do."""
    before = path.stat()
    _rewritten(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _mapped_by_the_writer(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as written:
        written[-8:] = b"\x55" * 8


DAMAGE = [
    _cut_to_nothing,
    _cut_within_the_last_page,
    _cut_and_grown_again,
    _rewritten,
    _rewritten_with_its_time_put_back,
    _mapped_by_the_writer,
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small_checkpoint(tmp_path / "model", hidden=WIDE, intermediate=WIDE)


@pytest.fixture
def replicas(model: Path, tmp_path: Path) -> Path:
    build_data_free(model, tmp_path / "replicas", group_size=8, show_progress=False)
    return tmp_path / "replicas"


LAST = "model.layers.1.block_sparse_moe.experts.2.w2.weight"


@pytest.mark.parametrize("damage", DAMAGE)
def test_values_of_a_file_that_changed_are_disowned(model: Path, damage: Callable[[Path], None]) -> None:
    file = MappedFile(model / "model.safetensors")
    assert file.tensor(LAST).any()
    file.check()
    damage(file.path)
    file.tensor(LAST).sum()  # ends the process where nothing handles SIGBUS
    with pytest.raises(ReplicaError, match="was cut short or rewritten while it was in use"):
        file.check()


def test_a_file_replaced_by_another_of_its_name_stays_as_it_was(model: Path) -> None:
    file = MappedFile(model / "model.safetensors")
    before = file.tensor(LAST).copy()
    other = shutil.copy(file.path, file.path.with_name("other"))
    os.truncate(other, 8)
    os.replace(other, file.path)
    file.check()
    file.path.unlink()
    assert np.array_equal(file.tensor(LAST), before)
    file.check()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_device_answers_a_cut_file_with_a_typed_error_and_goes_on(
    replicas: Path, damage: Callable[[Path], None]
) -> None:
    """Layer 1 has lost its file; layer 0 answers as before, and what was converted before the cut may be used."""
    made = NativeKernel()
    store = ExpertStore(None, replicas, kernel=made)
    caller = Caller(Handler(store, made, load_hardware("h100-ndp512")))
    caller.hello()
    none = np.zeros((2, 3), np.uint8)
    none[0] = 15
    assert not caller.install(1, none).any()
    caller.ask(msg.ActivatePlan, epoch=1)
    damage(replicas / "experts-00001.safetensors")
    some = np.full((2, 3), 15, np.uint8)
    missing = caller.install(2, some, expected_epoch=1)
    assert not missing[0].any()
    assert (missing[1] == 15).all()
    caller.ask(msg.ActivatePlan, epoch=2)
    tensors = execute_tensors(bits=2)
    assert np.isfinite(caller.execute(tensors, epoch=2)[1]).all()
    with pytest.raises(DeviceError, match="not_loaded"):
        caller.execute(tensors, epoch=2, layer=1)


def test_a_checkpoint_cut_under_full_precision_experts_gives_no_number(model: Path) -> None:
    """The kernel computes from the map itself: the answer is checked after the computation, and refused."""
    made = NativeKernel()
    caller = Caller(Handler(ExpertStore(model, None, kernel=made), made, load_hardware("h100-ndp512")))
    caller.ready(np.full((2, 3), 16, np.uint8))
    tensors = execute_tensors(bits=FULL_PRECISION_BITS)
    assert np.isfinite(caller.execute(tensors)[1]).all()
    os.truncate(model / "model.safetensors", 8)
    with pytest.raises(DeviceError, match=r"not_loaded.*cut short"):
        caller.execute(tensors)


def test_the_hosts_own_store_disowns_what_it_computed(model: Path, replicas: Path) -> None:
    """What `fallback: same` runs on: an expert that was not converted yet, and one in full precision."""
    store = ExpertStore(model, replicas, kernel=NativeKernel())
    store.get(0, 0, 3)
    store.get(0, 0, FULL_PRECISION_BITS)
    os.truncate(replicas / "experts-00000.safetensors", 8)
    os.truncate(model / "model.safetensors", 8)
    with pytest.raises(ReplicaError, match="cut short"):
        store.get(0, 1, 3)
    with pytest.raises(ReplicaError, match="cut short"):
        store.check_used(0, [3, FULL_PRECISION_BITS])
    store.check_used(0, [3])


ORDERS = {
    "never": "file = MappedFile(first)",
    "before": "faulthandler.enable(); file = MappedFile(first)",
    "between": "kept = MappedFile(first); faulthandler.enable(); file = MappedFile(second)",
    "after": "file = MappedFile(first); faulthandler.enable()",
}


@pytest.mark.parametrize("fault", ["ours", "ours in a thread", "another", "another in a thread", "sent"])
@pytest.mark.parametrize("order", ORDERS)
def test_faulthandler_and_ours_never_call_each_other_for_ever(
    tmp_path: Path, model: Path, order: str, fault: str
) -> None:
    """In each order: a file of ours that is cut is an error. Another bus error, of a map that is not ours or sent by
    somebody, ends the process, after one report of faulthandler's."""
    fault, _, in_a_thread = fault.partition(" in a ")
    shutil.copy(model / "model.safetensors", tmp_path / "second")
    program = textwrap.dedent(f"""
        import faulthandler, mmap, os, threading
        from pathlib import Path
        from ndp_device.common.errors import ReplicaError
        from ndp_device.replicas.mapped import MappedFile
        first, second = Path({str(model / "model.safetensors")!r}), Path({str(tmp_path / "second")!r})
        {ORDERS[order]}
        def ours():
            os.truncate(file.path, 8)
            for _ in range(2):
                file.tensor({LAST!r}).sum()
                try:
                    file.check()
                except ReplicaError:
                    print("disowned")
        def sent():
            os.kill(os.getpid(), 7)
        def another():
            with open({str(tmp_path / "other")!r}, "w+b") as other:
                other.truncate({PAGE})
                map = mmap.mmap(other.fileno(), {PAGE})
                other.truncate(0)
                map[0]
        thread = threading.Thread(target={fault})
        thread.start() if {bool(in_a_thread)} else {fault}()
        thread.ident and thread.join()
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if fault == "ours" else -signal.SIGBUS), done.stderr[-2000:]
    assert done.stdout == ("disowned\n" * 2 if fault == "ours" else "")
    is_reported = order == "after" or (fault != "ours" and order != "never")
    assert done.stderr.count("Fatal Python error") == is_reported, done.stderr[-2000:]


def test_a_write_that_fails_leaves_what_was_there_and_nothing_aside(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(b"before")
    with contextlib.suppress(OSError), kept.written(path, aside=tmp_path / "aside") as file:
        file.write(b"after")
        raise OSError("full")
    assert {left.name: left.read_bytes() for left in tmp_path.iterdir()} == {"file": b"before"}


def test_the_next_builder_removes_what_killed_ones_left_and_keeps_a_living_ones(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write = textwrap.dedent(f"""
        import os, sys, time
        from pathlib import Path
        from ndp_device.replicas import format
        os.fsync = lambda handle: (print("writing", flush=True), time.sleep(600))
        format.write_whole(Path({str(out)!r}, sys.argv[1]), [b"half"])
    """)
    names = ["experts-00000.safetensors", "experts-00001.safetensors"]
    builders = [
        subprocess.Popen([sys.executable, "-c", write, name], stdout=subprocess.PIPE, text=True) for name in names
    ]
    try:
        for builder in builders:
            assert builder.stdout is not None
            assert builder.stdout.readline() == "writing\n"
        killed, living = builders
        killed.kill()
        killed.wait()
        assert len(list(out.glob(".*.unfinished"))) == 2
        build_data_free(model, out, group_size=8, show_progress=False)
        assert [path.name for path in out.glob(".*.unfinished")] == [f".{names[1]}.{living.pid}.unfinished"]
    finally:
        for builder in builders:
            builder.kill()
            builder.wait()
            assert builder.stdout is not None
            builder.stdout.close()


def test_whenever_the_machine_stops_what_the_manifest_names_is_whole_and_what_was_built_stays(
    model: Path, tmp_path: Path
) -> None:
    disk = StoppedDisk(tmp_path / "disk")
    with disk.watched():
        build_data_free(model, disk.root / "new" / "out", group_size=8, show_progress=False)
    surely = []
    for states in disk.laid_out("new/out", tmp_path):
        layers = []
        for out in states:
            manifest = read_manifest(out) if (out / "manifest.json").exists() else None
            for layer in manifest.layers if manifest else ():
                check_layer_file(out, layer, manifest, check_contents=True)
            layers.append(len(manifest.layers) if manifest else -1)
        surely.append(min(layers))
    assert surely == sorted(surely), "what was on disk is gone"
    assert set(surely) == {-1, 0, 1, 2}
    assert [len(ReplicaFiles(out).manifest.layers) for out in states] == [2]
