"""`vllm-ndp trace-synth` and `trace-import`: what was asked for is in the trace, and what is printed is of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from in_this_process import run_here
from paths import ROOT

from ndp_device.common.errors import ConfigError
from vllm_ndp.cli import traces
from vllm_ndp.cli.shared import integers
from vllm_ndp.traces import importers
from vllm_ndp.traces.format import PHASES
from vllm_ndp.traces.trace import Trace


def test_every_setting_of_a_synthetic_trace_is_in_it(tmp_path: Path) -> None:
    """A signal of 0, which is the null, is a setting too."""
    asked = {"concentration": 2.0, "signal": 0.0, "persistence": 0.25, "drift": 0.5, "seed": 7}
    words = [word for name, value in asked.items() for word in (f"--{name}", value)]
    sizes = ("--requests", 2, "--prompt-len", 5, "--decode-len", 3)
    done = run_here("vllm-ndp", "trace-synth", "mixtral-8x7b", "--out", tmp_path / "t", *sizes, *words)
    trace = Trace.load(tmp_path / "t")
    settings = trace.provenance.settings
    assert {name: settings[name] for name in asked} == asked
    assert [*trace.prompt_len] == [5, 5]
    told = json.loads(done.stdout)
    assert (told["requests"], told["rows"]) == (2, 2 * (5 + 3))
    assert (told["layers"], told["experts"], told["top_k"]) == (32, 8, 2)


def test_every_setting_of_an_import_reaches_it_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Any] = []

    def asked(*of: Any) -> None:
        told.extend(of)
        raise ConfigError("as the test wants it")

    monkeypatch.setattr(importers, "import_trace", asked)
    sizes = ("--num-experts", 9, "--sequence-len", 40, "--prompt-len", 30, "--top-k", 3)
    words = ("--out", tmp_path / "t", "--format", "npz", "--model", "m", *sizes)
    run_here("vllm-ndp", "trace-import", ROOT / "README.md", *words)
    settings = importers.ImportSettings("m", num_experts=9, sequence_len=40, prompt_len=30, top_k=3)
    assert told == [ROOT / "README.md", "npz", settings]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_import_without_a_decode_token_is_said_to_be_of_no_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, phase: str
) -> None:
    read = SimpleNamespace(phase=np.array([PHASES.index(phase)]))
    monkeypatch.setattr(importers, "import_trace", lambda *_: read)
    monkeypatch.setattr(traces, "_save", lambda *_: None)
    done = run_here("vllm-ndp", "trace-import", ROOT / "README.md", "--out", tmp_path / "t", "--format", "npz")
    assert ("0 decode tokens" in done.stderr) == (phase == "prefill")


def test_a_whole_number_may_be_the_least_and_no_less() -> None:
    assert integers("2,1", "--x", least=1) == (2, 1)
    with pytest.raises(ConfigError, match="--x must be at least 1, got 0"):
        integers("3,0", "--x", least=1)
