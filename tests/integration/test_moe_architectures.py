"""Every architecture of vLLM's registry that has experts has a row, with its outcome, in tests/data."""

from __future__ import annotations

import json
import tomllib

import pytest
from moe_architectures import moe_architectures, registry
from paths import ROOT

pytest.importorskip("vllm")

DATA = tomllib.loads((ROOT / "tests" / "data" / "moe-architectures.toml").read_text())
ROWS = DATA["outcomes"]


def test_every_architecture_with_experts_has_one_row() -> None:
    """A new vLLM brings new ones: run a tiny checkpoint of each beside stock, and write what came of it."""
    rows = [name for outcomes in ROWS.values() for name in outcomes]
    assert sorted(rows) == sorted(moe_architectures())


def test_what_is_called_identical_or_refused_was_measured() -> None:
    measured = json.loads((ROOT / "docs" / "measured" / "families.json").read_text())["figures"]
    for architecture, family in ROWS["identical"].items():
        row = measured[family]
        assert row["dtype"] == "bfloat16" or row["tokens_identical"] == row["tokens_total"] > 0, architecture
    sentences = [row["refused"] for row in measured.values() if "refused" in row]
    for architecture, part in ROWS["refused"].items():
        assert any(part in sentence for sentence in sentences), architecture


def test_a_row_of_the_same_class_is_the_same_class_in_the_registry() -> None:
    known, with_outcomes = registry(), {name for rows in ROWS.values() for name in rows} - set(ROWS["same_class"])
    for architecture, other in ROWS["same_class"].items():
        assert known[architecture] == known[other], architecture
        assert other in with_outcomes
