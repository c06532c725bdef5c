"""Bad input through the real entries: one clear sentence, nothing left running, no engine that does less than asked."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import MODEL, REPLICAS, VLLM_PROGRAM, altered, engine, run_program, sentence
from fuzzing.packed import make_gguf
from vllm import EngineArgs

from ndp_device.common.errors import ConfigError, DeviceUnavailable, NdpError
from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.integration import compat

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_device_is_left_behind")]

DRAFT = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 2}


def configure(model: Path = MODEL, *, additional_config: dict[str, Any] | None = None, **options: Any) -> Any:
    """What `LLM(...)` and `vllm serve` do before anything is loaded: the options become a checked configuration."""
    return EngineArgs(
        model=str(model), quantization="ndp", max_model_len=128, additional_config=additional_config or {}, **options
    ).create_engine_config()


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"hot_expert": 2}, "unknown ndp setting 'hot_expert': did you mean 'hot_experts'?"),
        ({"hot_experts": 9}, "'hot_experts' is 9, the model has only 8 experts"),
        ({"hardware": "h100-ndp51"}, "did you mean 'h100-ndp512'?"),
        ({"replicas": "/no/such/directory"}, "/no/such/directory does not exist: run vllm-ndp quantize"),
        ({"record": "/dev/null/trace"}, "no trace can be written to /dev/null/trace: Not a directory; choose a"),
        ({"record": "/proc/trace"}, "no trace can be written to /proc/trace: "),
        ({"record": str(MODEL)}, "is not empty: README.md lies in it and is not continued"),
    ],
)
def test_impossible_settings_are_refused_before_loading(settings: dict[str, Any], wanted: str):
    with pytest.raises(NdpError) as error:
        configure(additional_config={"ndp": settings})
    assert wanted in sentence(error)


@pytest.mark.parametrize("misplaced", [{"hot_experts": 2}, {"NDP": {"hot_experts": 2}}])
def test_settings_that_would_be_ignored_are_refused(misplaced: dict[str, Any]):
    with pytest.raises(ConfigError) as error:
        configure(additional_config=misplaced)
    assert f'additional_config has no "ndp" but {next(iter(misplaced))!r}' in sentence(error)


def test_drafts_are_refused_where_steps_are_scheduled_before_it_is_known_which_were_accepted():
    """As on a GPU, unless it is turned off; on a CPU vLLM turns it off."""
    config = configure(speculative_config=DRAFT)
    object.__setattr__(config.scheduler_config, "async_scheduling", True)
    with pytest.raises(ConfigError, match="drafts with layers of their own under asynchronous scheduling") as error:
        compat.check(config)
    assert "--no-async-scheduling" in sentence(error)


def test_what_the_user_says_of_a_connector_holds_beside_ours():
    """Roles decide nothing here; what a failed load leads to was once dropped without a word."""
    role = "kv_consumer"
    part = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": {"path": "here"}}
    whole = {"kv_role": role, "kv_load_failure_policy": "recompute", "engine_id": "e", "kv_buffer_device": "cpu"}
    extra = {"connectors": [part], "more": 1}
    for asked, more in (
        (part, {}),
        (whole | {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}, {"more": 1}),
    ):
        made = configure(kv_transfer_config=asked | whole).kv_transfer_config
        parts = made.kv_connector_extra_config["connectors"]
        assert {name: getattr(made, name) for name in whole} == whole
        assert made.kv_connector == "MultiConnector"
        assert made.kv_connector_extra_config == {"connectors": parts} | more
        assert [each["kv_connector"] for each in parts] == ["ExampleConnector", "NdpConnector"]
        assert part.items() <= parts[0].items()


def test_settings_of_other_plugins_are_left_alone():
    config = configure(additional_config={"some_platform": {"graph": True}})
    assert config.parallel_config.worker_cls == "vllm_ndp.integration.worker.NdpWorker"


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"enable_expert_parallel": True, "data_parallel_size": 2}, "drop --enable-expert-parallel"),
        ({"enable_dbo": True}, "drop --enable-dbo"),
        ({"enable_lora": True}, "or drop --enable-lora"),
        (
            {"enable_lora": True, "lora_target_modules": ["q_proj", "experts"]},
            "name other layers in --lora-target-modules",
        ),
        ({"load_format": "dummy"}, "drop --load-format dummy"),
        ({"load_format": "runai_streamer"}, "drop --load-format runai_streamer"),
        ({"kv_offloading_size": 1.0}, "name it in --kv-transfer-config"),
        ({"cpu_offload_gb": 1.0}, "lower 'hot_experts' instead"),
        ({"moe_backend": "triton"}, "drop --moe-backend triton"),
        ({"expert_placement_strategy": "round_robin"}, "drop --expert-placement-strategy"),
        ({"runner": "pooling", "convert": "embed"}, "drop --runner and --convert"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "drop --weight-transfer-config"),
        ({"prefill_context_parallel_size": 2}, "drop --prefill-context-parallel-size"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "drop --worker-cls"),
        ({"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2}}, "draft_model, eagle"),
        ({"speculative_config": DRAFT | {"quantization": "ndp"}}, "drop 'quantization' from --speculative-config"),
    ],
)
def test_features_that_cannot_work_together_are_refused_with_the_option_to_drop(options: dict[str, Any], fix: str):
    with pytest.raises(ConfigError, match="'ndp' does not work together with") as error:
        configure(**options)
    assert fix in sentence(error)


@pytest.mark.parametrize(
    ("section", "option", "fix"),
    [
        ("parallel_config", "enable_eplb", "drop --enable-eplb"),
        ("parallel_config", "enable_elastic_ep", "drop --enable-elastic-ep"),
        ("model_config", "enable_sleep_mode", "sleep mode"),
        ("model_config", "quantization_config", "drop --quantization-config"),
        ("model_config", "model_weights", "give it as the model"),
    ],
)
def test_features_this_platform_does_not_even_offer_would_be_refused_too(section: str, option: str, fix: str):
    """vLLM's CPU build refuses them itself when asked, so they are set in a configuration that is already made."""
    config = configure()
    object.__setattr__(getattr(config, section), option, "s3://bucket/model" if option == "model_weights" else True)
    with pytest.raises(ConfigError, match="'ndp' does not work together with") as error:
        compat.check(config)
    assert fix in sentence(error)


LAYER_1 = "model.layers.1"


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.pop(f"{LAYER_1}.{name}.weight")


def cut_to_248_units(tensors: dict[str, Any]) -> None:
    for name, values in tensors.items():
        if ".experts." in name:
            tensors[name] = (values[:, :248] if name.endswith("w2.weight") else values[:248]).contiguous()


@pytest.mark.parametrize(
    ("damage", "units", "wanted", "fix"),
    [
        (
            without("block_sparse_moe.experts.6.w3"),
            256,
            "layer 1 lacks the up projection of expert 6",
            "the checkpoint is incomplete",
        ),
        (cut_to_248_units, 248, "multiples of 32, damaged has 128 and 248", "serve it on a GPU"),
    ],
)
def test_a_checkpoint_that_does_not_add_up_is_refused_before_loading(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object], units: int, wanted: str, fix: str
):
    """Whatever is read of it; all that may be wrong with it: test_checkpoint_names.py."""
    with pytest.raises(NdpError) as error:
        configure(altered(tmp_path / "damaged", change=damage, intermediate_size=units))
    assert wanted in sentence(error)
    assert fix in sentence(error)


def test_a_gguf_file_and_bitsandbytes_are_refused_before_loading(tmp_path: Path):
    """Their experts are read; vLLM has no way to load the rest of such a model."""
    make_gguf(tmp_path / "gguf", json.loads((MODEL / "config.json").read_text()))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / file, tmp_path / "gguf" / file)
    altered(tmp_path / "nf4", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    for name, wanted in (
        ("gguf", "cannot be served: vLLM loads no dense layer of a GGUF file"),
        ("nf4", "bitsandbytes checkpoints are not served: give one in bfloat16"),
    ):
        with pytest.raises(ConfigError) as error:
            configure(tmp_path / name)
        assert wanted in sentence(error)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A replica directory that may be damaged."""
    return Path(shutil.copytree(REPLICAS, tmp_path / "replicas"))


def test_one_flipped_bit_in_a_replica_file_stops_the_start(copied: Path):
    """Sizes are right, so only the digest tells; the device reads it when it starts."""
    file = copied / "experts-00001.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1000] ^= 4
    file.write_bytes(contents)
    with pytest.raises(NdpError) as error, engine(settings={"replicas": str(copied)}):
        pass
    assert "experts-00001.safetensors is damaged" in sentence(error)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--port", "{taken}"], "another program listens at this server's port: end it, or give another --port"),
        pytest.param(  # vLLM's own refusal, in the process of the engine
            ["--additional-config.ndp.hot_experts", "4", "--kv-cache-memory-bytes", str(1 << 50), "--enforce-eager"],
            "Available memory on node ",
            marks=pytest.mark.programs,
        ),
    ],
)
def test_serve_ends_with_one_sentence_and_exit_code_2(options: list[str], sentence: str):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asked = [option.format(taken=taken.getsockname()[1]) if "{taken}" in option else option for option in options]
        ports = [] if "--port" in asked else ["--port", "0"]
        done = run_program(VLLM_PROGRAM, "serve", MODEL, "--quantization", "ndp", "--host", "127.0.0.1", *ports, *asked)
    assert done.returncode == 2, done.stderr
    assert (done.stderr.strip().splitlines() or [""])[-1].startswith(f"vllm-ndp: {sentence}")
    assert "Traceback" not in done.stderr + done.stdout


# -- devices that a host cannot use ------------------------------------------------------------------------------------


def test_a_host_never_plans_with_replicas_it_made_itself_beside_a_device_that_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without the setting `replicas` nothing is built in the cache. Another calibration: test_device_handshake.py."""
    device = DeviceProcess.spawn(MODEL, REPLICAS)
    try:
        monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path / "cache"))
        with pytest.raises(ConfigError) as error, engine(settings={"devices": device.address}):
            pass
        assert "and this host has none to plan with: set 'replicas' to the directory" in sentence(error)
        assert not (tmp_path / "cache").exists()
    finally:
        device.terminate()


def test_an_address_where_nobody_listens_is_named(tmp_path: Path):
    address = f"ipc://{tmp_path / 'nobody'}"
    with (
        pytest.raises(DeviceUnavailable, match=r"no device answered at .* is it running") as error,
        engine(settings={"cold_precision": "full", "devices": address}),
    ):
        pass
    assert address in sentence(error)


# -- a checkpoint that lacks a tensor, or a part of a fused one --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.1.post_attention_layernorm.weight", "the checkpoint lacks {name}"),
        ("model.embed_tokens.weight", "the checkpoint lacks {name}"),
        ("model.layers.1.self_attn.k_proj.weight", "self_attn.qkv_proj.weight, or a part of it"),  # stock serves it
    ],
)
def test_a_missing_tensor_and_a_missing_part_of_a_fused_one_are_refused_by_name(
    tmp_path: Path, name: str, said: str
) -> None:
    model = altered(tmp_path / "model", change=lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError) as refused, engine(model, settings={"cold_precision": "full"}):
        pass
    assert said.format(name=name) in str(refused.value)
