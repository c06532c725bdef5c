"""Every dependency is pinned once, with a hash. What is known of a version: `pip-audit`."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from paths import ROOT

PATCHES = ROOT / "patches"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """name -> version."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    found = [re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert None not in found, f"{path.name}: a pin must be name==version --hash=sha256:..."
    return {canonical(match[1]): match[2] for match in found if match is not None}


EACH = [pins(path) for path in sorted(PATCHES.glob("lock-*.txt"))]
LOCKED = {name: version for one in EACH for name, version in one.items()}


def test_every_dependency_is_pinned_once_with_a_hash() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build, wanted = project["build-system"]["requires"], project["project"]
    needed = [*wanted["dependencies"], *wanted["optional-dependencies"]["dev"], *build]
    needed += wanted["optional-dependencies"]["cpu"]
    names = {canonical(re.split(r"[^\w.-]", line)[0]) for line in needed}
    assert names - set(LOCKED) == set()
    assert len(LOCKED) == sum(map(len, EACH))


def test_the_lock_and_the_constraints_are_of_one_set() -> None:
    lines = [line for line in (PATCHES / "constraints-cpu.txt").read_text().splitlines() if "==" in line]
    constraints = {canonical(name): version for name, version in (line.split("==") for line in lines)}
    assert {name: version for name, version in constraints.items() if LOCKED.get(name, version) != version} == {}


# -- All that CMakeLists.txt builds is there: without a module all is slower, or goes another way, unseen --------------


CMAKE = (ROOT / "CMakeLists.txt").read_text()
BUILT = re.findall(r"install\(TARGETS (\S+) LIBRARY DESTINATION (\S+)\)", CMAKE)
MODULES = [f"{place.replace('/', '.')}.{name}" for name, place in BUILT]


def test_all_that_is_installed_is_looked_for() -> None:
    assert {name for name, _ in BUILT} == set(re.findall(r"nanobind_add_module\((\S+)", CMAKE))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_in_cpp_was_built(name: str) -> None:
    assert importlib.import_module(name).__file__
