"""Every option of `vllm serve` has an answer, and those answers that need an engine to be seen."""

import copy
import dataclasses
import json
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from engines import MODEL, PROMPTS, REPLICAS, ROOT, altered, engine, greedy, parser, token_ids
from safetensors.torch import load_file, save_file
from serve_options import NOT_OURS, REFUSED, WORKS
from test_deploy import resolved
from vllm import EngineArgs
from vllm.config import CompilationMode
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.lora.request import LoRARequest

from ndp_device.common.errors import ConfigError
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.operating.proposal import propose
from vllm_ndp.operating.sizing import GB, Sizing
from vllm_ndp.operating.sources import source_named

pytestmark = pytest.mark.vllm

TOKENS = 12
IDENTITY = {"hot_experts": 3, "cold_precision": "full"}


def test_every_option_of_vllm_serve_has_one_answer():
    offered = {field.name for options in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(options)}
    answered = [name for answers in (WORKS, REFUSED, NOT_OURS) for names in answers.values() for name in names.split()]
    assert len(answered) == len(set(answered)), sorted(name for name in answered if answered.count(name) > 1)
    assert set(answered) == offered


def test_settings_in_two_ways_are_refused_because_vllm_drops_one(monkeypatch: pytest.MonkeyPatch):
    given = ["--model", str(MODEL), "--quantization", "ndp", "--max-model-len", "128"]
    given += ["--additional-config", '{"ndp": {"hot_experts": 4, "avg_bits": 2}}']
    given += ["--additional-config.ndp.hot_experts", "2"]
    parsed = copy.deepcopy(parser().parse_args(given))  # vLLM writes into its parser's defaults
    assert parsed.additional_config == {"ndp": {"hot_experts": 2}}  # avg_bits is gone, without a word of vLLM's
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", *given])
    with pytest.raises(
        ConfigError, match=r"keeps only one of --additional-config and --additional-config\.ndp\.hot_experts"
    ):
        EngineArgs.from_cli_args(parsed).create_engine_config()
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--additional-config.ndp.hot_experts=2"])
    assert EngineArgs.from_cli_args(parsed).create_engine_config().parallel_config.worker_cls.endswith("NdpWorker")


@pytest.mark.parametrize(
    ("command", "words", "eager"),
    [
        ("serve", [], True),
        ("serve", ["-O2"], False),
        ("serve", ["-cc.mode=3"], False),
        ("serve", ["--no-enforce-eager"], False),
        ("bench", [], False),
    ],
)
def test_a_server_on_a_cpu_compiles_only_if_asked(
    command: str, words: list[str], eager: bool, monkeypatch: pytest.MonkeyPatch
):
    given = ["--model", str(MODEL), "--quantization", "ndp", "--max-model-len", "128", *words]
    monkeypatch.setattr(sys, "argv", ["vllm", command, *given])
    parsed = copy.deepcopy(parser().parse_args(given))
    config = EngineArgs.from_cli_args(parsed).create_engine_config()
    assert (config.compilation_config.mode == CompilationMode.NONE) == eager
    assert ("all" in config.compilation_config.custom_ops) == eager  # vLLM's own operators where nothing is compiled


def test_a_level_of_optimization_from_a_file_is_obeyed(monkeypatch: pytest.MonkeyPatch):
    """It stands in no word of the command line."""
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--config", "file.yaml"])
    config = EngineArgs(str(MODEL), quantization="ndp", max_model_len=128, optimization_level=1).create_engine_config()
    assert config.compilation_config.mode != CompilationMode.NONE


def test_an_override_of_the_experts_is_refused_before_the_first_prompt():
    """Once the engine started, and ended at the first prompt with something else."""
    with (
        pytest.raises(ConfigError, match=r"with experts per token 4, the checkpoint has 2: drop what overrides it"),
        engine(settings=IDENTITY, hf_overrides={"num_experts_per_tok": 4}),
    ):
        pass


def test_new_weights_under_a_running_engine_are_refused_and_it_goes_on():
    """vLLM itself would load norms and attention, and leave the experts as they were: two models in one."""
    with engine(settings=IDENTITY) as llm:
        before = token_ids(greedy(llm, PROMPTS[:1], TOKENS))
        calls = ("reload_weights", "start_weight_update", "reset_weights", "save_sharded_state")
        for call in (*calls, "compute_weight_checksums"):
            with pytest.raises(ConfigError, match=f"'ndp' does not work together with {call}"):
                llm.collective_rpc(call)
        assert token_ids(greedy(llm, PROMPTS[:1], TOKENS)) == before


ADAPTED = ("q_proj", "v_proj", "o_proj")
RANK = 4


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random LoRA adapter of the attention, and a checkpoint with the same adapter merged in."""
    directory, merged = tmp_path_factory.mktemp("adapter"), tmp_path_factory.mktemp("merged") / "tiny-mixtral"
    weights = load_file(MODEL / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    parts = {}
    for name in [name for name in weights if any(f"{part}.weight" in name for part in ADAPTED)]:
        rows, columns = weights[name].shape
        a = torch.randn((RANK, columns), generator=generator) * 0.2
        b = torch.randn((rows, RANK), generator=generator) * 0.2
        module = name.removesuffix(".weight")
        parts |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        weights[name] = (weights[name].float() + b @ a).to(weights[name].dtype)
    save_file(parts, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(ADAPTED), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory, altered(merged, change=lambda tensors: tensors.update(weights))


def test_an_attention_adapter_gives_the_tokens_of_a_checkpoint_with_it_merged_in(adapter: tuple[Path, Path]):
    directory, merged = adapter
    with engine(merged) as llm:
        wanted = token_ids(greedy(llm, PROMPTS, TOKENS))
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(ADAPTED)}
    with engine(settings=IDENTITY, **options) as llm:
        plain = token_ids(greedy(llm, PROMPTS, TOKENS))
        adapted = token_ids(greedy(llm, PROMPTS, TOKENS, LoRARequest("attention", 1, str(directory))))
    assert adapted == wanted
    assert plain != wanted


# -- Command lines that we print or ship, read by vLLM's own parser: what `vllm-ndp plan` proposes, what containers ----


def settings_of(words: list[str]) -> dict[str, Any]:
    """Exits where vLLM knows an option differently."""
    given = parser().parse_args(words)
    assert given.quantization == "ndp"
    settings: dict[str, Any] = given.additional_config["ndp"]
    return settings


@pytest.mark.parametrize(("model", "gpu"), [("qwen3-30b-a3b", 24 * GB), (str(MODEL), None)])
def test_vllm_reads_the_line_that_plan_proposes(model: str, gpu: int | None) -> None:
    source = source_named(model)
    sizing = Sizing(source.model, 64 * GB, gpu, context=2048, batch=2)
    proposed = propose(source, sizing, Costs(load_hardware(), source.model))
    assert settings_of(proposed.serve_options())["hot_experts"] == proposed.ways[0].option.num_hot
    given = parser().parse_args(proposed.serve_options())
    assert (given.max_model_len, given.max_num_seqs) == (2048, 2)
    assert given.kv_cache_memory_bytes == (proposed.sizing.kv_cache_with_spare if gpu is None else None)


def test_vllm_reads_the_command_of_the_compose_file() -> None:
    """With compose's own defaults; the first word is the model, which `vllm serve` takes by itself."""
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    model, *words = (resolved(word) for word in services["server"]["command"])
    assert model == "/models/model"
    assert settings_of(words)["devices"] == "ipc:///run/ndp/device"


def test_vllm_reads_the_lines_of_the_docs() -> None:
    """Every `vllm serve MODEL ...` of the pages for newcomers, continued lines joined."""
    lines = []
    for name in ("README.md", "docs/start.md", "docs/howto.md", "docs/serving.md"):
        text = (ROOT / name).read_text().replace("\\\n", " ")
        lines += [line.strip() for line in text.splitlines() if line.startswith("vllm serve ")]
    assert len(lines) >= 2
    for line in lines:
        words = [word for word in shlex.split(line)[3:] if word != "&"]
        parser().parse_args(words)


def test_the_example_that_serves_prints_both_clocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = ROOT / "examples" / "serve_offline.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(MODEL), str(REPLICAS)])
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    for name in ("measured_tpot_ms", "simulated_tpot_us", "hot_pairs"):
        assert name in said
