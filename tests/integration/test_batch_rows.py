"""What a step knows of its rows: the sums of lists against the arrays, and the check of the KV entries both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from vllm_ndp.integration import device_link
from vllm_ndp.integration.batch import BatchRows, RequestTracker, Span, TrackedRequest
from vllm_ndp.integration.device_link import Gather, add_sums
from vllm_ndp.integration.routing_sidecar import RoutingSidecar

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


def new_request(name: str, prompt: int, blocks: list[int], computed: int = 0) -> NewRequestData:
    return NewRequestData(name, list(range(prompt)), [], None, None, (blocks,), computed, None)


def message(new: list[NewRequestData], finished: set[str] = frozenset(), **scheduled: int) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.scheduled_new_reqs, made.finished_req_ids, made.num_scheduled_tokens = new, set(finished), scheduled
    return made


@pytest.mark.parametrize(
    ("prompt", "finished", "is_known"),
    [(8, set(), True), (12, set(), False), (8, {"a"}, False)],
    ids=["resumed", "goes on with more", "ended, and another begins under its name"],
)
def test_a_plan_belongs_to_a_prompt_and_not_to_a_name(prompt: int, finished: set[str], is_known: bool) -> None:
    """Model runner V2 sends a request that was preempted as a new one; a session with a longer prompt."""
    tracker, plan, score = RequestTracker(), object(), object()
    request = tracker.update(message([new_request("a", 8, [1, 2])], a=8))["a"].request
    request.plan, request.score, request.prefilled = plan, score, True  # type: ignore[assignment]
    span = tracker.update(message([new_request("a", prompt, [5, 6, 7])], finished, a=prompt))["a"]
    assert (span.request is request) == is_known
    assert span.request.blocks == [5, 6, 7]
    assert span.ends_prefill != is_known
    assert (span.request.plan, span.request.score) == ((plan, score) if is_known else (None, None))


def sidecar_with(entries: list[int]) -> RoutingSidecar:
    """Two layers, three experts a row; of the entry n expert n is first."""
    sidecar, at = RoutingSidecar(2, 3, torch.device("cpu"), 6, 4), torch.tensor(entries)
    for layer in range(2):
        sidecar.note(layer, at).write(at[:, None] + torch.arange(3), at[:, None] + torch.full((1, 3), layer / 2))
    return sidecar


def test_entries_of_blocks_that_were_loaded_count_as_none_until_a_pass_writes_them() -> None:
    sidecar, entries = sidecar_with(list(range(24))), np.arange(24)
    assert sidecar.noted(entries) is None
    sidecar.note_written(entries)
    assert not sidecar.lacks_some
    sidecar.forget([1, 3])
    assert np.flatnonzero(~sidecar.noted(entries)).tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    sidecar.note_written(np.array([6, 7, 8, 12]))
    assert np.flatnonzero(~sidecar.noted(entries)).tolist() == [4, 5, 13, 14, 15]


def test_blocks_that_vllm_copies_take_their_routing_and_the_lack_of_it_along() -> None:
    """A prompt that shares a part of a block with another gets a copy of it."""
    sidecar = sidecar_with(list(range(12)))
    sidecar.copy_blocks([(1, 4), (2, 3)])
    ids, weights = sidecar.read(np.array([16, 17, 12, 15]))
    assert ids[:, 0, 0].tolist() == [4, 5, 8, 11]
    assert weights[:, 1, 2].tolist() == [4.5, 5.5, 8.5, 11.5]
    sidecar.forget([2])
    sidecar.copy_blocks([(2, 5), (1, 3)])
    assert sidecar.noted(np.array([12, 20, 23])).tolist() == [True, False, False]


# -- rows on their way out and sums on their way back, natively --------------------------------------------------------

HIDDEN = 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(st.integers(1, 40), st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_partial_sums_are_added_as_torch_adds_them(
    dtype: torch.dtype, num_rows: int, data: st.DataObject, seed: int
) -> None:
    random = np.random.default_rng(seed)
    sent = np.sort(random.permutation(num_rows)[: data.draw(st.integers(1, num_rows))])
    scale = random.choice([1e-39, 1e-3, 1.0, 1e38], (num_rows, 1))
    out = torch.from_numpy(random.uniform(-3, 3, (num_rows, HIDDEN)) * scale).to(dtype)
    sums = (random.uniform(-3, 3, (len(sent), HIDDEN)) * scale[sent]).astype(np.float32)
    expected, few = out.clone(), device_link.FEW_ROWS
    try:
        device_link.FEW_ROWS = 0
        add_sums(expected, sums, sent)
    finally:
        device_link.FEW_ROWS = few
    add_sums(out, sums, sent)
    assert np.array_equal(out.float().numpy(), expected.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_sent", [1, 5, 128, 129, 200])
def test_gathered_rows_are_those_of_the_tensor(dtype: torch.dtype, num_sent: int) -> None:
    """128 rows are gathered natively, 129 by torch."""
    x = torch.randn(200, HIDDEN).to(dtype)
    sent = np.sort(np.random.default_rng(0).permutation(200)[:num_sent])
    found = Gather(HIDDEN, dtype).rows(x, sent)
    wanted = x[torch.from_numpy(sent)]
    assert np.array_equal(found.view(np.uint8), wanted.view(torch.uint8).numpy())
