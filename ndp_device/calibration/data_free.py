"""Nested replicas from the weights alone: what is served where nobody has calibrated. numpy, no torch, no data.

One code per weight serves every width, because the k-bit replica is its top k bits. Each width ("track") has its own
scale and offset per group, and Lloyd's two steps alternate: given the codes, fit every track by least squares; given
the fits, take for each weight the code with the smallest sum over tracks of track_weight * (w - w_track(code))**2.
Both steps lower that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ndp_device.calibration.loss_table import expert_losses
from ndp_device.kernels.reference import to_float32
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import LayerReplicas
from ndp_device.replicas.packing import pack
from ndp_device.replicas.replica import QuantizedExpert, QuantizedMatrix

Float32 = NDArray[np.float32]

_CLIP = 0.9
"""Starting range as a part of the group's min..max. The best of four ranges per group: 3 % less error, 4x the time."""
_ROUNDS = 6
"""12 rounds: 1 % less error."""
PROBE_ROWS = 64
"""Random rows whose output error stands in for a loss table."""


def quantize_layer(
    checkpoint: CheckpointExperts,
    layer: int,
    group_size: int,
    track_weights: Mapping[int, float],
    *,
    advance: Callable[[], None],
) -> LayerReplicas:
    """All experts of a layer; `advance` is called after each."""
    norm_weight = to_float32(*checkpoint.norm_weight(layer))
    experts, losses = [], []
    for expert in range(checkpoint.shape.num_experts):
        full = checkpoint.expert(layer, expert)
        w1, w3, w2 = (to_float32(w, full.dtype) for w in (full.w1, full.w3, full.w2))
        w13s = quantize_nested(np.concatenate([w1, w3]), group_size, track_weights)
        w2s = quantize_nested(w2, group_size, track_weights)
        experts.append({bits: QuantizedExpert(bits, w13s[bits], w2s[bits]) for bits in w13s})
        rng = np.random.default_rng([layer, expert])
        inputs = rng.standard_normal((PROBE_ROWS, norm_weight.size), dtype=np.float32) * norm_weight
        losses.append(expert_losses(inputs, full, experts[-1]))
        advance()
    loss, relative_loss = (np.stack(table) for table in zip(*losses, strict=True))
    nobody = np.zeros(len(experts))
    return LayerReplicas(tuple(experts), loss, relative_loss, nobody.astype(np.int64), nobody)


def quantize_nested(
    weights: Float32, group_size: int, track_weights: Mapping[int, float]
) -> dict[int, QuantizedMatrix]:
    """W [N, C] -> the matrix at every width in track_weights; the narrower ones share the widest one's planes."""
    bits = tuple(sorted(track_weights))
    lam = np.array([track_weights[b] for b in bits], dtype=np.float32)
    starts = range(0, weights.shape[1], group_size)
    groups = [_fit_group(weights[:, start : start + group_size], bits, lam) for start in starts]
    planes = pack(np.concatenate([codes for codes, _, _ in groups], axis=1), bits[-1])
    return {
        width: QuantizedMatrix(
            width,
            planes[:width],
            np.stack([scale[track] for _, scale, _ in groups], axis=1),
            np.stack([offset[track] for _, _, offset in groups], axis=1),
            group_size,
        )
        for track, width in enumerate(bits)
    }


def _fit_group(
    weights: Float32, bits: tuple[int, ...], lam: Float32
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """One group [N, g] -> codes [N, g], scale and offset [tracks, N]."""
    codes = _uniform_codes(weights, bits[-1])
    for _ in range(_ROUNDS):
        codes = _assign(weights, codes, bits, lam)
    return codes, *_fit(weights, codes, bits)


def _uniform_codes(weights: Float32, bits: int) -> NDArray[np.uint8]:
    low, high = weights.min(axis=1, keepdims=True), weights.max(axis=1, keepdims=True)
    middle, span = (high + low) / 2, np.maximum(high - low, np.finfo(np.float32).tiny) * _CLIP
    steps = (1 << bits) - 1
    codes: Float32 = np.clip(np.rint(((weights - middle) / span + 0.5) * steps), 0, steps)
    return codes.astype(np.uint8, copy=False)


def _fit(
    weights: Float32, codes: NDArray[np.uint8], bits: tuple[int, ...]
) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Least squares of the weights on each track's codes: scale, offset float16 [tracks, N]."""
    mean = weights.mean(axis=1)
    scales, offsets = [], []
    for width in bits:
        code = (codes >> (bits[-1] - width)).astype(np.float32)
        code_mean = code.mean(axis=1)
        centred = code - code_mean[:, None]
        variance = (centred**2).sum(axis=1)
        scale = (centred * weights).sum(axis=1) / np.where(variance > 0, variance, 1)
        scales.append(scale)
        offsets.append(mean - scale * code_mean)
    return np.stack(scales).astype(np.float16), np.stack(offsets).astype(np.float16)


def _assign(weights: Float32, codes: NDArray[np.uint8], bits: tuple[int, ...], lam: Float32) -> NDArray[np.uint8]:
    """The best code of each weight under the fits that suit the present codes.

    sum_k lam_k (w - v_k)**2 differs between codes only in -2 w sum_k lam_k v_k + sum_k lam_k v_k**2.
    """
    scale, offset = (fit.astype(np.float32) for fit in _fit(weights, codes, bits))
    best = np.full(weights.shape, np.inf, dtype=np.float32)
    chosen = np.zeros(weights.shape, dtype=np.uint8)
    for code in range(1 << bits[-1]):
        track_codes = np.array([code >> (bits[-1] - width) for width in bits], dtype=np.float32)
        values = scale * track_codes[:, None] + offset  # [tracks, N]
        cost = (lam @ values**2)[:, None] - (2 * (lam @ values))[:, None] * weights
        np.copyto(chosen, code, where=cost < best)
        np.minimum(best, cost, out=best)
    return chosen
