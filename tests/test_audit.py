"""Pins have hashes, cover what the package needs, and an audit finds what it should."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from importlib.metadata import distributions
from types import ModuleType

import pytest
from paths import ROOT

PATCHES = ROOT / "patches"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", PATCHES / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dependency_is_pinned_with_a_hash(audit: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build, wanted = project["build-system"]["requires"], project["project"]
    needed = [*wanted["dependencies"], *wanted["optional-dependencies"]["dev"], *build]
    needed += wanted["optional-dependencies"]["cpu"]
    names = {audit.canonical(re.match(r"[\w.-]+", line)[0]) for line in needed}
    locked = audit.all_pins()
    assert names - set(locked) == set()


def test_the_lock_and_the_constraints_are_of_one_set(audit: ModuleType) -> None:
    lines = [line for line in (PATCHES / "constraints-cpu.txt").read_text().splitlines() if "==" in line]
    constraints = {audit.canonical(name): version for name, version in (line.split("==") for line in lines)}
    locked = audit.all_pins()
    assert {name: version for name, version in constraints.items() if locked.get(name, version) != version} == {}


def test_what_is_installed_has_no_known_hole(audit: ModuleType) -> None:
    versions = {audit.canonical(found.metadata["Name"]): found.version for found in distributions()}
    advisories = json.loads((PATCHES / "advisories.json").read_text())["advisories"]
    assert audit.affected(versions, advisories) == []


def test_an_old_version_a_foreign_one_and_a_missing_hash_are_found(audit: ModuleType) -> None:
    known = [{"id": "X-1", "package": "a", "fixed_in": "1.10", "what": "a hole"}]
    assert audit.affected({"a": "1.9"}, known) == ["a 1.9 has X-1 (a hole): fixed in 1.10"]
    assert audit.affected({"a": "1.10"}, known) == audit.affected({"b": "1"}, known) == []
    assert audit.differing({"a": "2"}, {"a": "1", "b": "3"}) == ["a is installed as 2, the tests passed with 1"]
    with pytest.raises(ValueError, match="--hash"):
        audit.pins("a==1")
