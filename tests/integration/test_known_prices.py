"""Prices that were measured once are found again, by all that they depend on; what cannot be read is measured anew."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_ndp.cost_model.prices import MeasuredPrices
from vllm_ndp.integration import known_prices
from vllm_ndp.integration.known_prices import find_or_measure
from vllm_ndp.integration.price_probe import _rising

PRICES = MeasuredPrices(
    rows=(1, 4),
    experts={"gpu:16": (10, 40), "device:16": (20, 80)},
    slot_bits=16,
    messages=(1, 1),
    streamed=(5, 9),
    copied=3,
    expert_bytes=100,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(known_prices, "_waited_ns", lambda: 0)
    return tmp_path


def measured(facts: dict[str, object]) -> int:
    """How often a start with these facts measures."""
    times: list[int] = []

    def measure() -> MeasuredPrices:
        times.append(1)
        return PRICES

    assert find_or_measure(MeasuredPrices, facts, measure)[0] == PRICES
    return len(times)


def test_a_machine_measures_once_for_each_shape() -> None:
    assert [measured({"hidden": 64}), measured({"hidden": 64}), measured({"hidden": 128})] == [1, 0, 1]


def test_a_kernel_that_is_held_back_has_prices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured({}) == 1
    monkeypatch.setenv("NDP_ISA", "avx2")
    assert [measured({}), measured({})] == [1, 0]


def test_a_version_that_brings_a_faster_kernel_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices of the kernel before would send prompts where they take longer."""
    assert measured({}) == 1
    paths = [*known_prices._native.supported_isas(), "faster"]
    monkeypatch.setattr(known_prices, "_native", SimpleNamespace(supported_isas=lambda: paths))
    assert [measured({}), measured({})] == [1, 0]


@pytest.mark.parametrize("damage", ["", "{", '{"rows": [1, 4]}'])
def test_a_damaged_file_is_measured_again_and_mended(
    cache: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert measured({}) == 1
    (file,) = (cache / "prices").iterdir()
    file.write_text(damage)
    assert [measured({}), measured({})] == [1, 0]
    assert f"the prices kept in {file} are measured again" in capfd.readouterr().err


def test_a_cache_that_cannot_be_written_does_not_end_a_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("NDP_CACHE_DIR", str(cache / "file"))
    assert [measured({}), measured({})] == [1, 1]
    assert "prices cannot be kept" in capfd.readouterr().err


def test_prices_of_a_busy_moment_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was ready all the time and did not run measured the other programs."""
    waited = iter(range(0, 1 << 62, 1 << 60))
    monkeypatch.setattr(known_prices, "_waited_ns", lambda: next(waited))
    assert [measured({}), measured({})] == [1, 1]


def test_more_rows_never_cost_less() -> None:
    assert _rising([34, 17, 25]) == (17, 17, 25)
    assert _rising([1, 2, 3]) == (1, 2, 3)
