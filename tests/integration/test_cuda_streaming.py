"""Streamed prefill on a pretended or a real GPU: an expert arrives while one computes, and results stay the same."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_layers import fused
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_gpu import GPU, KINDS, PretendGpu, WatchedStream, gpu_of, peek

from ndp_device.experts.expert import WHOLE, Part
from vllm_ndp.integration.cuda.streams import CopiesByThread, PinnedCopies
from vllm_ndp.integration.experts_pool import ExpertWeights
from vllm_ndp.integration.hot_experts import StagingStreamer
from vllm_ndp.integration.hot_slots import CudaSlotKernel, HotSlots, SlotWeights
from vllm_ndp.layer.split import Pairs
from vllm_ndp.layer.tiers import Tiers

HIDDEN, INTERMEDIATE, EXPERTS, SLOTS = 16, 12, 6, 3
WEIGHT_BYTES = 3 * HIDDEN * INTERMEDIATE * 4


class Pool:
    """Experts in the host's memory, in halves or whole."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5  # noqa: E731
        self.experts = [
            ExpertWeights(draw(INTERMEDIATE, HIDDEN), draw(INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE))
            for _ in range(EXPERTS)
        ]

    def expert(self, layer: int, number: int, share: Part | None) -> ExpertWeights:
        w1, w3, w2, _ = self.experts[number]
        part = INTERMEDIATE // (share or WHOLE).count
        here = slice((share or WHOLE).index * part, ((share or WHOLE).index + 1) * part)
        return ExpertWeights(w1[here], w3[here], w2[:, here].contiguous())

    def check(self, layer: int) -> None: ...


@dataclass(frozen=True)
class Setup:
    rows: list[list[int]]  # by row, the experts that are streamed for it
    keep: dict[int, int]
    shares: int = 1
    dtype: torch.dtype = torch.bfloat16
    buffer_bytes: int = 64
    seed: int = 0
    calls: int = 2  # in turn, as layers are

    @property
    def pairs(self) -> Pairs:
        rows = [row for row, experts in enumerate(self.rows) for _ in experts]
        experts = [number for experts in self.rows for number in experts]
        weights = np.random.default_rng(self.seed).random(len(rows), dtype=np.float32)
        return Pairs.of(np.array(rows, np.int64), np.array(experts, np.int64), weights)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    rows = draw(st.lists(st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=3), min_size=1, max_size=5))
    shares = draw(st.sampled_from([1, 2]))
    kept = [] if shares > 1 else draw(st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=SLOTS))
    return Setup(
        rows=[*rows, [0]],
        keep={number: slot for slot, number in enumerate(kept)},
        shares=shares,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        buffer_bytes=draw(st.sampled_from([256, 1 << 20])),
        seed=draw(st.integers(0, 1000)),
    )


@dataclass
class Outcome:
    totals: list[torch.Tensor]
    slots: list[torch.Tensor]
    expert_in: list[int]
    waits: list[str]
    ahead: int


def run_on_gpu(setup: Setup, on: str = "pretended") -> Outcome:
    gpu = gpu_of(on)
    with torch.no_grad(), gpu:
        stream = WatchedStream(gpu) if isinstance(gpu, PretendGpu) else gpu.stream()
        copies = PinnedCopies(stream, gpu.pinned, buffer_bytes=setup.buffer_bytes)
        x = gpu.tensor(rows_of(setup))
        streamer, slots = streamer_of(setup, CopiesByThread(lambda device: copies), x.device)
        for part in (*streamer._staging[0][:2], *streamer._staging[1][:2], *slots.held):
            if part is not None and isinstance(gpu, PretendGpu):
                gpu.watch(part)
        hot = lambda: slots.kernel.run(x, slots.held, *in_slot_0(x))  # noqa: E731
        totals = calls(setup, streamer, slots, x, before=hot)
        return Outcome(
            [peek(total).clone() for total in totals], [peek(t).clone() for t in slots.held if t is not None],
            slots.expert_in.tolist(), list(gpu.waits), stream.ahead if isinstance(stream, WatchedStream) else 0,
        )  # fmt: skip


def run_plainly(setup: Setup, on: str) -> Outcome:
    """One staging slot, every copy done before the next line: where the same kernels compute."""
    device = torch.device("cuda" if on == "cuda" else "cpu")
    streamer, slots = streamer_of(setup, None, device)
    totals = [peek(total) for total in calls(setup, streamer, slots, rows_of(setup).to(device))]
    return Outcome(totals, [peek(part) for part in slots.held if part is not None], slots.expert_in.tolist(), [], 0)


def streamer_of(setup: Setup, copies: CopiesByThread | None, device: torch.device) -> tuple[StagingStreamer, HotSlots]:
    kernel = CudaSlotKernel("silu", EXPERTS, fused, lambda *key: nullcontext(), copies)
    part = INTERMEDIATE // setup.shares
    shapes = (SLOTS, 2 * part, HIDDEN), (SLOTS, HIDDEN, part)
    held = SlotWeights(*(torch.zeros(shape, dtype=setup.dtype, device=device) for shape in shapes))
    streamer = StagingStreamer(Pool(setup.seed), kernel, held)  # type: ignore[arg-type]
    return streamer, HotSlots(kernel, held, Tiers(1, EXPERTS))


def calls(setup: Setup, streamer: StagingStreamer, slots: HotSlots, x: torch.Tensor, before: Any = list) -> Any:
    totals = []
    for number in range(setup.calls):
        before()  # the hot experts, which read slots that an expert is about to be left in
        keep = setup.keep if number == 0 else {}
        shares = [Part(index, setup.shares) for index in range(setup.shares)]
        totals.append(streamer.run(0, x, setup.pairs, slots, keep, shares))
    return totals


def rows_of(setup: Setup) -> torch.Tensor:
    return torch.randn(len(setup.rows), HIDDEN, generator=torch.Generator().manual_seed(1)).to(setup.dtype)


def in_slot_0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.ones(len(x), 1, dtype=torch.float32, device=x.device),
        torch.zeros(len(x), 1, dtype=torch.int32, device=x.device),
    )


@pytest.mark.parametrize("on", KINDS)
@settings(max_examples=30)
@given(setups())
def test_experts_that_take_turns_give_the_bits_of_one_at_a_time(on: str, setup: Setup) -> None:
    """As late as a stream may run, numbers would be wrong; as early as it may, the watch would raise."""
    mine, wanted = run_on_gpu(setup, on), run_plainly(setup, on)
    assert all(torch.equal(a, b) for a, b in zip(mine.totals, wanted.totals, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(mine.slots, wanted.slots, strict=True))
    assert mine.expert_in == wanted.expert_in


ALL = Setup(rows=[[0, 1], [2, 3], [4, 5]], keep={}, dtype=torch.float32, buffer_bytes=WEIGHT_BYTES // 3, calls=1)
"""6 experts in 3 buffers' worth each, of which there are 2."""


def test_the_host_waits_for_a_full_buffer_and_for_nothing_else() -> None:
    """18 chunks through 2 buffers: 16 of them wait for the one before that to be on its way out."""
    assert run_on_gpu(ALL).waits == ["event of a stream"] * 16


def test_an_expert_arrives_while_the_one_before_it_computes() -> None:
    """The first two fill empty slots behind everything; the four after them follow what has read their slot."""
    assert run_on_gpu(ALL).ahead == 4 * 3


def test_an_expert_that_stays_arrives_beside_what_was_streamed_before_it() -> None:
    assert run_on_gpu(Setup(**{**vars(ALL), "keep": {3: 0, 5: 2}})).ahead == 4 * 3


@pytest.mark.parametrize("forgotten", ["the staging slot's last reader", "the hot experts"])
def test_a_copy_that_does_not_follow_the_last_reader_of_its_place_is_seen(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch that the tests above rely on: both orders that the streamer keeps, each left out once."""
    setup = ALL if forgotten.startswith("the staging") else Setup(**{**vars(ALL), "keep": {0: 0}})
    begin = SimpleNamespace(operators=0)
    monkeypatch.setattr(PinnedCopies, "record_main", lambda self: begin)
    with pytest.raises(RuntimeError, match="a copy may overwrite what operator"):
        run_on_gpu(setup)


def test_small_arrays_arrive_whole_whatever_their_size() -> None:
    gpu = PretendGpu()
    with torch.no_grad(), gpu:
        copies = PinnedCopies(WatchedStream(gpu), gpu.pinned, buffer_bytes=64)
        for count in (1, 3, 5000, 2):
            arrays = [np.arange(count), np.arange(count, dtype=np.float32) / 2]
            found = copies.upload(arrays, GPU)
            assert [peek(tensor).tolist() for tensor in found] == [array.tolist() for array in arrays]
        assert gpu.waits == []
