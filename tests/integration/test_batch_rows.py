"""What a step knows of its rows: the sums of lists against the arrays, and the check of the KV entries both ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ndp.integration.batch import BatchRows, Span, TrackedRequest

BLOCK = 4


def rows_of(shapes: list[tuple[int, int, int]]) -> BatchRows:
    """Each (prompt length, start, tokens); block tables grow downwards, so that no entry follows from the position."""
    spans = []
    for number, (prompt_len, start, num_tokens) in enumerate(shapes):
        num_blocks = -(-(start + num_tokens) // BLOCK)
        blocks = [1000 * (number + 1) - block for block in range(num_blocks)]
        request = TrackedRequest(f"r{number}", prompt_len, blocks, prefilled=start >= prompt_len)
        spans.append(Span(request, start, num_tokens))
    return BatchRows(tuple(spans))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(1, 5)), min_size=1, max_size=6))
def test_sums_over_requests_are_sums_over_rows(shapes: list[tuple[int, int, int]]) -> None:
    rows = rows_of(shapes)
    assert rows.num_rows == len(rows.positions) == len(rows.decode) == len(rows.owner)
    assert rows.decode.tolist() == [
        p >= rows.spans[r].first_decode for p, r in zip(rows.positions, rows.owner, strict=True)
    ]
    assert rows.all_decode == bool(rows.decode.all())
    assert rows.attended == int((rows.positions + 1).sum())
    assert [rows.owner[first] for first in rows.first_rows] == list(range(len(shapes)))


@pytest.mark.parametrize("tokens", [1, 30], ids=["as lists", "as arrays"])
def test_a_row_that_writes_another_kv_entry_than_expected_is_seen(tokens: int) -> None:
    rows = rows_of([(1, 7, tokens), (1, 2, tokens), (1, 9, tokens)])
    entries = torch.from_numpy(rows.expected_slot_mapping(BLOCK))
    assert rows.write_to(entries, BLOCK)
    for row in range(rows.num_rows):
        moved = entries.clone()
        moved[row] += 1
        assert not rows.write_to(moved, BLOCK)
    assert not rows.write_to(entries[:-1], BLOCK)


def test_drafts_beside_the_end_of_a_prompt_are_prefill_until_there_is_a_plan() -> None:
    """Of a prompt of 5, its last row and two drafts after it: the first step knows no plan, a recomputation does."""
    (span,) = rows_of([(5, 4, 3)]).spans
    assert (span.num_drafts, span.num_sampled_rows) == (2, 3)
    assert BatchRows((span,)).decode.tolist() == [False, False, False]
    span.request.prefilled, span.request.num_output_tokens = True, 2
    assert (span.num_drafts, span.num_sampled_rows) == (0, 1)
    assert BatchRows((span,)).decode.tolist() == [False, True, True]
