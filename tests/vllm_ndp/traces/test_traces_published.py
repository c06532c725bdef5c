"""Published data sets of routing, and what is refused of them in one sentence.

Tried on real files: expert-selection, 100 requests of Llama-4-Maverick (24 of 48 layers, 15,724 tokens; the subset that
andronius-yang/cse223b-proj keeps); dynande, its repository's sample folders, decoder (64 requests, 10 tokens, 25
layers) and encoder.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from paths import DATA

from ndp_device.common.errors import TraceError
from vllm_ndp.traces.importers import ImportSettings, import_trace


def forward(tokens: list[int]) -> dict[str, object]:
    """One pass of a model whose layer 0 is dense: layer l sends token t to experts t and 8 + l."""
    return {"0": None} | {str(layer): [[t, 8 + layer] for t in tokens] for layer in (1, 2)}


def test_expert_selection_gives_a_request_a_file_and_its_first_pass_is_the_prompt(tmp_path):
    for name, tokens in (("10", [0, 1, 2]), ("9", [3, 4])):
        passes = [forward(tokens), forward([5]), forward([6])]
        (tmp_path / f"{name}.json").write_text(json.dumps(passes))
    trace = import_trace(tmp_path, "expert-selection", ImportSettings(num_experts=16))
    assert [s.label for s in trace.sequences] == ["9", "10"]
    assert trace.sequences[1].prompt_ids[:, 0].tolist() == [[0, 9], [1, 9], [2, 9]]
    assert trace.sequences[0].decode_ids.tolist() == [[[5, 9], [5, 10]], [[6, 9], [6, 10]]]
    assert trace.provenance.weights == "uniform"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "has none"),
        ([forward([1]), {"0": None, "1": [[1, 2]]}], "pass 1 has layers"),
        ([{"1": [[1, 2], [1]]}], "cannot be read"),
        ([{"1": [[1.5]]}], "whole ids"),
        ([{"1": [1]}], r"\[tokens\]\[k\]"),
        ({"1": []}, "cannot be read"),
    ],
)
def test_a_selection_that_lacks_something_is_refused(tmp_path, content, says):
    (tmp_path / "1.json").write_text(json.dumps(content))
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "1.json", "expert-selection")


def test_logits_alone_choose_the_largest(tmp_path):
    logits = np.random.default_rng(0).normal(size=(2, 3, 2, 8)).astype(np.float32)
    np.savez(tmp_path / "t.npz", logits=logits)
    trace = import_trace(tmp_path / "t.npz", "npz", ImportSettings(top_k=2))
    ids = np.argsort(-logits, axis=3)[..., :2]
    assert trace.ids.tolist() == ids.reshape(6, 2, 2).tolist()
    powers = np.exp(np.take_along_axis(logits, ids, axis=3))
    assert trace.weights == pytest.approx((powers / powers.sum(axis=3, keepdims=True)).reshape(6, 2, 2))
    with pytest.raises(TraceError, match=r"need --top-k 1\.\.8, got 0"):
        import_trace(tmp_path / "t.npz", "npz")


def write_scores(path, rows: list[tuple[int, int, dict[int, float]]], experts: int = 4) -> None:
    """Rows of (layer, token, scores by expert)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(["layer_id", "token_id", *(f"expert_{e}" for e in range(experts))])]
    lines += [
        f"{layer},{token}," + ",".join(f"{of.get(e, 0):.6f}" for e in range(experts)) for layer, token, of in rows
    ]
    path.write_text("\n".join(lines) + "\n")


def test_dynande_rows_are_the_tokens_of_all_or_in_folders_of_positions_the_requests(tmp_path):
    write_scores(tmp_path / "all.csv", [(n, t, {t: 0.5, n + 2: 0.25}) for n in range(2) for t in range(2)])
    trace = import_trace(tmp_path / "all.csv", "dynande", ImportSettings(sequence_len=2, prompt_len=1))
    assert trace.ids.tolist() == [[[0, 2], [0, 3]], [[1, 2], [1, 3]]]
    assert trace.weights[0, 0].tolist() == [0.5, 0.25]
    for position, name in enumerate(("1st", "2nd", "10th")):
        for layer in (2, 3):
            folder = tmp_path / "decoder" / name / f"Layer_{layer}"
            write_scores(folder / "x.csv", [(0, r, {(r + position) % 4: 1.0}) for r in range(2)])
            (folder / "x_top1_stats.csv").write_text("Expert_ID,Token_Count\n")
    with pytest.raises(TraceError, match="request '0' has no row of token 2"):
        import_trace(tmp_path / "decoder", "dynande")
    (tmp_path / "decoder" / "10th").rename(tmp_path / "decoder" / "3rd")
    trace = import_trace(tmp_path / "decoder", "dynande")
    assert [s.decode_ids[:, 1, 0].tolist() for s in trace.sequences] == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"must begin with a line of names that has layer_id, token_id, expert_\\d\+, got ''"),
        ("layer_id,token_id\n", r"has expert_\\d\+, got 'layer_id,token_id'"),
        ("layer_id,token_id,expert_0\n", "must have 1 to"),
        ("layer_id,token_id,expert_0\n0,0\n", "Expected 3 columns, got 2"),
        ("layer_id,token_id,expert_0\n0,0,x\n", "conversion error"),
        ("layer_id,token_id,expert_0\n0,0,\n", "without a gap"),
        ("layer_id,token_id,expert_0\n0,0,nan\n", "without a gap"),
        ("layer_id,token_id,expert_0\n0,0,inf\n", "finite scores"),
        ("layer_id,token_id,expert_0\n0,0,-1\n", "at least 0"),
        (
            "layer_id,token_id,expert_0,expert_1\n0,0,1,1\n0,1,1,0\n",
            r"as many experts above 0 in every row, got 1\.\.2",
        ),
    ],
)
def test_dynande_files_that_lack_something_are_refused(tmp_path, text, says):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "t.csv", "dynande")


POLICYLANG = DATA / "policylang.parquet"
"""Written by moe-policylang 1.15.0 of the bundled model: record_trace of two prompts, six tokens each, record_phase."""


def test_a_recording_of_moe_policylangs_is_read_with_its_prompts_and_scores():
    trace = import_trace(POLICYLANG, "policylang")
    rows = pq.read_table(POLICYLANG).to_pylist()
    assert [len(s.prompt_ids) for s in trace.sequences] == [
        len({row["token_idx"] for row in rows if row["prompt_id"] == n and row["phase"] == "prefill"}) for n in (0, 1)
    ]
    for row in rows:
        one = trace.sequences[row["prompt_id"]]
        ids, weights = (
            np.concatenate(both)
            for both in ((one.prompt_ids, one.decode_ids), (one.prompt_weights, one.decode_weights))
        )
        assert ids[row["token_idx"], row["layer_idx"]].tolist() == row["selected_experts"]
        assert weights[row["token_idx"], row["layer_idx"]].tolist() == row["router_scores"]
    assert sum(len(s.prompt_ids) + len(s.decode_ids) for s in trace.sequences) * 4 == len(rows)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt_id": None}, "must have columns prompt_id"),
        ({"selected_experts": [[0, 1], [1]]}, "as many selected_experts in every row"),
        ({"selected_experts": [[0, 1], None]}, "has rows without selected_experts"),
        ({"router_scores": [[0.5], [0.5]]}, "must have a weight for each expert, got 1 a row"),
        ({"token_idx": [0, 2]}, "request '0' has no row of token 1"),
    ],
)
def test_a_table_that_lacks_something_is_refused(tmp_path, change, says):
    good = {"prompt_id": [0, 0], "token_idx": [0, 1], "layer_idx": [0, 0], "selected_experts": [[0, 1], [1, 2]]}
    columns = {name: values for name, values in (good | change).items() if values is not None}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "a.parquet", "policylang")
