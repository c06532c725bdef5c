"""CSV that a fork of llama.cpp logs: its requests are found again; what no trace can hold is left out and said.

Rows repeat the shape of a real file, pmains/kimi-linear-48b-ssd-streaming's trace of Kimi-Linear-48B: a warm-up of two
tokens, and a last layer that the prompt ran through for its last token alone.
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


def kimi(phase: str, tokens: list[int]) -> list[str]:
    cells = [(layer, at, token) for layer in LAYERS for at, token in enumerate(tokens)]
    return [f"{phase},{len(tokens)},{n},{at}," + ",".join(map(str, choice(t, n))) for n, at, t in cells]


HEADER = "# phase,n_tokens,layer,token_idx,e0,e1\n"


def read(path, lines: list[str], settings: ImportSettings | None = None) -> Trace:
    path.write_text(HEADER + "\n".join(lines) + "\n")
    return import_trace(path, "moe-trace", settings)


def test_a_prompt_in_parts_and_its_decode_are_one_request(tmp_path):
    trace = read(tmp_path / "run.csv", [line for each in passes() for line in kimi(*each)])
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


def test_decode_alone_is_cut_into_sequences(tmp_path):
    lines = [line for _, tokens in passes((), 6) for line in kimi("decode", tokens)]
    trace = read(tmp_path / "t.csv", lines, settings=ImportSettings(sequence_len=3, prompt_len=1))
    assert trace.sequences[1].prompt_ids.tolist() == [[choice(3, layer) for layer in LAYERS]]
    assert len(trace.sequences) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"must begin with a line of names that has phase, layer, token_idx, e\\d\+, got ''"),
        ("a,b\n1,2\n", "must begin with a line of names that has phase"),
        (HEADER, "must have 1 to"),
        (HEADER + "decode,1,0,0,x,1\n", "conversion error"),
        (HEADER + "decode,1,0,0,1\n", "Expected 6 columns, got 5"),
        (HEADER + "decode,1,0,1,1,2\n", "must begin with token 0 of layer 0, got 1 of layer 0"),
        (HEADER + "decode,1,0,0,1,2\ndecode,1,1,0,1,2\ndecode,1,0,0,3,4\n", "pass 2' has no row of token 0 in layer 1"),
    ],
)
def test_a_csv_that_lacks_something_is_refused_in_one_sentence(tmp_path, text, says):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "bad.csv", "moe-trace")
