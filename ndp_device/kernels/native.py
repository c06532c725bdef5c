"""The fast kernel: experts streamed at their bit width by the C++ engine in csrc/.

An expert is converted once, when prepared: its bit planes become components of 2, 1 or 8 bits (csrc/kernel_table.h).
Replicas cut from one nested container share components: 2, 3 and 4 bits read the same top component. 1 and 3 bits have
one component that nobody else reads, and can do without it by reading one bit more that they ignore (`masked`).
Activations are quantized per row and weight group to one int8 limb (8 bits) or two (15 bits), by the expert's width:
ndp_device/common/widths.py says which. Full-precision experts are read where they lie, in the mapped checkpoint.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.activation import SILU
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.widths import LIMBS, LINEAR_LIMBS
from ndp_device.experts.expert import (
    ByteExpert,
    ByteMatrix,
    Expert,
    Fp4Expert,
    Fp4Matrix,
    FullExpert,
    QuantizedExpert,
    QuantizedMatrix,
    StoredExpert,
)
from ndp_device.kernels import _native

_LOG = logging.getLogger(__name__)

COMPONENT_BITS: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (2, 2), 8: (8,)}
"""How a replica's bits are cut into components, top bits first. The alternatives that lost: docs/log/kernels.md."""
_ALONE = {**COMPONENT_BITS, 4: (4,)}
"""The same where no other width shares the planes."""

_DTYPES = {"float32": (0, 4), "float16": (1, 2), "bfloat16": (2, 2)}  # DType in csrc/kernel_table.h, bytes
_BYTES = {"float8": 3, "int8": 4}
_NO_SCALES, _NO_ROWS = np.empty((0, 0), np.float32), np.empty(0, np.float32)
_IDENTITY = np.empty(0, np.int32)


@dataclass(frozen=True)
class Component:
    """Some consecutive planes of one matrix as the engine streams them, and whose they are."""

    native: _native.Component
    source: object
    """The nested matrix, or what stands for one alone: it keeps no weights."""
    planes: range

    @property
    def nbytes(self) -> int:
        return self.native.nbytes

    def places(self) -> list[tuple[int, int]]:
        """Each plane: of which matrix, its number; equal ones are packed to equal bits."""
        return [(id(self.source), plane) for plane in self.planes]


@dataclass(frozen=True)
class NativeExpert:
    """An expert in the engine's layout; `components` may be shared with replicas of other widths."""

    native: _native.PreparedExpert
    components: tuple[Component, ...]  # of w13, then as many of w2
    scale_bytes: int  # and biases; of a full-precision expert what had to be copied

    @property
    def nbytes(self) -> int:
        """Bytes this expert alone would keep in memory: what executing it once streams."""
        return self.scale_bytes + sum(component.nbytes for component in self.components)


@dataclass(frozen=True)
class NativeMatrix:
    """A linear layer [N, C] in the engine's layout."""

    native: _native.PackedMatrix
    shape: tuple[int, int]
    nbytes: int


class NativeKernel:
    """Pairs of one layer in, their gate-weighted partial sum out. T rows, P (row, expert) pairs, N distinct experts.

    One engine with its own threads; calls from several Python threads take turns.
    """

    name = "native"

    def __init__(self, limbs: Mapping[int, int] = LIMBS, *, isa: str | None = None, threads: int | None = None) -> None:
        """Others left out come from NDP_ISA and NDP_THREADS, then from the machine: best path, usable cores."""
        supported = _native.supported_isas()
        isa = isa or os.environ.get("NDP_ISA") or supported[0]
        if isa not in supported:
            raise ConfigError(f"NDP_ISA must be one of {', '.join(supported)} on this machine, got {isa!r}")
        if isa == "portable":
            _LOG.warning(
                "native kernel on its portable path: about 5 times slower than with AVX2, 20 than with AVX-512"
            )
        threads = _threads_from_environment() if threads is None else threads
        if threads < 1:
            raise ConfigError(f"the native kernel needs at least 1 thread, got {threads}: set NDP_THREADS to 1 or more")
        self.limbs, self.isa, self.threads = limbs, isa, threads
        self._engine = _native.Engine(isa, threads)
        self._shared: weakref.WeakValueDictionary[tuple[int, ...], Component] = weakref.WeakValueDictionary()

    def prepare(self, expert: Expert | StoredExpert) -> NativeExpert:
        if isinstance(expert, FullExpert):
            native, copied = _full(expert)
            return NativeExpert(_with_activation(native, expert), (), copied)
        if not isinstance(expert, QuantizedExpert):
            stored = self._bytes(expert) if isinstance(expert, ByteExpert) else self._fp4(expert)
            native = _with_activation(stored, expert)
            return NativeExpert(native, (), native.nbytes)
        cuts = _component_bits(expert.w13, expert.w2)
        (w13, of_w13), (w2, of_w2) = self._packed(expert.w13, 2, cuts), self._packed(expert.w2, 1, cuts)
        native = _with_activation(_native.quantized_expert(w13, w2, self.limbs[expert.bits]), expert)
        bias_bytes = sum(bias.nbytes for bias in expert.biases or ())
        return NativeExpert(native, (*of_w13, *of_w2), w13.meta_nbytes + w2.meta_nbytes + bias_bytes)

    def _fp4(self, expert: Fp4Expert) -> _native.PreparedExpert:
        w13, w2 = self._fp4_matrix(expert.w13, 2), self._fp4_matrix(expert.w2, 1)
        return _native.quantized_expert(w13, w2, self.limbs[expert.bits])

    def _fp4_matrix(self, matrix: Fp4Matrix, halves: int) -> _native.PackedMatrix:
        of_rows = _NO_ROWS if matrix.of_rows is None else np.ascontiguousarray(matrix.of_rows)
        codes, scales = np.ascontiguousarray(matrix.codes), np.ascontiguousarray(matrix.scales)
        return self._engine.fp4_matrix(codes, scales, of_rows, halves)

    def _byte_matrix(self, matrix: ByteMatrix) -> _native.PackedMatrix:
        codes, scale = np.ascontiguousarray(matrix.codes), np.ascontiguousarray(matrix.scale)
        return self._engine.bytes_matrix(_BYTES[matrix.numbers], codes, scale, *matrix.block)

    def _bytes(self, expert: ByteExpert) -> _native.PreparedExpert:
        matrices = expert.matrices
        rows, columns = (min(m.block[axis] for m in matrices) for axis in (0, 1))
        if len({m.numbers for m in matrices}) != 1:
            raise ReplicaError("gate, up and down must be one kind of numbers")
        w1, w3, w2 = (np.ascontiguousarray(m.codes) for m in matrices)
        s1, s3, s2 = (_in_blocks(m, rows, columns) for m in matrices)
        source = _native.full_expert(_BYTES[expert.w1.numbers], w1, w3, w2, s1, s3, s2, rows, columns)
        return self._engine.pack_bytes(source, self.limbs[expert.bits])

    def masked(self, narrow: NativeExpert, wide: NativeExpert) -> NativeExpert | None:
        """`narrow` with nothing of its own where `wide`, the same expert at more bits, holds it as well; else None.

        1 bit out of the top component of any other width, 3 bits out of both of 4 bits. Slower, and every result is the
        same to the bit.
        """
        matrices = [_one_bit_more(*pair) for pair in zip(_by_matrix(narrow), _by_matrix(wide), strict=True)]
        if not all(matrices):
            return None
        w13, w2 = ([component.native for component in components] for components in matrices)
        return NativeExpert(narrow.native.masked(w13, w2), tuple(itertools.chain(*matrices)), narrow.scale_bytes)

    def parts(self, prepared: NativeExpert) -> list[tuple[int, int]]:
        """(identity, bytes) of what it keeps in memory; an identity that several experts name is there once.

        Nothing for a full-precision expert that lies in the mapped checkpoint as the kernel reads it.
        """
        parts = [(id(component), component.nbytes) for component in prepared.components]
        return [*parts, (id(prepared), prepared.scale_bytes)] if parts or prepared.scale_bytes else []

    def execute(
        self,
        x: NDArray[np.float32],  # [T, H]
        prepared: Sequence[NativeExpert],  # [N], from prepare()
        pair_rows: NDArray[np.int32],  # [P], row of x
        pair_experts: NDArray[np.int32],  # [P], index into prepared
        gates: NDArray[np.float32],  # [P], router weight
    ) -> NDArray[np.float32]:  # [T, H]
        """sum over pairs p of row t: gates[p] * W2 (silu(W1 x) * (W3 x)); rows without a pair are exactly 0."""
        y = np.empty(x.shape, np.float32)
        self._engine.execute(
            np.ascontiguousarray(x, np.float32),
            [expert.native for expert in prepared],
            np.ascontiguousarray(pair_rows, np.int32),
            np.ascontiguousarray(pair_experts, np.int32),
            np.ascontiguousarray(gates, np.float32),
            y,
        )
        return y

    def stay_awake(self, awake: bool) -> None:
        """Whether the engine's threads look for the next call longer before they sleep: csrc/thread_pool.cpp."""
        self._engine.stay_awake(awake)

    def multiply(self, x: NDArray[np.float32], prepared: NativeMatrix) -> NDArray[np.float32]:
        """x [T, C] -> [T, N], with activations of 8 bits; a row's result does not depend on the other rows."""
        y = np.empty((len(x), prepared.shape[0]), np.float32)
        self._engine.multiply(np.ascontiguousarray(x, np.float32), prepared.native, LINEAR_LIMBS, y)
        return y

    def prepare_matrix(self, matrix: QuantizedMatrix | Fp4Matrix | ByteMatrix) -> NativeMatrix:
        if not isinstance(matrix, QuantizedMatrix):
            stored = self._byte_matrix(matrix) if isinstance(matrix, ByteMatrix) else self._fp4_matrix(matrix, 1)
            return NativeMatrix(stored, matrix.shape, stored.nbytes)
        packed, parts = self._packed(matrix, 1, _component_bits(matrix))
        return NativeMatrix(packed, matrix.shape, packed.meta_nbytes + sum(part.nbytes for part in parts))

    def read_stream(self, data: NDArray[np.uint8], *, streams: int, prefetch_bytes: int) -> int:
        """Read all of data the way the kernels do, with nothing computed: what a benchmark calls the limit."""
        total: int = self._engine.read_stream(data, streams, prefetch_bytes)
        return total

    def _packed(
        self, matrix: QuantizedMatrix, halves: int, component_bits: Sequence[int]
    ) -> tuple[_native.PackedMatrix, list[Component]]:
        group, cut = _kernel_group(matrix), itertools.accumulate(component_bits, initial=0)
        parts = [self._component(matrix, range(*ends), halves, group) for ends in itertools.pairwise(cut)]
        packed = self._engine.assemble(
            [component.native for component in parts],
            *matrix.shape,
            halves,
            group,
            np.require(matrix.scale, requirements=["C", "A"]).view(np.uint16),
            np.require(matrix.offset, requirements=["C", "A"]).view(np.uint16),
            matrix.group_size,
            _IDENTITY if matrix.perm is None else np.require(matrix.perm, np.int32, ["C", "A"]),
        )
        return packed, parts

    def _component(self, matrix: QuantizedMatrix, planes: range, halves: int, group: int) -> Component:
        # The component keeps its source alive, so no other one can have its id while the entry exists.
        source = matrix.token if matrix.nested is None else matrix.nested
        key = (id(source), planes.start, planes.stop, halves)
        component = self._shared.get(key)
        if component is None:
            packed = self._engine.pack(np.ascontiguousarray(matrix.planes[planes.start : planes.stop]), halves, group)
            component = Component(packed, source, planes)
            self._shared[key] = component
        return component


def _by_matrix(expert: NativeExpert) -> tuple[Sequence[Component], Sequence[Component]]:
    half = len(expert.components) // 2
    return expert.components[:half], expert.components[half:]


def _one_bit_more(narrow: Sequence[Component], wide: Sequence[Component]) -> Sequence[Component]:
    """The first ones of `wide` if the last of them holds the last plane of `narrow` and one more, else none."""
    wanted = [place for component in narrow for place in component.places()]
    found: list[tuple[int, ...]] = []
    for count, component in enumerate(wide, 1):
        found += component.places()
        if found[:-1] == wanted and len(component.planes) > 1:
            return wide[:count]
    return ()


def _component_bits(*matrices: QuantizedMatrix) -> tuple[int, ...]:
    is_alone = all(matrix.nested is None for matrix in matrices)
    return (_ALONE if is_alone else COMPONENT_BITS)[matrices[0].bits]


def _kernel_group(matrix: QuantizedMatrix) -> int:
    group = _native.kernel_group(matrix.group_size, matrix.shape[1])
    if group > _native.MAX_PADDED_GROUP:
        raise ReplicaError(
            f"groups of {matrix.group_size} columns are too wide: above {_native.MAX_PADDED_GROUP} the native "
            "kernel needs a multiple of 32"
        )
    return group


def _threads_from_environment() -> int:
    value = os.environ.get("NDP_THREADS", "")
    if not value:
        return len(os.sched_getaffinity(0))
    if not value.isdecimal():
        raise ConfigError(f"NDP_THREADS must be a whole number of at least 1, got {value!r}")
    return int(value)


def _full(expert: FullExpert) -> tuple[_native.PreparedExpert, int]:
    """The expert where it lies, and bytes of what did not lie row by row in the checkpoint, which is ours."""
    code, item_bytes = _DTYPES.get(expert.dtype, (-1, 0))
    arrays = [np.ascontiguousarray(w) for w in expert.matrices]
    if any(w.dtype.itemsize != item_bytes for w in arrays):
        raise ReplicaError(
            f"full-precision weights must be {' | '.join(_DTYPES)}, got {expert.dtype!r} as {[w.dtype for w in arrays]}"
        )
    copied = sum(a.nbytes for a, w in zip(arrays, expert.matrices, strict=True) if not np.shares_memory(a, w))
    w1, w3, w2 = arrays
    return _native.full_expert(code, w1, w3, w2, _NO_SCALES, _NO_SCALES, _NO_SCALES, 0, 0), copied


def _in_blocks(matrix: ByteMatrix, rows: int, columns: int) -> NDArray[np.float32]:
    """Scales of blocks of this size, which is that of the matrix's or cuts them."""
    scale = matrix.scale
    for axis, least in enumerate((rows, columns)):
        size, of = matrix.shape[axis], matrix.block[axis]
        if of < size and of % least:
            raise ReplicaError(f"blocks of {of} and {least} under one scale, in one expert, do not fit into each other")
        scale = scale.take(np.arange(0, size, least) // of, axis)
    return np.ascontiguousarray(scale)


def _with_activation(native: _native.PreparedExpert, expert: Expert | StoredExpert) -> _native.PreparedExpert:
    act = expert.activation
    if expert.biases is None and act == SILU:
        return native
    biases = (np.ascontiguousarray(bias) for bias in expert.biases or (_NO_ROWS,) * 3)
    return native.with_activation(act.linear, act.cubic, act.up_bias, act.largest, *biases)
