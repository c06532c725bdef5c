"""All that CMakeLists.txt builds is there: without a module all is slower, or goes another way, unseen."""

from __future__ import annotations

import importlib
import re

import pytest
from paths import ROOT

CMAKE = (ROOT / "CMakeLists.txt").read_text()
BUILT = re.findall(r"install\(TARGETS (\S+) LIBRARY DESTINATION (\S+)\)", CMAKE)
MODULES = [f"{place.replace('/', '.')}.{name}" for name, place in BUILT]


def test_all_that_is_installed_is_looked_for() -> None:
    assert {name for name, _ in BUILT} == set(re.findall(r"nanobind_add_module\((\S+)", CMAKE))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_in_cpp_was_built(name: str) -> None:
    assert importlib.import_module(name).__file__
