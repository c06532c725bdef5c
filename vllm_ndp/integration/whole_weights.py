"""Refuses to serve a checkpoint that is not whole: every parameter of vLLM's model must come out of it.

vLLM asks that of unquantized models only. Its check leaves linear layers and embeddings out. Here a linear layer's
weights are no numbers until the checkpoint gives them, so that a fused one may lack no part. Experts are checked where
they are read (ndp_device/checkpoint).

And refuses what vLLM's workers can do to weights while they serve: pool, replicas and device keep the checkpoint's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ndp_device.common.errors import ConfigError
from vllm_ndp.integration.vllm_private import weights_tracked_by

_SHOWN = 4
"""Names in a message."""


def track(load_config: Any) -> None:
    """Have vLLM's loader compare names, unless the user set that otherwise."""
    if isinstance(given := load_config.model_loader_extra_config, dict):  # else vLLM refuses it
        load_config.model_loader_extra_config = {"enable_weights_track": True} | given


@contextmanager
def checked_as_unquantized(of_draft: Callable[[], bool]) -> Iterator[None]:
    """Let vLLM's loader compare names as for a model without our method, and say what lacks in one sentence.

    For a quantized model it would also ask for parameters that a module holds under a second name. While a draft loads
    (`of_draft`), its embeddings may lack: it takes the model's.
    """

    def as_unquantized(
        stock: Callable[..., None], loader: Any, model: torch.nn.Module, loaded: set[str] | None
    ) -> None:
        if loaded is not None and not of_draft() and (lacking := _embeddings(model) - loaded):
            raise _lacking(list(lacking))
        try:
            stock(loader, model, loaded)
        except ValueError as error:
            raise _lacking(re.findall(r"'([^']+)'", str(error))) from None

    with weights_tracked_by(as_unquantized):
        yield


class WholeLinearMethod(UnquantizedLinearMethod):
    """A linear layer, maybe fused of several."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        layer.weight.data.fill_(torch.nan)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.require_whole(layer)
        super().process_weights_after_loading(layer)

    def require_whole(self, layer: torch.nn.Module) -> None:
        if bool(layer.weight.isnan().any()):
            raise _lacking([f"{self._prefix}.weight, or a part of it"])


def _embeddings(model: torch.nn.Module) -> set[str]:
    """Names of words' weights, one of each tensor: a head may share the embedding's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    holders = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    return {names[id(parameter)] for module in holders for parameter in module.parameters()}


def _lacking(names: list[str]) -> ConfigError:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ConfigError(
        f"the checkpoint lacks {', '.join(sorted(names)[:_SHOWN])}{more} (vLLM's names): it is incomplete, take the "
        "missing tensors from where it comes from"
    )


class FixedWeights:
    """In front of vLLM's worker class. Its callers get the sentence, and the engine goes on."""


_CHANGED = (
    "pool, replicas and device would keep the old checkpoint beside new weights: start a new server on the new one"
)
_SAVED = "vLLM holds only the hot experts, and would save them as if they were all: copy the checkpoint"
_REFUSED = {
    **dict.fromkeys(("reload_weights", "start_weight_update", "update_weights", "reset_weights"), _CHANGED),
    **dict.fromkeys(("save_sharded_state", "save_tensorized_model"), _SAVED),
    "compute_weight_checksums": "the experts that vLLM holds change with every prompt: compare the files of checkpoint "
    "and replicas (ndp-device verify)",
    "update_config": "the plugin has planned and built its layers by the configuration: start a new server",
}
"""Calls of vLLM's workers, and why they cannot be."""


def _refusing(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"quantization 'ndp' does not work together with {name}: {why}")

    return refuse


for _name, _why in _REFUSED.items():
    setattr(FixedWeights, _name, _refusing(_name, _why))
