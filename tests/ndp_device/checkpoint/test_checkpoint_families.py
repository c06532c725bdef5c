"""What the checkpoint reader takes for an expert is what transformers computes with, for every family; no vLLM."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import make_family_models
import numpy as np
import pytest

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from reference_kernel import REFERENCE  # noqa: E402

from ndp_device.calibration.build import build_calibrated  # noqa: E402
from ndp_device.calibration.streamed import expert_modules  # noqa: E402
from ndp_device.checkpoint.files import read_config  # noqa: E402
from ndp_device.checkpoint.opening import open_checkpoint  # noqa: E402
from ndp_device.checkpoint.spellings import text_config  # noqa: E402
from ndp_device.model_config import public_model, whole_model  # noqa: E402
from ndp_device.replicas.checkpoint import CheckpointExperts  # noqa: E402
from ndp_device.replicas.format import ReplicaFiles  # noqa: E402

SEEN_ELSEWHERE = ("dbrx", "llama4", "nemotron_h", "jamba", "longcat_flash")
"""DBRX's experts are not read, Llama-4's take other arguments, LongCat's cannot be hooked, Nemotron-H has no gate, and
Jamba's Mamba layers need a kernel."""


UNCOUNTED = ("deepseek_v4", "hy_v4", "inkling", "longcat_flash", "qwen4_exp")
"""Compressed attention, hyper-connections, convolved keys, two attentions in a layer: the simulated host has none."""
WITHOUT_NORM = ("flex_olmo", "longcat_flash")
"""Norms come after attention and experts only, or in lists."""

MULTIMODAL = tuple(name for name, family in make_family_models.FAMILIES.items() if family.vision)
WITHOUT_CLASS = tuple(name for name, family in make_family_models.FAMILIES.items() if family.tensors)
NOT_READ = ("dbrx", "ernie4_5_vl_moe", "diffusion_gemma", "openpangu_vl")
"""Experts in one tensor of two dimensions; of two sizes in a layer; an encoder beside the decoder; none."""
TOWERS = re.compile("vis|audio|projector|merger|rotary")
BY_DEFAULT = ("qwen3_moe", "deepseek_v3", "gpt_oss", "granite_moe_hybrid")
"""Dense layers; groups; biases and a clamp; two kinds of state. All others are in `make test-long`."""


def _marked(*without: str) -> list[Any]:
    families = [name for name in make_family_models.FAMILIES if name not in without]
    return [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.families) for name in families]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("family", _marked(*SEEN_ELSEWHERE, *MULTIMODAL, *WITHOUT_CLASS))
def test_experts_out_of_the_checkpoint_compute_what_transformers_does(models: Path, family: str) -> None:
    """Sum over a row's experts, by the reference kernel, against the output of transformers' own module."""
    directory = make_family_models.make(family, models)
    checkpoint, kernel = CheckpointExperts(directory), REFERENCE
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    modules, seen = expert_modules(model), []
    assert len(modules) == checkpoint.shape.num_layers
    for module in modules:
        module.register_forward_hook(
            lambda _, args, kwargs, out: seen.append(((*args, *kwargs.values()), out)), with_kwargs=True
        )
    with torch.inference_mode():
        model(input_ids=torch.arange(5, 17)[None], use_cache=False)
    for layer, ((hidden, ids, weights), out) in enumerate(seen):
        x, ids, weights = hidden.reshape(-1, hidden.shape[-1]).numpy(), ids.numpy(), weights.float().numpy()
        assert ids.shape[1] == checkpoint.shape.top_k
        used, index = np.unique(ids, return_inverse=True)
        prepared = [kernel.prepare(checkpoint.expert(layer, int(expert))) for expert in used]
        rows = np.repeat(np.arange(len(x), dtype=np.int32), ids.shape[1])
        got = kernel.execute(x, prepared, rows, index.reshape(-1).astype(np.int32), weights.reshape(-1))
        wanted = out.reshape(x.shape).numpy()
        assert np.abs(got - wanted).max() < 2e-5 * np.abs(wanted).max(), f"MoE layer {layer}"


@pytest.mark.parametrize("family", _marked("nemotron_h", *UNCOUNTED, *NOT_READ))
def test_the_simulated_host_counts_every_weight_of_the_checkpoint(models: Path, family: str) -> None:
    """Projections, dense layers, shared experts, routers, embeddings: what config.json says is what the tensors hold,
    to the last one. Vectors (norms, biases) are left out on both sides."""
    directory = make_family_models.make(family, models)
    checkpoint = open_checkpoint(directory)
    config = text_config(read_config(directory))
    model = whole_model(checkpoint.shape, config, checkpoint.layout.moe_index)
    tensors = {
        name: info.shape
        for name, info in checkpoint.tensors.items()
        if not name.endswith("bias") and len(info.shape) > 1 and not TOWERS.search(name)
    }
    assert model.num_parameters == sum(math.prod(shape) for shape in tensors.values())
    assert len(model.decoder) == config["num_hidden_layers"]


OF_ITS_OWN: dict[str, set[str]] = {
    "afmoe": {"route_scale"},
    "cohere2_moe": {"expert_selection_fn", "logit_scale", "mlp_layer_types", "prefix_dense_intermediate_size"},
    "deepseek_v2": {"n_group", "num_experts_per_tok", "q_lora_rank", "topk_group"},
    "deepseek_v4": {"partial_rotary_factor", "swiglu_limit"},
    "diffusion_gemma": {"moe_intermediate_size", "num_experts", "top_k_experts"},
    "dots1": {"n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor"},
    "gemma4": {"attention_k_eq_v", "enable_moe_block", "moe_intermediate_size", "num_experts", "top_k_experts"},
    "glm4_moe": {"routed_scaling_factor", "use_qk_norm"},
    "glm4v_moe": {"attention_bias"},
    "glm_moe_dsa": {"indexer_types"},
    "granite_moe_hybrid": {"layer_types"},
    "hunyuan_moe": {"head_dim"},
    "hy_v3": {"router_scaling_factor"},
    "hy_v4": {"swiglu_limit"},
    "inkling": {"layer_types"},
    "jamba": {"use_mamba_kernels"},
    "kimi_k25": {"routed_scaling_factor"},
    "laguna": {"layer_types"},
    "lfm2_moe": {"layer_types"},
    "mellum": {"layer_types"},
    "nemotron_h": {"layers_block_type"},
    "phimoe": {"attention_bias", "input_jitter_noise", "lm_head_bias", "sliding_window"},
    "qwen3_moe": {"norm_topk_prob"},
    "qwen3_moe_top22": {"norm_topk_prob"},
    "qwen4_exp": {
        *("indexer_budget", "indexer_compress_ratio", "indexer_head_dim", "indexer_kv_heads", "indexer_n_heads"),
        "output_gate_type",
    },
    "solar_open": {"routed_scaling_factor"},
}
"""Keys in which a tiny model differs from the defaults of transformers' class, sizes and tokens apart: as published
checkpoints do (Phi-3.5-MoE's biases and window), or so that four layers have all that the family has."""
OF_ITS_OWN["gemma4_vl"] = OF_ITS_OWN["gemma4"]
NO_BEHAVIOUR = re.compile("_token_id$|^(transformers_version|architectures|model_type|dtype|tie_word_embeddings)$")


@pytest.mark.parametrize(
    "family", [name for name, family in make_family_models.FAMILIES.items() if family.config_class]
)
def test_a_tiny_model_behaves_as_its_familys_published_configuration_says(family: str) -> None:
    """What is no size: switches, names, factors, kinds of layers, and whether there is a window at all."""
    made = make_family_models.FAMILIES[family]
    own_class = getattr(transformers, made.config_class)
    published = text_config(own_class().to_dict())
    tiny = text_config(own_class(**make_family_models._keys(made)).to_dict() | dict(made.added))
    found = set()
    for key in published.keys() & tiny.keys():
        values = published[key], tiny[key]
        if all(isinstance(value, list) and all(isinstance(one, str) for one in value) for value in values):
            values = set(values[0]), set(values[1])
        elif not any(value is None or isinstance(value, bool | str | float) for value in values):
            continue
        if values[0] != values[1] and not NO_BEHAVIOUR.search(key):
            found.add(key)
    assert found == OF_ITS_OWN.get(family, set())


@pytest.mark.parametrize("family", _marked("nemotron_h", *NOT_READ))
def test_config_json_alone_says_what_the_tensors_do(models: Path, family: str) -> None:
    """`plan` of a model that is not here: which layers have experts, how many, of which sizes."""
    directory = make_family_models.make(family, models)
    checkpoint, config = open_checkpoint(directory), text_config(read_config(directory))
    alone = public_model(family, config)
    with_experts = [number for number, layer in enumerate(alone.decoder) if layer.has_experts]
    assert with_experts == list(checkpoint.layout.moe_index)
    assert alone == whole_model(checkpoint.shape, config, checkpoint.layout.moe_index, dtype=alone.dtype)


@pytest.mark.parametrize("family", _marked(*SEEN_ELSEWHERE, *MULTIMODAL, *WITHOUT_NORM, *WITHOUT_CLASS))
def test_the_norm_before_the_experts_gives_what_they_read(models: Path, family: str) -> None:
    """Data-free calibration takes its weights for how large the experts' inputs are."""
    directory = make_family_models.make(family, models)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    modules, gave, read = expert_modules(model), [], []
    for layer, module in zip(open_checkpoint(directory).layout.layers, modules, strict=True):
        assert layer.norm is not None
        before = _module(model, layer.norm.removesuffix(".weight"))
        before.register_forward_hook(lambda _, args, out: gave.append(out.flatten()))
        module.register_forward_pre_hook(
            lambda _, args, kwargs: read.append((*args, *kwargs.values())[0].flatten()), with_kwargs=True
        )
    with torch.inference_mode():
        model(input_ids=torch.arange(5, 17)[None], use_cache=False)
    assert len(gave) == len(read) == len(modules)
    assert all(torch.equal(one, other) for one, other in zip(gave, read, strict=True))


def _module(model: Any, name: str) -> Any:
    """By its name in the file, or by what transformers calls it."""
    renamed = {"ffn_norm": "post_attention_layernorm"} if model.config.model_type == "deepseek_v4" else {}
    *before, last = name.split(".")
    return model.get_submodule(".".join([*before, renamed.get(last, last)]))


@pytest.mark.calibration
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_family_is_calibrated_from_text(models: Path, tmp_path: Path, family: str) -> None:
    """With a dense layer among the others, and with biases whose order the solver changes with the rows'."""
    directory = make_family_models.make(family, models)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{n}(line):\n    return line.split({n})\n" for n in range(400)))
    out = tmp_path / "replicas"
    build_calibrated(directory, out, text, num_sequences=16, sequence_length=64, show_progress=False)
    files, checkpoint = ReplicaFiles(out), CheckpointExperts(directory)
    assert len(files.manifest.layers) == checkpoint.shape.num_layers
    relative = np.stack([files.layer_losses(layer)[1] for layer in files.manifest.layers])
    assert relative[..., 3].mean() < 0.1 * relative[..., 0].mean()
    x = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    for expert in range(3):
        full, replica = (REFERENCE.prepare(e)(x) for e in (checkpoint.expert(1, expert), files.expert(1, expert, 4)))
        error = np.linalg.norm(replica - full) / np.linalg.norm(full)
        assert error < 0.5, "the replica computes another expert"


def _brought(directory: Path, source: Path, rename: Any) -> Path:
    """The same weights under a name that no list has, in shards whose order says nothing of layers or experts."""
    from safetensors.torch import load_file, save_file

    directory.mkdir()
    tensors = {rename(name): values for name, values in load_file(source / "model.safetensors").items()}
    names = sorted(tensors, key=lambda name: name[::-1])
    weight_map = {}
    for number in range(3):
        file = f"weights.part{9 - number}.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, directory / file)
        weight_map |= dict.fromkeys(names[number::3], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = read_config(source) | {"model_type": "nobody_knows", "architectures": ["NobodyKnowsForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        ("qwen3_moe", lambda name: name),
        ("mixtral", lambda name: name.replace("block_sparse_moe", "ffn.sparse")),
        ("granite_moe", lambda name: f"thinker.{name}"),
        ("deepseek_v3", lambda name: name.replace("model.", "language_model.model.", 1)),
    ],
)
def test_a_checkpoint_of_a_family_never_seen_in_odd_shards_costs_no_code(
    models: Path, tmp_path: Path, family: str, rename: Any
) -> None:
    known = CheckpointExperts(make_family_models.make(family, models))
    brought = CheckpointExperts(_brought(tmp_path / "brought", make_family_models.make(family, models), rename))
    assert brought.layout.moe_index == known.layout.moe_index
    assert brought.shape == dataclasses.replace(known.shape, name="brought")
    for layer, expert in ((0, 0), (known.shape.num_layers - 1, known.shape.num_experts - 1)):
        ours, theirs = brought.expert(layer, expert), known.expert(layer, expert)
        for matrix in ("w1", "w3", "w2"):
            np.testing.assert_array_equal(getattr(ours, matrix), getattr(theirs, matrix))
