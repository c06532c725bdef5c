"""Every architecture of vLLM's registry that has experts has a row, with its outcome, in tests/data.

Which have some is read from vLLM's source, without importing it. An architecture has some where its class reaches one
that makes vLLM's MoE layer or calls its kernel, through names in the files of vllm.model_executor.models and
vllm.models; or where its file names such an architecture.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import ROOT

pytest.importorskip("vllm")

DATA = tomllib.loads((ROOT / "tests" / "data" / "moe-architectures.toml").read_text())
ROWS = DATA["outcomes"]
MODELS = "vllm.model_executor.models"
MAKERS = frozenset({"FusedMoE", "FusedMoEFactory", "RoutedExperts", "MoERunner", "fused_experts", "fused_moe"})
KINDS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
"""Tables of the registry whose models write text; others pool, or draft for another one."""


def moe_architectures() -> set[str]:
    known = registry()
    found = {name for name, (module, cls) in known.items() if _has_experts(module, cls)}
    return found | {name for name, (module, _) in known.items() if _strings(module) & found}


def registry() -> Mapping[str, tuple[str, str]]:
    """Architecture -> (module, class)."""
    tables = {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in _tree(f"{MODELS}.registry").body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and statement.targets[0].id in KINDS
    }
    return {
        name: (module if module.startswith("vllm.") else f"{MODELS}.{module}", cls)
        for kind in KINDS
        for name, (module, cls) in tables[kind].items()
    }


@cache
def _file(module: str) -> Path | None:
    path = _root().joinpath(*module.split(".")[1:])
    choices = (path / "__init__.py", path.with_suffix(".py"))
    return next((choice for choice in choices if choice.is_file()), None)


@cache
def _root() -> Path:
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    return Path(vllm.origin).parent


@cache
def _tree(module: str) -> ast.Module:
    file = _file(module)
    return ast.parse(file.read_text() if file is not None else "")


@cache
def _strings(module: str) -> frozenset[str]:
    nodes = ast.walk(_tree(module))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


@cache
def _definitions(module: str) -> Mapping[str, ast.AST]:
    """Classes, functions and tables of a file by their name."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.setdefault(node.name, node)
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, node)
    return found


@cache
def _imports(module: str) -> Mapping[str, list[tuple[str, str]]]:
    """Name in a file -> where it may come from: a file may choose by platform."""
    file, found = _file(module), dict[str, list[tuple[str, str]]]()
    is_package = file is not None and file.name == "__init__.py"
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, []).append((source, alias.name))
    return found


@cache
def _reached(module: str, name: str) -> tuple[bool, tuple[tuple[str, str], ...]]:
    """Whether this definition makes experts, and which definitions it names."""
    node = _definitions(module).get(name)
    parts = [] if node is None else list(ast.walk(node))
    calls = (part.func for part in parts if isinstance(part, ast.Call))
    makes = any(isinstance(func, ast.Name) and func.id in MAKERS for func in calls)
    names = {name} if node is None else {part.id for part in parts if isinstance(part, ast.Name)} - MAKERS
    here = [(module, one) for one in names if node is not None and one in _definitions(module)]
    elsewhere = [source for one in names for source in _imports(module).get(one, ())]
    return makes, (*here, *(source for source in elsewhere if source[0].startswith("vllm.model")))


def _has_experts(module: str, cls: str) -> bool:
    seen, waiting = set[tuple[str, str]](), [(module, cls)]
    while waiting:
        place = waiting.pop()
        if place not in seen:
            seen.add(place)
            makes, named = _reached(*place)
            if makes:
                return True
            waiting += named
    return False


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
