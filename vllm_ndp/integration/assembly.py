"""Makes the parts of one worker from the settings, the checkpoint, vLLM's configuration and what the other ranks say.

Knows which parts there are and what each needs. Keeps none that changes, and does not know steps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import vllm

from ndp_device.cache import default_cache_dir
from ndp_device.checkpoint.files import model_digest
from ndp_device.errors import ConfigError
from ndp_device.kernels.kernel import Kernel
from ndp_device.model_config import whole_model
from ndp_device.model_shape import WholeModel
from ndp_device.widths import FULL_PRECISION_BITS, WIDTHS
from vllm_ndp.device.agreement import Agreement, PlannedReplicas
from vllm_ndp.integration import compat, host_replicas
from vllm_ndp.integration.cuda import limits
from vllm_ndp.integration.cuda.lanes import make_lane, pinned_for, thread_of
from vllm_ndp.integration.cuda.late_check import LateCheck
from vllm_ndp.integration.cuda.messenger import Messenger
from vllm_ndp.integration.device_link import DeviceLink
from vllm_ndp.integration.device_members import DeviceMembers
from vllm_ndp.integration.engine_kernel import load_engine_kernel
from vllm_ndp.integration.experts_pool import ExpertsPool
from vllm_ndp.integration.host_cpu import HostCpuExperts
from vllm_ndp.integration.host_replicas import LocalReplicas
from vllm_ndp.integration.hot_experts import HotExperts
from vllm_ndp.integration.leaders_device import Device, LeadersDevice
from vllm_ndp.integration.price_probe import PriceProbe, Shared, WantedPrices
from vllm_ndp.integration.quantized_slots import ReplicaFill
from vllm_ndp.integration.ranks import Ranks
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.owners import Owners
from vllm_ndp.simulation.costs import Costs
from vllm_ndp.simulation.devices import DeviceRules, Devices
from vllm_ndp.simulation.gpu_timing import GpuModel
from vllm_ndp.simulation.joint_rule import LIVE_WIDTHS
from vllm_ndp.simulation.prices import MeasuredPrices

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ndp.config import NdpSettings


class Assembly:
    def __init__(self, settings: NdpSettings, model_dir: Path, vllm_config: VllmConfig) -> None:
        self.settings, self.model_dir = settings, model_dir
        whole_experts = vllm_config.parallel_config.enable_expert_parallel
        self.ranks = Ranks.of_this_worker(holds_whole_experts=whole_experts)
        self.pool = ExpertsPool(model_dir, self.ranks.share)
        decoder, self.layers = compat.layers_of_stage(vllm_config, self.pool.layout, self.ranks.stage)
        self.pool.restrict(self.layers)
        self.hardware = compat.hardware_of(settings)
        self.shape = _model_of_stage(vllm_config, self.pool, decoder)
        self.hot = self._make_hot_experts()
        self._most_rows = vllm_config.scheduler_config.max_num_batched_tokens

    def _make_hot_experts(self) -> HotExperts:
        settings, ranks, shape, owners = self.settings, self.ranks, self.pool.shape, None
        if ranks.holds_whole_experts:
            owners = Owners(ranks.size, shape.num_layers, shape.num_experts)
        num_quantized = settings.resolve_hot_experts(shape.num_experts) if settings.has_quantized_slots else 0
        if settings.plan == "joint":
            num_quantized = shape.num_experts
        cores, bits = compat.engine_cores(), settings.slot_bits
        return HotExperts(self.pool, cores, owners, ranks.rank, num_quantized=num_quantized, slot_bits=bits)

    @property
    def gpu_model(self) -> GpuModel:
        ranks = self.ranks
        stage, whole = ranks.stage, ranks.holds_whole_experts
        return GpuModel(self.hardware, self.shape, ranks.size, stage.index, stage.count, whole_experts=whole)

    @cached_property
    def digest(self) -> str:
        """Of the checkpoint."""
        return model_digest(self.model_dir)

    # -- agreed among the ranks -----------------------------------------------------------------------------------

    @property
    def is_quantized(self) -> bool:
        """Whether some experts are hot or cold as 1-4 bit replicas."""
        return self.settings.needs_replicas(self.pool.shape.num_experts, in_slots=compat.on_cpu())

    def agree_on_replicas(self) -> tuple[Path | None, PlannedReplicas | None]:
        """Find or build them, the first rank before the others; settings, checkpoint and replicas are equal on all.

        Raises ConfigError on the rank that differs from the leader.
        """
        replicas = None
        if self.is_quantized:
            find = partial(host_replicas.find_replicas, self.settings, self.model_dir, self.digest)
            replicas = self.ranks.after_the_first(find)
        planned = None if replicas is None else PlannedReplicas.of(replicas)
        said = "none" if planned is None else f"{planned.digest}, losses {planned.loss_digest}"
        self.ranks.require_equal(
            {
                "settings": str(self.settings),
                "a checkpoint with digest": self.digest,
                "replicas with digest": said,
            }
        )
        return replicas, planned

    def open_device(self, replicas: Path | None, planned: PlannedReplicas | None) -> Device:
        """The leader finds or starts the device; the others hear from it what they need to plan alike."""
        settings, shape = self.settings, self.pool.model
        offload_bits = settings.resolve_offload_bits(shape.num_experts)
        cores = self.ranks.merge(compat.bound_cores())
        if not self.ranks.leads:
            group_size, expert_bytes, computes_prompts = self.ranks.from_leader()
            alive = (True,) * settings.num_devices
            return LeadersDevice(offload_bits, group_size, expert_bytes, computes_prompts, alive)
        agreement = Agreement(
            shape,
            self.hardware,
            full_precision=settings.cold_precision == "full" or settings.prefill == "split",
            quantized=self.is_quantized,
            replicas=planned,
        )
        wants_prompts = self._splits_prefill()
        local = LocalReplicas(self.model_dir, replicas, settings.kernel) if settings.fallback == "same" else None
        device = DeviceLink(
            DeviceMembers(settings, agreement, self.model_dir, self.digest, replicas, cores),
            shape,
            self.layers,
            local,
            self.hot.layers[0].held.w13.dtype,
            offload_bits=offload_bits,
            deadline_ms=settings.deadline_ms,
            wants_prompts=wants_prompts,
        )
        self.ranks.from_leader((device.group_size, device.expert_bytes, device.computes_prompts))
        return device

    def _splits_prefill(self) -> bool:
        """Whether the device is to compute cold experts of prompts. Raises ConfigError where that was asked in vain."""
        settings, num_experts, reason = self.settings, self.pool.shape.num_experts, ""
        if settings.resolve_hot_experts(num_experts) == num_experts:
            reason = "every expert is hot"
        elif settings.shares_experts:
            reason = "several devices do not share the experts of prompts"
        elif not self.pool.lies_in_place:
            reason = "experts do not lie row by row in this checkpoint, so the device would keep copies of them"
        if settings.prefill == "split" and reason:
            raise ConfigError(f"ndp setting 'prefill' is 'split', but {reason}: use 'auto' or 'streamed'")
        return not reason and (settings.prefill == "split" or (settings.prefill == "auto" and compat.on_cpu()))

    def share_among_devices(self, device: Device, costs: Costs) -> DeviceRules | None:
        """Where there are several devices: who holds what, the same on every rank."""
        settings = self.settings
        if not settings.shares_experts:
            return None
        rules = DeviceRules.that_fit(
            costs,
            settings.num_devices,
            settings.device_copies,
            max_moves=settings.device_moves,
            full_precision=settings.cold_precision == "full",
            splits_experts=settings.splits_experts,
        )
        device.share_among(Devices(costs, rules, device.expert_bytes, device.offload_bits))
        return rules

    # -- of this worker -------------------------------------------------------------------------------------------

    def load_losses(self, replicas: Path | None) -> LossTable:
        if replicas is None:
            return LossTable.nominal(self.pool.shape.num_layers, self.pool.shape.num_experts)
        return host_replicas.load_losses(replicas, self.layers, self.settings.losses)

    def make_costs(self, device: Device) -> Costs:
        group_size, bits = device.group_size, self.settings.slot_bits
        return Costs(self.hardware, self.shape, group_size=group_size, num_gpus=self.ranks.size, slot_bits=bits)

    def measure_prices(self, device: Device, replicas: Path | None, shared: Shared | None) -> MeasuredPrices | None:
        """By the leader, for all ranks; None where prices are those of the simulated hardware. shared: the shared
        experts of a layer, where there are any."""
        if self.settings.prices != "measured":
            return None
        recorded = None
        if isinstance(device, DeviceLink):
            probe = PriceProbe(self.hot, lambda: self._kernel, self.model_dir, replicas, self.layers.start, shared)
            prices = probe.measure(self._asked_of_probe(device), device.members.beside_the_run)
            recorded = prices.recorded()
        return MeasuredPrices.of_recorded(self.ranks.from_leader(recorded))

    def _asked_of_probe(self, device: DeviceLink) -> WantedPrices:
        settings, served = self.settings, sorted(device.expert_bytes)
        engine = {settings.slot_bits} - {FULL_PRECISION_BITS}
        tiers = ["gpu"]
        if settings.plan == "joint":
            tiers = [tier for tier in settings.joint_tiers.split("+") if tier != "device"]
            engine = set(LIVE_WIDTHS["gpu"])
        device_widths = [bits for bits in served if bits in WIDTHS and self.is_quantized]
        if FULL_PRECISION_BITS in served and (device.computes_prompts or settings.cold_precision == "full"):
            device_widths.append(FULL_PRECISION_BITS)
        return WantedPrices(settings.slot_bits, sorted(engine), tiers, device_widths)

    def open_pool(self, replicas: Path | None) -> None:
        """Where the hot slots are filled from."""
        self.hot.open_pool(self.settings.pool, self._packed_dir(), self._make_replica_fill(replicas))

    def _packed_dir(self) -> Path:
        """The layout depends on the kernel, the dtype and the build of vLLM: each combination has its own copy."""
        dtype = str(self.hot.layers[0].held.w13.dtype).removeprefix("torch.")
        name = f"{self.digest}-packed-{self.hot.slot_kernel}-{dtype}-{vllm.__version__}"
        return default_cache_dir(self.digest).with_name(name)

    def _make_replica_fill(self, replicas: Path | None) -> ReplicaFill | None:
        """What fills hot slots with replicas; None where they are filled from the checkpoint."""
        if not (self.settings.has_quantized_slots and compat.on_cpu()):
            return None
        if replicas is None:
            raise ConfigError(
                f"ndp setting 'slot_bits' is {self.settings.slot_bits}, which needs the replicas in this process too: "
                "name their directory in 'replicas'"
            )
        slots = self.hot.layers
        return ReplicaFill(self.model_dir, replicas, self.settings.slot_bits, self._kernel, self.layers, slots)

    def make_host(self) -> HostCpuExperts | None:
        """None where this rank's CPU computes no experts: of several ranks the leader's computes them, whole. Raises
        ConfigError where it would keep copies of them."""
        settings = self.settings
        if not settings.has_warm_experts:
            return None
        if not self.pool.lies_in_place:
            raise ConfigError(
                "ndp setting 'warm_experts' needs experts that the CPU can compute where they lie, but in this "
                "checkpoint they do not lie row by row, so that it would keep copies of them: use 'warm_experts': 0"
            )
        if not self.ranks.leads:
            return None
        return HostCpuExperts(self.model_dir, self._kernel, self.layers)

    def make_messenger(self, offload_bits: int) -> Messenger | None:
        """Where decode layers do not wait for the GPU: their way to the device and back."""
        weights = self.hot.layers[0].held.w13
        if not limits.runs_aside(self.settings, offload_bits, on_gpu=weights.is_cuda):
            return None
        device, shape = weights.device, self.pool.shape
        return Messenger(
            make_lane(device),
            pinned_for(device),
            device,
            top_k=shape.top_k,
            hidden=shape.hidden_size,
            dtype=weights.dtype,
            start_thread=thread_of(device, compat.engine_cores()),
        )

    def make_late_check(self) -> LateCheck | None:
        device = self.hot.layers[0].held.w13.device
        if device.type == "cpu":
            return None
        return LateCheck(make_lane(device), pinned_for(device), device, self._most_rows)

    @cached_property
    def _kernel(self) -> Kernel:
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
