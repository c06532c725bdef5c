"""Rows of docs/families.md: families of models with the same outcome share one. Knows no page."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from measured_figures import Figures

Row = TypeVar("Row")
EACH_ITS_OWN = {"cold_pairs", "commit", "sources"}
"""What says nothing of a family's outcome."""


def by_sentence(families: Figures) -> list[tuple[list[str], str]]:
    """Refused families by what refuses them: sentences that differ in the family's name or in a layer's number."""
    found = {name: row["refused"] for name, row in families.figures.items() if "refused" in row}
    return grouped(found, lambda name: re.sub(r"layers\.\d+\.\S+", "", found[name].replace(name, "")))


def by_outcome(families: Figures) -> list[tuple[list[str], dict[str, Any]]]:
    """Families that ran, by all that was measured of them but the device's work and the code that was run."""
    found = {name: row for name, row in families.figures.items() if "tokens_total" in row}
    return grouped(
        found, lambda name: str({key: value for key, value in found[name].items() if key not in EACH_ITS_OWN})
    )


def grouped(found: Mapping[str, Row], kind: Callable[[str], str]) -> list[tuple[list[str], Row]]:
    """Names of a kind, with the row of the first."""
    groups: dict[str, tuple[list[str], Row]] = {}
    for name, row in found.items():
        groups.setdefault(kind(name), ([], row))[0].append(name)
    return list(groups.values())
