"""Weights through pinned buffers, on the pretended GPU: what arrives, who waits, and what a layer waits for."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_gpu import GPU, LazyLane, LazyMark, PretendGpu, peek

from vllm_ndp.integration.cuda.copies import CopiesByThread, PinnedCopies
from vllm_ndp.integration.migration import Migrator


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
    st.integers(1, 30),
)
def test_what_was_copied_is_there_for_the_stream_and_the_host_waits_for_full_buffers_only(
    shapes: list[tuple[int, int]], dtype: torch.dtype, buffers: int, elements: int
) -> None:
    """Of n chunks through b buffers, n - b wait for the one that fills their buffer to leave it."""
    gpu = PretendGpu()
    with torch.no_grad(), gpu:
        size = elements * dtype.itemsize
        copies = PinnedCopies(LazyLane(gpu.waits.append), gpu.pinned, buffer_bytes=size, buffers=buffers)
        sources = [torch.randn(shape) for shape in shapes]
        targets = [torch.zeros(shape, dtype=dtype, device=GPU) for shape in shapes]
        copies.copy_all(list(zip(targets, sources, strict=True)))
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(peek(target), source.to(dtype))
        chunks = sum(-(-rows * columns // elements) for rows, columns in shapes)
        assert len(gpu.waits) == max(chunks - buffers, 0)
        again = torch.randn(shapes[0])
        copies.copy_all([(targets[0], again)])  # the buffers are used again
        assert torch.equal(peek(targets[0]), again.to(dtype))


def test_each_thread_has_buffers_of_its_own() -> None:
    made: list[torch.device] = []

    class Counted:
        def copy_all(self, copies: object, after: object) -> None: ...

    def make(device: torch.device) -> PinnedCopies:
        made.append(device)
        return Counted()  # type: ignore[return-value]

    copies, pair = CopiesByThread(make), [(torch.zeros(1), torch.ones(1))]
    migrator = Migrator(os.sched_getaffinity(0))
    for layer in range(2):
        copies.copy_all(pair)
        migrator.begin(layer, [lambda: copies.copy_all(pair)])
    migrator.wait_for_all()
    migrator.close()
    assert made == [torch.device("cpu")] * 2


def test_a_layer_has_the_main_stream_wait_for_its_moves_and_the_host_for_no_copy() -> None:
    """Two layers begun at once, whose copies happen when they are waited for, and not before."""
    gpu = PretendGpu()
    lanes = [LazyLane(gpu.waits.append), LazyLane(gpu.waits.append)]
    slots = [torch.zeros(4), torch.zeros(4)]
    left = list(lanes)

    class OnLane:
        def __init__(self) -> None:
            self.lane = left.pop(0)

        def carry_out(self, moves: object) -> LazyMark:
            for move in moves:  # type: ignore[attr-defined]
                move()
            return self.lane.mark()

    migrator = Migrator(os.sched_getaffinity(0), OnLane)
    for layer, lane in enumerate(lanes):
        migrator.begin(layer, [lambda lane=lane, slot=slots[layer]: lane.copy(slot, torch.ones(4))])
    migrator.wait(0)
    assert [slot.sum().item() for slot in slots] == [4, 0]
    migrator.wait(1)
    assert [slot.sum().item() for slot in slots] == [4, 4]
    assert gpu.waits == []
    migrator.close()


def test_a_move_that_fails_is_raised_where_its_layer_waits() -> None:
    class Failing:
        def carry_out(self, moves: object) -> LazyMark:
            raise OSError("the pool is gone")

    migrator = Migrator(os.sched_getaffinity(0), Failing)
    migrator.begin(0, [lambda: None])
    with pytest.raises(OSError, match="the pool is gone"):
        migrator.wait(0)
    migrator.close()
