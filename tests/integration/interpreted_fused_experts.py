"""vLLM's own Triton kernel of fused experts, on tensors of the host, in Triton's interpreter.

Only for a process that was started with TRITON_INTERPRET=1 and has imported nothing of vLLM yet. The kernel, its launch
and its arguments are vLLM's; four operators around it that exist on a GPU only are written here in torch. Prints how
far each result is from arithmetic in fp64 on what the slots stand for.
"""

# ruff: noqa: E402  # Triton must look as on a GPU before vLLM is imported

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.backends import backends
from triton.runtime.interpreter import InterpreterBuilder

backends["nvidia"].driver.is_active = staticmethod(lambda: True)  # else vLLM leaves Triton out,
backends["cpu"] = backends["nvidia"]  # in its CPU build anyway

import vllm._custom_ops as ops
from fp8_rows import decoded, encode_fp8_rows
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEQuantConfig,
    fp8_w8a8_moe_quant_config,
    int4_w4a16_moe_quant_config,
)

from vllm_ndp.integration.cuda.low_bit_slots import FP8, Fp8Rows, Int4Groups, LowBitSlotKernel
from vllm_ndp.integration.experts_pool import ExpertWeights
from vllm_ndp.integration.hot_slots import CudaSlotKernel, SlotWeights

HIDDEN, INTERMEDIATE = 128, 64


class Sizes(NamedTuple):
    experts: int
    slots: int
    top_k: int


FEW, MANY = Sizes(6, 4, 2), Sizes(128, 64, 8)


_dot = InterpreterBuilder.create_dot


def dot_of_bfloat16(self: Any, a: Any, b: Any, *beside: Any) -> Any:
    """Triton's interpreter keeps bfloat16 as integers, and its own product multiplies those: widen them before."""
    return _dot(self, *(self.cast_impl(t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b)), *beside)


InterpreterBuilder.create_dot = dot_of_bfloat16


def align(topk_ids: torch.Tensor, config: Any, num_tokens: int, k: int, num_experts: int, expert_map: Any, **_: Any) -> Any:  # fmt: skip  # noqa: E501
    """moe_align_block_size: pairs sorted by slot, each slot's padded to whole blocks; those of no slot are left out."""
    block = config["BLOCK_SIZE_M"]
    flat = topk_ids.flatten()
    slots = flat if expert_map is None else expert_map[flat.long()]
    order: list[int] = []
    blocks: list[int] = []
    for slot in range(num_experts):
        mine = torch.nonzero(slots == slot).flatten().tolist()
        padded = -(-len(mine) // block) * block
        order += mine + [flat.numel()] * (padded - len(mine))
        blocks += [slot] * (padded // block)
    ints = lambda values: torch.tensor(values or [0], dtype=torch.int32)  # noqa: E731
    return ints(order), ints(blocks), torch.tensor([len(order)], dtype=torch.int32)


def quantized_input(A: torch.Tensor, A_scale: Any, quant_dtype: Any, per_act_token_quant: bool, **_: Any) -> Any:
    if quant_dtype is None:
        return A, A_scale
    assert (quant_dtype, per_act_token_quant) == (FP8, True)
    return encode_fp8_rows(A)


def activate(activation: MoEActivation, output: torch.Tensor, given: torch.Tensor) -> None:
    assert activation == MoEActivation.SILU
    gate, up = given.float().chunk(2, dim=1)
    output.copy_(torch.nn.functional.silu(gate) * up)


def summed(given: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(given.float().sum(dim=1))


fused_moe._prepare_expert_assignment = align
fused_moe.moe_kernel_quantize_input = quantized_input
fused_moe.apply_moe_activation = activate
ops.moe_sum = summed
fused_moe.should_moe_wna16_use_cuda = lambda *_, **__: False  # its kernel is C++; the layout is the same


def fused(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *,
          activation: MoEActivation, global_num_experts: int, expert_map: Any, quant_config: FusedMoEQuantConfig | None = None) -> torch.Tensor:  # fmt: skip  # noqa: E501
    """As vLLM's fused_experts hands its arguments to the operator behind it."""
    q = quant_config or fused_moe.FUSED_MOE_UNQUANTIZED_CONFIG
    return fused_moe.fused_experts_impl(
        x, w1, w2, weights, ids, activation=activation.value,
        use_fp8_w8a8=q.use_fp8_w8a8, use_int8_w8a8=q.use_int8_w8a8, use_int8_w8a16=q.use_int8_w8a16,
        use_int4_w4a16=q.use_int4_w4a16, per_channel_quant=q.per_act_token_quant, global_num_experts=global_num_experts,
        expert_map=expert_map, w1_scale=q.w1_scale, w2_scale=q.w2_scale, w1_zp=q.w1_zp, w2_zp=q.w2_zp,
        block_shape=q.block_shape,
    )  # fmt: skip


def worst(form: Any, dtype: torch.dtype, num_rows: int, sizes: Sizes = FEW) -> tuple[float, float]:
    """Largest error of a call, relative to its largest result: against what the slots hold, and against the experts."""
    generator = torch.Generator().manual_seed(num_rows)
    draw = lambda *shape: (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)  # noqa: E731
    experts = [
        ExpertWeights(draw(INTERMEDIATE, HIDDEN), draw(INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE))
        for _ in range(sizes.slots)
    ]
    kernel: Any = CudaSlotKernel(MoEActivation.SILU, sizes.experts, fused, lambda *key: nullcontext())
    if form is None:
        shapes = (sizes.slots, 2 * INTERMEDIATE, HIDDEN), (sizes.slots, HIDDEN, INTERMEDIATE)
        held: Any = SlotWeights(*(torch.empty(shape, dtype=dtype) for shape in shapes))
    else:
        kernel = LowBitSlotKernel(kernel, form)
        held = form.allocate(sizes.slots, HIDDEN, INTERMEDIATE, torch.empty(0, dtype=dtype))
    for slot, weights in enumerate(experts):
        kernel.load(held, slot, weights)
    x = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)
    drawn = [torch.randperm(sizes.experts, generator=generator)[: sizes.top_k] for _ in range(num_rows)]
    slots = torch.stack(drawn).to(torch.int32)
    slots = torch.where(slots < sizes.slots, slots, -1)
    gates = torch.rand(num_rows, sizes.top_k, generator=generator)
    got = kernel.run(x, held, gates, slots).double()
    if form is None:
        every = [(w13.double(), w2.double()) for w13, w2 in zip(held.w13, held.w2, strict=True)]
    else:
        matrices = decoded(held.w13, held.s13, held.z13), decoded(held.w2, held.s2, held.z2)
        every = [(w13.double(), w2.double()) for w13, w2 in zip(*matrices, strict=True)]
    exact = [(torch.cat([e.w1, e.w3]).double(), e.w2.double()) for e in experts]
    codes = (
        (lambda t: (lambda q, s: q.double() * s.double())(*encode_fp8_rows(t)))
        if form is not None and form.bits == 8
        else lambda t: t
    )
    errors = []
    for matrices, seen in ((every, codes), (exact, lambda t: t)):
        want = torch.zeros_like(got)
        for row in range(num_rows):
            for slot, gate in zip(slots[row].tolist(), gates[row].tolist(), strict=True):
                if slot >= 0:
                    w13, w2 = matrices[slot]
                    g, u = (w13 @ seen(x[row : row + 1].double())[0]).to(dtype).double().chunk(2)
                    middle = (torch.nn.functional.silu(g) * u).to(dtype).double()
                    want[row] += gate * (w2 @ seen(middle[None])[0])
        errors.append(float((got - want).abs().max() / want.abs().max()))
    return errors[0], errors[1]


def main() -> None:
    for dtype in (torch.float32, torch.float16):
        forms = (
            None,
            Fp8Rows(encode_fp8_rows, fp8_w8a8_moe_quant_config),
            Int4Groups(64, dtype, int4_w4a16_moe_quant_config),
        )
        for form in forms:
            for num_rows in (1, 20) if dtype is torch.float16 else (20,):
                bits, name = 16 if form is None else form.bits, str(dtype).removeprefix("torch.")
                print(bits, name, num_rows, *worst(form, dtype, num_rows))
    for num_rows in (1, 6):
        print("many", "bfloat16", num_rows, *worst(None, torch.bfloat16, num_rows, MANY))


if __name__ == "__main__":
    with torch.no_grad():
        main()
