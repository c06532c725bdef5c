"""The map's page follows from docs/measured/map.json."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

from paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from map_page import AS_FITTED, Map, compared, history, page
from map_picture import picture
from measured_figures import Figures, load_measured

SOURCE = load_measured(ROOT / "docs" / "measured")["map"]


def small(*cells: dict) -> Figures:
    figures = {
        "limits": {"4 bits": 0.01, "3 bits": 0.05},
        "cards": {"8": "card"},
        "models": ["mixtral-8x7b"],
        "band": [AS_FITTED, "host 80 GB/s", "H100 rates at every size"],
        "devices": ["1 TB/s inside"],
        "prices": {"load-to-use 2000 ns": [3.0, 4.0], AS_FITTED: [1.0, 1.5]},
        "cells": [
            {"model": "mixtral-8x7b", "gb": 8, "limit": limit, **cell}
            for cell in cells
            for limit in ("4 bits", "3 bits")
        ],
    }
    machine = {"processor": "p", "cores": 1}
    return Figures(question="Q?", command="c", origin="measured", date="d", commit="", machine=machine, figures=figures)


def test_a_cell_names_winner_runner_up_lead_and_the_band_of_the_device():
    cache, joint, device = (
        ["cache 4 bits", "expert_cache", 50.0, 0.0],
        ["joint", "device", 40.0, 0.0],
        ["device", "device", 20.0, 0.0],
    )
    text = page(
        small(
            {"assumed": AS_FITTED, "rows": [cache, joint, device]},
            {"assumed": "host 80 GB/s", "rows": [joint, ["cache 4 bits", "expert_cache", 25.0, 0.0]]},
            {"assumed": "1 TB/s inside", "rows": [["joint", "device", 60.0, 0.0], cache]},
        )
    )
    assert "| 8 | cache 4 bits 50, 25 % before joint 40; 0.80 to 1.60, not with host 80 GB/s |" in text
    assert "| mixtral-8x7b | 8 | 0.80 | 0.40 | **1.20** |" in text
    assert "| host 80 GB/s | 1 of 1 | 1 of 1 |" in text


def test_where_the_fastest_joint_plan_leaves_the_device_idle_the_device_is_no_slower():
    """Qwen3-30B at 80 GB, hops by DMA: 0.62 stood in the band, the paper's plan over all experts at 4 bits, beside a
    joint plan as fast as those. It wins no cell."""
    idle, paper = ["joint, GPU alone", "joint", 955.23, 0.0], ["device", "device", 592.01, 0.0]
    every = ["all 4 bits", "quantized", 955.23, 0.0]
    known = Map(small({"assumed": AS_FITTED, "rows": [every, idle, paper]}))
    assert known.ratio(AS_FITTED, "mixtral-8x7b", 8, "4 bits") == 1
    assert known.won(AS_FITTED, "4 bits") == []
    alone = Map(small({"assumed": AS_FITTED, "rows": [["joint, GPU alone", "joint", 999.0, 0.0], every, paper]}))
    assert alone.ratio(AS_FITTED, "mixtral-8x7b", 8, "4 bits") == 1


def test_a_cell_says_how_many_choices_the_winner_finds_on_the_gpu():
    rows = [["joint", "device", 40.0, 0.0, 0.36], ["cache 4 bits", "expert_cache", 32.0, 0.0, 0.51]]
    text = page(small({"assumed": AS_FITTED, "rows": rows}))
    assert "| 8 | **joint 40** (36 %), 25 % before cache 4 bits 32; 1.25 to 1.25, always |" in text


def test_the_history_of_a_cell_names_the_step_that_changed_the_side_that_wins():
    """Mixtral at 8 GB: the device won before. It still does beside today's rivals, and loses on the card's rates."""
    device, cache = ["joint", "device", 40.0, 0.0], ["cache 4 bits", "expert_cache", 32.0, 0.0]
    source = small(
        {"assumed": "H100 rates at every size", "rows": [device, cache]},
        {"assumed": AS_FITTED, "rows": [["cache 4 bits", "expert_cache", 50.0, 0.0], device]},
    )
    text = "\n".join(history(Map(source)))
    told = "**joint 40** | cache 4 bits 50 | the card's rates |"
    assert f"| mixtral-8x7b | 8 | device 90 | {told}" in text


def test_two_maps_stand_side_by_side_with_what_moved():
    cache = ["cache 4 bits", "expert_cache", 50.0, 0.0]
    was = Map(small({"assumed": AS_FITTED, "rows": [cache, ["joint", "device", 40.0, 0.0]]}))
    now = Map(small({"assumed": AS_FITTED, "rows": [["joint", "device", 60.0, 0.0], cache]}))
    line = next(line for line in compared(was, now) if "4 bits |" in line)
    assert line.endswith("| device instead of expert_cache: expert_cache +0.0 %, device +50.0 % |")
    assert compared(was, was)[-1].endswith("| the same side wins: expert_cache +0.0 %, device +0.0 % |")


def test_prices_of_messages_stand_cheapest_first_with_the_cells_that_the_device_wins():
    cache = ["cache 4 bits", "expert_cache", 50.0, 0.0]
    source = small(
        {"assumed": AS_FITTED, "rows": [["joint", "device", 60.0, 0.0], cache]},
        {"assumed": "load-to-use 2000 ns", "rows": [cache, ["joint", "device", 45.0, 0.0]]},
    )
    told = ("| as fitted | 1.00", "| load-to-use 2000")
    cheap, dear = (line for line in page(source).splitlines() if line.startswith(told))
    assert cheap == "| as fitted | 1.00 | 1.50 | 1 of 1 | 1 of 1 | **1.20**, **1.20**, **1.20** |"
    assert dear == "| load-to-use 2000 ns | 3.00 | 4.00 | 0 of 1 | 0 of 1 | 0.90, 0.90, 0.90 |"


def test_the_picture_has_a_coloured_cell_for_every_place_that_both_sides_have():
    source = small({"assumed": AS_FITTED, "rows": [["joint", "device", 60.0, 0.0], ["all", "quantized", 50.0, 0.0]]})
    drawn = ElementTree.fromstring(picture(source))
    cells = [text for text in drawn.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "cell"]
    assert [text.text for text in cells] == ["1.20", "1.20"]
    blue, orange, grey = (picture(small(*rows)) for rows in PLACES)
    assert ["#4c9be8" in blue, "#e8a04c" in orange, 'class="cell"' in grey] == [True, True, False]
    assert "prefers-color-scheme: dark" in blue


PLACES = (
    [{"assumed": AS_FITTED, "rows": [["joint", "device", 60.0, 0.0], ["all", "quantized", 30.0, 0.0]]}],
    [{"assumed": AS_FITTED, "rows": [["all", "quantized", 60.0, 0.0], ["joint", "device", 30.0, 0.0]]}],
    [],
)
"""The device wins, loses, and nothing fits."""


def test_every_cell_of_the_kept_map_has_a_winner_within_its_limit():
    for cell in SOURCE.figures["cells"]:
        speeds = [row[2] for row in cell["rows"]]
        assert speeds == sorted(speeds, reverse=True)
        assert max(row[3] for row in cell["rows"]) <= SOURCE.figures["limits"][cell["limit"]]


def test_a_win_by_a_part_needs_that_lead():
    rows = [["joint", "device", 40.0, 0.0], ["cache 4 bits", "expert_cache", 39.0, 0.0]]
    known = Map(small({"assumed": AS_FITTED, "rows": rows}))
    assert len(known.won(AS_FITTED, "4 bits")) == len(known.won(AS_FITTED, "4 bits", by=0.02)) == 1
    assert known.won(AS_FITTED, "4 bits", by=0.05) == []
