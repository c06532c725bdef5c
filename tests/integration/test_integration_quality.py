"""A served request loses on held-out text what the quality benchmark's own forward says it loses, and lm-eval sees it.

One server; the engine that the benchmark starts in this process gives the figures to compare with.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import (
    MODEL,
    NDP_PROGRAM,
    ROOT,
    engine,
    free_port,
    greedy,
    last_json,
    run_program,
    token_ids,
    user_environment,
)
from numpy.typing import NDArray
from served_model import serving

from ndp_device.calibration.build import build_data_free
from ndp_device.common.errors import ConfigError
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.operating import server as scoring
from vllm_ndp.planning.importance import ImportanceScore

pytestmark = pytest.mark.vllm

PROMPT_TOKENS = 256
PROCESSOR = ("--logits-processors", scoring.PROCESSOR)
TASKS = ROOT / "examples" / "lm_eval_tasks"


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replicas")
    build_data_free(MODEL, directory, show_progress=False)
    return directory


@pytest.fixture(scope="module")
def settings(replicas: Path) -> dict[str, Any]:
    deadline_ms = 60_000.0  # as the benchmark's: a late answer is computed in full precision
    return {
        "avg_bits": 1.5,
        "hot_experts": 2,
        "replicas": str(replicas),
        "hardware": "h100-ndp512",  # its prices: two engines decide alike
        "deadline_ms": deadline_ms,
    }


@pytest.fixture(scope="module")
def measured(replicas: Path, settings: dict[str, Any]) -> Any:
    """Sequences, the benchmark's own forward of them, and what the engine in this process says: (tokens, nll, nll)."""
    import quality
    import torch

    held_out = quality.held_out_sequences(MODEL, 1)
    sequences = torch.cat([held_out["german"], held_out["python"]])
    model = quality.MixedModel(MODEL, ExpertStore(MODEL, replicas, kernel=NativeKernel()))
    prompts, losses = model.prefill(sequences), quality.loss_tables(replicas)
    nobody = ImportanceScore.from_weights(np.ones(prompts[0].counts.shape))
    cells = (quality.Cell(1.5, 2, rule, "prefill") for rule in ("pairs", "layers"))
    harness, by_expert = (
        model.decode(*quality.stacked([quality.plan_of(cell, prompt, prompt, nobody, losses) for prompt in prompts]))
        for cell in cells
    )
    assert (np.abs(by_expert - harness) > 1e-2).all()  # widths by pair are felt as well
    full = model.decode(None)
    assert (harness - full > 0.05).all()  # the bits are felt, so a plan that was not followed would show
    return sequences.tolist(), harness, served_nll(sequences.tolist(), settings), full


def served_nll(sequences: list[list[int]], settings: dict[str, Any]) -> NDArray[np.float64]:
    """Mean nll of each sequence where its prompt is given and the rest is forced: every decode step runs the plugin's
    own plan, its hot slots and the device, and vLLM's raw log-probabilities are decode's. One request at a time: with
    several, they would share one hot set."""
    from vllm_ndp.integration.forced_tokens import ForcedTokens

    nll = []
    options = {"logits_processors": [ForcedTokens], "async_scheduling": False, "max_num_seqs": 1, "max_model_len": 1024}
    with engine(settings=settings, **options) as llm:
        for tokens in sequences:
            forced = tokens[PROMPT_TOKENS:]
            extra = {"logprobs": 0, "extra_args": {scoring.FORCED: forced}}
            (output,) = greedy(llm, [{"prompt_token_ids": tokens[:PROMPT_TOKENS]}], len(forced), **extra)
            assert token_ids([output]) == [forced]
            by_token = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, forced, strict=True)]
            nll.append(-np.mean(by_token[1:]))  # the first generated token is the prefill's
        (totals,) = llm.collective_rpc("ndp_totals")
    assert totals["cold_pairs"] > 0
    assert totals["fallback_pairs"] == 0
    return np.array(nll)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def server(settings: dict[str, Any], log: Path) -> Iterator[scoring.ScoringServer]:
    port = free_port()
    options = ["--disable-log-stats", *PROCESSOR, "--max-model-len", "1024", "--max-num-seqs", "4"]
    with serving(settings, options, port, user_environment(OMP_NUM_THREADS="1"), log):
        yield scoring.ScoringServer(f"http://127.0.0.1:{port}")


@pytest.mark.quality
def test_served_decode_nll_is_the_quality_benchmarks(measured: Any) -> None:
    """Forced tokens through the real engine and device process, two sequences at their own plans, in which pairs have
    widths of their own router weight. Beside float32 the device rounds activations to 8 bits, .003 nats here."""
    _, harness, through_engine, _ = measured
    np.testing.assert_allclose(through_engine, harness, atol=5e-3)


@pytest.mark.quality
def test_a_server_scores_tokens_on_decodes_precision_as_the_benchmark_does(
    measured: Any, server: scoring.ScoringServer
) -> None:
    """Through HTTP, with asynchronous scheduling: perplexity to 1e-4 of the benchmark's engine."""
    sequences, _, through_engine, full = measured
    for tokens, nll, full_nll in zip(sequences, through_engine, full, strict=True):
        scored = server.score(tokens, PROMPT_TOKENS, PROMPT_TOKENS + 1)
        mine = -math.fsum(scored.logprobs) / len(scored.logprobs)
        assert scored.num_decoded == len(scored.logprobs) == len(tokens) - PROMPT_TOKENS - 1
        assert scored.pairs["cold_pairs"] > 0
        assert scored.pairs["fallback_pairs"] == 0
        assert math.exp(mine) == pytest.approx(math.exp(nll), rel=1e-4)
        assert mine - full_nll > 0.05


@pytest.mark.quality
def test_a_server_says_at_its_start_that_so_few_bits_are_of_no_use(server: scoring.ScoringServer, log: Path) -> None:
    assert server.model  # it has started
    told = " ".join(log.read_text(errors="replace").replace("│", " ").split())
    assert "TOO FEW BITS" in told
    assert "1.5 bits on average are too few for useful answers" in told


@pytest.mark.quality
def test_what_is_scored_as_a_prompt_is_in_full_precision(measured: Any, server: scoring.ScoringServer) -> None:
    """A plain log-likelihood task would measure this: the same tokens, nothing lost."""
    sequences, _, _, full = measured
    for tokens, full_nll in zip(sequences, full, strict=True):
        scored = server.score(tokens, len(tokens) - 1, PROMPT_TOKENS + 1)
        assert scored.num_decoded == 0
        assert -math.fsum(scored.logprobs) / len(scored.logprobs) == pytest.approx(full_nll, rel=1e-4)


@pytest.mark.quality
def test_tokens_that_cannot_be_forced_are_refused_in_a_sentence(server: scoring.ScoringServer) -> None:
    """The server goes on after each."""
    with pytest.raises(ConfigError, match="was to generate 2 given tokens and generated others"):
        server.score([1, 5, 6, 99_999_999], 2, 3)
    body = {"model": server.model, "prompt": [1, 5], "max_tokens": 2, "vllm_xargs": {scoring.FORCED: "no list"}}
    with pytest.raises(ConfigError, match=r"answers 400 \(.*must be a list of token ids, got 'no list'"):
        server.json("/v1/completions", body)
    forced_then_free = server.json(
        "/v1/completions",
        {
            "model": server.model,
            "prompt": [1, 5],
            "max_tokens": 4,
            "ignore_eos": True,
            "return_token_ids": True,
            "vllm_xargs": {scoring.FORCED: [7, 8]},
        },
    )["choices"][0]["token_ids"]
    assert forced_then_free[:2] == [7, 8]
    assert len(forced_then_free) == 4


def test_the_parameter_has_one_name() -> None:
    from vllm_ndp.integration import forced_tokens

    assert f"{forced_tokens.__name__}:{forced_tokens.ForcedTokens.__name__}" == scoring.PROCESSOR


def test_forced_tokens_are_a_list_of_ids() -> None:
    from vllm import SamplingParams

    from vllm_ndp.integration.forced_tokens import ForcedTokens

    ForcedTokens.validate_params(SamplingParams())
    ForcedTokens.validate_params(SamplingParams(extra_args={scoring.FORCED: [7, 8]}))
    for tokens in ([], [True], "7"):
        with pytest.raises(ValueError, match="must be a list of token ids"):
            ForcedTokens.validate_params(SamplingParams(extra_args={scoring.FORCED: tokens}))


@pytest.mark.quality
def test_lm_eval_runs_tasks_on_decodes_precision(server: scoring.ScoringServer) -> None:
    """As a user starts it. Every token of the choices is scored by decode; of documents all but their beginnings."""
    tasks = ("--include", TASKS, "--limit", "6", "--concurrent", "3")
    done = run_program(
        *(NDP_PROGRAM, "lm-eval", server.name, "--tasks", "held_out_next,held_out_text", "--decode-from", "256", *tasks)
    )
    assert done.returncode == 0, done.stderr
    result = last_json(done.stdout)
    choices, texts = result["tasks"]["held_out_next"], result["tasks"]["held_out_text"]
    assert choices["acc"] > 0.5
    assert 1 < texts["byte_perplexity"] < 10
    assert texts["bits_per_byte"] == pytest.approx(math.log2(texts["byte_perplexity"]), rel=1e-6)
    assert result["cold_pairs"] > 0
    assert result["fallback_pairs"] == 0
    assert result["prompt_scored"] == 6 * 256

    from vllm_ndp.operating.lm_eval_model import NdpServer, evaluate

    model = NdpServer(server)
    context, choice = "def parse(line):\n    parts = line.", "split(',')\n"
    tokens = model._encode_pair(context, choice)
    ((logprob, _),) = model._loglikelihood_tokens([(None, *tokens)])
    by_hand = server.score([*tokens[0], *tokens[1]], len(tokens[0]) - 1, len(tokens[0]))
    assert model.counts["decode_scored"] == len(tokens[1])
    assert model.counts["prompt_scored"] == 0
    assert logprob == pytest.approx(math.fsum(by_hand.logprobs), rel=1e-5)  # its prompt comes from the prefix cache
    assert model.generate_until([_Asked(context, {"until": ["\n"], "max_gen_toks": 8})])[0].count("\n") == 0
    with pytest.raises(ConfigError, match="knows no task 'no_such_task'"):
        evaluate(model, ["no_such_task"])
    with pytest.raises(ConfigError, match="give --decode-from"):
        model.loglikelihood_rolling([_Asked("text")])


class _Asked:
    """What lm-eval hands over."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def test_lm_eval_says_what_is_missing() -> None:
    """Before it reads a thousand files of tasks."""
    done = run_program(NDP_PROGRAM, "lm-eval", "http://127.0.0.1:9", "--tasks", "held_out_next")
    assert done.returncode == 2
    assert "no server answers at http://127.0.0.1:9" in done.stderr
