"""Who may import whom. Reads the source as text: nothing is imported, so a broken package cannot hide a broken rule."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(p for package in ("ndp_device", "vllm_ndp") for p in (ROOT / package).rglob("*.py"))

# (path prefix, forbidden module prefixes, paths excepted); first word of each reason is what breaks.
RULES: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("ndp_device/", ("vllm_ndp", "vllm"), ()),
    ("ndp_device/", ("torch", "transformers"), ("ndp_device/calibration/",)),
    (
        "ndp_device/common/",
        tuple(
            f"ndp_device.{room}"
            for room in ("protocol", "transport", "experts", "replicas", "kernels", "timing", "checkpoint")
        ),
        (),
    ),
    ("ndp_device/", ("zmq",), ("ndp_device/transport/",)),
    ("vllm_ndp/", ("zmq",), ()),
    ("vllm_ndp/", ("vllm",), ("vllm_ndp/integration/",)),
    ("vllm_ndp/", ("torch",), ("vllm_ndp/integration/",)),
    (
        "vllm_ndp/planning/",
        (
            "vllm_ndp.integration",
            "vllm_ndp.cost_model",
            "vllm_ndp.lab",
            "vllm_ndp.traces",
            "vllm_ndp.config",
            "ndp_device.protocol",
        ),
        (),
    ),
    ("vllm_ndp/planning/", ("os", "time", "socket", "random", "datetime"), ()),
    (
        "vllm_ndp/cost_model/",
        ("vllm_ndp.integration", "vllm_ndp.lab", "vllm_ndp.traces", "vllm_ndp.config", "vllm_ndp.device_client"),
        (),
    ),
    ("vllm_ndp/cost_model/", ("os", "time", "socket", "random", "datetime"), ()),
    ("vllm_ndp/layer/", ("vllm_ndp.integration", "vllm_ndp.traces", "vllm_ndp.config", "vllm_ndp.device_client"), ()),
    ("vllm_ndp/cost_model/", ("vllm_ndp.layer",), ()),
    ("vllm_ndp/lab/", ("vllm_ndp.integration", "vllm_ndp.device_client"), ()),
    ("vllm_ndp/lab/", ("vllm_ndp.cli",), ("vllm_ndp/lab/cli/", "vllm_ndp/lab/options.py")),
    # who serves need not know the lab
    ("vllm_ndp/", ("vllm_ndp.lab",), ("vllm_ndp/lab/", "vllm_ndp/app.py")),
    ("vllm_ndp/operating/", ("vllm_ndp.integration", "vllm_ndp.lab", "vllm_ndp.traces"), ()),
    ("ndp_device/timing/", ("os", "time", "socket", "random", "datetime", "numpy"), ()),
    ("ndp_device/timing/", ("ndp_device.protocol", "ndp_device.replicas", "ndp_device.kernels"), ()),
    (
        "ndp_device/protocol/",
        ("ndp_device.replicas", "ndp_device.kernels", "ndp_device.handler", "ndp_device.transport", "socket", "time"),
        (),
    ),
    (
        "ndp_device/experts/",
        ("ndp_device.kernels", "ndp_device.replicas", "ndp_device.checkpoint", "os", "pathlib"),
        (),
    ),
    ("ndp_device/kernels/", ("ndp_device.protocol", "ndp_device.timing", "ndp_device.replicas"), ()),
    ("ndp_device/replicas/", ("ndp_device.protocol", "ndp_device.timing"), ()),
    # who uses a transport knows its address only
    ("ndp_device/", ("ndp_device.transport.zmq_client", "ndp_device.transport.zmq_server"), ("ndp_device/transport/",)),
    ("vllm_ndp/", ("ndp_device.transport.zmq_client", "ndp_device.transport.zmq_server"), ()),
    # offline work: serving and replay read what it left behind
    ("ndp_device/", ("ndp_device.calibration",), ("ndp_device/calibration/",)),
    (
        "vllm_ndp/",
        ("ndp_device.calibration",),
        tuple(
            f"vllm_ndp/{file}.py"
            for file in ("cli/replica_sets", "integration/host_replicas", "integration/linear_layers")
        ),
    ),
    ("ndp_device/common/widths.py", ("numpy", "ndp_device"), ()),
    ("", ("pickle", "cloudpickle", "dill"), ()),
]
FORBIDDEN_TEXT = re.compile(r"recv_pyobj|send_pyobj|torch\.load\(|shell=True|tcp://\*|tcp://0\.0\.0\.0|\beval\(")


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def violations(relative: str, modules: set[str]) -> list[str]:
    return [
        f"{relative} imports {module}, which {prefix or 'this tree'} must not ({forbidden})"
        for prefix, forbidden_modules, exceptions in RULES
        if relative.startswith(prefix) and not relative.startswith(exceptions or ("\0",))
        for forbidden in forbidden_modules
        for module in sorted(modules)
        if module == forbidden or module.startswith(forbidden + ".")
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_imports_only_what_its_room_may(path: Path) -> None:
    assert violations(path.relative_to(ROOT).as_posix(), imported_modules(path)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_unpickles_binds_wide_or_uses_a_shell(path: Path) -> None:
    assert FORBIDDEN_TEXT.findall(path.read_text()) == []


def test_the_rules_do_bite() -> None:
    assert violations("ndp_device/server.py", {"zmq", "vllm.config", "pickle"}) != []
    assert violations("vllm_ndp/planning/plan.py", {"numpy", "time"}) != []
    assert violations("vllm_ndp/integration/worker.py", {"vllm.config", "torch"}) == []
