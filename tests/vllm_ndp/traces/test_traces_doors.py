"""What a trace must hold is checked where it comes in; what no router chose is left out of an import, and counted."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ndp_device.common.errors import TraceError
from ndp_device.common.model_shape import MAX_EXPERTS, MAX_EXPERTS_IN_ALL, MAX_LAYERS
from vllm_ndp.lab.locality import locality
from vllm_ndp.traces.format import Provenance, require_choices
from vllm_ndp.traces.importers import ImportSettings, import_trace, trace_of
from vllm_ndp.traces.rows import Logged
from vllm_ndp.traces.trace import Trace

E, K, LAYERS, PROMPT, ANSWER = 32, 4, 5, 12, 9
TOKENS = PROMPT + ANSWER - 1


def chosen(tokens: int = TOKENS, k: int = K, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((tokens, LAYERS, E)).argsort(axis=2)[:, :, :k]


def vllm(tmp_path: Path, change: Any, *, k: int = K, num_experts: int = E) -> Trace:
    """Import three answers of a server, each with its routing changed."""
    lines = []
    for number in range(3):
        ids = change(chosen(k=k, seed=number).astype(np.int64))
        usage = {"prompt_tokens": PROMPT, "completion_tokens": len(ids) - PROMPT + 1}
        lines.append(json.dumps({"id": str(number), "usage": usage, "choices": [{"routed_experts": ids.tolist()}]}))
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    return import_trace(tmp_path / "log.jsonl", "vllm", ImportSettings(num_experts=num_experts))


ZERO_OR_LESS = np.resize([0, -1], (TOKENS, 1, 1))


def filled(where: Any, value: Any) -> Any:
    def change(ids: np.ndarray) -> np.ndarray:
        ids[where] = value
        return ids

    return change


def with_column(value: Any) -> Any:
    return lambda ids: np.concatenate([ids, np.full((*ids.shape[:2], 1), value)], axis=2)


@pytest.mark.parametrize(
    ("k", "value", "dense", "others"),
    [
        *((K, value, [0, 3], [1, 2, 4]) for value in (0, -1, 65535)),
        *((1, value, [0, 2, 4], [1, 3]) for value in (0, -1, E, ZERO_OR_LESS)),  # a model that chooses one expert
    ],
)
def test_dense_layers_are_left_out_and_counted(
    tmp_path: Path, k: int, value: Any, dense: list[int], others: list[int]
) -> None:
    trace = vllm(tmp_path, filled((slice(None), dense), value), k=k)
    assert trace.provenance.settings["left_out"] == {"layers without experts": len(dense)}
    assert np.array_equal(trace.ids[:TOKENS], chosen(k=k)[:, others])
    locality(trace)


@pytest.mark.parametrize("value", [0, -1, E])
@pytest.mark.parametrize(
    ("rows", "prompt", "tokens"),
    [
        (slice(-5, None), PROMPT, slice(0, -5)),
        (slice(0, 4), PROMPT - 4, slice(4, None)),
        (slice(0, PROMPT + 2), 0, slice(PROMPT + 2, None)),
        (slice(PROMPT - 2, None), PROMPT - 2, slice(0, PROMPT - 2)),
    ],
)
def test_padding_at_an_end_of_a_request_is_left_out_and_counted(
    tmp_path: Path, value: int, rows: slice, prompt: int, tokens: slice
) -> None:
    trace = vllm(tmp_path, filled(rows, value))
    kept = chosen()[tokens]
    assert trace.provenance.settings["left_out"] == {"rows of padding": 3 * (TOKENS - len(kept))}
    assert trace.prompt_len.tolist() == [prompt] * 3
    assert np.array_equal(trace.ids[: len(kept)], kept)
    if len(kept) > prompt:
        locality(trace)


def test_dense_layers_and_padding_and_a_shared_expert_at_once(tmp_path: Path) -> None:
    def change(ids: np.ndarray) -> np.ndarray:
        ids = with_column(E)(ids)
        ids[:, 0], ids[-2:] = 0, 0
        return ids

    trace = vllm(tmp_path, change)
    told = {"columns of shared experts or padding": 1, "layers without experts": 1, "rows of padding": 6}
    assert trace.provenance.settings["left_out"] == told
    assert np.array_equal(trace.ids[: TOKENS - 2], chosen()[:-2, 1:])


@pytest.mark.parametrize(("num_experts", "value"), [(E, E), (0, E), (E, -1), (0, -1), (E, np.resize([-1, E], (5, 1)))])
def test_a_column_of_shared_experts_is_left_out_and_counted(tmp_path: Path, num_experts: int, value: Any) -> None:
    trace = vllm(tmp_path, with_column(value), num_experts=num_experts)
    assert trace.provenance.settings["left_out"] == {"columns of shared experts or padding": 1}
    assert (trace.provenance.num_experts, trace.provenance.top_k) == (E, K)


@pytest.mark.parametrize(
    "ids", [[[[3, 9]]] * 5, [[[0]], [[2]], [[0]]], [[[0], [2]]] * 5], ids=["top-2", "top-1", "both"]
)
def test_choices_of_a_few_tokens_that_are_alike_stay_choices(ids: list[list[list[int]]]) -> None:
    trace = trace_of([Logged("a", np.array(ids), None, 1)], ImportSettings(), "x")
    assert trace.ids.tolist() == ids


@pytest.mark.parametrize(("num_experts", "most"), [(1, 0), (0, 3)])
def test_many_tokens_that_choose_one_expert_chose_it_where_nothing_else_can_be(num_experts: int, most: int) -> None:
    """Of a layer with one expert; or of one whose others are chosen, too."""
    ids = np.zeros((20, 1, 1), np.int64)
    ids[5] = most
    assert trace_of([Logged("a", ids, None, 1)], ImportSettings("m", num_experts), "x").ids.tolist() == ids.tolist()


@pytest.mark.parametrize("name", ["a", ""])
def test_weights_stay_beside_the_choices_that_are_left(name: str) -> None:
    """Of a request or a stream with padding in front, a dense layer and a shared expert."""
    ids = with_column(E)(chosen())
    ids[:4], ids[:, 3] = 0, 0
    weights = np.random.default_rng(5).random(ids.shape, np.float32)
    settings = ImportSettings("m", E, sequence_len=TOKENS - 4, prompt_len=3)
    trace = trace_of([Logged(name, ids, weights, 7)], settings, "x")
    assert np.array_equal(trace.ids, chosen()[4:, [0, 1, 2, 4]])
    assert np.array_equal(trace.weights, weights[4:, [0, 1, 2, 4], :K])
    assert trace.prompt_len.tolist() == [3]


def test_the_only_column_is_no_shared_expert(tmp_path: Path) -> None:
    """Nor are all of several where every id lies outside."""
    ids = np.full((20, 1, 1), 5)
    assert trace_of([Logged("a", ids, None, 1)], ImportSettings(), "x").ids.tolist() == ids.tolist()
    with pytest.raises(TraceError, match=r"must lie in 0\.\.31, got 32\.\.63"):
        vllm(tmp_path, lambda ids: ids + E)


def test_padding_within_a_stream_whose_requests_nothing_tells_is_left_out() -> None:
    ids = filled((slice(5, 8), slice(None)), 0)(chosen())
    trace = trace_of([Logged("", ids, None)], ImportSettings("m", E, sequence_len=8, prompt_len=3), "x")
    assert np.array_equal(trace.ids, np.delete(chosen(), slice(5, 8), axis=0)[:16])
    left_out = {"rows of padding": 3, "tokens behind the last whole sequence": TOKENS - 3 - 16}
    assert trace.provenance.settings["left_out"] == left_out


def test_a_trace_with_some_weights_that_nobody_told_says_so() -> None:
    logged = [Logged("a", chosen(), None, 1), Logged("b", chosen(), np.ones(chosen().shape, np.float32), 1)]
    trace = trace_of(logged, ImportSettings("m", E), "x")
    assert trace.provenance.weights == "uniform"
    assert trace.weights[[0, TOKENS]].mean(axis=(1, 2)).tolist() == [1 / K, 1]


def test_two_columns_of_one_expert_are_nobodys_shared_one(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="chooses an expert at most once"):
        vllm(tmp_path, lambda ids: with_column(E)(with_column(E)(ids)), num_experts=0)


def test_too_few_experts_are_refused_and_no_column_is_taken_for_a_shared_one(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=rf"0\.\.15, got 0\.\.{E - 1}: row 0, layer 0 has \["):
        vllm(tmp_path, lambda ids: ids, num_experts=16)


@pytest.mark.parametrize("value", [0, -1])
def test_a_recording_without_any_choice_is_refused(tmp_path: Path, value: int) -> None:
    with pytest.raises(TraceError, match="the recording chooses no expert"):
        vllm(tmp_path, filled(slice(None), value))


def test_a_request_without_any_choice_is_left_out(tmp_path: Path) -> None:
    logged = [Logged(name, ids, None, PROMPT) for name, ids in (("a", chosen()), ("b", chosen() * 0))]
    trace = trace_of(logged, ImportSettings(num_experts=E), "x")
    assert list(trace.labels) == ["a"]
    assert trace.provenance.settings["left_out"] == {"rows of padding": TOKENS, "requests without a choice": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (filled((7, slice(None)), 0), "request 0 has no choice of token 7, but of tokens before and after it"),
        (filled(([0, 1, 7], slice(None)), 0), "request 0 has no choice of token 7, but of tokens before and after it"),
        (filled((7, 2), 0), r"at most once: row 7, layer 2 has \[0, 0, 0, 0\]"),
        (filled((7, 2, 1), E), r"must lie in 0\.\.31, got 0\.\.32: row 7, layer 2 has \[\d+, 32, "),
        (filled((7, 2, 1), 256), r"must lie in 0\.\.31, got 0\.\.256: row 7, layer 2 has \[\d+, 256, "),
        (filled((7, 2, 1), -1), r"must lie in 0\.\.31, got -1\.\.31: row 7, layer 2 has \[\d+, -1, "),
        (filled((7, 2, slice(0, 2)), 5), r"at most once: row 7, layer 2 has \[5, 5, "),
        (filled((7, 2, slice(0, 4, 3)), 5), r"at most once: row 7, layer 2 has \[5, \d+, \d+, 5\]"),
    ],
)
def test_what_nobody_can_tell_is_refused_by_row_and_layer(tmp_path: Path, change: Any, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        vllm(tmp_path, change)


def test_a_choice_far_into_a_trace_is_named_by_its_own_row() -> None:
    ids = np.tile(np.arange(2), (20_000, 1, 1))
    ids[17_000] = 5
    ids[17_001] = 1, 0
    with pytest.raises(TraceError, match=r"at most once: row 17000, layer 0 has \[5, 5\]"):
        require_choices(ids, np.ones(ids.shape), Provenance(model="m", num_layers=1, num_experts=8, top_k=2))


@pytest.mark.parametrize(("num_experts", "id_type"), [(256, "uint8"), (257, "uint16")])
def test_the_last_expert_of_a_layer_is_kept_as_itself(tmp_path: Path, num_experts: int, id_type: str) -> None:
    """A byte holds ids of 256 experts."""
    last = [[[0, num_experts - 1]]] * 3
    trace_of([Logged("a", np.array(last), None, 1)], ImportSettings("m", num_experts), "x").save(tmp_path / "trace")
    kept = Trace.load(tmp_path / "trace").ids
    assert (kept.tolist(), kept.dtype) == (last, id_type)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"top_k": 9}, "1 <= top_k <= num_experts"),
        ({"top_k": 0}, "1 <= top_k <= num_experts"),
        ({"num_layers": 0}, "num_layers >= 1"),
        ({"num_experts": MAX_EXPERTS + 1}, f"at most {MAX_EXPERTS} experts per layer"),
        ({"num_layers": MAX_LAYERS + 1}, f"at most {MAX_LAYERS} layers"),
        ({"num_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS_IN_ALL // MAX_LAYERS + 1}, "experts in all"),
    ],
)
def test_a_trace_of_no_possible_model_is_refused(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(TraceError, match=says):
        Provenance(model="m", **{"num_layers": 1, "num_experts": 8, "top_k": 2} | sizes)


def test_a_request_that_lacks_its_first_tokens_is_refused(tmp_path: Path) -> None:
    """Its prompt would end too late: what a prefix cache held is not in a log."""
    rows = [
        {"type": "route", "req_id": name, "token_idx": token, "layer": 0, "topk_ids": [token % 3]}
        for name, first in (("a", 0), ("b", 2))
        for token in range(first, 6)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(TraceError, match=r"request 'b' begins with token 2, .*: record from the start"):
        import_trace(tmp_path / "rows.jsonl", "routelog")


def test_a_long_prompt_of_a_large_model_is_one_line(tmp_path: Path) -> None:
    """8000 tokens of 58 layers, top-8, are 4.2 million values."""
    ids = np.tile(np.random.default_rng(0).random((100, 58, 256)).argsort(axis=2)[:, :, :8], (80, 1, 1))
    usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
    line = {"id": "0", "usage": usage, "choices": [{"routed_experts": ids.tolist()}]}
    (tmp_path / "log.jsonl").write_text(json.dumps(line))
    trace = import_trace(tmp_path / "log.jsonl", "vllm", ImportSettings(num_experts=256))
    assert np.array_equal(trace.ids, ids)


GOOD = trace_of([Logged(str(n), chosen(seed=n), None, PROMPT) for n in range(2)], ImportSettings("m", E), "x")


def changed(name: str, at: Any, value: Any) -> dict[str, Any]:
    array = getattr(GOOD, name).copy()
    array[at] = value
    return {name: array}


PLAN_OF_ANOTHER = {
    "plans": {
        "step": np.zeros(1, np.int32),
        "epoch": np.zeros(1, np.int64),
        "request": np.array([2], np.int32),
        "cells": np.zeros((1, GOOD.provenance.num_layers, E), np.uint8),
    }
}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (changed("ids", (3, 1), 9), r"at most once: row 3, layer 1 has \[9, 9, 9, 9\]"),
        (changed("ids", (3, 1, 0), E), r"must lie in 0\.\.31, got 0\.\.32: row 3, layer 1 has \[32, "),
        (changed("weights", (3, 1, 0), np.nan), r"finite and at least 0: row 3, layer 1 has \[nan, "),
        (changed("weights", (3, 1, 0), np.inf), r"finite and at least 0: row 3, layer 1 has \[inf, "),
        (changed("weights", (3, 1, 2), -0.5), r"finite and at least 0: row 3, layer 1 has \[0\.25, 0\.25, -0\.5, "),
        (changed("step", 15, 9), "in the order of their steps: row 16 is of step 5, after step 9"),
        (changed("position", TOKENS - 1, 90), r"request 0 has token 90 after 18 \(row 19\)"),
        (changed("position", 0, -1), "'position' of a trace must hold numbers of at least 0, got -1"),
        (changed("prompt_len", 1, -1), "'prompt_len' of a trace must hold numbers of at least 0, got -1"),
        (changed("arrival_s", 1, -0.5), "'arrival_s' of a trace must hold numbers of at least 0, got -0.5"),
        (changed("arrival_s", 1, np.inf), "arrivals of a trace must be finite"),
        (changed("request", 3, 2), "a routing row names request 2 but the trace has 2"),
        (changed("request", 3, -1), "a routing row names request -1 but the trace has 2"),
        (PLAN_OF_ANOTHER, "a plan names request 2 but the trace has 2"),
        (changed("phase", 3, 4), r"phases must be 0\.\.3, got 4"),
        (changed("position", slice(TOKENS + 3, None), 3), None),
    ],
)
def test_a_trace_in_memory_and_on_disk_is_held_to_the_same(
    tmp_path: Path, columns: dict[str, Any], says: str | None
) -> None:
    """The last one, a position that ran several times, is none of these: vLLM repeats what it preempted."""
    if says is None:
        assert len(dataclasses.replace(GOOD, **columns).sequences[1].decode_ids) == 0
        return
    with pytest.raises(TraceError, match=says):
        dataclasses.replace(GOOD, **columns)
    damaged = dataclasses.replace(GOOD)
    for name, values in columns.items():
        object.__setattr__(damaged, name, values)
    damaged.save(tmp_path / "trace")
    with pytest.raises(TraceError, match=says):
        Trace.load(tmp_path / "trace")


def test_requests_without_rows_hide_no_hole_of_another() -> None:
    names = list("abcd")
    four = {"prompt_len": np.full(4, PROMPT), "arrival_s": np.zeros(4), "request_ids": names, "labels": names}
    four |= {"request": GOOD.request + 1}
    assert [len(one.prompt_ids) for one in dataclasses.replace(GOOD, **four).sequences] == [0, PROMPT, PROMPT, 0]
    for at, says in ((-1, "request 2 has token 90 after 18"), (TOKENS - 1, "request 1 has token 90 after 18")):
        with pytest.raises(TraceError, match=says):
            dataclasses.replace(GOOD, **four, **changed("position", at, 90))


def answer(**changed: Any) -> str:
    usage = {"prompt_tokens": PROMPT, "completion_tokens": ANSWER} | changed.pop("usage", {})
    choice = {"routed_experts": chosen().tolist()} | changed
    return json.dumps({"usage": usage, "choices": [choice]})


def without_usage(**changed: Any) -> str:
    return json.dumps(
        {"choices": [{"routed_experts": chosen()[4:].tolist(), "prompt_token_ids": [1] * PROMPT} | changed]}
    )


def rows_of_csv(names: str, *rows: str) -> str:
    return "\n".join((names, *rows))


MOE_TRACE = "phase,layer,token_idx,e0"


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("vllm", answer(routed_experts=(chosen() + 0.7).tolist()), "must be whole numbers, got float64"),
        ("vllm", answer(routed_experts=chosen()[4:].tolist()), f"where usage says {TOKENS}: .*_start at 0"),
        ("vllm", answer(usage={"prompt_tokens": -5}), "whole prompt_tokens of at least 1, got -5"),
        ("vllm", answer(usage={"prompt_tokens": True}), "whole prompt_tokens of at least 1, got True"),
        ("vllm", answer(usage={"prompt_tokens": 12.9}), "whole prompt_tokens of at least 1, got 12.9"),
        ("vllm", without_usage(token_ids=[1] * ANSWER), f"routing of {TOKENS - 4} tokens where token_ids says"),
        ("vllm", without_usage(prompt_token_ids=[1] * 99), "tokens where prompt_token_ids says 99"),
        ("sglang-answers", '{"meta_info": {"prompt_tokens": 1, "completion_tokens": 0}}', "whole completion_tokens of"),
        ("moe-trace", rows_of_csv(MOE_TRACE, "decode,-1,0,1"), "layers and tokens of at least 0"),
        ("moe-trace", rows_of_csv(MOE_TRACE, "decode,0,-1,1"), "layers and tokens of at least 0"),
        ("moe-trace", rows_of_csv(MOE_TRACE, "warm,0,0,1"), "phases prefill and decode, got 'warm'"),
        ("moe-trace", rows_of_csv(f"layer,{MOE_TRACE}", "1,decode,0,0,1"), "more than one column layer"),
        ("dynande", rows_of_csv("layer_id,token_id,expert_1,expert_0", "0,0,1,0"), r"order, got \[1, 0\]"),
        ("dynande", rows_of_csv("layer_id,token_id,expert_0,expert_2", "0,0,1,0"), r"order, got \[0, 2\]"),
        ("expert-selection", '[{"-1": [[1, 2]], "0": [[1, 2]]}]', r"has layers \[-1, 0\]"),
    ],
)
def test_numbers_that_would_be_read_as_others_are_refused(tmp_path: Path, kind: str, text: str, says: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "log", kind)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"domain": np.array([-1]), "domains": np.array(["a", "b"])}, "the number of a domain for each of 1"),
        ({"domain": np.array([2]), "domains": np.array(["a", "b"])}, "the number of a domain for each of 1"),
        ({"idx": chosen(seed=1)[None]}, "has both experts and idx"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "t.npz", experts=chosen()[None], weights=np.ones((1, *chosen().shape)), **arrays)
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "t.npz", "npz")


@pytest.mark.parametrize("layers", [1, 2])
def test_requests_of_one_token_stay_requests_of_their_own(tmp_path: Path, layers: int) -> None:
    """lattice names no request: each row of token 0 and layer 0 begins one."""
    rows = [
        {"token_idx": 0, "layer_idx": layer, "selected_ids": [request, 9], "gate_weights": [0.5, 0.5]}
        for request in range(3)
        for layer in range(layers)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace = import_trace(tmp_path / "rows.jsonl", "lattice")
    assert trace.ids.tolist() == [[[request, 9]] * layers for request in range(3)]
