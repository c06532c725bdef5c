"""Checkpoints by way of a hub: huggingface_hub's own client, and a directory that stands for one."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_hub import Hub, local_hub
from paths import ROOT

BIN = Path(sys.executable).parent
MODEL, REPLICAS = ROOT / "models" / "tiny-mixtral", ROOT / "models" / "tiny-mixtral-replicas"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with local_hub(tmp_path / "hub", tmp_path / "cache") as hub:
        yield hub


def run(hub: Hub, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """`vllm-ndp` as a user of that hub has it."""
    return subprocess.run(
        [str(BIN / "vllm-ndp"), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | hub.environment | {"NDP_CACHE_DIR": str(hub.root.parent / "ours")} | env,
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("quantize", "lab/nothing", "--out", "x"), "the checkpoint lab/nothing cannot be had from the hub"),
        (("plan", "lab/nothing"), "its config.json cannot be had from the hub"),
    ],
)
def test_what_is_not_there_is_one_sentence(words: tuple[str, ...], says: str, hub: Hub) -> None:
    done = run(hub, *words)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert says in done.stderr


def test_a_model_of_the_hub_is_planned_and_quantized_by_its_id(hub: Hub, tmp_path: Path) -> None:
    (hub.root / "lab").mkdir(parents=True)
    shutil.copytree(MODEL, hub.root / "lab" / "tiny", ignore=shutil.ignore_patterns("eval", "traces", "licences"))
    planned = run(hub, "plan", "lab/tiny", "--host-memory", "8GB", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["serve"].startswith("vllm serve lab/tiny --quantization ndp")
    assert not any("safetensors" in request for request in hub.seen)
    out = tmp_path / "replicas"
    done = run(hub, "quantize", "lab/tiny", "--out", out, "--bits", "1,2")
    assert done.returncode == 0, done.stderr
    pulled = json.loads((out / "manifest.json").read_text())
    assert pulled["model_digest"] == json.loads((REPLICAS / "manifest.json").read_text())["model_digest"]


@pytest.mark.parametrize("indexed", [False, True])
def test_of_a_model_only_the_checkpoint_is_fetched(hub: Hub, tmp_path: Path, indexed: bool) -> None:
    repo = hub.root / "lab" / "tiny"
    repo.mkdir(parents=True)
    own = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in own:
        shutil.copy(MODEL / name, repo)
    weights = "part-1.safetensors" if indexed else "model.safetensors"
    shutil.copy(MODEL / "model.safetensors", repo / weights)
    if indexed:
        own.append("model.safetensors.index.json")
        (repo / own[-1]).write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": weights}}))
    for copy in (
        *("original/config.json", "original/model-00001-of-00002.safetensors", "original/model.safetensors.index.json"),
        *("checkpoint-500/model.safetensors", "checkpoint-500/optimizer.safetensors", "onnx/model.onnx"),
        *("consolidated.safetensors", "adapter_model.safetensors", "model.fp16.safetensors", "metal/model.bin"),
    ):
        (repo / copy).parent.mkdir(exist_ok=True)
        (repo / copy).write_bytes(b"a second copy")
    done = run(hub, "quantize", "lab/tiny", "--out", tmp_path / "replicas", "--bits", "1")
    assert done.returncode == 0, done.stderr
    fetched = {request.split("/resolve/")[1].split("/", 1)[1] for request in hub.seen if "/resolve/" in request}
    assert fetched == {*own, weights}
    seen = len(hub.seen)
    again = run(hub, "quantize", "lab/tiny", "--out", tmp_path / "again", "--bits", "1", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert len(hub.seen) == seen
