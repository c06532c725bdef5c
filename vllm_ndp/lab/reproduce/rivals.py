"""Published figures of rivals, each in at most 80 lines: CXL-Expert, HOBBIT, MoEpic, MoNDE and FreeToken; and of
routing. `compare` replays the systems."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.locality import Locality, locality
from vllm_ndp.lab.reproduce import Reproduction, Row
from vllm_ndp.lab.reproduce.paper import MODELS, VARIANTS, layer_ms, times_of
from vllm_ndp.lab.systems.expert_cache import Prices
from vllm_ndp.lab.systems.hobbit import HIGH, LOW, PREFETCH_ACCURACY, SKIP, T1, T2, precision_classes
from vllm_ndp.lab.systems.layer_ahead import THETAS, num_tops
from vllm_ndp.lab.systems.near_memory import moved_share
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.cache import LFU, LRU, RANDOM, lcp, visits
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import highest
from vllm_ndp.traces.synthetic import SyntheticSettings, routing_named, synthetic_trace
from vllm_ndp.traces.trace import Trace

# -- CXL-Expert --------------------------------------------------------------------------------------------------------

NUM_EXPERTS, TOKENS, ZIPF = 128, 1024, 1.5
GPU_TOKEN_S, CPU_TOKEN_S, COLD_EXPERT_S = 5e-6, 50e-6, 50e-6
PCIE, CXL = 32e9, 64e9
PERCENTILES = (0, 25, 50, 75, 90, 95, 97, 99, 100)


WEIGHTS, ACTIVATIONS = 200e6, 24e6
"""Bytes of an expert's weights and of the activations it exchanges, as stated and as fitted."""


def expected_tokens() -> NDArray[np.float64]:
    """Tokens of each expert, most popular first."""
    popularity = np.arange(1, NUM_EXPERTS + 1) ** -ZIPF
    tokens: NDArray[np.float64] = TOKENS * popularity / popularity.sum()
    return tokens


def latency_s(percentile: float, *, at_once: bool) -> float:
    """Experts above the percentile of load are loaded to the GPU, the host computes the others.

    at_once: the slower side counts, and the host reads experts at 8 bits over CXL, with their activations. Else one
    comes after the other, without those reads.
    """
    num_hot, tokens = round(NUM_EXPERTS * (1 - percentile / 100)), expected_tokens()
    gpu = num_hot * WEIGHTS / PCIE + tokens[:num_hot].sum() * GPU_TOKEN_S
    host, num_cold = tokens[num_hot:].sum() * CPU_TOKEN_S, NUM_EXPERTS - num_hot
    if at_once:
        return float(max(gpu, num_cold * (WEIGHTS / 2 + ACTIVATIONS) / CXL + host))
    return float(gpu + host + num_cold * COLD_EXPERT_S)


def cxl_expert() -> Reproduction:
    """CXL-Expert: its three latencies in closed form, under two readings of its text.

    128 experts, top-1, 1024 tokens with Zipf(1.5) popularity, expected counts. "50 us per cold expert" and "24 MB of
    activations per expert" are fitted: the text gives neither, but nothing else reproduces 213 and 48 ms.
    """
    text = f"{WEIGHTS / 1e6:.2f} MB per expert, {ACTIVATIONS / 1e6:.3g} MB of activations"
    seconds = {
        "baseline": (NUM_EXPERTS * WEIGHTS / PCIE + TOKENS * GPU_TOKEN_S, 805.0, 1270.0),
        "mondelike": (NUM_EXPERTS * ACTIVATIONS / CXL, 48.0, 21300.0),
        "cxl_expert": (latency_s(75, at_once=False), 213.0, 4800.0),
    }
    rows = []
    for name, (took, ms, rate) in seconds.items():
        rows.append(Row(name, "latency", "ms", ms, 1e3 * took, text))
        rows.append(Row(name, "throughput", "tokens/s", rate, TOKENS / took, text))
    for name, at_once in (("sweep", False), ("side by side", True)):
        for percentile in PERCENTILES:
            took = 1e3 * latency_s(percentile, at_once=at_once)
            published = 213.0 if percentile == 75 else None
            rows.append(Row(f"{name} {percentile}%", "latency", "ms", published, took, "experts above it are hot"))
    return Reproduction("CXL-Expert, by its description", tuple(rows), NOTES)


NOTES = (
    "one after the other gives 213 ms, but no peak at 75 %; GPU and host side by side peak there and take 204.8 ms",
    "the baseline loads all 128 experts in every step, which contradicts that hot ones are cached",
    "with real bytes the baseline takes 38.7 ms, and the 'ideal' 48 ms loses to it; `compare` replays the system",
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


# -- MoEpic ------------------------------------------------------------------------------------------------------------

CACHED = 30
BUDGETS = (15, 20, 30)
"""Experts' bytes per layer in GPU memory; the published budget of the theta sweep is not public."""
LOAD_MS, COMPUTE_MS = 165.0, 57.0
PUBLISHED_HITS = {"lcp": 62.21, "lfu": 60.68, "lru": 56.38, "random": 49.69}
SETTINGS = SyntheticSettings(
    4, 60, 4, num_requests=16, prompt_len=32, decode_len=512, concentration=20.0, signal=0.35, drift=0.8, seed=1
)


def hit_rate(batches: Batches, prior: ImportanceScore, kind: str, slots: int) -> float:
    priority = {"lcp": lcp(), "lfu": LFU, "lru": LRU, "random": RANDOM}[kind]
    hit = visits(batches.loads, highest(prior.values, slots), slots, priority).hit
    return float(hit.sum() / (batches.loads.rows > 0).sum())


def token_ms(hits: NDArray[np.float64]) -> NDArray[np.float64]:
    """[thetas], time per token by the rule of the replayed system, every prediction right, one layer that is all of
    them. hits [thetas]: share of experts whose top is cached; with theta 0 every expert has an empty one.

    Bottoms hide behind what the layer before computes after its own copies, never below the link's own time.
    """
    hits = np.where(THETAS == 0, 1.0, hits)
    bottoms, late, ready = hits * (1 - THETAS) * LOAD_MS, (1 - hits) * LOAD_MS, THETAS * hits * COMPUTE_MS
    waiting = COMPUTE_MS - ready
    times: NDArray[np.float64] = np.maximum(ready, np.maximum(bottoms - waiting, 0.0) + late) + waiting
    return times


def moepic() -> Reproduction:
    """MoEpic (arXiv 2509.08342): cache priorities and the split on a synthetic trace of its model's shape.

    Qwen1.5-MoE-A2.7B: 60 routed experts, top-4, 30 cached. Its routing traces are not public, so popularity and request
    signal are ours and only orders and ratios can be compared. Times are in units of the published motivation: 165 ms
    of loading against 57 ms of compute per token without a cache.
    """
    trace = synthetic_trace(SETTINGS, "qwen1.5-moe (synthetic)")
    batches = Batches.of(trace)
    prior = ImportanceScore.from_weights(np.sum([stats.counts for (stats,) in batches.prompts], axis=0))
    text = f"synthetic routing, signal {SETTINGS.signal}, drift {SETTINGS.drift}, {CACHED} of 60 experts cached"
    rows = [
        Row("hit rate", kind, "%", published, 100 * hit_rate(batches, prior, kind, CACHED), text)
        for kind, published in PUBLISHED_HITS.items()
    ]
    for slots in BUDGETS:
        tops = [num_tops(slots, theta, SETTINGS.num_experts) for theta in THETAS.tolist()]
        times = token_ms(np.array([hit_rate(batches, prior, "lcp", count) if count else 0.0 for count in tops]))
        best = int(times.argmin())
        name, text = f"misses wait, {slots} of 60", "165 ms of loading, 57 ms of compute; budget not published"
        rows.append(Row(name, "best theta", "", 0.4, float(THETAS[best]), text))
        for end, quantity, published in ((0, "prefetch only (theta 0)", 37.97), (-1, "cache only (theta 1)", 48.67)):
            below = 100 * (1 - times[best] / times[end])
            rows.append(Row(name, f"latency below {quantity}", "%", published, float(below), "either end"))
        rows += [
            Row(f"{name}, theta {theta:g}", "time per token", "ms", None, float(ms), text)
            for theta, ms in zip(THETAS, times, strict=True)
        ]
    return Reproduction(
        "MoEpic, arXiv 2509.08342 (reconstruction)",
        tuple(rows),
        (
            "mechanism read from third-party descriptions; the equations of the published solver are not public",
            "one reading is ours: the top part is cached, the whole expert is computed and the split is lossless",
            "an interior optimum of theta needs misses that wait for their gate: only then is theta 0 'prefetch only' "
            "and theta 1 'cache only', as published; prefetched like bottoms, whole experts save more bytes on routing "
            "with any skew, and theta 1 is never worse",
        ),
    )


# -- MoNDE -------------------------------------------------------------------------------------------------------------

ENCODER, DECODER, EXPERTS = 7.5, 3.7, 128
LINK, DEVICE = 32e9, 512e9
"""Peak rates of its public re-implementation, bytes/s."""
MOST_ROWS = 64


def gain_by_rows(costs: Costs, active: int) -> NDArray[np.float64]:
    """Speed-up of MoNDE's rule (the best H) over copying every expert, [MOST_ROWS].

    For a layer of `active` experts with 1, 2, ... rows each.
    """
    device, gpu = costs.device_experts_ps(MOST_ROWS)[FULL_PRECISION_BITS], costs.gpu_experts_ps(MOST_ROWS)
    moved = np.arange(active + 1)
    gains = []
    for rows in range(1, MOST_ROWS + 1):
        first = min(costs.copy_ps, gpu[rows]) * (moved > 0)  # nothing to compute yet, or nothing left to copy
        copied = moved * max(costs.copy_ps, gpu[rows]) + first
        stays = (active - moved) * device[rows]
        gains.append(copied[-1] / np.maximum(copied, stays).min())
    return np.array(gains)


def rows_of_models() -> Iterator[Row]:
    for name in ("mixtral-8x7b", "qwen3-30b-a3b"):
        costs = Costs(load_hardware("h100-ndp512", times="roofline"), model_named(name))
        gains = gain_by_rows(costs, EXPERTS)
        text = f"experts of {name}, {EXPERTS} of them in use with as many rows each, best H"
        yield Row(name, "experts of a layer, 1 row each", "x", None, float(gains[0]), text)
        yield Row(name, "the same, 16 rows each", "x", None, float(gains[15]), text)
        enough = int(np.argmax(gains <= ENCODER)) + 1 if (gains <= ENCODER).any() else MOST_ROWS
        yield Row(name, "rows per expert that leave the published 7.5x", "rows", None, float(enough), text)
        yield Row(name, "H of the rule, share of active experts", "%", None, 100 * moved_share(costs), "preset's rates")


def monde() -> Reproduction:
    """MoNDE (arXiv 2405.18832): what its published speed-ups over moving parameters can and cannot be, on its own
    hardware.

    The baseline is a framework that copies the experts in use to the GPU. Published, with 128 experts: up to 7.5 times
    as fast in encoders and 3.7 times in decoders. Source: its abstract and third-party summaries; its full text could
    not be read. Its two limits follow from its rule alone. The gain of few rows is a ratio of bandwidths. The gain of
    many rows ends where the units compute as long as the link copies. Knows one layer of equally loaded experts.
    """
    limit = (LINK + DEVICE) / LINK
    share = (1 / DECODER - 1 / limit) / (1 - 1 / limit)
    peak = "peak rates: 32 GB/s of link, 512 GB/s of device"
    return Reproduction(
        "MoNDE, arXiv 2405.18832",
        (
            Row("rule", "H, share of active experts", "%", None, 100 * LINK / (LINK + DEVICE), peak),
            Row("limit", "experts of a layer, few rows each", "x", None, limit, f"both sides at once, {peak}"),
            Row(
                "decoder", "share of the baseline's time that is no copy", "%", None, 100 * share,
                f"implied by {DECODER:g}x if experts gain {limit:g}x and the rest nothing",
            ),
            *rows_of_models(),
        ),
        (
            "a decoder gains 3.7x only where more than a fifth of the baseline's time is no copy: encoder-decoder "
            "models with experts in every second or fourth layer, or a cache. For a decoder of experts in every layer "
            "without a cache the same rule gives the limit, which is what `compare` shows of monde and gpu_on_demand",
            "an encoder's 7.5x is inside what the rule gives between few rows per expert and as many as the units can "
            "keep up with; its own batch and lengths could not be read, so it is neither confirmed nor refuted",
            "MoNDE's units, link and memory are the preset's; its models (Switch, NLLB-MoE) are not among our shapes, "
            "and a ratio of copies and reads of one expert does not depend on the expert's size",
        ),
    )  # fmt: skip


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


def divided(host: float, link: float, misses: int) -> int:
    """How many are copied by the rule of `expert_cache` at these rates; the GPU's part costs nothing."""
    prices = Prices([0.0, 0.0], [0.0, 1 / host], [0.0, 0.0], 0.0, 1 / link, 0.0)
    return prices.divided([1] * misses, 0.0, 0.0, 0.0, 0.0)[1]


def freetoken() -> Reproduction:
    """FreeToken (arXiv 2608.16157) with contended prices, from the threads of its repository named in the rows."""
    rows = []
    for box, (host, link, host_at_once, link_at_once, share) in BOXES.items():
        text = f"host and link at once: {host_at_once:g} and {link_at_once:g} GB/s; alone {host:g} and {link:g}"
        copied = divided(host_at_once, link_at_once, 10_000) / 100
        rows.append(Row(box, "misses that are copied", "%", share, copied, text))
        slower = 100 * (1 - (host_at_once + link_at_once) / (host + link))
        rows.append(Row(box, "both at once below the sum of both alone", "%", None, slower, text))
    host, link, host_at_once, link_at_once, _ = BOXES["pull 232"]
    token = 48 * EXPERT_GB
    rest = 1 / COPIES_ALONE - 6.913 * token / link
    text = "all but the misses as with copies alone"
    for prices, h, c in (("contended", host_at_once, link_at_once), ("alone", host, link)):
        gain = 1 / (rest + token * max(3.19 / h, 1.07 / c)) / COPIES_ALONE
        rows.append(Row("pull 232", f"hybrid over copies alone, {prices}", "x", HYBRID / COPIES_ALONE, gain, text))
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
