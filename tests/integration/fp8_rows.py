"""vLLM's quantization of rows to FP8, in torch's operations: the yardstick of slots of 8 bits."""

import torch

from vllm_ndp.integration.cuda.low_bit_slots import FP8, FP8_MAX


def encode_fp8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [N, C], scale [N, 1]) as vLLM's operator gives them."""
    scale = (rows.float().abs().amax(dim=1, keepdim=True) / FP8_MAX).clamp(min=1 / (FP8_MAX * 512))
    return (rows.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale
