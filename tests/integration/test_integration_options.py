"""Each option of `vllm serve`, given on a command line, does beside the plugin what serve_options.py says.

No engine starts: an option is read by vLLM's own parser and made into its configuration, with `--quantization ndp` and
without. What vLLM itself refuses here (no GPU, no such file) it must refuse beside the plugin in the same words.
"""

import argparse
import copy
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
from engines import MODEL, parser
from serve_options import NOT_OURS, REFUSED, WORKS

from ndp_device.common.errors import ConfigError

pytestmark = pytest.mark.vllm

PLAIN = ("--model", str(MODEL), "--max-model-len", "128")
NDP = (
    "--quantization",
    "ndp",
    "--additional-config",
    json.dumps({"ndp": {"hot_experts": 3, "cold_precision": "full"}}),
)
OURS = (
    "additional_config",
    "cache_config.kv_cache_memory_bytes",  # of a start that names none
    "kv_transfer_config",
    "load_config.model_loader_extra_config",
    "model_config.quantization",
    "parallel_config.worker_cls",
    "quant_config",
)
"""What the plugin changes in vLLM's configuration on a CPU."""

Outcome = dict[str, str] | Exception


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """vLLM's configuration writes some options into the environment; no name is looked for elsewhere."""
    from vllm.envs import environment_variables

    before = dict(os.environ)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in [name for name in before if name.startswith("VLLM_") and name not in environment_variables]:
        del os.environ[name]  # engines of this process leave such names, which vLLM itself does not know
    yield
    os.environ.clear()
    os.environ.update(before)


def outcome(*words: str) -> Outcome:
    """The configuration that a command line makes, every value by its path; or the error it ends in."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = copy.deepcopy(parser().parse_args([*PLAIN, *words]))  # vLLM writes into its parser's defaults
    try:
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    except Exception as error:  # whatever it is, it must be the same beside the plugin
        return error
    return dict(flat(config))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from flat(getattr(value, field.name, None), f"{path}.{field.name}".lstrip("."))
    else:
        yield path, re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    differs = {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}
    return {path for path in differs if not path.endswith("engine_id")}  # made anew each time


def made_of(words: tuple[str, ...]) -> dict[str, str]:
    made = outcome(*words)
    assert isinstance(made, dict), made
    return made


@lru_cache(maxsize=1)
def random_paths() -> frozenset[str]:
    """Ids that are made anew each time."""
    return frozenset(differing(made_of(()), made_of(())))


EXAMPLES: dict[str, tuple[str, ...]] = {
    "additional_config": ("--additional-config", '{"other": {}}'),
    "attention_config": ("--attention-config", '{"flash_attn_version": 2}'),
    "compilation_config": ("--compilation-config", '{"cudagraph_mode": "NONE"}'),
    "device_ids": ("--device-ids", "0"),
    "ec_manager_config": ("--ec-manager-config", '{"encoder_cache_manager_cls": "other.Manager"}'),
    "enable_lora": ("--enable-lora", "--lora-target-modules", "q_proj"),
    "fault_tolerance_config": ("--fault-tolerance-config", '{"engine_recovery_timeout_sec": 60}'),
    "ir_op_priority": ("--ir-op-priority", '{"rms_norm": ["native"]}'),
    "attention_backend": ("--attention-backend", "CPU_ATTN"),
    "aux_output_config": ("--aux-output-config", '{"enable_return_routed_experts": true}'),
    "config_format": ("--config-format", "hf"),
    "hf_config_path": ("--hf-config-path", str(MODEL)),
    "limit_mm_per_prompt": ("--limit-mm-per-prompt", '{"image": 1}'),
    "mamba_backend": ("--mamba-backend", "CPU"),
    "media_io_kwargs": ("--media-io-kwargs", '{"image": {}}'),
    "model_class_overrides": ("--model-class-overrides", '{"Other": "other:Model"}'),
    "override_generation_config": ("--override-generation-config", '{"temperature": 0.5}'),
    "tokenizer": ("--tokenizer", str(MODEL)),
    "watermark": ("--watermark", "0.1"),
    "collect_detailed_traces": ("--collect-detailed-traces", "all", "--otlp-traces-endpoint", "http://127.0.0.1:9"),
    "data_parallel_backend": ("--data-parallel-backend", "mp", "--data-parallel-size", "2"),
    "data_parallel_rank": ("--data-parallel-rank", "1", "--data-parallel-size", "2"),
    "distributed_executor_backend": ("--distributed-executor-backend", "mp"),
    "eplb_config": ("--eplb-config", '{"window_size": 10}'),
    "hf_overrides": ("--hf-overrides", '{"rope_theta": 5000.0}'),
    "kernel_config": ("--kernel-config", '{"enable_flashinfer_autotune": false}'),
    "kv_transfer_config": ("--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_producer"}'),
    "log_config_file": ("--log-config-file", str(MODEL / "config.json")),
    "lora_modules": ("--lora-modules", "name=/no/such/adapter"),
    "pooler_config": ("--pooler-config", "{}", "--runner", "pooling"),
    "profiler_config": ("--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/tmp"}'),
    "runner": ("--runner", "pooling"),
    "spec_method": ("--spec-method", "ngram", "--spec-tokens", "2"),
    "spec_model": ("--spec-model", "ngram", "--spec-tokens", "2"),
    "spec_tokens": ("--spec-tokens", "2", "--spec-method", "ngram"),
    "speculative_config": ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
    "structured_outputs_config": ("--structured-outputs-config", '{"backend": "xgrammar"}'),
    "worker_cls": ("--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"),
}
"""Words for options whose type does not say a value, or that need others beside them."""


def example(name: str) -> tuple[str, ...]:
    """Words that give the option another value than its default."""
    action = next(one for one in parser()._actions if one.dest == name)
    option = action.option_strings[0]
    if name in EXAMPLES:
        return EXAMPLES[name]
    if action.nargs == 0:
        return (f"--no-{option.removeprefix('--')}",) if action.default is True else (option,)
    if action.choices:
        return option, str(next(c for c in action.choices if c not in (None, action.default, "auto", "none")))
    for word in ("{}", "1", "2", "1.5", "other"):
        try:
            value = action.type(word) if callable(action.type) else word
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            continue
        if value not in (action.default, "{}"):
            return option, word
    raise AssertionError(f"no example for {option} of type {action.type}, default {action.default}")


def options_of(answers: dict[str, str]) -> list[str]:
    return [name for names in answers.values() for name in names.split()]


NOT_ON_A_COMMAND_LINE = {
    "_api_process_count",
    "_api_process_rank",
    "enable_mm_processor_stats",
    "mamba_config",
    "model_weights",
}
"""Fields of vLLM's arguments that its parser does not offer."""


REFUSED_BY_VLLM_HERE = {
    *("aux_output_config", "enable_return_routed_experts", "return_sampling_mask"),  # want model runner V2
    *("enable_batch_sharded_sampling", "enable_trace_replay", "prefill_context_parallel_size"),  # so do these
    *("enable_cumem_allocator", "enable_elastic_ep", "enable_eplb", "enable_sleep_mode"),  # not on a CPU
    *("enable_mamba_cache_stochastic_rounding", "engram_config", "mamba_ssu_algorithm", "use_replayssm"),
    *("decode_context_parallel_size", "log_config_file", "offload_backend", "numa_bind_cpus", "numa_bind_nodes"),
    *("data_parallel_external_lb", "data_parallel_hybrid_lb", "enable_fault_tolerance", "nnodes"),
    *("per_request_spec_decode_metrics", "ray_workers_use_nsight", "reasoning_parser", "watermark_config"),
}
"""What vLLM itself refuses, of this model, on this platform or given alone."""

NOTHING_ALONE = {
    *("cpu_offload_params", "offload_num_in_group", "offload_params", "offload_prefetch_step"),
    *("dbo_decode_token_threshold", "dbo_prefill_token_threshold", "ubatch_size"),
    *("cp_kv_cache_interleave_size", "dcp_comm_backend", "dcp_kv_cache_interleave_size", "dcp_q_replicate"),
    *("enable_mixed_moe_lora_format", "enable_moe_shared_loras", "fully_sharded_loras"),
    *("elastic_ep_max_dp_size", "eplb_config", "hf_overrides", "kv_offloading_backend", "model_loader_extra_config"),
    *("sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names"),
}
"""Details of a refused feature, which do nothing as long as the feature is off, and `hf_overrides` of other values."""


def test_what_is_said_to_be_on_no_command_line_is_on_none() -> None:
    offered = {action.dest for action in parser()._actions}
    assert set(options_of(WORKS | REFUSED | NOT_OURS)) - offered == NOT_ON_A_COMMAND_LINE


def test_the_plugin_changes_its_own_places_of_vllms_configuration_and_no_other() -> None:
    changed = differing(made_of(()), made_of(NDP)) - random_paths()
    assert {path for path in changed if not path.startswith(OURS)} == set()
    assert {next(ours for ours in OURS if path.startswith(ours)) for path in changed} == set(OURS)


@pytest.mark.parametrize("name", sorted(set(options_of(NOT_OURS)) - NOT_ON_A_COMMAND_LINE))
def test_vllm_acts_on_an_option_as_it_does_without_the_plugin(name: str) -> None:
    """The same configuration but for the plugin's places, or the same refusal."""
    words = example(name)
    without, beside = outcome(*words), outcome(*words, *NDP)
    assert isinstance(without, Exception) == (name in REFUSED_BY_VLLM_HERE), f"{words}: {without!r}"
    if isinstance(without, Exception):
        assert str(beside) == str(without), f"{words}: {beside!r}"
    else:
        assert isinstance(beside, dict), f"{words}: {beside!r}"
        changed = differing(without, beside) - random_paths()
        assert {path for path in changed if not path.startswith(OURS)} == set(), words


@pytest.mark.parametrize("name", [name for name in options_of(WORKS) if name not in ("model", "quantization")])
def test_an_option_that_works_is_accepted(name: str) -> None:
    words = example(name)
    assert isinstance(made := outcome(*words, *NDP), dict), f"{words}: {made!r}"


@pytest.mark.parametrize("name", sorted(set(options_of(REFUSED)) - NOT_ON_A_COMMAND_LINE))
def test_an_option_that_cannot_work_is_refused(name: str) -> None:
    words = example(name)
    without, beside = outcome(*words), outcome(*words, *NDP)
    if name in NOTHING_ALONE:
        assert isinstance(beside, dict), f"{words}: {beside!r}"
    elif name in REFUSED_BY_VLLM_HERE:
        assert isinstance(without, Exception), words
        assert isinstance(beside, Exception), words
    else:
        assert isinstance(beside, ConfigError), f"{words}: {beside!r}"
        assert "does not work together with" in str(beside)
