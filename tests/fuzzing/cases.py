"""One case of a file: damage a copy, read it, and say how that ended. Knows no kind of file."""

from __future__ import annotations

import random
import shutil
import traceback
from pathlib import Path

from fuzzing.files import Kind
from ndp_device.common.errors import NdpError


class Files:
    """Real files of every kind, made once, and a scratch place where copies are damaged."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def original(self, kind: Kind) -> Path:
        path = self._directory / kind.name
        if not path.exists():
            kind.make(path)
        return path

    def damaged(self, kind: Kind, seed: int) -> Path:
        original, copy = self.original(kind), self._directory / f"{kind.name}-damaged"
        if copy.is_dir():
            shutil.rmtree(copy)
        if original.is_dir():
            shutil.copytree(original, copy)
        else:
            shutil.copyfile(original, copy)
        kind.damage(random.Random(f"{kind.name} {seed}"), copy)
        return copy


def ended_badly(kind: Kind, path: Path) -> str | None:
    """None where the file is accepted or refused in one sentence; else what came instead."""
    try:
        kind.read(path)
    except NdpError as error:
        sentence = str(error)
        good = sentence and sentence.isprintable() and len(sentence) < 2000
        return None if good else f"a refusal that is not one sentence: {sentence!r}"
    except Exception:
        return traceback.format_exc(limit=-4)
    return None
