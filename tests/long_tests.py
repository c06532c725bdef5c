"""The long tests: groups by marker, the files that each is about, and with which of these files each last passed.

python tests/long_tests.py all | changed | GROUP... [OPTIONS OF PYTEST]
python tests/long_tests.py due                   names of the changed ones, those that take least first

`make test` leaves these groups out (conftest.py). `changed` runs those whose files differ from when they last passed:
data/long-tests.json holds a digest of each group's files, is written here, and belongs into the commit of the change.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from paths import DATA, ROOT

PASSED = DATA / "long-tests.json"

GROUPS: dict[str, tuple[str, ...]] = {
    "calibration": (
        "benchmarks/calibration_memory.py",
        "tests/checkpoints/make_family_models.py",
        "ndp_device/calibration/**/*.py",
        "ndp_device/calibration/csrc/*",
        "ndp_device/checkpoint/*.py",
        "ndp_device/replicas/*.py",
        "patches/lock-cpu.txt",
        "tests/in_memory.py",
        "tests/ndp_device/calibration/*.py",
        "tests/ndp_device/checkpoint/test_checkpoint_families.py",
        "tests/ndp_device/checkpoint/test_checkpoint_quantized.py",
    ),
    "commands": (
        "ndp_device/*.py",
        "ndp_device/timing/*.py",
        "tests/data/tiny-mixtral-trace/*",
        "tests/test_command_lines.py",
        "vllm_ndp/app.py",
        "vllm_ndp/cli/*.py",
        "vllm_ndp/lab/**/*.py",
        "vllm_ndp/operating/*.py",
        "vllm_ndp/planning/*.py",
        "vllm_ndp/cost_model/*.py",
        "vllm_ndp/traces/*.py",
    ),
    "families": (
        "tests/checkpoints/make_family_models.py",
        "tests/checkpoints/make_quantized_models.py",
        "ndp_device/checkpoint/*.py",
        "ndp_device/model_config.py",
        "ndp_device/common/model_shape.py",
        "patches/lock-cpu.txt",
        "ndp_device/replicas/checkpoint.py",
        "tests/integration/family_tokens.py",
        "models/tiny-qwen3-moe/*.json",
        "models/tiny-qwen3-moe/*.safetensors",
        "tests/integration/stand_ins/**/*.py",
        "tests/integration/draft_layers.py",
        "tests/integration/test_integration_draft_layers.py",
        "tests/integration/test_integration_families.py",
        "tests/integration/test_integration_layouts.py",
        "tests/integration/test_integration_quantized.py",
        "tests/integration/test_integration_shared_experts.py",
        "tests/ndp_device/checkpoint/test_checkpoint_families.py",
        "vllm_ndp/integration/compat.py",
        "vllm_ndp/integration/moe_method.py",
        "vllm_ndp/integration/plugin.py",
        "vllm_ndp/integration/quantization.py",
    ),
    "programs": (
        "benchmarks/make_random_mixtral.py",
        "ndp_device/checkpoint/*.py",
        "patches/lock-cpu.txt",
        "tests/integration/engines.py",
        "tests/integration/resident_memory.py",
        "tests/integration/routed_experts.py",
        "tests/integration/test_integration_programs.py",
        "tests/integration/test_integration_ends.py",
        "tests/integration/test_integration_refusals.py",
        "tests/local_hub.py",
        "vllm_ndp/integration/[a-z]*.py",
        "vllm_ndp/operating/sizing.py",
        "vllm_ndp/lab/exact/*.py",
        "vllm_ndp/operating/sources.py",
        "vllm_ndp/traces/*.py",
    ),
    "quality": (
        "examples/lm_eval_tasks/*",
        "benchmarks/quality*.py",
        "models/training/*.py",
        "models/tiny-mixtral/*",
        "models/tiny-qwen3-moe/*",
        "ndp_device/calibration/data_free.py",
        "ndp_device/replicas/store.py",
        "patches/lock-cpu.txt",
        "patches/lock-dev.txt",
        "tests/integration/test_integration_quality.py",
        "tests/smoke/test_tiny_qwen3_moe.py",
        "vllm_ndp/integration/[a-z]*.py",
        "vllm_ndp/lab/locality.py",
        "vllm_ndp/operating/lm_eval_model.py",
        "vllm_ndp/operating/server.py",
        "vllm_ndp/planning/bitwidths.py",
        "vllm_ndp/planning/policies.py",
        "vllm_ndp/traces/importers.py",
    ),
    "ranks": (
        "ndp_device/experts/expert.py",
        "patches/lock-cpu.txt",
        "tests/integration/engines.py",
        "tests/integration/one_engine.py",
        "tests/integration/test_integration_devices.py",
        "tests/integration/test_integration_layouts.py",
        "tests/integration/test_integration_quantized.py",
        "tests/integration/test_integration_replicas_of_engines.py",
        "vllm_ndp/integration/[a-z]*.py",
        "vllm_ndp/integration/serving/*.py",
        "vllm_ndp/lab/exact/*.py",
        "vllm_ndp/layer/tiers.py",
        "vllm_ndp/cost_model/gpu_timing.py",
    ),
    "sanitizers": (
        "CMakeLists.txt",
        "ndp_device/kernels/csrc/*",
        "ndp_device/transport/csrc/*",
        "tests/ndp_device/kernels/test_kernels_native_sanitizers.py",
        "tests/ndp_device/protocol/test_device_codec.py",
        "tests/ndp_device/transport/test_device_large_messages.py",
        "tests/ndp_device/transport/test_device_layer_messages.py",
        "tests/ndp_device/transport/sender_thread_model.cpp",
        "tests/ndp_device/transport/test_device_ring_check.py",
        "tests/ndp_device/transport/test_device_sender_thread_model.py",
        "tests/ndp_device/transport/test_device_shm.py",
        "tests/ndp_device/transport/test_device_shm_sanitizers.py",
        "tests/ndp_device/transport/test_device_shm_sockets.py",
        "tests/vllm_ndp/device_client/test_device_without_codec.py",
        "tests/vllm_ndp/device_client/test_device_sender_thread.py",
    ),
    "vllms_own": (
        "models/tiny-mixtral/*",
        "models/tiny-mixtral-replicas/*",
        "patches/lock-cpu.txt",
        "tests/vllms_own/*",
        "vllm_ndp/integration/[a-z]*.py",
        "vllm_ndp/integration/serving/*.py",
        "vllm_ndp/layer/*.py",
        "vllm_ndp/csrc/*",
        "vllm_ndp/layer/csrc/*",
    ),
}
"""Marker -> patterns of the files that its tests are about, their own among them."""

LONGEST_LAST = ("commands", "sanitizers", "programs", "quality", "calibration", "ranks", "families", "vllms_own")

WHOLE = {"-n", "--dist", "--no-loadscope-reorder", "--max-worker-restart"}
"""Options of pytest with which every test of a group still runs."""


def files(patterns: Iterable[str]) -> list[Path]:
    """Sorted, each once; what Python leaves beside its sources is not of them."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)


def digest(patterns: Iterable[str]) -> str:
    """Of names and contents: 32 hexadecimal digits."""
    contents = hashlib.sha256()
    for path in files(patterns):
        contents.update(f"{path.relative_to(ROOT).as_posix()}\0{path.stat().st_size}\0".encode())
        contents.update(path.read_bytes())
    return contents.hexdigest()[:32]


def passed() -> dict[str, str]:
    known: dict[str, str] = json.loads(PASSED.read_text()) if PASSED.is_file() else {}
    return known


def changed() -> list[str]:
    """Groups whose files are not those with which they last passed."""
    known = passed()
    return [group for group, patterns in GROUPS.items() if known.get(group) != digest(patterns)]


def note_passed(groups: Iterable[str]) -> None:
    known = passed() | {group: digest(GROUPS[group]) for group in groups}
    PASSED.write_text(json.dumps({group: known[group] for group in GROUPS if group in known}, indent=2) + "\n")


def not_asked_for(item: pytest.Item, marks: str) -> bool:
    """Whether it is of a group that the run's `-m` does not name."""
    return any(item.get_closest_marker(group) and group not in marks for group in GROUPS)


class Outcomes:
    """Of a run of pytest: which groups passed whole. A test that was skipped has not shown what it is for."""

    def __init__(self) -> None:
        self._outcomes: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = set(GROUPS).intersection(report.keywords)
        for group in known or (GROUPS if report.failed else ()):  # a process of tests ended, at whichever group
            self._outcomes.setdefault(group, set()).add(report.outcome)

    def whole(self) -> list[str]:
        return [group for group, outcomes in self._outcomes.items() if outcomes == {"passed"}]


def marked(group: str) -> list[Path]:
    """The files of its tests: to collect all others would take longer than some groups do."""
    tests = [path for path in files(GROUPS[group]) if path.name.startswith("test_")]
    return [path for path in tests if f"pytest.mark.{group}" in path.read_text()]


def run(groups: Sequence[str], options: Sequence[str]) -> int:
    """pytest's exit status."""
    outcomes, tests = Outcomes(), {str(path) for group in groups for path in marked(group)}
    status = pytest.main([*sorted(tests), "-m", " or ".join(groups), *options], plugins=[outcomes])
    is_whole = {word for word in options if word.startswith("-")} <= WHOLE
    if is_whole and status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        note_passed(outcomes.whole())
    return int(status)


def asked(words: Sequence[str]) -> list[str]:
    if unknown := set(words) - {"all", "changed", *GROUPS}:
        raise SystemExit(
            f"no group of long tests is called {min(unknown)}: give all, changed or of {', '.join(GROUPS)}"
        )
    return list(GROUPS) if "all" in words else changed() if "changed" in words else list(words)


def main(arguments: Sequence[str]) -> int:
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not words:
        raise SystemExit(__doc__)
    if words == ["due"]:
        print(*sorted(changed(), key=LONGEST_LAST.index))
        return 0
    groups = asked(words)
    print(
        f"long tests to run: {', '.join(groups) or 'none, since no file that they are about has changed'}", flush=True
    )
    return run(groups, arguments[len(words) :]) if groups else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
