"""HOBBIT (arXiv 2411.01433): what its published figures imply on the paper's hardware, and its mix on a trace."""

from __future__ import annotations

from collections.abc import Iterator

from ndp_device.timing.public_models import public_shape
from vllm_ndp.lab.reproduce import Reproduction, Row
from vllm_ndp.lab.reproduce.paper import MODELS, VARIANTS, layer_ms, times_of
from vllm_ndp.lab.systems.hobbit import HIGH, LOW, PREFETCH_ACCURACY, SKIP, T1, T2, precision_classes
from vllm_ndp.traces.trace import Trace

MIX = (0.67, 0.30, 0.03)
"""Published for Mixtral-8x7B at T1 0.6, T2 0.9: high, low, skipped."""
LOW_SHARE = 4 / 16
OVER_HOBBIT = {"mixtral-8x7b": 18.0, "mixtral-8x22b": 19.0}
"""The paper's "up to 18x / 19x" over HOBBIT, of its 2-bit system."""
GPU_BYTES = 70e9
"""[O] of 80 GB, what is left for experts beside the dense part and the KV cache."""


def implied_rows() -> Iterator[Row]:
    mixed = MIX[0] + MIX[1] * LOW_SHARE
    for model in MODELS:
        t, shape = times_of(model.name), public_shape(model.name)
        gpu = t.attention + 2 * t.gpu
        over = OVER_HOBBIT[model.name]
        hobbit = over * layer_ms(model, VARIANTS[1])["ours2"]
        copy = hobbit - gpu
        yield Row("implied", f"{model.name} HOBBIT ms per layer", "ms", None, hobbit, f"{over:g}x row A at 2 bits")
        for text, share in (("67/30/3 mix", mixed), ("every miss int4", LOW_SHARE), ("every miss fp16", 1.0)):
            rate = 100 * copy / (2 * t.link * share)
            yield Row(
                "implied", f"{model.name} miss rate, {text}", "%", None, rate, "two experts per layer, no overlap"
            )
        yield Row("implied", f"{model.name} no cache", "ms", None, 2 * t.link * mixed, "67/30/3 mix, copies only")
        held = 100 * GPU_BYTES / (shape.num_layers * shape.num_experts * shape.expert_bytes)
        yield Row(
            "implied", f"{model.name} fp16 experts that fit in 70 GB", "%", None, held, "80 GB less the dense part"
        )
    yield Row("loading", "mixed precision over fp16 copies", "x", 1.38, 1 / mixed, "published 1.19-1.57x, middle 1.38")
    t = times_of("mixtral-8x7b")
    window = t.attention + 2 * t.gpu
    misses = OVER_HOBBIT["mixtral-8x7b"] * layer_ms(MODELS[0], VARIANTS[1])["ours2"] - window
    gain = 100 * PREFETCH_ACCURACY * window / misses
    yield Row("prefetch", "time saved at the implied miss rate", "%", 5.0, gain, "hidden behind one layer's compute")


def trace_rows(trace: Trace) -> Iterator[Row]:
    decode = [s.decode_weights for s in trace.sequences if len(s.decode_weights)]
    classes = [precision_classes(weights) for weights in decode]
    total = sum(c.size for c in classes)
    for name, kind, published in (("high", HIGH, MIX[0]), ("low", LOW, MIX[1]), ("skipped", SKIP, MIX[2])):
        share = sum(int((c == kind).sum()) for c in classes) / total
        assumption = f"T1 {T1}, T2 {T2} on {trace.provenance.model}; published for Mixtral-8x7B"
        yield Row("mix", name, "%", 100 * published, 100 * share, assumption)


def reproduce(trace: Trace | None = None) -> Reproduction:
    return Reproduction(
        "HOBBIT, arXiv 2411.01433",
        (*implied_rows(), *(trace_rows(trace) if trace is not None else ())),
        (
            "its own speed-ups are over llama.cpp and MoE-Infinity on an Orin and an RTX 4090, which are not modelled",
            "a 14 % miss rate is plausible for 8x7B (78 % of the experts fit); for 8x22B only with the int4 cache",
        ),
    )
