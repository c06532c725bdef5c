"""Drafts for tests: heads of a trained model (EAGLE, EAGLE-3, Medusa), and an MTP layer for a family's random one.

A head's first matrix is fitted to what heads are trained for: from what the model knew at one position, what it will
know later. So some guesses are right. The MTP layer copies the word it is given, and the model's embeddings are made to
outweigh what its layers add. The layers behind are random and small, and their experts do count.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from paths import ROOT
from safetensors.torch import load_file, save_file

TEXT = ROOT / "models" / "tiny-mixtral" / "eval" / "python.txt"
ROWS, LENGTH = 32, 256
READ_LAYERS = (1, 2, 3)
"""After which layers of the target EAGLE-3 looks."""
MEDUSA_HEADS = 2
SMALL = 0.02
EMBEDDINGS = 8.0
"""What a random model's embeddings are multiplied by."""

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Known:
    """A trained model's hidden states [ROWS, LENGTH, H]: of words, and after each layer, the last one's normed."""

    config: dict[str, Any]
    states: list[torch.Tensor]
    embeddings: torch.Tensor  # [V, H]
    norm: torch.Tensor  # [H]

    @classmethod
    def of(cls, target: Path) -> Known:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        words = AutoTokenizer.from_pretrained(target)(TEXT.read_text())["input_ids"][: ROWS * LENGTH]
        with torch.no_grad():
            states = model(torch.tensor(words).reshape(ROWS, LENGTH), output_hidden_states=True).hidden_states
        config = json.loads((target / "config.json").read_text())
        return cls(config, list(states), model.model.embed_tokens.weight.detach(), model.model.norm.weight.detach())

    @property
    def ones(self) -> torch.Tensor:
        return torch.ones_like(self.norm)


def make_head(method: str, target: Path, out: Path) -> Path:
    """Write a head of a trained model. method: eagle, eagle3 or medusa."""
    weights, config = {"eagle": _eagle, "eagle3": _eagle3, "medusa": _medusa}[method](Known.of(target))
    out.mkdir(parents=True)
    save_file({f"{name}.weight": value.contiguous() for name, value in weights.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    return out


def _eagle(known: Known) -> tuple[Weights, dict[str, Any]]:
    """It sees the next word and what the model knew before it."""
    words, last = known.states[0], known.states[-1]
    fc = _fitted(torch.cat([words[:, 1:], last[:, :-1]], dim=-1), last[:, 1:])
    weights = {"fc": fc, "layers.0.post_attention_layernorm": known.ones}
    return weights | _layer("layers.0", 1, known.config), _llama(known.config)


def _eagle3(known: Known) -> tuple[Weights, dict[str, Any]]:
    """It sees three layers of the model; its own norm multiplies by the model's."""
    seen = torch.cat([known.states[index][:, :-1] for index in READ_LAYERS], dim=-1)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights = {"fc": _fitted(seen, known.states[-1][:, 1:] / known.norm), "norm": known.norm}
    weights |= {f"midlayer.{name}": known.ones for name in norms} | _layer("midlayer", 2, known.config)
    more = {"eagle_aux_hidden_state_layer_ids": READ_LAYERS, "draft_vocab_size": known.config["vocab_size"]}
    return weights, _llama(known.config) | more


def _medusa(known: Known) -> tuple[Weights, dict[str, Any]]:
    """Head i sees what the model knew i + 1 words before; its block passes that on, and adds silu(0) = 0."""
    last, weights = known.states[-1], Weights()
    for head in range(MEDUSA_HEADS):
        later = _fitted(last[:, : -head - 1], last[:, head + 1 :])
        weights[f"lm_heads.{head}"] = known.embeddings @ later
        weights[f"blocks.{head}.layers.0"] = torch.zeros_like(later)
    sizes = {name: known.config[name] for name in ("vocab_size", "hidden_size")}
    return weights, sizes | {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": MEDUSA_HEADS}


def _fitted(seen: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """W [H, C] of the least squares of `seen` W^T - `after`, with a little ridge."""
    x, y = seen.flatten(0, 1).double(), after.flatten(0, 1).double()
    ridge = 1e-3 * x.square().mean() * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(x.T @ x + ridge, x.T @ y).T.float()


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a head with one dense layer."""
    kept = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
            "max_position_embeddings", "rope_parameters", "hidden_act", "bos_token_id", "eos_token_id")  # fmt: skip
    own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    own |= {"intermediate_size": config["hidden_size"], "tie_word_embeddings": False}
    return {name: config[name] for name in kept} | own


def _layer(name: str, inputs: int, config: dict[str, Any]) -> Weights:
    """Random attention that reads `inputs` hidden states, and a dense MLP."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (heads * head, inputs * hidden),
        "self_attn.k_proj": (kv_heads * head, inputs * hidden),
        "self_attn.v_proj": (kv_heads * head, inputs * hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (hidden, hidden),
        "mlp.up_proj": (hidden, hidden),
        "mlp.down_proj": (hidden, hidden),
    }
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.{part}": SMALL * torch.randn(shape, generator=generator) for part, shape in shapes.items()}


def add_mtp(model: Path, out: Path) -> Path:
    """Write a copy of a model whose last layer is also its MTP layer's, as DeepSeek and GLM or as Qwen3-Next store one.

    Qwen3-Next counts MTP layers from 0, as it counts its own, and multiplies by 1 + the norm's weight.
    """
    shutil.copytree(model, out)
    path, tensors = out / "config.json", load_file(out / "model.safetensors")
    config = json.loads(path.read_text())
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    words, norm, head = (tensors[f"{name}.weight"] for name in ("model.embed_tokens", "model.norm", "lm_head"))
    words *= EMBEDDINGS
    both = torch.cat([words.square().mean().sqrt() * torch.eye(hidden), SMALL * torch.eye(hidden)], dim=1)
    if config["model_type"] == "qwen3_next":
        block, zeros = "mtp.layers.0.", torch.zeros(hidden)
        own = {"mtp.fc": both, "mtp.norm": norm}
        own |= {"mtp.pre_fc_norm_embedding": zeros, "mtp.pre_fc_norm_hidden": zeros}
    else:
        block, ones = f"model.layers.{last + 1}.", torch.ones(hidden)
        own = {"enorm": ones, "hnorm": ones, "eh_proj": both, "shared_head.norm": norm, "shared_head.head": head}
        own = {f"{block}{name}": value for name, value in (own | {"embed_tokens": words}).items()}
    before = f"model.layers.{last}."
    tensors |= {name.replace(before, block): value.clone() for name, value in tensors.items() if before in name}
    tensors |= {f"{name}.weight": value.to(words.dtype).clone() for name, value in own.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return out
