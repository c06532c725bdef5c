"""The Mixture-of-Experts method: K slots where vLLM would hold E experts."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from ndp_device.common.errors import ConfigError
from vllm_ndp.integration import compat, vllm_private
from vllm_ndp.integration.assembly import current_assembly
from vllm_ndp.integration.hot_slots import ask_for_huge_pages
from vllm_ndp.integration.moe_layer import LAYERS
from vllm_ndp.layer.tiers import slots_per_gpu

_LIBRARY = Library("vllm_ndp", "FRAGMENT")  # operators live as long as this object


def _moe(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return LAYERS[layer_name].run(x, topk_weights, topk_ids)


def _moe_fake(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(x)


def _moe_shared(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared_input: torch.Tensor,
    layer_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return LAYERS[layer_name].run_with_shared(x, topk_weights, topk_ids, shared_input)


def _moe_shared_fake(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared_input: torch.Tensor,
    layer_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(shared_input)


# On CPU torch.compile traces into our call, which depends on data and on another process: it must be opaque.
direct_register_custom_op("moe", _moe, fake_impl=_moe_fake, target_lib=_LIBRARY)
direct_register_custom_op("moe_shared", _moe_shared, fake_impl=_moe_shared_fake, target_lib=_LIBRARY)


class NdpMoEMethod(FusedMoEMethodBase):
    """One per layer. `moe_kernel` stays None, so vLLM routes first and hands us (x, weights, ids)."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self._worker = current_assembly()  # this engine's: another one in the process may come later
        self._worker.stored_linears.leave_out(self._worker.pool.layout)
        settings = self._worker.settings
        # with quantized slots none of vLLM's tensors: replicas are the device's kernel's
        num_hot = 0 if settings.has_quantized_slots else settings.resolve_hot_experts(moe.num_experts)
        self.ndp_layer_name: str | None = None  # once its layer is attached
        self.num_slots = slots_per_gpu(num_hot, moe.moe_parallel_config.ep_size)

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """Tell vLLM who runs shared experts. On a CPU the plugin runs them once the message to the device has left;
        vLLM would run them before it routes. On a GPU vLLM overlaps them itself, on another stream."""
        return bool(current_platform.is_cpu())

    @property
    def supports_internal_mk(self) -> bool:
        """Keeps vLLM from gathering the rows of other data-parallel ranks: each of them serves its own requests."""
        return True

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        """Undo that vLLM cuts experts over data-parallel ranks too: each of them is a whole replica of the engine."""
        return hidden_size, intermediate_size_per_partition * moe_parallel_config.dp_size

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        _refuse_unsupported(layer, self.moe)
        shapes: dict[str, tuple[int, ...]] = {
            "w13_weight": (self.num_slots, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (self.num_slots, hidden_size, intermediate_size_per_partition),
        }
        if self.moe.has_bias:
            shapes["w13_bias"], shapes["w2_bias"] = (shape[:2] for shape in shapes.values())
        for name, shape in shapes.items():
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            ask_for_huge_pages(parameter.data)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, {"weight_loader": _leave_in_pool})

    def process_weights_after_loading(self, layer: Any) -> None:
        self.ndp_layer_name = self._worker.attach(layer)

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        return None

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routed rows x [T, H] -> [T, H]. Shared experts run, too, where vLLM leaves them to us."""
        name = self.ndp_layer_name
        assert name is not None
        runs_shared = shared_experts is not None and vllm_private.leaves_shared_experts_to_us(shared_experts, x)
        # eager layers are called: an operator's dispatch costs 10 us
        run, run_with_shared = _moe, _moe_shared
        if torch.compiler.is_compiling():
            run, run_with_shared = torch.ops.vllm_ndp.moe, torch.ops.vllm_ndp.moe_shared
        if not runs_shared:
            return run(x, topk_weights, topk_ids, name)
        routed, shared = run_with_shared(x, topk_weights, topk_ids, shared_experts_input, name)
        vllm_private.put_output_of_shared_experts(shared_experts, shared)
        return routed


def _leave_in_pool(*args: Any, return_success: bool = False, **kwargs: Any) -> bool | None:
    """Weight loader of the slots, for experts that another set of files has under names of its own (`consolidated*`
    beside the index): they are read from the pool when a plan asks for them, not at load."""
    return True if return_success else None


_leave_in_pool.supports_moe_loading = True  # type: ignore[attr-defined]  # vLLM's loaders look for it


def _refuse_unsupported(layer: Any, moe: FusedMoEConfig) -> None:
    compat.activation_of(layer)
    unsupported = [
        (layer.apply_router_weight_on_input and moe.experts_per_token != 1,
         "router weights applied to the input of more than one expert per token"),
        (_is_misrouted(layer), "a score correction bias without groups, which vLLM's CPU router leaves out"),
    ]  # fmt: skip
    for present, what in unsupported:
        if present:
            raise ConfigError(f"quantization 'ndp' cannot run layer {layer.layer_name}: it has {what}")


def _is_misrouted(layer: Any) -> bool:
    """Whether vLLM itself would choose wrong experts (ERNIE-4.5, MiniMax-M2): tests watch for its end."""
    has_bias = getattr(layer, "e_score_correction_bias", None) is not None
    has_own_routing = layer.custom_routing_function is not None or layer.scoring_func == "sqrtsoftplus"
    return has_bias and not (layer.use_grouped_topk or has_own_routing) and current_platform.is_cpu()
