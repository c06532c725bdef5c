"""Quantized checkpoints give the tokens that stock vLLM gives on what they stand for, half of their experts cold.

The tiny models are tests/checkpoints/make_quantized_models.py's: each format's own library has made the values of the
plain twin. gpt-oss in MXFP4 by default; `make test-families` runs all and notes them in docs/measured/families.json.
"""

import importlib.util
import os
import signal
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import make_quantized_models
import numpy as np
import pytest
from engines import PROMPTS, engine, greedy, replay_of, token_ids, trace_of
from family_tokens import PENALTIES, PROMPT_COUNT, TOKENS
from test_integration_families import Runs, models, noted, selected

from vllm_ndp.integration.experts_pool import ExpertsPool

__all__ = ["models"]
pytestmark = pytest.mark.vllm
SERVED = {
    "gpt_oss-mxfp4": "torch", "mixtral-fp8": "torch", "mixtral-compressed": "torch", "mixtral-gptq": "auto_gptq",
    "mixtral-awq": "torch", "mixtral-nvfp4": "torch", "mixtral-nvfp4-modelopt": "torch", "mixtral-mxfp4": "torch",
    "mixtral-mxfp8": "torch", "mixtral-fp8-modelopt": "torch", "mixtral-compressed8": "torch",
    "mixtral-auto_round": "auto_round_extension", "qwen3_moe-fp8-all": "torch", "qwen3_moe-compressed-all": "torch",
}  # fmt: skip
"""And the package that writes it."""


def _marked(name: str) -> Any:
    marks = [pytest.mark.skipif(not _is_writable(name), reason=f"needs {SERVED[name]}"), pytest.mark.families]
    return pytest.param(name, marks=marks[: 1 if name == "gpt_oss-mxfp4" else 2])


def _is_writable(name: str) -> bool:
    return importlib.util.find_spec(SERVED[name]) is not None


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, models: Path) -> tuple[Runs, Runs]:
    """The plugin on each checkpoint that this run has a test of, and stock on its dequantized twin."""
    names = selected(request, test_every_token_is_that_of_stock_vllm_on_the_dequantized_twin, "name")
    return runs_of(models, filter(_is_writable, names))


def runs_of(models: Path, names: Iterable[str], *words: str) -> tuple[Runs, Runs]:
    paths = {name: make_quantized_models.make(name, models) for name in names}
    twins = {name: path.with_name(f"{path.name}-exact") for name, path in paths.items()}
    return Runs(paths, "ndp", *words), Runs(twins, "stock", *words)


@pytest.mark.parametrize("name", [_marked(name) for name in SERVED])
def test_every_token_is_that_of_stock_vllm_on_the_dequantized_twin(ran: tuple[Runs, Runs], name: str) -> None:
    ours, stock = ran[0][name]["ndp"], ran[1][name]["stock"]
    assert "error" not in ours, ours
    assert "error" not in stock, stock
    identical, total, totals = noted(name, ours, stock, "float32")
    assert identical == total == 2 * PROMPT_COUNT * TOKENS
    assert totals["cold_pairs"] > 50
    assert totals["row_checks"] > 0 == totals["sidecar_mismatches"] == totals["fallback_pairs"]


@pytest.mark.parametrize(
    ("name", "hot"),
    [
        *((name, "all") for name in ("mixtral-awq", "gpt_oss-mxfp4", "mixtral-nvfp4", "mixtral-fp8")),
        *(("mixtral-awq", "half"), ("gpt_oss-mxfp4", "half, prompts split")),
        *(("mixtral-nvfp4", "half"), ("mixtral-fp8", "half, prompts split")),
    ],
)
def test_a_quantized_checkpoint_is_served_by_its_own_codes(
    models: Path, monkeypatch: pytest.MonkeyPatch, name: str, hot: str
) -> None:
    """Nothing is written, no expert is decoded, and the run is replayed. Half hot, nothing is said of widths, and the
    device has the others. Fitted again, its experts gave 1 to 9 of 16 tokens of a prompt."""
    monkeypatch.setenv("NDP_CACHE_DIR", str(models / "cache"))
    path, bits = make_quantized_models.make(name, models), 8 if "fp8" in name else 4
    record, decoded = models / f"trace-{name}-{hot}", []
    slots: dict[str, Any] = {
        "hot_experts": 4,
        "record": str(record),
        "prefill": "split" if "split" in hot else "streamed",
    }
    if hot == "all":
        slots = {"hot_experts": 8, "slot_bits": bits, "avg_bits": 4.0, "execution": "paper", "record": str(record)}
    take = ExpertsPool.expert
    monkeypatch.setattr(ExpertsPool, "expert", lambda self, *which: decoded.append(which) or take(self, *which))
    with engine(path, settings=slots, dtype="float32") as llm:
        ours = token_ids(greedy(llm, PROMPTS[:4], 16, **PENALTIES))
        told, totals = llm.collective_rpc("ndp_status")[0], llm.collective_rpc("ndp_totals")[0]
    assert (told["slot_bits"], totals["cold_pairs"] > 50, totals["fallback_pairs"]) == (bits, hot != "all", 0)
    assert (totals["prefill_device_pairs"] > 50) == ("split" in hot)
    assert not decoded
    assert told["replicas"] == f"none: experts keep the checkpoint's codes of {bits} bits"
    assert not list((models / "cache").glob("replicas/*"))
    assert ours == stock_tokens(path.with_name(f"{path.name}-exact"))
    assert replay_of(trace_of(record, path)).identical


RANKS = {"tensor_parallel_size": 2}
WHOLE_EXPERTS = RANKS | {"enable_expert_parallel": True}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [
        ("qwen3_moe-compressed-all", RANKS, {"hot_experts": 8}),
        ("qwen3_moe-fp8-all", RANKS, {"hot_experts": 16}),
        ("gpt_oss-mxfp4", WHOLE_EXPERTS, {"hot_experts": 3, "prefill": "streamed"}),
        ("gpt_oss-mxfp4", {"pipeline_parallel_size": 2}, {"hot_experts": 4}),
    ],
)
def test_ranks_and_stages_have_their_experts_by_the_checkpoints_codes(
    models: Path, name: str, layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    """The leader computes whole experts once the device is gone."""
    path, bits = make_quantized_models.make(name, models), 8 if "fp8" in name else 4
    record = models / f"trace-{name}-{'-'.join(layout)}"
    options = layout | {"dtype": "float32", "distributed_executor_backend": "mp"}
    stock, has_cold = stock_tokens(path.with_name(f"{path.name}-exact")), settings["hot_experts"] < 16
    with engine(path, settings=settings | {"record": str(record)}, **options) as llm:
        ours = token_ids(greedy(llm, PROMPTS[:4], 16, **PENALTIES))
        told, totals = llm.collective_rpc("ndp_status"), llm.collective_rpc("ndp_totals")
        if has_cold:
            os.kill(told[0]["device_pid"], signal.SIGKILL)
            assert token_ids(greedy(llm, PROMPTS[:4], 16, **PENALTIES)) == stock
            assert llm.collective_rpc("ndp_totals")[0]["fallback_pairs"] > 0
    assert ours == stock
    says = f"none: experts keep the checkpoint's codes of {bits} bits"
    assert [(one["slot_bits"], one["replicas"]) for one in told] == [(bits, says)] * 2
    assert all((one["cold_pairs"] > 50) == has_cold and one["fallback_pairs"] == 0 for one in totals)
    traces = [record / "stage-0", record / "stage-1"] if "pipeline_parallel_size" in layout else [record]
    for replayed in (replay_of(trace_of(trace, path)) for trace in traces):
        with_device = slice(totals[0]["steps"])
        assert replayed.plan_mismatches == 0 < len(replayed.step_ps[with_device])
        assert np.array_equal(replayed.step_ps[with_device], replayed.recorded_step_ps[with_device])


@cache
def stock_tokens(model: Path) -> list[list[int]]:
    with engine(model, settings=None, dtype="float32") as llm:
        return token_ids(greedy(llm, PROMPTS[:4], 16, **PENALTIES))


def test_linear_layers_for_which_vllm_has_no_kernel_here_are_served_by_their_values(
    models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """FP8 linear layers need AMX on a CPU, and stock vLLM ends. Fused layers, a bias-free model, blocks of scales."""
    path = make_quantized_models.make("qwen3_moe-fp8-all", models)
    found = {}
    for side, settings in (("stock", None), ("ours", {"cold_precision": "full"})):
        model = path if settings else path.with_name(f"{path.name}-exact")
        with engine(model, settings=settings, dtype="float32") as llm:
            found[side] = token_ids(greedy(llm, PROMPTS[:4], 16, **PENALTIES))
    assert "no kernel here for linear layers stored as fp8: they are dequantized" in capfd.readouterr().err
    assert found["ours"] == found["stock"]


@pytest.mark.families
def test_4_bit_linear_layers_are_served_on_a_processor_without_avx512(models: Path) -> None:
    """vLLM's kernel is chosen there and lacks its operator: it ended in an AttributeError once weights were loaded."""
    name = "qwen3_moe-compressed-all"
    ours, stock = runs_of(models, [name], "bfloat16", "avx2")
    mine, theirs = ours[name]["ndp"], stock[name]["stock"]
    identical, total, _ = noted(name, mine, theirs, "bfloat16")
    assert all(one[0] == other[0] for one, other in zip(mine["passes"][0], theirs["passes"][0], strict=True))
    assert identical / total > 0.25  # bfloat16: experts are summed in another order, and one token changes the rest
