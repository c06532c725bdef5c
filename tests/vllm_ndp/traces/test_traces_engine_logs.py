"""Logs that engines write row by row: read interleaved or one layer a file, and refused where they lack something.

routelog was tried on five real logs of four public repositories of vLLM loggers (TotaniYash, weiran0129, KaxitPandya,
KennethWang1221), whose shape the tests below repeat.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from paths import DATA

from ndp_device.common.errors import TraceError
from vllm_ndp.traces.importers import ImportSettings, import_trace
from vllm_ndp.traces.trace import Trace


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


def steps(sizes: list[int], layer: int = 0) -> list[dict]:
    """A logger's rows that knows no requests: row r of step s chooses expert r and 8 + s."""
    return [route("r1", row, layer, [row, 8 + step]) for step, size in enumerate(sizes) for row in range(size)]


WARM_UP = [route("r1", row, 0, [5, 6]) for row in range(64)]


def test_rows_of_one_req_id_are_the_requests_that_share_a_batch_until_one_ends(tmp_path):
    """As vLLM's profile run, a prompt step and decode steps follow each other in real logs, one run after another."""
    run = steps([7, 3, 3, 3, 2, 2])
    write(tmp_path / "log.jsonl", [{"type": "meta"}, *WARM_UP, *run, *WARM_UP, *run])
    trace = import_trace(tmp_path / "log.jsonl", "routelog")
    found = [(len(s.prompt_ids), s.decode_ids[:, 0].tolist()) for s in trace.sequences]
    one_run = [(0, [[r, 9], [r, 10], [r, 11]]) for r in range(3)] + [(0, [[r, 12], [r, 13]]) for r in range(2)]
    assert found == one_run * 2
    assert trace.provenance.settings["left_out"] == {
        "rows of warm-up": 128,
        "rows of steps unlike their neighbours, whose requests nothing tells": 14,
    }


def test_one_request_that_counts_on_loses_its_warm_up_only(tmp_path):
    rows = [route("r0", token, 0, [token % 3, 3 + token % 2]) for token in range(64, 80)]
    write(tmp_path / "log.jsonl", [*WARM_UP[:64], *({**row, "req_id": "r1"} for row in rows)])
    trace = import_trace(tmp_path / "log.jsonl", "routelog")
    (sequence,) = trace.sequences
    assert len(sequence.prompt_ids) + len(sequence.decode_ids) == 16
    assert trace.provenance.settings["left_out"] == {"rows of warm-up": 64}


def test_few_rows_that_are_alike_are_no_warm_up(tmp_path):
    write(tmp_path / "log.jsonl", [route("r0", token, 0, [1, 2]) for token in range(15)])
    assert len(import_trace(tmp_path / "log.jsonl", "routelog").step) == 15


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([*steps([2, 2]), *steps([2, 1], layer=3)], "layers 0 and 3 were logged in steps of different sizes"),
        (steps([3, 2, 1]), "no two steps have the same number of rows"),
    ],
)
def test_steps_that_no_request_can_be_found_in_are_refused(tmp_path, rows, says):
    write(tmp_path / "log.jsonl", rows)
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "log.jsonl", "routelog")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], 'holds no row of {"type": "route"}'),
        (ROWS[:-1], "request 'b' has no row of token 2 in layer 1"),
        ([row for row in ROWS if row["token_idx"] != 1], "has no row of token 1"),
        ([*ROWS, route("a", 3, 0, [1])], "line 13 has 1 experts where rows before have 2 experts a token"),
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


WRITTEN = DATA / "engine-traces"
"""Tokens 253 to 258 of two requests of the bundled trace, as programs of others write them. lattice (8dd827d82b): its
record and dump_moe_routing_trace_jsonl, compiled. ik_llama.cpp: the output statements of its moe_trace_writer, compiled
by themselves, of one request. prime-rl: pack_routing and serialize_routed_experts. SGLang 0.5.23:
_b64_encode_per_request of its detokenizer."""


@pytest.mark.parametrize(
    ("name", "kind", "requests", "prompt_len", "has_weights"),
    [
        ("lattice.jsonl", "lattice", 2, 2, True),
        ("ik_llama.ndjson", "ik_llama", 1, 0, True),
        ("prime-rl.jsonl", "vllm", 2, 3, True),
        ("sglang.jsonl", "sglang-answers", 2, 3, False),
    ],
)
def test_what_other_programs_write_of_a_trace_is_read_as_that_trace(name, kind, requests, prompt_len, has_weights):
    settings = ImportSettings(num_experts=8, prompt_len=2, top_k=2)
    trace = import_trace(WRITTEN / name, kind, settings)
    assert len(trace.sequences) == requests
    for own, of in zip(trace.sequences, Trace.load(DATA / "tiny-mixtral-trace").sequences[:requests], strict=True):
        assert len(own.prompt_ids) == prompt_len
        ids, weights = (
            np.concatenate(both)[253:259]
            for both in ((of.prompt_ids, of.decode_ids), (of.prompt_weights, of.decode_weights))
        )
        np.testing.assert_array_equal(np.concatenate([own.prompt_ids, own.decode_ids]), ids)
        own_weights = np.concatenate([own.prompt_weights, own.decode_weights])
        np.testing.assert_array_equal(own_weights, weights if has_weights else np.full_like(weights, 0.5))


@pytest.mark.parametrize(
    ("name", "kind", "change", "says"),
    [
        (
            "ik_llama.ndjson",
            "ik_llama",
            ('"complete":true', '"complete":false'),
            "does not end with its number of rout",
        ),
        ("ik_llama.ndjson", "ik_llama", ('"routes":24', '"routes":25'), "the run that wrote it was interrupted"),
        ("lattice.jsonl", "lattice", ('"token_idx":0', '"token_idx":1'), "begins with token 1"),
        ("prime-rl.jsonl", "vllm", ('"int32"', '"float32"'), "of whole numbers up to int32, got 'float32'"),
        ("prime-rl.jsonl", "vllm", ('"completion_tokens": 4', '"completion_tokens": 5'), "where usage says 7"),
        ("sglang.jsonl", "sglang-answers", ('"completion_tokens": 4', '"completion_tokens": 6'), "48 ids of 8 tokens"),
    ],
)
def test_what_other_programs_write_is_refused_where_it_lacks_something(tmp_path, name, kind, change, says):
    (tmp_path / name).write_text((WRITTEN / name).read_text().replace(*change))
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / name, kind, ImportSettings(num_experts=8, top_k=2 if kind != "sglang-answers" else 4))
