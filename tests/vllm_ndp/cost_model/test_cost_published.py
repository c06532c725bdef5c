"""Published measurements of real hardware beside what the model says of it, each with its tolerance.

In order: CXL-DMSim (arXiv 2411.02282); vendor figure, Micron CZ120; nvbandwidth issues 24, 6 and 42; open-gpu-kernel
modules of tinygrad, issue 6; FloE; NCCL issue 1264 (2474 to 2578 of 3350 GB/s); KTransformers, DeepSeek-V3 q4.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ndp_device.timing.link import bulk_ps
from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import PS_PER_S
from vllm_ndp.cost_model.costs import Costs, HostCpu
from vllm_ndp.cost_model.gpu_timing import GpuModel

GEN4, GEN5 = load_hardware("h100-ndp512"), load_hardware("h200-gen5")
MIXTRAL, DEEPSEEK = public_shape("mixtral-8x7b"), public_shape("deepseek-v3")


def _expander_gb_per_s() -> float:
    """Gen5 x8, two reads to a write: reads fill one direction, writes half of the other."""
    link = GEN5.link
    return 1.5 * link.raw_bytes_per_s / 2 * link.cxl_line_bytes / link.cxl_line_wire_bytes / 1e9


def _hbm_share(preset: str) -> float:
    """Of the memory's rate, while all of Mixtral's experts are read for four tokens."""
    hardware = load_hardware(preset)
    took = GpuModel(hardware, MIXTRAL).experts_ps(8, 8, 8 * MIXTRAL.expert_bytes)
    return 8 * MIXTRAL.expert_bytes * PS_PER_S / took / hardware.gpu.hbm_bytes_per_s


def _ktransformers() -> float:
    """Tokens/s of DeepSeek-V3's chosen experts at 4.5 bits, read from the host's eight channels at 33 %."""
    costs = Costs(load_hardware("rtx4090", memory_efficiency_percent=33), DEEPSEEK)
    weight_bytes = DEEPSEEK.weights_per_expert * 4.5 / 8
    expert_ps = HostCpu.of(costs).experts_ps(costs, 1, weight_bytes, HostCpu.of(costs).memory_bytes_per_s)[1]
    return PS_PER_S / (DEEPSEEK.num_layers * DEEPSEEK.top_k * float(expert_ps))


@pytest.mark.parametrize(
    ("model", "measured", "tolerance"),
    [
        pytest.param(lambda: GEN4.link.load_to_use_ps / 1e3, 284, 0.15, id="ns of a CXL ASIC, LMbench"),
        pytest.param(_expander_gb_per_s, 36, 0.03, id="GB/s of a Gen5 x8 expander, 2 reads to a write"),
        pytest.param(lambda: GEN5.link.bulk_bytes_per_s / 1e9, 52.77, 0.03, id="GB/s of an H100 on Gen5"),
        pytest.param(lambda: GEN5.link.bulk_bytes_per_s / 1e9, 57.07, 0.10, id="GB/s of another H100 on Gen5"),
        pytest.param(lambda: GEN4.link.bulk_bytes_per_s / 1e9, 25.13, 0.03, id="GB/s of an A100 on Gen4"),
        pytest.param(lambda: GEN4.link.bulk_bytes_per_s / 1e9, 25.9, 0.03, id="GB/s of an RTX 4090 on Gen4"),
        pytest.param(lambda: bulk_ps(GEN4.link, MIXTRAL.expert_bytes) / 1e9, 15, 0.10, id="ms of a Mixtral expert"),
        pytest.param(lambda: _hbm_share("h100-ndp512"), 2526 / 3350, 0.12, id="share of an H100's memory, local copy"),
        pytest.param(_ktransformers, 8.73, 0.20, id="tokens/s of DeepSeek-V3 under KTransformers, 8 x DDR5-4800"),
    ],
)
def test_the_model_agrees_with_what_was_measured(model: Callable[[], float], measured: float, tolerance: float) -> None:
    assert model() == pytest.approx(measured, rel=tolerance)


def test_a_host_that_reaches_a_third_of_its_memory_takes_three_times_as_long() -> None:
    whole, third = (HostCpu.of(Costs(load_hardware(memory_efficiency_percent=p), MIXTRAL)) for p in (100, 33))
    assert third.memory_bytes_per_s == whole.memory_bytes_per_s * 33 // 100
