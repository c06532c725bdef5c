"""Hot slots at 8 or 4 bits on a GPU: vLLM's own fused kernel runs them, and each expert is quantized on arrival.

    8 bits   FP8 (e4m3) with a scale per row; activations are quantized to FP8 by vLLM, row by row
    4 bits   integers with a scale and a zero point per group of a row; activations stay as they are

Both layouts are plain: an expert is written without repacking, a few rows at a time. Beside the slot only two buffers
of rows exist in full precision. Experts that a prompt streams run in full precision as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ndp_device.common.errors import ConfigError
from vllm_ndp.integration import vllm_private
from vllm_ndp.integration.cuda.streams import Event
from vllm_ndp.integration.experts_pool import ExpertWeights
from vllm_ndp.integration.hot_slots import CpuSlotKernel, CudaSlotKernel, HotSlots, SlotWeights
from vllm_ndp.layer.tiers import Tiers

GROUPS = (128, 64, 32)
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0


class LowBitWeights(NamedTuple):
    """Contents of S slots. Codes: w13 [S, 2I, H or H/2], w2 [S, H, I or I/2]; scales, zero points by row or group."""

    w13: torch.Tensor
    w2: torch.Tensor
    s13: torch.Tensor
    s2: torch.Tensor
    z13: torch.Tensor | None = None
    z2: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(int(t.nbytes) for t in self if t is not None)


class Fp8Rows:
    """e4m3 with one scale per row: weight = code * scale."""

    name, bits, even_rows = "FP8 by row", 8, False

    def __init__(self, encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], config: Any) -> None:
        """encode: rows [N, K] -> codes [N, K], scales f32 [N, 1]. config: vLLM's fp8_w8a8_moe_quant_config."""
        self._encode, self._config = encode, config

    def allocate(self, num_slots: int, hidden: int, intermediate: int, like: torch.Tensor) -> LowBitWeights:
        def empty(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            codes = like.new_empty((num_slots, rows, columns), dtype=FP8)
            return codes, like.new_empty((num_slots, rows, 1), dtype=torch.float32)

        (w13, s13), (w2, s2) = empty(2 * intermediate, hidden), empty(hidden, intermediate)
        return LowBitWeights(w13, w2, s13, s2)

    def write(self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        found, scale = self._encode(rows)
        codes.copy_(found)
        scales.copy_(scale)

    def quant_config(self, held: LowBitWeights) -> Any:
        return self._config(w1_scale=held.s13, w2_scale=held.s2, per_act_token_quant=True)


class Int4Groups:
    """Two codes in a byte, the even column below; weight = (code - zero) * scale, both by group of columns."""

    bits, even_rows = 4, True  # two rows' zero points share a byte

    @property
    def name(self) -> str:
        return f"int4 by groups of {self.group}"

    def __init__(self, group: int, scale_dtype: torch.dtype, config: Any) -> None:
        """config: vLLM's int4_w4a16_moe_quant_config."""
        self.group, self._scale_dtype, self._config = group, scale_dtype, config

    def allocate(self, num_slots: int, hidden: int, intermediate: int, like: torch.Tensor) -> LowBitWeights:
        def empty(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            groups = columns // self.group
            return (
                like.new_empty((num_slots, rows, columns // 2), dtype=torch.uint8),
                like.new_empty((num_slots, rows, groups), dtype=self._scale_dtype),
                like.new_empty((num_slots, rows // 2, groups), dtype=torch.uint8),
            )

        (w13, s13, z13), (w2, s2, z2) = empty(2 * intermediate, hidden), empty(hidden, intermediate)
        return LowBitWeights(w13, w2, s13, s2, z13, z2)

    def write(self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        assert zeros is not None
        grouped = rows.float().unflatten(1, (-1, self.group))
        low, high = (
            grouped.amin(2).clamp_(max=0),
            grouped.amax(2).clamp_(min=0),
        )  # 0 must be a code: most weights are near
        scale = ((high - low) / 15).to(self._scale_dtype)
        step = torch.where(scale > 0, scale, 1).float()  # as the kernel reads it
        zero = (-low / step).round_().clamp_(0, 15)
        found = (grouped / step.unsqueeze(2)).round_().add_(zero.unsqueeze(2)).clamp_(0, 15).flatten(1).to(torch.uint8)
        codes.copy_(_two_in_a_byte(found.T).T)
        scales.copy_(step.to(self._scale_dtype))
        zeros.copy_(_two_in_a_byte(zero.to(torch.uint8)))

    def quant_config(self, held: LowBitWeights) -> Any:
        return self._config(
            w1_scale=held.s13, w2_scale=held.s2, w1_zp=held.z13, w2_zp=held.z2, block_shape=[0, self.group]
        )


Form = Fp8Rows | Int4Groups


class LowBitSlotKernel(CudaSlotKernel):
    """As the kernel of full-precision slots, with what these hold given beside: one more argument of the same call."""

    def __init__(self, plain: CudaSlotKernel, form: Form) -> None:
        super().__init__(plain.activation, plain.num_experts, plain.fused, lambda *key: nullcontext(), plain.copies)
        self.form = form
        self._configs: dict[int, Any] = {}

    def load(self, to: Any, slot: int, expert: ExpertWeights, after: Event | None = None) -> None:
        """The stream itself writes the codes, so every reader of the slot is done: `after` has no say here."""
        half = to.w13.shape[1] // 2
        for matrix, start, source in ((13, 0, expert.w1), (13, half, expert.w3), (2, 0, expert.w2)):

            def take(first: int, rows: torch.Tensor, matrix: int = matrix, start: int = start) -> None:
                self._write(to, slot, matrix, start + first, rows)

            if self.copies is None:
                take(0, source.to(to.w13.device))
            else:
                rows_at_once = 2 if self.form.even_rows else 1
                self.copies.of_this_thread(to.w13.device).convert(source, to.w13.device, take, rows_at_once)

    def _write(self, to: LowBitWeights, slot: int, matrix: int, first: int, rows: torch.Tensor) -> None:
        codes, scales, zeros = (to.w13, to.s13, to.z13) if matrix == 13 else (to.w2, to.s2, to.z2)
        here = slice(first, first + len(rows))
        pairs = None if zeros is None else zeros[slot, first // 2 : (first + len(rows)) // 2]
        self.form.write(rows, codes[slot, here], scales[slot, here], pairs)

    def _beside(self, held: Any) -> dict[str, Any]:
        at = held.w13.data_ptr()
        if at not in self._configs:
            self._configs[at] = self.form.quant_config(held)
        return {"quant_config": self._configs[at]}


class LowBitSlots(HotSlots):
    """Low-bit slots of one layer. `kernel` and `held`, without slots, stay full precision: experts stream with them."""

    def __init__(
        self,
        plain: CudaSlotKernel,
        held: SlotWeights,
        tiers: Tiers,
        layer: int,
        num_slots: int,
        form: Form,
    ) -> None:
        super().__init__(plain, held, tiers, layer, num_slots)
        self.low = LowBitSlotKernel(plain, form)
        hidden, intermediate = held.w2.shape[1:]
        self.codes = form.allocate(num_slots, hidden, intermediate, held.w13)

    @property
    def kernel_name(self) -> str:
        return f"triton, {self.low.form.name}"

    @property
    def num_bytes(self) -> int:
        return self.codes.num_bytes

    def whole_expert_in(self, expert: int) -> None:
        return None

    def running(self) -> tuple[CpuSlotKernel | CudaSlotKernel, Any]:
        return self.low, self.codes


def form_of_vllm(bits: int, hidden: int, intermediate: int, dtype: torch.dtype) -> Form:
    """By vLLM's own operators. Raises ConfigError where this GPU or this model has none."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config, int4_w4a16_moe_quant_config

    if bits == 8:
        if torch.cuda.get_device_capability() < (8, 9):
            raise ConfigError("hot slots of 8 bits are FP8, which this GPU cannot multiply: use 4 or 16 bits")
        return Fp8Rows(vllm_private.to_fp8_by_row, fp8_w8a8_moe_quant_config)
    if dtype == torch.float32:
        raise ConfigError(
            "hot slots of 4 bits are run by a kernel of vLLM's for bfloat16 and float16 where rows are few, and the "
            "model is served in float32: drop --dtype float32, or use 'slot_bits' 16"
        )
    return Int4Groups(group_of(hidden, intermediate), dtype, int4_w4a16_moe_quant_config)


def group_of(hidden: int, intermediate: int) -> int:
    """The largest group of columns that divides both matrices."""
    for group in GROUPS:
        if hidden % group == 0 and intermediate % group == 0:
            return group
    raise ConfigError(
        f"hot slots of 4 bits need hidden and intermediate sizes that are multiples of {GROUPS[-1]}, "
        f"got {hidden} and {intermediate}"
    )


def _two_in_a_byte(codes: torch.Tensor) -> torch.Tensor:
    """[N, C] -> [N / 2, C]: row 0 below row 1, and so on."""
    return codes[0::2] | (codes[1::2] << 4)
