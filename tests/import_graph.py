"""Which module of the two packages imports which, read from the source.

Nothing is imported: a broken module cannot hide an arrow. Imports inside functions and under TYPE_CHECKING count like
any other, because a reader has to follow them all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ndp_device", "vllm_ndp")

Arrows = dict[str, set[str]]
"""Module or room -> what it imports."""


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name -> file. A package goes by its `__init__`, a native module by its stub."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py*")):
            if path.suffix in (".py", ".pyi"):
                parts = path.relative_to(root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path, known: Iterable[str]) -> set[str]:
    """The modules of our own that this one names. `from a import b` is an arrow to a.b where that is a module."""
    known = set(known)
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                found.add(name if name in known else source)
    return (found & known) - {module}


def module_arrows(root: Path = ROOT) -> Arrows:
    known = modules(root)
    return {module: imports_of(module, path, known) for module, path in known.items()}


def room_of(module: str, known: Mapping[str, Path]) -> str:
    """The folder directly below the package, or the file itself where it lies beside those folders."""
    parts = module.split(".")
    if len(parts) == 1:
        return f"{parts[0]}/__init__"
    room = ".".join(parts[:2])
    is_folder = room in known and known[room].stem == "__init__"
    return room.replace(".", "/") + ("/" if is_folder else "")


def room_arrows(root: Path = ROOT) -> Arrows:
    known = modules(root)
    arrows: Arrows = {}
    for module, targets in module_arrows(root).items():
        room = room_of(module, known)
        arrows.setdefault(room, set()).update(room_of(target, known) for target in targets)
    return {room: targets - {room} for room, targets in arrows.items()}


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of more than one module that can reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in arrows[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in arrows:
        if node not in index:
            visit(node)
    return sorted(found)
