"""How well measured times of GPU kernels foretell a layer that was held out.

Every shape (a layer of experts, a matrix, an attention of so many heads) is taken out with all its rows, and asked for.
An unseen model's shards are taken out together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.silicon import BITS, CARDS, EXPERTS, Kernel, Layer, fitted, kernel
from vllm_ndp.lab.reproduce import Reproduction, Row

LAYERS = tuple(name for names in EXPERTS.values() for name in names)
_ONE = 1 << 16


def held_out(of: Kernel, alike: Callable[[tuple[int, ...]], object]) -> NDArray[np.float64]:
    """Relative errors of every row; rows whose shapes are alike are held out together. Empty where nothing is left."""
    kinds = [alike(shape) for shape in of.groups]
    errors = []
    for row, kind in enumerate(kinds):
        among = np.array([other != kind for other in kinds])
        if among.any():
            foretold = of.ratio(tuple(of.sizes[row].tolist()), among) * of.base_ps[row] / _ONE
            errors.append(abs(foretold / of.took_ps[row] - 1))
    return np.array(errors, np.float64)


def layers_held_out(card: str, name: str, alike: Callable[[tuple[int, ...]], object]) -> NDArray[np.float64]:
    """The same of MoE layers, by what is fitted to them."""
    of, gpu = kernel(card, name), load_hardware(CARDS[card][0]).gpu
    kinds = [alike(shape) for shape in of.groups]
    fits: dict[tuple[int, ...], Layer] = {}
    errors = []
    for shape, kind, at, took in zip(of.groups, kinds, of.places, of.took_ps.tolist(), strict=True):
        among = np.array([other != kind for other in kinds])
        if not among.any():
            continue
        if shape not in fits:
            fits[shape] = fitted(of, shape, BITS[name], (gpu.hbm_bytes_per_s, gpu.flops_per_s), among)
        layer, pairs = fits[shape], shape[2] << at
        touched = min(pairs, shape[3])
        foretold = layer.fixed_ps + layer.growing_ps(touched, pairs, touched * layer.expert_bytes)
        errors.append(abs(foretold / took - 1))
    return np.array(errors, np.float64)


def _shape(shape: tuple[int, ...]) -> object:
    return shape


def _model(shape: tuple[int, ...]) -> object:
    """Shards of one model agree in all but how wide a shard is."""
    return shape[0], *shape[2:]


def _of_attention(shape: tuple[int, ...]) -> object:
    return shape[1:]


def _rows(card: str, name: str, what: str, errors: NDArray[np.float64]) -> list[Row]:
    if not len(errors):
        return []
    said = f"{len(errors)} rows; {what} held out"
    return [
        Row(f"{card} {name}", quantity, "%", None, 100 * float(np.quantile(errors, q)), said)
        for quantity, q in (("median error", 0.5), ("p95 error", 0.95))
    ]


def reproduce() -> Reproduction:
    rows: list[Row] = []
    cards: dict[str, dict[str, float]] = {}
    everything = []
    for card in CARDS:
        of_card = []
        for name in (*LAYERS, "gemm", "decode", "prefill"):
            of = kernel(card, name)
            if name in LAYERS:
                errors = layers_held_out(card, name, _shape)
                of_card.append(errors)
                rows += _rows(card, name, "all shards of its model", layers_held_out(card, name, _model))
            else:
                errors = held_out(of, _shape if name == "gemm" else _of_attention)
            rows += _rows(card, name, f"{of.num_left_out} warm or disturbed; its shape", errors)
        layers = np.concatenate(of_card)
        everything.append(layers)
        rows += _rows(card, "all MoE layers", "their shape", layers)
        cards[card] = _said(layers)
    return Reproduction(
        "aiconfigurator-core 0.12.0: vLLM 0.24.0 kernels timed by NVIDIA",
        tuple(rows),
        ("targets: MoE layers whose shape is held out, median 10 % and p95 25 % on each card",),
        {**_said(np.concatenate(everything)), "cards": cards},
    )


def _said(errors: NDArray[np.float64]) -> dict[str, float]:
    return {name: round(float(np.quantile(errors, q)), 4) for name, q in (("median", 0.5), ("p95", 0.95))}
