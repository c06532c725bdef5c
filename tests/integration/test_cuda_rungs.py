"""Ways to run on a GPU: each value of the setting `gpu` selects what it says, one thing more than the value before.

On stand-ins for a GPU: an assembly whose slots are said to be elsewhere, and streams that nobody may make.
"""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pretend_gpu import PretendGpu, peek

from ndp_device.common.errors import ConfigError
from vllm_ndp.config import GPU_RUNGS, NdpSettings
from vllm_ndp.integration import assembly, compat
from vllm_ndp.integration.assembly import Assembly
from vllm_ndp.integration.cuda import limits, messenger
from vllm_ndp.integration.cuda.limits import PASSED, Rung
from vllm_ndp.integration.hot_experts import HotExperts, Migrator
from vllm_ndp.integration.hot_slots import CudaSlotKernel, HotSlots, SlotWeights
from vllm_ndp.integration.serving import status
from vllm_ndp.layer.tiers import Tiers

pytestmark = pytest.mark.vllm
ELSEWHERE = torch.device("meta")
ADDS = {
    "plain": set(),
    "streams": {"copies", "late check", "moves beside"},
    "asynchronous": {"messenger"},
    "kernels": {"kernels"},
    "thread": {"thread"},
    "graphs": {"graphs"},
}


def assembly_on_gpu(gpu: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Assembly:
    """Of two layers whose slots are on a GPU, as far as its parts can tell."""
    monkeypatch.setattr(compat, "on_cpu", lambda: False)
    made = Assembly.__new__(Assembly)
    made.slots, made.operators = {}, {}
    made.settings = NdpSettings(gpu=gpu, execution="paper", **settings)
    shape = SimpleNamespace(num_layers=2, num_experts=8, top_k=2, hidden_size=16)
    layout = SimpleNamespace(activations=(), moe_index=None)
    made.pool = SimpleNamespace(shape=shape, model=shape, layout=layout, activation_of=lambda layer: None)  # type: ignore[assignment]
    made.ranks, made.layers = SimpleNamespace(share=None), range(2)  # type: ignore[assignment]
    made.tiers = Tiers(2, 8)
    made.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=32))  # type: ignore[assignment]
    return made


def has(made: Assembly, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What it selects beside what is plain."""
    given: list[Any] = []  # the copies of each layer
    held = SimpleNamespace(w13=torch.empty(0, device=ELSEWHERE, dtype=torch.bfloat16))
    monkeypatch.setattr(assembly, "make_slot_kernel", lambda *of: given.append(of[-1]))
    monkeypatch.setattr(assembly, "slots_of_module", lambda *of, **more: SimpleNamespace(held=held, kernel=None))
    monkeypatch.setattr(assembly, "HotExperts", lambda *of, beside: beside)
    monkeypatch.setattr(compat, "engine_cores", lambda: {0})
    monkeypatch.setattr(messenger, "CORES", 1)
    for index in range(2):
        monkeypatch.setattr(compat, "moe_index", lambda *of, index=index: index)
        made.attach(SimpleNamespace(layer_name="layer", apply_router_weight_on_input=False))
    assert given[0] is given[1], "layers have copies of their own: buffers, streams and threads for each"
    monkeypatch.setattr(assembly, "StagingStreamer", lambda *of: None)
    monkeypatch.setattr(made, "_make_replica_fill", lambda *of: None)
    found, sends = set(), made.make_messenger()
    found |= {"copies"} if given[0] is not None else set()
    found |= {"late check"} if made.make_late_check() is not None else set()
    found |= {"moves beside"} if made.open_pool(None) else set()
    if sends is not None:
        found |= {"messenger"}
        found |= {"kernels"} if sends.routing.split.__module__.endswith("kernels") else set()
        found |= {"thread"} if sends.has_thread else set()
        found |= {"graphs"} if sends.graphs is not None else set()
        assert ("a thread sends" if sends.has_thread else "the host sends") in status._decode_layers(made.rung, sends)
    return found


@pytest.mark.parametrize("gpu", GPU_RUNGS)
def test_each_way_has_one_thing_more_than_the_one_before(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = set[str]().union(*(ADDS[name] for name in GPU_RUNGS[: GPU_RUNGS.index(gpu) + 1]))
    assert has(assembly_on_gpu(gpu, monkeypatch), monkeypatch) == wanted


def test_names_and_order_are_those_of_the_setting() -> None:
    assert [rung.name.lower() for rung in Rung] == list(GPU_RUNGS) == list(ADDS)


def test_plain_moves_are_done_when_they_are_begun_by_the_thread_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*of: object, **more: object) -> None:
        raise AssertionError("a stream")

    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    migrator, done = Migrator(()), list[tuple[int, int]]()
    for layer in range(2):
        migrator.begin(layer, [lambda layer=layer: done.append((layer, threading.get_ident()))])
        assert done[-1] == (layer, threading.get_ident())
    migrator.wait_for_all()
    with pytest.raises(OSError, match="the pool is gone"):
        migrator.begin(0, [lambda: open_nothing()])
    migrator.close()


def test_a_plan_waits_for_the_gpu_once_however_many_layers_there_are() -> None:
    """Their maps go up together; each layer's slots are named in its own."""
    gpu, tiers = PretendGpu(), Tiers(3, 8)
    with torch.no_grad(), gpu:
        held = SlotWeights(gpu.tensor(torch.zeros(2, 4, 4)), gpu.tensor(torch.zeros(2, 4, 2)))
        kernel = CudaSlotKernel("silu", 8, lambda *of, **more: torch.empty(0), lambda *key: nullcontext())
        slots = {layer: HotSlots(kernel, held, tiers, layer) for layer in range(3)}
        streamer: Any = SimpleNamespace(fill=lambda *of: None)
        hot = HotExperts(None, tiers, slots, streamer, {0}, beside=False)  # type: ignore[arg-type]
        chosen = np.zeros((3, 8), np.bool_)
        chosen[[0, 0, 1, 1, 2], [1, 6, 0, 7, 3]] = True
        placement: Any = SimpleNamespace(hot=chosen, warm=None, widths=np.zeros((3, 8), np.uint8))
        for layer in range(3):  # they are there already
            slots[layer].expert_in[: chosen[layer].sum()] = np.flatnonzero(chosen[layer])
        gpu.waits.clear()
        hot.place(placement)
        assert len(gpu.waits) == 1
        assert [peek(slots[layer].expert_map).tolist() for layer in range(3)] == tiers.where.tolist()
    assert tiers.where.tolist()[0] == [-1, 0, -1, -1, -1, -1, 1, -1]


def open_nothing() -> None:
    raise OSError("the pool is gone")


@pytest.mark.parametrize(
    ("asked", "offload_bits", "on_gpu", "found"),
    [
        ("auto", 0, True, PASSED),
        ("auto", 3, True, min(PASSED, Rung.STREAMS)),
        ("auto", 0, False, Rung.PLAIN),
        ("thread", 0, True, Rung.THREAD),
        ("thread", 0, False, Rung.THREAD),
        ("streams", 3, True, Rung.STREAMS),
        ("asynchronous", 3, True, r"'execution': 'paper'"),
        ("thread", 3, False, r"'execution': 'paper'"),
        ("streams", 0, False, "this engine runs on CPU"),
        ("kernels", 0, False, "this engine runs on CPU"),
    ],
)
def test_what_is_asked_for_is_what_runs_or_it_is_refused(
    asked: str, offload_bits: int, on_gpu: bool, found: Rung | str
) -> None:
    """By itself a GPU runs what a run has passed, and no more."""
    refused = pytest.raises(ConfigError, match=found) if isinstance(found, str) else nullcontext()
    with refused:
        assert limits.rung_of(NdpSettings(gpu=asked), offload_bits, on_gpu=on_gpu) is found


def test_a_step_of_so_many_rows_is_captured_when_it_comes_again_and_replayed_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph that stands for CUDA's runs what was captured, whenever it is replayed."""
    weights, computed, captured = torch.ones(8, 2), list[int](), list[int]()

    def compute(rows: int) -> torch.Tensor:
        computed.append(rows)
        return weights[:rows] * 2

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            assert options["capture_error_mode"] == "thread_local", "threads that copy experts would be refused"

        def capture_end(self) -> None:
            captured.append(computed[-1])

        def replay(self) -> None:
            hot._out[:rows].copy_(weights[:rows] * 2)  # type: ignore[index]

    monkeypatch.setattr(messenger, "own_stream", lambda device: SimpleNamespace(wait_stream=lambda of: None))
    for name, stand_in in (
        ("CUDAGraph", Graph),
        ("graph_pool_handle", lambda: (0, 0)),
        ("stream", lambda of: nullcontext()),
        ("current_stream", lambda device: SimpleNamespace(wait_stream=lambda of: None)),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    hot = messenger.HotGraphs(torch.device("cpu"), most_rows=4)
    for rows in (1, 2, 1, 1, 2, 8, 8):
        out = hot.run("layer 0", weights[:rows], lambda rows=rows: compute(rows))  # type: ignore[misc]
        assert torch.equal(out, weights[:rows] * 2)
        weights += 1  # as experts move
        assert not torch.equal(out, weights[:rows] * 2), "a tensor of its own"
    assert captured == [1, 2]
    assert computed == [1, 2, 1, 2, 8, 8]  # 8 rows are launched
