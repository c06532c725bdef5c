"""Weights through pinned buffers, on a pretended or a real GPU: what arrives, who waits, and what a layer waits for."""

import os
import threading
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_gpu import KINDS, LazyEvent, LazyStream, PretendGpu, gpu_of, peek

from vllm_ndp.integration.cuda import streams as of_streams
from vllm_ndp.integration.cuda.streams import Arrival, CopiesByThread, HostStream, PinnedCopies, pinned_for
from vllm_ndp.integration.hot_experts import Migrator


@pytest.mark.parametrize("on", KINDS)
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
    st.integers(1, 30),
)
def test_what_was_copied_is_there_for_the_stream_and_the_host_waits_for_full_buffers_only(
    on: str, shapes: list[tuple[int, int]], dtype: torch.dtype, buffers: int, elements: int
) -> None:
    """Of n chunks through b buffers, n - b wait for the one that fills their buffer to leave it."""
    gpu = gpu_of(on)
    with torch.no_grad(), gpu:
        size = elements * dtype.itemsize
        moves = PinnedCopies(gpu.stream(), gpu.pinned, buffer_bytes=size, buffers=buffers)
        sources = [torch.randn(shape) for shape in shapes]
        targets = [torch.zeros(shape, dtype=dtype, device=gpu.device) for shape in shapes]
        moves.copy_all(list(zip(targets, sources, strict=True)))
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(peek(target), source.to(dtype))
        chunks = sum(-(-rows * columns // elements) for rows, columns in shapes)
        assert on != "pretended" or len(gpu.waits) == max(chunks - buffers, 0)
        again = torch.randn(shapes[0])
        moves.copy_all([(targets[0], again)])  # the buffers are used again
        assert torch.equal(peek(targets[0]), again.to(dtype))


@pytest.mark.parametrize("on", KINDS)
def test_what_sets_off_to_the_host_costs_no_wait_until_somebody_asks_for_it(on: str) -> None:
    gpu = gpu_of(on)
    with torch.no_grad(), gpu:
        numbers, stream = gpu.tensor(torch.arange(1 << 12, dtype=torch.int16)), gpu.stream()
        under_way = [Arrival(stream, gpu.pinned, numbers + step) for step in range(3)]
        assert gpu.waits == []
        for step in (2, 0, 1):
            assert under_way[step].values()[:3].tolist() == [step, step + 1, step + 2]
        assert on != "pretended" or len(gpu.waits) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_threads_fill_a_buffer_where_torch_has_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives torch one thread when the model is loaded. The buffer may be one of inference mode, as vLLM's are."""
    filled, copy = set[str](), of_streams._copy_part

    def noted(to: torch.Tensor, source: torch.Tensor) -> None:
        filled.add(threading.current_thread().name)
        together.wait()
        copy(to, source)

    together = threading.Barrier(of_streams.FILLERS, timeout=60)
    monkeypatch.setattr(of_streams, "_copy_part", noted)
    device = torch.device("cpu")
    with torch.inference_mode():
        size = of_streams.FILLERS * of_streams.LEAST_FILLED
        moves = PinnedCopies(HostStream(), pinned_for(device), buffer_bytes=size)
    source = torch.randn(size // dtype.itemsize)
    target = torch.zeros(source.shape, dtype=dtype)
    with torch.inference_mode():
        moves.copy_all([(target, source)])
    assert torch.equal(target, source.to(dtype))
    assert len(filled) == of_streams.FILLERS
    small = torch.zeros(8)
    moves.copy_all([(small, torch.ones(8))])  # by this thread: it waits for no other
    assert small.tolist() == [1] * 8


def test_each_thread_has_buffers_of_its_own() -> None:
    made: list[torch.device] = []

    class Counted:
        def copy_all(self, copies: object, after: object) -> None: ...

    def make(device: torch.device) -> PinnedCopies:
        made.append(device)
        return Counted()  # type: ignore[return-value]

    by_thread, pair = CopiesByThread(make), [(torch.zeros(1), torch.ones(1))]
    migrator = Migrator(os.sched_getaffinity(0))
    for layer in range(2):
        by_thread.copy_all(pair)
        migrator.begin(layer, [lambda: by_thread.copy_all(pair)])
    migrator.wait_for_all()
    migrator.close()
    assert made == [torch.device("cpu")] * 2


def test_a_layer_has_the_main_stream_wait_for_its_moves_and_the_host_for_no_copy() -> None:
    """Two layers begun at once, whose copies happen when they are waited for, and not before."""
    gpu = PretendGpu()
    streams = [LazyStream(gpu.waits.append), LazyStream(gpu.waits.append)]
    slots = [torch.zeros(4), torch.zeros(4)]
    left = list(streams)

    class OnLanes(Migrator):
        def _after(self) -> LazyStream:
            return left.pop(0)

        def _carry_out(self, moves: object, lane: LazyStream) -> LazyEvent:
            for move in moves:  # type: ignore[attr-defined]
                move()
            return lane.record_event()

    migrator = OnLanes(os.sched_getaffinity(0))
    for layer, stream in enumerate(streams):
        migrator.begin(layer, [lambda stream=stream, slot=slots[layer]: stream.copy(slot, torch.ones(4))])
    migrator.wait(0)
    assert [slot.sum().item() for slot in slots] == [4, 0]
    migrator.wait(1)
    assert [slot.sum().item() for slot in slots] == [4, 4]
    assert gpu.waits == []
    migrator.close()


def test_moves_share_one_stream_which_is_none_of_those_that_vllm_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32 streams of each priority and hands them out in turn. With one for each layer of each placement, the
    moves of some layer would be on vLLM's own stream, in front of its kernels."""
    made: list[int] = []
    device = torch.device("cuda", 1)

    class Stream:
        def __init__(self, device: torch.device, priority: int = 0) -> None:
            made.append(priority)
            self.device = device

        def wait_event(self, event: object) -> None: ...

    class Event:
        def record(self, stream: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: Stream.__new__(Stream) if of == device else None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda of: nullcontext())
    migrator, moved = Migrator(os.sched_getaffinity(0)), list[int]()
    for _ in range(2):
        for layer in range(40):
            migrator.begin(layer, [lambda layer=layer: moved.append(layer)])
        migrator.wait_for_all()
    migrator.close()
    assert moved == [*range(40), *range(40)]
    assert made == [-1]


def test_memory_of_the_host_is_the_host_s_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        assert pinned_for(torch.device("cpu"))(4, dtype=torch.float32).device.type == "cpu"
