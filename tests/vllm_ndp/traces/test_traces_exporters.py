"""Traces written for other simulators: DynaNDE's CSV read back, LLMServingSim's statistics counted by hand.

DynaNDE's columns are those of its repository's samples and of its reader (MoERoutingTraceReader.cc), which was read and
not run. gate_stats.json is of our own making: no file of that name was found in LLMServingSim as published.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from paths import DATA

from ndp_device.common.errors import ConfigError, TraceError
from vllm_ndp.traces.exporters import _ordinal, export_trace
from vllm_ndp.traces.importers import ImportSettings, import_trace, sequence_of, trace_of
from vllm_ndp.traces.trace import Trace

BUNDLED = Trace.load(DATA / "tiny-mixtral-trace")


def by_expert(ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[..., E]"""
    scores = np.zeros((*ids.shape[:-1], 8), np.float32)
    np.put_along_axis(scores, ids.astype(np.int64), weights, axis=-1)
    return scores


def test_dynande_reads_back_what_was_written(tmp_path):
    first = BUNDLED.select(range(5))
    files = export_trace(first, "dynande", tmp_path / "out")
    assert len(files) == 1 + max(len(s.decode_ids) for s in first.sequences)
    back = import_trace(tmp_path / "out" / "Decoder", "dynande", ImportSettings(num_experts=8))
    for was, now in zip(first.sequences, back.sequences, strict=True):
        assert by_expert(now.decode_ids, now.decode_weights) == pytest.approx(
            by_expert(was.decode_ids, was.decode_weights), rel=1e-6
        )
    tokens = sum(len(s.prompt_ids) for s in first.sequences)
    settings = ImportSettings(num_experts=8, sequence_len=tokens, prompt_len=tokens - 1)
    prompts = import_trace(tmp_path / "out" / "Encoder" / "routing.csv", "dynande", settings)
    wanted = np.concatenate([by_expert(s.prompt_ids, s.prompt_weights) for s in first.sequences])
    assert by_expert(prompts.ids, prompts.weights) == pytest.approx(wanted, rel=1e-6)


def test_gate_stats_count_distinct_experts_of_neighbours(tmp_path):
    """One layer, top-1. Prompts 0 1 1 and 2; decode steps (3, 3) and (0, 1)."""
    sequences = [
        sequence_of(np.array(tokens)[:, None, None], None, len(tokens) - 2, "")
        for tokens in ([0, 1, 1, 3, 0], [2, 3, 1])
    ]
    trace = trace_of(sequences, ImportSettings("m", 4), "x", "uniform")
    (path,) = export_trace(trace, "gate-stats", tmp_path)
    (layer,) = json.loads(path.read_text())["layers"]
    assert layer["distinct_experts"] == {"prefill": {"1": 1.0, "2": 2.0}, "decode": {"1": 1.0, "2": 1.5}}
    assert layer["expert_loads"] == [0.25, 0.375, 0.125, 0.25]


def test_what_cannot_be_exported_is_refused_before_a_file_is_written(tmp_path):
    with pytest.raises(TraceError, match="did you mean 'dynande'"):
        export_trace(BUNDLED, "dynand", tmp_path / "out")
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        export_trace(BUNDLED, "gate-stats", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_positions_are_named_as_dynande_names_them():
    assert [_ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th"]
    )
