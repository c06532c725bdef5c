"""A server's log-likelihoods, beside a stand-in that speaks HTTP: of a model whose tokens depend on the one before."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from paths import MODEL

from ndp_device.common.errors import ConfigError
from vllm_ndp.operating.server import FORCED, ScoringServer

LONGEST = 12
TOKENS = [1, 5, 3, 9, 2, 7, 4]


def logprob(before: int, token: int) -> float:
    return -(1 + (before * 7 + token * 3) % 11) / 4


def best(before: int) -> int:
    return max(range(11), key=lambda token: logprob(before, token))


class StandIn(ThreadingHTTPServer):
    """asked: path, key and body of each request. answer: in place of a completion."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, str | None, Any]] = []
        self.answer: tuple[int, bytes] | None = None

    def completed(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, forced = body["prompt"], body.get("vllm_xargs", {}).get(FORCED, [])
        tokens = prompt + forced
        chosen = [logprob(*tokens[at - 1 : at + 1]) for at in range(len(prompt), len(tokens))]
        tops = [{"best": logprob(tokens[at - 1], best(tokens[at - 1]))} for at in range(len(prompt), len(tokens))]
        choice: dict[str, Any] = {"text": "said", "token_ids": forced}
        choice["logprobs"] = {"token_logprobs": chosen, "top_logprobs": tops}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": logprob(before, token), "rank": 1 if token == best(before) else 2}}
                for before, token in pairwise(prompt)
            ]
        return {"choices": [choice], "kv_transfer_params": {"ndp": {"cold_pairs": 3, "hot_pairs": 2, "steps": 9}}}


class Answering(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        status, said, body = 200, b"", None
        if size := int(self.headers.get("Content-Length", 0)):
            body = json.loads(self.rfile.read(size))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        if body is None:
            said = json.dumps({"data": [{"id": "m", "root": str(MODEL), "max_model_len": LONGEST}]}).encode()
        elif self.server.answer is not None:
            status, said = self.server.answer
        elif len(body["prompt"]) + body["max_tokens"] > LONGEST:
            status, said = 400, b"too long"
        else:
            said = json.dumps(self.server.completed(body)).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(said)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("decode_from", range(1, len(TOKENS)))
@pytest.mark.parametrize("scored_from", range(1, len(TOKENS)))
def test_every_token_is_scored_once_and_those_past_the_first_forced_one_are_decodes(
    stand_in: StandIn, decode_from: int, scored_from: int
) -> None:
    scored = ScoringServer(stand_in.url).score(TOKENS, decode_from, scored_from)
    wanted = range(scored_from, len(TOKENS))
    assert scored.logprobs == tuple(logprob(TOKENS[at - 1], TOKENS[at]) for at in wanted)
    assert scored.num_decoded == sum(at > decode_from for at in wanted)
    assert scored.pairs == {"cold_pairs": 3, "hot_pairs": 2}
    body = stand_in.asked[-1][2]
    assert (body["prompt"], body["max_tokens"]) == (TOKENS[:decode_from], len(TOKENS) - decode_from)
    assert (body["temperature"], body["ignore_eos"]) == (0, True)


@pytest.mark.parametrize("odd", [None, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("decode_from", [1, 3, 5])
def test_greedy_is_every_scored_token_being_the_best_and_no_other(
    stand_in: StandIn, odd: int | None, decode_from: int
) -> None:
    tokens = [1]
    for at in range(1, 6):
        tokens.append(best(tokens[-1]) if at != odd else (best(tokens[-1]) + 1) % 11)
    scored = ScoringServer(stand_in.url).score(tokens, decode_from, 2)
    assert scored.greedy == (odd in (None, 1))


def test_a_key_goes_to_paths_below_v1_alone_and_the_address_may_end_in_it(stand_in: StandIn) -> None:
    server = ScoringServer(stand_in.url + "/v1/", "secret")
    server.json("/metrics")
    assert [asked[:2] for asked in stand_in.asked] == [("/v1/models", "Bearer secret"), ("/metrics", None)]
    assert (server.name, server.model, server.root, server.max_length) == (stand_in.url, "m", str(MODEL), LONGEST)


@pytest.mark.parametrize(
    ("status", "said", "sentence"),
    [
        (401, b"{}", "wants its key: give --api-key"),
        (403, b"{}", "wants its key"),
        (400, b'{"error": {"message": "too long"}}', r"answers 400 \(too long\): is this the address"),
        (404, b"no  such\npage", r"answers 404 \(no such page\)"),
        (500, b"", r"answers 500 \(Internal Server Error\)"),
        (200, b"<html>", "answers no JSON"),
        (200, b'{"choices": [{"token_ids": [2, 8]}]}', "was to generate 2 given tokens and generated others"),
    ],
)
def test_what_a_server_refuses_is_one_sentence(stand_in: StandIn, status: int, said: bytes, sentence: str) -> None:
    server, stand_in.answer = ScoringServer(stand_in.url), (status, said)
    with pytest.raises(ConfigError, match=sentence):
        server.score([1, 2, 3], 1, 1)


# -- as lm-eval asks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def model_of(stand_in: StandIn) -> Any:
    pytest.importorskip("lm_eval")
    from vllm_ndp.operating.lm_eval_model import NdpServer

    return lambda **options: NdpServer(ScoringServer(stand_in.url), **options)


@pytest.mark.parametrize(("decode_from", "begins"), [(None, 3), (2, 2), (9, 3)])
def test_every_token_of_a_continuation_is_decodes(
    model_of: Any, stand_in: StandIn, decode_from: int | None, begins: int
) -> None:
    model = model_of(decode_from=decode_from)
    ((total, greedy),) = model._loglikelihood_tokens([(None, TOKENS[:4], TOKENS[4:])])
    assert total == pytest.approx(sum(logprob(TOKENS[at - 1], TOKENS[at]) for at in (4, 5, 6)))
    assert not greedy
    assert model.counts == {"decode_scored": 3, "prompt_scored": 0, "cold_pairs": 3, "hot_pairs": 2}
    assert stand_in.asked[-1][2]["prompt"] == TOKENS[:begins]


def test_a_long_context_loses_its_beginning_and_a_continuation_needs_one_token_of_it(
    model_of: Any, stand_in: StandIn
) -> None:
    model = model_of()
    model._loglikelihood_tokens([(None, [8] * LONGEST + [9], [2, 7])])
    assert stand_in.asked[-1][2]["prompt"] == [8] * (LONGEST - 3)
    model._loglikelihood_tokens([(None, [8, 9], [2] * (LONGEST - 1))])
    assert stand_in.asked[-1][2]["prompt"] == [9]
    with pytest.raises(ConfigError, match=f"a continuation of {LONGEST} tokens leaves no room"):
        model._loglikelihood_tokens([(None, [8, 9], [2] * LONGEST)])


@pytest.mark.parametrize("length", [3, LONGEST - 1, LONGEST, 40])
@pytest.mark.parametrize("decode_from", [1, 4, LONGEST - 2])
def test_every_token_of_a_document_is_scored_once_and_only_its_beginning_as_a_prompt(
    model_of: Any, monkeypatch: pytest.MonkeyPatch, length: int, decode_from: int
) -> None:
    model = model_of(decode_from=decode_from, concurrent=2)
    document = [(at * at + 3) % 11 for at in range(length)]
    monkeypatch.setattr(model, "tok_encode", lambda text, **_: document)
    totals = model.loglikelihood_rolling([SimpleNamespace(args=("text",))] * 2)
    tokens = [model.prefix_token_id, *document]
    by_hand = math.fsum(logprob(*pair) for pair in pairwise(tokens))
    assert totals == pytest.approx([by_hand] * 2)
    assert model.counts["prompt_scored"] == 2 * min(decode_from, length)
    assert model.counts["prompt_scored"] + model.counts["decode_scored"] == 2 * length


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"until": "\n", "max_gen_toks": 4}, {"stop": ["\n"], "max_tokens": 4, "temperature": 0}),
        ({"max_gen_toks": 4, "do_sample": False, "temperature": 0.7}, {"stop": [], "temperature": 0}),
        ({"max_gen_toks": 4, "temperature": 0.7, "top_p": 0.9, "other": 1}, {"temperature": 0.7, "top_p": 0.9}),
    ],
)
def test_what_is_generated_has_room_and_is_sampled_as_the_task_asks(
    model_of: Any, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], sent: dict[str, Any]
) -> None:
    model = model_of()
    monkeypatch.setattr(model, "tok_encode", lambda text, **_: list(range(30)))
    assert model.generate_until([SimpleNamespace(args=("text", given))]) == ["said"]
    body = stand_in.asked[-1][2]
    assert body["prompt"] == list(range(30 - (LONGEST - 4), 30))
    assert body.keys() <= {"model", "prompt", "max_tokens", "stop", "temperature", "top_p"}
    assert {name: body[name] for name in sent} == sent


@pytest.mark.parametrize("decode_from", [0, LONGEST])
def test_decode_that_begins_nowhere_in_a_context_is_refused(model_of: Any, decode_from: int) -> None:
    with pytest.raises(ConfigError, match=f"must be between 1 and {LONGEST - 1}, got {decode_from}"):
        model_of(decode_from=decode_from)


def test_metrics_that_are_no_numbers_are_none_and_their_filter_goes_without_a_name() -> None:
    pytest.importorskip("lm_eval")
    from vllm_ndp.operating.lm_eval_model import _plain

    found = _plain({"alias": "x", " ": 1, "acc,none": 0.5, "acc,strict": 1, "err,none": "N/A", "ppl": math.inf})
    assert found == {" ": 1, "acc": 0.5, "acc,strict": 1, "err": None, "ppl": None}
