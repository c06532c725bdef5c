"""No circle anywhere in the two packages: every file can be read after the files that it imports.

Nothing is imported: a broken module cannot hide an arrow. Imports inside functions and under TYPE_CHECKING count like
any other, because a reader has to follow them all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

from paths import ROOT


def modules() -> dict[str, Path]:
    """Dotted name -> file. A package goes by its `__init__`, a native module by its stub."""
    found: dict[str, Path] = {}
    for package in ("ndp_device", "vllm_ndp"):
        for path in sorted((ROOT / package).rglob("*.py*")):
            if path.suffix in (".py", ".pyi"):
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, source: str, is_package: bool, known: Collection[str]) -> set[str]:
    """The modules of our own that this one names. `from a import b` is an arrow to a.b where that is a module."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found |= {name if name in known else origin for name in names}
    return found.intersection(known) - {module}


KNOWN = modules()
ARROWS = {name: imports_of(name, path.read_text(), path.stem == "__init__", KNOWN) for name, path in KNOWN.items()}


def room_of(module: str) -> str:
    """The folder directly below the package, or the file itself where it lies beside those folders."""
    return ".".join(module.split(".")[:2])


def test_no_module_reaches_itself_again() -> None:
    """What it raises names the circle."""
    TopologicalSorter(ARROWS).prepare()


def test_no_room_reaches_itself_again() -> None:
    rooms: dict[str, set[str]] = {}
    for module, targets in ARROWS.items():
        rooms.setdefault(room_of(module), set()).update(map(room_of, targets))
    TopologicalSorter({room: targets - {room} for room, targets in rooms.items()}).prepare()


def test_imports_that_are_relative_or_late_or_for_types_alone_are_arrows() -> None:
    source = "from . import c\nif TYPE_CHECKING:\n    from p.d import name\n"
    source += "def late():\n    import p.room.e\n    import os\n"
    assert imports_of("p.b", source, False, ["p.b", "p.c", "p.d", "p.room.e"]) == {"p.c", "p.d", "p.room.e"}
    assert imports_of("p", source, True, ["p.c"]) == {"p.c"}
