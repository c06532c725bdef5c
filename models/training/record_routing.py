"""Which experts does a checkpoint choose on held-out prompts, and on what comes after them?

    python models/training/record_routing.py MODEL --out MODEL/traces/sampled.npz
    python models/training/record_routing.py MODEL --prior MODEL/prior.npy

Prompts are windows of 256 tokens of each held-out text, spread evenly; 256 tokens come after: sampled from the model at
T = 0.8, or with --text the text's own. --out writes the arrays that `vllm-ndp trace-import --format npz` reads; --prior
the popularity of experts on the calibration text [L, E], for the setting `prior`. transformers in float32. Last line:
one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import MODEL, held_out_tokens
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from vllm_ndp.planning.stats import RoutingStats

PROMPT_TOKENS, SEQUENCE_TOKENS = 256, 512
TEMPERATURE = 0.8
CALIBRATION_WINDOWS, BATCH = 192, 16


@dataclass(frozen=True)
class Routing:
    """N sequences of T tokens: ids and weights [N, T, L, k], the heaviest expert first."""

    tokens: NDArray[np.uint16]  # [N, T]
    ids: NDArray[np.uint8]
    weights: NDArray[np.float16]
    domain: NDArray[np.int8]  # [N], index into `domains`
    domains: list[str]

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {
            "tokens": self.tokens,
            "prompt_len": np.full(len(self.tokens), PROMPT_TOKENS, np.int32),
            "domain": self.domain,
            "domains": np.array(self.domains),
            "experts": self.ids,
            "weights": self.weights,
        }


def load(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))  # the bundled models share it


@contextmanager
def routed(model: PreTrainedModel) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What each MoE layer is given in the forward passes inside: (ids, weights), both [rows, k]."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: seen.append((given[1], given[2])))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    yield seen
    for hook in hooks:
        hook.remove()


@torch.inference_mode()
def routing_of(model: PreTrainedModel, tokens: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """ids and weights [N, T, L, k] of tokens [N, T]."""
    parts = []
    for batch in tokens.split(BATCH):
        with routed(model) as seen:
            model.model(batch)
        parts.append([torch.stack(one, dim=1).unflatten(0, batch.shape) for one in zip(*seen, strict=True)])
    ids, weights = (torch.cat(one).numpy() for one in zip(*parts, strict=True))
    return ids.astype(np.uint8), weights.astype(np.float16)


@torch.inference_mode()
def sampled(model: PreTrainedModel, prompts: Tensor, seed: int = 0) -> Tensor:
    """[N, T]: each prompt and what the model writes after it."""
    generator = torch.Generator().manual_seed(seed)
    cache, tokens, fed = DynamicCache(), prompts, prompts
    while tokens.shape[1] < SEQUENCE_TOKENS:
        logits = model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        fed = torch.multinomial((logits / TEMPERATURE).softmax(dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, fed], dim=1)
    return tokens


def windows(per_domain: int) -> tuple[Tensor, list[str]]:
    """[N, T] of held-out text, `per_domain` windows of each domain one after the other; the domains."""
    texts = held_out_tokens(MODEL / "eval", tokenizer())
    found = []
    for ids in texts.values():
        for start in np.linspace(0, len(ids) - SEQUENCE_TOKENS, per_domain).astype(int):
            found.append(ids[start : start + SEQUENCE_TOKENS])
    return torch.tensor(found), list(texts)


def record(model: PreTrainedModel, per_domain: int, *, own_text: bool) -> Routing:
    """own_text: what comes after a prompt is the text's own."""
    tokens, domains = windows(per_domain)
    if not own_text:
        tokens = sampled(model, tokens[:, :PROMPT_TOKENS])
    ids, weights = routing_of(model, tokens)
    domain = np.repeat(np.arange(len(domains)), per_domain).astype(np.int8)
    return Routing(tokens.numpy().astype(np.uint16), ids, weights, domain, domains)


def popularity(model: PreTrainedModel, num_experts: int) -> NDArray[np.int64]:
    """[L, E]: how often each expert is chosen on the calibration text."""
    ids = tokenizer().encode((MODEL / "calibration.txt").read_text(), add_special_tokens=False).ids
    starts = np.linspace(0, len(ids) - PROMPT_TOKENS, CALIBRATION_WINDOWS).astype(int)
    chosen, weights = routing_of(model, torch.tensor([ids[start : start + PROMPT_TOKENS] for start in starts]))
    return RoutingStats.from_choices(  # type: ignore[call-arg]
        *(array.reshape(-1, *array.shape[2:]) for array in (chosen, weights)), num_experts
    ).counts


def num_experts_of(model: PreTrainedModel) -> int:
    return getattr(model.config, "num_local_experts", None) or model.config.num_experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, help="an .npz file of routing")
    parser.add_argument("--prior", type=Path, help="an .npy file of popularity")
    parser.add_argument("--per-domain", type=int, default=8, help="prompts of each of the six domains")
    parser.add_argument("--text", action="store_true", help="what comes after a prompt is the text's own")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load(arguments.model)
    if arguments.out is not None:
        routing = record(model, arguments.per_domain, own_text=arguments.text)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(arguments.out, **routing.arrays())
        print(json.dumps({"out": str(arguments.out), "shape": routing.ids.shape, "domains": routing.domains}))
    if arguments.prior is not None:
        np.save(arguments.prior, popularity(model, num_experts_of(model)))
        print(json.dumps({"prior": str(arguments.prior), "experts": num_experts_of(model)}))


if __name__ == "__main__":
    main()
