"""`ndp-device time …` as people and scripts call it."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ndp_device.__main__ import app
from ndp_device.timing.dram import idle_ps, transfer
from ndp_device.timing.spec import PE_MODES, load_hardware


def last_line(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["time", *arguments, *(() if arguments[0] == "idle" else ("--json",))])
    assert result.exit_code == 0, result.output
    line = json.loads(result.output.splitlines()[-1])
    assert isinstance(line, dict)
    return line


def test_dram_prints_what_the_model_says() -> None:
    line = last_line("dram", "1MiB")
    expected = transfer(load_hardware("h100-ndp512").dram, 2**20)
    assert line["mean_ps"] == expected.mean_ps
    assert {"mean_ps", "min_ps", "max_ps", "gb_per_s", "efficiency"} <= line.keys()


@pytest.mark.parametrize("changed", ["dram.refresh=off", "dram.outstanding=4", "dram.rfc=1315"])
def test_dram_ablations_change_the_time(changed: str) -> None:
    assert last_line("dram", "262144", "--set", changed)["mean_ps"] != last_line("dram", "262144")["mean_ps"]


@pytest.mark.parametrize("case", ["hit", "closed", "conflict"])
def test_idle_prints_picoseconds(case: str) -> None:
    assert last_line("idle", "--hardware", "h100-ndp512", case)["ps"] == idle_ps(
        load_hardware("h100-ndp512").dram, case
    )


def test_expert_prints_every_stage_and_the_other_modes_beside_it() -> None:
    options = ["mixtral-8x7b", "--bits", "3", "--tokens", "4"]
    line = last_line("expert", *options, "--set", "array.pe_mode=fp16_dequant")
    stages = ("launch", "link_in", "queue", "dram", "compute", "dequant", "vector", "link_out", "completion")
    total = sum(line[f"{stage}_ps"] for stage in stages) - line["overlap_saved_ps"]
    assert line["total_ps"] == total == line["total_ps_by_pe_mode"]["fp16_dequant"]
    assert line["pe_mode"] == "fp16_dequant"
    assert set(line["total_ps_by_pe_mode"]) == set(PE_MODES)
    assert last_line("expert", *options)["total_ps"] == line["total_ps_by_pe_mode"]["bit_scalable"]


def test_hardware_prints_every_value_and_marks_what_was_set_by_hand() -> None:
    line = last_line("hardware", "h200-gen5", "--set", "gpu.times=roofline")
    assert line["values"]["gpu.times"] == "roofline"
    assert line["config_hash"] == load_hardware("h200-gen5", times="roofline").config_hash
