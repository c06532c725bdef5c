"""Every system, and the predictor, on a few tokens, to be worked out with a pencil.

F = 10 us: a copy; C = 1 us: computing on the GPU."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from by_hand import HARDWARE, US, C, F, chosen, machine, options_of, requests_of, run, trace
from paths import DATA

from ndp_device.common.errors import ConfigError
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.compare import Workload, compare
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.systems import SYSTEMS, hobbit
from vllm_ndp.lab.systems.gpu_on_demand import split_at
from vllm_ndp.lab.systems.system import TooFewPlaces
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.cache import NextLayer
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.traces.trace import Trace

TRACE = Trace.load(DATA / "tiny-mixtral-trace")
PROMPT = chosen([[0, 1]])
ALWAYS_RIGHT: Any = SimpleNamespace(accuracy=lambda batches: 1.0)
CPU = 20 * US  # an expert read from host memory
HOP = 125e3 + 250e3 + 2 * 32 * 85 / 600e9 * 1e12
"""One row to the CPU and back, as to the device: a posted write and a read, 2000 bytes each in 32 lines of 64 bytes."""


def near(expected):
    return pytest.approx(expected, rel=1e-3, abs=1e4)  # of us; 10 ns for attention and link packets


def test_gpu_on_demand_waits_for_every_copy_and_the_last_expert():
    """Two copies and the compute of the second: 2 F + C. With two places holding 0 and 1 (the most popular):
    [0, 1] hits, 2 C; [2, 3] misses both and takes the places, 2 F + C; [2, 3] hits; [0, 3]: one copy, F + C."""
    batches = trace(PROMPT, chosen([[0, 1]], [[2, 3]], [[2, 3]], [[0, 3]]))
    cold = run("gpu_on_demand", batches, machine(), 2)
    assert cold.moe_ps.ravel() == near([2 * F + C] * 4)
    lru = run("gpu_on_demand", batches, machine(), 2, cache="lru")
    assert lru.moe_ps.ravel() == near([2 * C, 2 * F + C, 2 * C, F + C])
    assert lru.migrated_bytes == 3 * 6e6


def test_fiddler_computes_a_miss_on_the_cpu_unless_a_copy_is_faster():
    """0 and 1 are on the GPU. [0, 1]: 2 C. [0, 2]: the CPU needs 20 us and a hop, the copy F + C = 11 us: copied,
    and the GPU computes 0 meanwhile: F + C."""
    batches = trace(PROMPT, chosen([[0, 1]], [[0, 2]]))
    outcome = run("fiddler", batches, machine(), 2)
    assert outcome.moe_ps.ravel() == near([2 * C, F + C])
    assert outcome.cold.pairs == 0


def test_moe_infinity_fetches_early_what_the_sequence_has_used_and_hides_it_behind_the_layer_before():
    """Layer 0 always uses [0, 1], which its two places hold: 2 C. Layer 1 holds 0 and 1, and the prompt used 2 and 3
    in 20 tokens, more than the 16 that the prior (0 and 1) is worth: both are predicted, so the layer before hides 2 C
    of their two copies: 2 F - 2 C of waiting, then the C of the one that came last."""
    prompt = chosen(*[[[0, 1], [2, 3]]] * 20)
    outcome = run("moe_infinity", trace(prompt, chosen([[0, 1], [2, 3]])), machine(2), 2, [[1, 1, 0, 0]] * 2)
    assert outcome.moe_ps.ravel() == near([2 * C, 2 * F - C])


def test_mondes_rounding_of_half_an_expert_decides_between_the_device_and_a_copy():
    """Link and device have the same rate: H = 1/2 of the active experts. One of two moves: a copy and its compute,
    11 us, beside one on the device: 11.7 us of multiplying 3 M weights at 256 a ns, and its message. Of a single one,
    half is nothing or all: the device's 12.7 us or F + C = 11 us; cost takes the shorter."""
    costs, alone = machine(), machine(top_k=1)
    device = costs.device_expert_ps(16, 1) + costs.device_fill_ps + costs.link_ps(1, 1)
    assert 12 * US < device < 13 * US
    two = run("monde", trace(PROMPT, chosen([[0, 1]])), costs, 2, h_rounding="floor")
    assert two.moe_ps.ravel() == near([device])
    assert (two.hot_pairs, two.migrated_bytes) == (1, 6e6)
    one = trace(chosen([[0]]), chosen([[0]]))
    for rounding, expected in (("floor", device), ("ceil", F + C), ("cost", F + C)):
        assert run("monde", one, alone, 2, h_rounding=rounding).moe_ps.ravel() == near([expected])


def test_the_papers_layer_is_the_slower_of_its_hot_experts_and_the_device():
    """The prompt made 0 and 1 hot. [0, 1]: 2 C. [0, 2]: C beside one cold expert. [2, 3]: two of them."""
    batches = trace(PROMPT, chosen([[0, 1]], [[0, 2]], [[2, 3]]))
    costs = machine()
    outcome = run("context_aware", batches, costs, 2)
    cold = costs.device_expert_ps(2, 1)
    assert outcome.cold.bits == 2 * outcome.cold.pairs  # two cold experts that the prompt never used: equal
    message = costs.link_ps(1, 1) + costs.device_fill_ps
    two = costs.link_ps(1, 2) + costs.device_fill_ps
    assert outcome.moe_ps.ravel() == near([2 * C, max(C, message + cold), two + 2 * cold])
    assert (outcome.hot_pairs, outcome.cold.pairs) == (3, 3)


def test_quantized_reads_everything_at_a_width_that_fits():
    """1000 x 1000 x 3 weights at 4 bits, groups of 64: 1.5 MB and 4 B for each of 48,000 groups: 1.692 MB; four of them
    take 6.768 MB. Two places of 6 MB hold them, but not at 8 bits (12.768 MB). [0, 1] at 4 bits: 2 x 1.692 MB at
    6 TB/s = 0.564 us."""
    costs, batches = machine(), trace(PROMPT, chosen([[0, 1]]))
    with pytest.raises(TooFewPlaces, match="at 8 bits take"):
        run("quantized", batches, costs, 2, weight_bits=8)
    outcome = run("quantized", batches, costs, 2, weight_bits=4)
    assert outcome.moe_ps.ravel() == pytest.approx([0.564 * US], rel=1e-4)
    assert outcome.cold.loss == pytest.approx(4.4**-3)
    assert outcome.prefill_ps.ravel() == pytest.approx([0.564 * US], rel=0.01)

    whole = run("quantized", batches, costs, 4, weight_bits=16)
    assert whole.moe_ps.ravel() == near([2 * C]), "four places hold four experts, to the byte"


def test_a_layer_that_prefetch_copies_needs_a_buffer_and_none_is_needed_where_all_fit():
    costs, batches = machine(2), trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [2, 3]]))
    held = [
        SYSTEMS["vllm_offload"].memory(costs, options_of(batches, places, offload_backend=backend)).gpu / 6e6
        for places, backend in ((2, "uva"), (2, "prefetch"), (4, "prefetch"))
    ]
    assert held == [4, 8, 8]


def test_vllm_offload_reads_chosen_experts_of_half_of_its_layers_or_copies_all_of_them():
    """Two layers, two of four places: one layer stays. uva: 2 C there, 2 F in the other. prefetch: the other's four
    experts are copied in every step whatever was chosen: 4 F for two layers, 2 F each."""
    batches = trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [2, 3]]))
    uva = run("vllm_offload", batches, machine(2), 2)
    assert uva.moe_ps.sum() == near(2 * C + 2 * F)
    assert uva.migrated_bytes == 2 * 6e6
    prefetch = run("vllm_offload", batches, machine(2), 2, offload_backend="prefetch")
    assert prefetch.moe_ps.sum() == near(4 * F)
    assert prefetch.migrated_bytes == 4 * 6e6
    assert run("vllm_offload", batches, machine(2), 4).moe_ps.sum() == near(4 * C)


def test_llama_cpp_computes_whole_layers_on_the_cpu():
    """Two layers, places for one of them: 2 C, and two experts from host memory with a hop. At 4 bits all fit."""
    batches = trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [2, 3]]))
    assert run("llama_cpp", batches, machine(2), 2).moe_ps.sum() == near(2 * C + 2 * CPU + HOP)
    small = run("llama_cpp", batches, machine(2), 2, gguf_bits=4)
    assert small.moe_ps.sum() == pytest.approx(2 * 0.564 * US, rel=1e-4)
    assert small.cold.loss == pytest.approx(4.4**-3)


def test_ktransformers_places_by_frequency_over_all_layers_and_both_sides_work_at_once():
    """Two places per layer on average: the four highest counts lie 3 in layer 0 and 1 in layer 1. Layer 0 [0, 1]: 2 C.
    Layer 1 [0, 2]: C on the GPU beside one expert on the CPU."""
    # a prior is a share of each layer: written so that the shares rank as above
    prior = [[0.34, 0.33, 0.33, 0.0], [0.4, 0.2, 0.2, 0.2]]
    batches = trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [0, 2]]))
    outcome = run("ktransformers", batches, machine(2), 2, prior)
    assert outcome.moe_ps.ravel() == near([2 * C, CPU + HOP])
    narrow = run("ktransformers", batches, machine(2), 2, prior, cpu_bits=4)
    assert narrow.moe_ps.ravel()[1] == near(CPU * 1.692 / 6 + HOP)
    assert narrow.cold.loss == pytest.approx(4.4**-3 / 4)  # one of four equal choices


def test_moepic_hides_bottoms_behind_the_layer_before_and_books_the_link_once():
    """Two layers, theta .5, four tops: all cached, every prediction right. Layer 0 has no layer before it: its two
    bottoms, F in all, wait; beside them C of tops, then C of bottoms: F + C. Its bottoms' C hides C of layer 1's F."""
    batches = trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [2, 3]]))
    outcome = split_at(0.5, batches, machine(2), options_of(batches, 2, predictor=ALWAYS_RIGHT))
    assert outcome.moe_ps.ravel() == near([F + C, F])
    assert outcome.migrated_bytes == 4 * 3e6
    assert outcome.prefill_ps.ravel() == pytest.approx([2 * F], rel=0.01)  # half of each of four experts


def test_pregated_copies_are_always_right_and_wait_only_for_what_the_layer_before_does_not_hide():
    """Two layers, no places. Layer 0 has no gate before it: 2 F + 2 C. Layer 1: 2 F less layer 0's 2 C of compute."""
    batches = trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [2, 3]]))
    outcome = run("pregated", batches, machine(2), 0)
    assert outcome.moe_ps.ravel() == near([2 * F + 2 * C, 2 * F])


def test_klotski_orders_the_popular_ahead_and_pays_for_the_wrong_ones():
    """No places; 0 and 1 are ordered ahead. Layer 0 [0, 1] has nothing before it: 2 F + 2 C. Layer 1 [0, 2]: of the two
    ordered copies the layer before hides 2 C, half of it of expert 0: F - C is left of that one, and F of expert 2."""
    batches = trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [0, 2]]))
    outcome = run("klotski", batches, machine(2), 0)
    assert outcome.moe_ps.ravel() == near([2 * F + 2 * C, (F - C) + F + 2 * C])
    assert outcome.migrated_bytes == 6e6 * (2 + 3)


def test_dynaexq_keeps_all_experts_and_as_many_wide_ones_as_memory_leaves():
    """Three places are 18 MB; four experts at 4 bits take 6.768 MB; one wide one adds 4.308 MB: two are wide, 0 and 1
    (prompt and prior). [0, 2]: 1 us, and 1.692 MB at 6 TB/s = 0.282 us. One place holds all at 2 bits (3.768 MB), and
    two of them at 4 bits."""
    outcome = run("dynaexq", trace(PROMPT, chosen([[0, 2]])), machine(), 3)
    assert outcome.policy == "16 over 4 bits, 2 high"
    assert outcome.moe_ps.ravel() == near([C + 0.282 * US])
    assert outcome.cold.loss == pytest.approx(4.4**-3 / 2)
    narrow = run("dynaexq", trace(PROMPT, chosen([[0, 2]])), machine(), 1)
    assert narrow.policy == "4 over 2 bits, 2 high"
    assert narrow.cold.loss == pytest.approx((4.4**-3 + 4.4**-1) / 2)


def test_hybrimoe_divides_its_misses_among_cpu_and_link():
    """0 and 1 are cached. [0, 2]: a copy takes F + C, the CPU 20 us: copied. [2, 3]: two copies take 2 F + C,
    one of each the CPU's 20 us and a hop, which is shorter."""
    outcome = run("hybrimoe", trace(PROMPT, chosen([[0, 2]])), machine(), 2)
    assert outcome.moe_ps.ravel() == near([F + C])
    both = run("hybrimoe", trace(PROMPT, chosen([[2, 3]])), machine(), 2)
    assert both.moe_ps.ravel() == near([CPU + HOP])
    assert (both.cold.pairs, both.migrated_bytes) == (1, 6e6)


def test_an_expert_cache_copies_or_computes_and_an_idle_link_fills_it():
    """16 bits, two places for 0 and 1 (prompt). Token 1 [0, 2]: 2 is copied in F, computes in C, and 1 leaves.
    Token 2 [2, 0] is found. With misses on the host token 1 takes 20 us and a hop; the link brings 2 meanwhile, in F,
    so that token 2 is found too."""
    batches = trace(PROMPT, chosen([[0, 2]], [[2, 0]]))
    outcome = run("expert_cache", batches, machine(), 2, cache_bits=16)
    assert outcome.moe_ps.ravel() == near([F + C, 2 * C])
    assert (outcome.hot_pairs, outcome.migrated_bytes, outcome.cold.loss) == (3, 6e6, 0)
    host = run("expert_cache", batches, machine(), 2, cache_bits=16, misses_by="host")
    assert host.moe_ps.ravel() == near([CPU + HOP, 2 * C])
    assert (host.hot_pairs, host.migrated_bytes) == (3, 6e6)


def test_a_copy_waits_for_what_an_idle_link_has_begun():
    """Two places for 0 and 1, and only copies of 30 us. Token 1 [0, 2]: the host computes 2, 20 us and a hop, and the
    link begins to bring it, until 30 us. Token 2 [0, 3]: a copy would begin then: the host again. Token 3 [0, 2]: 2 has
    come at 30 us, before token 3 begins at 40: both are found."""
    slow = load_hardware("h100-ndp512", **{**HARDWARE.values(), "link.bulk_bytes_per_s": 200_000_000_000})
    batches = trace(PROMPT, chosen([[0, 2]], [[0, 3]], [[0, 2]]))
    outcome = run("expert_cache", batches, replace(machine(), hardware=slow), 2, cache_bits=16)
    assert outcome.moe_ps.ravel() == near([CPU + HOP, CPU + HOP, 2 * C])
    assert outcome.hot_pairs == 4


def test_an_idle_link_brings_what_missed_last_and_forgets_what_waits_too_long(monkeypatch):
    """Two places for 0 and 1. Token 1 [2, 3] takes the host 40 us: at 30 us a copy the link has brought 3, not 2. Where
    only one may wait, even a fast link brings but 3."""
    slow = load_hardware("h100-ndp512", **{**HARDWARE.values(), "link.bulk_bytes_per_s": 200_000_000_000})
    own: Any = {"cache_bits": 16, "misses_by": "host"}
    for asked, found in ((2, 1), (3, 2)):  # and 0, which is there
        batches = trace(PROMPT, chosen([[2, 3]], [[asked, 0]]))
        assert run("expert_cache", batches, replace(machine(), hardware=slow), 2, **own).hot_pairs == found
    monkeypatch.setattr("vllm_ndp.lab.systems.expert_cache.MOST_WAITING", 1)
    outcome = run("expert_cache", trace(PROMPT, chosen([[2, 3]], [[2, 3]])), machine(), 2, **own)
    assert outcome.hot_pairs == 1


def test_daop_computes_predicted_cold_experts_a_layer_ahead():
    """The prompt made 0 and 1 hot in both layers. Layer 1 [0, 2]: C beside one cold expert on the CPU, 20 us and a hop,
    which began with layer 0 and its 2 C. Nine of ten are predicted: as much of the work, a tenth of the gate lost."""
    batches = trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [0, 2]]))
    outcome = run("daop", batches, machine(2), 2)
    assert outcome.moe_ps.ravel() == near([2 * C, 0.9 * (CPU + HOP) - 2 * C])
    assert outcome.cold.loss == pytest.approx(0.1 * 0.5 / (1 - 2 / np.pi) / 2)  # of one of two gates, two layers


def test_pimoe_moves_the_longest_experts_to_the_gpu_while_that_shortens_the_layer():
    """0 and 1 on both sides. [0, 1]: on this machine both move, 2 C. [0, 2]: C beside 2 on the device."""
    costs = machine()
    device = costs.device_expert_ps(16, 1) + costs.device_fill_ps + costs.link_ps(1, 1)
    outcome = run("pimoe", trace(PROMPT, chosen([[0, 1]], [[0, 2]])), costs, 2)
    assert outcome.moe_ps.ravel() == near([2 * C, device])
    assert (outcome.hot_pairs, outcome.cold.pairs) == (3, 1)


def test_cxl_expert_reads_warm_experts_from_host_memory_and_cold_ones_from_the_expander():
    """0 is hot, 1 warm (20 us from host memory), 2 and 3 cold: 1.5 MB of 4-bit codes at 64 GB/s are 23.4 us. [0, 1]: a
    copy and its compute, F + C, are shorter than 20 us, and hide C of the hot one. Where a copy takes 3 F it is the
    longer one: 20 us and its activations. [1, 2]: the CPU takes 43.4 us, or 23.4 us for 2 beside the copy of 1.
    A row's 1000 values each way are 8-bit planes, .572 of their 2 kB: log2 of 1000 lies .741 of the way from 128
    (.7148) to 2048 (.5219). Both ways at 200 GB/s: 11.4 ns of link, and 4 kB x 1.572 of host memory to unpack them."""
    batches = trace(PROMPT, chosen([[0, 1]], [[1, 2]]))
    prior = [[8, 4, 2, 1]]
    assert run("cxl_expert", batches, machine(), 1, prior).moe_ps.ravel()[0] == near(F + C)
    slow = load_hardware("h100-ndp512", **{**HARDWARE.values(), "link.bulk_bytes_per_s": 200_000_000_000})
    hop = (4000 * 0.572 / 200e9 + 4000 * 1.572 / 300e9) * 1e12
    outcome = run("cxl_expert", batches, replace(machine(), hardware=slow), 1, prior)
    assert outcome.moe_ps.ravel()[0] == pytest.approx(CPU + hop, abs=100)
    assert outcome.moe_ps.ravel()[1] == near(3 * F + C)


def test_cxl_experts_experts_change_tier_when_that_would_have_paid_for_the_copy():
    """Every look is after 64 steps; 0 is hot, 1 warm, 2 and 3 cold. The prompt used 0 alone: nothing moves.

    A step of [2] takes 23.4 us from the expander, 11 us if loaded, which is shorter and what it takes: 10 us longer
    than on the GPU. Its copy comes out of the expander, 6 MB at 64 GB/s: 93.75 us. Used in 9 of 64 steps it stays. Used
    in all of them it would have saved 640 us, so then it moves: the 65th step takes 93.75 us and C, the 66th C, and 0
    is where 2 was: cold, so loading it takes F + C."""
    prior, after = [[8, 4, 2, 1]], [[[2]], [[2]], [[0]]]
    copy = 6e6 / 64e9 * 1e12
    seldom, often = (
        run("cxl_expert", trace(chosen([[0]]), chosen(*steps, *after)), machine(top_k=1), 1, prior)
        for steps in ([[[2]]] * 9 + [[[0]]] * 55, [[[2]]] * 64)
    )
    assert seldom.moe_ps.ravel() == near([F + C] * 9 + [C] * 55 + [F + C, F + C, C])
    assert often.moe_ps.ravel() == near([F + C] * 64 + [copy + C, C, F + C])


def test_experts_of_a_request_that_has_ended_change_tier_no_more():
    """The first request goes on when the second, which used 2 in all of 64 steps, has ended: 64 loads and no move."""
    steps = [(chosen([[0]]), chosen(*[[[0]]] * 66)), (chosen([[0]]), chosen(*[[[2]]] * 64))]
    outcome = run("cxl_expert", Batches.of(requests_of(steps, 4)), machine(top_k=1), 1, [[8, 4, 2, 1]])
    assert outcome.migrated_bytes == 64 * 6e6


def test_hobbits_caches_are_shared_by_all_layers_and_keep_what_is_used_often(monkeypatch):
    """Two layers, one place for each: they hold both layers' 0. Layer 1 uses 1 in the first two steps: at first its own
    0 leaves, which was never used; a copy, of which .96 C hide behind layer 0, then a hit. In the third step layer 0
    uses 2: its 0 and layer 1's 1 were used twice each, so the one of the last layer leaves. Then layer 1 misses its 1:
    layer 0's 0 was used twice and its 2 once, so 2 leaves, and the fourth step finds both."""
    monkeypatch.setattr(hobbit, "LOW_PLACES", 0)
    steps = chosen([[0], [1]], [[0], [1]], [[2], [1]], [[0], [1]])
    outcome = run("hobbit", trace(chosen([[0], [0]]), steps), machine(2, top_k=1), 1)
    assert outcome.moe_ps[0, :, 0] == near([C, C, F + C, C])
    assert outcome.moe_ps[0, :, 1] == near([F + 0.04 * C, C, F + 0.04 * C, C])


def test_hobbit_fetches_a_light_choice_at_four_bits_and_skips_the_lightest(monkeypatch):
    """Two places for whole experts hold 0 and 1, none for narrow ones; one layer, nothing before it hides a copy.

    [0, 1] at .55 and .45: both in full, both there: 2 C. [0, 2] at .7 and .3: 2 follows .7 of the gate, above T1: its
    4 bits take F / 4 and C / 4, while 0 computes. [0, 3] at .95 and .05: 3 follows .95, above T2: skipped, C. [0, 2] at
    .55 and .45: in full, F + C.
    """
    monkeypatch.setattr(hobbit, "LOW_PLACES", 0)
    gates = np.array([[[0.55, 0.45]], [[0.7, 0.3]], [[0.95, 0.05]], [[0.55, 0.45]]])
    batches = trace(PROMPT, chosen([[0, 1]], [[0, 2]], [[0, 3]], [[0, 2]]), weights=gates)
    outcome = run("hobbit", batches, machine(), 2)
    assert outcome.moe_ps.ravel() == near([2 * C, (F + C) / 4, C, F + C])
    assert outcome.cold.loss == pytest.approx((0.3 * 4.4**-3 + 0.05 / (1 - 2 / np.pi)) / 4, rel=1e-5)


def test_joint_keeps_all_four_experts_at_8_bits_where_three_fit_at_16():
    """Three places are 18 MB, four experts at 8 bits and their scales 12.4: two reads take 2 x C x 8.25 / 16, and
    nothing waits for the device. At most 1e-4 may be lost: 8 bits lose 4.4^-7 = 3e-5."""
    batches = trace(PROMPT, chosen([[0, 1]], [[2, 3]]))
    costs = machine()
    outcome = run("joint", batches, costs, 3, max_gate_loss=1e-4)
    assert outcome.moe_ps.ravel() == near([2 * C * costs.replica_bytes(8) / 6e6] * 2)
    assert (outcome.hot_pairs, outcome.cold.loss) == (4, pytest.approx(4.4**-7, rel=1e-3))


def test_a_joint_plan_of_one_recorded_layer_has_its_share_of_the_models_memory():
    """Nothing may be lost: three places hold three experts at 16 bits, in one layer as in each of two."""
    batches = trace(PROMPT, chosen([[0, 1]], [[2, 3]]))
    found = [run("joint", batches, machine(layers), 3, max_gate_loss=0.0).hot_pairs for layers in (1, 2)]
    assert found == [3, 3]


def test_joints_losses_are_in_nats_where_the_replicas_say_what_they_do():
    """A loss of 1 in every layer does 2 nats: the same plan, twice the number. A limit by gate has its own."""
    batches, costs = trace(PROMPT, chosen([[0, 1]], [[2, 3]])), machine()
    known = LossTable(LossTable.nominal(1, 4).mse, nats=2.0)
    in_nats, plain = run("joint", batches, costs, 1, loss=known), run("joint", batches, costs, 1)
    assert (in_nats.policy.rpartition(", ")[2], plain.policy.rpartition(", ")[2]) == (
        "loss in nats",
        "loss in units of 1 bit",
    )


SHARED = 20 * US


def sharing(num_layers: int, top_k: int = 2) -> Costs:
    """The machine, for a model whose shared experts are 60 M weights: 20 us on the GPU."""
    costs = machine(num_layers, top_k)
    return replace(costs, shape=replace(costs.shape, shared_weights=60_000_000))


@pytest.mark.parametrize("system", SYSTEMS)
def test_shared_experts_are_paid_once_a_layer_by_every_system(system: str) -> None:
    """Two layers, places for all four experts. Beside shared experts MoNDE's device is no longer the slower side, 12.7
    us, and PIMoE leaves it one expert, 12.7 us beside S + C. Without a cache prompts are streamed meanwhile."""
    batches = trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [0, 1]], [[2, 3], [2, 3]]))
    plain, shared = (run(system, batches, costs, 4) for costs in (machine(2), sharing(2)))
    layer = {"monde": SHARED + F + C, "pimoe": SHARED + C}.get(system)
    expected = plain.moe_ps + SHARED if layer is None else np.full(plain.moe_ps.shape, layer)
    assert shared.moe_ps == near(expected)
    prompts = 0.0 if system == "gpu_on_demand" else 2 * SHARED
    assert shared.prefill_ps == near(plain.prefill_ps + prompts)


def test_copies_for_the_next_layer_hide_behind_shared_experts_too() -> None:
    """No places. Layer 0's shared experts and 2 C take longer than layer 1's two copies, which were ordered before."""
    batches = trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [2, 3]]))
    outcome = run("pregated", batches, sharing(2), 0)
    assert outcome.moe_ps.ravel() == near([SHARED + 2 * F + 2 * C, SHARED + 2 * C])


# -- what is guessed for the next layer --------------------------------------------------------------------------------


def learned(tokens: np.ndarray, num_experts: int = 4) -> NextLayer:
    """From tokens [T, L, k]."""
    return NextLayer.learned(requests_of([(tokens, tokens[:0])], num_experts))


def test_chances_are_counts_of_what_followed_and_one_token_of_popularity():
    """Three tokens: 0 then 1, 0 then 1, 0 then 2. Layer 1: popularity 2/3 and 1/3, so after 0 the chances are
    (2 + 2/3) / 4 and (1 + 1/3) / 4; after 3, which nobody chose, they are the popularity."""
    tokens = np.array([[[0], [1]], [[0], [1]], [[0], [2]]])
    chances = learned(tokens).chances
    assert chances[1, 0] == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert chances[1, 3] == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert chances[0] == pytest.approx(np.tile([1, 0, 0, 0], (4, 1)))
    mixed = learned(np.array([[[0], [1]], [[3], [2]]])).chances
    assert mixed[1, 0] == pytest.approx([0, (1 + 0.5) / 2, 0.5 / 2, 0])


def test_a_guess_follows_the_choices_of_the_layer_before_and_the_first_layer_popularity():
    """0 is always followed by 1, 3 by 2; 0 is the more popular. Decode: 0 then 1 (both guessed), 3 then 2 (the second
    guessed, the first not), 0 then 2 (the first guessed): 4 of 6."""
    predictor = learned(np.array([[[0], [1]]] * 3 + [[[3], [2]]] * 2))
    batches = trace(chosen([[0], [1]]), chosen([[0], [1]], [[3], [2]], [[0], [2]]))
    assert predictor.accuracy(batches) == pytest.approx(4 / 6)


def test_a_guess_follows_the_heavier_choice():
    """0 leads to 2 and 3, 1 to 0 and 1. At .9 and .1 of the gate 2 and 3 are right; of even weights 2 and 0."""
    after = np.array([[0.1, 0.2, 0.4, 0.3], [0.4, 0.3, 0.2, 0.1], [0.25] * 4, [0.25] * 4])
    predictor = NextLayer(np.stack([np.tile([0.4, 0.3, 0.2, 0.1], (4, 1)), after]))
    gates = np.array([[[0.9, 0.1], [0.5, 0.5]]])
    batches = trace(chosen([[0, 1], [0, 1]]), chosen([[0, 1], [2, 3]]), weights=gates)
    assert predictor.accuracy(batches) == 1


def test_the_predictor_of_a_comparison_knows_no_request_that_is_replayed_and_beats_popularity():
    workload = Workload(TRACE)
    assert workload._known is not None
    assert not set(workload._known.request_ids) & set(workload.trace.request_ids)
    batches, chances = workload.batches(1), workload.predictor.chances
    popular = NextLayer(np.broadcast_to(chances.mean(axis=1, keepdims=True), chances.shape))
    accuracy = workload.predictor.accuracy(batches)
    assert 0.25 < popular.accuracy(batches) < accuracy < 1  # 2 of 8 by chance
    given = Workload(TRACE, prior=ImportanceScore.from_weights(np.ones((4, 8))))
    assert 0.25 < given.predictor.accuracy(given.batches(1)) < 1


def test_hobbit_hides_what_a_right_guess_begins_and_pays_for_a_wrong_one():
    """No places. 0 is followed by 2 in all requests, here in 20 of 21 steps: with layer 0's own 41 of 42 guesses are
    right. Layer 0 has attention alone before it: F + C. Layer 1: F + C, less C that layer 0 hides of a right copy, and
    F - C that a wrong one goes on: each as often as it comes. Guesses of which half are right do not pay."""
    batches, costs = trace(chosen([[0], [0]]), chosen(*[[[0], [2]]] * 20, [[0], [1]])), machine(2, top_k=1)
    often = run("hobbit", batches, costs, 0, predictor=learned(np.array([[[0], [2]]] * 4)))
    right = 41 / 42
    assert often.moe_ps[0, :, 1] == pytest.approx(np.full(21, F + C - right * C + (1 - right) * (F - C)), abs=2e4)
    assert often.moe_ps[0, :, 0] == pytest.approx(np.full(21, F + C + (1 - right) * F), abs=2e4)
    seldom = run("hobbit", batches, costs, 0, predictor=learned(np.array([[[0], [3]]] * 4)))
    assert seldom.moe_ps == pytest.approx(np.full(seldom.moe_ps.shape, F + C), abs=2e4)
    assert "measured, on" in often.policy
    assert "measured, off" in seldom.policy


def test_the_published_constants_stay_available():
    def rows(prefetch: str) -> dict[str, float]:
        settings = CompareSettings(systems=("hobbit", "moepic"), prefetch=prefetch, overrides={"dram.kind": "ideal"})
        return {row.system: row.decode_tokens_per_s for row in compare(TRACE, settings).rows}

    measured, published = rows("measured"), rows("published")
    assert measured["hobbit"] < published["hobbit"]
    assert measured["moepic"] <= published["moepic"]  # no worse a guess fetches less that is wrong
    with pytest.raises(ConfigError, match="prefetch must be one of measured, published, got 'guessed'"):
        CompareSettings(prefetch="guessed")


def test_nothing_can_be_learned_from_no_token():
    with pytest.raises(ConfigError, match="needs tokens to learn from"):
        NextLayer.learned(TRACE, np.zeros(len(TRACE.request), bool))
