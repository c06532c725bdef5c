"""The counts a policy sees are those of one uncached pass, whatever vLLM's scheduler did to the prompt.

Oracle: the router of transformers' own forward pass over the whole prompt, fp32. One engine with a 48-token budget and
a KV cache too small for the batch, so that chunked prefill, prefix-cache hits and preemption all happen.
"""

import numpy as np
import pytest
from engines import MODEL, engine, greedy

from vllm_ndp.planning.importance import ImportanceScore, importance
from vllm_ndp.planning.policies import POLICIES, ScoredPolicy
from vllm_ndp.planning.stats import RoutingStats

pytestmark = pytest.mark.vllm

PROMPTS = [
    "def parse(line):\n    parts = line.split(',')\n    return [p.strip() for p in parts if p]\n" * 3,
    "static int cmp(const void *a, const void *b)\n{\n    return *(int *)a - *(int *)b;\n}\n" * 3,
    "It was a truth universally acknowledged that the weather in the country was seldom to be trusted. " * 3,
    "Wählen Sie Einfügen und dann Eigenschaften, um die Größe des Objekts zu ändern. " * 3,
    "The CREATE INDEX command builds an index on the named columns of the given table. " * 3,
    '<rect x="3" y="4" width="20" height="10" style="fill:#eeeeec"/>\n' * 4,
]
TOKENS = 24


SEEN: list[RoutingStats] = []
"""What the policy was given, in the order in which prefills ended."""


class Noting(ScoredPolicy):
    """The paper's policy, which notes what it is given of whole prompts (not of one layer: that is a prediction)."""

    def score(self, stats: RoutingStats) -> ImportanceScore:
        if stats.num_layers > 1:
            SEEN.append(stats)
        return super().score(stats)


@pytest.fixture(scope="module")
def llm():  # type: ignore[no-untyped-def]
    POLICIES["noting"] = lambda told: Noting("noting", lambda stats, _: importance(stats), told)
    settings = {"cold_precision": "full", "hot_experts": 3, "policy": "noting"}
    blocks = 20 * 32 * 2048  # 20 of 32 tokens; the batch needs about 30
    with engine(settings=settings, max_num_batched_tokens=48, max_num_seqs=6, kv_cache_memory_bytes=blocks) as made:
        yield made
    del POLICIES["noting"]


@pytest.fixture(scope="module")
def oracle():  # type: ignore[no-untyped-def]
    """token ids -> (counts [L, E], scores [L, E]) from one uncached pass of another implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def stats(token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
        counts, scores = [], []
        for layer in logits:
            chosen, ids = torch.softmax(layer.float(), dim=-1).topk(2, dim=-1)
            weights = chosen / chosen.sum(-1, keepdim=True)
            counts.append(np.bincount(ids.flatten().numpy(), minlength=8))
            scores.append(np.bincount(ids.flatten().numpy(), weights.flatten().double().numpy(), minlength=8))
        return np.stack(counts), np.stack(scores)

    return stats


def run(llm, prompts, tokens=TOKENS):  # type: ignore[no-untyped-def]
    """Generate and return (outputs, stats in the order the prefills ended)."""
    SEEN.clear()
    return greedy(llm, prompts, tokens), list(SEEN)


def assert_same(stats, expected) -> None:  # type: ignore[no-untyped-def]
    counts, scores = expected
    np.testing.assert_array_equal(stats.counts, counts)
    np.testing.assert_allclose(stats.scores, scores, rtol=0, atol=1e-3)


def test_chunked_prefill_gives_the_counts_of_one_pass(llm, oracle) -> None:  # type: ignore[no-untyped-def]
    llm.reset_prefix_cache()
    outputs, seen = run(llm, PROMPTS[:1])
    assert len(outputs[0].prompt_token_ids) > 48, "the prompt must need several chunks"
    assert len(seen) == 1
    assert_same(seen[0], oracle(list(outputs[0].prompt_token_ids)))


def test_prefix_cache_hits_give_the_counts_of_one_pass(llm, oracle) -> None:  # type: ignore[no-untyped-def]
    """The second prompt shares two blocks with the first; the third continues into what the first one decoded."""
    llm.reset_prefix_cache()
    first, _ = run(llm, PROMPTS[1:2])
    ids = list(first[0].prompt_token_ids)
    second, seen = run(llm, [{"prompt_token_ids": [*ids[:70], *ids[:20]]}])
    assert second[0].num_cached_tokens >= 64
    assert_same(seen[0], oracle([*ids[:70], *ids[:20]]))
    turn = [*ids, *first[0].outputs[0].token_ids]
    third, seen = run(llm, [{"prompt_token_ids": [*turn, *ids[:9]]}])
    assert third[0].num_cached_tokens > len(ids) // 32 * 32 - 1
    assert_same(seen[0], oracle([*turn, *ids[:9]]))


def test_preemption_gives_the_counts_of_one_pass_and_the_tokens_of_an_undisturbed_run(llm, oracle) -> None:  # type: ignore[no-untyped-def]
    llm.reset_prefix_cache()
    alone = [run(llm, [prompt], 96)[0][0].outputs[0].token_ids for prompt in PROMPTS]
    llm.reset_prefix_cache()
    before = llm.collective_rpc("ndp_totals")[0]["preempted"]
    outputs, seen = run(llm, PROMPTS, 96)
    totals = llm.collective_rpc("ndp_totals")[0]
    assert totals["preempted"] > before, "the KV cache was meant to be too small"
    assert [output.outputs[0].token_ids for output in outputs] == alone
    expected = [oracle(list(output.prompt_token_ids)) for output in outputs]
    assert len(seen) == len(PROMPTS), "a prompt is scored once, however often it is recomputed"
    for stats in seen:
        matches = [i for i, (counts, _) in enumerate(expected) if np.array_equal(counts, stats.counts)]
        assert len(matches) == 1
        assert_same(stats, expected[matches[0]])
    assert totals["sidecar_mismatches"] == 0
    assert totals["row_checks"] == totals["steps"]
