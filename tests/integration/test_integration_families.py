"""Every family of Mixture-of-Experts models gives stock vLLM's tokens with nothing quantized and half its experts cold.

`make test-families` runs all and writes docs/measured/families.json, from which the table of docs/families.md is made;
test_integration_shared_experts.py always runs three. What vLLM's CPU build itself gets wrong is refused by name, and a
test here fails when vLLM gets it right.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import run_program
from family_tokens import PROMPT_COUNT, TOKENS, said
from paths import ROOT

torch = pytest.importorskip("torch")
import make_family_models  # noqa: E402

pytestmark = pytest.mark.vllm

MODELS_AT_ONCE = 6
TRAINED = ROOT / "models" / "tiny-qwen3-moe"

DENSE = (
    *("minicpmv", "pangu_embedded", "cosmos3_edge", "gemma4_unified", "glm4v", "minicpm3", "qwen3_5", "qwen3_5_vl"),
)
"""Their files in vLLM reach experts, which their published checkpoints have not."""

BIASED = ("ernie4_5_moe", "minimax_m2", "laguna", "longcat_flash", "minimax_m3", "step3p5", "minimax_m3_vl")

REFUSED = {
    "glm4_moe_lite": "vLLM's CPU build rotates its keys wrongly",
    "jamba": "lacks the operator of its Mamba layers",
    "nemotron_h": "no gate projection",
    "minicpm": "this model's layers do not go through vLLM's RoutedExperts",
    "dbrx": "no experts were found by the names that are known",
    "ernie4_5_vl_moe": "we serve one shape",
    "diffusion_gemma": "an encoder beside a decoder is not served",
    "openpangu_vl": "is a dense model",
    "interns2_mobius": "no experts were found by the names that are known",
    "moondream3": "one number of experts per token",
    "nemotron_nano_vl": "no gate projection",
}
REFUSED |= dict.fromkeys(DENSE, "is a dense model")
REFUSED |= dict.fromkeys(BIASED, "a score correction bias without groups, which vLLM's CPU router leaves out")

WITH_STAND_INS = {
    *("qwen3_5_moe", "qwen3_5_moe_vl", "glm4v_moe", "minicpmv4_6", "minicpmv4_7", "gemma4_vl", "llama4_vl"),
    *("aria", "qwen3_omni_moe", "diffusion_gemma", "openpangu_vl", "mimo_v2_omni", "kimi_k25", "interns2_preview"),
    *("interns2_mobius", "moondream3", "nemotron_nano_vl", "minimax_m3_vl", *DENSE),
}
"""vLLM's module of this family imports torchvision, which our set-up removes (docs/compatibility.md) and which its text
model does not use: stock and plugin run with an empty package of that name."""


def _families() -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.families)
        for name, family in make_family_models.FAMILIES.items()
        if name not in REFUSED and family.on_cpu
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny models are made; NDP_FAMILY_MODELS names a directory that keeps them."""
    kept = os.environ.get("NDP_FAMILY_MODELS")
    return Path(kept) if kept else tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, models: Path) -> Runs:
    """What each family that this run has a test of says."""
    names = selected(request, test_every_token_is_stocks, "family")
    return Runs({name: make_family_models.make(name, models) for name in names})


@pytest.fixture(scope="module")
def refusals(request: pytest.FixtureRequest, models: Path) -> Runs:
    names = selected(request, test_what_cannot_be_served_here_is_refused_by_name, "family")
    return Runs({name: make_family_models.make(name, models) for name in names}, "ndp")


class Runs:
    """What family_tokens.py says of each model: when it is asked for, of several together, since to import vLLM takes
    longer than to start a tiny model. So what is over is noted before the next ones begin."""

    def __init__(self, models: dict[str, Path], *words: str) -> None:
        self._models, self._words = models, words
        self._said: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._said:
            alone = name in WITH_STAND_INS
            names = [other for other in self._models if (other in WITH_STAND_INS) == alone]
            first = names.index(name) // MODELS_AT_ONCE * MODELS_AT_ONCE
            some = names[first : first + MODELS_AT_ONCE]
            if len(names) == 1 and not alone and "avx2" not in self._words:
                self._said[name] = said(self._models[name], *self._words)
                return self._said[name]
            stand_ins = {"PYTHONPATH": str(ROOT / "tests" / "integration" / "stand_ins")} if alone else {}
            words = ["family_tokens.py", *(self._models[one] for one in some), *self._words]
            done = run_program(sys.executable, *words, timeout_s=1800, cwd=Path(__file__).parent, **stand_ins)
            assert done.returncode == 0, done.stderr[-2000:]
            entries = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            self._said |= dict(zip(some, entries, strict=True))
        return self._said[name]


def selected(request: pytest.FixtureRequest, test: Any, parameter: str) -> list[str]:
    """The values of a parameter for which this run has the test."""
    items = [item for item in request.session.items if getattr(item, "function", None) is test]
    return [item.callspec.params[parameter] for item in items]


def note(family: str, entry: dict[str, Any]) -> None:
    """Into the file that NDP_FAMILIES_JSON names, if it does: what docs/families.md shows."""
    if not (path := os.environ.get("NDP_FAMILIES_JSON")):
        return
    import measured

    question = "Does every family of models give stock vLLM's tokens with half of its experts on the device?"
    measured.save_row(Path(path), question, "make test-families", family, entry)


def noted(name: str, ours: dict[str, Any], stock: dict[str, Any], dtype: str) -> tuple[int, int, dict[str, int]]:
    """Count the tokens that are stock's and note them: (identical, all, what the plugin counted)."""
    pairs = [
        (mine, theirs)
        for my_pass, their_pass in zip(ours["passes"], stock["passes"], strict=True)
        for mine_of, theirs_of in zip(my_pass, their_pass, strict=True)
        for mine, theirs in zip(mine_of, theirs_of, strict=True)
    ]
    identical, totals = sum(mine == theirs for mine, theirs in pairs), ours["totals"]
    note(
        name,
        {
            "tokens_identical": identical,
            "tokens_total": len(pairs),
            "chunked_prefill": stock["chunked_prefill"],
            "prefix_cache": stock["prefix_cache"],
            "stock_passes_equal": stock["passes"][0] == stock["passes"][1],
            "dtype": dtype,
            "cold_pairs": totals["cold_pairs"],
        },
    )
    return identical, len(pairs), totals


@pytest.mark.parametrize("family", _families())
def test_every_token_is_stocks(ran: Runs, family: str) -> None:
    """3 prompts x 32 tokens, twice: in chunks of 64 tokens, and out of the prefix cache where the model allows one."""
    told = ran[family]
    stock, ours = told["stock"], told["ndp"]
    assert "error" not in stock, stock
    assert "error" not in ours, ours
    identical, total, totals = noted(family, ours, stock, told["dtype"])
    assert total == 2 * PROMPT_COUNT * TOKENS
    assert all(len(set(tokens)) > TOKENS // 2 for one in stock["passes"] for tokens in one), "text too dull to tell"
    assert totals["cold_pairs"] > 50, "the device must have computed something"
    assert totals["row_checks"] > 0 == totals["sidecar_mismatches"] == totals["fallback_pairs"], ours["warnings"]
    if told["dtype"] == "float32":
        assert identical == total
    else:  # experts in two places round differently in bfloat16, so tokens must be stock's with all of them in one
        assert told["hot"]["passes"] == stock["passes"]
        assert told["hot"]["totals"]["cold_pairs"] == 0
        assert all(mine[0] == theirs[0] for mine, theirs in zip(ours["passes"][0], stock["passes"][0], strict=True))


@pytest.mark.families
def test_the_second_trained_model_gives_stocks_tokens_and_reports_both_clocks_at_3_bits() -> None:
    """At full precision every token; quantized, what prefill gives, which is not: the first of each prompt."""
    told = said(TRAINED)
    stock, ours, quantized = told["stock"], told["ndp"], told["quantized"]
    assert "error" not in quantized, quantized
    identical, total, totals = noted(TRAINED.name, ours, stock, told["dtype"])
    assert identical == total == 2 * PROMPT_COUNT * TOKENS
    assert totals["cold_pairs"] > 50
    assert totals["row_checks"] > 0 == totals["sidecar_mismatches"] == totals["fallback_pairs"], ours["warnings"]
    assert quantized["totals"]["fallback_pairs"] == 0
    assert [tokens[0] for tokens in quantized["passes"][0]] == [tokens[0] for tokens in stock["passes"][0]]
    for report in quantized["reports"]:
        hot, elsewhere = report["hot_pairs"], report["cold_pairs"] + report["spilled_pairs"]
        assert hot + elsewhere == (TOKENS - 1) * 4 * 4, "4 layers, top-4; the first token is prefill's"
        assert report["avg_bits"] <= 3.0
        assert report["simulated_tpot_us"] > 0 < report["measured_tpot_ms"]
    # half of the experts are hot: chosen from the prompt they serve more than half of what its decode asks for
    hot = sum(report["hot_pairs"] + report["spilled_pairs"] for report in quantized["reports"])
    assert hot / (PROMPT_COUNT * (TOKENS - 1) * 16) > 0.65


@pytest.mark.families
@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_served_here_is_refused_by_name(refusals: Runs, family: str) -> None:
    error = refusals[family]["ndp"]["error"]
    note(family, {"refused": error})
    assert REFUSED[family] in error


# -- expiry: these fail when vLLM's CPU build can do what it cannot do yet ---------------------------------------------


def test_vllms_cpu_router_still_leaves_the_correction_bias_out() -> None:
    """ERNIE-4.5: a bias that should make expert 3 win everywhere changes nothing. MiniMax-M2: sigmoid is refused."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

    logits, bias = torch.zeros(4, 8), torch.zeros(8)
    logits[:, 1], bias[3] = 1.0, 10.0
    _, ids = select_experts(torch.zeros(4, 2), logits, 1, False, True, e_score_correction_bias=bias)
    assert (ids == 1).all(), "ERNIE-4.5 can be tried again: _is_misrouted in moe_method.py"
    with pytest.raises(AssertionError):
        select_experts(torch.zeros(4, 2), logits, 1, False, True, scoring_func="sigmoid", e_score_correction_bias=bias)


def test_vllms_module_of_qwen3_5_still_imports_torchvision() -> None:
    """Else its stand-in can go. It is asked of the text: the import itself takes seconds."""
    from importlib.util import find_spec

    spec = find_spec("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    assert spec is not None
    assert spec.origin is not None
    assert "from torchvision" in Path(spec.origin).read_text(), "WITH_STAND_INS can go"


def test_vllms_cpu_build_still_has_no_mamba_1() -> None:
    import vllm._custom_ops  # noqa: F401  # loads the operators

    assert not hasattr(torch.ops._C, "selective_scan_fwd"), (
        "Jamba can be tried again: BROKEN_ON_CPU in operating/sources.py"
    )


def test_vllms_cpu_build_still_rotates_three_dimensional_queries_wrongly() -> None:
    """The same numbers as [T, heads * D] and as [T, heads, D] should be rotated alike."""
    from vllm._custom_ops import rotary_embedding

    tokens, heads, size = 5, 2, 64
    cache = torch.randn(16, size, generator=torch.Generator().manual_seed(0))
    flat = torch.randn(tokens, heads * size, generator=torch.Generator().manual_seed(1))
    key = torch.randn(tokens, size, generator=torch.Generator().manual_seed(2))
    cubic, positions = flat.clone().view(tokens, heads, size), torch.arange(tokens)
    rotary_embedding(positions, flat, key.clone(), size, cache, False)
    rotary_embedding(positions, cubic, key.clone().view(tokens, 1, size), size, cache, False)
    assert not torch.allclose(flat, cubic.view(tokens, -1)), "GLM-4.7-Flash can be tried again: compat.py"
