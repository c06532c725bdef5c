"""Measured kernels: what the table gives back, what it does not believe, and what it foretells of a layer held out."""

from __future__ import annotations

import pytest

from vllm_ndp.cost_model.silicon import CARDS, EXPERTS, FILE, experts, kernel, product
from vllm_ndp.lab.reproduce.silicon import held_out, reproduce

H100 = 3_350 * 10**9, 989_400 * 10**9


def _layer(card: str, name: str, hidden: int, wide: int, chosen: int, weight_bits: tuple[int, int]) -> int:
    """Ps of one token's experts, at the H100's rates."""
    load = experts(hidden, wide, chosen, chosen, chosen * 3 * hidden * wide * weight_bits[0] // weight_bits[1] // 8)
    return kernel(card, name).ps(load, *H100)


def test_a_measured_layer_takes_what_was_measured() -> None:
    """Mixtral-8x7B in bf16 with one token, and gpt-oss-120b in MXFP4, whose four experts are gpt-oss-20b's, too."""
    lines = FILE.read_text().splitlines()
    for name, shape, bits in (("bf16", (4096, 14336, 2, 8), (16, 1)), ("mxfp4", (2880, 2880, 4, 128), (17, 4))):
        line = next(line for line in lines if line.startswith(f"h100,{name},{'x'.join(map(str, shape))},"))
        took = 1000 * int(line.split(",")[3].split()[0])
        assert _layer("h100", name, *shape[:3], bits) == pytest.approx(took, rel=0.02)


def test_gpt_oss_on_an_h100_takes_four_times_what_its_memory_would() -> None:
    """Four experts of 2880 x 2880 x 3 x 4.25 bits at 3.35 TB/s are 15.8 us; .0627 ms were measured."""
    assert _layer("h100", "mxfp4", 2880, 2880, 4, (17, 4)) == pytest.approx(62.7e6, rel=0.01)


def test_rows_that_ran_from_a_warm_cache_are_not_believed() -> None:
    """A matrix of 4096 x 1024 in bf16 takes 9.7 us from an L40S's memory; 6.1 us were measured with 4 rows."""
    warm = product(4096, 1024, 4)
    of = kernel("l40s", "gemm")
    assert list(warm.sizes) not in of.sizes.tolist()
    assert of.ps(warm, 864 * 10**9, 362 * 10**12) > 9_700_000
    assert of.num_left_out > 0


def test_faster_memory_and_arithmetic_are_never_slower() -> None:
    load = product(4096, 4096, 64)
    of = kernel("h100", "gemm")
    times = [of.ps(load, H100[0] * n, H100[1] * n) for n in (1, 2, 4)]
    assert times == sorted(times, reverse=True)
    assert times[-1] > of.fastest_ps // 2


def test_layers_that_were_held_out_are_foretold_within_the_targets() -> None:
    """Median 10 % and 95 of 100 within 25 %, on every card; an H100's unseen models in bf16 too."""
    summary = reproduce().summary
    assert set(summary["cards"]) == set(CARDS)
    for card in summary["cards"].values():
        assert card["median"] <= 0.10
        assert card["p95"] <= 0.25
    assert summary["p95"] <= 0.25


def test_a_row_is_never_asked_about_itself() -> None:
    """Held out alone, a table of one shape foretells nothing."""
    of = kernel("h100", *EXPERTS[4])
    assert len(held_out(of, lambda shape: "all alike")) == 0
