"""Capacities bind: what a system says it holds, refusals before anything is replayed, and the largest that fits."""

import pytest
from paths import DATA

from vllm_ndp.cost_model.costs import model_named
from vllm_ndp.cost_model.memory import CAPACITY_OF, DoesNotFit
from vllm_ndp.lab.compare import compare
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.systems import SYSTEMS
from vllm_ndp.traces.trace import Trace

TRACE = Trace.load(DATA / "tiny-mixtral-trace").select(range(6))  # four are replayed: bytes need no more
SHAPE = model_named("mixtral-8x7b")
EXPERT = SHAPE.expert_bytes
BESIDE = (
    2 * (SHAPE.beside_weights + 2 * SHAPE.head_weights) + 2 * EXPERT
)  # other weights, and two places through which experts stream
KV_TOKEN = 131072


def rows(systems=("context_aware",), batches=(1,), **changes):
    overrides = {"dram.kind": "ideal", **changes.pop("overrides", {})}
    settings = CompareSettings(overrides=overrides, systems=systems, policies=("prefill",), batches=batches, **changes)
    return compare(TRACE, settings).rows


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_refused_a_byte_of_each_memory(system):
    # at 4 bits every expert fits on the GPU, and a variant that runs keeps its system from being refused
    own = {"options": {"llama_cpp": {"gguf_bits": 16}, "ktransformers": {"gpu_bits": 16}}.get(system, {})}
    held = rows((system,), **own)[0]
    places = {"gpu": held.gpu_gb, "device": held.device_gb, "host": held.host_gb, "expander": held.expander_gb}
    for place, needs in places.items():
        key = CAPACITY_OF[place]
        if needs:
            with pytest.raises(DoesNotFit, match=rf"{system} with K \d at batch 1.* lacks \d+ bytes.* is 1:"):
                rows((system,), overrides={key: 1}, **own)
        else:
            rows((system,), overrides={key: 1}, **own)


def test_a_row_says_what_it_holds():
    """K = 4: 32 x 4 experts; the trace's requests end with 512 tokens, so batch 4 caches four times as many."""
    one, four = rows(batches=(1, 4))
    assert one.gpu_gb * 1e9 == pytest.approx(BESIDE + 128 * EXPERT + 512 * KV_TOKEN)
    assert four.gpu_gb - one.gpu_gb == pytest.approx(3 * 512 * KV_TOKEN / 1e9)
    assert (one.num_hot, one.host_gb) == (4, 0)
    assert rows(("monde",))[0].num_hot == 0


def test_fit_takes_the_most_hot_experts_that_fit_and_never_more_than_asked_for():
    """Room for five experts of each layer to the byte, then one byte less."""
    room = BESIDE + 5 * 32 * EXPERT + 512 * KV_TOKEN
    assert rows(fit=True, overrides={"gpu.hbm_capacity_bytes": room})[0].num_hot == 5
    assert rows(fit=True, overrides={"gpu.hbm_capacity_bytes": room - 1})[0].num_hot == 4
    assert rows(fit=True, num_hot=3, overrides={"gpu.hbm_capacity_bytes": room})[0].num_hot == 3
    assert rows(fit=True, overrides={"gpu.hbm_capacity_bytes": 10**12})[0].num_hot == 8  # needs no staging places


def test_fit_takes_narrower_replicas_where_the_device_is_small():
    """All experts in fp16 and, for each of 256, 2 planes and two sets of scales."""
    weights = SHAPE.weights_per_expert
    room = 256 * (2 * weights + 2 * weights // 8 + 2 * 4 * weights // 128)
    narrow = rows(fit=True, avg_bits=3.0, overrides={"dram.capacity_bytes": room})[0]
    wide = rows(fit=True, avg_bits=3.0)[0]
    assert narrow.avg_bits <= 2 < wide.avg_bits
    with pytest.raises(DoesNotFit, match="nothing of it fits"):
        rows(fit=True, overrides={"dram.capacity_bytes": 256 * 2 * weights})


def test_with_fit_systems_that_fit_are_shown_and_the_others_named():
    tight = {"dram.capacity_bytes": 256 * EXPERT}  # MoNDE's experts, no replicas
    settings = CompareSettings(overrides=tight, systems=("context_aware", "monde"), policies=("prefill",), fit=True)
    result = compare(TRACE, settings)
    assert {row.system for row in result.rows} == {"monde"}
    assert len(result.skipped) == 1
    assert "context_aware with K 0 at batch 1 does not fit, device memory lacks" in result.skipped[0]


def test_one_variant_that_fits_is_enough_for_its_system():
    """Without a cache GPU on demand needs two places, with one K per layer."""
    tight = {"gpu.hbm_capacity_bytes": BESIDE + 512 * KV_TOKEN}
    settings = CompareSettings(overrides=tight, systems=("gpu_on_demand",))
    result = compare(TRACE, settings)
    assert [row.policy for row in result.rows] == ["no cache"]
    assert len(result.skipped) == 2
