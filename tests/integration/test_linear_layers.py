"""Linear layers at 8 and 4 bits: what is quantized, what is freed, and served log-probabilities against the same model
with dequantized weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_family_models
import make_quantized_models
import numpy as np
import pytest
import torch
from engines import MODEL, PROMPTS, altered, engine, greedy
from reference_kernel import dequantize, weights_of
from safetensors.torch import load_file, save_file

from ndp_device.checkpoint.opening import PackedLinears, open_checkpoint
from ndp_device.experts.expert import QuantizedMatrix, to_float32
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.checkpoint import StoredTensors
from vllm_ndp.integration.batch import Span, TrackedRequest
from vllm_ndp.integration.linear_layers import LinearLayers, StoredLinears, matrix_of, quantize
from vllm_ndp.integration.vllm_private import use_threads
from vllm_ndp.integration.waiting import StepThreads
from vllm_ndp.operating.sources import source_named

pytestmark = pytest.mark.vllm

LARGEST_ERROR = {4: 0.11, 8: 0.011}
"""Of normal weights, root mean squares. A uniform grid of 4 bits over a group's range loses 0.10."""
TOLERANCE = 0.15
"""Of a log-probability, beside the dequantized model; activations of 8 bits are 1 % of a layer's output off. The worst
found: 0.07 at 8 bits, 0.09 at 4."""
QUANTIZED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "lm_head.weight")


def values_of(weight: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.from_numpy(dequantize(quantize(weight, bits)))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_are_as_close_as_their_width_allows(bits: int) -> None:
    weight = torch.randn(320, 264, generator=torch.Generator().manual_seed(0)).bfloat16()
    lost = (values_of(weight, bits) - weight.float()).norm() / weight.float().norm()
    assert lost <= LARGEST_ERROR[bits]


def test_rows_quantized_in_blocks_are_those_quantized_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(96, 64)
    at_once = values_of(weight, 8)
    monkeypatch.setattr("vllm_ndp.integration.linear_layers._AT_ONCE", 40 * 64)
    assert torch.equal(values_of(weight, 8), at_once)


class Layer(torch.nn.Module):
    """What vLLM's methods see of one."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns).bfloat16(), requires_grad=False)


def test_a_compiled_layer_gives_what_the_eager_one_gives() -> None:
    layers, layer = LinearLayers(4, lambda: NativeKernel(), {0}, num_experts=8), Layer(96, 64)
    assert layers.take(layer, "")
    assert layers.take(Layer(96, 64), "")  # models that do not name their layers
    x, bias = torch.randn(3, 64).bfloat16(), torch.randn(96).bfloat16()

    def apply(x: torch.Tensor) -> torch.Tensor:
        return layer.cpu_linear(x, layer.weight, bias) * 2

    eager = apply(x)
    assert eager.shape == (3, 96)
    assert eager.dtype == torch.bfloat16
    assert torch.equal(torch.compile(apply, backend="eager", fullgraph=True)(x), eager)
    layers.close()


def test_a_layer_that_the_kernel_cannot_run_keeps_its_weights() -> None:
    layers, odd = LinearLayers(4, lambda: NativeKernel(), {0}, num_experts=8), Layer(64, 60)
    assert not layers.take(odd, "odd")
    assert odd.weight.shape == (64, 60)
    assert layers.description == "none fits 4 bits"


def test_codes_are_multiplied_as_they_are_stored_and_fused_only_where_they_are_of_one_order() -> None:
    rng = np.random.default_rng(0)
    parts = [codes(rng, rows) for rows in (64, 32)]
    fused = matrix_of(parts)
    assert fused is not None
    apart = [matrix_of([part]) for part in parts]
    assert all(one is not None for one in apart)
    np.testing.assert_array_equal(dequantize(fused), np.concatenate([dequantize(one) for one in apart if one]))
    layers, layer = LinearLayers(8, lambda: NativeKernel(), {0}, num_experts=8), Layer(96, 64)
    layers.serve(layer, "qkv_proj", fused, torch.bfloat16, stored_bits=4)
    x = torch.randn(3, 64).bfloat16()
    wanted = x.float() @ torch.from_numpy(dequantize(fused)).T
    assert (layer.cpu_linear(x, layer.weight, None).float() - wanted).norm() < 0.02 * wanted.norm()
    assert layer.weight.numel() == 0
    assert layers.description.startswith("1 at 4 bits as stored, 0 at 8 bits")
    layers.close()
    other_order = replace(codes(rng, 32), perm=np.arange(64, dtype=np.int32)[::-1].copy())
    assert matrix_of([parts[0], other_order]) is None
    assert matrix_of([parts[0], None]) is None


def codes(rng: np.random.Generator, rows: int) -> QuantizedMatrix:
    """Of 64 columns in groups of 32."""
    planes = rng.integers(0, 256, (4, rows, 8), np.uint8)
    scale, offset = (rng.uniform(-0.1, 0.1, (rows, 2)).astype(np.float16) for _ in range(2))
    return QuantizedMatrix(4, planes, scale, offset, 32)


def test_one_thread_is_left_to_vllm_in_a_small_step_of_one_kernel_only() -> None:
    def threads_in(kernel: NativeKernel | None, *spans: tuple[int, int]) -> int:
        running = [Span(TrackedRequest(str(at), 1, [], prefilled=True), *span) for at, span in enumerate(spans)]
        with StepThreads(kernel).of(running):
            return torch.get_num_threads()

    kernel, usual = NativeKernel(threads=2), torch.get_num_threads()
    use_threads(2)
    try:
        assert threads_in(kernel, (100, 1), (7, 8)) == 1
        assert threads_in(kernel, (0, 17)) == 2  # a prompt
        assert threads_in(kernel, (100_000, 1)) == 2  # attention has work for two
        assert threads_in(None, (100, 1)) == 2
        assert torch.get_num_threads() == 2
    finally:
        use_threads(usual)


def test_vllms_loader_gets_everything_but_the_experts_and_what_is_stored_with_them() -> None:
    stored, opened = StoredLinears(MODEL), open_checkpoint(MODEL)
    experts = set().union(*(layer.tensors(opened.layout.num_experts) for layer in opened.layout.layers))
    scales = {f"{name}_scale_inv" for name in experts}
    beside = {f"{min(experts).partition('.experts.')[0]}.experts.e_score_correction_bias"}  # Laguna's, of its router

    every = opened.tensors.keys() | scales | beside

    def given() -> set[str]:
        return {name for name, _ in stored.values_in((name, torch.empty(0)) for name in every)}

    assert given() == every, "where no layer is ours"
    stored.leave_out(opened.layout)
    assert given() == every - experts - scales


@pytest.fixture(scope="module", params=[8, 4])
def bits(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def served(bits: int) -> tuple[list[list[float]], dict[str, Any], dict[str, int]]:
    """Log-probabilities, what is effective, and how many weights each linear layer of vLLM's holds."""
    with engine(settings={"hot_experts": 8, "linear_bits": bits}) as llm:
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        held = {name: module.weight.numel() for name, module in model.named_modules() if hasattr(module, "cpu_linear")}
        return logprobs(llm), llm.collective_rpc("ndp_status")[0], held


def logprobs(llm: Any) -> list[list[float]]:
    """Of every token of the prompts but the first of each."""
    return [
        [
            step[token].logprob
            for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        for output in greedy(llm, PROMPTS, 1, prompt_logprobs=0)
    ]


def test_served_logprobs_are_those_of_the_dequantized_model(
    served: tuple[list[list[float]], dict[str, Any], dict[str, int]], bits: int, tmp_path: Path
) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["tie_word_embeddings"]

    def dequantize_all(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # of which only the output matrix is quantized
        found = {name: values_of(tensor, bits) for name, tensor in tensors.items() if name.endswith(QUANTIZED)}
        assert len(found) == 4 * config["num_hidden_layers"] + 1
        tensors |= found

    with engine(altered(tmp_path / "dequantized", change=dequantize_all, tie_word_embeddings=False)) as llm:
        wanted = logprobs(llm)
    worst = max(
        abs(a - b) for ours, theirs in zip(served[0], wanted, strict=True) for a, b in zip(ours, theirs, strict=True)
    )
    assert worst <= TOLERANCE


def test_weights_are_freed_and_the_table_says_how_many_there_are(
    served: tuple[list[list[float]], dict[str, Any], dict[str, int]], bits: int
) -> None:
    _, status, held = served
    gates = {name: size for name, size in held.items() if name.endswith(".gate")}
    assert all(size == 0 for name, size in held.items() if name not in gates and "embed" not in name)
    assert f"9 at {bits} bits" in status["linear_layers"]


def test_a_head_whose_model_asks_for_no_method_is_taken_too(tmp_path: Path) -> None:
    """gpt-oss: its bf16 head of 201 088 rows took as long per token as four of its layers."""
    path = make_family_models.make("gpt_oss", tmp_path)
    with engine(path, settings={"cold_precision": "quantized", "linear_bits": 8}, dtype="bfloat16") as llm:
        status = llm.collective_rpc("ndp_status")[0]
        head = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.lm_head
        assert head.weight.numel() == 0
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    assert f"{2 * layers + 1} at 8 bits" in status["linear_layers"]


CODED = {
    "qwen3_moe-compressed-all": 4,
    "mixtral-awq-all": 4,
    "mixtral-nvfp4-all": 4,
    "qwen3_moe-fp8-all": 8,
    "qwen3_moe-int8-all": 8,
}
"""Checkpoints whose linear layers are codes of so many bits."""


@pytest.fixture(scope="module", params=CODED)
def coded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_quantized_models.make(request.param, tmp_path_factory.mktemp("coded"))


def test_codes_of_linear_layers_stand_for_the_checkpoints_values(coded: Path) -> None:
    packed, read = PackedLinears(coded), StoredTensors(coded).tensor
    dtypes = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    assert len(list(packed)) >= 16
    form = source_named(str(coded)).linear_form
    assert form is not None
    assert form.bits == CODED[coded.name]
    for module in packed:
        one = packed[module]
        matrix = matrix_of([one.codes(read, None)])
        assert matrix is not None
        values = to_float32(one.values(read, None), dtypes[one.dtype])
        assert np.abs(weights_of(matrix) - values).max() <= 2**-8 * np.abs(values).max()  # values may be bfloat16


def test_vllms_loader_gets_the_scales_of_a_kv_cache_beside_codes(coded: Path) -> None:
    layers, stored = LinearLayers(8, lambda: NativeKernel(), {0}, num_experts=8), StoredLinears(coded)
    module = next(name for name in PackedLinears(coded) if name.endswith("k_proj"))
    rows, columns = PackedLinears(coded)[module].shape
    layer: Any = SimpleNamespace(output_size=rows, input_size=columns)
    assert stored.method_of_codes(layers, layer, module, {}) is not None
    kept = {f"{module}.k_scale", f"{module}.bias", "model.norm.weight"}
    names = kept | {*PackedLinears(coded)[module].parts.values(), f"{module}.input_scale"}
    assert {name for name, _ in stored.values_in((name, torch.empty(0)) for name in names)} == kept


def test_queries_and_keys_whose_rows_vllm_moves_stay_its_own(coded: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(coded, tmp_path / "moved"))
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"model_type": "llama4"}))
    layers, stored = LinearLayers(8, lambda: NativeKernel(), {0}, num_experts=8), StoredLinears(moved)
    taken = set()
    for name in PackedLinears(moved):
        if ".self_attn." in name:
            rows, columns = PackedLinears(moved)[name].shape
            layer: Any = SimpleNamespace(output_size=rows, input_size=columns)
            if stored.method_of_codes(layers, layer, name, {}) is not None:
                taken.add(name.rpartition(".")[2])
    assert taken == {"v_proj", "o_proj"}


def test_a_linear_layer_that_is_damaged_does_not_end_a_plan(coded: Path, tmp_path: Path) -> None:
    """Of a part that vLLM never asks for, or of a GGUF file."""
    damaged = Path(shutil.copytree(coded, tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    lost = next(name for name in tensors if "o_proj." in name and "scale" in name)
    del tensors[lost]
    save_file(tensors, damaged / "model.safetensors")
    form = source_named(str(damaged)).linear_form
    assert form is not None
    assert form.bits == CODED[coded.name]


def test_layers_stored_as_codes_are_served_by_them(coded: Path) -> None:
    eager: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": True}
    with engine(coded, settings={"hot_experts": 8, "linear_bits": 8}, **eager) as llm:
        ours, status = logprobs(llm), llm.collective_rpc("ndp_status")[0]
    with engine(coded.with_name(f"{coded.name}-dequantized"), **eager) as llm:
        wanted = logprobs(llm)
    assert f" at {CODED[coded.name]} bits as stored, 1 at 8 bits" in status["linear_layers"]
    off = [abs(a - b) for mine, theirs in zip(ours, wanted, strict=True) for a, b in zip(mine, theirs, strict=True)]
    assert np.mean(off) <= TOLERANCE / 2
