"""Calibration text -> what reaches the experts of each layer. Knows a Hugging Face model; runs it as it is.

transformers 5 keeps all experts of a layer in one module, called with (hidden states, expert ids, router weights): a
hook on that call sees everything. Nothing is quantized while capturing, so every layer's inputs are those of the
original model and layers can be done in any order, or later.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from ndp_device.errors import ConfigError

HELD_OUT_EVERY = 8
"""One sequence in 8 is kept from the solver and used for the loss table."""


@dataclass(frozen=True)
class CalibrationText:
    """Sequences of token ids [S, sequence_length], drawn without overlap from one text file."""

    token_ids: Tensor
    file_name: str
    blake2b: str

    @classmethod
    def draw(
        cls, path: Path, tokenizer: Any, *, num_sequences: int, sequence_length: int, seed: int
    ) -> CalibrationText:
        if num_sequences < HELD_OUT_EVERY:
            raise ConfigError(f"at least {HELD_OUT_EVERY} sequences are needed to hold one out, got {num_sequences}")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the calibration file {path}: {error.strerror}") from None
        try:
            ids = tokenizer(text.decode(), add_special_tokens=False, verbose=False)["input_ids"]
        except UnicodeDecodeError as error:
            raise ConfigError(f"the calibration file {path} must be UTF-8 text: {error}") from None
        wanted = num_sequences * sequence_length
        if len(ids) < wanted:
            raise ConfigError(
                f"the calibration file {path.name} has {len(ids)} tokens and {num_sequences} sequences of "
                f"{sequence_length} need {wanted}: give a longer text or fewer sequences"
            )
        windows = np.array(ids[: len(ids) // sequence_length * sequence_length]).reshape(-1, sequence_length)
        drawn = np.random.default_rng(seed).permutation(len(windows))[:num_sequences]
        return cls(torch.from_numpy(windows[drawn]), path.name, file_digest(text))


def file_digest(contents: bytes) -> str:
    return hashlib.blake2b(contents, digest_size=16).hexdigest()


@dataclass(frozen=True)
class RoutedInputs:
    """What entered the experts of one layer: hidden states [T, H] and the experts chosen for them [T, top_k]."""

    hidden: Tensor
    expert_ids: Tensor

    def of(self, expert: int) -> Tensor:
        """The rows that were routed to one expert, [n, H]."""
        return self.hidden[(self.expert_ids == expert).any(1)]


def load_model(model_dir: Path, device: torch.device) -> Any:
    """The model as transformers loads it, in float32 on a CPU and in its own dtype on a GPU."""
    transformers.utils.logging.disable_progress_bar()
    dtype = torch.float32 if device.type == "cpu" else "auto"
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device)


def expert_modules(model: Any) -> list[Any]:
    """The modules that hold the experts of one layer each, in the order of the layers.

    transformers marks them, whatever the family: it may distribute them. Llama-4's are not, and take other arguments.
    """
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def capture(model: Any, token_ids: Tensor, layers: range) -> dict[int, tuple[RoutedInputs, RoutedInputs]]:
    """Run the model over all sequences: per layer (inputs for the solver, inputs held out), on the CPU."""
    modules = expert_modules(model)
    if len(modules) <= layers.stop - 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(modules)} layers of experts we can hook, wanted {layers.stop}: "
            "its replicas can be made from the weights alone, without a calibration file"
        )
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

    def hook_of(layer: int) -> Any:
        def hook(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            hidden, expert_ids = (*args, *kwargs.values())[:2]
            seen[layer].append((hidden.flatten(0, -2).cpu(), expert_ids.cpu()))

        return hook

    hooks = [modules[layer].register_forward_pre_hook(hook_of(layer), with_kwargs=True) for layer in layers]
    try:
        with torch.inference_mode():
            for sequence in token_ids:
                model(input_ids=sequence[None].to(model.device), use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
    return {layer: (_join(parts, held_out=False), _join(parts, held_out=True)) for layer, parts in seen.items()}


def _join(parts: list[tuple[Tensor, Tensor]], *, held_out: bool) -> RoutedInputs:
    chosen = [part for n, part in enumerate(parts) if (n % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out]
    return RoutedInputs(torch.cat([hidden for hidden, _ in chosen]), torch.cat([ids for _, ids in chosen]))
