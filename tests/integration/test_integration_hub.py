"""A model named by its id on a hub: fetched as vLLM fetches it, or refused in one sentence."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from engines import IN_PROCESS, MODEL, PROMPTS, last_json, run_program
from local_hub import local_hub

pytestmark = [pytest.mark.vllm, pytest.mark.programs]

ID = "lab/tiny-mixtral"
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
settings = {"hot_experts": 4, "cold_precision": "full"}
options = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], quantization="ndp", additional_config={"ndp": settings}, max_model_len=256, max_num_seqs=4,
          kv_cache_memory_bytes=16 << 20, enforce_eager=True, dtype="float32", **options)
outputs = llm.generate(json.loads(sys.argv[3]), SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
print(json.dumps({"tokens": [list(output.outputs[0].token_ids) for output in outputs]}))
"""


def serve(name: str, environment: dict[str, str], **options: object):
    """One engine in a process of its own, with the model by this name."""
    arguments = (sys.executable, "-c", PROGRAM, name, json.dumps(options), json.dumps(PROMPTS[:2]))
    return run_program(*arguments, **IN_PROCESS, **environment)


def test_an_id_is_fetched_once_and_serves_as_its_directory_does(tmp_path: Path):
    """First from the hub; then without it, from the cache alone."""
    shutil.copytree(MODEL, tmp_path / "hub" / ID)
    with local_hub(tmp_path / "hub", tmp_path / "cache") as hub:
        first = serve(ID, hub.environment)
        assert first.returncode == 0, first.stderr[-3000:]
        fetched = {
            request.rpartition("/")[2] for request in hub.seen if request.startswith("GET") and "resolve" in request
        }
        again = serve(ID, hub.environment | {"HF_HUB_OFFLINE": "1"})
    assert "model.safetensors" in fetched
    local = serve(str(MODEL), {})
    assert last_json(first.stdout) == last_json(again.stdout) == last_json(local.stdout)


@pytest.mark.parametrize("offline", ["0", "1"])
def test_an_id_that_is_nowhere_is_refused_in_one_sentence(offline: str, tmp_path: Path):
    """vLLM itself refuses it, before it asks us, while config.json cannot be had; with that and no weights we do."""
    (tmp_path / "hub" / ID).mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, tmp_path / "hub" / ID / name)
    with local_hub(tmp_path / "hub", tmp_path / "cache") as hub:
        if offline == "1":  # what an interrupted download leaves
            snapshot = "from huggingface_hub import snapshot_download; import sys; snapshot_download(sys.argv[1])"
            assert run_program(sys.executable, "-c", snapshot, ID, **hub.environment).returncode == 0
        done = serve(ID, hub.environment | {"HF_HUB_OFFLINE": offline})
    assert done.returncode != 0
    last = [line for line in done.stderr.splitlines() if "ConfigError" in line or "ReplicaError" in line]
    assert last, done.stderr[-3000:]
    assert "is one of .safetensors or .gguf" in last[-1] or "cannot be had from the hub" in last[-1]
