"""Facts of a worker, known before its model loads: from the settings, the checkpoint and vLLM's configuration.

And what follows from them alone. Nothing here changes afterwards.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import WholeModel
from ndp_device.kernels import Kernel
from ndp_device.model_config import whole_model
from vllm_ndp.integration import compat, drafts
from vllm_ndp.integration.cuda import limits
from vllm_ndp.integration.cuda.limits import Rung
from vllm_ndp.integration.cuda.streams import CopiesByThread
from vllm_ndp.integration.experts_pool import ExpertsPool
from vllm_ndp.integration.host_replicas import load_engine_kernel
from vllm_ndp.integration.linear_layers import LinearLayers, StoredLinears
from vllm_ndp.integration.ranks import Ranks
from vllm_ndp.layer.setup import Planning
from vllm_ndp.layer.tiers import Owners, Tiers

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class WorkerFacts:
    def __init__(self, vllm_config: VllmConfig, opened: ExitStack) -> None:
        """opened: what is closed with the worker, the last first, whether or not it comes to start."""
        self.settings, self.model_dir = compat.check(vllm_config), compat.model_dir(vllm_config)
        self.vllm_config, self.opened = vllm_config, opened
        whole_experts = vllm_config.parallel_config.enable_expert_parallel
        self.ranks = ranks = Ranks.of_this_worker(holds_whole_experts=whole_experts)
        self.pool = ExpertsPool(self.model_dir, ranks.share)
        decoder, self.layers = compat.layers_of_stage(vllm_config, self.pool.layout, ranks.stage)
        self.pool.restrict(self.layers)
        self.hardware = compat.hardware_of(self.settings)
        self.shape = _model_of_stage(vllm_config, self.pool, decoder)
        sizes = self.pool.shape.num_layers, self.pool.shape.num_experts
        owners = Owners(ranks.size, *sizes) if ranks.holds_whole_experts else None
        self.tiers = Tiers(*sizes, owners=owners, rank=ranks.rank if owners else None)
        self.linears = self._make_linears()
        self.stored_linears = StoredLinears(self.model_dir, self.pool.quantized)

    def _make_linears(self) -> LinearLayers | None:
        """Linear layers to quantize; None where they stay as they are."""
        if self.settings.linear_bits is None:
            return None
        linears = LinearLayers(
            self.settings.linear_bits, lambda: self.kernel, compat.engine_cores(), self.pool.shape.num_experts
        )
        self.opened.callback(linears.close)
        return linears

    @property
    def unsimulated(self) -> str:
        """Work that runs here and is in no simulated clock."""
        return drafts.unsimulated(self.vllm_config)

    @cached_property
    def digest(self) -> str:
        """Digest of the checkpoint."""
        return model_digest(self.model_dir)

    @cached_property
    def serves_its_codes(self) -> bool:
        """Whether every expert runs in slots by the codes that the checkpoint holds: without replicas."""
        only = self.settings.only_width(self.pool.shape.num_experts)
        return compat.on_cpu() and self.settings.replicas is None and only is not None and only == self.pool.code_bits

    @property
    def is_quantized(self) -> bool:
        """Whether some experts are hot or cold as 1-4 bit replicas."""
        needed = self.settings.needs_replicas(self.pool.shape.num_experts, in_slots=compat.on_cpu())
        return needed and not self.serves_its_codes

    @cached_property
    def planning(self) -> Planning:
        return self.settings.planning(self.pool.shape.num_experts)

    @property
    def gathers_prompts(self) -> bool:
        """Whether a prompt's experts are computed alike in slots and out of them. On a GPU one call for all slots is
        worth more; where all experts are always hot there is no other way."""
        num_experts = self.pool.shape.num_experts
        changes = self.settings.is_joint or self.settings.resolve_hot_experts(num_experts) < num_experts
        return compat.on_cpu() and self.tiers.owners is None and changes

    def splits_prefill(self) -> bool:
        """Whether the device is to compute cold experts of prompts. Raises ConfigError where that was asked in vain."""
        settings, num_experts, reason = self.settings, self.pool.shape.num_experts, ""
        if settings.resolve_hot_experts(num_experts) == num_experts:
            reason = "every expert is hot"
        elif settings.num_devices > 1:
            reason = "several devices do not share the experts of prompts"
        elif not self.pool.lies_in_place:
            reason = "experts do not lie row by row in this checkpoint, so the device would keep copies of them"
        if settings.prefill == "split" and reason:
            raise ConfigError(f"ndp setting 'prefill' is 'split', but {reason}: use 'auto' or 'streamed'")
        return not reason and (settings.prefill == "split" or (settings.prefill == "auto" and compat.on_cpu()))

    @cached_property
    def rung(self) -> Rung:
        """How much of the way to run on a GPU is in force."""
        offload_bits = self.settings.resolve_offload_bits(self.pool.model.num_experts)
        return limits.rung_of(self.settings, offload_bits, on_gpu=not compat.on_cpu())

    @cached_property
    def copies(self) -> CopiesByThread | None:
        """Of all layers: weights on their way to a GPU, beside what computes; None where they go plainly."""
        return None if self.rung < Rung.STREAMS or compat.on_cpu() else CopiesByThread()

    @cached_property
    def kernel(self) -> Kernel:
        """The device's, in this process."""
        return load_engine_kernel(self.settings.kernel, compat.engine_cores())


def _model_of_stage(vllm_config: VllmConfig, pool: ExpertsPool, decoder: range) -> WholeModel:
    """Sizes as vLLM has them, with the defaults of its configuration classes and what the user overrode.

    decoder: the layers that this worker runs; experts of others are none of its model's.
    """
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    whole = whole_model(pool.model, model.hf_text_config.to_dict(), pool.layout.moe_index, dtype=dtype)
    if pool.shape == pool.model:
        return whole
    return replace(whole, num_layers=pool.shape.num_layers, decoder=whole.decoder[decoder.start : decoder.stop])
