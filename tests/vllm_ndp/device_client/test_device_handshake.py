"""A device process that serves something else than its host plans with is refused, in one sentence with the fix."""

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from paths import MODEL, ROOT
from until import until

from ndp_device.calibration.build import build_data_free
from ndp_device.checkpoint.files import tensor_header
from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.checkpoint.values import NVFP4, StoredForm
from ndp_device.common import kept
from ndp_device.common.errors import ConfigError, DeviceUnavailable
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.experts.expert import Part
from ndp_device.replicas.format import MANIFEST, ReplicaFiles, layer_file_name
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import expert_bytes
from vllm_ndp.device_client.client import DeviceClient
from vllm_ndp.device_client.handshake import PlannedReplicas, Requirements
from vllm_ndp.device_client.process import DeviceProcess

REPLICAS = ROOT / "models" / "tiny-mixtral-replicas"
HARDWARE = load_hardware("h100-ndp512")

Spawn = Callable[..., DeviceProcess]


@pytest.fixture(scope="module")
def spawn() -> Iterator[Spawn]:
    """Devices of the bundled model that end with this module; each kind is started once."""
    devices: dict[tuple[Path | None, Path | None], DeviceProcess] = {}

    def start(replicas: Path | None, model: Path | None = MODEL) -> DeviceProcess:
        if (replicas, model) not in devices:
            devices[replicas, model] = DeviceProcess.spawn(model, replicas)
        return devices[replicas, model]

    yield start
    for device in devices.values():
        device.terminate()


@pytest.fixture(scope="module")
def two_widths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two-widths") / "r"
    build_data_free(MODEL, directory, bits=(2, 4), show_progress=False)
    return directory


@pytest.fixture(scope="module")
def recalibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As another calibration would leave it: one other code, and a manifest that vouches for it."""
    directory = Path(shutil.copytree(REPLICAS, tmp_path_factory.mktemp("recalibrated") / "r"))
    path = directory / layer_file_name(2)
    contents = bytearray(path.read_bytes())
    contents[position_of(path, "3.w13.planes")] ^= 1
    path.write_bytes(contents)
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["layers"]["2"]["blake2b"] = hashlib.blake2b(contents, digest_size=16).hexdigest()
    (directory / MANIFEST).write_bytes(kept.seal(manifest))
    return directory


def position_of(path: Path, tensor: str) -> int:
    header, start = tensor_header(path)
    return int(start + header[tensor]["data_offsets"][0])


def requirements(replicas: Path | None = REPLICAS, **changes: object) -> Requirements:
    planned = None if replicas is None else PlannedReplicas.of(replicas)
    shape = open_checkpoint(MODEL).shape
    return dataclasses.replace(Requirements(shape, HARDWARE, quantized=True, replicas=planned), **changes)  # type: ignore[arg-type]


def client_of(device: DeviceProcess, wanted: Requirements) -> DeviceClient:
    address = device.address
    return DeviceClient(address, accept=lambda welcome: wanted.check(address, welcome), shared_memory=False)


def refusal(device: DeviceProcess, wanted: Requirements) -> str:
    """The one sentence of a connection that must not come about."""
    client = client_of(device, wanted)
    with pytest.raises(ConfigError) as error:
        client.connect(30)
    assert client.state == "down"
    client.close()
    sentence = str(error.value)
    assert "\n" not in sentence
    assert 20 < len(sentence) < 500
    assert sentence.startswith(f"the device at {device.address} ")
    return sentence


def test_a_device_with_the_same_replicas_is_used_and_says_the_sizes_its_times_come_from(spawn: Spawn) -> None:
    client = client_of(spawn(REPLICAS), requirements())
    welcome = client.connect(30)
    client.close()
    served = requirements().check("here", welcome)
    shape = open_checkpoint(MODEL).shape
    assert (served.missing, served.first_missing) == (0, None)
    assert (served.container, served.format, served.group_size) == ("nested", "ndp-moe-replicas 1", 64)
    assert served.expert_bytes == {
        bits: expert_bytes(shape.hidden_size, shape.intermediate_size, bits, served.group_size)
        for bits in (1, 2, 3, 4, FULL_PRECISION_BITS)
    }


def test_a_device_without_replicas_is_refused_where_cold_experts_are_quantized(spawn: Spawn) -> None:
    sentence = refusal(spawn(None), requirements())
    assert "holds no replicas, which cold experts are computed from" in sentence
    assert sentence.endswith(f"start it with --replicas {REPLICAS}")
    client = client_of(spawn(None), requirements(None, quantized=False, full_precision=True))
    client.connect(30)
    client.close()


def test_a_device_with_replicas_or_full_precision_alone_is_refused_where_the_host_plans_with_the_checkpoints_codes(
    spawn: Spawn,
) -> None:
    wanted = requirements(None, stored=StoredForm("int4", 32))
    for device, serves in ((spawn(REPLICAS), "replicas "), (spawn(None), "full precision alone")):
        sentence = refusal(device, wanted)
        assert f"serves {serves}" in sentence
        assert "the checkpoint's own codes of 4 bits: start it with the checkpoint and without --replicas" in sentence


@pytest.mark.slow
@pytest.mark.parametrize("codes", [True, False])
def test_a_device_serves_a_checkpoints_codes_unless_it_is_told_not_to(tmp_path: Path, codes: bool) -> None:
    pytest.importorskip("torch")
    from make_quantized_models import make

    model = make("mixtral-awq", tmp_path)
    device = DeviceProcess.spawn(model, None, codes=codes)
    wanted = Requirements(open_checkpoint(model).shape, HARDWARE, quantized=True, stored=StoredForm("int4", 32))
    try:
        if not codes:
            assert "serves full precision alone, the host plans with the checkpoint's own" in refusal(device, wanted)
        client = client_of(device, wanted if codes else dataclasses.replace(wanted, quantized=False))
        served = wanted.check("here", client.connect(30)) if codes else client.connect(30).served
        assert served.expert_bytes.keys() == ({4, FULL_PRECISION_BITS} if codes else {FULL_PRECISION_BITS})
        client.close()
    finally:
        device.terminate()


def test_parts_are_cut_at_the_borders_of_the_checkpoints_own_scales() -> None:
    wanted = requirements(None, stored=NVFP4)
    wanted.check_part(Part(0, 8))  # 256 units, 32 of them under what the kernel reads as one
    with pytest.raises(ConfigError, match="experts of 256 units with 32 to a scale cannot be cut into 16"):
        wanted.check_part(Part(0, 16))


def test_a_device_without_checkpoint_is_refused_where_cold_experts_are_full(spawn: Spawn) -> None:
    sentence = refusal(spawn(REPLICAS, None), requirements(None, quantized=False, full_precision=True))
    assert "no checkpoint, needed for cold_precision 'full' or prefill 'split': start it with one" in sentence


def test_a_device_that_lacks_widths_is_refused_unless_the_host_plans_without_them(
    spawn: Spawn, two_widths: Path
) -> None:
    sentence = refusal(spawn(two_widths), requirements())
    assert f"in {REPLICAS}: use one replica directory for both" in sentence
    client = client_of(spawn(two_widths), requirements(two_widths))
    client.connect(30)
    client.close()


def test_another_calibration_of_the_same_model_is_refused_with_both_digests(spawn: Spawn, recalibrated: Path) -> None:
    ours, theirs = ReplicaFiles(REPLICAS).manifest.digest, ReplicaFiles(recalibrated).manifest.digest
    sentence = refusal(spawn(recalibrated), requirements())
    assert f"serves replicas {theirs:.12} (calibrated), the host plans with {ours:.12} in {REPLICAS}" in sentence
    assert "use one replica directory for both" in sentence


def test_a_host_without_replicas_is_told_which_the_device_serves(spawn: Spawn) -> None:
    sentence = refusal(spawn(REPLICAS), requirements(None))
    assert f"serves replicas {ReplicaFiles(REPLICAS).manifest.digest:.12} (calibrated)" in sentence
    assert sentence.endswith("set 'replicas' to the directory that the device was started with")


def test_a_damaged_loss_table_of_the_host_is_found(spawn: Spawn, tmp_path: Path) -> None:
    """The host reads manifest and loss table only, so nothing else would tell."""
    damaged = Path(shutil.copytree(REPLICAS, tmp_path / "damaged"))
    path = damaged / layer_file_name(1)
    contents = bytearray(path.read_bytes())
    contents[position_of(path, "loss")] ^= 1
    path.write_bytes(contents)
    sentence = refusal(spawn(REPLICAS), requirements(damaged))
    assert f"reads another loss table from its replicas than the host from {damaged}" in sentence


def test_another_shape_and_another_hardware_are_refused(spawn: Spawn) -> None:
    wider = dataclasses.replace(open_checkpoint(MODEL).shape, intermediate_size=512)
    assert "sizes [4, 8, 128, 256], this one has [4, 8, 128, 512]" in refusal(
        spawn(REPLICAS), requirements(shape=wider)
    )
    sentence = refusal(spawn(REPLICAS), requirements(hardware=load_hardware("h200-gen5")))
    assert "simulates h100-ndp512" in sentence
    assert "the settings ask for h200-gen5 with pe_mode bit_scalable" in sentence


def test_a_device_that_comes_back_with_other_replicas_is_not_used_until_the_right_ones_are_back(
    recalibrated: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The replica directory is a link that is set to another one between two starts."""
    link = tmp_path / "replicas"
    link.symlink_to(REPLICAS)
    device = DeviceProcess.spawn(MODEL, link)
    client = client_of(device, requirements())

    def restart(replicas: Path) -> None:
        link.unlink()
        link.symlink_to(replicas)
        device._process.kill()
        device._process.wait()
        until(device.respawn)
        device.wait_until_ready(60)

    def executes() -> bool:
        pair = (np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, 3, np.uint8), np.ones(1, np.float32))
        try:
            client.finish_execute(client.begin_execute(0, 0, 0, np.ones((1, 128), np.float32), *pair))
        except DeviceUnavailable:
            return False
        return True

    try:
        client.connect(30)
        client.install_plan(1, np.full((4, 8), 0b00100, np.uint8))
        client.activate_plan(1)
        assert executes()
        restart(recalibrated)
        until(lambda: not client.poll() and "the host plans with" in client.reason)
        for _ in range(20):
            assert not executes()
            assert "the host plans with" in client.reason
            time.sleep(0.02)
        assert client.state == "down"
        client._fail(ConfigError("it simulates other hardware"))  # each reason once
        assert [record.getMessage()[:50] for record in caplog.records if "is not used" in record.getMessage()] == [
            "the NDP device that answers now is not used: the d",
            "the NDP device that answers now is not used: it si",
        ]
        restart(REPLICAS)
        until(client.poll)
        assert executes()
    finally:
        client.close()
        device.terminate()


def test_a_device_that_knows_no_parts_is_refused_where_it_was_asked_for_one(spawn: Spawn) -> None:
    """An older one skips what it does not know in a Hello, and would serve whole experts."""
    client = client_of(spawn(REPLICAS), requirements())
    welcome = client.connect(30)
    client.close()
    with pytest.raises(
        ConfigError, match=r"the device at here serves whole experts, it was asked for part 2 of 4 of ever"
    ):
        requirements().check("here", welcome, Part(1, 4))


def test_experts_that_cannot_be_cut_are_refused_before_any_device_is_asked() -> None:
    requirements().check_part(Part(0, 4))
    with pytest.raises(ConfigError, match="experts of 256 units with 64 to a scale cannot be cut into 3 equal parts"):
        requirements().check_part(Part(0, 3))
