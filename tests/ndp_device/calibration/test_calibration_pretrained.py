"""Configuration and tokenizer by transformers: its own only, and one sentence where that cannot be."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from ndp_device.calibration.build import build_calibrated
from ndp_device.calibration.text import load_config, load_tokenizer
from ndp_device.common.errors import ConfigError

MODEL = ROOT / "models" / "tiny-mixtral"
OWN_CODE = {
    "config.json": {
        "model_type": "foomoe",
        "architectures": ["FooForCausalLM"],
        "auto_map": {"AutoConfig": "own.FooConfig", "AutoModelForCausalLM": "own.FooForCausalLM"},
    },
    "tokenizer_config.json": {"tokenizer_class": "FooTokenizer", "auto_map": {"AutoTokenizer": ["own.Foo", None]}},
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundled model whose own code leaves a file behind where it runs; nobody answers a question."""
    for file in MODEL.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path / file.name)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')\n")

    def ask(*_: Any) -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    return tmp_path


def change(model: Path, name: str, **fields: Any) -> None:
    file = model / name
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_type_that_transformers_does_not_know_is_one_sentence(model: Path) -> None:
    change(model, "config.json", model_type="foomoe", architectures=["FooForCausalLM"])
    with pytest.raises(ConfigError, match=r"cannot read the configuration of .* \(ValueError: .*foomoe.*no --calibr"):
        load_config(model)


@pytest.mark.parametrize("name", OWN_CODE)
def test_code_of_a_checkpoint_is_neither_run_nor_asked_about(model: Path, name: str) -> None:
    change(model, name, **OWN_CODE[name])
    load = load_config if name == "config.json" else load_tokenizer
    if name == "config.json":
        with pytest.raises(ConfigError, match=f"of {model} and does not run the code that comes with it"):
            load(model)
        with pytest.raises(ConfigError, match="and does not run the code that comes with it"):
            build_calibrated(model, model / "out", MODEL / "calibration.txt", num_sequences=8, sequence_length=64)
    else:
        load(model)
    assert not (model / "it-ran").exists()


@pytest.mark.parametrize("contents", [None, "", "{}", "[1]", '{"model": 3}', "\0\1\2"])
def test_without_a_tokenizer_that_can_be_read_it_is_one_sentence(model: Path, contents: str | None) -> None:
    (model / "tokenizer.json").unlink()
    if contents is not None:
        (model / "tokenizer.json").write_text(contents)
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer of .*: put its tokenizer\.json beside"):
        load_tokenizer(model)
