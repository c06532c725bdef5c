"""Synthetic traces carry the signal they were told to; foreign recordings are read as what they are."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from ndp_device.common.errors import ConfigError, TraceError
from vllm_ndp.cli.traces import trace_import
from vllm_ndp.planning.importance import importance
from vllm_ndp.planning.plan import top_experts
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.importers import FORMATS, ImportSettings, import_trace, trace_of
from vllm_ndp.traces.rows import Logged
from vllm_ndp.traces.synthetic import SyntheticSettings, read_routing, synthetic_trace
from vllm_ndp.traces.trace import Trace

L, E, K = 3, 16, 2


def coverage(trace: Trace, which: str) -> float:
    """Mean share of decode choices in the top half by the request's own prompt, or by everybody's."""
    ids, weights = (
        np.concatenate([getattr(s, f"prompt_{name}") for s in trace.sequences]) for name in ("ids", "weights")
    )
    merged = RoutingStats.from_choices(ids, weights, E)
    shares = []
    for sequence in trace.sequences:
        stats = trace.stats(sequence) if which == "prefill" else merged
        hot = top_experts(importance(stats).values, E // 2).hot
        decode = trace.stats(sequence, "decode").counts
        shares.append(decode[hot].sum() / decode.sum())
    return float(np.mean(shares))


def synthetic(**settings) -> Trace:
    return synthetic_trace(SyntheticSettings(num_layers=L, num_experts=E, top_k=K, num_requests=24, **settings))


def test_without_signal_the_prompt_knows_no_more_than_popularity():
    null = synthetic(signal=0.0, prompt_len=64)
    assert coverage(null, "prefill") <= coverage(null, "static")


def test_with_signal_the_prompt_beats_popularity():
    trace = synthetic(signal=1.5)
    assert coverage(trace, "prefill") > coverage(trace, "static") + 0.1


def test_drift_makes_the_prompt_worse_at_predicting_decode():
    still, drifting = synthetic(signal=1.5, drift=0.0), synthetic(signal=1.5, drift=1.0)
    assert coverage(drifting, "prefill") < coverage(still, "prefill") - 0.05


def shared(trace: Trace, first: int, second: int) -> float:
    """Mean share of choices that two tokens of a request have in common."""
    pairs = [np.concatenate([s.prompt_ids, s.decode_ids])[[first, second]] for s in trace.sequences]
    return float(np.mean([(a[..., None] == b[:, None]).any(axis=1) for a, b in pairs]))


def test_a_taste_that_has_turned_is_as_strong_as_it_was_and_another_one():
    """Without noise to speak of; chance is K of E."""
    trace = synthetic(signal=1e6, drift=1.0, prompt_len=50, decode_len=50)
    assert shared(trace, 0, 1) > 0.9
    assert shared(trace, 98, 99) > 0.9
    assert 0.4 * K / E < shared(trace, 0, 99) < 2 * K / E
    half = synthetic(signal=1e6, drift=0.5, prompt_len=50, decode_len=50)
    assert shared(half, 0, 99) == pytest.approx(shared(trace, 0, 50), abs=0.05)


def test_a_layer_without_strength_is_all_noise():
    """Neither popularity, which here has one favourite, nor taste."""
    trace = synthetic(signal=1e6, concentration=0.01, strength=(0.0, 1.0, 1.0), persistence=0.9)
    same = [(trace.ids[:-1, layer] == trace.ids[1:, layer]).mean() for layer in range(L)]
    assert same[0] < 2 / E
    assert min(same[1:]) > 0.9
    assert np.bincount(trace.ids[:, 0].ravel()).max() < 1.1 * trace.ids[:, 0].size / E


def test_taste_admits_its_share_of_experts_and_puts_the_others_three_deviations_lower():
    """All 8 experts are chosen, so that logarithms of their weights are their logits, but for the noise."""
    settings = SyntheticSettings(1, 8, 8, num_requests=8, prompt_len=2000, decode_len=0, concentration=1e9, reach=0.5)
    for sequence in synthetic_trace(settings).sequences:
        logs = np.log(np.maximum(sequence.prompt_weights, 1e-9))
        of_expert = np.take_along_axis(logs, sequence.prompt_ids.argsort(axis=2), axis=2)
        gaps = np.diff(np.sort(np.median(of_expert, axis=(0, 1))))
        assert int(gaps.argmax()) == 3
        assert gaps.max() > 2.7


def test_noise_is_a_gumbels_whether_it_is_remembered_or_not():
    """Its differences are logistic: variance pi^2 / 3. A token keeps `persistence` times `memory` of its Gaussian."""
    flat = {"num_requests": 4, "prompt_len": 3000, "decode_len": 0, "concentration": 1e9, "signal": 0.0}
    for persistence, memory in ((0.0, 0.0), (0.6, 0.5), (1.0, 0.9)):
        settings = SyntheticSettings(2, 2, 2, persistence=persistence, memory=memory, **flat)
        apart = []
        for sequence in synthetic_trace(settings).sequences:
            logs = np.take_along_axis(np.log(sequence.prompt_weights), sequence.prompt_ids.argsort(axis=2), axis=2)
            apart.append(logs[..., 0] - logs[..., 1])
        assert np.var(apart) == pytest.approx(np.pi**2 / 3, rel=0.08)
        kept = np.mean([np.corrcoef(one[:-1, layer], one[1:, layer])[0, 1] for one in apart for layer in (0, 1)])
        assert kept == pytest.approx(persistence * memory, abs=0.05)


def test_of_equal_logits_the_lower_expert_comes_first(monkeypatch):
    monkeypatch.setattr("vllm_ndp.traces.synthetic._GRID", 2.0**-20)  # so coarse that all are equal
    trace = synthetic(prompt_len=4, decode_len=0)
    assert (trace.ids == np.arange(K)).all()
    assert (trace.weights == 1 / K).all()


def test_a_synthetic_trace_says_what_it_was_made_of():
    trace = synthetic(signal=0.5, drift=0.25, prompt_len=7, decode_len=3, seed=9)
    assert trace.provenance.source == "synthetic"
    assert SyntheticSettings(**trace.provenance.settings) == SyntheticSettings(
        L, E, K, num_requests=24, signal=0.5, drift=0.25, prompt_len=7, decode_len=3, seed=9
    )
    assert [(len(s.prompt_ids), len(s.decode_ids)) for s in trace.sequences] == [(7, 3)] * 24


def test_only_a_trace_without_signal_and_persistence_is_called_null():
    labels = [synthetic(signal=s, persistence=p).labels[0] for s, p in ((0.0, 0.0), (0.0, 0.5), (1.0, 0.0))]
    assert labels == ["null", "synthetic", "synthetic"]


def test_a_routing_that_is_named_is_taken_whatever_the_model_and_so_are_sizes():
    names = [read_routing(name, "qwen3-30b-a3b").name for name in ("", "auto", "memoryless", "near-chance")]
    assert names == ["memoryless", "qwen3-30b-a3b", "memoryless", "near-chance"]
    given = read_routing("", "olmoe").settings("olmoe", num_experts=4, top_k=1)
    assert (given.num_experts, given.top_k, given.num_layers) == (4, 1, 16)


def test_smaller_concentration_is_more_skew():
    def largest(trace: Trace) -> float:
        counts = np.bincount(trace.ids.reshape(-1), minlength=E)
        return float(counts.max() / counts.sum())

    assert largest(synthetic(concentration=0.5, signal=0.0)) > largest(synthetic(concentration=50.0, signal=0.0))


def test_the_same_seed_gives_the_same_trace_and_another_one_does_not():
    assert (synthetic(seed=3).ids == synthetic(seed=3).ids).all()
    assert (synthetic(seed=3).ids != synthetic(seed=4).ids).any()


def test_router_weights_are_normalised_and_fall_with_rank():
    trace = synthetic()
    assert np.allclose(trace.weights.sum(axis=2), 1, atol=1e-6)
    assert (np.diff(trace.weights, axis=2) <= 0).all()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_requests": 10**12}, r"tokens times layers must be at most 67108864, got"),
        ({"prompt_len": 10**21}, r"tokens times layers must be at most 67108864, got"),
        ({"num_layers": 10**4}, r"tokens times layers must be at most 67108864, got 163840000"),
        ({"strength": (1.0, 1.0)}, "for each of 3 layers"),
        ({"strength": (1.0, -0.1, 1.0)}, "a number of at least 0 for each"),
        ({"strength": (0.1, 3.0, 0.1), "persistence": 0.5}, "strength times persistence must not exceed 1, got 3.0"),
        ({"memory": 1.0}, "memory must lie in"),
        ({"concentration": float("nan")}, "concentration must lie in"),
        ({"signal": float("inf")}, "signal must lie in"),
        ({"top_k": 20}, "top_k 20"),
    ],
)
def test_a_synthetic_trace_of_no_possible_size_or_number_is_refused(settings: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        SyntheticSettings(**{"num_layers": L, "num_experts": E, "top_k": K, **settings})


def routed(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((tokens, L, E)).argsort(axis=2)[:, :, :K]


def as_npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array.astype(np.int16))
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("usage", "ids"),
    [(True, ""), (False, "choice"), (True, "choice"), (False, "response"), (True, "first"), (False, "one answer")],
)
def test_vllm_responses_of_today_hold_prompt_and_output_in_one_array(tmp_path, usage, ids):
    """Two choices of a prompt of 5: 5 + 4 - 1 and 5 + 3 - 1 rows."""
    first, second = routed(8), routed(7, 1)
    choices: list[dict] = [{"routed_experts": as_npy(first)}, {"routed_experts": second.tolist()}]
    response: dict = {"id": "cmpl-1", "choices": choices}
    if usage:
        response["usage"] = {"prompt_tokens": 5, "completion_tokens": 7}
    where = {"": [], "first": choices[:1], "response": [response]}
    for told in where.get(ids, choices):
        told["prompt_token_ids"] = [1, 2, 3, 4, 5]
    if ids == "one answer":
        choices[0]["token_ids"] = [6, 7, 8, 9]
    (tmp_path / "r.jsonl").write_text(json.dumps(response))
    trace = import_trace(tmp_path / "r.jsonl", "vllm", ImportSettings(num_experts=E))
    assert (trace.labels, trace.prompt_len.tolist()) == (["cmpl-1"] * 2, [5, 5])
    assert (trace.sequences[0].prompt_ids == first[:5]).all()
    assert (trace.sequences[1].decode_ids == second[5:]).all()
    assert trace.provenance.weights == "uniform"
    assert (trace.weights == 0.5).all()


@pytest.mark.parametrize(
    ("response", "says"),
    [
        ({"choices": [{"routed_experts": as_npy(routed(8))}]}, "nothing says where its prompt ends"),
        (
            {
                "choices": [{"routed_experts": as_npy(routed(8))}, {"routed_experts": as_npy(routed(3))}],
                "usage": {"prompt_tokens": 5 + 2, "completion_tokens": 4 + 2},
            },
            "routing of 11 tokens where usage says 18: ask for one prompt per request",
        ),
        ({"choices": [{"routed_experts": None}], "usage": {}}, "--enable-return-routed-experts"),
        ({"choices": []}, "--enable-return-routed-experts"),
        ({"choices": [{"routed_experts": as_npy(routed(8))}, {}]}, "--enable-return-routed-experts"),
    ],
)
def test_vllm_responses_whose_prompts_cannot_be_told_are_refused(tmp_path, response, says):
    (tmp_path / "r.jsonl").write_text(json.dumps(response))
    with pytest.raises(TraceError, match=says):
        import_trace(tmp_path / "r.jsonl", "vllm")


def test_prime_rls_weights_are_read_though_one_of_them_is_zero(tmp_path):
    """Half of the numbers are bits of weights, and 0 may be an id as well."""
    ids, weights = routed(3), np.full((3, L, K), 0.5, np.float32)
    weights[1, 2, 1] = 0
    both = np.concatenate([ids.astype(np.int32), weights.view(np.int32)], axis=2)
    data = {"dtype": "int32", "shape": both.shape, "data": base64.b64encode(both.tobytes()).decode()}
    usage = {"prompt_tokens": 2, "completion_tokens": 2}
    (tmp_path / "r.jsonl").write_text(json.dumps({"choices": [{"routed_experts": data}], "usage": usage}))
    trace = import_trace(tmp_path / "r.jsonl", "vllm", ImportSettings(num_experts=E))
    assert (trace.ids == ids).all()
    assert (trace.weights == weights).all()


@pytest.mark.parametrize(("told", "prompts"), [({}, [3, 3]), ({"prompt_len": np.array([6, 0])}, [6, 0])])
def test_an_npz_may_tell_any_prompt_lengths_or_none(tmp_path, told, prompts):
    ids = np.stack([routed(6, seed) for seed in range(2)])
    np.savez(tmp_path / "t.npz", idx=ids, w=np.full(ids.shape, 0.5, np.float16), **told)
    trace = import_trace(tmp_path / "t.npz", "npz", ImportSettings(num_experts=E))
    assert ([len(s.prompt_ids) for s in trace.sequences], trace.labels) == (prompts, ["0", "0"])


@pytest.mark.parametrize("told", [[3, -1], [3]])
def test_prompt_lengths_of_an_npz_that_cannot_be_are_shown(tmp_path, told):
    ids = np.stack([routed(6, seed) for seed in range(2)])
    np.savez(tmp_path / "t.npz", idx=ids, w=np.full(ids.shape, 0.5, np.float16), prompt_len=np.array(told))
    with pytest.raises(TraceError, match=rf"must hold 2 whole numbers of tokens, got {re.escape(str(told))}"):
        import_trace(tmp_path / "t.npz", "npz", ImportSettings(num_experts=E))


@pytest.mark.parametrize("prompt_len", [0, 9, 10])
def test_sequences_that_are_cut_have_a_prompt_and_an_answer(prompt_len):
    with pytest.raises(TraceError, match=rf"prompt_len must lie in 1\.\.8, got {prompt_len}"):
        ImportSettings(sequence_len=9, prompt_len=prompt_len)


def test_our_npz_keeps_domains_and_prompt_lengths(tmp_path):
    ids = np.stack([routed(6, seed) for seed in range(3)])
    np.savez(
        tmp_path / "t.npz",
        experts=ids,
        weights=np.full(ids.shape, 0.5, np.float16),
        prompt_len=np.array([2, 4, 1]),
        domain=np.array([1, 0, 2]),
        domains=np.array(["c", "prose", ""]),
    )
    trace = import_trace(tmp_path / "t.npz", "npz", ImportSettings(num_experts=E))
    assert trace.labels == ["prose", "c", "2"]
    assert [len(s.prompt_ids) for s in trace.sequences] == [2, 4, 1]


@pytest.mark.parametrize("kind", list(FORMATS))
def test_a_file_of_another_kind_is_refused_in_one_sentence(tmp_path, kind):
    path = tmp_path / "foreign.jsonl"
    path.write_text("not what it should be\n")
    with pytest.raises(TraceError, match="foreign") as caught:
        import_trace(path, kind)
    assert "\n" not in str(caught.value)


def test_an_unknown_format_is_answered_with_the_nearest():
    with pytest.raises(TraceError, match="did you mean 'dynande'"):
        import_trace(Path("x"), "dynade")
    assert f"Formats: {', '.join(FORMATS)} (" in " ".join(str(trace_import.__doc__).split()), "the help has them all"


@pytest.mark.parametrize("tokens", [5, 511])
def test_too_few_tokens_for_one_sequence_say_how_many_are_needed(tokens):
    with pytest.raises(TraceError, match=f"takes 512 tokens, the recording has only {tokens}"):
        trace_of([Logged("", routed(tokens), None)], ImportSettings(num_experts=E), "x")
