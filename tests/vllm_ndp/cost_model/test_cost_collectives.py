"""Several GPUs that split each layer: n times the bandwidth, and what their collectives take."""

from __future__ import annotations

import pytest

from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.gpu_timing import COLLECTIVE_PS, GpuModel, StepClock, all_reduce_ps, gather_ps

H100, MIXTRAL = load_hardware("h100-ndp512"), public_shape("mixtral-8x7b")
ONE, TWO = GpuModel(H100, MIXTRAL), GpuModel(H100, MIXTRAL, 2)


def test_one_gpu_tells_nobody_anything():
    assert all_reduce_ps(1, 1 << 20) == gather_ps(1, 1 << 20) == 0


def test_an_all_reduce_of_two_sends_its_bytes_once_each_way():
    """370 kB at 370 GB/s is 1 us; an all-reduce of n = 2 moves 2 (n - 1) / n = 1 times its bytes, a gather half."""
    assert all_reduce_ps(2, 370_000) == COLLECTIVE_PS + 1_000_000
    assert gather_ps(2, 370_000) == COLLECTIVE_PS + 500_000


def test_two_gpus_read_their_halves_of_an_expert_at_once():
    assert TWO.hot_experts_ps([1, 3]) == pytest.approx(ONE.hot_experts_ps([1, 3]) / 2, abs=1)


def test_experts_that_come_over_the_one_devices_link_take_as_long_for_two_gpus():
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
