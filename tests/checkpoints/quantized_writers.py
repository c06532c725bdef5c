"""One matrix in each of the newer quantized formats, and its values, by the packages that write or define them.

Each writer takes a name that ends in `weight` and a matrix [N, C], and returns the tensors that a checkpoint stores and
the values that the format's own package reads from them, in float32 or as the package rounds them: compressed-tensors,
bitsandbytes, auto-round, llama.cpp's gguf, torch's types for the scales of powers of two. modelopt's files are
compressed-tensors' with other names: it has no package for a processor, and its layout is vLLM's
(model_executor/layers/quantization/modelopt.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

GROUP = 32
Tensors = dict[str, Tensor]
Quantize = Callable[[str, Tensor], tuple[Tensors, Tensor]]


def compressed_tensors(
    form: str, *, dtype: torch.dtype = torch.float16, actorder: bool = False, **args: Any
) -> Quantize:
    """Its own compressor of a format, with minimum and maximum as the observer."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        weights = QuantizationArgs(**args, **({"actorder": "group"} if actorder else {}))
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        grouped = weight.float()
        if weights.group_size and weights.group_size > 0:
            grouped = grouped.unflatten(1, (-1, weights.group_size))
        low, high = grouped.amin(-1), grouped.amax(-1)
        state = {"weight": weight.to(dtype)}
        if form == "nvfp4-pack-quantized":
            state["weight_global_scale"] = generate_gparam(low.amin(), high.amax()).reshape(1)
        scale, zero = calculate_qparams(low, high, weights, state.get("weight_global_scale"))
        if scale.ndim == 1:
            scale, zero = scale[:, None], zero[:, None]
        state["weight_scale"] = scale if "fp" in form else scale.to(dtype)
        if not weights.symmetric:
            state["weight_zero_point"] = zero
        if actorder:
            shuffled = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
            state["weight_g_idx"] = (shuffled // weights.group_size).to(torch.int32)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(dict(state), scheme)
        values = compressor.decompress(dict(stored), scheme)["weight"]
        base = name.removesuffix("weight")
        return {f"{base}{part}": value for part, value in stored.items()}, values

    return quantize


NVFP4 = compressed_tensors(
    "nvfp4-pack-quantized",
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    scale_dtype="torch.float8_e4m3fn",
)
MXFP4 = compressed_tensors(
    "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"
)
MXFP8 = compressed_tensors(
    "mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"
)


def modelopt_nvfp4(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """The scale of the whole tensor is multiplied with, where compressed-tensors divides by it."""
    stored, _ = NVFP4(name, weight)
    factor = 1 / stored[f"{name}_global_scale"].float().reshape(())
    codes, scale = stored[f"{name}_packed"], stored[f"{name}_scale"]
    values = _unpacked_fp4(codes).unflatten(1, (-1, 16)) * (scale.float() * factor)[..., None]
    tensors = {name: codes, f"{name}_scale": scale, f"{name}_scale_2": factor}
    tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.5)
    return tensors, values.flatten(1)


def deepseek_mxfp4(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """DeepSeek-V4: codes in int8, scales in torch's type of powers of two."""
    stored, values = MXFP4(name, weight)
    scale = stored[f"{name}_scale"].view(torch.float8_e8m0fnu)
    codes = stored[f"{name}_packed"]
    exact = _unpacked_fp4(codes).unflatten(1, (-1, 32)) * scale.float()[..., None]
    assert torch.equal(exact.flatten(1).bfloat16(), values.bfloat16())
    return {name: codes.view(torch.int8), f"{name.removesuffix('weight')}scale": scale}, values


def fp8_blocks(*, powers: bool) -> Quantize:
    """DeepSeek's: one scale for each block (here of 32 x 32), in float32, or in V4 a power of two."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = weight.shape
        blocks = weight.float().reshape(rows // GROUP, GROUP, columns // GROUP, GROUP)
        scale, of_scale = blocks.abs().amax((1, 3)) / 448, f"{name}_scale_inv"
        if powers:
            scale = torch.exp2(torch.ceil(torch.log2(scale))).to(torch.float8_e8m0fnu)
            of_scale = f"{name.removesuffix('weight')}scale"
        spread = scale.float()[:, None, :, None]
        stored = (blocks / spread).to(torch.float8_e4m3fn)
        values = (stored.float() * spread).reshape(weight.shape)
        return {name: stored.reshape(weight.shape), of_scale: scale}, values

    return quantize


def modelopt_fp8(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """One scale for the whole tensor, and one of the activations, which is not ours."""
    scale = (weight.float().abs().amax() / 448).reshape(())
    stored = (weight.float() / scale).to(torch.float8_e4m3fn)
    tensors = {name: stored, f"{name}_scale": scale, f"{name.removesuffix('weight')}input_scale": torch.tensor(0.5)}
    return tensors, stored.float() * scale


def auto_round(bits: int, *, less_one: bool) -> Quantize:
    """auto-round's own packer: GPTQ's tensors, zero points less one (auto_round:auto_gptq) or as they are."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

        rows, columns = weight.shape
        grouped = weight.float().unflatten(1, (-1, GROUP))
        low, high, top = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0), (1 << bits) - 1
        scale = ((high - low) / top).half().float()
        zero = (-low / scale).round().clamp(1, top)
        linear = torch.nn.Linear(columns, rows, bias=False)
        codes = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, top)
        linear.weight.data = ((codes - zero[..., None]) * scale[..., None]).flatten(1)
        packer = (qlinear_torch_zp if less_one else qlinear_torch).QuantLinear(bits, GROUP, columns, rows, False)
        packer.device = "cpu"
        packer.pack(linear, scale.clone(), zero.clone(), None)
        base = name.removesuffix("weight")
        stored = {f"{base}{part}": getattr(packer, part).contiguous() for part in ("qweight", "qzeros", "scales")}
        return stored, linear.weight.detach().half()

    return quantize


def bitsandbytes_4bit(kind: str, dtype: torch.dtype = torch.bfloat16, *, nested: bool) -> Quantize:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        from bitsandbytes import functional

        codes, state = functional.quantize_4bit(
            weight.to(dtype), quant_type=kind, compress_statistics=nested, blocksize=64
        )
        stored = {f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}
        state.shape = torch.Size((weight.numel() // 64, 64))  # 0.50's CPU kernel is wrong where rows end in a block
        return {name: codes} | stored, functional.dequantize_4bit(codes, state).reshape(weight.shape)

    return quantize


def bitsandbytes_int8(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    from bitsandbytes import functional

    codes, scale, _ = functional.int8_vectorwise_quant(weight.half())
    base = name.removesuffix("weight")
    stored = {name: codes, f"{base}SCB": scale, f"{base}weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, functional.int8_vectorwise_dequant(codes, scale)


def _unpacked_fp4(codes: Tensor) -> Tensor:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    return unpack_fp4_from_uint8(codes, len(codes), codes.shape[1] * 2, dtype=torch.float32)


def write_gguf(path: Path, tensors: dict[str, np.ndarray[Any, Any]], types: dict[str, str], kind: str) -> None:
    """A GGUF file by llama.cpp's own writer; the tensors in `types` are blocks of that type already, as bytes."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(str(path), kind)
    writer.add_token_list(["<s>", "</s>"])
    writer.add_block_count(1)
    for name, values in tensors.items():
        raw = GGMLQuantizationType[types[name]] if name in types else None
        writer.add_tensor(name, values, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
