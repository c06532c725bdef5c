"""The CI gate on the kernels' ratios does close."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from kernel_lowbit import SLACK, TARGETS, keep_faster, shortfalls

FAST = [
    {"mode": mode, "bits": bits, "tokens": 1, "ms": float(bits), "fraction_of_limit": target, "rel_error": 1e-4}
    for (mode, bits), target in TARGETS.items()
]


def changed(index: int, **values: Any) -> list[dict[str, Any]]:
    return [row | values if at == index else row for at, row in enumerate(FAST)]


def test_rows_on_target_pass_on_every_path_with_targets():
    assert shortfalls("amx", FAST) == shortfalls("avx512bf16", FAST) == shortfalls("avx512vnni", FAST) == []


@pytest.mark.parametrize("index", range(len(FAST)))
def test_each_row_below_its_target_with_slack_is_named(index: int):
    target = FAST[index]["fraction_of_limit"]
    assert shortfalls("amx", changed(index, fraction_of_limit=target * SLACK * 1.01)) == []
    (sentence,) = shortfalls("amx", changed(index, fraction_of_limit=target * SLACK * 0.99))
    assert f"{FAST[index]['mode']} {FAST[index]['bits']}-bit" in sentence
    assert shortfalls("avx2", changed(index, fraction_of_limit=0.0)) == []  # bound by instructions: no targets


def test_two_bits_that_are_no_faster_than_four_and_an_inexact_kernel_are_named():
    index = next(i for i, row in enumerate(FAST) if (row["mode"], row["bits"]) == ("two_limb", 2))
    assert "4-bit time over 2-bit time" in shortfalls("amx", changed(index, ms=3.9))[0]
    assert "error" in shortfalls("amx", changed(index, rel_error=3e-4))[0]


def test_of_two_measurements_of_a_case_the_faster_one_counts():
    """A row that a neighbour slowed down is measured again; one that is slow each time stays slow."""
    rows = [{"mode": "a8", "bits": bits, "tokens": 1, "ms": 4.0} for bits in (2, 3)]
    keep_faster(rows, [rows[0] | {"ms": 1.5}, rows[1] | {"ms": 9.0}])
    assert [row["ms"] for row in rows] == [1.5, 4.0]
