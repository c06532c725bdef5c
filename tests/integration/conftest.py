"""The environment of every engine test, set before vLLM is imported; replicas are cached in a directory of the session.

Helpers to import are in engines.py, and in served_model.py for servers.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import IN_PROCESS, MODEL, device_processes

from vllm_ndp.device_client.process import DeviceProcess

pytest.register_assert_rewrite("served_model", "scraping")  # what they assert is shown as in tests
os.environ |= IN_PROCESS | {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",  # barriers of several threads cost 50 times the work on a shared machine
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where data-free replicas are built, once per session, away from the user's own cache."""
    directory = tmp_path_factory.mktemp("ndp-cache")
    os.environ["NDP_CACHE_DIR"] = str(directory)
    return directory


@pytest.fixture
def no_device_is_left_behind() -> Iterator[None]:
    before = {process.pid for process in device_processes()}
    yield
    gc.collect()
    assert not [process for process in device_processes() if process.pid not in before]


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceProcess]:
    """Of the bundled model in full precision."""
    process = DeviceProcess.spawn(MODEL, None)
    yield process
    process.terminate()
