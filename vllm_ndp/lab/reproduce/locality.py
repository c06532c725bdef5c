"""Published locality of routing beside that of the synthetic presets fitted to it (traces/synthetic.py).

A row of several published figures, one for each kind of work, has their mean. Knows measures of locality and what
others measured. Does not know how the presets were found.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllm_ndp.lab.locality import Locality, locality
from vllm_ndp.lab.reproduce import Reproduction, Row
from vllm_ndp.traces.synthetic import routing_named, synthetic_trace

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
            yield _row(name, quantity, published, found.mean_hits(rule, places), text)


def _qwen3() -> Iterator[Row]:
    found, text = _of_preset(QWEN3), "25 requests, 129 decode tokens each, all 48 layers"
    for layer, published in REPEATS.items():
        yield _row(QWEN3, f"repeats, layer {layer}", published, found.repeats[layer], text)
    yield _row(QWEN3, "repeats, mean of layers", 0.427, found.repeats.mean(), text)
    yield from _hits(QWEN3, found, text)
    top, kinds = found.concentration[:, 16].mean(), (0.545, 0.608, 0.569, 0.620, 0.890)
    yield _row(QWEN3, "share of a request's top 16", float(np.mean(kinds)), top, f"{text}; five kinds of work")
    misses = f"tokens, LRU, {RESIDENT} of 128"
    early, later = (curve[:, RESIDENT].mean() for curve in (found.early_misses, found.later_misses))
    text += "; another project's three prompts"
    yield _row(QWEN3, f"misses of the first 64 {misses}", 0.138, early, text)
    yield _row(QWEN3, f"misses of later {misses}", LATER_MISSES, later, text)


def _near_chance() -> Iterator[Row]:
    for experts, top_k in ((64, 6), (160, 6)):
        ours = _of_preset(NEAR_CHANCE, num_experts=experts, top_k=top_k).repeats.mean() * experts / top_k
        name = f"repeats over chance, {top_k} of {experts}"
        yield Row(NEAR_CHANCE, name, "x", None, float(ours), "published: 1.1 to 2 in logs of single layers")


def _row(name: str, quantity: str, published: float, ours: float, assumptions: str) -> Row:
    return Row(name, quantity, "%", 100 * published, 100 * float(ours), assumptions)


def reproduce() -> Reproduction:
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
