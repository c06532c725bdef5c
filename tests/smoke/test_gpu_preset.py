"""The preset that a GPU machine's own measurements become. Every figure in here is made up, for the arithmetic."""

import json
import re
from pathlib import Path
from typing import Any

import gpu_preset
import measured
import pytest
from paths import ROOT

from ndp_device.common.errors import ConfigError
from ndp_device.timing import spec
from ndp_device.timing.spec import load_hardware

MADE_UP: dict[str, Any] = {
    "H2D pinned GB/s": 54.5,
    "D2D GB/s, bytes read and written": 2680.0,
    "copy of 16 KB pinned, not waited for us": [5.5, 9.0],
    "event query, done us": [1.25, 2.0],
    "kernel + copy to pinned + event us": [20.0, 30.0],
    "kernel + synchronize us (p50, p99)": [10.0, 15.0],
    "host reads GB/s": 201.5,
    "host bf16 GFLOP/s": 3000.0,
    "host memory bytes": 2**40,
    "gpu memory bytes": 85_000_000_000,
}
"""Not measured anywhere."""
GUESS = {"value": 9, "unit": "count", "how": "guess"}
WHERE = {"gpu": "NVIDIA H100 80GB HBM3", "machine": "made up for a test", "date": "2000-01-01"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(spec, "FOLDER", tmp_path)
    return tmp_path


def made(folder: Path, **changed: Any) -> str:
    name, preset = gpu_preset.preset_of({**MADE_UP, **changed}, **WHERE)
    (folder / f"{name}.json").write_text(json.dumps(preset))
    spec.measured_presets.cache_clear()
    return name


def test_measured_values_replace_those_of_link_gpu_and_host_and_no_others(folder: Path) -> None:
    """54.5 GB/s need Gen5; one way = 20.0 - 10.0 - 5.5 us; 2680 of 3350 GB/s = 80 %."""
    name = made(folder)
    found, base = load_hardware(name).values(), load_hardware("h100-ndp512").values()
    changed = {key: value for key, value in found.items() if base[key] != value}
    assert (name, changed) == (
        "h100-host",
        {
            "link.launch": "dma",
            "link.raw_bytes_per_s": 63_015_384_615,
            "link.bulk_bytes_per_s": 54_500_000_000,
            "link.dma_launch_ps": 5_500_000,
            "link.dma_latency_ps": 4_500_000,
            "link.completion_ps": 1_250_000,
            "gpu.hbm_efficiency_percent": 80,
            "gpu.hbm_capacity_bytes": 85_000_000_000,
            "host.memory_bytes_per_s": 201_500_000_000,
            "host.cpu_flops_per_s": 3_000_000_000_000,
        },
    )


def test_every_measured_value_says_how_on_what_and_when(folder: Path) -> None:
    made(folder)
    table = spec.preset_table("h100-host")
    sources = {key: table[key].source for key in table if table[key].source.startswith("[M]")}
    assert len(sources) == 11
    assert all(source.endswith("; made up for a test, 2000-01-01") for source in sources.values())


def test_an_unknown_gpu_or_an_impossible_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="no preset is known for 'NVIDIA L4'"):
        gpu_preset.preset_of(MADE_UP, **{**WHERE, "gpu": "NVIDIA L4"})
    with pytest.raises(ValueError, match="more than any link"):
        gpu_preset.preset_of({**MADE_UP, "H2D pinned GB/s": 500.0}, **WHERE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("machine"), "is no measured preset: KeyError"),
        (lambda c: c.update(based_on="h100-host"), "must be based on one of .*h100-ndp512"),
        (lambda c: c["values"].update({"dram.channels": GUESS}), "dram.channels is not a value of a host"),
        (lambda c: c["values"].update({"link.speed": GUESS}), "link.speed is not a value of a host"),
        (lambda c: c["values"]["link.dma_launch_ps"].update(how=""), "must have a value, a unit and how"),
        (lambda c: c["values"]["link.dma_launch_ps"].update(value=1.5), "must have a value, a unit and how"),
    ],
)  # fmt: skip
def test_a_damaged_preset_is_refused_in_one_sentence(folder: Path, change: Any, message: str) -> None:
    _, content = gpu_preset.preset_of(MADE_UP, **WHERE)
    change(content)
    (folder / "h100-host.json").write_text(json.dumps(content))
    spec.measured_presets.cache_clear()
    with pytest.raises(ConfigError, match=message):
        load_hardware("h100-host")
    load_hardware("h100-ndp512")  # those that were not measured are there all the same


def test_no_preset_is_kept_without_the_result_that_it_was_made_of(tmp_path: Path) -> None:
    """And each is what that result makes today."""
    for path in sorted((ROOT / "ndp_device/timing/measured").glob("*.json")):
        made = [gpu_preset.write_preset(result, tmp_path) for result in (ROOT / "docs/measured").glob("gpu_link*.json")]
        assert path.read_text() in [other.read_text() for other in made]


def test_the_probe_says_every_name_that_the_preset_is_made_of() -> None:
    probe = (ROOT / "benchmarks/gpu_kit/probe_gpu.py").read_text()
    said = set(re.findall(r'say\(\s*"([^"]+)"', probe))
    assert set(MADE_UP) == gpu_preset.NEEDED
    assert said >= gpu_preset.NEEDED


def test_a_command_in_a_result_shows_no_path_of_this_machine() -> None:
    argv = [
        "/elsewhere/benchmarks/b.py",
        "--model",
        "/data/of/mine/model",
        f"--json={ROOT}/x",
        "--out",
        f"{ROOT}/docs",
        "a b",
    ]
    assert measured.command_line(argv) == "python benchmarks/b.py --model model --out docs 'a b'"
