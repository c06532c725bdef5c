"""Logs that engines write row by row: read interleaved or one layer a file, and refused where they lack something."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from ndp_device.errors import TraceError
from vllm_ndp.traces.importers import ImportSettings, import_trace


def route(request: str, token: int, layer: int, ids: list[int], weights: list[float] | None = None) -> dict:
    row = {"type": "route", "req_id": request, "token_idx": token, "layer": layer, "topk_ids": ids}
    return row if weights is None else row | {"topk_weights": weights}


ROWS = [
    route(request, token, layer, [token % 4, 4 + layer], [0.75, 0.25])
    for token in range(3)
    for request in ("a", "b")
    for layer in range(2)
]


def write(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_interleaved_by_request_become_requests_whatever_their_order(tmp_path):
    shuffled = [{"type": "meta", "model": "m"}, {"type": "request", "req_id": "a", "prompt_len": 2}, *ROWS]
    random.Random(0).shuffle(shuffled)
    write(tmp_path / "log.jsonl", shuffled)
    trace = import_trace(tmp_path / "log.jsonl", "routelog", ImportSettings(prompt_len=1, sequence_len=2))
    by_name = {s.label: s for s in trace.sequences}
    assert trace.provenance.weights == "router"
    assert [len(by_name[name].prompt_ids) for name in ("a", "b")] == [2, 1]
    for name in ("a", "b"):
        ids = np.concatenate([by_name[name].prompt_ids, by_name[name].decode_ids])
        assert ids.tolist() == [[[t, 4], [t, 5]] for t in range(3)]


def test_one_layer_per_file_is_the_same_as_one_file(tmp_path):
    (tmp_path / "layers").mkdir()
    for layer in range(2):
        write(tmp_path / "layers" / f"layer{layer}.jsonl", [row for row in ROWS if row["layer"] == layer])
    write(tmp_path / "all.jsonl", ROWS)
    one, many = (import_trace(tmp_path / name, "routelog") for name in ("all.jsonl", "layers"))
    assert (one.ids == many.ids).all()


def test_of_a_row_that_the_warm_up_told_too_the_last_counts(tmp_path):
    write(tmp_path / "log.jsonl", [route("a", 0, 0, [7, 7 - 1]), *ROWS])
    trace = import_trace(tmp_path / "log.jsonl", "routelog")
    assert trace.sequences[0].prompt_ids[0].tolist() == [[0, 4], [0, 5]]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], 'holds no row of {"type": "route"}'),
        (ROWS[:-1], "request 'b' has no row of token 2 in layer 1"),
        ([row for row in ROWS if row["token_idx"] != 1], "has no row of token 1"),
        ([*ROWS, route("a", 3, 0, [1]), route("a", 3, 1, [1])], "has 1 to 2 experts a token"),
        ([route("a", 0, 0, [1, 1])], "line 1 chooses an expert twice"),
        ([route("a", 0, 0, [1, 2], [1.0])], "a weight for each of 2 experts"),
        ([route("a", -1, 0, [1])], "whole token_idx of at least 0, got -1"),
        ([route("a", 0, 0, [])], "must have topk_ids"),
        ([[1]], "must be a JSON object, got list"),
    ],
)
def test_a_log_that_lacks_something_is_refused_in_one_sentence(tmp_path, rows, says):
    write(tmp_path / "log.jsonl", rows)
    with pytest.raises(TraceError) as refusal:
        import_trace(tmp_path / "log.jsonl", "routelog")
    assert says in str(refusal.value)


def test_rows_of_layer_and_expert_are_cut_into_tokens(tmp_path):
    rows = [(layer, (token + choice + layer) % 8) for token in range(6) for layer in (0, 3) for choice in range(2)]
    text = "token_type,layer,expert\n" + "".join(f"x,{layer},{expert}\n" for layer, expert in rows)
    (tmp_path / "t.csv").write_text(text)
    settings = ImportSettings(sequence_len=3, prompt_len=1)
    trace = import_trace(tmp_path / "t.csv", "moe-trace", settings)
    assert trace.ids.shape == (6, 2, 2)
    assert trace.sequences[1].prompt_ids.tolist() == [[[3, 4], [6, 7]]]
    (tmp_path / "cut.csv").write_text(text[: text.rindex("x,")])
    with pytest.raises(TraceError, match="2 experts of each of 2 layers"):
        import_trace(tmp_path / "cut.csv", "moe-trace", settings)
    for bad, says in (
        ("a,b\n1,2\n", "layer and expert"),
        ("layer,expert\n", "no rows"),
        ("layer,expert\n0,x\n", "whole"),
    ):
        (tmp_path / "bad.csv").write_text(bad)
        with pytest.raises(TraceError, match=says):
            import_trace(tmp_path / "bad.csv", "moe-trace", settings)
