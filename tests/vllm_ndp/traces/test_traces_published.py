"""Published data sets of routing, and what is refused of them in one sentence.

Tried on real files: expert-selection, 100 requests of Llama-4-Maverick (24 of 48 layers, 15,724 tokens; the subset that
andronius-yang/cse223b-proj keeps); dynande, its repository's sample folders, decoder (64 requests, 10 tokens, 25
layers) and encoder.
"""

import json
import random
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from paths import DATA

from ndp_device.common.errors import TraceError
from vllm_ndp.traces.importers import ImportSettings, import_trace
from vllm_ndp.traces.trace import Trace


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


def test_layers_of_a_pass_stand_in_the_order_of_their_numbers_whatever_the_files(tmp_path):
    layers = {"10": [[1, 2]], "9": [[3, 4]], "0": None}
    (tmp_path / "0.json").write_text(json.dumps([layers, dict(reversed(layers.items()))]))
    assert import_trace(tmp_path, "expert-selection").ids.tolist() == [[[3, 4], [1, 2]]] * 2


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
    write_scores(tmp_path / "decoder" / "x.csv", [(0, 0, {0: 1.0})])
    with pytest.raises(TraceError, match="and others without: give one kind"):
        import_trace(tmp_path / "decoder", "dynande")
    assert [s.decode_ids[:, 1, 0].tolist() for s in trace.sequences] == [[0, 1, 2], [1, 2, 3]]


def test_dynande_requests_keep_the_numbers_of_their_rows(tmp_path):
    for position, name in enumerate(("1st", "2nd")):
        write_scores(tmp_path / name / "x.csv", [(0, r, {r % 3: 1.0, 3: 0.5 + position / 4}) for r in (4, 9)])
    trace = import_trace(tmp_path, "dynande")
    assert [(s.label, s.decode_ids[:, 0].tolist()) for s in trace.sequences] == [
        ("4", [[1, 3], [1, 3]]),
        ("9", [[0, 3], [0, 3]]),
    ]
    assert trace.weights[:, 0].tolist() == [[1, 0.5], [1, 0.75]] * 2


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
        ({"selected_experts": [[0], [1, 2, 3]]}, "as many selected_experts in every row"),
        ({"selected_experts": [[0, 1], None]}, "has rows without selected_experts"),
        ({"router_scores": [[0.5], [0.5]]}, "must have a weight for each expert, got 1 a row"),
        ({"token_idx": [0, 2]}, "request '0' has no row of token 1"),
        ({"token_idx": [0.5, 1]}, "token_idx must be whole numbers, got float64"),
        ({"selected_experts": [[0.5, 1.5]] * 2}, "selected_experts must be whole numbers, got float64"),
    ],
)
def test_a_table_that_lacks_something_is_refused(tmp_path, change, says):
    good = {"prompt_id": [0, 0], "token_idx": [0, 1], "layer_idx": [0, 0], "selected_experts": [[0, 1], [1, 2]]}
    columns = {name: values for name, values in (good | change).items() if values is not None}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "a.parquet", "policylang")


def test_a_table_that_unfolds_into_far_more_than_its_file_is_not_unfolded(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_ndp.traces.format._SMALL_BYTES", 1000)
    zeros = pa.table({name: np.zeros(100_000, np.int64) for name in ("prompt_id", "token_idx", "layer_idx")})
    pq.write_table(zeros, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(TraceError, match=r"cannot be read as a policylang recording \(Refused: .* unfold into 24"):
        import_trace(tmp_path / "a.parquet", "policylang")


# -- CSV that a fork of llama.cpp logs: its requests are found again; what no trace can hold is left out and said ------


LAYERS = (1, 2, 5)


def choice(token: int, layer: int) -> list[int]:
    """Two of 16 experts; neighbours of one layer share one."""
    return [(token + layer) % 16, (token + layer + 1) % 16]


def passes(prompts: Iterable[int] = (4, 3), decode: int = 2) -> list[tuple[str, list[int]]]:
    """(phase, tokens) of a prompt in parts and of decode."""
    out, at = [], 0
    for phase, count in [*(("prefill", count) for count in prompts), *[("decode", 1)] * decode]:
        out.append((phase, list(range(at, at + count))))
        at += count
    return out


def kimi(phase: str, tokens: list[int]) -> list[str]:
    cells = [(layer, at, token) for layer in LAYERS for at, token in enumerate(tokens)]
    return [f"{phase},{len(tokens)},{n},{at}," + ",".join(map(str, choice(t, n))) for n, at, t in cells]


HEADER = "# phase,n_tokens,layer,token_idx,e0,e1\n"


def read(path, lines: list[str], settings: ImportSettings | None = None) -> Trace:
    path.write_text(HEADER + "\n".join(lines) + "\n")
    return import_trace(path, "moe-trace", settings)


@pytest.mark.parametrize("parts", [(4, 3), (3, 3, 1)])
def test_a_prompt_in_parts_and_its_decode_are_one_request(tmp_path, parts):
    trace = read(tmp_path / "run.csv", [line for each in passes(parts) for line in kimi(*each)])
    (request,) = trace.sequences
    assert request.prompt_ids.tolist() == [[choice(token, layer) for layer in LAYERS] for token in range(7)]
    assert request.decode_ids.tolist() == [[choice(token, layer) for layer in LAYERS] for token in (7, 8)]
    assert "left_out" not in trace.provenance.settings


def test_files_joined_by_cat_are_requests_of_their_own(tmp_path):
    lines = [line for each in [*passes((3,)), *passes((2,), 1)] for line in kimi(*each)]
    found = [(len(s.prompt_ids), len(s.decode_ids)) for s in read(tmp_path / "two.csv", lines).sequences]
    assert found == [(3, 2), (2, 1)]


def test_a_warm_up_and_a_last_layer_of_the_prompts_last_token_are_left_out_and_said(tmp_path):
    def logged(phase: str, tokens: list[int]) -> list[str]:
        return [line for line in kimi(phase, tokens) if phase == "decode" or line.split(",")[2:4] < ["5", "1"]]

    lines = [line for each in [("prefill", [0, 1]), *passes((4,))] for line in logged(*each)]
    trace = read(tmp_path / "run.csv", lines)
    (request,) = trace.sequences
    assert request.prompt_ids.tolist() == [[choice(token, layer) for layer in (1, 2)] for token in range(4)]
    assert len(request.decode_ids) == 2
    assert trace.provenance.settings["left_out"] == {
        "rows of layer 5, through which a prompt ran for its last token alone": 1 + 1 + 2,
        "rows of warm-up": 2 * 2,
    }


def test_every_warm_up_before_a_larger_prompt_is_counted(tmp_path):
    runs = [("prefill", [0]), ("prefill", [0, 1]), *passes((4,))]
    trace = read(tmp_path / "run.csv", [line for each in runs for line in kimi(*each)])
    assert trace.provenance.settings["left_out"] == {"rows of warm-up": (1 + 2) * len(LAYERS)}
    assert [len(s.prompt_ids) for s in trace.sequences] == [4]


def test_decode_alone_is_cut_into_sequences(tmp_path):
    lines = [line for _, tokens in passes((), 6) for line in kimi("decode", tokens)]
    trace = read(tmp_path / "t.csv", lines, settings=ImportSettings(sequence_len=3, prompt_len=1))
    assert trace.sequences[1].prompt_ids.tolist() == [[choice(3, layer) for layer in LAYERS]]
    assert len(trace.sequences) == 2


# -- Logs that engines write row by row: read interleaved or one layer a file, and refused where they lack somethin ----


def route(request: str, token: int, layer: int, ids: list[int], weights: list[float] | None = None) -> dict:
    row = {"type": "route", "req_id": request, "token_idx": token, "layer": layer, "topk_ids": ids}
    return row if weights is None else row | {"topk_weights": weights}


ROWS = [
    route(request, token, layer, [token % 4, 4 + layer], [0.75, 0.25])
    for token in range(3)
    for request in ("a", "b")
    for layer in range(2)
]


def jsonl(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, rows) -> None:
    path.write_text(jsonl(*rows))


@pytest.mark.parametrize(("told", "prompts"), [({"a": 2}, [2, 1]), ({"a": 2, "b": 3}, [2, 3])])
def test_rows_interleaved_by_request_become_requests_whatever_their_order(tmp_path, told, prompts):
    requests = [{"type": "request", "req_id": name, "prompt_len": length} for name, length in told.items()]
    shuffled = [{"type": "meta", "model": "m"}, *requests, *ROWS]
    random.Random(0).shuffle(shuffled)
    write(tmp_path / "log.jsonl", shuffled)
    trace = import_trace(tmp_path / "log.jsonl", "routelog", ImportSettings(prompt_len=1, sequence_len=2))
    by_name = {s.label: s for s in trace.sequences}
    assert trace.provenance.weights == "router"
    assert [len(by_name[name].prompt_ids) for name in ("a", "b")] == prompts
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


def steps(sizes: list[int], layer: int = 0, **told: list[float]) -> list[dict]:
    """A logger's rows that knows no requests: row r of step s chooses expert r and 8 + s."""
    return [route("r1", row, layer, [row, 8 + step], **told) for step, size in enumerate(sizes) for row in range(size)]


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


def test_a_batch_of_one_is_one_request_with_its_weights_also_where_a_row_is_like_the_warm_ups(tmp_path):
    """Row 0 of step 2 chooses what each row of the warm-up chose."""
    warm_up = [{**row, "topk_ids": [0, 10], "topk_weights": [0.5, 0.5]} for row in WARM_UP]
    write(tmp_path / "log.jsonl", [*warm_up, *steps([7, 1, 1, 1], weights=[0.75, 0.25])])
    trace = import_trace(tmp_path / "log.jsonl", "routelog")
    assert trace.ids[:, 0].tolist() == [[0, 9], [0, 10], [0, 11]]
    assert trace.weights[:, 0].tolist() == [[0.75, 0.25]] * 3
    assert trace.provenance.weights == "router"


def test_weights_that_some_rows_do_not_tell_are_those_of_none(tmp_path):
    write(tmp_path / "log.jsonl", [*ROWS[:-1], {**ROWS[-1], "topk_weights": None}])
    trace = import_trace(tmp_path / "log.jsonl", "routelog")
    assert trace.provenance.weights == "uniform"
    assert (trace.weights == 0.5).all()


@pytest.mark.parametrize(("alike", "warm_up"), [(15, 0), (16, 16), (64, 64)])
def test_one_request_that_counts_on_loses_its_warm_up_only(tmp_path, alike, warm_up):
    rows = [route("r1", alike + token, 0, [token % 3, 3 + token % 2]) for token in range(16)]
    write(tmp_path / "log.jsonl", [*WARM_UP[:alike], *rows])
    trace = import_trace(tmp_path / "log.jsonl", "routelog")
    (sequence,) = trace.sequences
    assert len(sequence.prompt_ids) + len(sequence.decode_ids) == alike - warm_up + 16
    assert trace.provenance.settings.get("left_out", {"rows of warm-up": 0}) == {"rows of warm-up": warm_up}


@pytest.mark.parametrize(("names", "tokens"), [(("a",), 15), (("a", "b"), 20)])
def test_rows_of_few_tokens_or_of_several_requests_that_are_alike_are_no_warm_up(tmp_path, names, tokens):
    rows = [route(name, token, 0, [1, 2]) for name in names for token in range(tokens)]
    write(tmp_path / "log.jsonl", [*rows, *(route(name, tokens, 0, [3, 4]) for name in names)])
    assert len(import_trace(tmp_path / "log.jsonl", "routelog").step) == len(names) * (tokens + 1)


NAMES, ONE = "layer_id,token_id,expert_0\n", "layer_id,token_id,expert_0\n0,0,"
LACKING: dict[str, list[tuple[str, str]]] = {
    **{kind: [(jsonl({"x": 1}), rf"cannot be read as a {kind} recording \(KeyError")] for kind in ("vllm", "lattice")},
    "expert-selection": [
        ("[]", "has none"),
        (json.dumps([forward([1]), {"0": None, "1": [[1, 2]]}]), "pass 1 has layers"),
        ('[{"1": [[1, 2], [1]]}]', "cannot be read"),
        ('[{"1": [[1.5]]}]', "whole ids"),
        ('[{"1": [1]}]', r"\[tokens\]\[k\]"),
        ('{"1": []}', "cannot be read"),
    ],
    "dynande": [
        ("", r"must begin with a line of names that has layer_id, token_id, expert_\\d\+, got ''"),
        ("layer_id,token_id\n", r"has expert_\\d\+, got 'layer_id,token_id'"),
        (NAMES, "must have 1 to"),
        (f"{NAMES}0,0\n", "Expected 3 columns, got 2"),
        (f"{ONE}x\n", "conversion error"),
        (f"{ONE}\n", "without a gap"),
        (f"{ONE}nan\n", "without a gap"),
        (f"{ONE}inf\n", "finite scores"),
        (f"{ONE}-1\n", "at least 0"),
        (f"{ONE}0\n", r"as many experts above 0 in every row, got 0\.\.0"),
        (
            "layer_id,token_id,expert_0,expert_1\n0,0,1,1\n0,1,1,0\n",
            r"as many experts above 0 in every row, got 1\.\.2",
        ),
    ],
    "moe-trace": [
        ("", r"must begin with a line of names that has phase, layer, token_idx, e\\d\+, got ''"),
        ("a,b\n1,2\n", "must begin with a line of names that has phase"),
        (HEADER, "must have 1 to"),
        (HEADER + "decode,1,0,0,x,1\n", "conversion error"),
        (HEADER + "decode,1,0,0,1\n", "Expected 6 columns, got 5"),
        (HEADER + "decode,1,0,1,1,2\n", "must begin with token 0 of layer 0, got 1 of layer 0"),
        (HEADER + "decode,1,0,0,1,2\ndecode,1,1,0,1,2\ndecode,1,0,0,3,4\n", "pass 2' has no row of token 0 in layer 1"),
    ],
    "routelog": [
        (jsonl(*steps([2, 2]), *steps([2, 1], layer=3)), "layers 0 and 3 were logged in steps of different sizes"),
        (jsonl(*steps([3, 2, 1])), "no two steps have the same number of rows"),
        ("", 'holds no row of {"type": "route"}'),
        (jsonl(*ROWS[:-1]), "request 'b' has no row of token 2 in layer 1"),
        (jsonl(*(row for row in ROWS if row["token_idx"] != 1)), "has no row of token 1"),
        (jsonl(*ROWS, route("a", 3, 0, [1])), "line 13 has 1 experts where rows before have 2 experts a token"),
        (jsonl(route("a", 0, 0, [1, 1])), "line 1 chooses an expert twice"),
        (jsonl(route("a", 0, 0, [1, 2], [1.0])), "a weight for each of 2 experts"),
        (jsonl(route("a", -1, 0, [1])), "whole token_idx of at least 0, got -1"),
        (jsonl(route("a", 0, 0, [])), "must have topk_ids"),
        (jsonl([1]), "must be a JSON object, got list"),
    ],
}


@pytest.mark.parametrize(("kind", "text", "says"), [(kind, *case) for kind, cases in LACKING.items() for case in cases])
def test_a_recording_that_lacks_something_is_refused_in_one_sentence(tmp_path, kind, text, says):
    (tmp_path / "log").write_text(text)
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "log", kind)


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
