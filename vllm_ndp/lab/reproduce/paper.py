"""The paper's speed-ups (arXiv 2512.04476) in closed form, under one named assumption set per row.

Common to all rows: batch 1, attention + max(GPU experts, device experts) per layer, experts of one side one after the
other. The device has ideal 512 GB/s and multipliers that scale with the bits. HBM has 3.35 TB/s, PCIe 25.6 GB/s
effective. KV traffic and activation hops do not count. Two distinct experts are drawn with one weight for hot and one
for cold experts, fitted to a hit rate. VARIANTS has the differences. The figures of the rows are derived, not
published. `compare` replays both systems on a trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.gpu_timing import GpuModel
from vllm_ndp.lab.reproduce import Reproduction, Row

MS_PS, FULL_BITS = 1e9, 16.0


class PaperModel(NamedTuple):
    name: str
    num_hot: int
    decode_ratio: tuple[float, float]
    """Published, over MoNDE, with 3 and 2 bits."""


MODELS = (PaperModel("mixtral-8x7b", 4, (8.7, 11.2)), PaperModel("mixtral-8x22b", 2, (8.9, 11.5)))


class Variant(NamedTuple):
    name: str
    text: str
    hit_rates: tuple[float, float] | None
    """Of both models; None: one hot and one cold expert in every layer."""
    overhead_us: float = 0.0
    same_split: bool = False
    """Whether MoNDE has the same experts on the GPU; else all are on the device."""
    moved_share: float = 0.0
    """Layer-steps in which MoNDE moves one fp16 expert over the link."""
    scale_bits: float = 0.0
    bit_scalable: bool = True
    hbm_efficiency: float = 1.0


VARIANTS = (
    Variant("H", "always 1 hot + 1 cold, MoNDE = 2 fp16 experts on the device", None),
    Variant("A", "hit rate 0.5, MoNDE all on the device", (0.5, 0.5)),
    Variant("A70", "A with hit rate 0.7", (0.7, 0.7)),
    Variant("B", "A with 30 us overhead per layer and hit rate 0.57", (0.57, 0.57), 30.0),
    Variant("C", "MoNDE with the same hot experts, cold ones in fp16, no migration; 30 us", (0.5, 0.25), 30.0, True),
    Variant("D", "C and 7 % of layer-steps move one expert", (0.5, 0.25), 30.0, True, 0.07),
    Variant(
        "E", "B without bit-scalable units: weights are dequantised to fp16", (0.57, 0.57), 30.0, bit_scalable=False
    ),
    Variant("F", "B with 0.25 bit per weight of scales", (0.57, 0.57), 30.0, scale_bits=0.25),
    Variant("G", "B with 70 % HBM efficiency", (0.57, 0.57), 30.0, hbm_efficiency=0.7),
)


class Times(NamedTuple):
    """Milliseconds of one layer's parts: attention, an fp16 expert on the device, on the GPU, over the link."""

    attention: float
    device: float
    gpu: float
    link: float


def times_of(model: str, hbm_efficiency: float = 1.0) -> Times:
    changes = {"dram.kind": "ideal", "gpu.times": "roofline", "gpu.hbm_efficiency_percent": round(100 * hbm_efficiency)}
    hardware, shape = load_hardware("h100-ndp512", **changes), public_shape(model)
    host, num_bytes = GpuModel(hardware, shape), shape.expert_bytes
    return Times(
        attention=host.attention_ps(1, 0) / MS_PS,
        device=num_bytes / hardware.dram.peak_bytes_per_s * 1e3,
        gpu=host.hot_ps([(1, 1)]) / MS_PS,
        link=num_bytes / hardware.link.bulk_bytes_per_s * 1e3,
    )


def split_probabilities(num_experts: int, num_hot: int, hit_rate: float) -> tuple[float, float, float]:
    """P(2 hot, 1 hot, 0 hot) of two distinct experts drawn in turn; hot ones weigh w, fitted to hit_rate."""

    def probabilities(weight: float) -> tuple[float, float, float]:
        cold = num_experts - num_hot
        total = num_hot * weight + cold
        first_hot = num_hot * weight / total
        hot_then_hot = first_hot * (num_hot - 1) * weight / (total - weight) if num_hot > 1 else 0.0
        cold_then_cold = (1 - first_hot) * (cold - 1) / (total - 1)
        return hot_then_hot, 1 - hot_then_hot - cold_then_cold, cold_then_cold

    low, high = 1e-6, 1e6
    for _ in range(200):
        middle = (low * high) ** 0.5
        both, one, _none = probabilities(middle)
        low, high = (middle, high) if both + one / 2 < hit_rate else (low, middle)
    return probabilities(low)


def layer_ms(model: PaperModel, variant: Variant) -> dict[str, float]:
    """Milliseconds per layer of MoNDE and of the paper's system at 3 and 2 bits."""
    t = times_of(model.name, variant.hbm_efficiency)
    base, both, one, none = t.attention + variant.overhead_us / 1e3, 0.0, 1.0, 0.0
    if variant.hit_rates is not None:
        hit = variant.hit_rates[MODELS.index(model)]
        both, one, none = split_probabilities(public_shape(model.name).num_experts, model.num_hot, hit)

    def expected(device: float) -> float:
        return base + both * 2 * t.gpu + one * max(t.gpu, device) + none * 2 * device

    out = {}
    for bits in (3, 2):
        share = (bits + variant.scale_bits) / FULL_BITS if variant.bit_scalable else 1.0
        out[f"ours{bits}"] = expected(t.device * share)
    monde = expected(t.device) if variant.same_split else base + 2 * t.device
    return out | {"monde": monde + variant.moved_share * t.link}


def variant_rows() -> Iterator[Row]:
    for variant in VARIANTS:
        for model in MODELS:
            ms = layer_ms(model, variant)
            for key, value in ms.items():
                yield Row(variant.name, f"{model.name} {key} ms per layer", "ms", None, value, variant.text)
            for bits, published in zip((3, 2), model.decode_ratio, strict=True):
                ratio = ms["monde"] / ms[f"ours{bits}"]
                yield Row(variant.name, f"{model.name} {bits}-bit over MoNDE", "x", published, ratio, variant.text)


def device_side_rows() -> Iterator[Row]:
    """The "approximately 5x / 8x" of Figures 5 and 6: one expert at 16 bits over the same at 3 and 2, one row."""
    for model in MODELS:
        for text, overrides, scales in (
            ("ideal DRAM, codes alone", {"dram.kind": "ideal"}, False),
            ("DDR5 banks and refresh, scales", {}, True),
            ("the same, units that dequantise to fp16", {"array.pe_mode": "fp16_dequant"}, True),
        ):
            costs = Costs(
                load_hardware("h100-ndp512", times="roofline", **overrides), public_shape(model.name), scales=scales
            )
            full = costs.device_expert_ps(16, 1)
            for bits, published in ((3, 5.0), (2, 8.0)):
                name, ratio = f"{model.name} {bits}-bit, {text}", full / costs.device_expert_ps(bits, 1)
                yield Row("device side", name, "x", published, ratio, "one expert, batch 1")


def reproduce() -> Reproduction:
    return Reproduction(
        "Context-Aware MoE Inference on CXL-Enabled GPU-NDP Systems, arXiv 2512.04476",
        (*variant_rows(), *device_side_rows()),
        (
            "with the stated hardware the model gives 6.3-7.1x / 7.1-8.4x over MoNDE with everything on the device, "
            "3.4-4.4x / 4.0-5.6x over MoNDE with an equal split; no variant meets both ratios of a model: nearest are "
            "every layer of one hot and one cold expert (H), and about 7 % of layer-steps migrated (D)",
            "without bit-scalable units the advantage is 2.0x: low-bit weights alone do not speed up arrays that fp16 "
            "already keeps busy",
            "Table 3, the accuracy of answers, is not attempted: that needs the full models",
            "a higher hit rate does not help above about 0.6: two fp16 experts on the GPU take longer than one 2-bit "
            "expert on the device",
        ),
    )
