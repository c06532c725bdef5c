"""The paper's speed-ups (arXiv 2512.04476) in closed form, under one named assumption set per row.

Common to all rows: batch 1, attention + max(GPU experts, device experts) per layer, experts of one side one after the
other. The device has ideal 512 GB/s and multipliers that scale with the bits. HBM has 3.35 TB/s, PCIe 25.6 GB/s
effective. KV traffic and activation hops do not count. Two distinct experts are drawn with one weight for hot and one
for cold experts, fitted to a hit rate. VARIANTS has the differences. The figures of the rows are derived, not
published; the published ratios are 8.7/11.2 (Mixtral-8x7B) and 8.9/11.5 (8x22B) for 3 and 2 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.gpu_timing import GpuModel
from vllm_ndp.lab.compare import compare
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.reproduce import Reproduction, Row
from vllm_ndp.traces.trace import Trace

MS_PS = 1e9
FULL_BITS = 16.0
OUTPUT_TOKENS = (128, 700, 5000)
"""The last two are about what inverting the published bounds gives."""


@dataclass(frozen=True)
class PaperModel:
    """name, hot experts per layer, published decode ratios (3, 2 bits) and end-to-end ranges."""

    name: str
    num_hot: int
    decode_ratio: tuple[float, float]
    end_to_end: tuple[tuple[float, float], tuple[float, float]]


MODELS = (
    PaperModel("mixtral-8x7b", 4, (8.7, 11.2), ((6.6, 8.3), (7.9, 10.6))),
    PaperModel("mixtral-8x22b", 2, (8.9, 11.5), ((7.6, 8.7), (9.5, 11.2))),
)


@dataclass(frozen=True)
class Variant:
    """One assumption set. hit_rates: of 8x7B and 8x22B; None = one hot and one cold expert in every layer."""

    name: str
    text: str
    hit_rates: tuple[float, float] | None
    overhead_us: float = 0.0
    monde: str = "all_ndp"  # all_ndp | same_split
    moved_share: float = 0.0  # layer-steps in which MoNDE moves one fp16 expert over the link
    scale_bits: float = 0.0  # bits per weight for scales
    bit_scalable: bool = True
    hbm_efficiency: float = 1.0


VARIANTS = (
    Variant("H", "always 1 hot + 1 cold, MoNDE = 2 fp16 experts on the device", None),
    Variant("A", "hit rate 0.5, MoNDE all on the device", (0.5, 0.5)),
    Variant("A70", "A with hit rate 0.7", (0.7, 0.7)),
    Variant("B", "A with 30 us overhead per layer and hit rate 0.57", (0.57, 0.57), 30.0),
    Variant(
        "C", "MoNDE with the same hot experts, cold ones in fp16, no migration; 30 us", (0.5, 0.25), 30.0, "same_split"
    ),
    Variant("D", "C and 7 % of layer-steps move one expert", (0.5, 0.25), 30.0, "same_split", 0.07),
    Variant(
        "E", "B without bit-scalable units: weights are dequantised to fp16", (0.57, 0.57), 30.0, bit_scalable=False
    ),
    Variant("F", "B with 0.25 bit per weight of scales", (0.57, 0.57), 30.0, scale_bits=0.25),
    Variant("G", "B with 70 % HBM efficiency", (0.57, 0.57), 30.0, hbm_efficiency=0.7),
)


@dataclass(frozen=True)
class Times:
    """Milliseconds of one layer's parts: attention, an fp16 expert on the device, on the GPU, over the link."""

    attention: float
    device: float
    gpu: float
    link: float
    layers: int
    expert_gb: float


def times_of(model: str, hbm_efficiency: float = 1.0) -> Times:
    shape = public_shape(model)
    hardware = load_hardware(
        "h100-ndp512", **{"dram.kind": "ideal", "gpu.hbm_efficiency_percent": round(100 * hbm_efficiency)}
    )
    host = GpuModel(hardware, shape)
    num_bytes = host.shape.expert_bytes
    return Times(
        attention=host.attention_ps(1, 0) / MS_PS,
        device=num_bytes / hardware.dram.peak_bytes_per_s * 1e3,
        gpu=host.hot_experts_ps([1]) / MS_PS,
        link=num_bytes / hardware.link.bulk_bytes_per_s * 1e3,
        layers=shape.num_layers,
        expert_gb=num_bytes / 1e9,
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
    base = t.attention + variant.overhead_us / 1e3
    if variant.hit_rates is None:
        both, one, none = 0.0, 1.0, 0.0
    else:
        hit = variant.hit_rates[MODELS.index(model)]
        both, one, none = split_probabilities(public_shape(model.name).num_experts, model.num_hot, hit)

    def expected(device: float) -> float:
        return base + both * 2 * t.gpu + one * max(t.gpu, device) + none * 2 * device

    out = {}
    for bits in (3, 2):
        share = (bits + variant.scale_bits) / FULL_BITS if variant.bit_scalable else 1.0
        out[f"ours{bits}"] = expected(t.device * share)
    out["monde"] = base + 2 * t.device if variant.monde == "all_ndp" else expected(t.device)
    out["monde"] += variant.moved_share * t.link
    return out


def variant_rows() -> Iterator[Row]:
    for variant in VARIANTS:
        for model in MODELS:
            ms = layer_ms(model, variant)
            for key, value in ms.items():
                yield Row(variant.name, f"{model.name} {key} ms per layer", "ms", None, value, variant.text)
            for bits, published in zip((3, 2), model.decode_ratio, strict=True):
                ratio = ms["monde"] / ms[f"ours{bits}"]
                yield Row(variant.name, f"{model.name} {bits}-bit over MoNDE", "x", published, ratio, variant.text)


def inversion_rows() -> Iterator[Row]:
    """Consequences of the two published ratios if ours(b) = A + x b / 2 and MoNDE = A + M."""
    first = "reading (i): MoNDE runs both experts in fp16 on the device"
    second = "reading (ii): MoNDE has the same cold share and also migrates"
    for model in MODELS:
        (r3, r2), t = model.decode_ratio, times_of(model.name)
        a = (1.5 * r3 - r2) / (r2 - r3)  # over x
        m = r2 * (a + 1) - a
        x = 2 * t.device / m  # cold time at 2 bits
        for quantity, unit, ours, text in (
            ("A/x", "", a, "ours(b) = A + x b/2, MoNDE = A + M"),
            ("M/x", "", m, "the same"),
            ("cold experts per layer", "", x / (t.device * 2 / FULL_BITS), first),
            ("overhead per layer", "us", 1e3 * (a * x - t.attention), first),
            ("MoE over fp16 device time", "x", m / 8, second),
            ("cold accesses moved", "%", 100 * ((m / 8 - 1) * t.device / t.link), second),
        ):
            yield Row("inversion", f"{model.name} {quantity}", unit, None, ours, text)


def end_to_end_rows() -> Iterator[Row]:
    """Output tokens at which T MoNDE / (migration + T ours) reaches each published bound.

    Ours per layer as in row B, MoNDE = the published decode ratio times ours, no prefill, every hot expert moves once.
    """
    row_b = next(variant for variant in VARIANTS if variant.name == "B")
    for model in MODELS:
        t, ms = times_of(model.name), layer_ms(model, row_b)
        migration_ms = model.num_hot * t.layers * t.link
        gigabytes = model.num_hot * t.layers * t.expert_gb
        yield Row("end to end", f"{model.name} full migration", "GB", None, gigabytes, "every hot expert moves once")
        yield Row("end to end", f"{model.name} full migration", "s", None, migration_ms / 1e3, "at 25.6 GB/s")
        for index, bits in enumerate((3, 2)):
            ours, ratio = t.layers * ms[f"ours{bits}"], model.decode_ratio[index]
            for bound in model.end_to_end[index]:
                tokens = bound * migration_ms / (ours * (ratio - bound))
                quantity = f"{model.name} {bits}-bit: output tokens that give {bound}x"
                yield Row("end to end", quantity, "tokens", None, tokens, "row B times, published decode ratio")
            short = 128 * ratio * ours / (migration_ms + 128 * ours)
            yield Row("end to end", f"{model.name} {bits}-bit at 128 tokens", "x", None, short, "migration charged")
            quantity = f"{model.name} {bits}-bit at 128 tokens, hot set kept from prefill"
            yield Row("end to end", quantity, "x", None, ratio, "prefill streams every expert anyway: nothing moves")


def forward_rows() -> Iterator[Row]:
    """End-to-end speed-ups computed forwards: outputs of so many tokens, with each way to pay for the hot set.

    (prompt + T MoNDE) / (prompt + migration + T ours); MoNDE = all on the device as in row B, or the published decode
    ratio times ours. The prompt streams every expert once on both sides. Published: 6.6-8.3x and 7.9-10.6x (8x7B),
    7.6-8.7x and 9.5-11.2x (8x22B), lengths not given.
    """
    row_b = next(variant for variant in VARIANTS if variant.name == "B")
    for model in MODELS:
        t, ms = times_of(model.name), layer_ms(model, row_b)
        experts = public_shape(model.name).num_experts
        migrations = {"moved": model.num_hot * t.layers * t.link, "kept from the prompt": 0.0}
        prompts = {"no prompt": 0.0, "a prompt streams all": experts * t.layers * t.link}
        for index, bits in enumerate((3, 2)):
            ours = t.layers * ms[f"ours{bits}"]
            for text, monde in (
                ("row B", t.layers * ms["monde"]),
                ("published decode ratio", model.decode_ratio[index] * ours),
            ):
                for (moved, migration_ms), (before, prompt_ms) in product(migrations.items(), prompts.items()):
                    for tokens in OUTPUT_TOKENS:
                        ratio = (prompt_ms + tokens * monde) / (prompt_ms + migration_ms + tokens * ours)
                        quantity = f"{model.name} {bits}-bit, {tokens} tokens, hot set {moved}, {before}"
                        yield Row("forward", quantity, "x", None, ratio, f"MoNDE by {text}")


def device_side_rows() -> Iterator[Row]:
    """The "approximately 5x / 8x" of Figures 5 and 6: one expert at 16 bits over the same at 3 and 2, one row."""
    for model in MODELS:
        for text, overrides, scales in (
            ("ideal DRAM, codes alone", {"dram.kind": "ideal"}, False),
            ("DDR5 banks and refresh, scales", {}, True),
            ("the same, units that dequantise to fp16", {"array.pe_mode": "fp16_dequant"}, True),
        ):
            costs = Costs(load_hardware("h100-ndp512", **overrides), public_shape(model.name), scales=scales)
            full = costs.device_expert_ps(16, 1)
            for bits, published in ((3, 5.0), (2, 8.0)):
                ratio = full / costs.device_expert_ps(bits, 1)
                yield Row(
                    "device side", f"{model.name} {bits}-bit, {text}", "x", published, ratio, "one expert, batch 1"
                )


def figure_3_rows(trace: Trace) -> Iterator[Row]:
    """How routing varies from step to step: the share of a decode step's experts that the step before used too.

    Beside it what the same steps in random order give: the part of it that is the request's own popularity.
    """
    p = trace.provenance
    generator = np.random.default_rng(0)
    asis, shuffled = [], []
    for sequence in trace.sequences:
        ids = sequence.decode_ids
        if len(ids) > 1:
            asis.append(_repeated(ids))
            shuffled.append(_repeated(ids[generator.permutation(len(ids))]))
    chance = 100 * p.top_k / p.num_experts
    text = f"{len(asis)} requests of {p.model}; Figure 3 shows two samples without figures"
    yield Row("figure 3", "experts used again in the next step", "%", None, 100 * float(np.mean(asis)), text)
    yield Row("figure 3", "the same steps in random order", "%", None, 100 * float(np.mean(shuffled)), text)
    yield Row("figure 3", "least and even routing", "%", None, chance, "k of E at random")
    yield Row("figure 3", "lowest request", "%", None, 100 * float(min(asis)), "an irregular sample, as its sample 1")
    yield Row("figure 3", "highest request", "%", None, 100 * float(max(asis)), "a structured sample, as its sample 2")


def _repeated(ids: NDArray[np.int64]) -> float:
    """ids [D, L, k]: mean share of a step's choices that are among those of the step before."""
    return float((ids[1:, :, :, None] == ids[:-1, :, None, :]).any(axis=3).mean())


def h_rule_rows() -> Iterator[Row]:
    """MoNDE's H at batch 1: the rounding decides the baseline."""
    share = 32 / (32 + 512)
    for model in MODELS:
        t = times_of(model.name)
        floor = t.attention + 2 * t.device
        ceil = t.attention + max(t.link + t.gpu, t.device)
        ours = layer_ms(model, VARIANTS[1])["ours3"]
        exact = f"H = 32/544 x 2 active = {2 * share:.2f}"
        yield Row("H rule", f"{model.name} floor (H = 0) ms per layer", "ms", None, floor, exact)
        yield Row("H rule", f"{model.name} ceil (H = 1) ms per layer", "ms", None, ceil, exact)
        yield Row("H rule", f"{model.name} ours 3-bit over ceil", "x", None, ceil / ours, "row A over ceil")


def trace_rows(trace: Trace, model: PaperModel) -> Iterator[Row]:
    """The same ratios from replaying a trace on the full model: banks, refresh, links and scales included."""
    for bits in (3, 2):
        settings = CompareSettings(
            model=model.name,
            systems=("context_aware", "monde"),
            policies=("prefill",),
            num_hot=model.num_hot,
            avg_bits=float(bits),
            bit_rule="layers",  # one width for all pairs of an expert, as published
        )
        result = compare(trace, settings)
        ours = next(row for row in result.rows if row.system == "context_aware")
        text = f"hit rate {ours.hit_mass:.3f} on {trace.provenance.model}, {result.num_requests} requests, h100-ndp512"
        for row in result.rows:
            if row.system == "monde":
                ratio = ours.decode_tokens_per_s / row.decode_tokens_per_s
                published = None if "ceil" in row.policy else model.decode_ratio[3 - bits]
                yield Row("trace", f"{model.name} {bits}-bit over MoNDE ({row.policy})", "x", published, ratio, text)


def reproduce(trace: Trace | None = None) -> Reproduction:
    """Closed forms, and with a trace of 8 experts top-2 also what replaying it gives for both models."""
    driven: tuple[Row, ...] = ()
    if trace is not None:
        driven = (*figure_3_rows(trace), *(row for model in MODELS for row in trace_rows(trace, model)))
    return Reproduction(
        "Context-Aware MoE Inference on CXL-Enabled GPU-NDP Systems, arXiv 2512.04476",
        (
            *variant_rows(),
            *inversion_rows(),
            *device_side_rows(),
            *end_to_end_rows(),
            *forward_rows(),
            *h_rule_rows(),
            *driven,
        ),
        (
            "with the stated hardware the model gives 6.3-7.1x / 7.1-8.4x over MoNDE with everything on the device, "
            "3.4-4.4x / 4.0-5.6x over MoNDE with an equal split, and meets 8.7/11.2 only with about 7 % of layer-steps "
            "migrated or with every layer split into one hot and one cold expert",
            "without bit-scalable units the advantage is 2.0x: low-bit weights alone do not speed up arrays that fp16 "
            "already keeps busy",
            "a higher hit rate does not help above about 0.6: two fp16 experts on the GPU take longer than one 2-bit "
            "expert on the device",
        ),
    )
