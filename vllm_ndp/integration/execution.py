"""The call of a layer's experts: all that changes when vLLM moves their execution.

Up to 0.33 vLLM calls `FusedMoEMethodBase.apply`. Issue 54959 of vLLM takes execution out of that class. From then on
vLLM's layer executes, and a plugin replaces the layer as a registered PluggableLayer. This file knows vLLM's call and
the names of our layers. Weights are moe_method.py's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.library import Library
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_ndp.integration import vllm_private
from vllm_ndp.integration.moe_layer import LAYERS

_LIBRARY = Library("vllm_ndp", "FRAGMENT")  # operators live as long as this object


def _moe(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return LAYERS[layer_name].forward(x, topk_weights, topk_ids)


def _moe_fake(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(x)


def _moe_shared(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared_input: torch.Tensor,
    layer_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return LAYERS[layer_name].forward_with_shared(x, topk_weights, topk_ids, shared_input)


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


def execute(
    layer_name: str,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared_experts: Any = None,
    shared_experts_input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the experts of one of our layers on routed rows x [T, H] -> [T, H].

    Shared experts run, too, where vLLM leaves them to us.
    """
    runs_shared = shared_experts is not None and vllm_private.leaves_shared_experts_to_us(shared_experts, x)
    if torch.compiler.is_compiling():
        if not runs_shared:
            return torch.ops.vllm_ndp.moe(x, topk_weights, topk_ids, layer_name)
        routed, shared = torch.ops.vllm_ndp.moe_shared(x, topk_weights, topk_ids, shared_experts_input, layer_name)
        vllm_private.put_output_of_shared_experts(shared_experts, shared)
        return routed
    layer = LAYERS[layer_name]  # an operator's dispatch costs 10 us
    if not runs_shared:
        return layer.forward(x, topk_weights, topk_ids)
    return layer.forward(
        x, topk_weights, topk_ids, partial(vllm_private.run_shared_experts, shared_experts, shared_experts_input)
    )


class NdpRoutedExperts(RoutedExperts):
    """vLLM's container of experts, which executes ours itself. Layers of other methods stay vLLM's in every respect."""

    def forward_modular(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self.quant_method, "ndp_layer_name", None)  # of our method alone, once its layer is attached
        if name is None:
            return super().forward_modular(x, *args, **kwargs)
        return execute(name, x, *args, **kwargs)
