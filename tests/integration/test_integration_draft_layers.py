"""Drafts with layers of their own (EAGLE, EAGLE-3, Medusa, MTP): tokens and accepted drafts are those of stock."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_family_models
import pytest
from draft_layers import add_mtp, make_head
from engines import PROMPTS, engine, greedy, latent_attention, token_ids
from paths import ROOT

from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.common.errors import ConfigError

pytestmark = pytest.mark.vllm

TRAINED = ROOT / "models" / "tiny-qwen3-moe"
GUESSED = 2
"""Tokens a step."""
TOKENS = 24
COUNTED = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


@dataclass(frozen=True)
class Drafted:
    """A model and how it drafts."""

    model: Path
    speculative_config: dict[str, Any]


@dataclass(frozen=True)
class Run:
    tokens: list[list[int]]
    counted: list[int]
    """Drafted and accepted tokens, as vLLM counts them."""
    reports: list[Any]
    status: dict[str, Any]
    totals: dict[str, Any]
    draft_slots: list[int]
    """How many experts vLLM holds in each MoE layer of the draft."""


def make_drafted(method: str, directory: Path) -> Drafted:
    if not method.startswith("mtp"):
        head = make_head(method, TRAINED, directory / method)
        return Drafted(TRAINED, {"method": method, "model": str(head), "num_speculative_tokens": GUESSED})
    family = method.removeprefix("mtp of ")
    model = add_mtp(make_family_models.make(family, directory / "families"), directory / family)
    return Drafted(model, {"method": "mtp", "num_speculative_tokens": GUESSED})


def draft_slots(worker: Any) -> list[int]:
    modules = worker.model_runner.drafter.model.modules()
    return [len(module.w13_weight) for module in modules if hasattr(module, "w13_weight")]


def run(drafted: Drafted, settings: dict[str, Any] | None, **options: Any) -> Run:
    drafts = drafted.speculative_config | latent_attention(drafted.model)
    options |= {"speculative_config": drafts, "disable_log_stats": False}
    with engine(drafted.model, settings=settings, **options) as llm:
        outputs = greedy(llm, [prompt * 4 for prompt in PROMPTS], TOKENS)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        is_ours = settings is not None
        return Run(
            tokens=token_ids(outputs),
            counted=[metrics[name].value for name in COUNTED],
            reports=[(output.kv_transfer_params or {}).get("ndp") for output in outputs],
            status=llm.collective_rpc("ndp_status")[0] if is_ours else {},
            totals=llm.collective_rpc("ndp_totals")[0] if is_ours else {},
            draft_slots=llm.collective_rpc(draft_slots)[0],
        )


LATER = pytest.mark.families
METHODS = [
    "mtp of deepseek_v3",
    *(pytest.param(one, marks=LATER) for one in ("eagle", "eagle3", "medusa", "mtp of glm4_moe")),
]


@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_accepted_drafts_are_stocks_reports_count_them_and_experts_of_the_draft_are_vllms(
    method: str, tmp_path: Path
):
    """Half of the experts are cold, and nothing is quantized. Reports say that the drafts' time is in no clock."""
    drafted = make_drafted(method, tmp_path)
    stock, ours = run(drafted, None), run(drafted, {"cold_precision": "full"})
    assert ours.tokens == stock.tokens
    assert ours.counted == stock.counted
    num_drafted, num_accepted = ours.counted
    assert 0 < num_accepted < num_drafted
    assert ours.totals["cold_pairs"] > 0
    assert ours.totals["sidecar_mismatches"] == ours.totals["fallback_pairs"] == 0
    assert ours.totals["simulated_ps"] is None

    assert sum(report["drafted_tokens"] for report in ours.reports) == num_drafted
    beyond_the_end = num_accepted - sum(report["accepted_drafts"] for report in ours.reports)
    assert 0 <= beyond_the_end <= GUESSED * len(ours.reports)
    for report in ours.reports:
        assert report["unsimulated"] == "the draft model's time"
        assert report["simulated_token_us"] is None

    shape = open_checkpoint(drafted.model).shape
    assert ours.status["moe_layers"] == shape.num_layers
    assert ours.draft_slots == stock.draft_slots
    assert set(ours.draft_slots) <= {shape.num_experts}
    own = drafted.speculative_config["method"]
    expected = f"{own}, up to {GUESSED} tokens a step; its layers are vLLM's, in full precision, and in no clock"
    assert ours.status["drafts"] == expected
    assert bool(ours.draft_slots) == (own == "mtp")


@pytest.mark.families
def test_drafts_of_a_model_with_states_are_stocks_without_a_prefix_cache_and_refused_with_one(tmp_path: Path):
    """Its MTP layer has the number of its first one. Stock copies cached states by a kernel of Triton's, on a CPU too.

    vLLM's CPU build runs such models in bfloat16 only, where tokens are compared with every expert hot.
    """
    drafted = make_drafted("mtp of qwen3_next", tmp_path)
    hot = {"cold_precision": "full", "hot_experts": open_checkpoint(drafted.model).shape.num_experts}
    stock, ours = (run(drafted, s, dtype="bfloat16", enable_prefix_caching=False) for s in (None, hot))
    assert (ours.tokens, ours.counted, ours.draft_slots) == (stock.tokens, stock.counted, stock.draft_slots)
    assert ours.counted[1] > 0
    assert ours.totals["sidecar_mismatches"] == 0
    with pytest.raises(TypeError, match="'function' object is not subscriptable"):
        run(drafted, None, dtype="bfloat16", enable_prefix_caching=True)
    with pytest.raises(ConfigError, match="by a kernel of Triton's: add --no-enable-prefix-caching"):
        run(drafted, hot, dtype="bfloat16", enable_prefix_caching=True)
