"""A request's answer depends on the request: not on those that an idle server has answered before."""

import random
from typing import Any

import pytest
from engines import PROMPTS, REPLICAS, engine, greedy

pytestmark = pytest.mark.vllm

PAPER: dict[str, Any] = {"replicas": str(REPLICAS), "hot_experts": 4, "avg_bits": 3}
MORE = ("Once upon a time", "The weather in the north", "class Tree:\n    def", "Article 12. The parties " * 40)


@pytest.mark.parametrize(
    ("settings", "tokens", "eager"),
    [
        pytest.param(PAPER, 96, True, id="the paper's"),
        pytest.param(PAPER, 24, False, id="the paper's, compiled"),
        pytest.param({}, 24, True, id="nothing set"),
        pytest.param(PAPER | {"slot_bits": 4}, 48, True, id="narrow slots"),
        pytest.param(
            PAPER | {"prefill": "streamed", "hardware": "h100-ndp512"},
            48,
            True,
            id="no prompt on the device, which named hardware needs",
        ),
    ],
)
def test_an_answer_does_not_depend_on_earlier_requests(settings: dict[str, Any], tokens: int, eager: bool) -> None:
    """In bfloat16, where the order of sums shows. Prices are this machine's: a prompt alone decides its sides."""
    prompts = [*PROMPTS, *MORE]
    order = [*range(len(prompts)), *range(len(prompts))]
    random.Random(0).shuffle(order)
    answers: dict[int, set[tuple[int, ...]]] = {}
    options: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": False, "enforce_eager": eager}
    if not eager:
        options["compilation_config"] = {"backend": "eager"}  # traced and split as always; what differs is ours
    with engine(settings={"hardware": None} | settings, **options) as llm:
        for number in order:
            (done,) = greedy(llm, [prompts[number]], tokens)
            answers.setdefault(number, set()).add(tuple(done.outputs[0].token_ids))
        (totals,) = llm.collective_rpc("ndp_totals")
    if settings:  # otherwise every expert is in a slot, and nothing changes between requests
        assert totals["migrated_experts"] + totals["kept_experts"] > 0  # hot sets did change between requests
        assert totals["prefill_device_pairs" if settings.get("prefill") != "streamed" else "prefill_pairs"] > 0
    assert {number: len(found) for number, found in answers.items()} == dict.fromkeys(answers, 1)
