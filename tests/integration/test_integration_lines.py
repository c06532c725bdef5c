"""Command lines that we print or ship, read by vLLM's own parser: what `vllm-ndp plan` proposes, what containers run.

And the example that starts an engine, as its first lines say.
"""

from __future__ import annotations

import runpy
import shlex
import sys
from typing import Any

import pytest
import yaml
from engines import MODEL, REPLICAS, ROOT, parser

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.operating.proposal import propose
from vllm_ndp.operating.sizing import GB, Demand, MachineSize, Sizing
from vllm_ndp.operating.sources import source_named

pytestmark = pytest.mark.vllm


def settings_of(words: list[str]) -> dict[str, Any]:
    """Exits where vLLM knows an option differently."""
    given = parser().parse_args(words)
    assert given.quantization == "ndp"
    settings: dict[str, Any] = given.additional_config["ndp"]
    return settings


@pytest.mark.parametrize(("model", "gpu"), [("qwen3-30b-a3b", 24 * GB), (str(MODEL), None)])
def test_vllm_reads_the_line_that_plan_proposes(model: str, gpu: int | None) -> None:
    source = source_named(model)
    sizing = Sizing(source.model, MachineSize(64 * GB, gpu), Demand(context=2048, batch=2))
    proposed = propose(source, sizing, Costs(load_hardware(), source.model))
    assert settings_of(proposed.serve_options())["hot_experts"] == proposed.ways[0].option.num_hot
    given = parser().parse_args(proposed.serve_options())
    assert (given.max_model_len, given.max_num_seqs) == (2048, 2)
    assert given.kv_cache_memory_bytes == (proposed.sizing.kv_cache_with_spare if gpu is None else None)


def test_vllm_reads_the_command_of_the_compose_file() -> None:
    """With compose's own defaults; the first word is the model, which `vllm serve` takes by itself."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_deploy import resolved

    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    model, *words = (resolved(word) for word in services["server"]["command"])
    assert model == "/models/model"
    assert settings_of(words)["devices"] == "ipc:///run/ndp/device"


def test_vllm_reads_the_lines_of_the_docs() -> None:
    """Every `vllm serve MODEL ...` of the pages for newcomers, continued lines joined."""
    lines = []
    for name in ("README.md", "docs/start.md", "docs/howto.md", "docs/serving.md"):
        text = (ROOT / name).read_text().replace("\\\n", " ")
        lines += [line.strip() for line in text.splitlines() if line.startswith("vllm serve ")]
    assert len(lines) >= 3
    for line in lines:
        words = [word for word in shlex.split(line)[3:] if word != "&"]
        parser().parse_args(words)


def test_the_example_that_serves_prints_both_clocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = ROOT / "examples" / "serve_offline.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(MODEL), str(REPLICAS)])
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    for name in ("measured_tpot_ms", "simulated_tpot_us", "hot_pairs"):
        assert name in said
