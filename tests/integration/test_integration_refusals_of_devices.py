"""Devices that a host cannot use, through the real entries: one clear sentence, and nothing left running."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from engines import BIN, MODEL, PROMPTS, REPLICAS, engine, greedy, run_program, sentence

from ndp_device.calibration.build import build_data_free
from ndp_device.common.errors import ConfigError, DeviceError, DeviceUnavailable
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport.base import write_checksum
from vllm_ndp.device_client.process import DeviceProcess

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_device_is_left_behind")]


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceProcess]:
    process = DeviceProcess.spawn(MODEL, None, kernel="reference")
    yield process
    process.terminate()


def test_a_device_with_other_hardware_than_asked_is_refused(device: DeviceProcess):
    settings = {
        "cold_precision": "full",
        "devices": device.address,
        "hardware_overrides": {"array.pe_mode": "fp16_dequant"},
    }
    with pytest.raises(ConfigError) as error, engine(settings=settings):
        pass
    assert f"the device at {device.address} simulates" in sentence(error)
    assert "pe_mode fp16_dequant" in sentence(error)


def test_a_device_with_another_model_is_refused(device: DeviceProcess, tmp_path: Path):
    changed = Path(shutil.copytree(MODEL, tmp_path / "changed", ignore=shutil.ignore_patterns("eval", "traces")))
    contents = bytearray((changed / "model.safetensors").read_bytes())
    contents[-1] ^= 1
    (changed / "model.safetensors").write_bytes(contents)
    with (
        pytest.raises(DeviceError) as error,
        engine(changed, settings={"cold_precision": "full", "devices": device.address}),
    ):
        pass
    assert error.value.code == "digest"
    assert "start the device with the same checkpoint" in sentence(error)


def test_a_device_without_replicas_is_refused_where_cold_experts_are_quantized(device: DeviceProcess):
    with pytest.raises(ConfigError) as error, engine(settings={"devices": device.address, "replicas": str(REPLICAS)}):
        pass
    assert f"the device at {device.address} holds no replicas" in sentence(error)
    assert f"start it with --replicas {REPLICAS}" in sentence(error)


def test_a_host_never_plans_with_replicas_it_made_itself_beside_a_device_that_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another calibration is refused, and so is no `replicas` setting at all; neither builds anything in the cache."""
    device = DeviceProcess.spawn(MODEL, REPLICAS, kernel="reference")
    try:
        monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path / "cache"))
        with pytest.raises(ConfigError) as error, engine(settings={"devices": device.address}):
            pass
        assert "and this host has none to plan with: set 'replicas' to the directory" in sentence(error)
        assert not (tmp_path / "cache").exists()
        build_data_free(MODEL, tmp_path / "others", show_progress=False)
        settings = {"devices": device.address, "replicas": str(tmp_path / "others")}
        with pytest.raises(ConfigError) as error, engine(settings=settings):
            pass
        assert "(calibrated), the host plans with" in sentence(error)
        with engine(settings={"devices": device.address, "replicas": str(REPLICAS)}) as llm:
            assert greedy(llm, PROMPTS[:1], 2)
    finally:
        device.terminate()


def test_a_second_device_on_the_same_address_is_refused(device: DeviceProcess):
    second = run_program(BIN / "ndp-device", "serve", MODEL, "--address", device.address)
    assert second.returncode == 2
    assert f"a device with pid {device.pid} already listens" in second.stderr
    assert "Traceback" not in second.stderr
    assert device.poll() is None


def test_a_tcp_address_in_use_is_refused():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        second = run_program(
            BIN / "ndp-device", "serve", "--insecure-loopback", "--address", f"tcp://127.0.0.1:{port}", MODEL
        )
    assert second.returncode == 2
    assert "another process listens there; choose another address" in second.stderr


@contextmanager
def foreign_device(major: int) -> Iterator[str]:
    """A real socket that answers every Hello with a Welcome of protocol `major`.0, sealed as that version would."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, tempfile.TemporaryDirectory() as folder:
        router.linger = 0
        router.bind(f"ipc://{folder}/device")
        stop = threading.Event()

        def answer() -> None:
            while not stop.is_set():
                if router.poll(50):
                    client, header, _ = router.recv_multipart()
                    router.send_multipart([client, *welcome(msgspec.msgpack.decode(header)["id"])])

        def welcome(request_id: int) -> tuple[bytes, bytes]:
            reply = msg.Welcome(
                request_id,
                ndp=major << 8,
                incarnation="f" * 32,
                version=major << 8,
                model_digest="",
                replicas="none",
                hardware="h100-ndp512",
                config_hash="0" * 16,
                num_layers=4,
                num_experts=8,
                hidden_size=128,
                served=msg.Served(4, 8, 128, 256, (), 1, "", "", "", "", 0),
            )
            header, body = codec.encode(reply)
            return write_checksum(header, body), bytes(body)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"ipc://{folder}/device"
        finally:
            stop.set()
            thread.join()


def test_a_device_of_another_protocol_version_is_refused_with_both_versions():
    with (
        foreign_device(msg.MAJOR + 1) as address,
        pytest.raises(codec.VersionMismatch) as error,
        engine(settings={"cold_precision": "full", "devices": address}),
    ):
        pass
    assert f"the device at {address} cannot be used" in sentence(error)
    assert f"this side speaks protocol {msg.MAJOR}.x" in sentence(error)
    assert f"the peer {msg.MAJOR + 1}.0" in sentence(error)


def test_an_address_where_nobody_listens_is_named(tmp_path: Path):
    address = f"ipc://{tmp_path / 'nobody'}"
    with (
        pytest.raises(DeviceUnavailable, match=r"no device answered at .* is it running") as error,
        engine(settings={"cold_precision": "full", "devices": address}),
    ):
        pass
    assert address in sentence(error)


# -- as a program --------------------------------------------------------------------------------------------------
