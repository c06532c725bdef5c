"""A server that is told nothing sizes itself, says so, and what it says by hand is the same server."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_family_models
import make_quantized_models
import numpy as np
import pytest
from engines import PROMPTS, REPLICAS, ROOT, engine, greedy, replay_of, run_program, trace_of
from given_options import given_by
from test_integration_refusals import configure

from ndp_device.checkpoint.values import StoredForm
from ndp_device.common.errors import ConfigError
from vllm_ndp.config import NdpSettings
from vllm_ndp.integration import compat, self_sizing
from vllm_ndp.integration.experts_pool import ExpertsPool, ExpertWeights
from vllm_ndp.lab.cli.recorded import losses_of_run
from vllm_ndp.operating import speed
from vllm_ndp.operating.sizing import GB, KV_BLOCK, Sizing
from vllm_ndp.operating.sources import source_named

pytestmark = pytest.mark.vllm

TOLD: dict[str, Any] = {"replicas": str(REPLICAS)}


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    lines = capfd.readouterr().err.splitlines()
    return [line.removeprefix("vllm-ndp: ") for line in lines if line.startswith("vllm-ndp: ")]


@pytest.mark.parametrize(
    ("family", "layers", "context", "step"), [("mixtral", 4, 384, 128), ("gpt_oss", 5, 1500, 1500)]
)
def test_the_kv_cache_of_a_plan_holds_a_request_of_the_whole_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layers: int, context: int, step: int
) -> None:
    """vLLM refused the line that `plan` printed: its blocks on a CPU have 128 tokens, one is its own, and three layers
    with a window beside two without are padded to four."""
    tiny = make_family_models.FAMILIES[family]
    tiny = replace(tiny, sizes={**tiny.sizes, "num_hidden_layers": layers})
    monkeypatch.setattr(make_family_models, "FAMILIES", {family: tiny})
    model = make_family_models.make(family, tmp_path)
    sizing = Sizing(source_named(str(model)).model, 8 * GB, context=context, step_tokens=step)
    sizes = {"max_model_len": context, "max_num_batched_tokens": step, "max_num_seqs": 1, "block_size": None}
    kept = {"kv_cache_memory_bytes": sizing.kv_cache_with_spare, "dtype": "bfloat16"}
    with engine(model, settings={"cold_precision": "full"}, **sizes, **kept) as llm:
        assert llm.llm_engine.vllm_config.cache_config.block_size == KV_BLOCK
        (output,) = greedy(llm, [{"prompt_token_ids": [5] * (context - 4)}], 4)
        held = llm.collective_rpc("ndp_status")[0]["kv_cache_bytes"]
    assert len(output.outputs[0].token_ids) == 4
    assert held == sizing.kv_cache_with_spare  # of one allocation for all groups, which was counted for each


def test_a_server_that_is_told_nothing_sizes_itself_and_says_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    config = configure(additional_config={"ndp": TOLD, "other": 1}, max_num_seqs=2)
    chosen = config.additional_config["ndp"]
    assert (chosen["hot_experts"], chosen["slot_bits"]) == (8, 4)
    assert chosen["avg_bits"] == 4.0
    assert chosen["linear_bits"] == 8
    per_token = 4 * 2 * 2 * 32 * 2
    assert config.cache_config.kv_cache_memory_bytes == pytest.approx((2 * 128 + KV_BLOCK) * per_token, abs=2)
    sized, expected, by_hand = said(capfd)
    assert sized.startswith("sized to ")
    assert "% of an expert's output" in expected
    words = shlex.split(by_hand.removeprefix("by hand: "))
    given = given_by(words)

    again = configure(additional_config={"ndp": TOLD | given, "other": 1}, kv_cache_memory_bytes=int(words[1]))
    assert again.additional_config == config.additional_config
    assert again.cache_config.kv_cache_memory_bytes == config.cache_config.kv_cache_memory_bytes
    assert said(capfd) == []


@pytest.mark.parametrize(
    "given",
    [
        *({"hot_experts": 2}, {"hardware": "h100-ndp512"}, {"cold_precision": "full"}),
        *({"debug": {"prices": "simulated"}}, {"debug": {"offload_bits": 3}}),
    ],
)
def test_whoever_says_what_is_held_chooses_all_of_it(given: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    config = configure(additional_config={"ndp": given})
    assert config.additional_config == {"ndp": given}
    assert said(capfd) == []


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"hot_experts": 4}, {"avg_bits": 4, "slot_bits": 4}),
        ({"hot_experts": 4, "replicas": None}, {"avg_bits": 4, "slot_bits": 4}),
        ({"hot_experts": 0}, {"avg_bits": 4}),
        ({"hot_experts": 4, "slot_bits": 16}, {"avg_bits": 4}),
        (
            {"cold_precision": "full"},
            {"cold_precision": "quantized", "execution": "paper", "avg_bits": 4, "slot_bits": 4},
        ),
        *(
            ({"hot_experts": 4, **more}, {})
            for more in (
                *({"avg_bits": 3}, {"slot_bits": 2}, {"plan": "joint"}, {"policy": {"bit_rule": "mse"}}),
                {"debug": {"offload_bits": 3}},
            )
        ),
    ],
)
def test_beside_what_is_held_experts_have_the_checkpoints_own_width(
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
    given: dict[str, Any],
    chosen: dict[str, Any],
) -> None:
    """They had 3 bits on average, of replicas that the first start made, or were decoded to 16."""
    model = make_quantized_models.make("mixtral-awq", tmp_path_factory.getbasetemp() / "quantized")
    config = configure(model=model, additional_config={"ndp": given})
    assert config.additional_config == {"ndp": given | chosen}
    (by_hand,) = said(capfd) or [""]
    assert given_by(shlex.split(by_hand.partition("by hand: ")[2])) == chosen


def test_hot_experts_that_ranks_cannot_hold_as_stored_are_decoded_and_it_is_said(
    tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which these are is the next test's question: no tiny model has blocks that ranks would cut."""
    monkeypatch.setattr(compat, "has_parts_of_slots", lambda config, settings: settings.slot_bits == 16)
    model = make_quantized_models.make("mixtral-awq", tmp_path_factory.getbasetemp() / "quantized")
    config = configure(model=model, additional_config={"ndp": {"hot_experts": 4}})
    assert config.additional_config == {"ndp": {"hot_experts": 4, "avg_bits": 4}}
    assert "at 4 bits; hot ones are decoded, as ranks would cut blocks of codes" in said(capfd)[0]


@pytest.mark.parametrize(
    ("name", "ranks", "settings", "have_parts"),
    [
        ("qwen3_moe-compressed-all", (2, False), {}, True),
        ("qwen3_moe-compressed-all", (4, False), {}, False),  # 64 units in groups of 32
        ("qwen3_moe-compressed-all", (4, True), {}, True),
        ("qwen3_moe-compressed-all", (2, False), {"avg_bits": 3.0}, False),
        ("qwen3_moe-compressed-all", (2, False), {"replicas": str(REPLICAS)}, False),
        ("qwen3_moe-compressed-all", (1, False), {"replicas": str(REPLICAS)}, True),
        ("mixtral-awq", (2, False), {}, False),  # 96 units in groups of 32
    ],
)
def test_ranks_have_parts_of_slots_where_codes_can_be_cut_for_them(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    ranks: tuple[int, bool],
    settings: dict[str, Any],
    have_parts: bool,
) -> None:
    model = make_quantized_models.make(name, tmp_path_factory.getbasetemp() / "quantized")
    parallel = SimpleNamespace(tensor_parallel_size=ranks[0], enable_expert_parallel=ranks[1])
    config: Any = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(model=str(model)), load_config=None
    )
    asked = NdpSettings.from_mapping({"hot_experts": 4, "slot_bits": 4, "avg_bits": 4.0} | settings)
    assert compat.has_parts_of_slots(config, asked) == have_parts


@pytest.mark.parametrize("given", [{"hot_experts": 4}, {"hardware": "h100-ndp512"}, {"slot_bits": 4}])
def test_the_kv_cache_is_sized_whatever_else_is_said(given: dict[str, Any]) -> None:
    """For the requests that may run, and 256 MiB at least: vLLM would ask for 92 % of all memory, or not start."""
    many = configure(additional_config={"ndp": TOLD | given}, max_num_seqs=4096, max_num_batched_tokens=4096)
    per_token = 4 * 2 * 2 * 32 * 2
    assert many.cache_config.kv_cache_memory_bytes == pytest.approx((4096 * 128 + KV_BLOCK) * per_token, abs=2)
    few = configure(additional_config={"ndp": TOLD | given}, max_num_seqs=4)
    assert few.cache_config.kv_cache_memory_bytes == 256 << 20
    asked = configure(additional_config={"ndp": TOLD | given}, gpu_memory_utilization=0.5)
    assert asked.cache_config.kv_cache_memory_bytes is None


def configured(model: Path, **parts: Any) -> Any:
    """What of vLLM's configuration is read here."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), max_model_len=77),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=99, max_num_seqs=8),
        **{"load_config": None, "additional_config": {}, "speculative_config": None, **parts},
    )


def test_a_server_is_sized_for_its_own_limits_and_by_codes_unless_replicas_take_their_place(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = make_quantized_models.make("qwen3_moe-compressed-all", tmp_path_factory.getbasetemp() / "quantized")
    config, source = configured(model), source_named(str(model))
    assert source.stored_form is not None
    assert source.linear_form is not None
    for replicas, form in ((None, source.stored_form), (str(REPLICAS), None)):
        sizing = self_sizing._one_request(config, NdpSettings(replicas=replicas), 8)
        assert (sizing.context, sizing.step_tokens, sizing.linear_bits) == (77, 99, 8)
        assert (sizing.stored_form, sizing.linear_form) == (form, source.linear_form)
    assert self_sizing._own_width(config, NdpSettings(replicas=str(REPLICAS))) == {}


@pytest.mark.parametrize(("name", "bits"), [("qwen3_moe-compressed-all", 4), ("mixtral-fp8", 8)])
def test_what_is_measured_is_kept_by_the_forms_and_the_width_it_is_of(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, name: str, bits: int
) -> None:
    model = make_quantized_models.make(name, tmp_path_factory.getbasetemp() / "quantized")
    told: list[Any] = []

    def find(_: Any, facts: Any, measure: Any) -> Any:
        told.extend((facts, measure.args[1:]))
        raise ConfigError("as the test wants it")

    monkeypatch.setattr(self_sizing, "find_or_measure", find)
    with pytest.raises(ConfigError, match="as the test wants it"):
        self_sizing._own_size(configured(model), NdpSettings(), 8)
    source = source_named(str(model))
    forms = source.stored_form, source.linear_form
    assert [told[0][key] for key in ("stored", "linear")] == [form and [*form] for form in forms]
    assert (told[0]["bits"], told[1]) == (bits, (bits, *forms))


@pytest.mark.parametrize(
    ("workers", "drafts", "requests"), [(1, None, 8), (3, None, 2), (16, None, 1), (2, object(), 2 * 4)]
)
@pytest.mark.parametrize("form", [None, StoredForm("float8", 0)])
def test_a_worker_has_the_kv_cache_of_its_share_of_requests_and_drafts_one_more(
    monkeypatch: pytest.MonkeyPatch, workers: int, drafts: object, requests: int, form: StoredForm | None
) -> None:
    """Beside the experts of the setting, at the width that they are served at."""
    seen: list[Any] = []

    def size(_: Any, option: Any, batch: int) -> int:
        seen.append((option.num_hot, option.widest))
        return batch << 30

    sizing = Sizing(source_named("mixtral-8x7b").model, 256 * GB, stored_form=form)
    monkeypatch.setattr(self_sizing, "_one_request", lambda *_: sizing)
    monkeypatch.setattr(self_sizing, "_has_no_kv_cache", lambda _: True)
    monkeypatch.setattr(self_sizing, "kv_cache_bytes", size)
    parallel, cache = SimpleNamespace(world_size_across_dp=workers), SimpleNamespace(kv_cache_memory_bytes=None)
    config = configured(ROOT, parallel_config=parallel, cache_config=cache, speculative_config=drafts)
    self_sizing._size_kv_cache(config, NdpSettings(hot_experts=2))
    assert cache.kv_cache_memory_bytes == requests << 30
    assert seen == [(2, 4 if form is None else 8)]


def test_vllms_own_variable_says_how_large_the_kv_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CacheConfig

    config: Any = SimpleNamespace(cache_config=CacheConfig())
    assert self_sizing._has_no_kv_cache(config)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert not self_sizing._has_no_kv_cache(config)


@pytest.mark.parametrize(
    ("form", "bits", "given", "loss"),
    [
        (None, 4, {"slot_bits": 4}, (0.2 + 0.6) / 2),
        (None, 1, {"slot_bits": 1}, (0.5 + 0.6) / 2),
        (None, 8, {}, (0.01 + 0.02) / 2),
        (StoredForm("int4", 32), 4, {"slot_bits": 4}, 0.0),
        (StoredForm("float8", 0), 4, {"slot_bits": 4}, (0.2 + 0.6) / 2),
        (StoredForm("int4", 32), 4, {"slot_bits": 4, "replicas": "r"}, (0.2 + 0.6) / 2),
    ],
)
def test_the_loss_that_is_said_is_of_the_width_and_of_what_is_served(
    monkeypatch: pytest.MonkeyPatch, form: StoredForm | None, bits: int, given: dict[str, Any], loss: float
) -> None:
    """Where replicas lack a width, that of the next narrower one; codes as stored lose nothing."""
    none = np.nan
    losses = np.array([[[0.5, 0.4, 0.3, 0.2, 0.01], [0.6, none, none, none, 0.02]]])
    monkeypatch.setattr(self_sizing, "load_losses", lambda *_: (losses, None, None))
    monkeypatch.setattr(self_sizing, "cached_replicas", lambda *_: Path("r"))
    monkeypatch.setattr(self_sizing, "model_digest", lambda _: "")
    sizing = SimpleNamespace(stored_form=form, model=SimpleNamespace(num_experts=8))
    size: Any = SimpleNamespace(option=SimpleNamespace(widest=bits), sizing=sizing)
    settings = NdpSettings.from_mapping({"hot_experts": 8, "avg_bits": 4} | given)
    assert self_sizing._loss(settings, ROOT, size) == pytest.approx(loss)


def test_a_machine_is_measured_for_its_cores_and_for_what_a_row_and_a_prompt_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []

    def find(kind: Any, facts: Any, measure: Any) -> Any:
        told.append(facts)
        raise ConfigError("as the test wants it")

    monkeypatch.setattr(self_sizing, "find_or_measure", find)
    for cores in ({0}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores)
        configure(additional_config={"ndp": TOLD})
    assert told[0] == told[1] | {"cores": 1}
    assert told[1]["cores"] == 2
    assert told[1]["experts"] == [128, 256, 8, 2]
    assert {"bits", "stored", "version"} <= told[1].keys()


def test_linear_bits_that_were_given_are_kept() -> None:
    for bits in (4, None):
        config = configure(additional_config={"ndp": TOLD | {"linear_bits": bits}})
        assert config.additional_config["ndp"]["linear_bits"] == bits


def test_the_kv_cache_leaves_room_for_the_widths_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers stay in 16 bits for whoever says what is held, and does not say them."""
    seen: list[tuple[int | None, int]] = []
    monkeypatch.setattr(
        self_sizing, "kv_cache_bytes", lambda sizing, option, _: seen.append((sizing.linear_bits, option.widest)) or 1
    )
    for given in ({"slot_bits": 2}, {"slot_bits": 4, "linear_bits": 8}):
        configure(additional_config={"ndp": TOLD | given})
    assert seen == [(None, 2), (8, 4)]


def test_a_kv_cache_that_was_given_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    config = configure(additional_config={"ndp": TOLD}, kv_cache_memory_bytes=1 << 20)
    assert config.cache_config.kv_cache_memory_bytes == 1 << 20
    assert "--kv-cache-memory-bytes" not in said(capfd)[2]


def test_a_choice_that_leaves_measured_prices_nothing_to_decide_is_not_made(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a hot expert and with streamed prompts: whoever asked for the prices keeps the hot ones."""
    given = TOLD | {"prefill": "streamed", "debug": {"prices": "measured"}}
    config = configure(additional_config={"ndp": given})
    assert "hot_experts" not in config.additional_config["ndp"]
    assert "not sized to this machine: " in said(capfd)[0]


def test_a_prompt_of_a_server_that_sized_itself_reads_no_expert_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers of 8 bits in words are fitted: a prompt decoded every expert of the checkpoint, one after the other."""
    from ndp_device.replicas.checkpoint import CheckpointExperts
    from ndp_device.replicas.format import read_manifest

    make_quantized_models.make("mixtral-compressed8", tmp_path)
    slow_reads = speed.Measured(
        1e6,
        expert_s=1e-6,
        prompt_expert_s=1e-5,
        linear_bytes_per_s=1e9,
        prompt_linear_bytes_per_s=1e9,
        layer_s=1e-3,
        prompt_layer_s=1e-3,
        bits=4,
        isa="any",
    )
    monkeypatch.setattr(speed, "measure", lambda *_: slow_reads)  # as of experts that are not tiny
    monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path / "cache"))
    read: list[tuple[int, int]] = []
    take = CheckpointExperts.expert
    monkeypatch.setattr(CheckpointExperts, "expert", lambda self, *which: read.append(which) or take(self, *which))
    settings = {"hardware": None, "record": str(tmp_path / "trace")}
    with engine(tmp_path / "mixtral-compressed8", settings=settings, dtype="bfloat16") as llm:
        status = llm.collective_rpc("ndp_status")[0]
        assert status["slot_bits"] == status["avg_bits"] == 4
        assert status["cold_experts"] == 0
        assert status["device_bytes"] == 0  # it would hold all of them a second time
        assert status["replicas"].startswith(f"data-free in {tmp_path / 'cache'}")
        assert read  # the replicas were made of them
        read.clear()
        greedy(llm, [PROMPTS[0] * 4, PROMPTS[1]], 8)
        assert read == []
    (replicas,) = (tmp_path / "cache" / "replicas").iterdir()
    assert read_manifest(replicas).bits == (4,)
    trace = trace_of(tmp_path / "trace", tmp_path / "mixtral-compressed8")
    assert set(losses_of_run(trace, None).widths) == {4}  # a replay plans with what this run planned with
    assert replay_of(trace).identical


# -- Two layers of gpt-oss-20b at full width, served with nothing set: its MXFP4 as it is, no file, no decoded expe ----


LAYERS, PROMPT, TOKENS = 2, 64, 4


def test_a_prompt_computes_the_stored_codes_in_slots_and_decodes_no_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    maker = ROOT / "tests" / "checkpoints" / "make_real_size.py"
    made = run_program(sys.executable, maker, "gpt-oss-20b", tmp_path / "model", str(LAYERS), "4096")
    assert made.returncode == 0, made.stderr
    read: list[tuple[int, int]] = []
    read_expert = ExpertsPool.expert

    def noted(pool: ExpertsPool, layer: int, expert: int, *share: object) -> ExpertWeights:
        read.append((layer, expert))
        return read_expert(pool, layer, expert, *share)  # type: ignore[arg-type]

    monkeypatch.setattr(ExpertsPool, "expert", noted)
    monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path / "cache"))
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_seqs": 2}
    with engine(tmp_path / "model", quantization="ndp", **options) as llm:
        said = capfd.readouterr().err
        assert "all 32 experts of a layer at 4 bits, for prompts and decode, linear layers at 8" in said
        assert "expected: the first token of a prompt of 64 after " in said
        read.clear()
        done = greedy(llm, [{"prompt_token_ids": list(range(10, 10 + PROMPT))}], TOKENS, detokenize=False)
        totals, told = llm.collective_rpc("ndp_totals")[0], llm.collective_rpc("ndp_status")[0]
    assert read == []
    assert " tokens/s for one request" in said
    assert told["replicas"] == "none: experts keep the checkpoint's codes of 4 bits"
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert totals["prefill_pairs"] == PROMPT * LAYERS * 4
    assert totals["prefill_device_pairs"] == totals["prefill_fallback_pairs"] == totals["cold_pairs"] == 0
    # 8 experts of 13.3 MB are 32 us of an H100's memory; they were counted with two numbers beside every code: 267 us
    assert done[0].kv_transfer_params["ndp"]["simulated_tpot_us"] < 250
