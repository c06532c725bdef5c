"""Experts are found by names and shapes, in every layout we know; a checkpoint that does not add up is one sentence."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ndp_device.checkpoint.files import TensorInfo, model_digest, read_config, read_headers, weight_names
from ndp_device.checkpoint.names import ExpertLayout, Source, resolve
from ndp_device.checkpoint.spellings import activation_of
from ndp_device.common.activation import GELU_TANH, GPT_OSS, SILU, Activation
from ndp_device.common.errors import ConfigError, NdpError, ReplicaError
from ndp_device.replicas.mapped import MappedFile

E, K, H, I = 4, 2, 8, 6  # noqa: E741
CONFIG = {"num_hidden_layers": 3, "num_experts": E, "num_experts_per_tok": K, "hidden_size": H}
Shapes = dict[str, tuple[int, ...]]


def separate(layer: int, *, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    experts: Shapes = {}
    for expert in range(E):
        for name, shape in zip(names, ((I, H), (I, H), (H, I)), strict=True):
            experts[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = shape
    return experts


def of_layers(experts: Callable[[int], Shapes], layers: tuple[int, ...] = (0, 1, 2)) -> Shapes:
    """All three layers have attention; those given have experts too."""
    shapes: Shapes = {}
    for layer in range(3):
        shapes[f"model.layers.{layer}.self_attn.q_proj.weight"] = (H, H)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (H,)
        if layer in layers:
            shapes |= {f"model.layers.{layer}.mlp.gate.weight": (E, H)} | experts(layer)
    return shapes


def resolved(shapes: Shapes, *, dtype: str = "BF16", **changes: Any) -> ExpertLayout:
    tensors = {name: TensorInfo(dtype, shape, Path("model.safetensors")) for name, shape in shapes.items()}
    return resolve(tensors, CONFIG | changes, name="m")


def stacked(layer: int) -> Shapes:
    return {
        f"model.layers.{layer}.mlp.experts.gate_proj.weight": (E, I, H),
        f"model.layers.{layer}.mlp.experts.up_proj.weight": (E, I, H),
        f"model.layers.{layer}.mlp.experts.down_proj.weight": (E, H, I),
    }


def fused(layer: int) -> Shapes:
    prefix = f"model.layers.{layer}.mlp.experts"
    return {f"{prefix}.gate_up_proj": (E, 2 * I, H), f"{prefix}.down_proj": (E, H, I)}


def transposed(layer: int) -> Shapes:
    return transposed_as(f"language_model.model.layers.{layer}.feed_forward.experts")


def granite(layer: int) -> Shapes:
    prefix = f"model.layers.{layer}.block_sparse_moe"
    shared = f"model.layers.{layer}.shared_mlp"
    return {
        f"{prefix}.input_linear.weight": (E, 2 * I, H),
        f"{prefix}.output_linear.weight": (E, H, I),
        f"{shared}.input_linear.weight": (2 * I, H),  # the shared expert: two dimensions, so not ours
        f"{shared}.output_linear.weight": (H, I),
    }


def biased(layer: int) -> Shapes:
    prefix = f"model.layers.{layer}.mlp.experts"
    return transposed_as(prefix) | {f"{prefix}.gate_up_proj_bias": (E, 2 * I), f"{prefix}.down_proj_bias": (E, H)}


def transposed_as(prefix: str) -> Shapes:
    return {f"{prefix}.gate_up_proj": (E, H, 2 * I), f"{prefix}.down_proj": (E, I, H)}


def mixtral(layer: int) -> Shapes:
    return separate(layer, names=("w1", "w3", "w2"))


@pytest.mark.parametrize("layout", [separate, mixtral, stacked, fused, transposed, granite, biased])
def test_every_layout_gives_the_same_matrices(layout: Callable[[int], Shapes]) -> None:
    """Values that say which expert, matrix, row and column they are, laid out as the checkpoint would, come back."""
    model_type = "gpt_oss" if layout is biased else "any"
    found = resolved(of_layers(layout), model_type=model_type)
    assert (found.num_experts, found.top_k, found.hidden_size, found.intermediate_size) == (E, K, H, I)
    assert found.has_bias == (layout is biased)
    names = layout(1)
    is_transposed, is_interleaved = layout in (transposed, biased), layout is biased

    def stored(source: Source, of_expert: int) -> np.ndarray:
        """What the tensor holds of the expert, built from what each part should be."""
        tensor = source.tensor(of_expert)
        is_bias = tensor.endswith("bias")

        def part(name: str, expert: int) -> np.ndarray:
            return bias(name, expert) if is_bias else matrix(name, expert)

        def one(expert: int) -> np.ndarray:
            last = tensor.removesuffix(".weight").removesuffix("_bias").rsplit(".", 1)[-1]
            if last in ("gate_up_proj", "input_linear"):
                gate, up = part("gate", expert), part("up", expert)
                both = np.stack([gate, up], 1).reshape(2 * I, -1) if is_interleaved else np.concatenate([gate, up])
                both = both.reshape(2 * I) if is_bias else both
            else:
                roles = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up"}
                both = part(roles.get(last, "down"), expert)
            return both.T if is_transposed else both

        index = source.index(of_expert)
        values = one(of_expert) if index is None else np.stack([one(expert) for expert in range(E)])
        assert values.shape == names[tensor]
        return values if index is None else values[index]

    for expert in range(E):
        for name, source in found.layers[1].weights.items():
            np.testing.assert_array_equal(source.of(stored(source, expert)), matrix(name, expert))
        for name, source in found.layers[1].biases.items():
            np.testing.assert_array_equal(source.of(stored(source, expert)), bias(name, expert))


def matrix(name: str, expert: int) -> np.ndarray:
    shape = (H, I) if name == "down" else (I, H)
    return 1000 * expert + 10_000 * len(name) + np.arange(I * H).reshape(shape)


def bias(name: str, expert: int) -> np.ndarray:
    return -(1000 * expert + 10_000 * len(name) + np.arange(H if name == "down" else I))


def test_dense_layers_are_skipped_and_the_rest_counted_without_gaps() -> None:
    found = resolved(of_layers(separate, (1, 2)))
    assert [layer.decoder_layer for layer in found.layers] == [1, 2]
    assert found.moe_index == {1: 0, 2: 1}


def test_layers_past_the_last_one_and_beside_the_model_are_not_experts_of_ours() -> None:
    """DeepSeek keeps its prediction layer as layer 61 of 61, Qwen3-Next as mtp.layers.0."""
    beside = {name.replace("model.layers", "mtp.layers"): shape for name, shape in separate(0).items()}
    assert len(resolved(of_layers(separate) | separate(3) | beside).layers) == 3


def test_the_norm_before_the_experts_is_found_and_a_norm_after_them_is_not() -> None:
    assert resolved(of_layers(separate)).layers[0].norm == "model.layers.0.post_attention_layernorm.weight"
    after = {"model.layers.0.post_feedforward_layernorm.weight": (H,)}
    assert resolved(of_layers(separate) | after).layers[0].norm is None
    assert resolved(of_layers(separate), model_type="qwen3_next").norm_offset == 1.0


def test_sizes_are_read_from_a_multimodal_wrapper_too() -> None:
    tensors = {n: TensorInfo("BF16", s, Path("f")) for n, s in of_layers(transposed).items()}
    assert resolve(tensors, {"text_config": CONFIG}, name="m").top_k == K


def without(name: str) -> Shapes:
    shapes = of_layers(separate)
    del shapes[name]
    return shapes


def stacked_bare(layer: int) -> Shapes:
    return {name.removesuffix(".weight"): shape for name, shape in stacked(layer).items()}


SAME = "are the same matrix of an expert: keep the tensors of one"
NO_EXPERTS = {"num_experts": None, "num_experts_per_tok": None}
REFUSED: dict[str, tuple[Shapes, dict[str, Any], type[NdpError], str]] = {
    "dense": (of_layers(separate, ()), NO_EXPERTS, ConfigError, "m is a dense model"),
    "unknown words": (
        {name.replace("experts", "moe_parts"): shape for name, shape in of_layers(separate).items()},
        {},
        ConfigError,
        r"config.json has num_experts, num_experts_per_tok, the tensors are such as .*moe_parts\.0\.gate_proj\.weight "
        r"\[6, 8\].*spellings\.py",
    ),
    "unknown key of layers": (
        of_layers(separate),
        {"num_hidden_layers": None, "decoder_layer_count": 3},
        ConfigError,
        "must give num_hidden_layers.*: it has decoder_layer_count",
    ),
    "unknown key of top k": (
        of_layers(separate),
        {"num_experts_per_tok": None, "experts_chosen": 2},
        ConfigError,
        "as num_experts_per_tok, got none: it has num_experts, experts_chosen",
    ),
    "no expert": (
        without("model.layers.1.mlp.experts.2.up_proj.weight"),
        {},
        ReplicaError,
        r"layer 1 lacks the up projection of expert 2 \(.*experts\.2\.up_proj\.weight\)",
    ),
    "no last expert": (of_layers(separate), {"num_experts": 5}, ReplicaError, r"experts\.4\.gate_proj"),
    "too many": (of_layers(separate), {"num_experts": 3}, ConfigError, "num_experts 3, the tensors say 4"),
    "two prefixes": (
        of_layers(separate) | {f"language_model.{n}": s for n, s in separate(1).items()},
        {},
        ReplicaError,
        "two sets of experts for layer 1.*an encoder beside a decoder is not served",
    ),
    "hidden size": (of_layers(fused), {"hidden_size": 16}, ConfigError, "hidden_size 16, the tensors say 8"),
    "inner size": (of_layers(fused), {"moe_intermediate_size": 7}, ConfigError, "intermediate_size 7"),
    "top k": (of_layers(fused), {"num_experts_per_tok": 5}, ConfigError, "from 1 to 4"),
    "two top k": (of_layers(fused), {"moe_topk": [2, 1]}, ConfigError, "one number of experts per token"),
    "router alone": (
        of_layers(separate, (0, 2)) | {"model.layers.1.mlp.gate.weight": (E, H)},
        {},
        ReplicaError,
        "a router for layer 1",
    ),
    "no layer": (of_layers(separate), {"num_hidden_layers": 5}, ReplicaError, "no tensor of layer 3"),
    "odd shape": (
        of_layers(separate) | {"model.layers.1.mlp.experts.2.up_proj.weight": (I, H + 1)},
        {},
        ReplicaError,
        r"experts.2.up_proj.weight is \[.*, others' are \[.*\]: we serve one shape",
    ),
    "odd fused": (
        of_layers(fused) | {"model.layers.1.mlp.experts.down_proj": (E, H, I + 1)},
        {},
        ReplicaError,
        "or both transposed",
    ),
    "stack of fewer": (
        of_layers(stacked) | {"model.layers.1.mlp.experts.up_proj.weight": (E - 1, I, H)},
        {},
        ReplicaError,
        r"layer 1: model.layers.1.mlp.experts.up_proj.weight is \[3, 6, 8\], not of 4 experts",
    ),
    "a stack twice": (of_layers(lambda layer: stacked(layer) | stacked_bare(layer)), {}, ReplicaError, SAME),
    "stacked and separate": (of_layers(lambda layer: stacked(layer) | separate(layer)), {}, ReplicaError, SAME),
    "fused and stacked": (of_layers(lambda layer: fused(layer) | separate(layer)), {}, ReplicaError, SAME),
    "fused and its halves": (
        of_layers(lambda layer: fused(layer) | {n: s for n, s in stacked(layer).items() if "down" not in n}),
        {},
        ReplicaError,
        SAME,
    ),
    "two words": (of_layers(lambda layer: separate(layer) | mixtral(layer)), {}, ReplicaError, SAME),
    "an adapter": (
        of_layers(separate) | {"model.layers.1.mlp.experts.2.up_proj.lora_A.weight": (2, H)},
        {},
        ReplicaError,
        r"experts\.2\.up_proj\.lora_A\.weight is a part of an expert's matrix that is not read",
    ),
    "no gate": (
        {n: s for n, s in of_layers(separate).items() if "gate_proj" not in n},
        {},
        ConfigError,
        "no gate projection",
    ),
    "gelu": (of_layers(fused), {"hidden_act": "gelu"}, ConfigError, "compute gelu"),
    "dtype": (of_layers(fused), {"dtype": "F8_E4M3"}, ConfigError, "stored as F8_E4M3"),
    "fp8 scales": (
        of_layers(separate) | {"model.layers.1.mlp.experts.0.up_proj.weight_scale_inv": (1, 1)},
        {},
        ConfigError,
        "quantized format",
    ),
    "mxfp4": (
        {"model.layers.0.mlp.experts.gate_up_proj_blocks": (E, 2 * I, 1, 16), "model.layers.1.x": (1,)},
        {},
        ConfigError,
        r"gate_up_proj_blocks\), which is not read yet",
    ),
    "bias missing": (
        {n: s for n, s in of_layers(biased).items() if n != "model.layers.2.mlp.experts.down_proj_bias"},
        {"model_type": "gpt_oss"},
        ReplicaError,
        "layer 2 lacks the bias of down",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_add_up_is_refused_in_one_sentence(case: str) -> None:
    shapes, changes, error, sentence = REFUSED[case]
    with pytest.raises(error, match=sentence) as raised:
        resolved(shapes, **changes)
    assert "\n" not in str(raised.value)


def write(path: Path, *names: str) -> None:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in names}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))


def test_a_missing_shard_is_named_with_an_index_and_without(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.safetensors", "a")
    with pytest.raises(ReplicaError, match="lacks model-00002-of-00002"):
        read_headers(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ReplicaError, match=r"lacks 1 of the 2 files.*model-00002-of-00002"):
        read_headers(tmp_path)
    write(tmp_path / "model-00002-of-00002.safetensors", "b")
    write(tmp_path / "consolidated.safetensors", "a")  # not in the index: vLLM does not read it either
    assert {name: info.file.name for name, info in read_headers(tmp_path).items()} == index["weight_map"]


BESIDE = ["._model", "adapter_model", "consolidated", "optimizer", "model.fp16", "aux", "model-00001-of-00001.lora"]
"""Files that people keep beside a checkpoint's own."""


@pytest.mark.parametrize(
    "own",
    [
        ["model.safetensors"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"],
        ["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"],
    ],
    ids=["whole", "shards", "counted from 0", "two lengths of numbers"],
)
@pytest.mark.parametrize("indexed", [False, True])
def test_files_beside_a_checkpoint_change_neither_its_tensors_nor_its_digest(
    tmp_path: Path, own: list[str], indexed: bool
) -> None:
    for number, name in enumerate(own):
        write(tmp_path / name, f"tensor{number}")
    if indexed:
        weight_map = {f"tensor{number}": name for number, name in enumerate(own)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    alone = read_headers(tmp_path), model_digest(tmp_path)
    for name in BESIDE:
        write(tmp_path / f"{name}.safetensors", "tensor0", "another")
    write(tmp_path / "mmproj.gguf", "a file of another format")
    assert (read_headers(tmp_path), model_digest(tmp_path)) == alone
    write(tmp_path / own[-1], "other weights")
    assert model_digest(tmp_path) != alone[1]


@pytest.mark.parametrize("name", ["mmproj", "Qwen3-mmproj-F16", "imatrix_unsloth", "Qwen3.imatrix"])
def test_what_llama_cpp_keeps_beside_a_model_is_not_of_it(name: str) -> None:
    assert weight_names(["Qwen3-Q4_K_M.gguf", f"{name}.gguf"]) == ["Qwen3-Q4_K_M.gguf"]


@pytest.mark.parametrize("name", ["weights", "consolidated", "pytorch_model-00001-of-00001"])
def test_a_checkpoint_may_have_any_name_that_no_other_file_has(tmp_path: Path, name: str) -> None:
    write(tmp_path / f"{name}.safetensors", "tensor")
    if name == "weights":  # macOS puts such a file beside each on a foreign disk; vLLM skips hidden files
        (tmp_path / f"._{name}.safetensors").write_bytes(b"\0\5\x16\7")
    assert list(read_headers(tmp_path)) == ["tensor"]


def test_lists_as_long_as_the_largest_published_checkpoints_are_read(tmp_path: Path) -> None:
    """48 layers of 512 experts in bitsandbytes' six tensors per matrix: Qwen3-Next-80B-A3B, 442 368 tensors."""
    parts = ("weight", *(f"weight.{part}" for part in ("absmax", "nested_absmax", "nested_quant_map", "quant_map")))
    parts += ("weight.quant_state.bitsandbytes__nf4",)
    matrices = [
        f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj"
        for layer in range(48)
        for expert in range(512)
        for role in ("gate", "up", "down")
    ]
    names = [f"{matrix}.{part}" for matrix in matrices for part in parts]
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write(tmp_path / "model-00001-of-00001.safetensors", *names)
    assert len(read_headers(tmp_path)) == 442_368
    setting = {"bits": 4, "data_type": "int", "group_size": 128, "sym": True, "act_bits": 16, "act_data_type": "float"}
    each = {"extra_config": dict.fromkeys(matrices, setting)}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": each}))
    assert read_config(tmp_path)["quantization_config"] == each


@pytest.mark.parametrize(("name", "first"), [("b", 0), ("b", 8), ("a", 4)])
def test_tensors_that_share_bytes_or_leave_a_gap_are_refused(tmp_path: Path, name: str, first: int) -> None:
    """A name that stands twice in a header, too: the second hides the first, whose bytes then are nobody's."""
    entries = [("a", 0), ("b", 4), (name, first)]
    each = (f'"{of}": {{"dtype": "F32", "shape": [1], "data_offsets": [{at}, {at + 4}]}}' for of, at in entries)
    text = f"{{{', '.join(each)}}}".encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(
        ReplicaError, match=r"model.safetensors is damaged or truncated: [ab] .* the one before it ends"
    ):
        MappedFile(tmp_path / "model.safetensors")


def test_a_tensor_in_two_files_and_an_index_that_leaves_the_directory_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", "x")
    write(tmp_path / "b.safetensors", "x")
    with pytest.raises(ReplicaError, match=r"x is in a\.safetensors and in b\.safetensors"):
        read_headers(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../a.safetensors"}}')
    with pytest.raises(ReplicaError, match="not a file of this directory"):
        read_headers(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ReplicaError, match=r"index.json names no tensor"):
        read_headers(tmp_path)


def renamed(shapes: Shapes, **words: str) -> Shapes:
    for old, new in words.items():
        shapes = {name.replace(old, new): shape for name, shape in shapes.items()}
    return shapes


def test_a_stack_of_experts_is_found_under_any_word_by_its_three_dimensions():
    """Step-3.5: `moe.gate_proj.weight` [E, I, H] beside a shared expert of two dimensions."""
    shapes = renamed(of_layers(stacked), **{"mlp.experts.": "moe.", "mlp.gate.": "moe.gate."})
    shapes |= {f"model.layers.{layer}.share_expert.gate_proj.weight": (I, H) for layer in range(3)}
    layout = resolved(shapes, num_experts=None, moe_num_experts=E, num_experts_per_tok=None, moe_top_k=K)
    assert (layout.num_experts, layout.top_k, len(layout.layers)) == (E, K, 3)
    assert layout.layers[1].weights["down"] == Source("model.layers.1.moe.down_proj.weight")
    assert layout.layers[1].weights["down"].index(2) == 2


def test_qwen_omni_is_read_by_its_thinker_and_not_by_its_talker():
    thinker = {f"thinker.{name}": shape for name, shape in of_layers(separate).items()}
    talker = {f"talker.{name}": shape for name, shape in of_layers(separate).items()}
    tensors = {name: TensorInfo("BF16", shape, Path("m.safetensors")) for name, shape in (thinker | talker).items()}
    layout = resolve(tensors, {"thinker_config": {"text_config": CONFIG}, "talker_config": {}}, name="m")
    assert layout.layers[0].weights["gate"].name == "thinker.model.layers.0.mlp.experts.{}.gate_proj.weight"


def test_blocks_with_fully_connected_experts_are_layers_with_experts():
    odd = {"model.layers": "transformer.blocks", "mlp.": "ffn.", "_proj.w": ".w", "experts": "experts"}
    shapes = renamed(of_layers(separate), **odd)
    shapes = renamed(shapes, **{".gate.weight": ".fc_gate.weight", ".up.weight": ".fc_up.weight"})
    shapes = renamed(shapes, **{".down.weight": ".fc_down.weight", "ffn.fc_gate.": "ffn.gate."})
    layout = resolved(shapes, num_hidden_layers=None, n_layers=3, num_experts_per_tok=None, top_k_experts=K)
    assert layout.layers[2].weights["up"].tensor(3) == "transformer.blocks.2.ffn.experts.3.fc_up.weight"


@pytest.mark.parametrize(
    ("norms", "read"),
    [
        (("pre_mlp_layernorm", "post_attention_layernorm"), "pre_mlp_layernorm"),  # Afmoe
        (("operator_norm", "ffn_norm"), "ffn_norm"),  # LFM2
        (("input_layernorm", "post_attention_layernorm"), "post_attention_layernorm"),
    ],
)
def test_the_norm_before_the_experts_is_the_one_that_the_family_means(norms: tuple[str, ...], read: str):
    shapes = {name: shape for name, shape in of_layers(separate).items() if "layernorm" not in name}
    shapes |= {f"model.layers.{layer}.{norm}.weight": (H,) for layer in range(3) for norm in norms}
    assert resolved(shapes).layers[1].norm == f"model.layers.1.{read}.weight"


AT_10, AT_7 = Activation(limit=10.0), Activation(limit=7.0)

FAMILIES: dict[str, tuple[dict[str, Any], tuple[Activation, Activation]]] = {
    "mixtral": ({"hidden_act": "silu"}, (SILU, SILU)),
    "nothing said": ({}, (SILU, SILU)),
    "gpt-oss": ({"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0}, (GPT_OSS, GPT_OSS)),
    "deepseek_v4": ({"hidden_act": "silu", "swiglu_limit": 10.0}, (AT_10, AT_10)),
    "glm5_next": ({"hidden_act": "silu", "swiglu_limit": 10}, (AT_10, AT_10)),
    "hy_v4 without a clamp": ({"hidden_act": "silu", "swiglu_limit": -1.0}, (SILU, SILU)),
    "gemma4": ({"hidden_activation": "gelu_pytorch_tanh"}, (GELU_TANH, GELU_TANH)),
    "minimax_m3": ({"hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}, (GPT_OSS, GPT_OSS)),
    "minimax_m3, transformers": ({"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}, (GPT_OSS,) * 2),
    "minimax_m3, other numbers": (
        {"hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_beta": 0.5, "swiglu_limit": 9.0},
        (Activation(linear=1.5, up_bias=0.5, limit=9.0),) * 2,
    ),
    "exaone_moe": ({"hidden_act": "silu", "swiglu_limits": [0, 7.0]}, (SILU, AT_7)),
    "bailing v3": ({"hidden_act": "silu", "expert_swiglu_limit_list": [10.0]}, (AT_10, SILU)),
    "step3p5 without limits": ({"model_type": "step3p5", "swiglu_limits": [0.0, None]}, (SILU, SILU)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_of_every_layer_come_from_config_json(family: str) -> None:
    config, wanted = FAMILIES[family]
    assert tuple(activation_of(config, layer, "m") for layer in range(2)) == wanted


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"hidden_act": "situ"}, "m: its experts compute situ, whose gate goes through a tanh"),
        ({"hidden_act": "relu2"}, "which has no gate"),
        ({"hidden_act": "gelu"}, "error function"),
        ({"model_type": "step3p5", "swiglu_limits": [0.0, 7.0]}, "swiglustep, which clamps after its SiLU"),
        ({"swiglu_limit": "10"}, "swiglu_limit as a number, or one per decoder layer, got '10'"),
        ({"swiglu_limits": [0.0, True]}, "swiglu_limits as a number, or one per decoder layer, got True"),
        ({"swiglu_alpha": float("nan")}, "swiglu_alpha as a number"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        activation_of(config, 1, "m")
