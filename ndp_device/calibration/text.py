"""Calibration text -> sequences of token ids, drawn without overlap. Knows a file and a tokenizer; runs no model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ndp_device.common.errors import ConfigError

HELD_OUT_EVERY = 8
"""One sequence in 8 is kept from the solver and used for the loss table."""


@dataclass(frozen=True)
class CalibrationText:
    """Sequences of token ids [S, sequence_length], drawn without overlap from one text file."""

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
