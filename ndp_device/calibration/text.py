"""Calibration text -> sequences of token ids, drawn without overlap, and what transformers reads of a checkpoint.

Configuration and tokenizer come without running the checkpoint's code. transformers would ask on the terminal whether
to run it. Here the answer is no, and what transformers cannot read alone is refused in one sentence.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ndp_device.common.errors import ConfigError

HELD_OUT_EVERY = 8
"""One sequence in 8 is kept from the solver and used for the loss table."""

SHORTEST = 32
"""Tokens of a sequence: a short text is cut into shorter sequences before one is refused."""


@dataclass(frozen=True)
class CalibrationText:
    """Sequences of token ids [S, sequence_length], drawn without overlap from one text file. A text that is too short
    for those that were asked for gives fewer, and shorter ones if not even HELD_OUT_EVERY are whole."""

    token_ids: Tensor
    file_name: str
    blake2b: str

    @property
    def num_held_out(self) -> int:
        return len(self.token_ids) // HELD_OUT_EVERY

    @property
    def held_out_last(self) -> Tensor:
        """The sequences in another order: those for the solver, then those held out."""
        is_held_out = torch.arange(len(self.token_ids)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        return torch.cat([self.token_ids[~is_held_out], self.token_ids[is_held_out]])

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
        asked, least = f"{num_sequences} of {sequence_length}", min(SHORTEST, sequence_length)
        sequence_length = min(sequence_length, len(ids) // HELD_OUT_EVERY)
        if sequence_length < least:
            raise ConfigError(
                f"the calibration file {path.name} has {len(ids)} tokens and {HELD_OUT_EVERY} sequences of "
                f"{least}, the least, need {HELD_OUT_EVERY * least}: give a longer text"
            )
        if (whole := len(ids) // sequence_length) < num_sequences:
            print(
                f"{path.name} has {len(ids)} tokens: {whole} sequences of {sequence_length}, not {asked}",
                file=sys.stderr,
            )
        windows = np.array(ids[: len(ids) // sequence_length * sequence_length]).reshape(-1, sequence_length)
        drawn = np.random.default_rng(seed).permutation(len(windows))[:num_sequences]
        return cls(torch.from_numpy(windows[drawn]), path.name, file_digest(text))


def file_digest(contents: bytes) -> str:
    return hashlib.blake2b(contents, digest_size=16).hexdigest()


def load_tokenizer(model_dir: str | Path) -> Any:
    """Raises ConfigError where there is none that transformers reads."""
    from transformers import AutoTokenizer

    tekken = list(Path(model_dir).glob("*tekken*.json"))
    keys = {} if tekken else {"fix_mistral_regex": None}  # else it imports all of mistral_common to look for one
    load = functools.partial(AutoTokenizer.from_pretrained, **keys)
    return read_by_transformers(load, model_dir, "tokenizer", "put its tokenizer.json beside the weights")


def load_config(model_dir: str | Path) -> Any:
    """Raises ConfigError where transformers does not know the model's type."""
    from transformers import AutoConfig

    remedy = "quantize from the weights alone (no --calibration), or take a transformers that knows the model"
    return read_by_transformers(AutoConfig.from_pretrained, model_dir, "configuration", remedy)


def read_by_transformers(load: Callable[..., Any], model_dir: str | Path, what: str, remedy: str) -> Any:
    """Raises ConfigError with the reason and the remedy where transformers cannot."""
    import transformers

    try:
        return load(model_dir, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parts raise
        reason = " ".join(str(error).split())[:300].rstrip(".")
        code = " and does not run the code that comes with it" if _brings_code(model_dir) else ""
        raise ConfigError(
            f"transformers {transformers.__version__} cannot read the {what} of {model_dir}{code} "
            f"({type(error).__name__}: {reason}): {remedy}"
        ) from None


def _brings_code(model_dir: str | Path) -> bool:
    for name in ("config.json", "tokenizer_config.json"):
        with suppress(OSError, ValueError, TypeError, RecursionError):
            if "auto_map" in json.loads((Path(model_dir) / name).read_text()):
                return True
    return False
