"""One small checkpoint and its data-free replicas for all tests that only read them."""

from pathlib import Path

import pytest
from small_checkpoint import write_small_checkpoint

from ndp_device.calibration.build import build_data_free
from ndp_device.common.widths import REPLICA_WIDTHS


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="session")
def replicas_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replicas") / "r"
    build_data_free(model_dir, directory, bits=REPLICA_WIDTHS, show_progress=False)
    return directory


@pytest.fixture(scope="session")
def built(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replicas of 1 to 4 bits in groups of 8."""
    out = tmp_path_factory.mktemp("replicas") / "small"
    build_data_free(model_dir, out, group_size=8, show_progress=False)
    return out
