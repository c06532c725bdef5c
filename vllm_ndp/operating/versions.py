"""Which versions of vLLM the tests ran with, and which are accepted. Data; for people: docs/compatibility.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Standing = Literal["tested", "accepted", "refused"]


class Version(NamedTuple):
    """Major and minor: what vLLM's hooks depend on."""

    major: int
    minor: int

    @classmethod
    def of(cls, text: str) -> Version:
        """Parse a version such as "0.32.0+cpu"; a text without a version is older than all."""
        numbers = re.match(r"(\d+)\.(\d+)", text)
        return cls(int(numbers[1]), int(numbers[2])) if numbers else cls(0, 0)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True)
class Matrix:
    """Versions of one build of vLLM: the plugin accepts `oldest` to `newest`; its tests ran on `tested`."""

    oldest: Version
    newest: Version
    tested: tuple[Version, ...]

    def standing(self, version: Version) -> Standing:
        if version in self.tested:
            return "tested"
        return "accepted" if self.oldest <= version <= self.newest else "refused"

    @property
    def accepted(self) -> str:
        return f"{self.oldest} to {self.newest}"


TESTED: Mapping[Literal["cpu", "cuda"], Matrix] = {
    "cpu": Matrix(Version(0, 30), Version(0, 33), (Version(0, 31), Version(0, 32))),
    "cuda": Matrix(Version(0, 26), Version(0, 33), ()),
}
"""Versions that were run: docs/compatibility.md."""


def newest_tested(build: Literal["cpu", "cuda"]) -> str:
    """For a sentence: the newest that was run, or what is accepted where none was."""
    matrix = TESTED[build]
    return f"vLLM {matrix.tested[-1]}" if matrix.tested else f"vLLM {matrix.accepted}"
