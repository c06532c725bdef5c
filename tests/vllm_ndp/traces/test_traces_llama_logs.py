"""CSV that llama.cpp's forks log: every layout gives the same requests; what no trace can hold is left out and said.

Layouts are as the loggers' sources write them: ggml-org/llama.cpp pull request 28544, Cartaz/llama.cpp-vulkan-moe,
thecodacus/llama.cpp. `kimi` repeats the shape of a real file, pmains/kimi-linear-48b-ssd-streaming's trace of
Kimi-Linear-48B: a warm-up of two tokens, and a last layer that the prompt ran through for its last token alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ndp_device.common.errors import TraceError
from vllm_ndp.traces.importers import ImportSettings, import_trace
from vllm_ndp.traces.trace import Trace

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


def bare(phase: str, tokens: list[int]) -> list[str]:
    return [f"{layer},{expert}" for layer in LAYERS for token in tokens for expert in choice(token, layer)]


def ranked(phase: str, tokens: list[int]) -> list[str]:
    cells = [(layer, token) for layer in LAYERS for token in tokens]
    return [f"{phase},{t},{layer},{rank},{e}" for layer, t in cells for rank, e in enumerate(choice(t, layer))]


def by_position(phase: str, tokens: list[int]) -> list[str]:
    sign = -1 if phase == "prefill" else 1
    cells = [(layer, token) for layer in LAYERS for token in tokens]
    return [f"{sign * (token + 1)},{layer}," + ",".join(map(str, choice(token, layer))) for layer, token in cells]


def kimi(phase: str, tokens: list[int]) -> list[str]:
    cells = [(layer, at, token) for layer in LAYERS for at, token in enumerate(tokens)]
    return [f"{phase},{len(tokens)},{n},{at}," + ",".join(map(str, choice(t, n))) for n, at, t in cells]


LAYOUTS = {
    "bare": (bare, ""),
    "bare with a header": (bare, "layer,expert\n"),
    "ranked": (ranked, "phase,token,layer,rank,expert\n"),
    "by position": (by_position, ""),
    "kimi": (kimi, "# phase,n_tokens,layer,token_idx,e0,e1\n"),
}


def read(path, lines: list[str], header: str = "", settings: ImportSettings | None = None) -> Trace:
    path.write_text(header + "\n".join(lines) + "\n")
    return import_trace(path, "moe-trace", settings)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_prompt_in_parts_and_its_decode_are_one_request_in_every_layout(tmp_path, name):
    write, header = LAYOUTS[name]
    trace = read(tmp_path / "run.csv", [line for each in passes() for line in write(*each)], header)
    (request,) = trace.sequences
    assert request.prompt_ids.tolist() == [[choice(token, layer) for layer in LAYERS] for token in range(7)]
    assert request.decode_ids.tolist() == [[choice(token, layer) for layer in LAYERS] for token in (7, 8)]
    assert "left_out" not in trace.provenance.settings


def test_files_joined_by_cat_are_requests_of_their_own(tmp_path):
    lines = [line for each in [*passes((3,)), *passes((2,), 1)] for line in by_position(*each)]
    found = [(len(s.prompt_ids), len(s.decode_ids)) for s in read(tmp_path / "two.csv", lines).sequences]
    assert found == [(3, 2), (2, 1)]


def test_a_warm_up_and_a_last_layer_of_the_prompts_last_token_are_left_out_and_said(tmp_path):
    def logged(phase: str, tokens: list[int]) -> list[str]:
        return [line for line in kimi(phase, tokens) if phase == "decode" or line.split(",")[2:4] < ["5", "1"]]

    lines = [line for each in [("prefill", [0, 1]), *passes((4,))] for line in logged(*each)]
    trace = read(tmp_path / "run.csv", lines, LAYOUTS["kimi"][1])
    (request,) = trace.sequences
    assert request.prompt_ids.tolist() == [[choice(token, layer) for layer in (1, 2)] for token in range(4)]
    assert len(request.decode_ids) == 2
    assert trace.provenance.settings["left_out"] == {
        "rows of layer 5, through which a prompt ran for its last token alone": 1 + 1 + 2,
        "rows of warm-up": 2 * 2,
    }


def test_a_prompt_that_was_read_as_the_ranking_of_its_first_token_is_left_out_and_said(tmp_path):
    """The k best of each token are a view with gaps. Tools that read it without them log the first token's ranking."""
    lines = [f"{layer},{expert}" for layer in LAYERS for expert in range(8)]
    lines += [line for _, tokens in passes((), 3) for line in bare("decode", tokens)]
    trace = read(tmp_path / "run.csv", lines)
    (request,) = trace.sequences
    assert (len(request.prompt_ids), len(request.decode_ids)) == (0, 3)
    assert list(trace.provenance.settings["left_out"].items()) == [
        ("rows of prompts that were logged as the ranking of one token", 4 * len(LAYERS))
    ]


def test_decode_alone_is_cut_into_sequences(tmp_path):
    lines = [line for _, tokens in passes((), 6) for line in bare("", tokens)]
    trace = read(tmp_path / "t.csv", lines, settings=ImportSettings(sequence_len=3, prompt_len=1))
    assert trace.sequences[1].prompt_ids.tolist() == [[choice(3, layer) for layer in LAYERS]]
    assert len(trace.sequences) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no row"),
        ("a,b\n1,2\n", "must begin with a header that has layer and expert"),
        ("layer,expert\n", "holds no row"),
        ("layer,expert\n0,x\n", "whole"),
        ("0,1\n0,2\n", "as 2 experts of each token, layer by layer"),
        ("0,1\n0,2\n1,1\n1,2\n0,3\n0,4\n1,5\n", "those from row 7 on do not"),
        ("0,1\n0,2\n1,1\n1,2\n0,3\n0,4\n", "pass 2 must have 1 tokens in layer 1 as in layer 0, got 0"),
        ("phase,layer,rank,expert\ndecode,0,-1,3\n", "as 0 experts of each token"),
    ],
)
def test_a_csv_that_lacks_something_is_refused_in_one_sentence(tmp_path, text, says):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "bad.csv", "moe-trace")
