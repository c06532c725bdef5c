"""The hot slots against arithmetic in fp64, and bit for bit against vLLM's own call over all experts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import LONG_PROMPTS, MODEL, PROMPTS, altered, engine, greedy, sentence, stock_tokens_of, token_ids
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

from ndp_device.calibration.build import build_data_free
from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import REPLICA_WIDTHS
from ndp_device.experts.expert import WHOLE
from vllm_ndp.integration.experts_pool import ExpertsPool, ExpertWeights
from vllm_ndp.integration.hot_experts import StagingStreamer
from vllm_ndp.integration.hot_slots import CpuSlotKernel, HotSlots, SlotWeights
from vllm_ndp.integration.moe_layer import HotViews
from vllm_ndp.layer.split import NO_PAIRS, Pairs, Splitter
from vllm_ndp.layer.tiers import Tiers

pytestmark = pytest.mark.vllm

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 96, 8, 2


@pytest.fixture(scope="module")
def parts():  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(0)

    def make(dtype):  # type: ignore[no-untyped-def]
        draw = lambda *shape: (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)  # noqa: E731
        experts = [
            ExpertWeights(draw(INTERMEDIATE, HIDDEN), draw(INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE))
            for _ in range(EXPERTS)
        ]
        kernel = CpuSlotKernel(dtype, HIDDEN, INTERMEDIATE, "silu")

        def slots_for(hot):  # type: ignore[no-untyped-def]
            w13 = torch.empty(len(hot), 2 * INTERMEDIATE, HIDDEN, dtype=dtype)
            w2 = torch.empty(len(hot), HIDDEN, INTERMEDIATE, dtype=dtype)
            slots = HotSlots(kernel, SlotWeights(w13, w2), Tiers(1, EXPERTS))
            for slot, expert in enumerate(hot):
                slots.migrate(slot, expert, fill_with(kernel, experts[expert]))
            return slots

        return experts, slots_for

    return make


def fill_with(kernel, weights):  # type: ignore[no-untyped-def]
    return lambda held, slot: kernel.load(held, slot, weights)


def route(num_rows, generator):  # type: ignore[no-untyped-def]
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(num_rows)])
    weights = torch.rand(num_rows, TOP_K, generator=generator)
    return (weights / weights.sum(1, keepdim=True)).float(), ids.to(torch.int32)


def hot_pairs(slots, weights, ids, *, aliases=True):  # type: ignore[no-untyped-def]
    """The pairs of these rows that lie in the slots, as a layer gives them."""
    tiers = Tiers(1, EXPERTS)
    tiers.where[0] = slots.where
    splitter = Splitter(tiers, TOP_K, aliases=aliases)
    splitter.begin_step(np.zeros(len(ids), np.int32), np.ones(len(ids), np.bool_), [None])
    split = splitter.split(0, ids.data_ptr(), weights.data_ptr(), with_device=False)
    return HotViews(splitter, ids.device).of(split, slots, ids, weights)


def by_hand(x, weights, ids, experts, hot):  # type: ignore[no-untyped-def]
    """fp64, one pair at a time, cold pairs left out."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for weight, expert in zip(weights[row].tolist(), ids[row].tolist(), strict=True):
            if expert in hot:
                w1, w3, w2 = (w.double() for w in experts[expert][:3])
                gate, up = w1 @ x[row].double(), w3 @ x[row].double()
                out[row] += weight * (w2 @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_hot", [0, 1, 3, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 17, 64])
def test_hot_slots_give_the_gate_weighted_sum_of_hot_pairs_only(parts, dtype, num_hot, num_rows) -> None:  # type: ignore[no-untyped-def]
    """Whether they are listed or laid out by row: 16 rows of 2 pairs are aliased, 17 are not."""
    generator = torch.Generator().manual_seed(num_rows * 100 + num_hot)
    experts, slots_for = parts(dtype)
    for aliases in (True, False, True, False):
        hot = torch.randperm(EXPERTS, generator=generator)[:num_hot].tolist()
        slots = slots_for(hot)
        x = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)
        weights, ids = route(num_rows, generator)
        got = slots.run(x, hot_pairs(slots, weights, ids, aliases=aliases)).double()
        want = by_hand(x, weights, ids, experts, set(hot))
        scale = want.abs().max().clamp_min(1e-9)
        assert (got - want).abs().max() / scale < (2e-6 if dtype == torch.float32 else 1.2e-2)
        rows_without = ~torch.isin(ids, torch.tensor(hot)).any(1)
        assert not got[rows_without].any(), "a row without a hot pair must be exactly 0"


def test_all_hot_is_bit_equal_to_vllms_call_over_all_experts(parts) -> None:  # type: ignore[no-untyped-def]
    experts, slots_for = parts(torch.bfloat16)
    slots = slots_for([3, 1, 7, 5, 0, 2, 6, 4])
    w13 = torch.stack([torch.cat([e.w1, e.w3]) for e in experts])
    w2 = torch.stack([e.w2 for e in experts])
    packed = cpu_prepack_moe_weight(w13, slots.kernel.isa), cpu_prepack_moe_weight(w2, slots.kernel.isa)
    generator = torch.Generator().manual_seed(5)
    for num_rows in (1, 7, 33):
        x = torch.randn(num_rows, HIDDEN, generator=generator).bfloat16()
        weights, ids = route(num_rows, generator)
        stock = torch.empty_like(x)
        cpu_fused_moe(stock, x, *packed, None, None, weights.clone(), ids, "silu", slots.kernel.isa, False)
        assert torch.equal(slots.run(x, hot_pairs(slots, weights, ids)), stock)


def test_a_foreign_experts_overflow_does_not_reach_a_row_without_hot_pairs(parts) -> None:  # type: ignore[no-untyped-def]
    """Row 1 has no hot pair and is aliased to row 0's slot, whose weights overflow for it: 0 * inf must stay 0."""
    experts, slots_for = parts(torch.float16)
    slots = slots_for([0])
    slots.migrate(0, 0, fill_with(slots.kernel, type(experts[0])(*(w * 3e4 for w in experts[0][:3]))))
    x = torch.ones(2, HIDDEN).half()
    weights = torch.full((2, TOP_K), 0.5)
    ids = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    assert not slots.run(x, hot_pairs(slots, weights, ids))[1].any()


def test_migration_replaces_an_expert_and_forgets_the_old_one(parts) -> None:  # type: ignore[no-untyped-def]
    experts, slots_for = parts(torch.float32)
    slots = slots_for([2, 4])
    slots.migrate(0, 6, fill_with(slots.kernel, experts[6]))
    assert slots.expert_map.tolist() == [-1, -1, -1, -1, 1, -1, 0, -1]
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    weights, ids = torch.full((3, TOP_K), 0.5), torch.tensor([[6, 2], [4, 6], [2, 0]], dtype=torch.int32)
    got = slots.run(x, hot_pairs(slots, weights, ids)).double()
    torch.testing.assert_close(got, by_hand(x, weights, ids, experts, {4, 6}), rtol=1e-5, atol=1e-6)


def test_what_a_staging_slot_was_filled_with_is_given_back() -> None:
    """Prices were measured through it: an engine kept 336 MiB that no later prompt used."""

    def held() -> int:
        found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(found.split()[1]) << 10

    like = SlotWeights(torch.empty(0, 8192, 4096), torch.empty(0, 4096, 4096))
    streamer = StagingStreamer(ExpertsPool(MODEL), CpuSlotKernel(torch.float32, HIDDEN, INTERMEDIATE, "silu"), like)
    for part in (streamer._staging[0].w13, streamer._staging[0].w2):
        part.fill_(1)
    del part
    filled = held()
    streamer.release()
    assert filled - held() > 150 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts_that_stay_where_they_pass_give_the_same_bits(dtype) -> None:  # type: ignore[no-untyped-def]
    """The bundled model: through the staging slot, through slots that keep them, and filled by themselves."""
    pool = ExpertsPool(MODEL)
    hidden, intermediate = pool.shape.hidden_size, pool.shape.intermediate_size
    kernel = CpuSlotKernel(dtype, hidden, intermediate, "silu")
    w13 = torch.zeros(2, 2 * intermediate, hidden, dtype=dtype)
    w2 = torch.zeros(2, hidden, intermediate, dtype=dtype)
    held = SlotWeights(w13, w2)
    staged = StagingStreamer(pool, kernel, held)
    x = torch.randn(9, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows, experts = np.array([0, 0, 1, 4, 4, 8]), np.array([1, 7, 7, 0, 3, 1])
    pairs = Pairs.of(rows, experts, np.array([0.5, 0.25, 1.0, 0.1, 0.9, 0.7], dtype=np.float32))
    for layer in range(pool.shape.num_layers):
        slots = HotSlots(kernel, SlotWeights(w13.clone(), w2.clone()), Tiers(1, pool.shape.num_experts))
        nothing = staged.run(layer, x, NO_PAIRS, slots, {}, [WHOLE])  # a rank whose part of them is none
        assert nothing.shape == x.shape
        assert not nothing.any()
        want = staged.run(layer, x, pairs, slots, {}, [WHOLE])
        assert slots.expert_in.tolist() == [-1, -1]
        staged.release()  # memory that prices were measured with; the next prompt fills it anew
        assert torch.equal(staged.run(layer, x, pairs, slots, {7: 1, 0: 0}, [WHOLE]), want)
        assert slots.expert_in.tolist() == [0, 7]
        staged.fill(layer, 7, held, 0)
        assert torch.equal(slots.held.w13[1], w13[0])


# -- Replicas of some widths through an engine: plans use those that are there, or one sentence says why none can ------


TOKENS = 8


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], str]:
    made = {}
    for bits in ((1, 2), (2, 4)):
        directory: Path = tmp_path_factory.mktemp("widths") / "replicas"
        build_data_free(MODEL, directory, bits=bits, show_progress=False)
        made[bits] = str(directory)
    return made


@pytest.mark.parametrize(
    ("bits", "settings", "average"),
    [
        ((1, 2), {"hot_experts": 3}, 2.0),
        ((2, 4), {"hot_experts": 0, "policy": {"bit_rule": "uniform"}}, 3.0),
    ],
    ids=["to the widest", "uniform"],
)
def test_plans_use_the_widths_of_the_replicas(
    replicas: dict[tuple[int, ...], str], bits: tuple[int, ...], settings: dict[str, Any], average: float
) -> None:
    """No pair falls back: the device is never asked for a width that it does not have."""
    with engine(settings={**settings, "avg_bits": 3, "replicas": replicas[bits]}) as llm:
        outputs = greedy(llm, PROMPTS[:2], TOKENS)
        (totals,), (status,) = llm.collective_rpc("ndp_totals"), llm.collective_rpc("ndp_status")
    assert totals["fallback_pairs"] == 0
    assert status["avg_bits"] == average
    for output in outputs:
        assert len(output.outputs[0].token_ids) == TOKENS
        report = output.kv_transfer_params["ndp"]
        assert bits[0] <= report["avg_bits"] <= bits[-1]
        if settings["hot_experts"] == 0:
            assert report["avg_bits"] == pytest.approx(average, abs=0.35)  # experts are used unequally


@pytest.mark.parametrize(
    ("bits", "settings", "says"),
    [
        ((2, 4), {"avg_bits": 1.5}, "the narrowest replicas"),
        ((2, 4), {"avg_bits": 3, "debug": {"offload_bits": 3}}, "these settings need [3] too"),
        ((1, 2), {"avg_bits": 8}, "these settings need [8] too"),
        ((1, 2), {"avg_bits": 2, "plan": "joint"}, "a joint plan needs replicas of 1, 2, 3, 4 bits"),
    ],
)
def test_what_no_plan_can_be_made_of_is_refused_with_what_to_change(
    replicas: dict[tuple[int, ...], str], bits: tuple[int, ...], settings: dict[str, Any], says: str
) -> None:
    asked = {"hot_experts": 3, "replicas": replicas[bits]} | settings
    with pytest.raises(ConfigError) as error, engine(settings=asked):
        pass
    assert says in sentence(error)


# -- 8 bits: cold experts on the device, hot ones in slots, a joint plan -----------------------------------------------

MANY = 16
JOINT = {"plan": "joint", "hot_experts": 2, "avg_bits": 8}


@pytest.fixture(scope="module")
def replicas_of_bytes(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("bytes") / "replicas"
    build_data_free(MODEL, directory, bits=REPLICA_WIDTHS, show_progress=False)
    return str(directory)


@pytest.mark.parametrize(
    "settings",
    [{"hot_experts": 4, "slot_bits": 8, "avg_bits": 8}, JOINT],
    ids=["device and slots", "joint"],
)
def test_8_bits_serve_and_the_report_tells_them(replicas_of_bytes: str, settings: dict[str, object]) -> None:
    with engine(settings={**settings, "replicas": replicas_of_bytes}) as llm:
        outputs = greedy(llm, PROMPTS[:2], MANY)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == MANY
        report = output.kv_transfer_params["ndp"]
        assert report["avg_bits"] == 8 or settings is JOINT


# -- a window in every layer -------------------------------------------------------------------------------------------

SETTINGS = {"cold_precision": "full", "hot_experts": 4}


def test_a_window_that_no_request_outgrows_gives_the_tokens_of_none(tmp_path: Path) -> None:
    """Chunks and the prefix cache read the routing of positions that a shorter window would have forgotten."""
    model = altered(tmp_path / "model", sliding_window=512)
    with engine(model, settings=SETTINGS, max_model_len=512, max_num_batched_tokens=64) as llm:
        found = [token_ids(greedy(llm, LONG_PROMPTS, 16)) for _ in range(2)]
        (totals,) = llm.collective_rpc("ndp_totals")
    assert totals["sidecar_mismatches"] == 0
    assert found == [stock_tokens_of(LONG_PROMPTS, 16)] * 2


def test_a_shorter_window_is_refused_with_the_length_that_it_allows(tmp_path: Path) -> None:
    model = altered(tmp_path / "model", sliding_window=256)
    with pytest.raises(ConfigError) as error, engine(model, settings=SETTINGS, max_model_len=512):
        pass
    assert "use --max-model-len 256 or less" in sentence(error)
