"""The GPU side of a step: rooflines by arithmetic, both sides of every edge, and the clock that adds them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndp_device.common.decoder_layers import DecoderLayer, GatedDelta, GroupedQuery
from ndp_device.common.model_shape import WholeModel
from ndp_device.timing.model import migration_ps
from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model import silicon
from vllm_ndp.cost_model.gpu_timing import (
    COLLECTIVE_PS,
    Context,
    GpuModel,
    PipelineClock,
    StepClock,
    all_reduce_ps,
    gather_ps,
    send_ps,
)

H100 = load_hardware("h100-ndp512", times="roofline")
MIXTRAL = public_shape("mixtral-8x7b")
ATTENTION = GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=4)
ONE, TWO = GpuModel(H100, MIXTRAL), GpuModel(H100, MIXTRAL, 2)
SMALL = WholeModel("small", 2, 4, 2, 8, 16, vocab_size=100, decoder=(DecoderLayer(attention=ATTENTION),) * 2)


def test_attention_of_the_published_models_takes_what_their_weights_take() -> None:
    """8x7B: 4096 x (2 x 4096 + 2 x 1024) weights x 2 B / 3.35 TB/s = 25.0 us a layer; 8x22B 52.6 us."""
    assert ONE.attention_ps(1, 0) == pytest.approx(25.04e6, rel=0.001)
    large = public_shape("mixtral-8x22b")
    assert GpuModel(H100, large).attention_ps(1, 0) == pytest.approx(52.6e6, rel=0.001)


def test_hot_experts_are_read_once_each_until_compute_outgrows_the_read() -> None:
    """352 MB at 3.35 TB/s: 0.105 ms; 0.352 GFLOP a row at 989.4 TFLOP/s: 0.356 us a row, so they meet at 295 rows."""
    model = ONE
    one = model.hot_ps([(1, 1)])
    assert one == pytest.approx(0.1052e9, rel=0.001)
    assert model.hot_ps([(1, 295)]) == one
    assert model.hot_ps([(1, 296)]) > one
    assert model.hot_ps([(2, 2)]) == pytest.approx(2 * one, rel=1e-6)


def test_hbm_efficiency_and_layer_overhead_are_assumptions_to_set() -> None:
    slow = load_hardware("h100-ndp512", times="roofline", hbm_efficiency_percent=70, layer_overhead_ps=30_000_000)
    assert GpuModel(slow, MIXTRAL).hot_ps([(1, 1)]) == pytest.approx(0.1052e9 / 0.7, rel=0.001)
    clock = StepClock(GpuModel(slow, MIXTRAL))
    clock.begin_step(1, 0)
    clock.begin_layer()
    assert clock.end_layer([(1, 1)]).overhead_ps == 30_000_000


def test_cached_tokens_are_read_and_attended() -> None:
    """2 x 1 head x 4 x 2 B = 16 B a cached token; 4 x 2 x 4 = 32 flops a pair."""
    cheap_reads = load_hardware("h100-ndp512", hbm_bytes_per_s=10**18)
    reads, flops = GpuModel(H100, SMALL), GpuModel(cheap_reads, SMALL)
    weights = ATTENTION.weights(8) + SMALL.router_weights
    assert weights == 8 * (2 * 8 + 2 * 4 + 4)
    assert reads.attention_ps(1, 10_000) == -(-(weights * 2 + 160_000) * 10**12 // 3_350_000_000_000)
    expected = 2 * 3 * weights + 32 * 10**6
    assert flops.before_experts_ps(3, 10, attended=10**6)[0] == -(-expected * 10**12 // 989_400_000_000_000)
    assert reads.attention_ps(0, 10_000) == 0


def test_dense_layers_run_before_the_experts_that_follow_them() -> None:
    """Kinds: a dense layer in front, then two with experts. The dense FFN is a roofline of its own."""
    dense = DecoderLayer(attention=ATTENTION, dense_weights=3 * 8 * 40)
    model = GpuModel(H100, replace(SMALL, decoder=(dense, *SMALL.decoder)))
    plain = GpuModel(H100, SMALL)
    moe = plain.attention_ps(2, 7)
    alone = model.roofline_ps((ATTENTION.weights(8) + 7 * 8) * 2, 2 * 2 * ATTENTION.weights(8) + 7 * 32)
    assert plain.before_experts_ps(2, 7) == (moe, moe)
    assert model.before_experts_ps(2, 7) == (alone + model.weights_ps(960, 2) + moe, moe)
    clock = StepClock(model)
    clock.begin_step(2, 7)
    starts = []
    for _ in range(2):
        starts.append(clock.begin_layer())
        clock.end_layer()
    assert starts == [alone + model.weights_ps(960, 2) + moe, alone + model.weights_ps(960, 2) + 2 * moe]


def test_shared_experts_run_on_the_gpu_while_the_device_works() -> None:
    model = GpuModel(H100, replace(SMALL, shared_weights=3 * 8 * 5000))
    shared, hot, attention = model.shared_ps(3), model.hot_ps([(2, 3)]), model.attention_ps(3, 9)
    assert shared == model.roofline_ps(240_000, 2 * 3 * 120_000)
    for device_ps, took in ((0, shared + hot), (shared + hot - 1, shared + hot), (shared + hot + 5, shared + hot + 5)):
        clock = StepClock(model)
        clock.begin_step(3, 9)
        clock.begin_layer()
        layer = clock.end_layer([(2, 3)], device_ps=device_ps)
        assert (layer.shared_ps, layer.hot_ps) == (shared, hot)
        assert layer.total_ps == attention + took
    assert model.shared_ps(0) == GpuModel(H100, SMALL).shared_ps(3) == 0
    clock = StepClock(model)
    clock.begin_step(3000, 3000)
    clock.begin_layer()
    assert clock.end_layer().shared_ps == model.shared_ps(3000) > shared


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(1, 30),
    st.booleans(),
)
def test_a_window_s_tokens_are_those_that_some_row_sees(
    spans: list[tuple[int, int]], window: int, chunked: bool
) -> None:
    """Against counting: row p sees positions max(0, p - window + 1)..p, or those of its chunk up to p."""
    positions = [(start, start + count) for start, count in spans]
    seen, pairs = 0, 0
    for start, end in positions:
        firsts = [row // window * window if chunked else max(row - window + 1, 0) for row in range(start, end)]
        seen += end - min(firsts)
        pairs += sum(row + 1 - first for row, first in zip(range(start, end), firsts, strict=True))
    rows, kv_tokens = sum(count for _, count in spans), sum(end for _, end in positions)
    context = Context(rows, len(spans), kv_tokens, kv_tokens, positions)
    assert context.within(window, chunked=chunked) == (seen, pairs)
    assert context.within(0, chunked=False) == (kv_tokens, kv_tokens)
    decode = Context(3, 3, 300, 300)  # without positions: one context per row
    assert decode.within(50, chunked=False) == (150, 150)
    assert decode.within(200, chunked=False) == (300, 300)


def test_a_window_bounds_what_a_long_context_costs_and_a_state_costs_the_same_at_any() -> None:
    """gpt-oss-120b: half of its 36 layers read 128 tokens. Qwen3-Next: 36 of its 48 layers read and write a state."""
    oss, next_ = (GpuModel(H100, public_shape(name)) for name in ("gpt-oss-120b", "qwen3-next"))
    near, far = (oss.before_experts_ps(1, n, spans=[(n - 1, n)]) for n in (1000, 100_000))
    assert near[0] == far[0]
    assert near[1] < far[1]
    assert oss.attention_ps(1, 1000) == -(-sum(oss.before_experts_ps(1, 1000)) // 36)
    near, far = (next_.before_experts_ps(1, n, spans=[(n - 1, n)]) for n in (1000, 100_000))
    assert near[0] == far[0]
    assert near[3] < far[3]
    delta = next_.shape.decoder[0].attention
    assert isinstance(delta, GatedDelta)
    values = delta.weights(2048) + 2048 * 512 + 2 * delta.state_values
    assert near[0] == -(-values * 2 * 10**12 // 3_350_000_000_000)


def test_deepseek_s_layer_reads_its_projections_and_one_vector_a_token() -> None:
    """V3 at 4096 tokens: 187.1 M weights, 1.8 M of the router, 4096 x 576: 191.3 M x 2 B / 3.35 TB/s = 114.2 us."""
    model = GpuModel(H100, public_shape("deepseek-v3"))
    before = model.before_experts_ps(1, 4096)
    assert before[1] == pytest.approx(114.2e6, rel=0.001)
    assert before[0] > 3 * before[1]  # three dense layers come first
    assert len(before) == 58


def test_streamed_experts_take_the_link_until_compute_outgrows_it() -> None:
    """352.3 MB at 25.6 GB/s: 13.76 ms and 6.5 us to start; 38 670 rows of compute take as long."""
    model = GpuModel(H100, MIXTRAL)
    assert model.prefill_stream_ps(1, 1) == pytest.approx(13.77e9, rel=0.001)
    assert model.prefill_stream_ps(1, 38_000) == model.prefill_stream_ps(1, 1)
    assert model.prefill_stream_ps(1, 39_000) > model.prefill_stream_ps(1, 1)
    assert model.prefill_stream_ps(0, 0) == 0


def test_a_full_migration_takes_what_the_paper_s_sizes_give() -> None:
    """Four of eight experts in 32 layers: 45.1 GB at 25.6 GB/s = 1.76 s; 8x22B, two of eight in 56: 67.6 GB, 2.64 s."""
    assert ONE.migration_ps(4 * 32) == pytest.approx(1.76e12, rel=0.005)
    large = public_shape("mixtral-8x22b")
    assert GpuModel(H100, large).migration_ps(2 * 56) == pytest.approx(2.64e12, rel=0.005)
    assert ONE.migration_ps(0) == 0


def test_a_layer_waits_for_the_slowest_of_gpu_link_and_device() -> None:
    model = GpuModel(H100, SMALL)
    attention, hot, streamed = model.attention_ps(2, 7), model.hot_ps([(2, 2)]), model.prefill_stream_ps(1, 2)
    for device_ps, expected in ((0, streamed), (streamed + 1, streamed + 1)):
        clock = StepClock(model, now_ps=1000)
        clock.begin_step(2, 7)
        assert clock.begin_layer() == 1000 + attention
        layer = clock.end_layer([(2, 2)], device_ps=device_ps, streamed_experts=1, streamed_pairs=2)
        assert hot < streamed
        assert layer.total_ps == attention + expected
        assert clock.now_ps == 1000 + layer.total_ps


def test_a_layer_waits_for_the_host_and_hot_experts_may_have_widths_of_their_own() -> None:
    clock = StepClock(ONE)
    clock.begin_step(1, 0)
    attention = clock.begin_layer()
    by_host = clock.end_layer([(1, 1)], device_ps=10**12, host_ps=2 * 10**12)
    assert by_host.total_ps == attention + 2 * 10**12
    clock.begin_layer()
    narrow = clock.end_layer([(2, 2)], hot_bytes=MIXTRAL.expert_bytes // 2)
    assert narrow.hot_ps == ONE.roofline_ps(MIXTRAL.expert_bytes // 2, 0) < ONE.hot_ps([(2, 2)])
    clock.begin_layer()
    assert clock.end_layer([(2, 2)]).hot_ps == ONE.hot_ps([(2, 2)])
    clock.begin_layer()
    computed = clock.end_layer(streamed_experts=1, streamed_pairs=39_000)
    assert computed.stream_ps == ONE.prefill_stream_ps(1, 39_000) > ONE.prefill_stream_ps(1, 1)


def test_a_clock_s_layers_are_those_of_the_context_that_it_was_told() -> None:
    """gpt-oss-120b: 100 tokens behind 50 are of one request, and see at most 128 where there is a window."""
    cheap_reads = load_hardware("h100-ndp512", times="roofline", hbm_bytes_per_s=10**18)
    model = GpuModel(cheap_reads, public_shape("gpt-oss-120b"))
    told = 100, 150, sum(range(51, 151)), [(50, 150)]
    clock = StepClock(model)
    clock.begin_step(*told)
    assert clock.begin_layer() == model.before_experts_ps(*told)[0] != model.before_experts_ps(*told[:3])[0]
    clock.end_layer()
    before = clock.now_ps
    assert clock.begin_layer() - before == model.before_experts_ps(*told)[1] != model.before_experts_ps(100, 150)[1]


def test_layers_beyond_the_model_s_begin_again_with_its_first() -> None:
    """gpt-oss-120b's layers differ by turns: of 38 the last two are the first two."""
    model = GpuModel(H100, public_shape("gpt-oss-120b"))
    clock = StepClock(model)
    clock.begin_step(1, 100_000)
    took = []
    for _ in range(38):
        before = clock.now_ps
        took.append(clock.begin_layer() - before)
        clock.end_layer()
    assert tuple(took[:36]) == model.before_experts_ps(1, 100_000)
    assert took[36:] == took[:2]
    assert took[0] != took[1]


def test_a_clock_waits_for_what_is_later_and_never_goes_back() -> None:
    """A migration is of the hot experts' own bytes, or of those it is told."""
    model = replace(ONE, slot_bytes=10**8)
    clock = StepClock(model, now_ps=1000)
    clock.wait_until(5000)
    clock.wait_until(10)
    assert clock.now_ps == 5000
    assert clock.migrate(3) == migration_ps(H100, 3 * 10**8)[0]
    assert clock.migrate(3, 10**6) == migration_ps(H100, 10**6)[0]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 500), st.integers(0, 10**7)), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_a_step_is_the_sum_of_its_layers_and_the_head(steps: list[tuple[int, int, int]], migrated: int) -> None:
    """And two clocks fed the same steps agree to the picosecond."""
    ends = []
    for _ in range(2):
        clock = StepClock(GpuModel(H100, SMALL))
        for rows, kv_tokens, device_ps in steps:
            clock.begin_step(rows, kv_tokens)
            layers = []
            for _ in range(SMALL.num_layers):
                clock.begin_layer()
                layers.append(clock.end_layer([(1, rows)], device_ps=device_ps))
            step = clock.end_step(rows)
            assert step.total_ps == sum(layer.total_ps for layer in layers) + clock.model.head_ps(rows)
            assert step.layers == tuple(layers)
        before = clock.now_ps
        assert clock.migrate(migrated) == clock.now_ps - before
        ends.append(clock.now_ps)
    assert ends[0] == ends[1]


def test_the_head_reads_its_weights_once() -> None:
    """100 x 8 weights x 2 B and 16 B of embedding a row; none without rows."""
    model = GpuModel(H100, SMALL)
    assert model.head_ps(1) == -(-(1600 + 16) * 10**12 // 3_350_000_000_000)
    assert model.head_ps(0) == 0
    assert ONE.head_ps(1000) == -(-2 * 1000 * 4096 * 32000 * 10**12 // 989_400_000_000_000)  # by arithmetic


# -- several GPUs that split each layer


def test_an_all_reduce_of_two_sends_its_bytes_once_each_way_and_one_gpu_tells_nobody_anything():
    """370 kB at 370 GB/s is 1 us; an all-reduce of n = 2 moves 2 (n - 1) / n = 1 times its bytes, a gather half."""
    assert all_reduce_ps(1, 1 << 20) == gather_ps(1, 1 << 20) == 0
    assert all_reduce_ps(2, 370_000) == send_ps(370_000) == COLLECTIVE_PS + 1_000_000 == 7_000_000
    assert all_reduce_ps(4, 370_000) == COLLECTIVE_PS + 1_500_000
    assert gather_ps(2, 370_000) == COLLECTIVE_PS + 500_000


def test_two_gpus_read_their_halves_of_an_expert_at_once_and_share_the_one_devices_link():
    assert TWO.hot_ps([(2, 4)]) == pytest.approx(ONE.hot_ps([(2, 4)]) / 2, abs=1)
    assert TWO.hot_ps([(1, 10_000)]) == pytest.approx(ONE.hot_ps([(1, 10_000)]) / 2, abs=1)  # bound by arithmetic
    assert TWO.prefill_stream_ps(1, 1) == ONE.prefill_stream_ps(1, 1)
    assert TWO.migration_ps(3) == ONE.migration_ps(3)


def test_a_step_of_two_gpus_reduces_twice_per_layer_and_once_more_and_gathers_its_logits():
    """Of 8 rows of which one yields a token: 2 L + 1 all-reduces of 8 x 4096 x 2 bytes, one gather of 32000 logits."""

    def step_ps(model: GpuModel) -> int:
        clock = StepClock(model)
        clock.begin_step(8, 100)
        for _ in range(MIXTRAL.num_layers):
            clock.begin_layer()
            clock.end_layer([(1, 8)])
        return clock.end_step(1).total_ps

    collectives = (2 * MIXTRAL.num_layers + 1) * all_reduce_ps(2, 8 * 4096 * 2) + gather_ps(2, 32000 * 2)
    overheads = MIXTRAL.num_layers * H100.gpu.layer_overhead_ps
    split = (step_ps(ONE) - overheads) / 2
    assert step_ps(TWO) == pytest.approx(split + overheads + collectives, abs=3 * MIXTRAL.num_layers)


def test_of_gpus_that_hold_whole_experts_the_busiest_counts_and_each_reads_them_alone():
    whole = replace(TWO, whole_experts=True)
    assert whole.hot_ps([(1, 2), (3, 3), (0, 0)]) == ONE.hot_ps([(3, 3)])
    assert whole.hot_ps([]) == whole.hot_ps([(0, 0), (0, 0)]) == 0


def test_a_gather_takes_half_of_a_measured_all_reduce_and_nothing_takes_no_time():
    """8 H100 reduce 128 KiB in 10.79 us."""
    assert gather_ps(8, 1 << 18, "h100") == 10_790_000
    assert all_reduce_ps(8, 0) == all_reduce_ps(8, 0, "h100") == gather_ps(8, 0, "h100") == send_ps(0) == 0


# -- stages of a pipeline


def test_a_stage_sends_activations_and_their_residual_and_the_first_one_reduces_once_more():
    first, last = (replace(TWO, stage=stage, num_stages=2) for stage in (0, 1))
    reduced, sent = all_reduce_ps(2, 8 * 4096 * 2), send_ps(2 * 8 * 4096 * 2)
    assert first.head_ps(1, 8) == reduced + sent
    assert last.head_ps(1, 8) == TWO.head_ps(1, 8) - reduced
    assert TWO.head_ps(0, 8) == reduced
    assert last.head_ps(0, 8) == 0


def test_one_request_waits_for_its_own_token():
    """Stages of 10 and 5: its second step cannot begin before its first token exists, at 15."""
    clock = PipelineClock(2)
    assert clock.run([10, 5], ["a"]) == (0, 15)
    clock.note_token("a", 15)
    assert clock.run([10, 5], ["a"]) == (15, 30)


def test_two_batches_fill_both_stages():
    """Stages of 10 and 10: the second batch enters when the first has left stage 0, and they never wait again."""
    clock = PipelineClock(2)
    assert clock.run([10, 10], ["a"]) == (0, 20)
    clock.note_token("a", 20)
    assert clock.run([10, 10], ["b"]) == (10, 30)
    clock.note_token("b", 30)
    assert clock.run([10, 10], ["a"]) == (20, 40)


def test_chunks_of_a_prompt_need_no_token_and_a_request_that_ended_holds_nobody_up():
    clock = PipelineClock(2)
    assert clock.run([10, 30], ["a"]) == (0, 40)
    assert clock.run([10, 30], ["a"]) == (10, 70)  # stage 1 is busy until 40
    clock = PipelineClock(1)
    assert clock.run([10], ["a"]) == (0, 10)
    clock.note_token("a", 1000)
    clock.note_token("b", 15)
    clock.note_token("b", 100)
    assert clock.run([10], ["b"]) == (100, 110)
    clock.forget("a")
    assert clock.run([10], ["a"]) == (110, 120)


def test_a_measured_card_prices_a_layer_as_it_was_measured_and_a_small_model_by_rooflines() -> None:
    """One token of gpt-oss-120b on an H100: .0627 ms in MXFP4, four times its roofline; narrower ones beside it."""
    measured = load_hardware("h100-ndp512")
    shape = public_shape("gpt-oss-120b")
    model, plain = GpuModel(measured, shape), GpuModel(H100, shape)
    four_bits = 4 * shape.weights_per_expert * 17 // 32
    wide = replace(shape, dtype="float32")
    assert [GpuModel(measured, of).card for of in (shape, wide, SMALL)] == ["h100", "", ""]
    assert plain.card == ""
    assert model.experts_ps(4, 4, four_bits) == pytest.approx(62.7e6, rel=0.06)
    assert plain.experts_ps(4, 4, four_bits) == pytest.approx(62.7e6 / 4, rel=0.02)
    assert GpuModel(measured, SMALL).before_experts_ps(2, 7) == GpuModel(H100, SMALL).before_experts_ps(2, 7)
    assert model.before_experts_ps(1, 300)[0] > plain.before_experts_ps(1, 300)[0]


def test_a_part_of_a_prompt_is_priced_by_its_own_tokens_whatever_is_cached_before_it() -> None:
    """512 tokens of Mixtral-8x7B alone and behind 3584: products are the same, and the kernel is asked for 512."""
    hardware = load_hardware("h100-ndp512")
    model, attention = GpuModel(hardware, MIXTRAL), MIXTRAL.decoder[0].attention
    took, heads = [], []
    for start in (0, 3584):
        end = start + 512
        pairs = sum(range(start + 1, end + 1))
        took.append(model.before_experts_ps(512, end, pairs, [(start, end)])[0])
        sizes = 2 * attention.values_read(512, end), attention.flops(512, end, pairs)
        load = silicon.attention(1, 32, 2 * 8 * 128, *sizes, 512)
        heads.append(silicon.kernel("h100", "prefill").ps(load, (3_350 * 10**9, 989_400 * 10**9)))
    assert took[1] - took[0] == heads[1] - heads[0] > 0
