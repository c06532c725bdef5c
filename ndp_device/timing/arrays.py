"""How long the systolic arrays take for one matrix, by precision mode. Stateless arithmetic.

One pass holds `rows` tokens and `units x cols` output columns and takes one cycle per fp16 weight row. A mode that
splits its multipliers passes 16 / width narrow weights in the same cycle.
"""

from __future__ import annotations

from dataclasses import dataclass

from ndp_device.timing.spec import ArraySpec
from ndp_device.timing.units import ceil_div, cycles_ps

_FP16_BITS = 16


@dataclass(frozen=True)
class MatrixTime:
    compute_ps: int
    dequant_ps: int

    @property
    def ps(self) -> int:
        """The unpacking unit feeds the arrays: the slower one counts."""
        return max(self.compute_ps, self.dequant_ps)


def multiplier_bits(pe_mode: str, bits: int) -> int:
    """Width of the multipliers that a weight of `bits` bits occupies."""
    if pe_mode == "fp16_dequant":
        return _FP16_BITS
    if pe_mode == "int8":
        return 8 if bits <= 8 else _FP16_BITS
    if pe_mode == "bit_scalable_pow2":
        return 1 << (bits - 1).bit_length()
    return bits


def matrix_time(array: ArraySpec, inputs: int, outputs: int, tokens: int, bits: int) -> MatrixTime:
    """`tokens` rows of `inputs` elements times a matrix [inputs, outputs] of `bits`-bit weights."""
    if tokens == 0:
        return MatrixTime(0, 0)
    passes = ceil_div(tokens, array.rows) * ceil_div(outputs, array.units * array.cols)
    depth = ceil_div(inputs * multiplier_bits(array.pe_mode, bits), _FP16_BITS)
    compute = passes * depth + array.fill_cycles
    dequant = 0
    if array.pe_mode == "fp16_dequant" and bits < _FP16_BITS:
        dequant = ceil_div(inputs * outputs, array.units * array.dequant_weights_per_cycle)
    return MatrixTime(cycles_ps(compute, array.clock_hz), cycles_ps(dequant, array.clock_hz))


def swiglu_ps(array: ArraySpec, intermediate: int, tokens: int) -> int:
    return cycles_ps(ceil_div(intermediate * tokens, array.units * array.vector_lanes), array.clock_hz)


def weight_passes(array: ArraySpec, hidden: int, intermediate: int, tokens: int) -> int:
    """How often the weights are read: once per group of tokens whose activations fit half of the scratchpads."""
    token_bytes = 2 * (hidden + intermediate)
    fitting = max(array.units * array.scratchpad_bytes // 2 // token_bytes, 1)
    return ceil_div(tokens, fitting)
