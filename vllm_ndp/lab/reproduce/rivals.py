"""Published figures of rivals, each in at most 80 lines: CXL-Expert, HOBBIT and FreeToken; and of routing.

`compare` replays the systems."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ndp_device.timing.public_models import public_shape
from vllm_ndp.lab.locality import Locality, locality
from vllm_ndp.lab.reproduce import Reproduction, Row
from vllm_ndp.lab.reproduce.paper import MODELS, VARIANTS, layer_ms, times_of
from vllm_ndp.lab.systems.expert_cache import Prices
from vllm_ndp.lab.systems.hobbit import HIGH, LOW, PREFETCH_ACCURACY, SKIP, T1, T2, precision_classes
from vllm_ndp.traces.synthetic import routing_named, synthetic_trace
from vllm_ndp.traces.trace import Trace

# -- CXL-Expert --------------------------------------------------------------------------------------------------------

NUM_EXPERTS, TOKENS, ZIPF = 128, 1024, 1.5
GPU_TOKEN_S, CPU_TOKEN_S, COLD_EXPERT_S = 5e-6, 50e-6, 50e-6
PCIE, CXL = 32e9, 64e9


WEIGHTS, ACTIVATIONS = 200e6, 24e6
"""Bytes of an expert's weights and of the activations it exchanges, as stated and as fitted."""


def cxl_expert() -> Reproduction:
    """CXL-Expert: its three latencies in closed form.

    128 experts, top-1, 1024 tokens with Zipf(1.5) popularity, expected counts. "50 us per cold expert" and "24 MB of
    activations per expert" are fitted: the text gives neither, but nothing else reproduces 213 and 48 ms.
    """
    text = f"{WEIGHTS / 1e6:.2f} MB per expert, {ACTIVATIONS / 1e6:.3g} MB of activations"
    # Experts above the 75th percentile of load are loaded to the GPU, then the host computes the others.
    popularity = np.arange(1, NUM_EXPERTS + 1) ** -ZIPF
    tokens, num_hot = TOKENS * popularity / popularity.sum(), NUM_EXPERTS // 4
    gpu = num_hot * WEIGHTS / PCIE + tokens[:num_hot].sum() * GPU_TOKEN_S
    took = float(gpu + tokens[num_hot:].sum() * CPU_TOKEN_S + (NUM_EXPERTS - num_hot) * COLD_EXPERT_S)
    seconds = {
        "baseline": (NUM_EXPERTS * WEIGHTS / PCIE + TOKENS * GPU_TOKEN_S, 805.0, 1270.0),
        "mondelike": (NUM_EXPERTS * ACTIVATIONS / CXL, 48.0, 21300.0),
        "cxl_expert": (took, 213.0, 4800.0),
    }
    rows = []
    for name, (took, ms, rate) in seconds.items():
        rows.append(Row(name, "latency", "ms", ms, 1e3 * took, text))
        rows.append(Row(name, "throughput", "tokens/s", rate, TOKENS / took, text))
    return Reproduction(
        "CXL-Expert, by its description",
        tuple(rows),
        (
            "the baseline loads all 128 experts in every step, which contradicts that hot ones are cached",
            "with real bytes the baseline takes 38.7 ms, and the 'ideal' 48 ms loses to it",
        ),
    )


# -- HOBBIT ------------------------------------------------------------------------------------------------------------

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


def hobbit(trace: Trace | None = None) -> Reproduction:
    """HOBBIT (arXiv 2411.01433): what its published figures imply on the paper's hardware, and its mix on a trace."""
    return Reproduction(
        "HOBBIT, arXiv 2411.01433",
        (*implied_rows(), *(trace_rows(trace) if trace is not None else ())),
        (
            "its own speed-ups are over llama.cpp and MoE-Infinity on an Orin and an RTX 4090, which are not modelled",
            "a 14 % miss rate is plausible for 8x7B (78 % of the experts fit); for 8x22B only with the int4 cache",
        ),
    )


# -- FreeToken ---------------------------------------------------------------------------------------------------------

BOXES = {
    "pull 38": (65.9, 25.2, 71.5, 14.8, 17.2),
    "pull 232": (63.8, 24.9, 54.0, 23.9, 30.7),
    "issue 281": (65.8, 25.1, 43.4, 21.6, 33.2),
    "issue 436": (29.97, 13.09, 21.89, 8.41, 27.8),
}
"""GB/s of the host's kernels and of copies, each alone and both at once; published share of misses that are copied."""
EXPERT_GB = 3 * 2560 * 640 * 4.5 / 8 / 1e9
"""Of Qwen3.8-Flash-Next in NVFP4; it has 48 layers."""
COPIES_ALONE, HYBRID = 14.896, 12.753
"""Tokens/s of pull 232, with 6.913 misses a layer and with 1.07 copied and 3.19 computed ones."""


def freetoken() -> Reproduction:
    """FreeToken (arXiv 2608.16157) with contended prices, from the threads of its repository named in the rows."""
    rows = []
    for box, (host, link, host_at_once, link_at_once, share) in BOXES.items():
        text = f"host and link at once: {host_at_once:g} and {link_at_once:g} GB/s; alone {host:g} and {link:g}"
        # the rule of `expert_cache` for 10 000 misses at these rates; the GPU's part costs nothing
        prices = Prices([0.0, 0.0], [0.0, 1 / host_at_once], [0.0, 0.0], 0.0, 1 / link_at_once, 0.0)
        copied = prices.divided([1] * 10_000, 0.0, 0.0, 0.0, 0.0)[1] / 100
        rows.append(Row(box, "misses that are copied", "%", share, copied, text))
        slower = 100 * (1 - (host_at_once + link_at_once) / (host + link))
        rows.append(Row(box, "both at once below the sum of both alone", "%", None, slower, text))
    host, link, host_at_once, link_at_once, _ = BOXES["pull 232"]
    token = 48 * EXPERT_GB
    rest = 1 / COPIES_ALONE - 6.913 * token / link
    text = "all but the misses as with copies alone"
    for kind, h, c in (("contended", host_at_once, link_at_once), ("alone", host, link)):
        gain = 1 / (rest + token * max(3.19 / h, 1.07 / c)) / COPIES_ALONE
        rows.append(Row("pull 232", f"hybrid over copies alone, {kind}", "x", HYBRID / COPIES_ALONE, gain, text))
    missing = 1 / HYBRID - rest - token * max(3.19 / host_at_once, 1.07 / link_at_once)
    rows.append(
        Row("pull 232", "implied: a layer on the host takes beside its reads", "ms", None, 1e3 * missing / 48, text)
    )
    return Reproduction(
        "FreeToken with contended prices, github.com/FlashML-org/FreeToken",
        tuple(rows),
        (
            "contended prices give the published division of misses, but not the speed: hybrid was .86 times as fast "
            "as copies alone in pull 232, .96 in pull 38 and 1.29 in issue 281, whose misses are not stated",
            "`compare` prices host and link as if each were alone, and a layer on the host at a message's hop",
        ),
    )


# -- routing -----------------------------------------------------------------------------------------------------------

QWEN3, GPT_OSS, QWEN38, NEAR_CHANCE = "qwen3-30b-a3b", "gpt-oss-120b", "qwen3.8-flash-next", "near-chance"
SIZES = {
    QWEN3: {"num_requests": 25, "prompt_len": 32, "decode_len": 129},
    GPT_OSS: {"num_layers": 4, "prompt_len": 8},
    QWEN38: {"num_layers": 2, "num_experts": 512, "top_k": 10, "num_requests": 8, "prompt_len": 8},
    NEAR_CHANCE: {"num_layers": 2, "num_requests": 8, "prompt_len": 8},
}
REPEATS = {0: 0.079, 6: 0.562, 7: 0.597, 18: 0.556, 19: 0.540, 30: 0.540, 31: 0.577, 47: 0.206}
HITS = {
    (QWEN3, "random"): {8: 0.365, 16: 0.582, 32: 0.767, 64: 0.906},
    (QWEN3, "lfu"): {8: 0.425, 16: 0.615, 32: 0.795, 64: 0.917},
    (QWEN3, "lru"): {8: 0.424, 16: 0.647, 32: 0.810, 64: 0.918},
    (QWEN3, "oracle"): {8: 0.608, 16: 0.784, 32: 0.888, 64: 0.929},
    (GPT_OSS, "lru"): {4: (0.08 + 0.09) / 2},
    (QWEN38, "lru"): {93: 0.435, 186: 0.62, 279: 0.72, 372: 0.79, 512: 0.85},
    (QWEN38, "static"): {32: 0.10},  # another report on the same model
}
"""Hits by places of caches, one per layer, empty at first. Of Qwen3 25 prompts, 129 decode tokens each."""
RESIDENT = 51
"""40 % of the experts."""
LATER_MISSES = 0.053


def _of_preset(name: str, **sizes: int) -> Locality:
    return locality(synthetic_trace(routing_named(name).settings(name, **SIZES[name], **sizes)))


def _hits(name: str, found: Locality, text: str) -> Iterator[Row]:
    for (of, rule), hits in HITS.items():
        for places, published in hits.items() if of == name else ():
            quantity = f"hits, {rule}, {places} of {found.num_experts}"
            yield _percent(name, quantity, published, found.mean_hits(rule, places), text)


def _qwen3() -> Iterator[Row]:
    found, text = _of_preset(QWEN3), "25 requests, 129 decode tokens each, all 48 layers"
    for layer, published in REPEATS.items():
        yield _percent(QWEN3, f"repeats, layer {layer}", published, found.repeats[layer], text)
    yield _percent(QWEN3, "repeats, mean of layers", 0.427, found.repeats.mean(), text)
    yield from _hits(QWEN3, found, text)
    top, kinds = found.concentration[:, 16].mean(), (0.545, 0.608, 0.569, 0.620, 0.890)
    yield _percent(QWEN3, "share of a request's top 16", float(np.mean(kinds)), top, f"{text}; five kinds of work")
    misses = f"tokens, LRU, {RESIDENT} of 128"
    early, later = (curve[:, RESIDENT].mean() for curve in (found.early_misses, found.later_misses))
    text += "; another project's three prompts"
    yield _percent(QWEN3, f"misses of the first 64 {misses}", 0.138, early, text)
    yield _percent(QWEN3, f"misses of later {misses}", LATER_MISSES, later, text)


def _near_chance() -> Iterator[Row]:
    for experts, top_k in ((64, 6), (160, 6)):
        ours = _of_preset(NEAR_CHANCE, num_experts=experts, top_k=top_k).repeats.mean() * experts / top_k
        name = f"repeats over chance, {top_k} of {experts}"
        yield Row(NEAR_CHANCE, name, "x", None, float(ours), "published: 1.1 to 2 in logs of single layers")


def _percent(name: str, quantity: str, published: float, ours: float, assumptions: str) -> Row:
    return Row(name, quantity, "%", 100 * published, 100 * float(ours), assumptions)


def routing() -> Reproduction:
    """Published locality of routing beside that of the synthetic presets fitted to it (traces/synthetic.py).

    A row of several published figures, one for each kind of work, has their mean.
    """
    smaller = ((GPT_OSS, "4 layers"), (QWEN38, "2 layers, 8 requests"))
    return Reproduction(
        "published locality of routing: moe-trace (findings 004 to 007), imp #1359 and #2061, BigMoeOnEdge #33",
        (*_qwen3(), *(row for name, text in smaller for row in _hits(name, _of_preset(name), text)), *_near_chance()),
        (
            f"later tokens of {QWEN3} cannot miss {100 * LATER_MISSES:g} % beside the other source's hits: between 32 "
            "and 64 places LRU misses 11.5 % of 129 tokens' choices at 51, so with 13.8 % of the first 64 the others "
            "miss 9.2 %",
            f"{GPT_OSS}'s figure is 8 to 9 %, of which the middle stands here",
        ),
    )
