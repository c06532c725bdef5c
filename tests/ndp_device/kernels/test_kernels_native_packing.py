"""Bit planes to the components that the native kernel streams: the bytes of every path against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ndp_device.experts.expert import pack
from ndp_device.kernels import _native

ISAS = _native.supported_isas()
STEP_OF_BIT = (0, 1, 4, 5, 2, 3, 6, 7)  # of a 1-bit component's byte, lowest bit first


def component_bytes(codes: NDArray[np.uint8], width: int, halves: int, group: int) -> bytes:
    """[units][groups][chunks * width][2 blocks][16 rows][4 columns], as csrc/kernel_table.h says it."""
    rows, cols = codes.shape
    groups, padded = -(-cols // group), -(-group // 32) * 32
    per_half, block_rows = rows // halves, 32 // halves
    units = -(-per_half // block_rows)
    by_half = np.zeros((halves, units * block_rows, groups, padded), np.uint8)
    for g in range(groups):
        values = codes[:, g * group : (g + 1) * group]
        by_half[:, :per_half, g, : values.shape[1]] = values.reshape(halves, per_half, -1)
    unit_rows = by_half.reshape(halves, units, block_rows, groups, padded).swapaxes(0, 1)
    steps = unit_rows.reshape(units, 2, 16, groups, padded // 32, 8, 4)
    out = np.zeros((units, groups, padded // 32, width, 2, 16, 4), np.uint8)
    fields = 8 // width
    for v in range(width):
        for f in range(fields):
            step = STEP_OF_BIT[f] if width == 1 else v * fields + f
            out[:, :, :, v] |= steps[..., step, :].transpose(0, 3, 4, 1, 2, 5) << (width * f)
    return out.tobytes()


def check(isa: str, threads: int, codes: NDArray[np.uint8], width: int, halves: int, group: int) -> None:
    engine = _native.Engine(isa, threads)
    planes = pack(codes, width)
    buffer = bytes(3) + planes.tobytes()
    unaligned = np.frombuffer(memoryview(buffer)[3:], np.uint8).reshape(planes.shape)
    component = engine.pack(unaligned, halves, _native.kernel_group(group, codes.shape[1]))
    wanted = component_bytes(codes, width, halves, _native.kernel_group(group, codes.shape[1]))
    assert component.nbytes == len(wanted)
    assert component.tobytes() == wanted


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """halves, rows, columns, group size."""
    halves = draw(st.sampled_from([1, 2]))
    rows, cols = halves * draw(st.integers(1, 70)), 8 * draw(st.integers(1, 150))
    return halves, rows, cols, 8 * draw(st.integers(1, 40))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 2, 8])
@settings(max_examples=40)
@given(shape=shapes(), seed=st.integers(0, 2**32 - 1))
def test_every_path_packs_any_shape_to_the_same_bytes(
    isa: str, width: int, shape: tuple[int, int, int, int], seed: int
) -> None:
    halves, rows, cols, group = shape
    codes = np.random.default_rng(seed).integers(0, 1 << width, (rows, cols), np.uint8)
    check(isa, 2, codes, width, halves, group)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize(
    ("halves", "rows", "cols", "group"),
    [
        (2, 256, 512, 128),  # whole vectors only
        (1, 96, 1536, 64),
        (2, 96, 520, 128),  # a byte more than whole vectors
        (1, 72, 1000, 128),  # a unit of 8 rows at the end
        (2, 40, 1024, 40),  # words of 32 columns that begin anywhere in a byte row
        (1, 8192, 4096, 128),  # above 4 MB: memory of its own, tasks of many units
    ],
)
def test_vectors_tails_and_padding(isa: str, width: int, halves: int, rows: int, cols: int, group: int) -> None:
    codes = np.random.default_rng(rows).integers(0, 1 << width, (rows, cols), np.uint8)
    check(isa, 3, codes, width, halves, group)
