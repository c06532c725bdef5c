"""csrc/lanes.cpp in numpy, one dense [lane, expert] array per quantity: slow and obviously right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.lab.vectorised.batches import Loads

NEVER = -1e6
IN_USE = 1e9

# (parameters, last use, frequency, step) -> priority, all [G, L, E]
PRIORITIES: dict[str, Callable[..., NDArray[np.float64]]] = {
    "lru": lambda p, last, frequency, step: last,
    "lfu": lambda p, last, frequency, step: frequency + 1e-7 * (last - NEVER),
    "faded": lambda p, last, frequency, step: frequency * p[np.minimum(step - last, len(p) - 1).astype(int)],
    "expected": lambda p, last, frequency, step: frequency + p,
}


def dense(loads: Loads, num_experts: int) -> NDArray[np.int64]:
    """[G, D, L, E], rows of each expert."""
    out = np.zeros((*loads.rows.shape[:3], num_experts), np.int64)
    for cell in np.ndindex(loads.rows.shape[:3]):
        np.add.at(out[cell], loads.experts[cell], loads.rows[cell])
    return out


def visits(
    tokens: NDArray[np.int64],
    start: NDArray[np.bool_],
    capacity: NDArray[np.int64],
    kind: str,
    parameters: NDArray[np.float64],
    frequency: NDArray[np.float64],
    predict: int,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(hit, predicted) [G, D, L, E] of a cache that holds start [G, L, E] at first, capacity [L] experts."""
    cached, frequency = start.copy(), frequency.copy()
    last = np.full(start.shape, NEVER)
    out = np.zeros((2, *tokens.shape), np.bool_)
    for step in range(tokens.shape[1]):
        used = tokens[:, step] > 0
        guessed = np.zeros(start.shape, np.bool_)
        best = np.argsort(-PRIORITIES[kind](parameters, last, frequency, step), axis=2, kind="stable")[..., :predict]
        np.put_along_axis(guessed, best, True, axis=2)
        out[0][:, step], out[1][:, step] = used & cached, used & ~cached & guessed
        last[used] = step
        frequency += tokens[:, step]
        rank = PRIORITIES[kind](parameters, last, frequency, step) + IN_USE * used
        order = np.argsort(-np.where(cached | used, rank, -np.inf), axis=2, kind="stable")
        stays = np.zeros(start.shape, np.bool_)
        np.put_along_axis(stays, order, np.arange(start.shape[2]) < capacity[:, None], axis=2)
        missed = np.any(used & ~cached, axis=2)[:, :, None]
        cached = np.where(missed, stays & (cached | used), cached)
    return out[0], out[1]


def follow(
    ids: NDArray[np.int64],
    tokens: NDArray[np.int64],
    copies_per_step: NDArray[np.float64],
    memory: float,
    hysteresis: float,
    heat: NDArray[np.float64],
    hot: NDArray[np.bool_],
    bits: NDArray[np.uint8],
) -> tuple[int, NDArray[np.uint8], NDArray[np.bool_], NDArray[np.uint8]]:
    """(exchanges, widths [G, B, D, L, k], hot, bits) of adaptive.py's rule."""
    hot, bits = hot.copy(), bits.copy()
    widths = np.empty(ids.shape, np.uint8)
    credit, copied, groups = np.zeros(len(heat)), 0, np.arange(len(heat))
    for step in range(ids.shape[2]):
        widths[:, :, step] = np.take_along_axis(bits, ids[:, :, step], axis=3)
        heat = (1.0 - 1.0 / memory) * heat + tokens[:, step]
        credit = np.minimum(credit + copies_per_step, 1.0)
        hottest = np.where(hot, -np.inf, heat).argmax(axis=2)
        coldest = np.where(hot, heat, np.inf).argmin(axis=2)
        came = np.take_along_axis(heat, hottest[:, :, None], 2)[:, :, 0]
        left = np.take_along_axis(heat, coldest[:, :, None], 2)[:, :, 0]
        gain = np.where(hot.any(axis=2) & ~hot.all(axis=2), came - (1 + hysteresis) * left, 0.0)
        layer = gain.argmax(axis=1)
        go = np.flatnonzero((gain[groups, layer] > 0) & (credit >= 1.0) & tokens[:, step].any(axis=(1, 2)))
        at, new, old = layer[go], hottest[go, layer[go]], coldest[go, layer[go]]
        hot[go, at, new], hot[go, at, old] = True, False
        bits[go, :, at, old] = bits[go, :, at, new]
        bits[go, :, at, new] = 0
        credit[go] = 0.0
        copied += len(go)
    return copied, widths, hot, bits


def _enter(
    held: dict[int, set[tuple[int, int]]],
    places: dict[int, int],
    value: NDArray[np.float64],
    wanted: set[tuple[int, int]],
    layer_weight: float,
    now: tuple[int, int, int],
    kind: int,
    expert: tuple[int, int],
) -> None:
    """Bring an expert into one of HOBBIT's caches."""
    step, layer, layers = now
    if len(held[kind]) == places[kind]:
        ranked = []
        for of in range(layers):
            own = [(value[e], -e[1], e) for e in held[kind] if e[0] == of and e not in wanted]
            if own:
                least = min(own)[2]
                near = layer_weight * (1.0 - ((of - layer) % layers) / layers)
                ranked.append((value[least] / (step + 1) + near, -of, least))
        if not ranked:
            return
        held[kind].remove(min(ranked)[2])
    held[kind].add(expert)


def two_caches(
    experts: NDArray[np.int64],
    need: NDArray[np.uint8],
    guessed: NDArray[np.int64],
    guessed_as: NDArray[np.uint8],
    high: tuple[NDArray[np.bool_], int],
    low: tuple[NDArray[np.bool_], int],
    weights: NDArray[np.float64],
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(flags [G, D, L, S], ordered [G, D, L, S']) of HOBBIT's caches, each a set of (layer, expert)."""
    groups, steps, layers, _ = experts.shape
    flags, ordered = np.zeros(experts.shape, np.uint8), np.zeros(guessed.shape, np.uint8)
    for group in range(groups):
        held = {1: {*zip(*np.nonzero(high[0]), strict=True)}, 2: {*zip(*np.nonzero(low[0]), strict=True)}}
        places = {1: high[1], 2: low[1]}
        value, last = np.zeros((2, *high[0].shape))
        for step, layer in np.ndindex(steps, layers):
            cell = group, step, layer
            wanted: set[tuple[int, int]] = set()

            enter = partial(_enter, held, places, value, wanted, weights[3], (step, layer, layers))
            ahead: dict[int, set[tuple[int, int]]] = {1: set(), 2: set()}
            wanted |= {(layer, int(e)) for e, kind in zip(guessed[cell], guessed_as[cell], strict=True) if kind}
            for slot, kind in enumerate(guessed_as[cell].tolist()):
                expert = layer, int(guessed[cell][slot])
                if not kind:
                    continue
                if expert in held[1] or (kind == 2 and expert in held[2]):
                    continue
                ordered[cell][slot] = kind
                ahead[kind].add(expert)
                enter(kind, expert)
            used = [
                ((layer, int(experts[cell][slot])), kind, slot) for slot, kind in enumerate(need[cell].tolist()) if kind
            ]
            for expert, kind, _ in used:
                value[expert] += (
                    weights[0] * (step + 1 - last[expert]) + weights[1] + (weights[2] if kind == 1 else 0.0)
                )
                last[expert] = step + 1
                wanted.add(expert)
            for expert, kind, slot in used:
                if expert in ahead[1]:
                    flags[cell][slot] = 2
                elif expert in held[1]:
                    flags[cell][slot] = 1
                elif kind == 1:
                    flags[cell][slot] = 4
                    enter(1, expert)
                elif expert in ahead[2]:
                    flags[cell][slot] = 2 | 8
                elif expert in held[2]:
                    flags[cell][slot] = 1 | 8
                else:
                    flags[cell][slot] = 4 | 8
                    enter(2, expert)
    return flags, ordered
