"""Cold experts of prompts: what is streamed and what the device computes, against every other way to share them."""

from itertools import chain, combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndp_device.protocol.messages import MAX_BODY_BYTES, MAX_TOKENS
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import PAIR_BYTES, Work, execute_bytes
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.layer.prefill_split import PrefillSplit, num_streamed

MIXTRAL = Costs(load_hardware("h100-ndp512"), public_shape("mixtral-8x7b"))
QWEN = Costs(load_hardware("h100-ndp512"), public_shape("qwen3-30b-a3b"))


def layer_ps(streamed: tuple[int, ...], device_ps: list[int], copy_ps: int, opening_ps: int, beside_ps: int) -> int:
    """Experts by their places: the later of both sides."""
    there = [ps for place, ps in enumerate(device_ps) if place not in streamed]
    return max(len(streamed) * copy_ps, beside_ps + sum(there) + (opening_ps if there else 0))


@given(
    st.lists(st.integers(0, 30), max_size=7),
    st.integers(0, 20),
    st.integers(0, 9),
    st.integers(0, 40),
)
def test_no_other_division_of_the_experts_ends_sooner_and_none_as_soon_streams_more(
    device_ps: list[int], copy_ps: int, opening_ps: int, beside_ps: int
) -> None:
    device_ps = sorted(device_ps, reverse=True)
    chosen = num_streamed(device_ps, lambda n: n * copy_ps, opening_ps=opening_ps, beside_ps=beside_ps)
    every = chain.from_iterable(combinations(range(len(device_ps)), n) for n in range(len(device_ps) + 1))
    times = {subset: layer_ps(subset, device_ps, copy_ps, opening_ps, beside_ps) for subset in every}
    best = min(times.values())
    assert times[tuple(range(chosen))] == best
    assert chosen == max(len(subset) for subset, time in times.items() if time == best)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(0, 7))
def test_a_message_that_would_be_too_large_leaves_at_least_so_many_to_be_streamed(
    device_ps: list[int], least: int
) -> None:
    device_ps = sorted(device_ps, reverse=True)
    least = min(least, len(device_ps))
    chosen = num_streamed(device_ps, lambda n: 10 * n, least=least)
    allowed = {n: max(10 * n, sum(device_ps[n:])) for n in range(least, len(device_ps) + 1)}
    assert allowed[chosen] == min(allowed.values())


def simulated_ps(costs: Costs, experts: np.ndarray, on_device: np.ndarray) -> int:
    """The layer's cold experts of prompt rows as the clock times them; pairs are in the order of their rows."""
    shape, there = costs.shape, np.isin(experts, on_device)
    streamed = experts[~there]
    stream_ps = costs.gpu.prefill_stream_ps(len(np.unique(streamed)), len(streamed))
    if not there.any():
        return stream_ps
    _, rows = np.unique(experts[there], return_counts=True)
    works = tuple((16, int(n), costs.replica_bytes(16)) for n in rows)
    sizes = execute_bytes(int(there.sum()), int(there.sum()), shape.hidden_size, shape.dtype_bytes)
    work = Work(shape.hidden_size, shape.intermediate_size, *sizes, works)
    return max(stream_ps, DeviceModel(costs.hardware).execute(work, 0).total_ps)


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1024])
def test_on_real_prices_no_subset_of_four_experts_is_simulated_much_faster(tokens: int) -> None:
    """Prices are means over the refresh interval and count a row for every pair: within 3 % of the best of 16."""
    rng = np.random.default_rng(tokens)
    experts = rng.choice(np.arange(4, 8), size=tokens, p=[0.4, 0.3, 0.2, 0.1])
    chosen = simulated_ps(MIXTRAL, experts, PrefillSplit(MIXTRAL).of_counts(*np.unique(experts, return_counts=True)))
    subsets = chain.from_iterable(combinations(range(4, 8), n) for n in range(5))
    assert chosen <= 1.03 * min(simulated_ps(MIXTRAL, experts, np.array(s, np.int64)) for s in subsets)


def test_decode_rows_in_the_message_leave_less_of_the_device_to_prompts() -> None:
    experts = np.repeat(np.arange(64, 128), 16)
    alone = PrefillSplit(QWEN).of_counts(*np.unique(experts, return_counts=True))
    many = np.arange(64, 128).repeat(8)
    beside = PrefillSplit(QWEN).of_counts(
        *np.unique(experts, return_counts=True), many, np.full(len(many), 3, np.uint8)
    )
    assert 0 < len(beside) < len(alone)


@pytest.mark.parametrize("bits", [16, 4])
def test_an_expert_that_decode_rows_ask_for_at_the_same_width_costs_its_added_rows_only(bits: int) -> None:
    """Two rows more of an expert read for two are free; two rows of another one are a read of their own."""
    split = PrefillSplit(MIXTRAL, bits=bits)
    added = split._added_ps(np.array([2, 2]), np.array([2, 0]))
    assert added[0] == 2 * split._pair_ps < added[1]
    others = PrefillSplit(MIXTRAL, bits=20 - bits)._added_ps(np.array([2]), np.array([0]))
    assert (added[1] > others[0]) == (bits == 16)


def test_what_one_message_holds_is_bounded() -> None:
    """The body of the answer, float32 rows, and of the request fit the protocol, whatever the chunk."""
    split = PrefillSplit(MIXTRAL)
    rows = split.most_pairs
    assert rows <= MAX_TOKENS
    assert rows * (4 * MIXTRAL.shape.hidden_size + PAIR_BYTES) <= MAX_BODY_BYTES
    experts = np.repeat(np.arange(2, 8), 2 * rows // 5)
    there = split.of_counts(*np.unique(experts, return_counts=True))
    assert np.isin(experts, there).sum() <= rows


@settings(max_examples=200)
@given(st.data())
def test_the_division_of_a_prompt_is_the_best_that_one_message_holds(data) -> None:  # type: ignore[no-untyped-def]
    """By prices that are no hardware's, beside decode rows or alone, against every number of streamed experts."""
    rows = np.array(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)))
    decode = data.draw(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([2, 16])), max_size=6))
    copy, opening, beside = data.draw(st.tuples(st.integers(1, 60), st.integers(0, 40), st.sampled_from([1.0, 0.5])))
    most = data.draw(st.sampled_from([12, 20, 1000]))

    def expert_ps(bits: int, count: int) -> int:
        return bits + count if count else 0

    prices: Any = SimpleNamespace(
        expert_ps=lambda tier, bits, count: {"device": expert_ps(bits, count)}[tier],
        message_ps=lambda rows, pairs: opening + 2 * pairs,
        streamed_ps=lambda experts, pairs: copy * experts + pairs,
        beside=beside,
    )
    hidden_size = ((64 << 20) // (most + 1) - PAIR_BYTES) // 4
    costs: Any = SimpleNamespace(shape=SimpleNamespace(hidden_size=hidden_size))
    split, ids = PrefillSplit(costs, prices, data.draw(st.sampled_from([2, 16]))), np.arange(len(rows))
    assert split.most_pairs == most
    of_decode = np.array([e for e, _ in decode], np.int64), np.array([bits for _, bits in decode], np.uint8)
    there = split.of_counts(ids, rows, *of_decode)

    groups = {group: decode.count(group) for group in decode}
    known = [groups.get((expert, split.bits), 0) for expert in ids.tolist()]
    added = [
        expert_ps(split.bits, int(n) + there) - expert_ps(split.bits, there) + 2 * int(n)
        for n, there in zip(rows, known, strict=True)
    ]
    order = sorted(ids.tolist(), key=lambda expert: -added[expert])
    message = opening + 2

    def layer_ps(count: int) -> float:
        streamed = copy * count + int(rows[order[:count]].sum()) if count else 0
        device = sum(added[expert] for expert in order[count:]) + (message if decode or count < len(ids) else 0)
        device += sum(expert_ps(bits, n) for (_, bits), n in groups.items()) + 2 * len(decode)
        return max(streamed, device) + (1 - beside) * min(streamed, device)

    allowed = [n for n in range(len(ids) + 1) if n == len(ids) or rows[order[n:]].sum() + len(decode) <= most]
    best = min(layer_ps(count) for count in allowed)
    chosen = max(count for count in allowed if layer_ps(count) == best)
    assert there.tolist() == sorted(order[chosen:])


def test_nothing_cold_is_nothing_to_send() -> None:
    assert not len(PrefillSplit(MIXTRAL).of_counts(np.empty(0, np.int64), np.empty(0, np.int64)))
