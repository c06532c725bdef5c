"""Published figures and ours, row by row, with the assumptions of each: what was published, what we get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """published is None where the source gives no figure for this line."""

    name: str
    quantity: str
    unit: str
    published: float | None
    ours: float
    assumptions: str

    @property
    def deviation(self) -> float | None:
        return None if self.published is None else self.ours / self.published - 1.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "deviation": self.deviation}


@dataclass(frozen=True)
class Reproduction:
    """All lines of one source, and what its own text contradicts."""

    source: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Of all rows; beside them in the command's JSON."""
