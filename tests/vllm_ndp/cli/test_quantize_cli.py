"""`vllm-ndp quantize` as a person runs it: what it prints, and the ways to get it wrong."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from in_this_process import run_here
from paths import MODEL

from ndp_device.calibration import build
from ndp_device.common.errors import ConfigError
from ndp_device.replicas.format import ReplicaFiles


def run_quantize(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_here("vllm-ndp", "quantize", *arguments)


def test_a_person_gets_a_table_and_a_program_one_object(tmp_path: Path) -> None:
    shown = run_quantize(MODEL, "--out", tmp_path / "out", "--bits", "1,2")
    assert shown.returncode == 0, shown.stderr
    assert [re.sub(r"\D", "", line)[:1] for line in shown.stdout.splitlines() if "%" in line] == ["1", "2"]
    done = run_quantize(MODEL, "--out", tmp_path / "out", "--bits", "1,2", "--json")
    assert ["nothing to do" in one.stderr for one in (shown, done)] == [False, True]
    summary = json.loads(done.stdout)
    assert f"{100 * summary['relative_loss']['1']:.2f} %" in shown.stdout
    assert summary["experts"] == 32
    assert summary["seconds"] > 0
    assert 0 < summary["relative_loss"]["2"] < summary["relative_loss"]["1"] < 1
    assert set(summary["relative_loss"]) == {"1", "2"}
    assert summary["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert ReplicaFiles(tmp_path / "out").manifest.source == "data-free"


@pytest.mark.slow
def test_a_text_too_short_says_how_many_tokens_are_needed(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    done = run_quantize(MODEL, "--out", tmp_path / "out", "--calibration", tmp_path / "short.txt")
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "short.txt has 3 tokens and 8 sequences of 32, the least, need 256: give a longer text"
    )


@pytest.mark.slow
def test_a_text_that_is_shorter_than_asked_gives_the_sequences_it_has(tmp_path: Path) -> None:
    """Nine kilobytes do not fill eight sequences of 512."""
    words = (MODEL / "calibration.txt").read_text()[:9000]
    (tmp_path / "short.txt").write_text(words)
    out = tmp_path / "out"
    done = run_quantize(MODEL, "--out", out, "--calibration", tmp_path / "short.txt")
    assert done.returncode == 0, done.stderr
    said = re.search(r"(\d+) tokens: 8 sequences of (\d+), not 128 of 512", done.stderr)
    assert said is not None
    assert int(said[2]) == int(said[1]) // 8 < 512
    assert ReplicaFiles(out).manifest.calibration["sequence_length"] == int(said[2])
    assert done.stderr.splitlines()[-1] == (
        f"vllm-ndp: serve it with: vllm serve {MODEL} --quantization ndp --additional-config.ndp.replicas {out}"
    )
    again = run_quantize(MODEL, "--out", out, "--calibration", tmp_path / "short.txt")
    assert f"vllm-ndp: nothing to do: {out} holds these replicas" in again.stderr


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--bits 1,3 --group-size 64", {"bits": (1, 3), "group_size": 64}),
        (
            "--calibration {text} --bits 2,4 --group-size 32 --solver independent --samples 16 --sequence-length 40 "
            "--seed 5 --shrink 0.25 --effort best --device cpu --memory 6.5",
            {"bits": (2, 4), "group_size": 32, "solver": "independent", "num_sequences": 16, "sequence_length": 40}
            | {"seed": 5, "shrink": 0.25, "effort": "best", "device_name": "cpu", "memory_bytes": 6_500_000_000},
        ),
    ],
)
def test_every_option_reaches_the_builder_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, asked: dict[str, Any]
) -> None:
    told: dict[str, Any] = {}

    def built(*_: Path, **given: Any) -> None:
        told.update(given)
        raise ConfigError("as the test wants it")

    for name in ("build_data_free", "build_calibrated"):
        monkeypatch.setattr(build, name, built)
    done = run_quantize(MODEL, "--out", tmp_path / "out", *words.format(text=MODEL / "calibration.txt").split())
    assert (told, done.returncode) == (asked, 2)


@pytest.mark.parametrize("words", ["--solver independent", "--shrink 0.1", "--effort fast", "--memory 0.5"])
def test_what_is_about_a_text_is_refused_without_one(tmp_path: Path, words: str) -> None:
    done = run_quantize(MODEL, "--out", tmp_path / "out", *words.split())
    assert (done.returncode, "add --calibration FILE" in done.stderr) == (2, True)
    assert words.split()[0] in done.stderr


def test_the_loss_that_is_printed_is_of_its_own_width(tmp_path: Path) -> None:
    """8 bits stand in the fifth place."""
    done = run_quantize(MODEL, "--out", tmp_path / "out", "--bits", "4,8", "--json")
    lost = json.loads(done.stdout)["relative_loss"]
    assert 0 < lost["8"] < lost["4"] / 5
