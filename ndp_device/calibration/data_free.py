"""Nested replicas from the weights alone, for models that nobody has calibrated. No torch, no data.

One code per weight serves every width, because the k-bit replica is its top k bits. Each width ("track") has its own
scale and offset per group. Lloyd's two steps alternate. Given the codes, fit every track by least squares. Given the
fits, take for each weight the code with the smallest sum over tracks of track_weight * (w - w_track(code))**2. Both
steps lower that sum. That is C++ (csrc/), on the checkpoint's own dtype; a test holds it to the same in numpy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ndp_device.calibration import _fits
from ndp_device.common.activation import Activation
from ndp_device.common.widths import BYTE_BITS, loss_columns
from ndp_device.experts.expert import (
    FullExpert,
    NestedMatrix,
    QuantizedExpert,
    QuantizedMatrix,
    pack,
    to_float32,
)
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import LayerReplicas

Isa = Literal["auto", "avx2", "portable"]
Float32 = NDArray[np.float32]

_ROOM_BYTES, _COPIES = 2 << 30, 6
"""Memory for experts made at once, and what one takes: two copies of its values, and a probe in float32."""
PROBE_ROWS = 64
"""Random rows whose output error stands in for a loss table."""
PROBE_UNITS = 256
"""Intermediate units of a larger expert that are probed: all of them would take longer than quantizing it."""


def quantize_layer(
    checkpoint: CheckpointExperts,
    layer: int,
    group_size: int,
    track_weights: Mapping[int, float],
    *,
    with_bytes: bool,
    advance: Callable[[], None],
) -> LayerReplicas:
    """All experts of a layer; `advance` is called after each. with_bytes: at 8 bits too.

    As many experts at once as there are cores and room: decoding and probing take one core each.
    """
    norm_weight, cores = checkpoint.norm_weight(layer), len(os.sched_getaffinity(0))
    at_once = max(1, min(cores, _ROOM_BYTES // (_COPIES * checkpoint.shape.expert_bytes)))

    def made(expert: int) -> tuple[dict[int, QuantizedExpert], tuple[NDArray[np.float64], NDArray[np.float64]]]:
        full = checkpoint.expert(layer, expert)
        checkpoint.refuse_large(layer, expert, full)
        by_width = []
        for weights in (np.concatenate([full.w1, full.w3]), np.ascontiguousarray(full.w2)):
            nested = quantize_nested(weights, group_size, track_weights, full.dtype, cores // at_once)
            by_width.append(nested.by_width())
            if with_bytes:
                by_width[-1][BYTE_BITS] = round_to_bytes(to_float32(weights, full.dtype), group_size)
        w13s, w2s = by_width
        replicas = {bits: QuantizedExpert(bits, w13s[bits], w2s[bits], full.biases, full.activation) for bits in w13s}
        rng = np.random.default_rng([layer, expert])
        inputs = rng.standard_normal((PROBE_ROWS, norm_weight.size), dtype=np.float32) * norm_weight
        return replicas, probe_losses(inputs, full, replicas, group_size)

    experts, losses = [], []
    # BLAS would start as many threads for each of them, which wait for one another
    with threadpool_limits(cores // at_once, "blas"), ThreadPoolExecutor(at_once) as threads:
        for replicas, lost in threads.map(made, range(checkpoint.shape.num_experts)):
            experts.append(replicas)
            losses.append(lost)
            advance()
    loss, relative_loss = (np.stack(table) for table in zip(*losses, strict=True))
    return LayerReplicas(tuple(experts), loss, relative_loss, np.zeros(len(experts), dtype=np.int64))


def quantize_nested(
    weights: NDArray[Any],
    group_size: int,
    track_weights: Mapping[int, float],
    dtype: str = "float32",
    threads: int | None = None,
    isa: Isa = "auto",
) -> NestedMatrix:
    """W [N, C] -> the matrix at every width in track_weights; the narrower ones share the widest one's planes.

    dtype is "float32", "float16" or "bfloat16" (as uint16). threads: None = all cores of the affinity; any number of
    them gives the same bytes.
    """
    bits = sorted(track_weights)
    rows, columns = weights.shape
    planes = np.empty((bits[-1], rows, columns // 8), np.uint8)
    scale = np.empty((len(bits), rows, -(-columns // group_size)), np.float16)
    offset = np.empty_like(scale)
    _fits.fit_matrix(
        weights,
        dtype,
        group_size,
        bits,
        [track_weights[width] for width in bits],
        planes,
        scale.view(np.uint16),
        offset.view(np.uint16),
        threads or len(os.sched_getaffinity(0)),
        isa,
    )
    return NestedMatrix(tuple(bits), planes, scale, offset, group_size)


def probe_losses(
    inputs: Float32, full: FullExpert, replicas: dict[int, QuantizedExpert], group_size: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """expert_losses; of an expert with more than PROBE_UNITS intermediate units, from some of w2's groups of columns.

    The errors of the units are nearly independent, so that their squares add and the loss grows with their number.
    """
    intermediate = full.w1.shape[0]
    num_units = num_probe_units(intermediate, group_size)
    if num_units == intermediate:
        return expert_losses(inputs, full, replicas)
    groups = np.linspace(0, intermediate // group_size - 1, num_units // group_size).astype(np.int64)
    units = (groups[:, None] * group_size + np.arange(group_size)).ravel()
    w13_rows, w2_bytes = np.concatenate([units, intermediate + units]), units[::8] // 8

    def part(replica: QuantizedExpert) -> QuantizedExpert:
        w13, w2 = replica.w13, replica.w2
        return QuantizedExpert(
            replica.bits,
            w13.at_rows(w13_rows),
            replace(w2, planes=w2.planes.take(w2_bytes, 2), scale=w2.scale[:, groups], offset=w2.offset[:, groups]),
            biases,
            full.activation,
        )

    biases = full.biases and full.biases.reordered(units)
    probed = FullExpert(
        full.dtype, full.w1[units], full.w3[units], full.w2.take(units, 1), biases=biases, activation=full.activation
    )
    loss, relative_loss = expert_losses(inputs, probed, {bits: part(one) for bits, one in replicas.items()})
    return loss * (intermediate / num_units), relative_loss


def dequantize(matrix: QuantizedMatrix, isa: Isa = "auto") -> Float32:
    """Scale times code plus offset [N, C]; columns stay in the order in which they are stored."""
    values = np.empty(matrix.shape, np.float32)
    planes, scale, offset = (np.ascontiguousarray(part) for part in (matrix.planes, matrix.scale, matrix.offset))
    _fits.dequantize_matrix(planes, scale.view(np.uint16), offset.view(np.uint16), matrix.group_size, values, isa)
    return values


def num_probe_units(intermediate: int, group_size: int) -> int:
    """Number of an expert's intermediate units to probe: all, or whole groups up to PROBE_UNITS, at least one group."""
    if intermediate <= max(PROBE_UNITS, group_size):
        return intermediate
    return max(1, PROBE_UNITS // group_size) * group_size


_AT_ONCE = 1 << 20
"""Weights: their planes take eight bytes each while they are cut."""
_TOP = (1 << BYTE_BITS) - 1


def round_to_bytes(weights: NDArray[np.float32], group_size: int) -> QuantizedMatrix:
    """W [N, C] -> the matrix at 8 bits, its columns in their own order: each weight by the nearest of 256 even levels.

    The levels of a group reach from its least weight to its largest. On text the loss is within its error of none
    (docs/log/calibration.md, "8 bits"), so a solver could not show that its codes are better.
    """
    rows, columns = weights.shape
    planes = np.empty((BYTE_BITS, rows, columns // 8), np.uint8)
    scale = np.empty((rows, -(-columns // group_size)), np.float16)
    offset = np.empty_like(scale)
    step = max(1, _AT_ONCE // columns)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        codes, scale[some], offset[some] = _rounded(weights[some], group_size)
        planes[:, some] = pack(codes, BYTE_BITS)
    return QuantizedMatrix(BYTE_BITS, planes, scale, offset, group_size)


def _rounded(
    weights: NDArray[np.float32], group_size: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Codes [n, C], scale and offset [n, groups]."""
    rows, columns = weights.shape
    # The last weight again fills a short group: it changes neither end of it. Whole groups take a third of the time
    # that reduceat and a gather of each weight's scale take.
    short = -columns % group_size
    whole = np.pad(weights, ((0, 0), (0, short)), "edge") if short else weights
    grouped = whole.reshape(rows, -1, group_size)
    least, largest = grouped.min(axis=2), grouped.max(axis=2)
    offset = least.astype(np.float16)
    scale = ((largest - offset) / _TOP).astype(np.float16)
    # A step of 0: all weights of the group are its offset, as float16 holds it.
    step = np.where(scale > 0, scale, 1).astype(np.float32)
    codes = grouped - offset.astype(np.float32)[..., None]
    codes /= step[..., None]
    np.clip(np.rint(codes, out=codes), 0, _TOP, out=codes)
    return codes.reshape(rows, -1)[:, :columns].astype(np.uint8), scale, offset


ROWS_BYTES = 64 << 20
"""Products of gate and up that are held at once."""


def _outputs(w13: Float32, w2: Float32, expert: FullExpert | QuantizedExpert, inputs: Float32) -> Float32:
    """Outputs [T, H] of rows [T, H], some at a time: gate and up of 8192 rows of Mixtral would take 0.9 GB.

    w13 [2I, H] (gate rows first, then up), w2 [H, I]: the expert's matrices as float32.
    """
    at_once, biases = max(1, ROWS_BYTES // w13[:, 0].nbytes), expert.biases

    def some(rows: Float32) -> Float32:
        gate, up = np.split((w13 @ rows.T).T, 2, axis=-1)  # BLAS takes less time so where rows are few
        if biases is not None:
            gate, up = gate + biases.gate, up + biases.up
        y: Float32 = (w2 @ _activated(gate, up, expert.activation).T).T
        return y if biases is None else y + biases.down

    return np.concatenate([some(inputs[first : first + at_once]) for first in range(0, len(inputs), at_once)])


def _activated(gate: Float32, up: Float32, activation: Activation) -> Float32:
    """The formula of common/activation.py."""
    limit = activation.largest
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):  # exp(-x) = inf gives x / inf = -0, the right limit
        square = np.minimum(gate * gate, np.float32(1e30))  # 0 times infinity would be a NaN
        argument = gate * (activation.linear + activation.cubic * square)
        y: Float32 = gate / (1 + np.exp(-argument)) * (up + activation.up_bias)
        return y


def expert_losses(
    inputs: Float32,
    full: FullExpert,
    replicas: dict[int, QuantizedExpert],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Inputs [T, H] -> (mean squared output error, the same over the mean squared output), each [columns]: one
    for each of widths.loss_columns, NaN if absent. Replicas have no order of w2's columns, as in files.

    The error is that of the expert's output, because the output enters the residual stream. Errors per matrix would not
    help: those of gate, up and down do not add.
    """
    w13 = to_float32(np.concatenate([full.w1, full.w3]), full.dtype)
    wanted = _outputs(w13, to_float32(full.w2, full.dtype), full, inputs)
    del w13  # at Mixtral's width it has 0.5 GB
    energy = _mean_square(wanted)
    columns = loss_columns(replicas)
    loss = np.full(len(columns), np.nan)
    for bits, replica in replicas.items():
        rows = inputs if replica.w13.perm is None else inputs[:, replica.w13.perm]
        error = _outputs(dequantize(replica.w13), dequantize(replica.w2), replica, rows)
        error -= wanted
        loss[columns.index(bits)] = _mean_square(error)
    return loss, loss / max(energy, np.finfo(np.float64).tiny)


def _mean_square(values: Float32) -> float:
    """Sums of a row in float32, of rows in float64."""
    of_rows = np.einsum("th,th->t", values, values)
    return float(of_rows.mean(dtype=np.float64) / values.shape[1])
