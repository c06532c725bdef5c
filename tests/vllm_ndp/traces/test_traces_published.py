"""Published data sets of routing, and what is refused of them in one sentence.

Tried on real files: expert-selection, 100 requests of Llama-4-Maverick (24 of 48 layers, 15,724 tokens; the subset that
andronius-yang/cse223b-proj keeps); dynande, its repository's sample folders, decoder (64 requests, 10 tokens, 25
layers) and encoder. Only on files written from their descriptions: columns (the data set's card), logits of .npz.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from ndp_device.common.errors import NdpError, TraceError
from vllm_ndp.traces.importers import ImportSettings, import_trace
from vllm_ndp.traces.rows import softmax


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


def cells(layers: range = range(2)) -> np.ndarray:
    """[N, 3] of two prompts, prompt_idx 7 and 3, three tokens."""
    return np.array([(prompt, token, layer) for prompt in (7, 3) for token in range(3) for layer in layers])


LOGITS = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
IDS = np.argsort(-LOGITS, axis=1)[:, :2]


def write_labels(path, rows=slice(None)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    prompt, token, layer = cells()[rows].T
    columns = {"prompt_idx": prompt, "tok": token, "layer": layer, "top_indices": IDS[rows]}
    save_file({name: np.ascontiguousarray(column, np.int32) for name, column in columns.items()}, path)


def write_logits(folder) -> None:
    """One file a layer; which one, its folder says."""
    for layer in range(2):
        own = cells()[:, 2] == layer
        path = folder / f"layer={layer:02}" / "part_0.safetensors"
        path.parent.mkdir(parents=True)
        prompt, token, _ = np.ascontiguousarray(cells()[own].T, np.int64)
        save_file({"prompt_idx": prompt.copy(), "tok": token.copy(), "logits": LOGITS[own]}, path)


def test_columns_give_ids_and_with_logits_the_weights_of_them(tmp_path):
    write_labels(tmp_path / "labels" / "part_0.safetensors", slice(0, 5))
    write_labels(tmp_path / "labels" / "part_1.safetensors", slice(5, 12))
    save_file({"h": np.zeros((2, 4), np.float32)}, tmp_path / "labels" / "hidden.safetensors")
    bare = import_trace(tmp_path, "columns")
    assert [s.label for s in bare.sequences] == ["3", "7"]
    assert bare.provenance.weights == "uniform"
    assert bare.sequences[1].decode_ids.reshape(-1, 2).tolist() == IDS[:6].tolist()
    write_logits(tmp_path / "logits")
    trace = import_trace(tmp_path, "columns")
    assert trace.provenance.weights == "router"
    assert trace.ids.tolist() == bare.ids.tolist()
    wanted = softmax(np.take_along_axis(LOGITS, IDS, axis=1))
    assert trace.sequences[1].decode_weights.reshape(-1, 2) == pytest.approx(wanted[:6])


def test_logits_alone_choose_the_largest(tmp_path):
    write_logits(tmp_path / "logits")
    trace = import_trace(tmp_path, "columns", ImportSettings(top_k=2))
    assert trace.sequences[1].decode_ids.reshape(-1, 2).tolist() == IDS[:6].tolist()
    with pytest.raises(TraceError, match=r"need --top-k 1\.\.8, got 0"):
        import_trace(tmp_path, "columns")
    np.savez(tmp_path / "t.npz", logits=LOGITS.reshape(2, 3, 2, 8))
    table = import_trace(tmp_path / "t.npz", "npz", ImportSettings(top_k=2))
    assert table.ids.reshape(-1, 2).tolist() == IDS.tolist()


def test_bfloat16_logits_are_widened(tmp_path):
    header = {name: {"dtype": "I64", "shape": [1], "data_offsets": [8 * i, 8 * i + 8]} for i, name in enumerate(
        ("prompt_idx", "tok", "layer")
    )}  # fmt: skip
    header["logits"] = {"dtype": "BF16", "shape": [1, 3], "data_offsets": [24, 30]}
    text = json.dumps(header).encode()
    logits = (np.array([1.0, -2.0, 3.0], np.float32).view(np.uint32) >> 16).astype("<u2")
    (tmp_path / "t.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(24) + logits.tobytes())
    trace = import_trace(tmp_path / "t.safetensors", "columns", ImportSettings(top_k=2))
    assert trace.ids.tolist() == [[[2, 0]]]


def test_columns_that_lack_something_are_refused_in_one_sentence(tmp_path):
    path = tmp_path / "t.safetensors"
    row = {"prompt_idx": np.zeros(1, np.int32), "tok": np.zeros(1, np.int32), "layer": np.zeros(1, np.int32)}
    ids = {"top_indices": np.zeros((1, 1), np.int32)}
    for tensors, says in (
        (row, "neither top_indices nor logits"),
        (ids, "must have prompt_idx and tok"),
        ({name: row[name] for name in ("prompt_idx", "tok")} | ids, "no folder layer=NN"),
        (row | {"top_indices": np.zeros((2, 1), np.int32)}, "a row of choices for each of 1 tokens"),
        (row | {"top_indices": np.zeros((1, 1), np.float64)}, "must be one of F32"),
        (row | ids | {"logits": np.zeros((1, 2), np.float32), "tok": np.ones(1, np.int32)}, ""),
    ):
        save_file(tensors, path)
        if says:
            with pytest.raises(TraceError, match=says):
                import_trace(path, "columns")
        else:
            assert len(import_trace(path, "columns").step) == 1
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(NdpError, match=r"outside of the file or is cut"):
        import_trace(path, "columns")


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
        ("", "must begin with layer_id"),
        ("layer_id,token_id,expert_0,expert_2\n", "must begin with layer_id"),
        ("layer_id,token_id,expert_0\n0,0\n", "3 finite numbers"),
        ("layer_id,token_id,expert_0\n0,0,x\n", "numbers only"),
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
