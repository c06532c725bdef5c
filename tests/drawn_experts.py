"""Experts, matrices and pairs drawn by lot, and the same sum in float64: what the tests of kernels compare with."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from reference_kernel import dequantize

from ndp_device.common.widths import LIMBS
from ndp_device.experts.expert import Biases, Expert, FullExpert, QuantizedExpert, QuantizedMatrix, pack, to_float32

# Relative L2 error against fp64: two limbs carry 15 bits per group, one carries 8.
LIMIT = {2: 2e-4, 1: 4e-2}
TWO = dict.fromkeys(LIMBS, 2)
SHAPES = [  # hidden, intermediate, group, perm
    (128, 256, 128, False),
    (256, 128, 64, True),
    (40, 24, 32, True),  # nothing is a multiple of anything: padded rows, padded last group
    (136, 344, 128, False),
    (72, 56, 16, False),  # groups narrower than a chunk of 32 columns
    (96, 80, 40, True),  # groups that are not a multiple of 32
    (384, 320, 1024, False),  # one group per row
    (512, 256, 256, True),  # one scale, two kernel groups
    (8, 8, 8, False),
]


def random_matrix(
    rng: np.random.Generator, rows: int, cols: int, bits: int, group: int, *, perm: bool = False
) -> QuantizedMatrix:
    groups = -(-cols // group)
    scale = rng.uniform(0.5, 1.5, (rows, groups)) / (2**bits * np.sqrt(cols))
    offset = -scale * (2**bits - 1) * rng.uniform(0.3, 0.7, scale.shape)
    return QuantizedMatrix(
        bits=bits,
        planes=pack(rng.integers(0, 2**bits, (rows, cols), dtype=np.uint8), bits),
        scale=scale.astype(np.float16),
        offset=offset.astype(np.float16),
        group_size=group,
        perm=rng.permutation(cols).astype(np.int32) if perm else None,
    )


def random_expert(
    rng: np.random.Generator, hidden: int, intermediate: int, bits: int, group: int, *, perm: bool = False
) -> QuantizedExpert:
    w13 = random_matrix(rng, 2 * intermediate, hidden, bits, group, perm=perm)
    return QuantizedExpert(bits, w13, random_matrix(rng, hidden, intermediate, bits, group))


def full_expert(rng: np.random.Generator, hidden: int, intermediate: int, dtype: str) -> FullExpert:
    def weights(rows: int, cols: int) -> NDArray[np.generic]:
        w = (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
        if dtype == "bfloat16":
            return (w.view(np.uint32) >> 16).astype(np.uint16)
        return w.astype(dtype)

    return FullExpert(
        dtype, weights(intermediate, hidden), weights(intermediate, hidden), weights(hidden, intermediate)
    )


def exact(x: NDArray[np.float32], experts: Sequence[Expert], pairs: tuple[NDArray, NDArray, NDArray]) -> NDArray:
    """The same sum in float64."""
    y = np.zeros(x.shape)
    rows, indices, gates = pairs
    for index, expert in enumerate(experts):
        if isinstance(expert, FullExpert):
            w1, w3, w2 = (to_float32(w, expert.dtype).astype(np.float64) for w in (expert.w1, expert.w3, expert.w2))
        else:
            w1, w3 = np.split(dequantize(expert.w13).astype(np.float64), 2)
            w2 = dequantize(expert.w2).astype(np.float64)
        mine = indices == index
        v = x[rows[mine]].astype(np.float64)
        gate, up, down = v @ w1.T, v @ w3.T, 0.0
        if expert.biases is not None:
            gate, up, down = gate + expert.biases.gate, up + expert.biases.up, expert.biases.down
        act = expert.activation
        gate, up = np.minimum(gate, act.largest), np.clip(up, -act.largest, act.largest)
        between = (up + act.up_bias) * gate / (1 + np.exp(-act.linear * gate - act.cubic * gate**3))
        np.add.at(y, rows[mine], gates[mine, None] * (between @ w2.T + down))
    return y


def random_pairs(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> tuple[NDArray, NDArray, NDArray]:
    rows = np.repeat(np.arange(tokens), top_k).astype(np.int32)
    chosen = [rng.permutation(experts)[:top_k] for _ in range(tokens)]
    indices = np.concatenate(chosen).astype(np.int32) if tokens else np.empty(0, np.int32)
    order = rng.permutation(rows.size)
    return rows[order], indices[order], rng.uniform(0.1, 1, rows.size).astype(np.float32)


def relative_error(got: NDArray, wanted: NDArray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def random_biases(rng: np.random.Generator, hidden: int, intermediate: int) -> Biases:
    return Biases(*(rng.standard_normal(n).astype(np.float32) for n in (intermediate, intermediate, hidden)))
