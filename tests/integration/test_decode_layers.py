"""The native layer of few decode rows against what it replaces: the same routing, split, message, counts and time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from engines import PROMPTS, REPLICAS, engine, greedy, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ndp_device.decoder_layers import DecoderLayer
from ndp_device.timing.shapes import public_shape
from ndp_device.timing.spec import load_hardware
from vllm_ndp.integration import _decode_layers, few_rows
from vllm_ndp.integration._decode_layers import MOST_PAIRS, DecodeLayers
from vllm_ndp.integration.few_rows import hot_experts_ps, price_tables
from vllm_ndp.integration.hot_slots import ALIAS_PAIRS
from vllm_ndp.integration.pairs import Split, add_sums, split_arrays, split_lists
from vllm_ndp.simulation.balance import Balancer, LayerLoad
from vllm_ndp.simulation.gpu_timing import GpuModel, StepClock

LAYERS, ENTRIES, HIDDEN = 2, 192, 8
NO_TIME = [0] * LAYERS
HARDWARE = load_hardware("h100-ndp512")
MIXTRAL = public_shape("mixtral-8x7b")
DENSE = DecoderLayer(attention=MIXTRAL.decoder[0].attention, dense_weights=12345)
PLAIN = GpuModel(HARDWARE, replace(MIXTRAL, num_layers=LAYERS, decoder=MIXTRAL.decoder[:LAYERS]))
BESIDE = GpuModel(HARDWARE, replace(PLAIN.shape, decoder=(*PLAIN.shape.decoder, DENSE), shared_weights=50))
"""A dense layer before the first, and shared experts that take about as long as the prices drawn below."""
DENORMAL = 1e-45
WEIGHTS = st.sampled_from([0.0, -0.0, DENORMAL, 0.1, 0.25, 0.3, 0.5, 1.0]) | st.floats(0, 4, width=32)


@dataclass(frozen=True)
class DrawnCosts:
    """Prices in ps as Balancer asks for them; any will do, exact sums in floats are not to be expected."""

    device: list[float]
    gpu: float
    link: float
    device_fill_ps: float
    model: GpuModel

    def device_expert_ps(self, bits: int, tokens: int) -> float:
        return self.device[bits % len(self.device)] * (1 + (tokens - 1) // 4)

    def resident_ps(self, touched: int, pairs: int) -> float:
        return self.gpu * touched + 0.1 * pairs

    def shared_ps(self, rows: int) -> int:
        return self.model.shared_ps(rows)

    def link_ps(self, rows: int, pairs: int) -> float:
        return self.link + 0.3 * rows + 0.7 * pairs


@dataclass
class Case:
    num_experts: int
    top_k: int
    maps: NDArray[np.int32]  # [L, E]
    ids: NDArray[np.int32]  # [L, T, k]
    weights: NDArray[np.float32]  # [L, T, k]
    owners: list[int]  # [T]
    bits: NDArray[np.uint8]  # [R, L, E]
    entries: list[int]  # [T]
    balancer: Balancer | None
    model: GpuModel
    weighs_input: bool
    device_ps: list[int | None]  # [L], None: no answer


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts = draw(st.sampled_from([1, 2, 8, 60, 512]))
    top_k = draw(st.integers(1, min(num_experts, 22)))
    num_rows = draw(st.integers(1, MOST_PAIRS // top_k))
    num_hot = draw(st.sampled_from([0, 1, num_experts // 2, num_experts]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    maps = np.full((LAYERS, num_experts), -1, np.int32)
    for row in maps:
        row[random.permutation(num_experts)[:num_hot]] = random.permutation(num_hot)
    requests = draw(st.integers(1, num_rows))
    owners = sorted([*range(requests), *random.integers(0, requests, num_rows - requests).tolist()])
    # Few experts are popular, so that rows share them.
    ids = np.stack(
        [
            [np.argsort(random.random(num_experts) ** (1 + np.arange(num_experts)))[:top_k] for _ in range(num_rows)]
            for _ in range(LAYERS)
        ]
    ).astype(np.int32)
    drawn = draw(st.lists(WEIGHTS, min_size=4, max_size=12))
    weights = random.choice(np.array(drawn, np.float32), (LAYERS, num_rows, top_k))
    bits = random.choice(np.array([0, 1, 2, 3, 4, 16], np.uint8), (requests, LAYERS, num_experts))
    device, gpu, link = st.floats(0.1, 10), st.floats(0.1, 100), st.floats(0, 3)  # so that offloading often pays
    model = draw(st.sampled_from([PLAIN, BESIDE]))
    costs = DrawnCosts(draw(st.lists(device, min_size=1, max_size=5)), draw(gpu), draw(link), draw(link), model)
    hosts = draw(st.sampled_from([1, 1, 2, 5]))
    balancer = Balancer(costs, draw(st.sampled_from([1, 2, 3, 4])), hosts)  # type: ignore[arg-type]
    return Case(
        num_experts,
        top_k,
        maps,
        ids,
        weights,
        owners,
        bits,
        random.permutation(ENTRIES)[:num_rows].tolist(),
        draw(st.sampled_from([balancer, balancer, None])),
        model,
        draw(st.booleans()),
        draw(st.lists(st.none() | st.integers(1, 10**12), min_size=LAYERS, max_size=LAYERS)),
    )


class Buffers:
    def __init__(self, case: Case) -> None:
        self.ids = np.full((LAYERS, ENTRIES, case.top_k), -7, np.int16)
        self.weights = np.full((LAYERS, ENTRIES, case.top_k), -7, np.float32)
        self.slots = np.empty(MOST_PAIRS, np.int32)
        self.topk_weights = np.empty(MOST_PAIRS, np.float32)
        self.sent_rows = np.empty(MOST_PAIRS, np.int64)
        self.pair_rows = np.empty(MOST_PAIRS, np.int32)
        self.pair_experts = np.empty(MOST_PAIRS, np.int32)
        self.pair_bits = np.empty(MOST_PAIRS, np.uint8)
        self.pair_weights = np.empty(MOST_PAIRS, np.float32)
        self.activations = np.empty((MOST_PAIRS, HIDDEN), np.float32)
        self.hot_rows = np.empty(MOST_PAIRS, np.int64)

    def native(self, case: Case, model: GpuModel) -> DecodeLayers:
        native = DecodeLayers(
            self.ids,
            self.weights,
            list(case.maps),
            hot_experts_ps(model),
            model.hardware.gpu.layer_overhead_ps,
            self.slots,
            self.topk_weights,
            self.sent_rows,
            self.pair_rows,
            self.pair_experts,
            self.pair_bits,
            self.pair_weights,
            self.activations.view(np.uint8),
            self.hot_rows,
            case.weighs_input,
        )
        if case.balancer is not None:
            native.price(case.balancer.offload_bits, *price_tables(case.balancer), case.balancer.device_ps)
        return native


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """0.0 and -0.0 differ."""
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def load_of(
    is_hot: NDArray[np.bool_], ids: NDArray[np.int32], gates: NDArray[np.float32], bits: NDArray[np.uint8]
) -> LayerLoad:
    """As the Python layer asks, by the number of pairs."""
    if ids.size <= ALIAS_PAIRS:
        return LayerLoad.of_lists(is_hot.tolist(), ids.tolist(), gates.tolist(), bits)
    return LayerLoad.of_arrays(is_hot, ids.astype(np.int64), gates, bits)


def split_of(expert_map: list[int], ids: NDArray[np.int32], applied: NDArray[np.float32]) -> Split:
    if ids.size <= ALIAS_PAIRS:
        return split_lists(expert_map, ids.tolist(), applied.tolist(), torch.from_numpy(applied))
    tensors = torch.tensor(expert_map, dtype=torch.int32), torch.from_numpy(ids), torch.from_numpy(applied)
    return split_arrays(*tensors, np.ones(len(ids), bool))


@given(cases())
@settings(max_examples=150)
def test_the_native_layer_is_the_python_layer_to_the_bit_and_the_picosecond(case: Case) -> None:
    buffers = Buffers(case)
    native, clock = buffers.native(case, case.model), StepClock(case.model, now_ps=17)
    num_rows, requests = len(case.owners), len(case.bits)
    owner = np.array(case.owners)
    clock.begin_step(num_rows, 1000, 1234)
    native.begin_step(case.entries, case.owners, list(case.bits), clock.now_ps, clock.before_ps, clock.shared_ps)
    counts = np.zeros((requests, 3), np.int64)
    x = np.random.default_rng(0).random((num_rows, HIDDEN), np.float32)
    for layer in range(LAYERS):
        ids, weights = case.ids[layer], case.weights[layer]
        expert_map, offloaded = case.maps[layer].tolist(), frozenset[int]()
        if case.balancer is not None:
            offloaded = case.balancer.offloaded(load_of(case.maps[layer] >= 0, ids, weights, case.bits[owner, layer]))
            expert_map = [-1 if expert in offloaded else slot for expert, slot in enumerate(expert_map)]
        applied = np.ones_like(weights) if case.weighs_input else weights
        split = split_of(expert_map, ids, applied)
        submit_ps = clock.begin_layer()

        count = native.split(layer, ids.ctypes.data, weights.ctypes.data, case.balancer is not None)

        assert count == len(split.device.rows)
        assert native.submit_ps == submit_ps
        assert native.moved() == sorted(offloaded)
        assert np.array_equal(buffers.ids[layer, case.entries], ids)
        assert same_bits(buffers.weights[layer, case.entries], weights)
        assert native.num_hot == sum(split.hot.counts)
        assert native.is_listed == (ids.size > ALIAS_PAIRS)
        assert native.idle_rows == (split.hot.idle_rows or [])
        if split.hot.counts:
            slots, topk_weights = split.hot.slots.flatten(), split.hot.topk_weights.flatten()
            if native.is_listed:
                here = slots >= 0
                rows = np.repeat(np.arange(num_rows), case.top_k)[here.numpy()]
                assert buffers.hot_rows[: native.num_hot].tolist() == rows.tolist()
                slots, topk_weights = slots[here], topk_weights[here]
            assert buffers.slots[: len(slots)].tolist() == slots.tolist()
            assert same_bits(buffers.topk_weights[: len(slots)], topk_weights.numpy())
        device_ps = case.device_ps[layer]
        if count:
            sent, local = np.unique(split.device.rows, return_inverse=True)
            bits = case.bits[owner[split.device.rows], layer, split.device.experts]
            if offloaded and case.balancer is not None:
                bits[bits == 0] = case.balancer.offload_bits
            assert buffers.sent_rows[: native.num_sent].tolist() == sent.tolist()
            assert buffers.pair_rows[:count].tolist() == local.tolist()
            assert buffers.pair_experts[:count].tolist() == split.device.experts.tolist()
            assert buffers.pair_bits[:count].tolist() == bits.tolist()
            assert same_bits(buffers.pair_weights[:count], split.device.topk_weights)
            native.gather(x.ctypes.data, x.strides[0])
            assert same_bits(buffers.activations[: native.num_sent], x[sent])
            distinct = len(set(split.device.experts.tolist()))
            kinds = [2 if device_ps is None else int(e in offloaded) for e in split.device.experts.tolist()]
            np.add.at(counts, (owner[split.device.rows], kinds), 1)
            stream_ps = case.model.prefill_stream_ps(distinct, count) if device_ps is None else 0
            native.end_layer(device_ps or 0, stream_ps, device_ps is not None)
            clock.end_layer(
                split.hot.counts,
                device_ps=device_ps or 0,
                streamed_experts=distinct if device_ps is None else 0,
                streamed_pairs=count if device_ps is None else 0,
            )
        else:
            clock.end_layer(split.hot.counts)
        assert native.now_ps == clock.now_ps
    assert native.counts() == counts.tolist()
    assert (buffers.ids[:, sorted(set(range(ENTRIES)) - set(case.entries))] == -7).all()


def test_pairs_are_aliased_up_to_the_same_number_in_both() -> None:
    assert _decode_layers.ALIAS_PAIRS == ALIAS_PAIRS < MOST_PAIRS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_partial_sums_are_added_as_torch_adds_them(dtype: torch.dtype, case: Case, seed: int) -> None:
    native = Buffers(case).native(case, PLAIN)
    native.begin_step(case.entries, case.owners, list(case.bits), 0, NO_TIME, 0)
    if not native.split(0, case.ids[0].ctypes.data, case.weights[0].ctypes.data, False):
        return
    sent = np.unique([row for row, ids in enumerate(case.ids[0]) if (case.maps[0][ids] < 0).any()])
    random = np.random.default_rng(seed)
    scale = random.choice([1e-39, 1e-3, 1.0, 1e38], (len(case.owners), 1))
    out = torch.from_numpy(random.uniform(-3, 3, (len(case.owners), HIDDEN)) * scale).to(dtype)
    sums = (random.uniform(-3, 3, (len(sent), HIDDEN)) * scale[sent]).astype(np.float32)
    expected = out.clone()
    add_sums(expected, sums, sent)
    native.add(out.data_ptr(), sums, dtype is torch.bfloat16)
    assert np.array_equal(out.float().numpy(), expected.float().numpy(), equal_nan=True)


def small_case(balancer: Balancer | None = None) -> Case:
    """Two rows of one request; expert 0 is hot, expert 1 is cold."""
    return Case(
        num_experts=2,
        top_k=1,
        maps=np.array([[0, -1]] * LAYERS, np.int32),
        ids=np.array([[[0], [1]]] * LAYERS, np.int32),
        weights=np.ones((LAYERS, 2, 1), np.float32),
        owners=[0, 0],
        bits=np.full((1, LAYERS, 2), 3, np.uint8),
        entries=[4, 5],
        balancer=balancer,
        model=PLAIN,
        weighs_input=False,
        device_ps=[1] * LAYERS,
    )


def test_an_expert_that_does_not_exist_is_refused_before_anything_is_written() -> None:
    case = small_case()
    buffers = Buffers(case)
    native = buffers.native(case, PLAIN)
    native.begin_step(case.entries, case.owners, list(case.bits), 0, NO_TIME, 0)
    for wrong in (-1, 2):
        ids = np.array([[0], [wrong]], np.int32)
        with pytest.raises(ValueError, match=r"expert ids must lie in 0\.\.E-1"):
            native.split(0, ids.ctypes.data, case.weights.ctypes.data, False)
    assert (buffers.ids == -7).all()


def test_a_layer_must_end_before_the_next_begins() -> None:
    case = small_case()
    buffers = Buffers(case)
    native = buffers.native(case, PLAIN)
    with pytest.raises(RuntimeError, match="between begin_step and end_layer"):
        native.split(0, case.ids.ctypes.data, case.weights.ctypes.data, False)
    native.begin_step(case.entries, case.owners, list(case.bits), 0, NO_TIME, 0)
    assert native.split(0, case.ids.ctypes.data, case.weights.ctypes.data, False) == 1
    with pytest.raises(RuntimeError, match="between begin_step and end_layer"):
        native.split(1, case.ids.ctypes.data, case.weights.ctypes.data, False)
    native.end_layer(5, 0, True)
    with pytest.raises(RuntimeError, match="split must come first"):
        native.end_layer(5, 0, True)


def test_rows_outside_the_cache_or_without_a_plan_are_refused() -> None:
    case = small_case()
    native = Buffers(case).native(case, PLAIN)
    for entries, owners in (([4, ENTRIES], [0, 0]), ([4, -1], [0, 0]), ([4, 5], [0, 1]), ([4, 5], [0]), ([], [])):
        with pytest.raises(ValueError, match=r"KV entry|no plan|owner|1\.\.128"):
            native.begin_step(entries, owners, list(case.bits), 0, NO_TIME, 0)


def test_offloading_needs_prices() -> None:
    case = small_case()
    native = Buffers(case).native(case, PLAIN)
    native.begin_step(case.entries, case.owners, list(case.bits), 0, NO_TIME, 0)
    with pytest.raises(ValueError, match="offloading needs prices"):
        native.split(0, case.ids.ctypes.data, case.weights.ctypes.data, True)


def test_an_error_while_a_price_is_asked_reaches_the_caller_and_the_next_step_is_sound() -> None:
    class Unknown(DrawnCosts):
        def device_expert_ps(self, bits: int, tokens: int) -> float:
            raise LookupError("no price")

    case = small_case(Balancer(Unknown([1.0], 1.0, 1.0, 1.0, PLAIN), 3))  # type: ignore[arg-type]
    native = Buffers(case).native(case, PLAIN)
    native.begin_step(case.entries, case.owners, list(case.bits), 0, NO_TIME, 0)
    with pytest.raises(LookupError, match="no price"):
        native.split(0, case.ids.ctypes.data, case.weights.ctypes.data, True)
    native.begin_step(case.entries, case.owners, list(case.bits), 0, NO_TIME, 0)
    assert native.split(0, case.ids.ctypes.data, case.weights.ctypes.data, False) == 1


NATIVE = f"native up to {MOST_PAIRS} pairs"


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_gives_the_same_tokens_counts_and_simulated_times_with_and_without_the_native_layer(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 rows of 2 pairs are aliased, 20 are listed."""
    found = {}
    for path in (NATIVE, "Python"):
        if path == "Python":
            monkeypatch.setattr(few_rows, "BUILT", False)
        chosen = {"hot_experts": 4, "avg_bits": 3.0, "replicas": str(REPLICAS)}
        with engine(settings=chosen, dtype=dtype, max_num_seqs=20) as llm:
            status = llm.collective_rpc("ndp_status")[0]
            outputs = [*greedy(llm, PROMPTS, 24), *greedy(llm, PROMPTS * 5, 12)]
            totals = llm.collective_rpc("ndp_totals")[0]
        assert status["decode_layers"] == path
        reports = [output.kv_transfer_params["ndp"] for output in outputs]
        assert sum(report["cold_pairs"] + report["spilled_pairs"] for report in reports) > 0
        kept = [{k: v for k, v in report.items() if not k.startswith("measured_")} for report in reports]
        found[path] = token_ids(outputs), kept, totals
    assert found[NATIVE] == found["Python"]
