"""A device computes a quantized checkpoint's experts from its own codes: without replicas, and without another loss."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference_kernel import REFERENCE

pytestmark = pytest.mark.slow
pytest.importorskip("torch")

import make_quantized_models as quantized  # noqa: E402
from caller import Caller  # noqa: E402

from ndp_device.calibration.build import build_data_free  # noqa: E402
from ndp_device.common.errors import ConfigError, DeviceError, ReplicaError  # noqa: E402
from ndp_device.experts.expert import Part  # noqa: E402
from ndp_device.handler import Handler  # noqa: E402
from ndp_device.kernels.native import NativeKernel  # noqa: E402
from ndp_device.protocol import messages as msg  # noqa: E402
from ndp_device.replicas.checkpoint import CheckpointExperts  # noqa: E402
from ndp_device.replicas.store import ExpertStore  # noqa: E402
from ndp_device.timing.spec import load_hardware  # noqa: E402

KERNEL = NativeKernel()
FORMS = {"gpt_oss-mxfp4": 4, "mixtral-nvfp4": 4, "mixtral-awq": 4, "mixtral-fp8": 8, "mixtral-int8": 8}
"""And the bits of its codes."""
ROWS = np.arange(3, dtype=np.int32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


def stored(
    models: Path, name: str, *, codes: bool = True, replicas: Path | None = None, kernel: Any = KERNEL
) -> ExpertStore:
    return ExpertStore(quantized.make(name, models), replicas, kernel=kernel, codes=codes)


def outputs(store: ExpertStore, bits: int, layer: int = 1, expert: int = 2) -> NDArray[np.float32]:
    """The expert on each of three rows, by the store's kernel."""
    x = np.random.default_rng(3).standard_normal((len(ROWS), store.shape.hidden_size), np.float32)
    prepared = [store.get(layer, expert, bits)]
    return store._kernel.execute(x, prepared, ROWS, np.zeros_like(ROWS), np.ones(len(ROWS), np.float32))


@pytest.mark.parametrize(("name", "bits"), FORMS.items())
def test_an_expert_by_its_codes_is_the_one_that_they_stand_for(models: Path, name: str, bits: int) -> None:
    """Values of NVFP4 and FP8 were rounded to bfloat16 where they are given in full precision."""
    store = stored(models, name)
    assert (store.widths, store.replica_source) == ({bits, 16}, "as stored")
    full = outputs(store, 16)
    np.testing.assert_allclose(outputs(store, bits), full, rtol=0, atol=1e-2 * np.abs(full).max())
    codes = CheckpointExperts(quantized.make(name, models)).as_stored(1, 2)
    assert codes is not None
    assert store.expert_bytes(1, 2, bits) == codes.nbytes < store.expert_bytes(1, 2, 16) * (bits + 2) / 16


@pytest.mark.parametrize(("name", "bits"), FORMS.items())
def test_the_parts_of_an_expert_by_its_codes_add_up_to_it(models: Path, name: str, bits: int) -> None:
    whole = stored(models, name, kernel=REFERENCE)  # ours rounds what comes between the products by its largest values
    parts = [whole.of_part(Part(index, 3)) for index in range(3)]
    size = whole.expert_bytes(0, 0, bits)
    assert sum(part.expert_bytes(0, 0, bits) for part in parts) == pytest.approx(
        size, rel=0.06
    )  # biases, and scales of whole rows
    added, wanted = np.sum([outputs(part, bits) for part in parts], axis=0), outputs(whole, bits)
    np.testing.assert_allclose(added, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "mixtral-nvfp4"])
def test_a_part_whose_border_lies_within_what_the_kernel_reads_under_one_scale_is_refused(
    models: Path, name: str
) -> None:
    store = stored(models, name)
    count = store.shape.intermediate_size // 16
    with pytest.raises(ConfigError, match="with 32 to a scale cannot be cut"):
        store.of_part(Part(0, count))


def test_a_part_that_an_expert_as_stored_does_not_have_is_refused_and_leaves_the_device_as_it_was(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ with `desc_act`: its order of columns shows only in the expert itself. Afterwards no host could ask what the
    device is."""
    take = CheckpointExperts.codes

    def reordered(self: CheckpointExperts, *which: int) -> Any:
        expert: Any = take(self, *which)
        order = np.arange(expert.w2.shape[1], dtype=np.int32)[::-1].copy()
        return replace(expert, w2=replace(expert.w2, perm=order))

    monkeypatch.setattr(CheckpointExperts, "codes", reordered)
    caller = Caller(Handler(stored(models, "mixtral-awq"), KERNEL, None))
    before = caller.ask(msg.Describe)
    with pytest.raises(DeviceError, match=r"bad_request: .* an order of columns of its own cannot be cut"):
        caller.hello(part=(1, 3))
    after = caller.ask(msg.Describe)
    assert (after.resident_bytes, after.num_sessions) == (before.resident_bytes, 0)


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "mixtral-fp8"])
def test_all_of_them_are_prepared_ahead_within_what_the_device_says_to_hold(models: Path, name: str) -> None:
    store, bits = stored(models, name), FORMS[name]
    num_experts = store.shape.num_layers * store.shape.num_experts
    while store.prepare_ahead():
        pass
    assert store.prepared(bits).sum() == num_experts
    assert num_experts * store.expert_bytes(0, 0, bits) <= store.held_bytes == store.resident_bytes
    assert not store.prepared(16).any()


@pytest.mark.parametrize("ahead", [True, False])
def test_codes_are_read_once(models: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """They were read again for their size, within the first call that asked for the expert: 5 ms of one of Qwen3-30B's
    in GPTQ, of which a prompt asks for 128 in a layer."""
    store, read = stored(models, "mixtral-awq"), list[tuple[int, ...]]()
    take = CheckpointExperts.codes
    monkeypatch.setattr(CheckpointExperts, "codes", lambda self, *which: read.append(which) or take(self, *which))
    if ahead:
        assert store.resident_bytes > 0
        read.clear()
        while store.prepare_ahead():
            pass
    else:
        for expert in range(store.shape.num_experts):
            store.get(1, expert, 4)
    once = read.copy()
    assert len(once) == len(set(once)) > 0
    store.get_all(1, range(store.shape.num_experts), [4] * store.shape.num_experts)
    assert read == once


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "mixtral-fp8"])
def test_a_part_says_to_hold_its_share_alone_whoever_asked_the_whole_before(models: Path, name: str) -> None:
    whole = stored(models, name)
    size = whole.resident_bytes
    for index in range(3):
        assert whole.of_part(Part(index, 3)).resident_bytes == pytest.approx(size / 3, rel=0.1)


def test_each_layers_codes_are_given_back_to_the_pool_once_they_are_copied(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, given_back = stored(models, "mixtral-fp8"), []
    monkeypatch.setattr(CheckpointExperts, "release", lambda _: given_back.append(int(store.prepared(8).sum())))
    while store.prepare_ahead():
        pass
    assert len(given_back) == store.shape.num_layers


def test_a_checkpoint_that_changed_is_not_computed_from(models: Path, tmp_path: Path) -> None:
    model = shutil.copytree(quantized.make("mixtral-awq", models), tmp_path / "m")
    store = ExpertStore(model, None, kernel=KERNEL)
    for file in model.glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    with pytest.raises(ReplicaError, match="changed"):
        store.get(0, 0, 4)


def test_replicas_take_the_place_of_codes_which_may_be_declined(models: Path, tmp_path: Path) -> None:
    model = quantized.make("mixtral-awq", models)
    build_data_free(model, tmp_path / "r", bits=(2,), show_progress=False)
    fitted = stored(models, "mixtral-awq", replicas=tmp_path / "r")
    assert (fitted.widths, fitted.replica_source) == ({2, 16}, "data-free")
    assert fitted.expert(0, 0, 2).bits == 2
    declined = stored(models, "mixtral-awq", codes=False)
    assert (declined.widths, declined.replica_source, declined.resident_bytes) == ({16}, "none", 0)
    with pytest.raises(ReplicaError, match=r"cannot be had at 4 bits"):
        declined.get(0, 0, 4)


def test_its_simulated_time_is_that_of_the_bytes_as_stored(models: Path) -> None:
    store = stored(models, "gpt_oss-mxfp4")
    caller = Caller(Handler(store, KERNEL, load_hardware("h100-ndp512")))
    widths = {one.bits: one.expert_bytes for one in caller.handler._served.widths}
    assert widths == {4: store.expert_bytes(0, 0, 4), 16: store.expert_bytes(0, 0, 16)}
    assert caller.handler._served.group_size == 32
