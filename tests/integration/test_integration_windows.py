"""A window in every layer: one that no request outgrows is full attention, a shorter one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from engines import MODEL, PROMPTS, engine, greedy, sentence, token_ids

from ndp_device.common.errors import ConfigError

pytestmark = pytest.mark.vllm
SETTINGS = {"cold_precision": "full", "hot_experts": 4}


def windowed(tmp_path: Path, window: int) -> Path:
    copy = tmp_path / f"window-{window}"
    shutil.copytree(MODEL, copy, ignore=shutil.ignore_patterns("eval", "traces", "licences"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    return copy


def test_a_window_that_no_request_outgrows_gives_the_tokens_of_none(tmp_path: Path) -> None:
    """Chunks and the prefix cache read the routing of positions that a shorter window would have forgotten."""
    prompts = [PROMPTS[0] * 6, PROMPTS[1]]
    found = []
    for model in (MODEL, windowed(tmp_path, 512)):
        with engine(model, settings=SETTINGS, max_model_len=512, max_num_batched_tokens=64) as llm:
            found.append([token_ids(greedy(llm, prompts, 16)) for _ in range(2)])
            (totals,) = llm.collective_rpc("ndp_totals")
            assert totals["sidecar_mismatches"] == 0
    assert found[0] == found[1]


def test_a_shorter_window_is_refused_with_the_length_that_it_allows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error, engine(windowed(tmp_path, 256), settings=SETTINGS, max_model_len=512):
        pass
    assert "use --max-model-len 256 or less" in sentence(error)
