"""Sizes of a model in its config.json: decoder layers, shared and routed experts, vocabulary.

The keys are those that transformers and vLLM read; a family that spells a size in a new way adds its spelling to
checkpoint/spellings.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ndp_device.checkpoint import spellings
from ndp_device.checkpoint.spellings import first_of, keys_about
from ndp_device.common.decoder_layers import (
    Attention,
    Convolution,
    DecoderLayer,
    GatedDelta,
    GroupedQuery,
    Latent,
    SelectiveScan,
    StateSpace,
)
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import MAX_LAYERS, MAX_WIDTH, ModelShape, WholeModel

_OF_KIND = {
    "full_attention": {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"},
    "sliding_attention": {
        "head_dim": "swa_head_dim",
        "num_key_value_heads": "swa_num_key_value_heads",
        "num_attention_heads": "swa_num_attention_heads",
    },
}
"""Sizes that layers of one kind have of their own: Gemma-4's with full attention, MiMo's with a window."""
_GATES_ATTENTION = ("afmoe",)
"""Model types whose attention is gated, number by number, without a word about it in config.json."""
_RECURRENT = {"linear_attention", "mamba", "mamba2"}
_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's pattern: the kind of each layer, which is attention or experts or a dense part."""
_FIRST_DENSE = (
    *("first_k_dense_replace", "moe_layer_start_index"),  # DeepSeek and most; Ernie
    *("num_dense_layers", "moe_layer_num_skipped", "dense_mlp_idx"),  # AFMoE and LFM2; Hunyuan; Inkling
)
"""How many of the first layers are dense."""
_ABOUT_LAYERS = ("moe_layer", "layer_types", "dense", "sparse", "interleave", "pattern", "block_type")
_FIRST_DENSE_UNSAID = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm5_next"), 3),
    "lfm2_moe": 2,
    **dict.fromkeys(("afmoe", "axk1", "axk2", "ernie4_5_moe", "ernie4_5_moe_vl", "exaone_moe", "glm4_moe"), 1),
    **dict.fromkeys(("glm4_moe_lite", "glm4v_moe_text", "hy_v3", "hy_v4", "kimi_linear", "laguna"), 1),
    **dict.fromkeys(("mimo_v2_flash", "param2moe", "sarvam_moe", "sarvam_mla", "step3_text", "step3p5"), 1),
}
"""Model type -> the same where config.json says nothing about it, as the classes of transformers and vLLM have it."""


def whole_model(
    experts: ModelShape, config: Mapping[str, Any], moe_layers: Collection[int], **changed: Any
) -> WholeModel:
    """`moe_layers`: the decoder layers whose experts were found. `changed`: what a run changes, such as dtype."""
    read = _Config(experts.name, config)
    return WholeModel.of_experts(
        experts,
        vocab_size=read.size("vocab_size"),
        decoder=read.decoder(moe_layers),
        shared_weights=read.shared_weights(experts.intermediate_size),
        tied=bool(config.get("tie_word_embeddings")),
        **changed,
    )


def public_model(name: str, config: Mapping[str, Any]) -> WholeModel:
    """The model of a config.json alone, in bfloat16: one that is published and not here (timing/public_models.py)."""
    read = _Config(name, config)
    moe_layers = read.moe_layers()
    if not moe_layers:
        raise ConfigError(
            f"model {name!r}: by its config.json no layer has experts: {keys_about(config, *_ABOUT_LAYERS)}"
        )
    counted = {key: read.size(key) for key in spellings.NUM_EXPERTS if config.get(key)}
    if len(set(counted.values())) > 1:
        raise ConfigError(f"model {name!r}: its config.json counts its experts in two ways, {counted}")
    experts = ModelShape(
        name,
        len(moe_layers),
        read.size(*spellings.NUM_EXPERTS),
        read.size(*spellings.TOP_K),
        read.size("hidden_size"),
        read.size("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    )
    return whole_model(experts, config, moe_layers)


class _Config:
    """One config.json, asked by size. `name`: the model's, for messages."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._name, self._config = name, config

    def size(self, *keys: str) -> int:
        """The first of these keys that is there."""
        for key in keys:
            value = self._config.get(key)
            if isinstance(value, list) and value:  # one per layer
                if any(one != value[0] for one in value):
                    raise ConfigError(f"model {self._name!r}: we serve one {key} for all layers, got {value!r:.80}")
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                largest = MAX_LAYERS if key in spellings.NUM_LAYERS else MAX_WIDTH
                if not 0 <= value <= largest:
                    raise ConfigError(f"model {self._name!r}: {key} must lie in 0..{largest}, got {value}")
                return value
        if (given := next((key for key in keys if self._config.get(key) is not None), None)) is not None:
            raise ConfigError(f"model {self._name!r}: {given} must be a whole number, got {self._config[given]!r:.80}")
        raise ConfigError(
            f"model {self._name!r}: its config.json must give {' or '.join(keys)}, of which there is none: "
            f"{keys_about(self._config, *{word for key in keys for word in key.split('_')[-1:]})}"
        )

    def _or(self, default: int, *keys: str) -> int:
        return self.size(*keys) if any(self._config.get(key) is not None for key in keys) else default

    def _period(self, default: int, *keys: str) -> int:
        """A divisor from config.json, at least 1."""
        if value := self._or(default, *keys):
            return value
        raise ConfigError(f"model {self._name!r}: {' or '.join(keys)} must be at least 1, got 0")

    def decoder(self, moe_layers: Collection[int]) -> tuple[DecoderLayer, ...]:
        wider = ("prefix_dense_intermediate_size", "intermediate_size_mlp")  # Cohere-2's, Llama-4's
        dense = 3 * self.size("hidden_size") * self._or(1, *wider, "intermediate_size")
        return tuple(
            DecoderLayer(attention=self._attention(layer), dense_weights=0 if layer in moe_layers else dense)
            for layer in range(self.size(*spellings.NUM_LAYERS))
        )

    def moe_layers(self) -> list[int]:
        """The decoder layers that have experts: those that a list names, or that rules of families leave."""
        layers = range(self.size(*spellings.NUM_LAYERS))
        named = self._named_moe_layers(len(layers))
        return [
            layer for layer in layers if (self._has_experts(layer, len(layers)) if named is None else layer in named)
        ]

    def _named_moe_layers(self, count: int) -> set[int] | None:
        """Those of a list: of the kind of each layer, of 0 and 1 for each, or of the numbers of these layers."""
        get = self._config.get
        of_each: dict[str, Any] = {
            "mlp_layer_types": [kind != "dense" for kind in self._listed("mlp_layer_types")],
            "moe_layer_freq": self._listed("moe_layer_freq"),  # MiMo; an integer is a period
        }
        if "moe" in (blocks := self._blocks()):
            of_each["layers_block_type"] = [kind == "moe" for kind in blocks]
        for key, has_experts in of_each.items():
            if has_experts and len(has_experts) < count:
                raise ConfigError(
                    f"model {self._name!r}: {key} must say it of all {count} layers, got {len(has_experts)}"
                )
            if has_experts:
                return {layer for layer, one in enumerate(has_experts) if one}
        for key in ("moe_layers_enum", "moe_layers"):  # Step-3's text of numbers, Llama-4's list
            if (numbers := get(key)) is not None:
                words = numbers.split(",") if isinstance(numbers, str) else numbers
                if not isinstance(words, list) or not all(str(word).strip().isdecimal() for word in words):
                    raise ConfigError(f"model {self._name!r}: {key} must list numbers of layers, got {numbers!r:.80}")
                return {int(word) for word in words}
        return None

    def _listed(self, key: str) -> list[Any]:
        value = self._config.get(key)
        return value if isinstance(value, list) else []

    def _blocks(self) -> list[str]:
        """The kind of each layer where a layer is attention or experts, and not both."""
        pattern = self._config.get("hybrid_override_pattern")
        return (
            [_PATTERN.get(one, one) for one in pattern]
            if isinstance(pattern, str)
            else self._listed("layers_block_type")
        )

    def _has_experts(self, layer: int, count: int) -> bool:
        """Apply the rules that model files follow. A rule whose keys are missing is not applied."""
        get = self._config.get
        model_type = str(get("model_type"))
        first = self._or(_FIRST_DENSE_UNSAID.get(model_type, 0), *_FIRST_DENSE)
        ends = get("moe_layer_end_index")
        last = max((one for one in (ends if isinstance(ends, list) else [ends]) if type(one) is int), default=-1)
        if not first <= layer <= (count if last < 0 else last):  # Ernie: -1 is the last one
            return False
        dense = get("mlp_only_layers")
        if isinstance(dense, list) and layer in dense:
            return False
        if get("interleave_moe_layer_step") == 0:
            return False
        step = self._period(1, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
        since = first if model_type.startswith("sarvam") else 0
        if (layer + 1) % step or (layer - since) % self._period(1, "moe_layer_freq"):
            return False
        return layer % self._period(1, "expert_layer_period") == self._or(0, "expert_layer_offset")

    def shared_weights(self, intermediate: int) -> int:
        """Weights of one layer's shared experts, by count or width, and of the gate that some families put before
        them."""
        hidden, get = self.size("hidden_size"), self._config.get
        if "shared_expert_intermediate_size" in self._config:  # Qwen: with a gate of one number per row
            width = self._or(0, "shared_expert_intermediate_size")
            has_gate = width and get("model_type") != "laguna"
            return 3 * hidden * width + (hidden if has_gate else 0)
        if get("enable_moe_block"):  # Gemma-4: its dense part beside the experts
            return 3 * hidden * self.size("intermediate_size")
        if first_of(self._config, spellings.SHARED_WIDTH):
            return 3 * hidden * self.size(*spellings.SHARED_WIDTH)
        always = str(get("model_type")).startswith(("llama4", "hunyuan"))  # one, whether it is counted or not
        count = self._or(int(always), *spellings.SHARED_EXPERTS)
        return 3 * hidden * intermediate * count

    def _kind(self, layer: int) -> str:
        """Name of the layer's attention, from one of the keys that families use for it."""
        get = self._config.get
        kinds = get("layer_types") or self._blocks()
        if isinstance(kinds, list) and layer < len(kinds):
            return str(kinds[layer])
        if get("full_attention_interval") is not None:
            return "linear_attention" if (layer + 1) % self._period(1, "full_attention_interval") else "full_attention"
        if get("attn_layer_period") is not None:
            period = self._period(1, "attn_layer_period")
            return "full_attention" if layer % period == self.size("attn_layer_offset") else "mamba"
        if get("attention_chunk_size"):  # every fourth layer has no rotary embedding, and no chunks
            return "chunked_attention" if (layer + 1) % self._period(4, "no_rope_layer_interval") else "full_attention"
        return "full_attention"

    def _attention(self, layer: int) -> Attention:
        kind = self._kind(layer)
        if kind in _RECURRENT:
            return self._recurrence()
        if kind == "conv":
            return Convolution(inner=self.size("hidden_size"), kernel=self.size("conv_L_cache"))
        heads = self._period(0, "num_attention_heads")
        if self._config.get("kv_lora_rank"):
            return Latent(
                num_heads=heads,
                query_rank=self._or(0, "q_lora_rank"),
                kv_rank=self.size("kv_lora_rank"),
                nope_dim=self.size("qk_nope_head_dim"),
                rope_dim=self.size("qk_rope_head_dim"),
                value_dim=self.size("v_head_dim"),
                **self._indexer(layer),
            )
        windows = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        sizes = self._of_layer(layer, kind)
        heads = sizes._period(0, "num_attention_heads")
        head_dim = sizes._or(self.size("hidden_size") // heads, "head_dim", "attention_head_dim")
        return GroupedQuery(
            num_heads=heads,
            num_kv_heads=sizes._or(heads, "num_key_value_heads", "num_attention_groups"),
            head_dim=head_dim,
            reach=self.size(windows[kind]) if kind in windows else 0,
            chunked=kind == "chunked_attention",
            gate_dim=self._gate_dim(head_dim),
            one_projection=kind == "full_attention" and bool(self._config.get("attention_k_eq_v")),
            query_rank=self._or(0, "share_q_dim"),
            sinks=self._or(0, "param_sink_number"),
        )

    def _indexer(self, layer: int) -> dict[str, int]:
        """Sizes of what chooses the tokens that a row attends to; a layer may take over the choice before it."""
        if not (reach := self._or(0, "index_topk")):
            return {}
        kinds = self._config.get("indexer_types")
        if isinstance(kinds, list) and kinds[layer : layer + 1] == ["shared"]:
            return {"index_reach": reach}
        return {
            "index_heads": self.size("index_n_heads"),
            "index_dim": self.size("index_head_dim"),
            "index_reach": reach,
        }

    def _gate_dim(self, head_dim: int) -> int:
        get = self._config.get
        if gating := get("gating"):  # Laguna: a number per head, unless it says otherwise
            return 1 if gating is True or gating == "per-head" else head_dim
        if get("use_head_wise_attn_gate"):  # Step-3.5
            return 1
        gates = "linear_num_value_heads" in self._config or get("model_type") in _GATES_ATTENTION
        return head_dim if gates or get("attn_output_gate") or get("attention_gate_func") else 0

    def _of_layer(self, layer: int, kind: str) -> _Config:
        """Replace the sizes that this layer has of its own, by its number or its kind."""
        given = self._config.get("per_layer_config")
        own = given.get(str(layer)) if isinstance(given, Mapping) else None
        other = self._config.get("attention_other_setting")  # Step-3.5's layers of one kind
        if not isinstance(own, Mapping) and isinstance(other, Mapping) and other.get("attention_type") == kind:
            own = other
        if not isinstance(own, Mapping):
            own = {key: self._config.get(key_of_kind) for key, key_of_kind in _OF_KIND.get(kind, {}).items()}
        return _Config(self._name, {**self._config, **{key: value for key, value in own.items() if value is not None}})

    def _recurrence(self) -> Attention:
        if "linear_num_value_heads" in self._config:
            return GatedDelta(
                num_key_heads=self.size("linear_num_key_heads"),
                num_value_heads=self.size("linear_num_value_heads"),
                key_dim=self.size("linear_key_head_dim"),
                value_dim=self.size("linear_value_head_dim"),
                kernel=self.size("linear_conv_kernel_dim"),
            )
        if "mamba_n_heads" in self._config or "mamba_num_heads" in self._config:  # Granite; Nemotron-H
            return StateSpace(
                num_heads=self.size("mamba_n_heads", "mamba_num_heads"),
                head_dim=self.size("mamba_d_head", "mamba_head_dim"),
                state=self.size("mamba_d_state", "ssm_state_size"),
                groups=self.size("mamba_n_groups", "n_groups"),
                kernel=self.size("mamba_d_conv", "conv_kernel"),
            )
        if "mamba_expand" not in self._config:
            raise ConfigError(
                f"model {self._name!r}: its config.json must give sizes of linear attention by keys that are known "
                f"(linear_num_value_heads, mamba_n_heads, mamba_expand): {keys_about(self._config, 'linear', 'mamba')}"
            )
        return SelectiveScan(
            inner=self.size("mamba_expand") * self.size("hidden_size"),
            state=self.size("mamba_d_state"),
            step_rank=self.size("mamba_dt_rank"),
            kernel=self.size("mamba_d_conv"),
        )
