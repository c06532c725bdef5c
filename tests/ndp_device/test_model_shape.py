"""One type for the sizes of a model: what a checkpoint, a public shape and a recorded trace say, said alike."""

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
from paths import MODEL

from ndp_device.checkpoint.files import read_config
from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.common.decoder_layers import DecoderLayer, GroupedQuery, Latent
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape, WholeModel
from ndp_device.model_config import public_model, whole_model
from ndp_device.timing.public_models import PUBLIC_MODELS, SHAPES

SMALL = ModelShape("small", 2, 4, 2, 8, 16)
ATTENTION = GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=4)
BESIDE = {"vocab_size": 100, "decoder": (DecoderLayer(attention=ATTENTION),) * 2}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_recorded_of_a_model_gives_the_same_sizes_back(name: str) -> None:
    """Through JSON, as a trace's manifest holds it."""
    again = WholeModel.of_recorded(json.loads(json.dumps(SHAPES[name].recorded())), name)
    assert again == SHAPES[name]


def test_the_bundled_checkpoint_says_its_attention_in_its_config() -> None:
    checkpoint, config = open_checkpoint(MODEL), read_config(MODEL)
    experts = checkpoint.shape
    model = whole_model(experts, config, checkpoint.layout.moe_index)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = GroupedQuery(num_heads=heads, num_kv_heads=kv_heads, head_dim=experts.hidden_size // heads)
    assert model.decoder == (DecoderLayer(attention=attention),) * experts.num_layers
    assert model.expert_bytes == 2 * 3 * 128 * 256
    assert {field: getattr(model, field) for field in vars(experts)} == vars(experts)


def test_a_run_in_another_dtype_than_its_checkpoint_reads_as_many_bytes_as_it_does() -> None:
    assert WholeModel.of_experts(SMALL, **BESIDE).expert_bytes == 2 * 3 * 8 * 16
    assert WholeModel.of_experts(SMALL, dtype="float32", **BESIDE).expert_bytes == 4 * 3 * 8 * 16


PUBLISHED = {"global_head_dim": 64, "num_global_key_value_heads": 1}
REWRITTEN = {"per_layer_config": {"1": {"head_dim": 64, "num_key_value_heads": 1}}}  # as transformers 5 saves it


@pytest.mark.parametrize("own", [PUBLISHED, REWRITTEN])
def test_gemma_4s_global_layers_have_sizes_of_their_own_and_a_dense_part_beside_the_experts(
    own: dict[str, Any],
) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "num_hidden_layers": 2}
    sizes = {"head_dim": 32, "num_key_value_heads": 2, "num_attention_heads": 4, "hidden_size": 8, "vocab_size": 9}
    config = kinds | sizes | {"intermediate_size": 24, "enable_moe_block": True, "attention_k_eq_v": True} | own
    model = whole_model(dataclasses.replace(SMALL, num_layers=2), config, [0, 1])
    local, of_all = (layer.attention for layer in model.decoder)
    assert local == GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=32, reach=8)
    assert of_all == GroupedQuery(num_heads=4, num_kv_heads=1, head_dim=64, one_projection=True)
    assert of_all.weights(8) == 8 * (2 * 4 * 64 + 64)
    assert of_all.kv_values == 2 * 64
    assert model.shared_weights == 3 * 8 * 24


def test_step_3_compresses_its_queries_and_counts_its_key_heads_as_groups() -> None:
    sizes = {"head_dim": 32, "num_attention_heads": 4, "hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 1}
    own = {"num_attention_groups": 1, "share_q_dim": 16, "share_expert_dim": 5}
    model = whole_model(dataclasses.replace(SMALL, num_layers=1), sizes | own, [0])
    attention = model.decoder[0].attention
    assert attention.kv_values == 2 * 32
    assert attention.weights(8) == 8 * 16 + 16 * 4 * 32 + 4 * 32 * 8 + 2 * 8 * 32
    assert model.shared_weights == 3 * 8 * 5


def test_dense_layers_count_where_they_run_and_trailing_ones_before_the_first() -> None:
    """Dense, experts, dense, dense, experts, dense: before the first experts run the last layer, the first, its own."""
    moe, dense = DecoderLayer(attention=ATTENTION), DecoderLayer(attention=ATTENTION, dense_weights=7)
    model = WholeModel.of_experts(SMALL, vocab_size=9, decoder=(dense, moe, dense, dense, moe, dense))
    assert model.kinds == (dense, moe)
    assert model.before_experts == ((0, 0, 1), (0, 0, 1))
    assert model.beside_weights == 6 * ATTENTION.weights(8) + 4 * 7 + 2 * model.router_weights


def test_sizes_that_no_model_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="GroupedQuery: num_heads must be at least 1"):
        GroupedQuery(num_heads=0, num_kv_heads=1, head_dim=4)
    with pytest.raises(ConfigError, match="2 decoder layers have routed experts, but num_layers is 3"):
        WholeModel.of_experts(dataclasses.replace(SMALL, num_layers=3), **BESIDE)
    with pytest.raises(ConfigError, match="vocab_size must be at least 1"):
        WholeModel.of_experts(SMALL, **{**BESIDE, "vocab_size": 0})
    with pytest.raises(ConfigError, match="top_k 5 must not exceed num_experts 4"):
        dataclasses.replace(SMALL, top_k=5)
    with pytest.raises(ConfigError, match="dtype must be one of float32, bfloat16"):
        _ = dataclasses.replace(SMALL, dtype="int4").dtype_bytes
    with pytest.raises(ConfigError, match="must give vocab_size, of which there is none"):
        whole_model(SMALL, {"num_attention_heads": 2}, {0, 1})
    with pytest.raises(ConfigError, match=r"vocab_size must be a whole number, got '9'$"):  # "there is none", it said
        whole_model(SMALL, {"vocab_size": "9"}, {0, 1})


def test_linear_attention_of_a_kind_that_is_not_known_is_not_taken_for_mambas() -> None:
    """GLM-5-next's config.json was asked for mamba_expand."""
    config = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16, "vocab_size": 100}
    config |= {"layer_types": ["linear_attention"], "linear_num_heads": 4}
    with pytest.raises(ConfigError, match=r"by keys that are known .*: it has linear_num_heads$"):
        whole_model(SMALL, config, [0])


def test_a_recorded_model_that_lacks_a_size_or_has_an_impossible_one_is_refused() -> None:
    recorded = SHAPES["deepseek-v3"].recorded()
    lacking = {key: value for key, value in recorded.items() if key != "vocab"}
    with pytest.raises(ConfigError, match="must record the sizes hidden, num_layers"):
        WholeModel.of_recorded(lacking)
    with pytest.raises(ConfigError, match="must record the sizes"):
        WholeModel.of_recorded(recorded | {"dtype_bytes": 3})
    for change in ({"decoder": [9] * 61}, {"kinds": [{"attention": {"form": "magic"}}]}, {"decoder": None}):
        with pytest.raises(ConfigError, match="decoder layers must be sizes that some model has"):
            WholeModel.of_recorded(recorded | change)


def test_latent_attention_takes_the_cheaper_of_its_two_ways() -> None:
    """One head, ranks and dims 4, 2, 1, 3: absorbed 2 x (2 x 4 + 1) = 18 FLOPs a pair, expanded 2 x (2 + 1 + 3) = 12.

    Expanding a cached token takes 2 x 4 x (2 + 3) = 40: it pays from 40 / (18 - 12) = 6.7 pairs per cached token on.
    """
    form = Latent(num_heads=1, query_rank=0, kv_rank=4, nope_dim=2, rope_dim=1, value_dim=3)
    assert form.flops(0, 10, 10) == 180
    assert form.flops(0, 10, 66) == 66 * 18
    assert form.flops(0, 10, 67) == 67 * 12 + 400
    assert form.flops(10, 10, 55) == 55 * 12  # a prompt's own rows are expanded among the projections
    assert form.kv_values == 5


def test_an_indexer_reads_its_keys_of_all_tokens_and_the_vectors_of_those_that_it_finds() -> None:
    """The head of above beside an indexer of 2 heads of 3, which finds 4 tokens: 12 FLOPs a pair for its scores."""
    sizes = {"num_heads": 1, "query_rank": 5, "kv_rank": 4, "nope_dim": 2, "rope_dim": 1, "value_dim": 3}
    takes_over = Latent(**sizes, index_reach=4)
    form = Latent(**sizes, index_reach=4, index_heads=2, index_dim=3)
    assert form.weights(8) - takes_over.weights(8) == 5 * 2 * 3 + 8 * (3 + 2)
    assert (form.kv_values, takes_over.kv_values) == (8, 5)
    assert form.values_read(1, 10) == 4 * 5 + 10 * 3
    assert form.values_read(10, 10) == 10 * 8  # together, rows may look at every token
    assert takes_over.values_read(1, 10) == 4 * 5
    assert form.flops(1, 10, 10) == 4 * 18 + 10 * 12
    assert takes_over.flops(1, 10, 10) == 4 * 18


def test_a_replica_manifest_holds_the_experts_alone() -> None:
    """Its `model` is a ModelShape: replicas of one checkpoint stay the same whatever is computed beside them."""
    manifest = json.loads((MODEL.parent / "tiny-mixtral-replicas" / "manifest.json").read_text())
    assert ModelShape(**manifest["model"]) == open_checkpoint(MODEL).shape


OF_EIGHT: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 1000,
    "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
MAMBA = {"mamba_expand": 2, "mamba_d_state": 16, "mamba_dt_rank": 8, "mamba_d_conv": 4}
MAMBA_2 = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "conv_kernel": 4}


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({"first_k_dense_replace": 2}, range(2, 8)),
        ({"num_dense_layers": 2}, range(2, 8)),
        ({"moe_layer_num_skipped": 2}, range(2, 8)),
        ({"dense_mlp_idx": 1}, range(1, 8)),
        ({"moe_layer_freq": [0, 0, 1, 1, 1, 1, 0, 1]}, [2, 3, 4, 5, 7]),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, [2, 4, 6]),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1, "model_type": "sarvam_moe"}, [1, 3, 5, 7]),
        ({"mlp_layer_types": ["dense", *["sparse"] * 6, "dense"]}, range(1, 7)),
        ({"mlp_layer_types": [*["hash_moe"] * 3, *["moe"] * 5]}, range(8)),
        ({"moe_layers_enum": "2, 3,7"}, [2, 3, 7]),
        ({"moe_layers": [1, 3, 5, 7], "interleave_moe_layer_step": 1}, [1, 3, 5, 7]),
        ({"interleave_moe_layer_step": 2}, [1, 3, 5, 7]),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 6, "moe_layer_interval": 1}, range(1, 7)),
        ({"moe_layer_start_index": [1, 1], "moe_layer_end_index": [6, 6]}, range(1, 7)),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": -1}, range(3, 8)),
        ({"mlp_only_layers": [0, 5], "decoder_sparse_step": 1}, [1, 2, 3, 4, 6, 7]),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, [1, 3, 5, 7]),
        ({"layers_block_type": ["mamba", "moe"] * 4, **MAMBA}, [1, 3, 5, 7]),
        ({"hybrid_override_pattern": "ME*EM-ME", **MAMBA_2}, [1, 3, 7]),
        ({"model_type": "deepseek_v3"}, range(3, 8)),
        ({"model_type": "qwen3_moe"}, range(8)),
    ],
)
def test_config_json_says_which_layers_have_experts_in_the_words_of_any_family(
    said: dict[str, Any], layers: Iterable[int]
) -> None:
    model = public_model("m", OF_EIGHT | said)
    assert [number for number, layer in enumerate(model.decoder) if layer.has_experts] == list(layers)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"mlp_layer_types": ["dense"] * 8}, "no layer has experts"),
        ({"interleave_moe_layer_step": 0}, "no layer has experts"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "must say it of all 8 layers, got 2"),
        ({"moe_layers_enum": "2,three"}, "must list numbers of layers"),
        ({"moe_layers": {"1": True}}, "must list numbers of layers"),
        ({"moe_intermediate_size": [128, 64] * 4}, "we serve one moe_intermediate_size for all layers"),
        ({"num_local_experts": 8, "num_experts": 16}, "counts its experts in two ways"),
    ],
)
def test_config_json_that_says_nothing_sure_of_its_layers_is_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        public_model("m", OF_EIGHT | said)


BILLION = 1e9


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_a_public_shape_has_the_parameters_that_its_card_says(name: str) -> None:
    """In all within 1.5 % or its last digit: norms, biases, vision towers and extra prediction layers are left out.

    Active ones as a card rounds them, or cuts them off; some cards count the embedding table, some not even the output
    projection.
    """
    model, (total, active) = SHAPES[name], PUBLIC_MODELS[name].published
    assert model.num_parameters / BILLION == pytest.approx(total, rel=0.015, abs=0.05)
    digit = 1.0 if active == math.floor(active) else 0.1
    own = model.num_active_parameters / BILLION
    least, most = own - model.head_weights / BILLION, own + model.head_weights / BILLION
    assert least - digit <= active <= most + digit / 2


def test_what_is_cached_of_a_token_is_what_the_families_are_known_for() -> None:
    """bf16. V3: 61 layers x (512 + 64) x 2 B. Qwen3-Next: 12 of 48 layers x 2 x 2 x 256 x 2 B, and a state beside."""
    assert SHAPES["deepseek-v3"].kv_bytes == 61 * 576 * 2
    assert SHAPES["qwen3-next"].kv_bytes == 12 * 1024 * 2
    state = 32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 3
    assert SHAPES["qwen3-next"].state_bytes == 36 * state * 2
    assert SHAPES["mixtral-8x7b"].kv_bytes == 32 * 2 * 8 * 128 * 2
    assert SHAPES["mixtral-8x7b"].state_bytes == 0
    assert SHAPES["gpt-oss-120b"].windows == {(128, False)}
    assert SHAPES["llama-4-scout"].windows == {(8192, True)}


def test_dense_layers_and_shared_experts_lie_where_the_families_have_them() -> None:
    v3, maverick, next_ = SHAPES["deepseek-v3"], SHAPES["llama-4-maverick"], SHAPES["qwen3-next"]
    assert [layer.has_experts for layer in v3.decoder] == [False] * 3 + [True] * 58
    assert v3.decoder[0].dense_weights == 3 * 7168 * 18432
    assert v3.shared_weights == 3 * 7168 * 2048
    assert [layer.has_experts for layer in maverick.decoder] == [False, True] * 24
    assert next_.shared_weights == 3 * 2048 * 512 + 2048
    assert SHAPES["mixtral-8x7b"].shared_weights == SHAPES["gpt-oss-20b"].shared_weights == 0


@pytest.mark.parametrize(
    "told",
    [
        {"approximate_experts": {"0": [3]}},
        {"compression_config": {"transform_config": {"expert_substitution": {"0": [3]}}}},
    ],
)
def test_a_checkpoint_with_constants_in_place_of_experts_is_named_as_such(tmp_path, told):
    """vLLM 0.33 serves these; their experts have no weights, and were called an incomplete checkpoint."""
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | told))
    with pytest.raises(ConfigError, match=r"constants stand for some experts \(MoNE\)"):
        read_config(tmp_path)
