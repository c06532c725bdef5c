"""Replica sets and checkpoints by way of a hub: huggingface_hub's own client, and a directory that stands for one."""

from __future__ import annotations

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
REPO = "lab/tiny-mixtral-replicas"


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


def pushed(hub: Hub, tmp_path: Path) -> Path:
    """A copy of the bundled replicas that went to the hub."""
    directory = tmp_path / "mine"
    shutil.copytree(REPLICAS, directory)
    done = run(hub, "push", directory, REPO, "--license", "apache-2.0", "--base-model", "lab/tiny-mixtral")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["repo"] == REPO
    return directory


def test_what_is_pushed_is_pulled_to_the_byte_and_serves_its_model(hub: Hub, tmp_path: Path) -> None:
    directory, out = pushed(hub, tmp_path), tmp_path / "pulled"
    done = run(hub, "pull", REPO, "--out", out, "--model", MODEL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["replicas"] == str(out)
    assert result["bits"] == [1, 2, 3, 4]
    for path in REPLICAS.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in directory.iterdir()} == {path.name for path in REPLICAS.iterdir()}, "as it was"
    again = run(hub, "pull", REPO, "--out", out)
    assert again.returncode == 0, again.stderr
    verified = subprocess.run([BIN / "ndp-device", "verify", "--replicas", out], capture_output=True, text=True)
    assert json.loads(verified.stdout)["ok"] is True


def test_the_card_says_digests_losses_and_licence(hub: Hub, tmp_path: Path) -> None:
    pushed(hub, tmp_path)
    text = (hub.root / REPO / "README.md").read_text()
    manifest = json.loads((REPLICAS / "manifest.json").read_text())
    assert text.startswith("---\nlicense: apache-2.0\n")
    assert "base_model: lab/tiny-mixtral\n" in text
    assert manifest["model_digest"] in text
    assert manifest["calibration"]["blake2b"] in text
    rows = [line.split("|") for line in text.splitlines() if line[:3] in ("| 1", "| 2", "| 3", "| 4")]
    means = [float(row[2]) for row in rows]
    assert len(means) == 4
    assert means == sorted(means, reverse=True)


def test_a_second_pull_asks_only_whether_anything_is_new(hub: Hub, tmp_path: Path) -> None:
    """Into the cache: files that are there are not fetched again."""
    pushed(hub, tmp_path)
    first = run(hub, "pull", REPO)
    assert first.returncode == 0, first.stderr
    before = len(hub.seen)
    second = run(hub, "pull", REPO)
    assert first.stdout == second.stdout
    assert not [request for request in hub.seen[before:] if request.startswith("GET") and "/resolve/" in request]
    offline = run(hub, "pull", REPO, HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout


def test_a_byte_that_differs_is_found_before_it_is_served(hub: Hub, tmp_path: Path) -> None:
    pushed(hub, tmp_path)
    path = hub.root / REPO / "experts-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    done = run(hub, "pull", REPO, "--out", tmp_path / "pulled")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "experts-00002.safetensors" in done.stderr


def test_damaged_replicas_are_not_pushed(hub: Hub, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    shutil.copytree(REPLICAS, directory)
    (directory / "experts-00001.safetensors").unlink()
    done = run(hub, "push", directory, REPO, "--license", "mit")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert hub.seen == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("pull", "lab/nothing"), "the replica set lab/nothing cannot be had from the hub"),
        (("pull", "nothing"), "a repository of the hub is named ORGANISATION/NAME"),
        (("push", str(REPLICAS), REPO), "Missing option '--license'"),
        (("quantize", "lab/nothing", "--out", "x"), "the checkpoint lab/nothing cannot be had from the hub"),
        (("plan", "lab/nothing"), "its config.json cannot be had from the hub"),
    ],
)
def test_what_is_not_there_is_one_sentence(words: tuple[str, ...], says: str, hub: Hub) -> None:
    done = run(hub, *words)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert says in done.stderr


def test_a_repository_without_replicas_is_refused(hub: Hub, tmp_path: Path) -> None:
    (hub.root / "lab" / "other").mkdir(parents=True)
    (hub.root / "lab" / "other" / "README.md").write_text("nothing")
    done = run(hub, "pull", "lab/other", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "lab/other has no manifest.json" in done.stderr


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
