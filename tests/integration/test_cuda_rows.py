"""The check of rows on a pretended or a real GPU: nobody waits before the step ran, no mistake gets past its end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from real_gpu import KINDS, Gpu, gpu_of

from vllm_ndp.integration import batch
from vllm_ndp.integration.batch import KvGroup, RowLocator, Span, TrackedRequest
from vllm_ndp.integration.cuda.streams import LateCheck

BLOCK = 4


def located(
    moved: int | None, monkeypatch: pytest.MonkeyPatch, on: str = "pretended", *, is_late: bool = True
) -> tuple[RowLocator, Gpu]:
    """Two requests of a decode row each, as vLLM pads them; the KV entry of one row may be another than expected."""
    spans = {
        name: Span(TrackedRequest(name, 3, [10 + number, 20 + number], prefilled=True), 5, 1)
        for number, name in enumerate(("a", "b"))
    }
    entries = torch.tensor([20 * BLOCK + 1, 21 * BLOCK + 1, -1])
    if moved is not None:
        entries[moved] += 1
    gpu = gpu_of(on)
    with gpu:
        context = SimpleNamespace(slot_mapping={"layer": gpu.tensor(entries)})
        monkeypatch.setattr(batch, "get_forward_context", lambda: context)
        late = LateCheck(gpu.stream(), gpu.pinned, gpu.device, 8) if is_late else None
        runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b"]))
        locator = RowLocator(runner, KvGroup(0, BLOCK, "layer"), late)
        rows, found = locator.locate(spans)
    assert rows.num_rows == len(found) == 2
    return locator, gpu


def test_rows_that_are_whose_we_take_them_for_cost_no_wait_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    locator, gpu = located(None, monkeypatch)
    assert gpu.waits == []
    locator.settle()
    locator.settle()  # nothing more to ask
    assert len(gpu.waits) == 1
    assert (locator.row_checks, locator.mismatches) == (1, 0)


@pytest.mark.parametrize("on", KINDS)
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_of_another_request_ends_the_step(row: int, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    locator, _ = located(row, monkeypatch, on)
    with pytest.raises(RuntimeError, match="KV slots differ"):
        locator.settle()
    assert locator.mismatches == 1


@pytest.mark.parametrize("on", KINDS)
def test_without_a_stream_for_the_check_the_step_ends_before_it_runs(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="KV slots differ"):
        located(1, monkeypatch, on, is_late=False)
    assert located(None, monkeypatch, on, is_late=False)[0].row_checks == 1


@pytest.mark.parametrize("on", KINDS)
def test_padding_of_a_graph_is_nobodys_row(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    locator, _ = located(2, monkeypatch, on)
    locator.settle()
    assert locator.mismatches == 0
