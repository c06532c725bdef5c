"""Published measurements of real hardware beside what the model says of it, each with its tolerance.

In order: CXL-DMSim (arXiv 2411.02282, twice); vendor figure, Micron CZ120; nvbandwidth issues 24, 6 and 42;
open-gpu-kernel modules of tinygrad, issue 6 (twice); FloE; NCCL issue 1264 (2474 to 2578 of 3350 GB/s); MoNDE's core on
an FPGA.
KTransformers' 8.73 tokens/s on DeepSeek-V3 is no row: the 33 % of a host's memory were taken from it. Its row is of two
sockets, each with a copy of the experts (doc/en/DeepseekR1_V3_tutorial.md, V0.2); an RTX 4090 does the rest.
"""

from collections.abc import Callable

import numpy as np
import pytest

from ndp_device.timing.model import bulk_ps
from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import PS_PER_S
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.gpu_timing import GpuModel

GEN4, GEN5 = load_hardware("h100-ndp512"), load_hardware("h200-gen5")
MIXTRAL = public_shape("mixtral-8x7b")


def _expander_gb_per_s() -> float:
    """Gen5 x8, two reads to a write: reads fill one direction, writes half of the other."""
    link = GEN5.link
    return 1.5 * link.raw_bytes_per_s / 2 * link.cxl_line_bytes / link.cxl_line_wire_bytes / 1e9


def _hbm_share(preset: str) -> float:
    """Of the memory's rate, while all of Mixtral's experts are read for four tokens."""
    hardware = load_hardware(preset)
    took = GpuModel(hardware, MIXTRAL).experts_ps(8, 8, 8 * MIXTRAL.expert_bytes)
    return 8 * MIXTRAL.expert_bytes * PS_PER_S / took / hardware.gpu.hbm_bytes_per_s


def _device_share() -> float:
    """Of the device's DRAM, while one expert of Mixtral is read in full precision."""
    rate = MIXTRAL.expert_bytes * PS_PER_S / Costs(GEN4, MIXTRAL).device_expert_ps(16, 1)
    return rate / GEN4.dram.peak_bytes_per_s


def _two_sockets() -> float:
    """16 channels of DDR5-4800 at 33 %, experts of 4.5 bits. Dense weights count at 16 bits: at 4.5 it were 15.6."""
    hardware = load_hardware("rtx4090", memory_bytes_per_s=614_400_000_000, memory_efficiency_percent=33)
    shape = public_shape("deepseek-v3")
    costs, gpu = Costs(hardware, shape), GpuModel(hardware, shape)
    expert = costs.cpu_experts_ps(np.array([1]), shape.weights_per_expert * 4.5 / 8)[0]
    layer = max(gpu.shared_ps(1), shape.top_k * expert + costs.hop_ps(1))
    return PS_PER_S / (sum(gpu.before_experts_ps(1, 750)) + shape.num_layers * layer + gpu.head_ps(1, 1))


@pytest.mark.parametrize(
    ("model", "measured", "tolerance"),
    [
        pytest.param(lambda: GEN4.link.load_to_use_ps / 1e3, 284, 0.15, id="ns of a CXL ASIC, LMbench"),
        pytest.param(lambda: GEN4.link.load_to_use_ps / 1e3, 375, 0.34, id="ns of a CXL FPGA, LMbench"),
        pytest.param(_expander_gb_per_s, 36, 0.03, id="GB/s of a Gen5 x8 expander, 2 reads to a write"),
        pytest.param(lambda: GEN5.link.bulk_bytes_per_s / 1e9, 52.77, 0.03, id="GB/s of an H100 on Gen5"),
        pytest.param(lambda: GEN5.link.bulk_bytes_per_s / 1e9, 57.07, 0.10, id="GB/s of another H100 on Gen5"),
        pytest.param(lambda: GEN4.link.bulk_bytes_per_s / 1e9, 25.13, 0.03, id="GB/s of an A100 on Gen4"),
        pytest.param(lambda: GEN4.link.bulk_bytes_per_s / 1e9, 25.9, 0.03, id="GB/s of an RTX 4090 on Gen4"),
        pytest.param(lambda: bulk_ps(GEN4.link, MIXTRAL.expert_bytes) / 1e9, 15, 0.10, id="ms of a Mixtral expert"),
        pytest.param(lambda: _hbm_share("h100-ndp512"), 2526 / 3350, 0.12, id="share of an H100's memory, local copy"),
        pytest.param(lambda: _hbm_share("rtx4090"), 921 / 1008, 0.10, id="share of an RTX 4090's memory, local copy"),
        pytest.param(_device_share, 0.955, 0.05, id="share of the stream's rate in MoNDE's core on an FPGA"),
        pytest.param(_two_sockets, 12.208, 0.05, id="tokens/s of DeepSeek-V3 on two sockets, KTransformers"),
    ],
)
def test_the_model_agrees_with_what_was_measured(model: Callable[[], float], measured: float, tolerance: float) -> None:
    assert model() == pytest.approx(measured, rel=tolerance)
