"""A device to attack: the program, and the server alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attacked_device import Device
from server_by_hand import HandServer, serving


@pytest.fixture
def device(model_dir: Path, tmp_path: Path) -> Iterator[Device]:
    with Device(model_dir, tmp_path) as device:
        yield device


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HandServer]:
    server = serving(tmp_path)
    yield server
    server.close()
