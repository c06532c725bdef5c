"""One small checkpoint and its data-free replicas for every test that only reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_checkpoint import write_small_checkpoint

from ndp_device.calibration.build import build_data_free


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="session")
def replicas_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replicas") / "r"
    build_data_free(model_dir, directory, show_progress=False)
    return directory
