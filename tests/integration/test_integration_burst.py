"""A burst of 64 streams of which half are left, and three kills of the device: every pair adds up, and nothing is left.

burst.py with a server of its own; and that it sees what does not add up.
"""

from __future__ import annotations

import burst
import pytest

REQUESTS, KILLS = 64, 3


@pytest.mark.vllm
def test_every_pair_of_a_burst_adds_up_and_nothing_is_left_of_it() -> None:
    figures = burst.burst(REQUESTS, 160, KILLS, seed=0)
    assert figures["not_as_it_should_be"] == []
    counts = figures["accounts"]["reports"]
    assert min(counts["fallback_pairs"], counts["cold_pairs"], counts["prefill_device_pairs"]) > 0
    assert figures["accounts"]["metrics"]["requests"] == sum(figures["asked"].values()) >= REQUESTS
    for grown in figures["left_over"].values():
        assert max(grown.values()) < REQUESTS / 4  # one for each client would be 64


def whole_stream() -> tuple[burst.Stream, dict[str, object]]:
    """A stream of three tokens, and the report that it should have at eight pairs a row."""
    report = dict.fromkeys(burst.COUNTED, 0) | {
        "finish": "length", "decode_rows": 2, "prompt_rows": 5,
        "hot_pairs": 6, "cold_pairs": 10, "prefill_pairs": 40,
    }  # fmt: skip
    return burst.Stream("one", "text", 3, None, 3, 5, "whole", report), report


@pytest.mark.parametrize("kind", ["hot_pairs", "fallback_pairs", "prefill_fallback_pairs", "decode_rows"])
def test_a_burst_sees_one_pair_too_many_in_a_report_and_in_an_account(kind: str) -> None:
    stream, report = whole_stream()
    more = report | {kind: report[kind] + 1}
    assert burst.wrong([stream], [report], {"metrics": report}, 8) == []
    assert burst.wrong([stream], [more], {"metrics": report}, 8)
    assert burst.wrong([stream], [report], {"metrics": more}, 8)


def test_a_burst_sees_a_decode_pair_that_is_taken_for_one_of_the_prompt() -> None:
    stream, report = whole_stream()
    moved = report | {"hot_pairs": 5, "prefill_pairs": 41}
    assert len(burst.wrong([stream], [moved], {"metrics": moved}, 8)) >= 2


def test_a_burst_sees_rows_that_its_client_did_not_ask_for() -> None:
    stream, report = whole_stream()
    more = report | {"decode_rows": 3, "hot_pairs": 14}
    assert any("its client counted" in what for what in burst.wrong([stream], [more], {"metrics": more}, 8))
