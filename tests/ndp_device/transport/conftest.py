"""A device to attack: the program, and the server alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attacked_device import Device

from ndp_device.transport.zmq_server import ZmqServer


@pytest.fixture
def device(model_dir: Path, tmp_path: Path) -> Iterator[Device]:
    device = Device(model_dir, tmp_path)
    try:
        yield device
    finally:
        device.process.kill()
        device.process.communicate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ZmqServer]:
    server = ZmqServer(f"ipc://{tmp_path}/private/device")
    yield server
    server.close()
