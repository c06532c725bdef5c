"""`--quantization ndp`: linear layers as they are, Mixture-of-Experts layers through NdpMoEMethod."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from ndp_device.errors import ConfigError


class NdpConfig(QuantizationConfig):
    """Carries no state: the settings live in `additional_config["ndp"]`."""

    def get_name(self) -> str:
        return "ndp"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NdpConfig:
        raise ConfigError(
            f"the checkpoint is already quantized ({config.get('quant_method', 'unknown method')}); "
            "vllm-ndp needs a full-precision checkpoint, from which it makes its own replicas"
        )

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        return "ndp" if user_quant == "ndp" and hf_quant_cfg is not None else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            from vllm_ndp.integration.moe_method import NdpMoEMethod

            return NdpMoEMethod(layer.moe_config, get_current_vllm_config())
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return None
