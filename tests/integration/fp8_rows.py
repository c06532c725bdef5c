"""Slots of fewer bits in torch's operations: vLLM's quantization of rows to FP8, and what codes stand for."""

import torch

from vllm_ndp.integration.cuda.low_bit_slots import FP8, FP8_MAX


def encode_fp8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [N, C], scale [N, 1]) as vLLM's operator gives them."""
    scale = (rows.float().abs().amax(dim=1, keepdim=True) / FP8_MAX).clamp(min=1 / (FP8_MAX * 512))
    return (rows.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def decoded(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """What matrices of slots [S, N, C] stand for, in fp32, by the docstrings of the two forms."""
    if zeros is None:
        return codes.float() * scales
    columns = torch.stack([codes & 15, codes >> 4], dim=3).flatten(2).float().unflatten(2, (scales.shape[2], -1))
    rows = torch.stack([zeros & 15, zeros >> 4], dim=2).flatten(1, 2).float()
    return ((columns - rows.unsqueeze(3)) * scales.float().unsqueeze(3)).flatten(2)
