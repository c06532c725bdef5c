"""`--quantization ndp`: Mixture-of-Experts layers through NdpMoEMethod, everything else as the checkpoint has it.

A checkpoint that is quantized already keeps its own method for linear layers, where vLLM has a kernel for it on this
machine; a processor without one gets their values (linear_layers.py). Its experts are dequantized when they leave the
pool, so that slots hold plain weights. A draft, whose layers vLLM makes once all of the model's are loaded, keeps
vLLM's methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from ndp_device.common.errors import ConfigError
from vllm_ndp.integration import vllm_private
from vllm_ndp.integration.compat import say
from vllm_ndp.integration.linear_layers import QuantizedHead, WholeLinearMethod
from vllm_ndp.operating.sources import SERVED_METHODS, unserved_method

if TYPE_CHECKING:
    from vllm_ndp.integration.assembly import Assembly

_VLLM_SAYS: Mapping[str, tuple[str, ...]] = {
    "modelopt": ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"),
    "auto-round": ("inc",),
}
"""quant_method -> vLLM's own names of it, where they differ: its configurations know which of them a checkpoint is."""
_NO_KERNEL = (ValueError, NotImplementedError, AssertionError)
"""What vLLM raises where it has none. RuntimeError is left as it is: memory that is not there is one."""
_OPERATORS: Mapping[str, str] = {"CPUWNA16LinearKernel": "cpu_gemm_wna16"}
"""vLLM's kernels of linear layers -> the operator they call, which its builds for some processors lack."""


class NdpConfig(QuantizationConfig):
    """Carries the checkpoint's own method, if it has one; the settings live in `additional_config["ndp"]`."""

    def __init__(self, method: str | None = None, inner: QuantizationConfig | None = None) -> None:
        super().__init__()
        self._method, self._inner = method, inner
        self._names: Any = (
            None  # what maps the checkpoint's names to vLLM's; set in the worker, for which this is pickled
        )

    def get_name(self) -> str:
        return "ndp"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]  # of the experts; _inner is asked about linear layers

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NdpConfig:
        method = str(config.get("quant_method", "unknown method"))
        if method not in (*SERVED_METHODS, "gpt_oss_mxfp4"):  # vLLM's name of gpt-oss's
            raise ConfigError(unserved_method(method))
        known = _vllms_own(method, config)
        try:
            return cls(method, known.from_config(config))
        except (ValueError, KeyError, NotImplementedError, AssertionError) as error:
            reason = (str(error).strip() or "a setting is missing that its format needs").splitlines()[0]
            raise ConfigError(
                f"vLLM cannot use config.json's quantization_config of {method} ({reason}): take its maker's"
            ) from error

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        return "ndp" if user_quant == "ndp" and hf_quant_cfg is not None else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        if self._inner is not None:
            self._names = hf_to_vllm_mapper
            self._inner.apply_vllm_mapper(hf_to_vllm_mapper)

    def maybe_update_config(self, *args: Any, **kwargs: Any) -> None:
        if self._inner is not None:
            self._inner.maybe_update_config(*args, **kwargs)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm_ndp.integration.assembly import current_assembly

        assembly = current_assembly()
        if isinstance(layer, RoutedExperts) and not assembly.has_every_layer:
            from vllm_ndp.integration.moe_method import NdpMoEMethod

            return NdpMoEMethod(layer.moe_config)
        if self._inner is None:
            return self._plain_method(assembly, layer, prefix)
        self._inner.packed_modules_mapping = self.packed_modules_mapping
        if self._names is not None:
            assembly.stored_linears.vllms_name = self._names.map_name
        if (coded := self._method_of_codes(assembly, layer, prefix)) is not None:
            return coded
        try:
            method = self._inner.get_quant_method(layer, prefix)
        except _NO_KERNEL as error:
            return self._dequantized(assembly, layer, prefix, error)
        if method is None or isinstance(method, UnquantizedLinearMethod):
            return self._plain_method(assembly, layer, prefix)
        if not isinstance(layer, LinearBase):
            return method
        dtype = get_current_vllm_config().model_config.dtype
        if dtype not in (computes_in := self._inner.get_supported_act_dtypes()):
            types = " or ".join(str(one).removeprefix("torch.") for one in computes_in)
            why = f"it computes in {types}, not in {str(dtype).removeprefix('torch.')}: set --dtype bfloat16"
            return self._dequantized(assembly, layer, prefix, ValueError(why))
        self._dequantize_without_kernel(assembly, method, layer, prefix)
        return method

    def _method_of_codes(self, assembly: Assembly, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for codes of 4 or 8 bits, where linear layers are ours: of few rows faster than vLLM's kernels."""
        if (
            assembly.has_every_layer
            or assembly.ranks.size > 1
            or assembly.linears is None
            or not assembly.linears.may_take(layer)
        ):
            return None
        return assembly.stored_linears.method_of_codes(assembly.linears, layer, prefix, self.packed_modules_mapping)

    def _plain_method(self, assembly: Assembly, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer that the checkpoint does not store quantized."""
        linears = None if assembly.has_every_layer else assembly.linears
        if linears is not None and isinstance(layer, ParallelLMHead):
            return QuantizedHead(linears, prefix)
        if not isinstance(layer, LinearBase):
            return None
        return WholeLinearMethod(prefix, linears if linears is not None and linears.may_take(layer) else None)

    def _dequantized(
        self, assembly: Assembly, layer: torch.nn.Module, prefix: str, error: Exception
    ) -> QuantizeMethodBase:
        """The method of a layer for whose format vLLM has no kernel here: as if the checkpoint stored it plainly.

        vLLM's many lines about the kernel become one sentence where it cannot be.
        """
        plain = self._plain_method(assembly, layer, prefix)
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        if plain is None or assembly.has_every_layer or not current_platform.is_cpu():
            raise ConfigError(
                f"vLLM has no kernel on this machine for {prefix}, which the checkpoint stores as {self._method}: "
                f"serve it where there is one, or give its linear layers in bfloat16 ({reason})"
            ) from error
        stored = assembly.stored_linears
        if not stored.names:
            say(
                f"vLLM has no kernel here for linear layers stored as {self._method}: they are dequantized as they "
                f"load ({prefix}: {reason})"
            )
        stored.names.add(prefix)
        return plain

    def _dequantize_without_kernel(self, assembly: Assembly, method: Any, layer: Any, prefix: str) -> None:
        """Some formats look for their kernel only when the weights are made."""
        create_weights = method.create_weights

        def made(*args: Any, **kwargs: Any) -> None:
            before = dict(layer.named_parameters(recurse=False))
            try:
                create_weights(*args, **kwargs)
                _refuse_missing_operator(method, layer)
                assembly.stored_linears.kept.add(prefix)
            except _NO_KERNEL as error:
                layer.quant_method = self._dequantized(assembly, layer, prefix, error)
                for name in dict(layer.named_parameters(recurse=False)).keys() - before:
                    delattr(layer, name)
                layer.quant_method.create_weights(*args, **kwargs)

        method.create_weights = made


def _vllms_own(method: str, config: dict[str, Any]) -> type[QuantizationConfig]:
    """vLLM's configuration of a checkpoint's format."""
    for name in _VLLM_SAYS.get(method, ()):
        known = get_quantization_config(name)
        if known.override_quantization_method(config, None) == name:
            return known
    if method in _VLLM_SAYS:
        raise ConfigError(
            f"the checkpoint is quantized by {method} with quant_algo {config.get('quant_algo', 'not given')}, which "
            f"vLLM knows as none of {', '.join(_VLLM_SAYS[method])}: give it in bfloat16"
        )
    return get_quantization_config(method)


def _refuse_missing_operator(method: Any, layer: Any) -> None:
    """vLLM chooses some kernels without a look at its own library, and would end when it calls them."""
    kernel = getattr(method, "kernel", None) or getattr(getattr(layer, "scheme", None), "kernel", None)
    for base in type(kernel).__mro__:
        operator = _OPERATORS.get(base.__name__)
        if operator is not None and not vllm_private.has_operator(operator):
            raise NotImplementedError(f"vLLM builds its operator {operator} for AVX-512 only")
        if operator is not None and get_current_vllm_config().model_config.dtype == torch.float32:
            raise NotImplementedError(f"vLLM's operator {operator} computes in 16 bits only")
