"""In bf16 the plugin is close to stock vLLM, not equal: cold experts round elsewhere. How close is measured here.

Tolerance on the log-probability of every token of a forced continuation, full-precision device: mean |d| <= 0.02 and
98th percentile <= 0.12. For scale: stock bf16 against transformers bf16 on this model has mean 0.015 and p99 0.09. With
AMX a near tie of a router fell the other way in two steps, and p99 was 0.24, though one expert's outputs are stock's.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import PROMPTS, engine, greedy

pytestmark = pytest.mark.vllm
TOKENS = 48


def logprobs(llm, prompts):  # type: ignore[no-untyped-def]
    """[prompt][token] log-probabilities of the greedy choices, and the choices."""
    outputs = greedy(llm, prompts, TOKENS, logprobs=5)
    return [
        [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs]
        for output in outputs
    ], [list(output.outputs[0].token_ids) for output in outputs]


def distances(mine, stock, my_ids, stock_ids):  # type: ignore[no-untyped-def]
    """|d| over the tokens in both top-5 lists, while both continuations are still the same."""
    found = []
    for a, b, ids_a, ids_b in zip(mine, stock, my_ids, stock_ids, strict=True):
        for step_a, step_b, id_a, id_b in zip(a, b, ids_a, ids_b, strict=True):
            found += [abs(step_a[token] - step_b[token]) for token in step_a.keys() & step_b.keys()]
            if id_a != id_b:
                break
    return np.array(found)


@pytest.fixture(scope="module")
def stock():  # type: ignore[no-untyped-def]
    with engine(dtype="bfloat16") as llm:
        return logprobs(llm, PROMPTS)


def test_bf16_logprobs_stay_close_to_stock_with_a_full_precision_device(stock) -> None:  # type: ignore[no-untyped-def]
    with engine(dtype="bfloat16", settings={"cold_precision": "full", "hot_experts": 2}) as llm:
        mine, my_ids = logprobs(llm, PROMPTS)
    distance = distances(mine, stock[0], my_ids, stock[1])
    assert len(distance) > 200
    assert distance.mean() <= 0.02
    assert np.quantile(distance, 0.98) <= 0.12


def test_all_experts_hot_is_stock_token_for_token_in_bf16(stock) -> None:  # type: ignore[no-untyped-def]
    with engine(dtype="bfloat16", settings={"hot_experts": 8}) as llm:
        mine, my_ids = logprobs(llm, PROMPTS)
    assert my_ids == stock[1]
    assert distances(mine, stock[0], my_ids, stock[1]).max() == 0
