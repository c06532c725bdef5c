r"""CUDA builds of vLLM with the plugin, on a machine without a GPU, from the configuration to the end of the engine.

CUDA is a runtime that computes nothing (cuda_stubs/), and NVML tells vLLM of one Hopper GPU. So tokens and times mean
nothing, and all else is real. Needs a Python with CUDA's torch and this project's wheel for it (`make wheel`), and
folders with vLLM's CUDA wheels, 6 GB in all:

    python3.12 -m venv cuda && cuda/bin/pip install torch==2.11.0 triton==3.6.0 transformers==5.17.0 dist/vllm_ndp-*.whl
    pip download --no-deps vllm==0.33.0 -d wheels
    cuda/bin/pip install --no-deps --target vllm-0.33.0 wheels/vllm-0.33.0-*.whl
    cuda/bin/pip install --no-deps torchvision==0.26.0
    cuda/bin/pip install psutil aiohttp requests cloudpickle uvloop py-cpuinfo einops tiktoken gguf mistral_common \
        pycountry  # and `deps` of benchmarks/gpu_kit/build.sh, with that version's `own`
    NDP_CUDA_PYTHON=$PWD/cuda/bin/python NDP_CUDA_VLLM=$PWD/vllm-0.33.0 pytest -m slow THIS_FILE
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engines import MODEL, PATIENCE_S

from vllm_ndp.config import GPU_RUNGS as RUNGS

PYTHON = os.environ.get("NDP_CUDA_PYTHON", "")
SITES = [Path(site) for site in os.environ.get("NDP_CUDA_VLLM", "").split(":") if site]
STUBS = Path(__file__).parent / "cuda_stubs"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PYTHON and SITES), reason="no CUDA build of vLLM in NDP_CUDA_PYTHON and NDP_CUDA_VLLM"),
]

PROGRAM = """
import os, sys
from triton.backends import backends

backends["nvidia"].driver.is_active = staticmethod(lambda: True)  # as on a GPU; else vLLM leaves Triton out
from vllm import EngineArgs
from vllm.platforms import current_platform
import vllm

assert current_platform.is_cuda(), current_platform
print("version", vllm.__version__)
base = dict(model=sys.argv[1], quantization="ndp", max_model_len=128)
settings = {"ndp": {"hot_experts": 4, "cold_precision": "full"}}

def refused(what, **options):
    try:
        EngineArgs(**base, additional_config=settings, **options).create_engine_config()
    except Exception as error:
        print("refused", what, str(error).replace("\\n", " "))
    else:
        print("accepted", what)

refused("offload", cpu_offload_gb=1)
refused("full graphs", compilation_config={"cudagraph_mode": "FULL"})
for mode in ("PIECEWISE", None):
    compilation = {"cudagraph_mode": mode} if mode else {}
    config = EngineArgs(**base, additional_config=settings, compilation_config=compilation).create_engine_config()
    found = config.compilation_config
    print("graphs", mode, found.cudagraph_mode.name, "vllm::moe_forward" in found.splitting_ops)
    print("worker", config.parallel_config.worker_cls, config.kv_transfer_config.kv_connector)
print("runner V2", config.use_v2_model_runner)
import vllm_ndp.integration.worker as worker
print("base", worker._Base.__module__)
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    torch = Path(said(PYTHON, "-c", "import torch; print(torch.__file__)").split()[-1]).parent
    headers = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    if not (headers / "cuda_runtime_api.h").exists():
        pytest.skip(f"no headers of CUDA in {headers}: name its folder in CUDA_HOME")
    (folder / "rest.c").write_text(
        rest_of_cuda(headers / "cuda.h", [*torch.glob("lib/*.so"), *SITES[0].glob("vllm/*.so")])
    )
    driver, build = folder / "libcuda.so.1", ["-shared", "-fPIC", "-w", "-O1", "-o"]
    said("cc", "-c", "-fPIC", "-w", "-o", folder / "rest.o", folder / "rest.c")
    said(
        "c++",
        "-std=c++17",
        f"-I{headers}",
        *build,
        driver,
        STUBS / "runtime.cpp",
        folder / "rest.o",
        "-lpthread",
        "-ldl",
    )
    said("cc", *build, folder / "libnvidia-ml.so.1", STUBS / "nvml.c")
    return folder


def said(*words: Any) -> str:
    return subprocess.run(list(map(str, words)), check=True, stdout=subprocess.PIPE, text=True).stdout


def rest_of_cuda(header: Path, libraries: list[Path]) -> str:
    """Functions that give 0, and where they make something a pointer to memory: what the driver has and libraries want,
    but for what runtime.cpp has."""
    header_text = header.read_text()
    names = {*re.findall(r"CUDAAPI (cu[A-Z]\w+)\(", header_text)}
    names |= {*re.findall(r"#define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+_v\d+(?:_pts?z|_ptds)?)", header_text)}
    for library in libraries:
        wanted = re.findall(r" U (\w+)", said("nm", "-D", "--undefined-only", library))
        names |= {
            name
            for name in wanted
            if re.match(r"cu[A-Z]|cuda|cublas|cudnn|nccl|cufft|curand|cus|nvrtc|__cuda|nvsh", name)
        }
    names -= {*re.findall(r"^API .*?(\w+)\(", (STUBS / "runtime.cpp").read_text(), re.MULTILINE)}
    lines = ["#include <stdint.h>", "static char memory[4096];"]
    for name in sorted(names):
        makes = re.search("create|init", name.removeprefix("cuInit"), re.IGNORECASE)
        body = "if ((uintptr_t)into > 4096) *into = memory; " if makes else ""
        lines.append(f"int {name}(void **into) {{ {body}return 0; }}")
    return "\n".join(lines)


@pytest.fixture(scope="module", params=SITES, ids=lambda site: site.name)
def lines(request: pytest.FixtureRequest, stubs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    site: Path = request.param
    environment = around(stubs, site, tmp_path_factory)
    folder = tmp_path_factory.mktemp("elsewhere")  # the wheel is meant, not this checkout
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM, str(MODEL)],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def around(stubs: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return os.environ | {
        "LD_LIBRARY_PATH": str(stubs),
        "LD_PRELOAD": str(stubs / "libcuda.so.1"),
        "PYTHONPATH": str(site),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "NDP_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    }


def value(lines: list[str], key: str) -> str:
    """What the program printed after `key`, the only line of it."""
    (found,) = [line for line in lines if line.startswith(f"{key} ")]
    return found.removeprefix(f"{key} ")


def test_the_gpu_worker_is_the_base_of_ours(lines: list[str]) -> None:
    assert value(lines, "base") == "vllm.v1.worker.gpu_worker"
    workers = [line for line in lines if line.startswith("worker ")]
    assert workers == ["worker vllm_ndp.integration.worker.NdpWorker NdpConnector"] * 2


def test_graphs_are_split_where_pieces_were_asked_for_and_off_else(lines: list[str]) -> None:
    assert value(lines, "graphs PIECEWISE") == "PIECEWISE True"
    assert value(lines, "graphs None") == "NONE False"


def test_what_cannot_work_is_refused_with_its_switch(lines: list[str]) -> None:
    assert "--cpu-offload-gb" in value(lines, "refused offload")
    assert "cudagraph_mode" in value(lines, "refused full graphs")


def test_the_model_runner_is_the_one_that_the_docs_name(lines: list[str]) -> None:
    assert value(lines, "runner V2") == str(value(lines, "version") >= "0.27")


IN_ONE = ("one graph", "one graph, all hot", "one graph, the device is killed")


@pytest.fixture(scope="module", params=SITES, ids=lambda site: site.name)
def served(request: pytest.FixtureRequest, stubs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each engine came to, by its way; they follow each other in one process."""
    environment = around(stubs, request.param, tmp_path_factory) | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    program = Path(__file__).with_name("serves_without_gpu.py")
    done = subprocess.run(
        [PYTHON, str(program), "stock", *RUNGS, *IN_ONE],
        env=environment, cwd=tmp_path_factory.mktemp("elsewhere"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]
    return {row["way"]: row for row in rows}


@pytest.mark.parametrize("way", ["stock", *RUNGS, *IN_ONE[:2]])
def test_an_engine_serves_and_ends_whatever_its_rung(served: dict[str, Any], way: str) -> None:
    row = served[way]
    assert row["tokens"] == [12] * 4
    decode_steps, layers = 11, 4
    assert row["replays"] == {"graphs": 10 * layers}.get(way, decode_steps if way in IN_ONE else 0)  # it captures first
    if way != "stock":
        assert row["row_checks"] == row["steps"] == 12
        assert row["sidecar_mismatches"] == 0
        assert (row["cold_pairs"] > 0) == (way != "one graph, all hot")
        assert row["own"] > 0 or way in ("plain", "streams", "asynchronous")


def test_every_layer_of_a_step_as_one_graph_asks_and_is_answered(served: dict[str, Any]) -> None:
    assert served["one graph"]["fallback_pairs"] == 0
    assert served["one graph"]["cold_pairs"] > 100


def test_a_device_that_dies_while_a_graph_waits_for_it_costs_no_token(served: dict[str, Any]) -> None:
    row = served["one graph, the device is killed"]
    assert row["tokens"] == [240] * 4
    assert row["fallback_pairs"] > 0
