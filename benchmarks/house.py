"""How large is the house? Lines, files, attributes, settings, wide functions, doubles, and what a decode layer passes.

Reads the source as text, at any commit; nothing is imported or run but git. Counts Python, C++ and JavaScript of
`ndp_device` and `vllm_ndp`. What a decode layer passes follows calls by name from `MoELayer.forward` within the files
that hold the layer: an upper bound, the same for every commit. One line of JSON.

    python benchmarks/house.py            # the working tree
    python benchmarks/house.py 3db895e    # a commit
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".py", ".cpp", ".h", ".js")
MOST_PARAMETERS = 7
LAYER = (
    *(
        "integration/moe_layer.py",
        "integration/device.py",
        "integration/pairs.py",
        "integration/few_rows.py",
        "integration/warm_experts.py",
    ),
    *(
        "integration/leaders_device.py",
        "integration/device.py",
        "integration/device_link.py",
        "integration/step.py",
        "simulation/balance.py",
    ),
    *("integration/cuda/layer.py", "integration/cuda/routing.py"),
    *(
        "integration/cuda/packet.py",
        "integration/cuda/kernels.py",
        "integration/executor.py",
        "integration/host_cpu.py",
    ),
    *("integration/rows.py", "integration/slot_pairs.py", "integration/streamed_experts.py", "layer/tiers.py"),
    *("layer/split.py", "layer/account.py", "layer/csrc/split.cpp", "lab/exact/engine.py", "replay/exact/engine.py"),
)
"""Where a layer is, before and after: what a commit lacks counts nothing."""


def files_of(commit: str | None) -> dict[str, str]:
    """Path -> text of the two packages."""
    listed = (
        ["git", "ls-files", "-co", "--exclude-standard"]
        if commit is None
        else ["git", "ls-tree", "-r", "--name-only", commit]
    )
    names = subprocess.run(
        [*listed, "--", "ndp_device", "vllm_ndp"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wanted = [name for name in names.stdout.splitlines() if name.endswith(SOURCES)]
    if commit is None:
        return {name: (ROOT / name).read_text() for name in wanted if (ROOT / name).exists()}
    show = ["git", "show"]
    return {
        name: subprocess.run([*show, f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in wanted
    }


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without self and cls."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def attributes_of(owner: ast.ClassDef) -> int:
    """Names that are assigned to self anywhere, and annotated fields."""
    names = {
        each.target.id for each in owner.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            names |= {node.attr} if node.value.id == "self" else set()
    return len(names)


def passed(trees: dict[str, ast.Module], start: tuple[str, str]) -> tuple[int, int]:
    """(functions, files) that calls by name reach from a method, among the given files."""
    known: dict[str, list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]] = {}
    for path, tree in trees.items():
        for function in functions_of(tree):
            known.setdefault(function.name, []).append((path, function))
    waiting, seen = [start], set[tuple[str, str]]()
    while waiting:
        path, name = waiting.pop()
        for where, function in known.get(name, []):
            if (where, name) in seen or (path != where and (path, name) == start):
                continue
            seen.add((where, name))
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    waiting.append((where, called)) if called in known else None
    return len(seen), len({path for path, _ in seen})


def count(texts: dict[str, str]) -> dict[str, object]:
    trees = {path: ast.parse(text) for path, text in texts.items() if path.endswith(".py")}
    classes = [
        (path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    names = Counter(node.name for _, node in classes if not node.name.startswith("_"))
    by_name = {node.name: attributes_of(node) for _, node in classes}
    wide = [f for tree in trees.values() for f in functions_of(tree) if num_parameters(f) > MOST_PARAMETERS]
    settings = next(
        (node for path, node in classes if path == "vllm_ndp/config.py" and node.name == "NdpSettings"), None
    )
    of_layer = {path: text for path, text in texts.items() if path.removeprefix("vllm_ndp/") in LAYER}
    functions, files = passed(
        {path: tree for path, tree in trees.items() if path in of_layer},
        ("vllm_ndp/integration/moe_layer.py", "forward"),
    )
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "python_lines": sum(len(texts[path].splitlines()) for path in trees),
        "layer_files": len(of_layer),
        "layer_lines": sum(len(text.splitlines()) for text in of_layer.values()),
        "decode_layer_functions": functions,
        "decode_layer_files": files,
        "controller_attributes": by_name.get("NdpController", 0),
        "classes_with_15_attributes": sum(number >= 15 for number in by_name.values()),
        "settings": sum(isinstance(each, ast.AnnAssign) for each in settings.body) if settings else 0,
        "functions_with_more_than_7_parameters": len(wide),
        "class_names_twice": sum(number > 1 for number in names.values()),
        "hasattr": sum(text.count("hasattr(") for path, text in texts.items() if path.endswith(".py")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", help="instead of the working tree")
    given = parser.parse_args()
    print(json.dumps({"commit": given.commit or "working tree", **count(files_of(given.commit))}))


if __name__ == "__main__":
    main()
