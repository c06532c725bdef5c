"""Which cores vLLM's threads and an embedded device get on CPU."""

import os

import pytest

from vllm_ndp.config import NdpSettings
from vllm_ndp.integration import compat

pytestmark = pytest.mark.vllm

BINDING = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES")
OURS_TO_SET = ("VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*BINDING, *OURS_TO_SET):
        monkeypatch.setenv(name, "")  # so that it is put back whatever a test makes of it
        monkeypatch.delenv(name)
    everything = {4, 5, 6, 7}
    parent = os.getppid()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: everything if pid == parent else {4})


@pytest.mark.parametrize(
    ("variable", "value", "cores"),
    [
        ("GOMP_CPU_AFFINITY", "4 5 6 7", [4, 5, 6, 7]),
        ("GOMP_CPU_AFFINITY", "4 5 6", [7]),
        ("OMP_PLACES", "{4,5}", [6, 7]),
        ("KMP_AFFINITY", "granularity=fine,explicit,proclist=[4,5,6,7]", [4, 5, 6, 7]),
    ],
)
def test_a_device_gets_the_cores_that_are_left_or_all(
    variable: str, value: str, cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert compat.device_cores(compat.bound_cores()) == cores


def test_threads_that_are_not_bound_leave_the_device_free_too() -> None:
    assert compat.device_cores(compat.bound_cores()) == []


def test_the_engine_takes_every_core_beside_an_embedded_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "on_cpu", lambda: True)
    compat.share_cores_with_the_device(NdpSettings.from_mapping({"devices": "ipc:///tmp/elsewhere"}))
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU" not in os.environ
    compat.share_cores_with_the_device(NdpSettings())
    assert os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"


@pytest.mark.parametrize("name", OURS_TO_SET)
def test_vllms_own_variables_win(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "on_cpu", lambda: True)
    monkeypatch.setenv(name, "1")
    compat.share_cores_with_the_device(NdpSettings())
    assert [os.environ.get(other) for other in OURS_TO_SET if other != name] == [None]
    assert os.environ[name] == "1"
