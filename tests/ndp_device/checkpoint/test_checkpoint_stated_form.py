"""How all experts are stored, as config.json alone says it: what `plan` knows before a download."""

from typing import Any

import pytest

from ndp_device.checkpoint.opening import stated_form
from ndp_device.checkpoint.values import MXFP4

FLOAT8 = ("float8", 0)
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_OF_LAYERS = {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}
_COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
_ROWS_OF_INT8 = _COMPRESSED | {"format": "int-quantized"}
_OF_INT8 = {"weights": {"num_bits": 8, "type": "int", "symmetric": True}, "targets": ["Linear"]}
_TURNED = {"config_groups": {"0": {"apply": [{"targets": ["Linear"], "location": "input"}]}}}


@pytest.mark.parametrize(
    "stated",
    [
        *([], "fp8", False, {"bits": "4"}, {"bits": 4, "group_size": 64}, {"quant_method": "higgs", "bits": 4}),
        *({"quant_method": "exl2", "bits": 4.25}, _GPTQ | {"bits": 8}, _GPTQ | {"group_size": 1024}),
        *(_GPTQ | {"checkpoint_format": "marlin"}, _GPTQ | {"dynamic": {"-:.*experts.*": {}}}),
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        {"quant_method": "fp8", "modules_to_not_convert": ["mlp.experts"]},
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:llm_compressor"},
        {"quant_method": "modelopt", "quant_algo": "W8A8_SQ"},
        _COMPRESSED | {"config_groups": {"0": _OF_LAYERS | {"targets": ["re:.*self_attn.*"]}}},
        _COMPRESSED | {"config_groups": {"0": _OF_LAYERS, "1": _OF_LAYERS | {"targets": ["re:.*experts.*"]}}},
        _COMPRESSED | {"config_groups": {"0": _OF_LAYERS}, "ignore": ["re:.*experts.*"]},
        _COMPRESSED | {"config_groups": {"0": _OF_LAYERS}, "transform_config": _TURNED},
        _COMPRESSED | {"config_groups": {"0": {"weights": {"num_bits": 4, "type": "float", "group_size": 64}}}},
        _ROWS_OF_INT8 | {"config_groups": {"0": {"weights": {"num_bits": 8, "type": "int", "symmetric": False}}}},
        {"quant_method": "modelopt", "quant_algo": "FP8", "quantized_layers": {"model": {"quant_algo": "NVFP4"}}},
        _GPTQ | {"group_size": 4},
    ],
)
def test_without_tensors_no_form_is_claimed_that_is_not_stated_of_all_experts(stated: Any) -> None:
    assert stated_form(None, {"quantization_config": stated}, 2048, 768) is None


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (
            {
                "quantization_config": {
                    "quant_method": "mxfp4",
                    "modules_to_not_convert": [
                        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
                    ],
                }
            },
            MXFP4,
        ),
        ({"quantization_config": _GPTQ | {"checkpoint_format": "gptq", "desc_act": False}}, ("int4", 128)),
        ({"quantization_config": _GPTQ | {"group_size": -1}}, ("int4", 256)),
        ({"quantization_config": _COMPRESSED | {"config_groups": {"0": _OF_LAYERS}}}, ("float8", 0)),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, ("float8", 0)),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, ("float8", 64)),
        ({"quantization_config": _ROWS_OF_INT8 | {"config_groups": {"0": _OF_INT8}}}, ("int8", 0)),
        ({"model_type": "deepseek_v4", "quantization_config": {"quant_method": "fp8"}}, MXFP4),
        ({"model_type": "deepseek_v4", "quantization_config": {"quant_method": "fp8", "expert_dtype": "fp8"}}, FLOAT8),
    ],
)
def test_the_form_that_is_stated_of_all_experts_is_known_without_tensors(config: dict[str, Any], form: Any) -> None:
    assert stated_form(None, config, 2048, 768) == form
