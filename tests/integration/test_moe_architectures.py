"""Every architecture of vLLM's registry that writes text has a row in tests/data: its outcome, or that it is dense.

The registry is read from vLLM's source, without importing it.
"""

import ast
import json
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import ROOT

pytest.importorskip("vllm")

DATA = tomllib.loads((ROOT / "tests" / "data" / "moe-architectures.toml").read_text())
ROWS = DATA["outcomes"]
KINDS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
"""Tables of the registry whose models write text; others pool, or draft for another one."""


def registry() -> Mapping[str, tuple[str, str]]:
    """Architecture -> (module, class)."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    source = Path(vllm.origin).parent / "model_executor" / "models" / "registry.py"
    tables = [
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in KINDS
    ]
    assert len(tables) == len(KINDS)
    return {name: tuple(place) for table in tables for name, place in table.items()}


def test_every_architecture_has_one_row() -> None:
    """A new vLLM brings new ones. Has one experts, run a tiny checkpoint beside stock, and write what came of it."""
    rows = [*DATA["dense"].split(), *(name for outcomes in ROWS.values() for name in outcomes)]
    assert sorted(rows) == sorted(registry())


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
