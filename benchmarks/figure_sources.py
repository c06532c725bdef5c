"""Which sources a kept figure depends on, and whether they changed since the figure was taken.

docs/measured/figures.toml names, for each file of docs/measured, globs of sources. A benchmark writes a digest of each
glob into its envelope (measured.py); a page compares them with the digests of today (docs/measured_figures.py).

A digest is of code, not of words: comments and docstrings of Python and C++ may change.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MEASURED = Path("docs", "measured")
CPP = (".c", ".cpp", ".h")
CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """One table of figures.toml. `command` is empty where the figure needs another machine. `alone` is false where a
    figure reports no time of its own, so that another may run beside it."""

    sources: tuple[str, ...]
    command: str = ""
    minutes: float = 0.0
    alone: bool = True


@dataclass(frozen=True)
class FigureTable:
    """figures.toml: figures by file name without .json, and the reasons why stale claims are accepted."""

    figures: dict[str, Figure]
    stale: dict[str, str]


def read_table(root: Path) -> FigureTable:
    """Empty without the file. Raises ValueError where a table has an unknown key or no sources."""
    path = root / MEASURED / "figures.toml"
    if not path.is_file():
        return FigureTable({}, {})
    content = tomllib.loads(path.read_text())
    figures = {}
    for name, row in content["figures"].items():
        if unknown := sorted(row.keys() - {"sources", "command", "minutes", "alone"}) or not row.get("sources"):
            raise ValueError(
                f"{path.name}: figures.{name} wants sources, command, minutes, alone; came {unknown or 'none'}"
            )
        figures[name] = Figure(**row | {"sources": tuple(row["sources"])})
    return FigureTable(figures, dict(content.get("stale", {})))


def digests(name: str, root: Path) -> dict[str, str]:
    """Digest of today by glob, for the figure called `name`. Empty where figures.toml does not know it."""
    figure = read_table(root).figures.get(name)
    return {glob: digest(glob, root) for glob in figure.sources} if figure else {}


def version(name: str, root: Path) -> str:
    """One digest of all its sources as they are today."""
    return hashlib.sha256(repr(sorted(digests(name, root).items())).encode()).hexdigest()[:12]


def changed_sources(name: str, taken: dict[str, str] | None, root: Path) -> list[str]:
    """Globs whose code is not what it was when the figure was taken; all of them where the file has no digests."""
    return [glob for glob, now in digests(name, root).items() if (taken or {}).get(glob) != now]


@cache
def digest(glob: str, root: Path) -> str:
    """Of the names and code of all files that `glob` finds below `root`: 12 hexadecimal digits."""
    content = hashlib.sha256()
    for path in sorted(root.glob(f"{glob}/*" if glob.endswith("**") else glob)):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
            content.update(f"{path.relative_to(root).as_posix()}\0".encode() + code_of(path) + b"\0")
    return content.hexdigest()[:12]


def code_of(path: Path) -> bytes:
    """The file without comments, docstrings and layout where its language is known."""
    if path.suffix == ".py":
        return python_code(path.read_text()).encode()
    if path.suffix in CPP:
        return " ".join(CPP_COMMENT.sub(" ", path.read_text()).split()).encode()
    return path.read_bytes()


def python_code(text: str) -> str:
    """As Python 3.11 prints it, whichever Python runs: a figure may be taken with a newer one."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not getattr(node, "type_params", True):
            del node.type_params  # type: ignore[attr-defined]
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not is_words(line)]  # type: ignore[attr-defined]
    return ast.dump(tree, **({"show_empty": True} if sys.version_info >= (3, 13) else {}))


def is_words(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
