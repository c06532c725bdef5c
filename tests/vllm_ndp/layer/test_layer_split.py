"""The native split against the numpy yardstick, to the bit: any rows, tiers, ranks and widths."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from split_yardstick import Found, Layer, split

from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.gpu_timing import GpuModel, StepClock
from vllm_ndp.layer import _split, tiers
from vllm_ndp.layer.balance import Balancer
from vllm_ndp.layer.devices import Devices, DevicesBalancer
from vllm_ndp.layer.prefill_split import PrefillSplit
from vllm_ndp.layer.run import end_layer
from vllm_ndp.layer.split import PAIR_KINDS, Pairs, Split, Splitter
from vllm_ndp.layer.tiers import DEVICE, ELSEWHERE, STREAM, WARM, Owners, Tiers
from vllm_ndp.planning.plan import BitwidthPlan

HARDWARE = load_hardware("h100-ndp512")
LAYERS, ENTRIES = 2, 512
MIXTRAL = public_shape("mixtral-8x7b")
BYTES = {bits: 1000 * bits for bits in (0, 1, 2, 3, 4, 16)}
DENORMAL = 1e-45
WEIGHTS = st.sampled_from([0.0, -0.0, DENORMAL, 0.1, 0.25, 0.3, 0.5, 1.0]) | st.floats(0, 4, width=32)


def drawn_prices(costs: Costs, device: list[float], gpu: float, link: float, beside: float) -> Any:
    """Any prices will do; exact sums in floats are not to be expected."""
    return SimpleNamespace(
        expert_ps=lambda tier, bits, rows: device[bits % len(device)] * (1 + (rows - 1) // 4),
        hot_ps=lambda rows: gpu + 0.1 * rows,
        message_ps=lambda rows, pairs: link + 0.3 * rows + 0.7 * pairs,
        shared_ps=costs.shared_ps,
        streamed_ps=costs.streamed_ps,
        beside=beside,
    )


@dataclass
class Case:
    top_k: int
    hot: NDArray[np.bool_]  # [L, E]
    warm: NDArray[np.bool_]
    widths: NDArray[np.uint8]
    slots: list[dict[int, int]]  # of each layer: expert -> slot
    num_gpus: int  # 0: each has a part of every hot expert
    rank: int
    ids: NDArray[np.int32]  # [L, T, k]
    weights: NDArray[np.float32]
    owner: NDArray[np.int32]
    decode: NDArray[np.bool_]
    bits: NDArray[np.uint8]  # [R, L, E]
    from_weight: dict[int, NDArray[np.float32]]  # request -> [L, E, 3]
    entries: NDArray[np.int64]
    costs: Costs
    balancers: list[Balancer | DevicesBalancer] | None
    prompts: PrefillSplit | None
    weighs_input: bool
    aliases: bool
    gathers_prompts: bool
    answered: list[bool]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts = draw(st.sampled_from([1, 2, 8, 60, 512]))
    top_k = draw(st.integers(1, min(num_experts, 22)))
    num_rows = draw(st.integers(1, 12) | st.integers(1, 90))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_hot = draw(st.sampled_from([0, 1, num_experts // 2, num_experts]))
    tier = np.stack([random.permutation(num_experts) for _ in range(LAYERS)])
    hot = tier < num_hot
    warm = ~hot & (tier < num_hot + draw(st.sampled_from([0, 0, num_experts // 4])))
    requests = draw(st.integers(1, num_rows))
    owner = np.sort([*range(requests), *random.integers(0, requests, num_rows - requests).tolist()]).astype(np.int32)
    decode = random.random(num_rows) < draw(st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]))
    popular = 1 + np.arange(num_experts)  # few experts are popular, so that rows share them
    ids = np.argsort(random.random((LAYERS, num_rows, num_experts)) ** popular, axis=2)[:, :, :top_k].astype(np.int32)
    drawn = np.array(draw(st.lists(WEIGHTS, min_size=4, max_size=12)), np.float32)
    widths = random.choice(np.array([1, 2, 4, 16], np.uint8), hot.shape) * hot
    shape = replace(MIXTRAL, num_layers=LAYERS, decoder=MIXTRAL.decoder[:LAYERS])
    shape = replace(shape, num_experts=num_experts, top_k=top_k)
    costs = Costs(HARDWARE, shape)
    some, much, little = st.floats(0.1, 10), st.floats(0.1, 100), st.floats(0, 3)  # so that offloading often pays
    beside = draw(st.sampled_from([1.0, 1.0, 0.3]))
    prices = drawn_prices(costs, draw(st.lists(some, min_size=1, max_size=5)), draw(much), draw(little), beside)
    rule = Balancer(prices or costs, draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2, 5])))
    balancers: list[Balancer | DevicesBalancer] = [rule] * LAYERS
    kind = draw(st.sampled_from(["none", "one", "one", "several"]))
    if kind == "several":
        devices = Devices(costs, BYTES, 2, draw(st.integers(1, 2)))
        alive = draw(st.sampled_from([(True, True), (True, False)]))
        balancers = devices.balancers(rule, lambda: alive)[:LAYERS]
    num_gpus = draw(st.sampled_from([0, 0, 1, 2, 3]))
    return Case(
        top_k,
        hot,
        warm,
        widths,
        [dict(zip(np.flatnonzero(row).tolist(), random.permutation(num_hot).tolist(), strict=True)) for row in hot],
        num_gpus,
        draw(st.integers(0, max(num_gpus - 1, 0))),
        ids,
        random.choice(drawn, ids.shape),
        owner,
        decode,
        random.choice(np.array([1, 2, 3, 4, 16], np.uint8), (requests, LAYERS, num_experts)) * ~hot,
        {
            request: np.sort(random.choice(np.append(drawn, np.float32(np.inf)), (LAYERS, num_experts, 3)), axis=2)
            for request in np.flatnonzero(random.random(requests) < draw(st.sampled_from([0.0, 0.5, 1.0]))).tolist()
        },
        random.permutation(ENTRIES)[:num_rows],
        costs,
        None if kind == "none" else balancers,
        draw(st.sampled_from([PrefillSplit(costs), PrefillSplit(costs, prices, 4), None])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.lists(st.booleans(), min_size=LAYERS, max_size=LAYERS)),
    )


def tables(case: Case) -> Tiers:
    """The plan in force, with every hot expert of this rank in its slot."""
    found = Tiers(
        *case.hot.shape, owners=Owners(case.num_gpus, *case.hot.shape) if case.num_gpus else None, rank=case.rank
    )
    found.activate(case.hot, case.warm, case.widths)
    for layer, slots in enumerate(case.slots):
        for expert in np.flatnonzero(found.own[layer]).tolist():
            found.where[layer, expert] = slots[expert]
    return found


def splitter_of(case: Case, table: Tiers) -> Splitter:
    return Splitter(
        table,
        case.top_k,
        balancers=case.balancers,
        prompts=case.prompts,
        host=case.costs,
        bytes_of_width=np.arange(256) * 7,
        weighs_input=case.weighs_input,
        aliases=case.aliases,
        gathers_prompts=case.gathers_prompts,
    )


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """0.0 and -0.0 differ."""
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def same_pairs(a: Pairs, b: Pairs) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a[:4], b[:4], strict=True)) and same_bits(a[4], b[4])


@given(cases())
@settings(max_examples=300)
def test_every_pair_of_a_layer_runs_where_the_yardstick_says(case: Case) -> None:
    table = tables(case)
    splitter = splitter_of(case, table)
    noted = np.full((LAYERS, ENTRIES, case.top_k), -7, np.int16), np.full((LAYERS, ENTRIES, case.top_k), -7, np.float32)
    splitter.note_into(*noted)
    plans = [BitwidthPlan(bits, case.from_weight.get(request)) for request, bits in enumerate(case.bits)]
    counts = splitter.begin_step(case.owner, case.decode, plans, case.entries)
    expected_counts = np.zeros_like(counts)
    model = GpuModel(HARDWARE, case.costs.shape, whole_experts=case.num_gpus > 0)
    clock, other = StepClock(model), StepClock(model)
    for each in (clock, other):
        each.begin_step(len(case.owner), 1000, 1234)
    for layer in range(LAYERS):
        ids, weights = np.ascontiguousarray(case.ids[layer]), np.ascontiguousarray(case.weights[layer])
        known = Layer(
            table.where[layer],
            ids,
            weights,
            case.owner,
            case.decode,
            case.bits[:, layer],
            None if table.gpus is None else table.gpus[layer],
            table.hot_bits[layer].astype(np.int64) * 7,
            {request: wider[layer] for request, wider in case.from_weight.items()},
        )
        balancer = None if case.balancers is None else case.balancers[layer]
        expected = split(
            known,
            balancer,
            case.prompts,
            case.costs,
            weighs_input=case.weighs_input,
            gathers_prompts=case.gathers_prompts,
        )

        found = splitter.split(layer, ids.ctypes.data, weights.ctypes.data, with_device=True)

        assert np.array_equal(splitter.hot.where[: ids.size].reshape(ids.shape), expected.where)
        assert splitter.native.moved() == sorted(expected.offloaded)
        for place in ("device", "warm", "stream"):
            assert same_pairs(getattr(found, place), getattr(expected, place)), place
        assert (found.num_hot, found.hot_bytes) == ((expected.where >= 0).sum(), expected.hot_bytes)
        assert found.hot_loads == expected.hot_loads
        assert (found.stream_experts, found.stream_pairs) == (len(np.unique(expected.copied)), len(expected.copied))
        assert found.host_ps == expected.host_ps
        check_layout(case, splitter, found, expected.where, weights)
        expected_counts += account_of(expected, known, answered=case.answered[layer])
        clock.begin_layer()
        end_layer(clock, splitter, found, 5 if case.answered[layer] else None)
        other.begin_layer()
        end_by_hand(other, expected, answered=case.answered[layer])
        assert clock.now_ps == other.now_ps
    assert np.array_equal(counts, expected_counts)
    assert counts.sum() == case.ids.size
    assert np.array_equal(noted[0][:, case.entries], case.ids)
    assert same_bits(noted[1][:, case.entries], case.weights)
    assert (noted[0][:, sorted(set(range(ENTRIES)) - set(case.entries.tolist()))] == -7).all()


def test_experts_and_pairs_that_no_device_answered_for_count_as_streamed() -> None:
    of_device: Any = SimpleNamespace(experts=[6, 6, 7])
    unanswered: Any = SimpleNamespace(
        hot_loads=(), hot_bytes=0, host_ps=0, stream_experts=1, stream_pairs=4, device=of_device
    )
    clock: Any = SimpleNamespace(end_layer=lambda loads, **counted: counted)
    splitter: Any = SimpleNamespace(fall_back=lambda: 3)
    counted: Any = end_layer(clock, splitter, unanswered, None)
    assert (counted["streamed_experts"], counted["streamed_pairs"]) == (3, 7)


def check_layout(
    case: Case, splitter: Splitter, found: Split, where: NDArray[np.int32], weights: NDArray[np.float32]
) -> None:
    """Hot pairs in their order: one after the other, or by row with some of weight 0."""
    applied, hot = np.ones_like(weights) if case.weighs_input else weights, where >= 0
    num_hot, is_listed = int(hot.sum()), found.num_columns == 0
    assert is_listed == (not case.aliases or where.size > _split.ALIAS_PAIRS)
    if is_listed:
        assert np.array_equal(splitter.hot.slots[:num_hot], where[hot])
        assert np.array_equal(splitter.hot.rows[:num_hot], np.nonzero(hot)[0])
        assert same_bits(splitter.hot.topk_weights[:num_hot], applied[hot])
        return
    columns = max(int(hot.sum(axis=1).max()), 1)
    assert found.num_columns == columns
    assert found.idle_rows == np.flatnonzero(~hot.any(axis=1)).tolist()
    slots = splitter.hot.slots[: len(where) * columns].reshape(-1, columns)
    laid = splitter.hot.topk_weights[: len(where) * columns].reshape(-1, columns)
    for row, here in enumerate(hot):
        own = where[row][here]
        assert np.array_equal(slots[row, : len(own)], own)
        assert same_bits(laid[row, : len(own)], applied[row][here])
        assert not laid[row, len(own) :].any()
        assert not num_hot or np.isin(slots[row], own if len(own) else where[hot]).all()


def account_of(expected: Found, known: Layer, *, answered: bool) -> NDArray[np.int64]:
    """Without an answer, what was meant for the device counts as computed here."""
    counts = expected.counts.copy()
    if not answered:
        at = {kind: PAIR_KINDS.index(kind) for kind in PAIR_KINDS}
        counts[:, at["fallback"]] = counts[:, at["cold"]] + counts[:, at["spilled"]]
        counts[:, at["prefill_fallback"]] = counts[:, at["prefill_device"]]
        counts[:, [at["cold"], at["spilled"], at["prefill_device"]]] = 0
    return counts


def end_by_hand(clock: StepClock, expected: Found, *, answered: bool) -> None:
    experts = expected.copied if answered else np.concatenate([expected.copied, expected.device.experts])
    clock.end_layer(
        expected.hot_loads,
        hot_bytes=expected.hot_bytes,
        device_ps=5 if answered else 0,
        streamed_experts=len(np.unique(experts)),
        streamed_pairs=len(experts),
        host_ps=expected.host_ps,
    )


def test_places_kinds_and_the_number_of_aliased_pairs_are_the_same_in_both_languages() -> None:
    assert (DEVICE, WARM, ELSEWHERE, STREAM) == _split.PLACES
    assert len(PAIR_KINDS) == _split.NUM_KINDS
    assert tiers.DEVICE == -1  # which the GPU's kernels test for


def small(balancer: Balancer | None = None) -> tuple[Splitter, NDArray[np.int32], NDArray[np.float32]]:
    """Two rows of one request; expert 0 is hot, expert 1 is cold."""
    table = Tiers(1, 2)
    table.activate(np.array([[True, False]]))
    table.name_all()
    found = Splitter(table, 1, balancers=None if balancer is None else [balancer])
    return found, np.array([[0], [1]], np.int32), np.ones((2, 1), np.float32)


def begin(splitter: Splitter, *, owners: tuple[int, ...] = (0, 0), entries: tuple[int, ...] | None = None) -> None:
    splitter.begin_step(
        np.array(owners, np.int32),
        np.ones(len(owners), np.bool_),
        [BitwidthPlan(np.full((1, 2), 3, np.uint8))],
        None if entries is None else np.array(entries, np.int64),
    )


def test_an_expert_that_does_not_exist_is_refused_before_anything_is_written() -> None:
    splitter, _, weights = small()
    noted = np.full((1, 8, 1), -7, np.int16), np.zeros((1, 8, 1), np.float32)
    splitter.note_into(*noted)
    begin(splitter, entries=(4, 5))
    for wrong in (-1, 2):
        ids = np.array([[0], [wrong]], np.int32)
        with pytest.raises(ValueError, match=r"expert ids must lie in 0\.\.E-1"):
            splitter.split(0, ids.ctypes.data, weights.ctypes.data, with_device=True)
    assert (noted[0] == -7).all()


def test_a_split_outside_of_a_step_is_refused() -> None:
    splitter, ids, weights = small()
    with pytest.raises(RuntimeError, match="begin_step must come first"):
        splitter.split(0, ids.ctypes.data, weights.ctypes.data, with_device=True)
    begin(splitter)
    with pytest.raises(ValueError, match="no such layer"):
        splitter.split(1, ids.ctypes.data, weights.ctypes.data, with_device=False)


def test_pairs_are_cut_anew_once_a_larger_step_has_made_other_arrays() -> None:
    splitter, ids, weights = small()
    begin(splitter)
    assert splitter.split(0, ids.ctypes.data, weights.ctypes.data, with_device=True).device.rows.tolist() == [1]
    begin(splitter, owners=(0,) * 300)
    begin(splitter)
    turned = np.ascontiguousarray(ids[::-1])
    assert splitter.split(0, turned.ctypes.data, weights.ctypes.data, with_device=True).device.rows.tolist() == [0]


def test_rows_outside_the_cache_or_without_a_plan_are_refused() -> None:
    splitter, _, _ = small()
    splitter.note_into(np.zeros((1, 8, 1), np.int16), np.zeros((1, 8, 1), np.float32))
    for entries, owners in (((4, 8), (0, 0)), ((4, -1), (0, 0)), ((4, 5), (0, 1)), ((4,), (0, 0)), ((), ())):
        with pytest.raises(ValueError, match=r"KV entry|no plan|needs rows"):
            begin(splitter, owners=owners, entries=entries)


def test_an_error_while_a_price_is_asked_reaches_the_caller_and_the_next_step_is_sound() -> None:
    class Unknown(Costs):
        def expert_ps(self, tier: str, bits: int, rows: int) -> float:
            raise LookupError("no price")

    costs = Unknown(HARDWARE, MIXTRAL)
    splitter, ids, weights = small(Balancer(costs, 3))
    begin(splitter)
    with pytest.raises(LookupError, match="no price"):
        splitter.split(0, ids.ctypes.data, weights.ctypes.data, with_device=True)
    begin(splitter)
    assert splitter.split(0, ids.ctypes.data, weights.ctypes.data, with_device=False).device.experts.tolist() == [1]
