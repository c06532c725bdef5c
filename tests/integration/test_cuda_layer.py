"""The asynchronous layer on a pretended or a real GPU: what the eager one gives, with one wait instead of ten."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from cuda_layers import Client, Outcome, Setup, run
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_gpu import GPUS

from ndp_device.transport.sender_thread import SenderThread
from vllm_ndp.integration.cuda import packet
from vllm_ndp.integration.cuda.messenger import Messenger
from vllm_ndp.integration.cuda.packet import RowForm
from vllm_ndp.integration.cuda.streams import pinned_for
from vllm_ndp.integration.hot_slots import CudaSlotKernel
from vllm_ndp.layer.split import Splitter
from vllm_ndp.layer.tiers import Tiers

LAYERS = 3


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_experts = draw(st.sampled_from([2, 5, 8]))
    top_k = draw(st.integers(1, min(num_experts, 4)))
    num_rows = draw(st.integers(1, 6))
    num_slots = draw(st.integers(0, num_experts))
    filled = draw(st.integers(max(num_slots - 1, 0), num_slots))  # a slot may hold nothing yet
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    maps = np.full((LAYERS, num_experts), -1)
    for row in maps:
        row[random.permutation(num_experts)[:filled]] = random.permutation(num_slots)[:filled]
    requests = draw(st.integers(1, num_rows))
    return Setup(
        maps=maps,
        num_slots=num_slots,
        ids=np.argsort(random.random((LAYERS, num_rows, num_experts)))[..., :top_k].astype(np.int32),
        weights=random.random((LAYERS, num_rows, top_k)).astype(np.float32),
        bits=random.integers(0, 5, (requests, LAYERS, num_experts)).astype(np.uint8),
        owners=sorted([*range(requests), *random.integers(0, requests, num_rows - requests).tolist()]),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        silent=frozenset(draw(st.sets(st.integers(0, LAYERS - 1), max_size=2))),
        weighs_input=draw(st.booleans()) and top_k == 1,
        slot_bits=draw(st.sampled_from([16, 16, 8, 4])),
        seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


def compare(asynchronous: Outcome, eager: Outcome) -> None:
    assert torch.equal(asynchronous.out, eager.out)
    assert asynchronous.pairs == eager.pairs
    assert asynchronous.now_ps == eager.now_ps
    assert all(torch.equal(a, b) for a, b in zip(asynchronous.sidecar, eager.sidecar, strict=True))
    assert len(asynchronous.messages) == len(eager.messages)
    for mine, theirs in zip(asynchronous.messages, eager.messages, strict=True):
        for name, value in mine.items():
            assert np.array_equal(value, theirs[name]), name


@pytest.mark.parametrize("on", GPUS)
@settings(max_examples=30)
@given(setups())
def test_results_messages_counts_and_simulated_time_are_those_of_the_eager_layer(on: str, setup: Setup) -> None:
    compare(run(setup, asynchronous=True, on=on), run(setup, asynchronous=False, on=on))


@pytest.mark.parametrize("on", GPUS)
@settings(max_examples=25)
@given(setups(), st.integers(0, 3))
def test_a_step_as_one_graph_gives_what_its_layers_give_one_by_one_with_padding_behind(
    on: str, setup: Setup, padding: int
) -> None:
    if setup.weighs_input:  # refused when the engine starts
        return
    padded = dataclasses.replace(setup, padding=padding, slot_bits=16)
    mine, count = run(padded, asynchronous=True, as_graph=True, on=on), len(setup.owners)
    eager = run(dataclasses.replace(padded, padding=0), asynchronous=True, on=on)
    if not padding:
        compare(mine, eager)
    near = {"rtol": 1e-4, "atol": 1e-4} if setup.dtype is torch.float32 else {"rtol": 0.1, "atol": 0.05}
    torch.testing.assert_close(mine.out[:count], eager.out, **near)  # matrices of more rows round otherwise
    assert mine.pairs == eager.pairs
    assert mine.now_ps == eager.now_ps
    assert all(torch.equal(a, b) for a, b in zip(mine.sidecar, eager.sidecar, strict=True))


@pytest.mark.parametrize("on", GPUS)
@settings(max_examples=40)
@given(setups(), st.integers(0, 2**16))
def test_what_the_hosts_cpu_computes_beside_is_added_too_and_counted_alike(on: str, setup: Setup, seed: int) -> None:
    """Sums of a row that both computed are rounded once, where the eager layer rounds twice."""
    is_warm = np.random.default_rng(seed).random(setup.maps.shape) < 0.5
    tiers = dataclasses.replace(setup, maps=np.where((setup.maps == -1) & is_warm, -2, setup.maps))
    mine, eager = run(tiers, asynchronous=True, on=on), run(tiers, asynchronous=False, on=on)
    near = {"rtol": 1e-4, "atol": 1e-4} if setup.dtype is torch.float32 else {"rtol": 0.1, "atol": 0.05}
    torch.testing.assert_close(mine.out, eager.out, **near)
    assert mine.pairs == eager.pairs
    assert mine.now_ps == eager.now_ps
    assert [message["layer"] for message in mine.messages] == [message["layer"] for message in eager.messages]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["eager", "asynchronous"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("hot", [0, 3, 8])
def test_a_layer_gives_what_a_router_and_its_experts_give_by_hand_wherever_they_are(
    asynchronous: bool, padding: int, weighs_input: bool, hot: int
) -> None:
    """The router's weight counts once, on the way in or on the way out, and padding stays behind the rows."""
    random = np.random.default_rng(hot)
    top_k, num_rows = 1 if weighs_input else 3, 5
    setup = Setup(
        maps=np.tile(np.where(np.arange(8) < hot, np.arange(8), -1), (LAYERS, 1)),
        num_slots=hot,
        ids=np.argsort(random.random((LAYERS, num_rows, 8)))[..., :top_k].astype(np.int32),
        weights=random.uniform(0.2, 2, (LAYERS, num_rows, top_k)).astype(np.float32),
        bits=np.full((1, LAYERS, 8), 3, np.uint8),
        owners=[0] * num_rows,
        dtype=torch.float32,
        weighs_input=weighs_input,
        padding=padding,
    )
    outcome = run(setup, asynchronous=asynchronous)
    torch.testing.assert_close(outcome.out[:num_rows], outcome.right, rtol=1e-4, atol=1e-5)
    assert not outcome.out[num_rows:].any()
    assert len(outcome.out) == num_rows + padding


def mixtral(num_slots: int, num_rows: int = 1) -> Setup:
    """8 experts, 2 chosen, the first num_slots of them hot; of the two one is cold wherever there are both kinds."""
    maps = np.tile(np.where(np.arange(8) < num_slots, np.arange(8), -1), (LAYERS, 1))
    return Setup(
        maps=maps,
        num_slots=num_slots,
        ids=np.tile(np.array([0, 7], np.int32), (LAYERS, num_rows, 1)),
        weights=np.full((LAYERS, num_rows, 2), 0.5, np.float32),
        bits=np.full((1, LAYERS, 8), 3, np.uint8),
        owners=[0] * num_rows,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize(
    ("num_slots", "num_rows", "eager", "asynchronous"),
    [(4, 1, 3, 1), (8, 1, 1, 0), (0, 1, 3, 1), (4, 3, 5, 1)],
    ids=["half hot", "all hot", "none hot", "one of three rows is not sent"],
)
def test_host_waits_per_layer_before_and_after(num_slots: int, num_rows: int, eager: int, asynchronous: int) -> None:
    """Of a decode layer with a cold pair. docs/gpu.md has these numbers. The eager one picks the rows that are sent on
    the way there and on the way back."""
    setup = mixtral(num_slots, num_rows)
    setup.ids[:, 1:2] = [0, 1]  # of several rows one has no cold pair
    assert run(setup, asynchronous=False).waits_by_layer == [eager] * LAYERS
    assert run(setup, asynchronous=True).waits_by_layer == [asynchronous] * LAYERS


def test_counts_of_layers_that_waited_for_nothing_arrive_in_one_copy_when_the_report_is_asked_for() -> None:
    assert run(mixtral(8), asynchronous=True).waits_at_end == 1
    assert run(mixtral(4), asynchronous=True).waits_at_end == 0


def test_the_device_is_asked_before_the_hot_experts_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """To launch holds the interpreter for 150 us, in which the device computes already."""
    order = list[str]()

    def noted(owner: type, name: str, what: str) -> None:
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (order.append(what), inner(*args))[1])

    noted(Client, "begin_execute", "asked")
    noted(CudaSlotKernel, "run_named", "launched")
    noted(Client, "finish_execute", "answered")
    run(mixtral(4), asynchronous=True)
    assert order == ["asked", "launched", "answered"] * LAYERS


@pytest.mark.parametrize("cores", [2, 3])
def test_a_thread_sends_only_where_host_and_device_leave_it_a_core(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """On two cores the host's own way takes less time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    cpu = torch.device("cpu")
    messenger = Messenger(pinned_for(cpu), cpu, RowForm(2, 16, torch.float32), packet, SenderThread())
    splitter = Splitter(Tiers(1, 4), 2, weighs_input=False, aliases=False)
    assert (messenger.packet(1).order(splitter, 0) is not None) is (cores == 3)
