"""CUDA builds of vLLM with the plugin, on a machine without a GPU: as far as the first CUDA call, and no sentence less.

Needs a Python with CUDA's torch and this project's wheel, and folders with vLLM's CUDA wheels (docs/gpu.md says how):
`NDP_CUDA_PYTHON=.../bin/python NDP_CUDA_VLLM=FOLDER:FOLDER`. The driver is a stub (cuda_stubs/), and so is NVML, which
tells vLLM of one Hopper GPU; the first call that wants one fails with torch's own words.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from engines import MODEL, PATIENCE_S

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
from vllm import EngineArgs, LLM
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
if hasattr(EngineArgs, "enable_trace_replay"):
    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    traced = ["vllm_ndp.integration.serving.traced_tokens:TracedTokens"]
    forcing = EngineArgs(**base, additional_config=settings, logits_processors=traced, enable_trace_replay=True)
    admits = InputProcessor(forcing.create_engine_config())
    asked = SamplingParams(max_tokens=5, extra_args={"ndp_forced_tokens": [7, 8]})
    request = admits.process_inputs("one", {"type": "token", "prompt_token_ids": [1, 5]}, asked, ("generate",))
    print("forced", request.sampling_params.trace_decode_token_ids, request.sampling_params.max_tokens)
import vllm_ndp.integration.worker as worker
print("base", worker._Base.__module__)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
try:
    LLM(**base, additional_config=settings, enforce_eager=True)
except Exception as error:
    print("stopped", type(error).__name__, str(error).replace("\\n", " "))
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    for source, library in (("driver.c", "libcuda.so.1"), ("nvml.c", "libnvidia-ml.so.1")):
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", folder / library, STUBS / source], check=True)
    return folder


@pytest.fixture(scope="module", params=SITES, ids=lambda site: site.name)
def lines(request: pytest.FixtureRequest, stubs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    site: Path = request.param
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(stubs),
        "PYTHONPATH": str(site),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "NDP_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    }
    folder = tmp_path_factory.mktemp("elsewhere")  # the wheel is meant, not this checkout
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM, str(MODEL)],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


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


def test_the_engine_stops_at_the_first_call_that_wants_a_gpu(lines: list[str]) -> None:
    assert any(words in value(lines, "stopped") for words in ("CUDA", "0 devices"))


def test_the_model_runner_is_the_one_that_the_docs_name(lines: list[str]) -> None:
    assert value(lines, "runner V2") == str(value(lines, "version") >= "0.27")


def test_forced_tokens_travel_in_vllms_own_trace_replay(lines: list[str]) -> None:
    if not any(line.startswith("forced ") for line in lines):
        pytest.skip("this vLLM has no trace replay")
    assert value(lines, "forced") == "[7, 8] 2"
