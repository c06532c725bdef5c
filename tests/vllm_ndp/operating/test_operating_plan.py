"""`vllm-ndp plan`: bytes against published file sizes and a pencil, speed against a replay, lines against the settings.

test_integration_programs.py holds the same bytes against running engines.
"""

import json
import re
import shlex
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fuzzing.packed import make_gguf
from given_options import given_by
from in_this_process import run_here
from paths import ROOT

from ndp_device.checkpoint.values import StoredForm
from ndp_device.common.errors import ConfigError
from ndp_device.timing.public_models import PUBLIC_MODELS
from ndp_device.timing.spec import load_hardware
from vllm_ndp.config import NdpSettings
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.gpu_timing import StepClock
from vllm_ndp.lab.compare import compare
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.operating import sources
from vllm_ndp.operating.proposal import Proposal, propose
from vllm_ndp.operating.sizing import (
    DEVICE_BYTES,
    GB,
    GPU_PROGRAM_BYTES,
    GPU_SHARE,
    KV_BLOCK,
    Sizing,
    human,
    parse_bytes,
)
from vllm_ndp.operating.sources import CheckpointSource, longest_context, source_named
from vllm_ndp.operating.speed import Measured, measure, simulated
from vllm_ndp.traces.synthetic import read_routing, synthetic_trace

TINY = ROOT / "models" / "tiny-mixtral"

FILE_BYTES = {
    "mixtral-8x7b": 93_405_585_408,
    "mixtral-8x22b": 281_241_268_224,
    "qwen3-30b-a3b": 61_064_245_248,
    "olmoe": 2 * 6_919_161_856,
    "deepseek-v2-lite": 2 * 15_706_484_224,
    "phi-3.5-moe": 2 * 41_873_153_344,
}
"""`total_size` of the published model.safetensors.index.json; where two are multiplied, twice the parameters that the
hub counts in the bfloat16 files."""


def sizing_of(name: str, gpu: int | None = 24 * GB, host: int = 64 * GB, **demand: int) -> Sizing:
    return Sizing(source_named(name).model, host, gpu, **demand)


@pytest.mark.parametrize("name", FILE_BYTES)
def test_a_public_shape_weighs_what_its_published_files_weigh(name: str) -> None:
    """Norms and biases are left out: below a thousandth."""
    assert sizing_of(name).checkpoint_bytes == pytest.approx(FILE_BYTES[name], rel=1e-3)


def test_mixtral_on_24_gb_is_what_a_pencil_says() -> None:
    """22.08 GB of 24 may be used. Beside experts: .6 program, 3.21 other weights, .70 staging, 4 x 8192 tokens of
    131072 bytes and 384 bytes of sidecar = 4.31, .37 activations. 12.9 GB are left, and an expert of every layer is
    32 x .352 = 11.27 GB: K is 1."""
    sizing = sizing_of("mixtral-8x7b", context=8192, batch=4)
    expert = 2 * 3 * 4096 * 14336
    assert sizing.hot(1) == 32 * expert
    assert sizing.kv_cache == 4 * 8192 * 131072
    assert sizing.sidecar == 4 * 8192 * 32 * 2 * 6
    best = next(sizing.options())
    assert (best.num_hot, best.widest) == (1, 4)
    used = sum(best.gpu.values())
    assert used <= 0.92 * 24 * GB < used + sizing.hot(1)
    assert best.kv_tokens_left == (int(0.92 * 24 * GB) - used) // (131072 + 384)


def test_one_hot_expert_more_never_fits_and_options_differ_in_width() -> None:
    for name, gpu in (("mixtral-8x7b", 80 * GB), ("qwen3-30b-a3b", 24 * GB), ("olmoe", None), ("gpt-oss-20b", 16 * GB)):
        sizing = sizing_of(name, gpu)
        found = list(sizing.options())
        assert [one.widest for one in found] == sorted({one.widest for one in found}, reverse=True)
        for one in found:
            if one.slot_bits < 16:
                assert (one.num_hot, one.slot_bits) == (sizing.model.num_experts, one.widest)
            else:
                assert one.num_hot == sizing.model.num_experts or sizing.option(one.num_hot + 1, one.widest) is None


def test_narrower_replicas_are_proposed_where_the_host_has_no_room_for_wide_ones() -> None:
    """4 bits of Mixtral-8x7B are 28.2 GB with the scales of four widths, 3 bits 21.1: 25 GB hold the latter."""
    assert [one.widest for one in sizing_of("mixtral-8x7b", host=25 * GB).options()] == [3, 2, 1]


def test_a_machine_that_holds_no_wider_replicas_than_1_bit_is_called_of_no_use() -> None:
    tight, roomy = proposal("mixtral-8x7b", 80 * GB, 12 * GB), proposal("mixtral-8x7b", 80 * GB, 64 * GB)
    assert tight.ways[0].option.widest == 1
    assert "too few for useful answers" in tight.as_dict()["too_few_bits"]
    assert roomy.as_dict()["too_few_bits"] == ""


def test_a_window_is_cached_up_to_what_two_steps_add_to_it() -> None:
    """gpt-oss-20b: 12 layers keep all 16384 tokens, 12 keep 127 + 2 x 2048 and a block, in whole blocks: 34 of 128;
    2 x 8 heads x 64 values of 2 bytes."""
    sizing = sizing_of("gpt-oss-20b", context=16384)
    assert sizing.kv_per_request == 12 * (16384 + 34 * 128) * 2 * 8 * 64 * 2


def test_kinds_of_layers_in_unequal_numbers_are_padded_and_their_blocks_are_alike() -> None:
    """Five layers: (2 x 13 + 12) blocks of two layers, and vLLM's own; the line for fewer did not start. Qwen3-Next:
    blocks of 1152 tokens, as large as a state of 548864 numbers in float32, of 12 layers; 4 of 4096 tokens, and two
    states each of three groups."""
    oss = source_named("gpt-oss-20b").model
    five = Sizing(replace(oss, num_layers=5, decoder=(oss.decoder * 2)[:5]), 64 * GB, context=1500)
    page = 128 * 2 * 8 * 64 * 2
    assert (five.kv_per_request, five.kv_cache_with_spare) == (38 * 2 * page, 39 * 2 * page)
    seven = Sizing(replace(oss, num_layers=7, decoder=(oss.decoder * 2)[:7]), 64 * GB, context=1500)
    assert seven.kv_per_request == (13 + 12) * 4 * page
    states = sizing_of("qwen3-next")
    assert states.kv_per_request == (4 + 3 * 2) * 12 * 1152 * 2 * 2 * 256 * 2


def test_what_does_not_fit_is_refused_with_the_place_and_the_bytes() -> None:
    with pytest.raises(
        ConfigError, match=r"does not fit: .* needs 7\.04 GB of GPU memory, of which 3\.68 GB may be used"
    ):
        sizing_of("mixtral-8x7b", gpu=4 * GB, context=16384).require()
    with pytest.raises(ConfigError, match=r"does not fit: .* GB of host memory, of which 4 GB may be used"):
        sizing_of("mixtral-8x7b", host=4 * GB).require()


def test_a_gpu_holds_two_staging_slots_and_a_cpu_one() -> None:
    """As StagingStreamer allocates them: on a GPU one expert computes while the next one arrives."""
    for gpu, slots in ((48 * GB, 2), (None, 1)):
        option = sizing_of("mixtral-8x7b", gpu=gpu, host=200 * GB).option(2, 4)
        assert option is not None
        assert (option.host if gpu is None else option.gpu)["staging slot"] == slots * 3 * 4096 * 14336 * 2


def test_a_user_who_needs_no_device_is_told_so() -> None:
    assert "stock vLLM serves it" in sizing_of("mixtral-8x7b", gpu=141 * GB).advice
    assert "at 4 bits" in sizing_of("mixtral-8x7b", gpu=48 * GB).advice
    assert sizing_of("mixtral-8x7b", gpu=24 * GB).advice == ""
    stored = replace(sizing_of("gpt-oss-20b"), stored_form=source_named("gpt-oss-20b").stored_form)
    assert stored.advice.startswith("The checkpoint fits into GPU memory as it is stored: stock vLLM serves it")
    on_cpu = Sizing(source_named("mixtral-8x7b").model, 128 * GB, stored_bytes=93_405_585_408)
    assert on_cpu.advice.startswith("Stock vLLM would lose nothing")
    smaller, fp8, unknown = {"host_bytes": 64 * GB}, {"stored_bytes": 50 * GB}, {"stored_bytes": None}
    assert {replace(on_cpu, **changed).advice for changed in (smaller, fp8, unknown)} == {""}


@pytest.mark.parametrize(("text", "num_bytes"), [("24GB", 24 * GB), ("1.5 GiB", 3 << 29), ("512mb", 512_000_000)])
def test_sizes_are_read_with_their_unit(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, "--x") == num_bytes


@pytest.mark.parametrize("text", ["24", "GB", "-1GB", "24 KB", "1e3GB"])
def test_a_size_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--x must be a size with its unit"):
        parse_bytes(text, "--x")


def test_bytes_are_written_for_people() -> None:
    assert [human(n) for n in (0, 999, 1000, 999_600_000, 4_290_000_000, 3_000_000_000_000)] == [
        "0 B", "999 B", "1 kB", "1 GB", "4.29 GB", "3 TB",
    ]  # fmt: skip


def test_a_config_alone_gives_the_sizes_of_the_whole_checkpoint(tmp_path: Path) -> None:
    whole = source_named(str(TINY)).model
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    for name in (str(tmp_path / "config.json"), str(tmp_path)):
        assert replace(source_named(name).model, name=whole.name) == whole


def test_a_directory_is_printed_by_its_whole_name(tmp_path: Path) -> None:
    """What stood in brackets was left out, as a style."""
    (tmp_path / "m[v2]").mkdir()
    (tmp_path / "m[v2]" / "config.json").write_bytes((TINY / "config.json").read_bytes())
    assert run_here("vllm-ndp", "plan", tmp_path / "m[v2]", "--host-memory", "8GB").stdout.startswith("m[v2] (")


def test_the_config_of_a_public_shape_gives_its_sizes(tmp_path: Path) -> None:
    for name in ("deepseek-v2-lite", "gpt-oss-20b", "granite-4.0-h-tiny"):
        (tmp_path / "config.json").write_text(json.dumps(PUBLIC_MODELS[name].config))
        assert replace(source_named(str(tmp_path)).model, name=name) == source_named(name).model


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_a_checkpoint_of_another_dtype_is_planned_as_it_is_served(tmp_path: Path, dtype: str) -> None:
    """`vllm serve --dtype` takes no FP8."""
    config = json.loads((TINY / "config.json").read_text()) | {"dtype": dtype, "torch_dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert source_named(str(tmp_path)).model.dtype == "bfloat16"


def test_the_id_of_a_public_model_needs_no_network() -> None:
    assert source_named("mistralai/Mixtral-8x7B-v0.1").model == source_named("mixtral-8x7b").model


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mixtral-8x7", "did you mean 'mixtral-8x7b'"),
        ("no-such-org/no-such-model", "and its config.json cannot be had from the hub"),
        ("{tmp}", "no config.json in"),
    ],
)
def test_what_is_no_model_is_refused_in_one_sentence(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=says) as refused:
        source_named(name.replace("{tmp}", str(tmp_path)))
    assert "\n" not in str(refused.value)


def test_expected_simulated_speed_lies_between_two_widths_by_its_share_and_a_prompts_is_one_step_of_the_clock() -> None:
    costs = Costs(load_hardware("h100-ndp512"), source_named("mixtral-8x7b").model)
    two, quarter, three = (simulated(costs, 0, bits, 1, 96).decode_step_ps for bits in (2.0, 2.25, 3.0))
    assert quarter == pytest.approx(0.75 * two + 0.25 * three, rel=1e-6)
    clock, rows = StepClock(costs.gpu), 96
    clock.begin_step(rows, rows, sum(range(1, rows + 1)), [(0, rows)])
    for _ in range(costs.shape.num_layers):
        clock.begin_layer()
        clock.end_layer(streamed_experts=costs.shape.num_experts, streamed_pairs=rows * costs.shape.top_k)
    assert simulated(costs, 0, 3.0, 1, rows).prefill_ps == clock.end_step(1).total_ps


@pytest.mark.parametrize("model", ["mixtral-8x7b", "olmoe"])
@pytest.mark.parametrize("batch", [1, 3])
def test_expected_simulated_speed_is_that_of_a_replay_with_even_routing(model: str, batch: int) -> None:
    """Contexts of 64 to 128 tokens: 96 on average. What is left is chance: seen within 1.5 %."""
    shape = source_named(model).model
    trace = synthetic_trace(
        read_routing("", model).settings(
            model, num_requests=8, prompt_len=64, decode_len=64, signal=0, concentration=1e6
        )
    )
    settings = CompareSettings(
        model=model,
        systems=("context_aware",),
        policies=("static",),
        batches=(batch,),
        avg_bits=3.0,
        policy_options={"bit_rule": "uniform"},
    )
    (row,) = compare(trace, settings).rows
    expected = simulated(Costs(load_hardware(), shape), shape.num_experts // 2, 3.0, batch, 96)
    assert expected.decode_tokens_per_s == pytest.approx(row.decode_tokens_per_s, rel=0.02)
    if batch == 1:
        alone = simulated(Costs(load_hardware(), shape), shape.num_experts // 2, 3.0, 1, 64)
        assert alone.prefill_ps / 1e9 == pytest.approx(row.ttft_ms, rel=0.01)


def test_measured_time_is_what_is_read_and_what_the_kernel_takes() -> None:
    """4 layers x 2 experts of 1 ms, and a million bytes beside them, a fifth in the output matrix."""
    measured = Measured(1e9, 1e-3, 2e-3, 1e9, 1e9, layer_s=1.5e-3, prompt_layer_s=4e-3, bits=3, isa="any")
    model = source_named(str(TINY)).model
    assert measured.decode_step_s(model, 8 * 10**5, 2 * 10**5) == pytest.approx(1e-3 + 8e-3 + 4 * 1.5e-3)


def test_what_a_layer_takes_beside_its_matrices_is_measured_and_grows_with_a_prompts_rows() -> None:
    """A constant held on one machine: gpt-oss-20b's first token came after 1.4 times the forecast on a slower one."""
    measured = measure(replace(source_named(str(TINY)).model, hidden_size=2880), 4)
    assert 0 < measured.layer_s < measured.prompt_layer_s


def test_a_prompts_rows_meet_every_matrix_but_the_output_matrix() -> None:
    """An expert takes 2.5 ms for its share of the prompt's rows, and each of 8 is touched in each of 4 layers."""
    measured = Measured(1e9, 1e-3, 2.5e-3, 1e9, 1e8, layer_s=1.5e-3, prompt_layer_s=4e-3, bits=4, isa="any")
    model = source_named(str(TINY)).model
    linear = model.beside_weights * 1e-8 + model.head_weights * 1e-9
    expected = 4 * 8 * 2.5e-3 + linear + 4 * 4e-3
    assert measured.prompt_s(model, model.beside_weights, model.head_weights) == pytest.approx(expected)


# -- the lines that start it -------------------------------------------------------------------------------------------


def measured(bits: int) -> Measured:
    return Measured(1e10, 1e-5, 1e-5, 2e10, 1e10, 1e-3, 1e-3, bits, "x")


def proposal(name: str, gpu: int | None, host: int, **demand: Any) -> Proposal:
    source = source_named(name)
    sizing = Sizing(source.model, host, gpu, **demand)
    return propose(source, sizing, Costs(load_hardware(), source.model))


@pytest.mark.parametrize(
    ("name", "gpu", "host"),
    [("mixtral-8x7b", 24 * GB, 64 * GB), ("mixtral-8x7b", 48 * GB, 18 * GB), (str(TINY), None, GB * 8)],
)
def test_the_serve_line_holds_settings_that_the_plugin_accepts(name: str, gpu: int | None, host: int) -> None:
    proposed = proposal(name, gpu, host)
    words = shlex.split(proposed.serve_line())
    assert words[:2] == ["vllm", "serve"]
    settings, best = NdpSettings.from_mapping(given_by(words)), proposed.ways[0].option
    num_experts = proposed.sizing.model.num_experts
    assert settings.resolve_hot_experts(num_experts) == best.num_hot
    assert settings.resolve_offload_bits(num_experts) <= best.widest
    assert settings.avg_bits <= best.widest
    widths = range(1 if best.slot_bits == 16 else best.widest, best.widest + 1)
    assert f"--bits {','.join(map(str, widths))}" in proposed.quantize_line()


@pytest.mark.parametrize(("name", "host", "bits"), [("gpt-oss-20b", 24 * GB, 4), ("deepseek-v3", 1000 * GB, 8)])
def test_what_is_served_as_it_is_stored_needs_no_replicas(name: str, host: int, bits: int) -> None:
    """gpt-oss-20b was to be quantized from its 4 bits to 4 bits first."""
    proposed = proposal(name, None, host, stored_form=source_named(name).stored_form)
    settings = NdpSettings.from_mapping(given_by(shlex.split(proposed.serve_line())))
    assert (proposed.quantize_line(), settings.replicas, settings.slot_bits) == (None, None, bits)
    narrower = proposal(name, None, host // 2, stored_form=source_named(name).stored_form)
    assert "quantize" in str(narrower.quantize_line())
    assert "REPLICAS" in narrower.serve_line()


@pytest.mark.parametrize(
    ("host", "stored", "bits"),
    [
        ("64GB", {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}, 4),
        ("64GB", {"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ("24GB", {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, 3),
    ],
)
def test_beside_a_gpu_the_device_serves_the_checkpoints_codes_where_they_fit(
    tmp_path: Path, host: str, stored: dict[str, Any], bits: int
) -> None:
    """They were to be fitted again, and read at 3 bits."""
    config = PUBLIC_MODELS["mixtral-8x7b"].config | {"quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run_here("vllm-ndp", "plan", tmp_path, "--gpu-memory", "24GB", "--host-memory", host, "--json")
    said = json.loads(done.stdout)
    as_stored = bits != 3
    assert (said["as_stored"], said["ways"][0]["avg_bits"]) == (as_stored, bits)
    assert said["quantize"] is None if as_stored else said["quantize"].endswith("--bits 1,2,3")
    settings = NdpSettings.from_mapping(given_by(shlex.split(said["serve"])))
    assert (settings.avg_bits, settings.replicas) == (bits, None if as_stored else "REPLICAS")
    if as_stored:
        codes = 32 * 8 * 3 * 4096 * 14336 * (1 / 2 + 4 / 32 if bits == 4 else 1 + 4 / 128)
        assert said["ways"][0]["host_bytes"]["device"] == pytest.approx(codes, rel=5e-3)
        assert settings.runs_only_at(bits, 8, in_slots=False)
        at_3 = said["ways"][1]
        assert said["ways"][0]["simulated_tpot_us"] > at_3["simulated_tpot_us"] * (1 + (5 / 3.25 - 1) / 2)


def test_a_gguf_file_gets_replicas_and_no_line_that_serves_it(tmp_path: Path) -> None:
    """The server refuses the file, and plan printed such a line, and that stock vLLM would do."""
    make_gguf(tmp_path / "gguf", json.loads((TINY / "config.json").read_text()))
    said = planned(str(tmp_path / "gguf"), "--host-memory", "8GB")
    assert said["advice"] == "vLLM loads no dense layer of a GGUF file, so serve the model's safetensors"
    assert said["serve"] is None
    assert "quantize" in said["quantize"]


@pytest.mark.parametrize(
    ("changed", "words", "is_of_cpu"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes checkpoints are not served", False),
        ({"architectures": ["JambaForCausalLM"]}, "JambaForCausalLM cannot be served on a CPU: ", True),
    ],
)
def test_plan_prints_no_line_that_the_server_refuses(
    tmp_path: Path, changed: dict[str, Any], words: str, is_of_cpu: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((TINY / "config.json").read_text()) | changed))
    for gpu in ((), ("--gpu-memory", "24GB")):
        said = planned(str(tmp_path), *gpu)
        is_refused = not (gpu and is_of_cpu)
        assert (said["serve"] is None, said["advice"].startswith(words)) == (is_refused, is_refused)


@pytest.mark.parametrize(
    "changed",
    [
        {"quantization_config": {"quant_method": "compressed_tensors"}},
        {"quantization_config": {"quant_method": "GPTQ", "bits": 4, "group_size": 32}},
        {"architectures": [["MixtralForCausalLM"], {}]},
        {"architectures": "MixtralForCausalLM"},
    ],
)
def test_plan_prints_a_line_for_what_vllm_reads_in_other_words(tmp_path: Path, changed: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((TINY / "config.json").read_text()) | changed))
    assert planned(str(tmp_path))["serve"].startswith("vllm serve")


@pytest.mark.parametrize("host", [64 * GB, 4 * GB])
def test_no_replicas_are_asked_for_where_every_expert_is_hot(host: int) -> None:
    """Nor is there room for them: 4 GB were refused, and 10 warned of 1 bit."""
    proposed = proposal("mixtral-8x7b", 141 * GB, host)
    assert (proposed.quantize_line(), len(proposed.ways), proposed.too_few_bits) == (None, 1, "")
    assert not {"replicas", "avg_bits"} & given_by(shlex.split(proposed.serve_line())).keys()
    assert proposed.ways[0].option.host["device"] == DEVICE_BYTES


def test_layers_that_all_keep_a_state_have_two_of_each_request(tmp_path: Path) -> None:
    """The first two layers of Qwen3-Next; plan divided by zero."""
    config = PUBLIC_MODELS["qwen3-next"].config | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said, model = planned(str(tmp_path)), source_named(str(tmp_path)).model
    assert said["kv_bytes_per_request"] == 2 * (4 // model.dtype_bytes) * model.state_bytes


def test_a_config_that_says_how_experts_are_stored_is_mapped_at_that_size() -> None:
    """DeepSeek-V3 has 654 GB of experts in FP8, not 1.3 TB."""
    said = planned("deepseek-v3", "--gpu-memory", "80GB", "--host-memory", "600GB")
    assert said["ways"][0]["mapped_bytes"] == pytest.approx(58 * 256 * 3 * 7168 * 2048 * 33 / 32, rel=1e-6)


def test_the_command_says_so_and_prints_one_line_to_start() -> None:
    done = run_here("vllm-ndp", "plan", "gpt-oss-20b", "--host-memory", "24GB")
    assert "Experts are served at 4 bits as the checkpoint stores them: no replicas are needed" in done.stdout
    assert [line.split()[1:3] for line in done.stdout.splitlines() if line[0] == "$"] == [["vllm", "serve"]]
    said = planned("gpt-oss-20b")
    assert (said["as_stored"], said["quantize"], said["ways"][0]["read_bits"]) == (True, None, 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_experts_time_is_measured_at_the_width_that_is_served(bits: int) -> None:
    """Of 8 bits as stored that of 4 was printed."""
    source, asked = source_named("mixtral-8x7b"), list[int]()

    def asking(width: int) -> Measured:
        asked.append(width)
        return measured(width)

    sizing = Sizing(source.model, 64 * GB, stored_form=StoredForm("float8", 0) if bits == 8 else None)
    ways = propose(source, sizing, Costs(load_hardware(), source.model), asking).ways
    assert asked == [bits] == [way.option.slot_bits for way in ways if way.measured_decode_step_s is not None]


def test_on_a_cpu_the_kv_cache_is_the_demand_and_one_block() -> None:
    proposed = proposal(str(TINY), None, 8 * GB, context=2048, batch=3)
    per_token = 4 * 2 * 2 * 32 * 2
    assert proposed.sizing.kv_cache_with_spare == (3 * 2048 + KV_BLOCK) * per_token


def test_the_two_clocks_of_a_proposal_have_names_of_their_own() -> None:
    source = source_named(str(TINY))
    sizing = Sizing(source.model, 8 * GB)
    probed = propose(
        source,
        sizing,
        Costs(load_hardware(), source.model),
        measured,
    )
    way = probed.as_dict()["ways"][0]
    assert way["measured_tpot_ms_at_best"] > 0 < way["simulated_tpot_us"]
    assert json.loads(json.dumps(probed.as_dict())) == probed.as_dict()
    assert isinstance(probed.source, CheckpointSource)


def planned(*words: str) -> dict[str, Any]:
    host = () if "--host-memory" in words else ("--host-memory", "64GB")
    done = run_here("vllm-ndp", "plan", *words, *host, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),
        ({"max_position_embeddings": 4096, "model_max_length": 8192}, 8192),
        ({"max_sequence_length": 1024}, 1024),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}}, 16384),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_parameters": {"full": {"rope_type": "linear", "factor": 8}}}, 32768),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": None}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": float("inf")}}, 4096),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
    ],
)
def test_the_longest_request_is_the_one_that_vllm_takes(config: dict[str, Any], longest: int | None) -> None:
    assert longest_context(config) == longest


def test_no_line_asks_for_a_context_that_the_model_does_not_have() -> None:
    """tiny-mixtral has 2048 positions; the default is 4096."""
    assert "--max-model-len 2048" in planned(str(TINY))["serve"]
    assert "--max-model-len 1024" in planned(str(TINY), "--context", "1024")["serve"]
    said = run_here("vllm-ndp", "plan", TINY, "--host-memory", "8GB").stdout
    assert "The context is 2048 tokens, the model's longest, not 4096." in said
    public = ("vllm-ndp", "plan", "mixtral-8x7b", "--gpu-memory", "48GB", "--host-memory", "64GB", "--context")
    unknown = "vLLM refuses 40000 tokens if it is shorter."
    assert [unknown in run_here(*public, context).stdout for context in ("40000", "4096")] == [True, False]
    assert not said.splitlines()[-1].startswith("{")


def test_the_simulated_card_is_the_one_whose_memory_is_nearest() -> None:
    for memory, card in (("24GB", "rtx4090"), ("80GiB", "h100-ndp512"), ("140GB", "h200-gen5")):
        assert planned("Mixtral-8x7B", "--gpu-memory", memory)["hardware"] == card
    assert planned("mixtral-8x7b", "--gpu-memory", "24GB", "--hardware", "h100-ndp512")["hardware"] == "h100-ndp512"
    assert planned("mixtral-8x7b")["hardware"] == "h100-ndp512"


# -- parts and figures, by hand ----------------------------------------------------------------------------------------


EXPERT_WEIGHTS, OTHER_BYTES = 3 * 4096 * 14336, sizing_of("mixtral-8x7b").other_weights
"""Of Mixtral-8x7B."""


@pytest.mark.parametrize(("form", "bytes_of_weight"), [(None, 2), (StoredForm("float8", 0), 33 / 32)])
def test_what_the_host_has_left_keeps_that_share_of_the_files_at_hand(
    form: StoredForm | None, bytes_of_weight: float
) -> None:
    sizing = replace(sizing_of("mixtral-8x7b"), stored_form=form)
    option, roomy = sizing.option(1, 4), replace(sizing, host_bytes=1000 * GB).option(1, 4)
    assert option is not None
    assert roomy is not None
    left = 64 * GB - sum(option.host.values())
    assert option.pool_cached == pytest.approx(left / (32 * 8 * EXPERT_WEIGHTS * bytes_of_weight), rel=1e-6)
    assert roomy.pool_cached == 1


@pytest.mark.parametrize(("batch", "context", "tokens"), [(4, 8192, 2048), (4, 100, 400)])
def test_activations_are_of_the_tokens_that_a_step_has_and_logits_of_every_request(
    batch: int, context: int, tokens: int
) -> None:
    row = 6 * 4096 + 2 * (2 * 14336 + 4096)
    assert sizing_of("mixtral-8x7b", batch=batch, context=context).activations == tokens * row * 2 + 8 * batch * 32000


def test_a_sidecar_has_whole_blocks_of_every_request() -> None:
    assert sizing_of("mixtral-8x7b", context=129, batch=3).sidecar == 3 * 256 * 32 * 2 * 6


@pytest.mark.parametrize(("num_hot", "exchanged"), [(2, 2), (6, 2)])
def test_a_prompt_streams_what_is_cold_and_exchanges_no_more_than_that(num_hot: int, exchanged: int) -> None:
    sizing = sizing_of("mixtral-8x7b", gpu=141 * GB)
    option, of_all = sizing.option(num_hot, 4), 32 * 2 * EXPERT_WEIGHTS
    assert option is not None
    streamed = (8 - num_hot) * of_all
    assert [*sizing.moved(option).values()] == [OTHER_BYTES + num_hot * of_all, streamed, exchanged * of_all]
    in_slots = sizing_of("mixtral-8x7b", gpu=None).in_slots(4)
    assert in_slots is not None
    assert [*sizing.moved(in_slots).values()] == [OTHER_BYTES + in_slots.host["experts in slots"]]


@pytest.mark.parametrize(
    ("bytes_of_weight", "form", "said"),
    [
        (2, None, "Everything fits"),
        (33 / 32, StoredForm("float8", 0), "The checkpoint fits"),
        (1 / 2 + 4 / 128, None, "All experts fit into GPU memory at 4 bits"),
    ],
)
def test_stock_vllm_is_named_from_the_byte_on_that_it_needs(
    bytes_of_weight: float, form: StoredForm | None, said: str
) -> None:
    """It has no staging slot and no sidecar: they were counted, and a GPU that it just fits was not told of it."""
    sizing = replace(sizing_of("mixtral-8x7b"), stored_form=form)
    needs = GPU_PROGRAM_BYTES + OTHER_BYTES + sizing.kv_cache + sizing.activations
    needs += round(32 * 8 * EXPERT_WEIGHTS * bytes_of_weight)
    enough, few = (replace(sizing, gpu_bytes=int(needs / GPU_SHARE) + more) for more in (2, -2))
    assert [one.advice.startswith(said) for one in (enough, few)] == [True, False]


def test_stock_vllm_on_a_cpu_is_named_from_the_byte_on_that_it_needs() -> None:
    sizing = Sizing(source_named("mixtral-8x7b").model, 128 * GB, stored_bytes=93_405_585_408)
    whole = 484_000_000 + 890_000_000 + OTHER_BYTES + 32 * 8 * 2 * EXPERT_WEIGHTS + 4096 * 131072
    assert f"its {human(whole)} fit" in replace(sizing, host_bytes=whole).advice
    assert replace(sizing, host_bytes=whole - 1).advice == ""


@pytest.mark.parametrize(
    ("gpu", "host", "place"), [(None, 4 * GB, "host"), (80 * GB, 4 * GB, "host"), (4 * GB, 64 * GB, "gpu")]
)
def test_a_refusal_names_the_least_memory_that_would_do(gpu: int | None, host: int, place: str) -> None:
    sizing = sizing_of("mixtral-8x7b", gpu=gpu, host=host)
    least = bisect_left(
        range(100 * GB), True, key=lambda held: any(replace(sizing, **{f"{place}_bytes": held}).options())
    )
    needs = least if place == "host" else int(least * GPU_SHARE)
    with pytest.raises(
        ConfigError, match=f" it needs {re.escape(human(needs))} of {place} memory".replace("gpu", "GPU")
    ):
        sizing.require()


def test_no_step_has_fewer_tokens_than_requests() -> None:
    """vLLM refuses --max-num-batched-tokens below --max-num-seqs."""
    words = proposal(str(TINY), None, 64 * GB, context=64, batch=3000).serve_options()
    assert (words[words.index("--max-num-seqs") + 1], words[words.index("--max-num-batched-tokens") + 1]) == (
        "3000",
        "3000",
    )


def test_figures_of_a_way_have_the_units_of_their_names() -> None:
    source = source_named(str(TINY))
    sizing, costs = Sizing(source.model, 8 * GB), Costs(load_hardware(), source.model)
    proposed = propose(source, sizing, costs, measured)
    way = proposed.as_dict()["ways"][0]
    step_s = measured(4).decode_step_s(source.model, sizing.linear_layers, sizing.head)
    assert way["measured_tpot_ms_at_best"] == pytest.approx(1e3 * step_s, abs=1e-3)
    assert way["simulated_tpot_us"] == pytest.approx(1e6 / way["simulated_decode_tokens_per_s"], rel=1e-3)
    assert way["simulated_ttft_us"] == proposed.ways[0].simulated.prefill_ps / 1e6
    assert (way["mapped_bytes"], way["moved_bytes"]["read at start-up"] > 0) == (0, True)


def test_experts_in_narrower_slots_are_read_in_less_simulated_time() -> None:
    steps = [way.simulated.decode_step_ps for way in proposal("mixtral-8x7b", None, 64 * GB).ways]
    assert len(steps) == len(set(steps)) == 4
    assert steps == sorted(steps, reverse=True)
    beside = proposal("mixtral-8x7b", 24 * GB, 64 * GB)
    costs, option = Costs(load_hardware(), beside.sizing.model), beside.ways[0].option
    assert option.widest == 4
    assert beside.ways[0].simulated == simulated(costs, option.num_hot, 3.0, 1, 4096)  # what is read on average


def test_beside_a_gpu_this_machine_expects_no_time_of_its_own() -> None:
    source = source_named("mixtral-8x7b")
    sizing = Sizing(source.model, 64 * GB, 24 * GB)
    probed = propose(source, sizing, Costs(load_hardware(), source.model), lambda _: measured(3))
    assert {(way.measured_decode_step_s, way.measured_first_token_s) for way in probed.ways} == {(None, None)}


@pytest.mark.parametrize(("more", "found"), [(0, False), (1, True)])
def test_the_form_of_linear_layers_is_that_of_most_of_them(
    monkeypatch: pytest.MonkeyPatch, more: int, found: bool
) -> None:
    model, form = source_named(str(TINY)).model, StoredForm("int4", 32)
    packed = SimpleNamespace(weights_by_form={StoredForm("float8", 0): 1, form: model.beside_weights // 2 + more})
    monkeypatch.setattr(sources, "PackedLinears", lambda _: packed)
    assert source_named(str(TINY)).linear_form == (form if found else None)


def test_a_config_that_names_no_dtype_is_planned_in_bfloat16(tmp_path: Path) -> None:
    config = {key: value for key, value in json.loads((TINY / "config.json").read_text()).items() if "dtype" not in key}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert source_named(str(tmp_path)).model.dtype == "bfloat16"


def cells_of(shown: str) -> list[list[str]]:
    """Of the table of ways."""
    rows = [re.split("[│┃|]", line)[1:-1] for line in shown.splitlines() if " bit (" in line]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_table_of_ways_shows_the_figures_of_the_json() -> None:
    words = ("mixtral-8x7b", "--gpu-memory", "24GB", "--host-memory", "64GB")
    shown, ways = run_here("vllm-ndp", "plan", *words).stdout, planned(*words)["ways"]
    assert cells_of(shown) == [
        [
            f"{way['widest_bits']} bit ({way['read_bits']:g})",
            f"{way['hot_experts']} of 8",
            str(way["kv_tokens_left"]),
            f"{100 * way['pool_cached']:.0f} %",
            f"{way['simulated_tpot_us']:.1f}",
            f"{way['simulated_decode_tokens_per_s']:.1f}",
            f"{way['simulated_ttft_us'] / 1e3:.2f}",
        ]
        for way in ways
    ]
    assert "Up to 4 bits are read at 3 on average" in shown
    assert "loss is at most that of up to 3." in " ".join(shown.split())
    assert "mapped, page cache" in shown


def test_a_probe_is_of_what_is_stored_and_shown_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def probe(_: Any, bits: int, *, form: StoredForm, linear_form: StoredForm | None) -> Measured:
        told.append((bits, form, linear_form))
        return measured(bits)

    monkeypatch.setattr("vllm_ndp.operating.speed.measure", probe)
    shown = run_here("vllm-ndp", "plan", "gpt-oss-20b", "--host-memory", "24GB", "--probe").stdout
    assert told == [(4, source_named("gpt-oss-20b").stored_form, None)]
    assert "10 GB/s read; one expert at 4 bits 0.010 ms (x)." in shown
    sizing = sizing_of("gpt-oss-20b", gpu=None)
    step_s = measured(4).decode_step_s(sizing.model, sizing.linear_layers, sizing.head)
    assert (cells_of(shown)[0][1], cells_of(shown)[0][-1]) == ("32 of 32 at 4", f"{1e3 * step_s:.2f}")
    assert "mapped, page cache" not in shown


def test_plan_says_how_many_bytes_the_files_have() -> None:
    """Not how many the model has as it is served."""
    shown = run_here("vllm-ndp", "plan", TINY, "--host-memory", "8GB").stdout
    stored = (TINY / "model.safetensors").stat().st_size
    assert f"{human(stored)} as stored, " in " ".join(shown.split())
