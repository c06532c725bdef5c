"""Write quantized twins of the tiny family models: experts in each format that is read, and what they stand for.

    python tests/checkpoints/make_quantized_models.py OUT                    # all of them
    python tests/checkpoints/make_quantized_models.py OUT gpt_oss-mxfp4

Per twin two directories: NAME, whose experts are stored in the format, and NAME-dequantized, a plain checkpoint with
the values that the format's own library makes of them: transformers for MXFP4, torch for FP8, auto-gptq's packer and
reader and compressed-tensors' packer for theirs, quantized_writers.py's for the newer ones. For AWQ, which none of
these packs, it is written out.
Stock vLLM runs the second one, which is the reference for the first. Nothing but experts is quantized, unless the name
ends in -all. Prints one JSON object: name -> directory.
"""

import argparse
import importlib.util
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import make_family_models
import quantized_writers as writers
import torch
from quantized_writers import GROUP, Quantize, Tensors
from safetensors.torch import load_file, save_file
from torch import Tensor


def mxfp4(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """gpt-oss's own layout: [E, C, N] of the plain checkpoint becomes blocks [E, N, C / 32, 16]."""
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    groups = weight.transpose(1, 2).float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(2**-120))) - 2
    table = torch.tensor(FP4_VALUES)
    codes = (groups * 2.0 ** -exponent[..., None])[..., None].sub(table).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    scales = (exponent + 127).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales)


def compressed(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """compressed-tensors: 4 bits, symmetric, groups of 32."""
    from compressed_tensors.compressors import pack_to_int32

    codes, scale = _symmetric(weight)
    values = codes * scale.repeat_interleave(GROUP, 1).float()
    stored = {"packed": pack_to_int32(codes.to(torch.int8), 4), "scale": scale, "shape": torch.tensor(weight.shape)}
    return {f"{name}_{part}": value for part, value in stored.items()}, values


def gptq(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """Rounded, and packed by auto-gptq's own QuantLinear. Without act-order, which vLLM refuses for experts."""
    rows, columns = weight.shape
    group_of = torch.arange(columns) // GROUP
    scale = (weight.float().unflatten(1, (-1, GROUP)).abs().amax(-1) / 7).half().float()
    zero = torch.full_like(scale, 8)  # vLLM takes symmetric codes only
    codes = (weight / scale[:, group_of] + zero[:, group_of]).round().clamp(0, 15)
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = (codes - zero[:, group_of]) * scale[:, group_of]
    packer = auto_gptq_linear()(4, GROUP, columns, rows, False, weight_dtype=torch.float32)
    packer.pack(linear, scale.clone(), zero.clone(), group_of.to(torch.int32))
    base = name.removesuffix("weight")
    stored = {f"{base}{part}": getattr(packer, part).contiguous() for part in ("qweight", "qzeros", "g_idx")}
    return stored | {f"{base}scales": packer.scales.half()}, packer(torch.eye(columns)).T


def awq(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """AWQ's gemm layout: [C, N / 8], nibbles in the order 0 2 4 6 1 3 5 7."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    spread, shift = (value.float().repeat_interleave(GROUP, 1) for value in (scale, zero))
    codes = (weight / spread + shift).round().clamp(0, 15)
    base = name.removesuffix("weight")

    def words(values: Tensor) -> Tensor:  # [C, N] -> [C, N / 8]
        eight = values.to(torch.int64).unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        packed = (eight << torch.arange(0, 32, 4)).sum(-1)
        return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)

    stored = {"qweight": words(codes.T), "qzeros": words(zero.T), "scales": scale.T.contiguous()}
    return {f"{base}{part}": value for part, value in stored.items()}, (codes - shift) * spread


def _symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (weight.float().unflatten(1, (-1, GROUP)).abs().amax(-1) / 7).half()
    return (weight / scale.float().repeat_interleave(GROUP, 1)).round().clamp(-8, 7), scale


def auto_gptq_linear() -> Any:
    """auto-gptq's QuantLinear on a machine without CUDA; its package file cannot be run beside today's transformers."""
    import sys
    import types

    spec = importlib.util.find_spec("auto_gptq")
    assert spec is not None
    parents = {"auto_gptq": types.ModuleType("auto_gptq")}
    parents["auto_gptq"].__path__ = list(spec.submodule_search_locations or ())
    for name in ("auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"):
        parents[name] = types.ModuleType(name)
        parents[name].__path__ = [str(Path(parents["auto_gptq"].__path__[0]).joinpath(*name.split(".")[1:]))]
    sys.modules.update(parents)
    try:
        return importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    finally:
        for name in parents:
            del sys.modules[name]


_NOT_EXPERTS = ["re:.*self_attn.*", "re:.*gate$", "lm_head"]
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "ignore": _NOT_EXPERTS,
}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_PLAIN = ["self_attn", "mlp.gate", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "block_sparse_moe.gate", "lm_head"]


_INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _compressed(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights}
    group |= {"input_activations": inputs} if inputs else {}
    return _COMPRESSED | {"format": form, "config_groups": {"group_0": group}}


_CT = _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP)
_NVFP4 = _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
_MODELOPT = {"quant_method": "modelopt", "ignore": ["*self_attn*", "*gate", "lm_head"], "kv_cache_quant_algo": None}
_DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "scale_fmt": "ue8m0"}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False, "data_type": "int"}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

FORMATS: Mapping[str, tuple[str, Quantize, dict[str, Any]]] = MappingProxyType(
    {
        "gpt_oss-mxfp4": ("gpt_oss", mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": _PLAIN}),
        "mixtral-fp8": ("mixtral", writers.fp8_blocks(powers=False), _FP8 | {"modules_to_not_convert": _PLAIN}),
        "qwen3_moe-fp8-all": ("qwen3_moe", writers.fp8_blocks(powers=False), _FP8),
        "mixtral-compressed": ("mixtral", compressed, _CT),
        "qwen3_moe-compressed-all": ("qwen3_moe", compressed, _CT | {"ignore": ["lm_head", "re:.*mlp.gate$"]}),
        "mixtral-gptq": (
            "mixtral",
            gptq,
            _GPTQ | {"dynamic": {r"-:.*self_attn.*": {}, r"-:.*gate$": {}, "-:lm_head": {}}},
        ),
        "mixtral-awq": ("mixtral", awq, _AWQ | {"modules_to_not_convert": _PLAIN}),
        "mixtral-awq-all": ("mixtral", awq, _AWQ | {"modules_to_not_convert": ["block_sparse_moe.gate"]}),
        "mixtral-nvfp4": ("mixtral", writers.NVFP4, _NVFP4),
        "mixtral-nvfp4-all": ("mixtral", writers.NVFP4, _NVFP4 | {"ignore": ["re:.*gate$", "lm_head"]}),
        "mixtral-nvfp4-modelopt": (
            "mixtral",
            writers.modelopt_nvfp4,
            _MODELOPT | {"quant_algo": "NVFP4", "config_groups": {"0": {"weights": {"num_bits": 4, "group_size": 16}}}},
        ),
        "mixtral-fp8-modelopt": ("mixtral", writers.modelopt_fp8, _MODELOPT | {"quant_algo": "FP8"}),
        "mixtral-mxfp8": ("mixtral", writers.MXFP8, _MODELOPT | {"quant_algo": "MXFP8"}),
        "mixtral-mxfp4": (
            "mixtral",
            writers.MXFP4,
            _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        ),
        "mixtral-compressed8": (
            "mixtral",
            writers.compressed_tensors("pack-quantized", num_bits=8, symmetric=False, strategy="channel"),
            _compressed("pack-quantized", num_bits=8, type="int", symmetric=False, strategy="channel"),
        ),
        "mixtral-int8": (
            "mixtral",
            writers.compressed_tensors("int-quantized", num_bits=8, symmetric=True, strategy="channel"),
            _compressed("int-quantized", num_bits=8, type="int", strategy="channel", inputs=_INT8_INPUTS),
        ),
        "qwen3_moe-int8-all": (
            "qwen3_moe",
            writers.compressed_tensors("int-quantized", num_bits=8, symmetric=True, strategy="channel"),
            _compressed("int-quantized", num_bits=8, type="int", strategy="channel", inputs=_INT8_INPUTS)
            | {"ignore": ["lm_head", "re:.*mlp.gate$"]},
        ),
        "mixtral-deepseek-mxfp4": ("mixtral", writers.deepseek_mxfp4, _DEEPSEEK),
        "mixtral-deepseek-fp8": ("mixtral", writers.fp8_blocks(powers=True), _DEEPSEEK),
        "mixtral-auto_round": (
            "mixtral",
            writers.auto_round(4, less_one=True),
            _AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "experts"},
        ),
        "mixtral-nf4": ("mixtral", writers.bitsandbytes_4bit("nf4", torch.float16, nested=True), _NF4),
        "mixtral-bitsandbytes8": (
            "mixtral",
            writers.bitsandbytes_int8,
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
        ),
    }
)


NEEDS: Mapping[str, str] = MappingProxyType(
    {
        "mixtral-gptq": "auto_gptq",
        "mixtral-auto_round": "auto_round_extension",
        "mixtral-nf4": "bitsandbytes",
        "mixtral-bitsandbytes8": "bitsandbytes",
    }
)
"""The package that writes a format, where it is none that every set-up has."""


def make(name: str, out: Path) -> Path:
    """Write the twin to out/NAME and the values it stands for to out/NAME-dequantized, and to out/NAME-exact with those
    of experts not rounded to the family's dtype; returns the first."""
    directory, plain, exact = (out / f"{name}{kind}" for kind in ("", "-dequantized", "-exact"))
    if (directory / "tokenizer_config.json").is_file():
        return directory
    family, quantize, settings = FORMATS[name]
    source = make_family_models.make(family, out)
    tensors = load_file(source / "model.safetensors")
    stored, dequantized, unrounded = dict(tensors), dict(tensors), dict(tensors)
    for tensor, weight in tensors.items():
        of_expert = ".experts." in tensor and not tensor.endswith("bias") and weight.ndim > 1
        of_linear = name.endswith("-all") and "_proj.weight" in tensor
        if of_expert or of_linear:
            parts, values = quantize(tensor, weight)
            del stored[tensor]
            stored |= parts
            read_as = torch.bfloat16 if "fp" in name else torch.float16
            dequantized[tensor] = values.to(read_as).to(weight.dtype)
            unrounded[tensor] = values if of_expert else dequantized[tensor]
    for to, contents in ((plain, dequantized), (exact, unrounded), (directory, stored)):
        shutil.copytree(source, to, dirs_exist_ok=True)
        save_file({key: value.contiguous() for key, value in contents.items()}, to / "model.safetensors")
    if name == "mixtral-fp8":  # vLLM wants whole names of what stays as it is
        linears = [
            tensor.removesuffix(".weight") for tensor in stored if tensor.endswith(("_proj.weight", "gate.weight"))
        ]
        settings = settings | {
            "modules_to_not_convert": [one for one in linears if ".experts." not in one] + ["lm_head"]
        }
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": settings}
    if name == "mixtral-deepseek-mxfp4":
        config["expert_dtype"] = "fp4"  # as DeepSeek-V4
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return directory


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", choices=[*FORMATS, []], metavar="NAME", help=", ".join(FORMATS))
    options = parser.parse_args(arguments)
    names = options.names or [name for name in FORMATS if importlib.util.find_spec(NEEDS.get(name, "torch"))]
    print(json.dumps({name: str(make(name, options.out)) for name in names}))


if __name__ == "__main__":
    main()
