"""A worker in the making: from the settings, the checkpoint, vLLM's configuration and what the other ranks say.

While the model loads, each MoE layer hands over its hot slots (`attach`). Then `finish` makes every other part, each
complete, and returns the worker whose model is loaded. Knows which parts there are and what each needs. Does not know
steps.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import vllm

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.cache import default_cache_dir
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import WholeModel
from ndp_device.common.widths import FULL_PRECISION_BITS, REPLICA_WIDTHS
from ndp_device.kernels.kernel import EngineKernel
from ndp_device.model_config import whole_model
from ndp_device.protocol.messages import Served
from ndp_device.transport import shm
from ndp_device.transport.sender_thread import SenderThread
from vllm_ndp import __version__
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.prices import MeasuredPrices
from vllm_ndp.device_client.handshake import PlannedReplicas, Requirements
from vllm_ndp.integration import compat, drafts, host_replicas, known_prices
from vllm_ndp.integration.batch import RequestTracker
from vllm_ndp.integration.compat import model_dir, say
from vllm_ndp.integration.cuda import limits
from vllm_ndp.integration.cuda.copies import CopiesByThread
from vllm_ndp.integration.cuda.layer import FixedOutput
from vllm_ndp.integration.cuda.limits import Rung
from vllm_ndp.integration.cuda.messenger import Messenger
from vllm_ndp.integration.cuda.packet import RowForm
from vllm_ndp.integration.cuda.routing import routing_by
from vllm_ndp.integration.cuda.streams import LateCheck, make_stream, pinned_for
from vllm_ndp.integration.device_link import DeviceFacts, DeviceLink, DeviceView, HostCpuExperts
from vllm_ndp.integration.device_members import DeviceMembers
from vllm_ndp.integration.experts_pool import ExpertsPool
from vllm_ndp.integration.host_replicas import LocalReplicas, load_engine_kernel
from vllm_ndp.integration.hot_experts import HotExperts, slots_of_module
from vllm_ndp.integration.hot_slots import HotSlots, SlotWeights, make_slot_kernel
from vllm_ndp.integration.linear_layers import LinearLayers
from vllm_ndp.integration.moe_layer import LAYERS, HotViews, LayerParts, MoELayer
from vllm_ndp.integration.planner import PlanRunner
from vllm_ndp.integration.price_probe import PriceProbe, Shared, WantedPrices
from vllm_ndp.integration.quantized_slots import ReplicaFill
from vllm_ndp.integration.ranks import Ranks
from vllm_ndp.integration.report import DEVICE_TIME
from vllm_ndp.integration.step import RunningStep
from vllm_ndp.integration.streaming import Streamer, make_streamer
from vllm_ndp.layer.devices import DeviceRules, Devices
from vllm_ndp.layer.joint_rule import LIVE_WIDTHS
from vllm_ndp.layer.run import Run
from vllm_ndp.layer.setup import Planning, Setup
from vllm_ndp.layer.tiers import Tiers
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.owners import Owners

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_current: Assembly | None = None
_numbers = itertools.count()


@dataclass(frozen=True)
class AttachedLayer:
    """A MoE layer whose weights would be ready, as it has handed itself over."""

    operator: str  # the name that its operator is called by
    slots: HotSlots
    weighs_input: bool


@dataclass(frozen=True)
class LoadedWorker:
    """A worker whose model is loaded, before there is a KV cache."""

    made: Assembly
    parts: LayerParts
    layers: list[MoELayer]  # as long as the engine lives
    runner: Any  # vLLM's
    requests: RequestTracker
    run: Run[str]
    late_check: LateCheck | None

    @property
    def unsimulated(self) -> str:
        """Work that runs here and is in no simulated clock; empty where there is none."""
        link = self.parts.device.link
        of_device = DEVICE_TIME if link is not None and not link.members.simulate else ""
        return self.made.unsimulated or of_device


class Assembly:
    def __init__(self, vllm_config: VllmConfig, opened: ExitStack) -> None:
        """opened: what is closed with the worker, the last first, whether or not it comes to start."""
        self.settings, self.model_dir = compat.check(vllm_config), model_dir(vllm_config)
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
        self.attached: dict[int, AttachedLayer] = {}
        self.linears = self._make_linears()

    @classmethod
    def begin(cls, vllm_config: VllmConfig, opened: ExitStack) -> Assembly:
        """Layers attach themselves to this one from now on."""
        global _current
        _current = cls(vllm_config, opened)
        return _current

    def _make_linears(self) -> LinearLayers | None:
        """Linear layers to quantize; None where they stay as they are."""
        if self.settings.linear_bits is None:
            return None
        linears = LinearLayers(
            self.settings.linear_bits, lambda: self._kernel, compat.engine_cores(), self.pool.shape.num_experts
        )
        self.opened.callback(linears.close)
        return linears

    # -- while the model loads ------------------------------------------------------------------------------------

    def attach(self, module: Any) -> str:
        """Take vLLM's module of a MoE layer whose weights would be ready; the name that its operator is called by."""
        settings, num_experts = self.settings, self.pool.shape.num_experts
        index = compat.moe_index(module, self.pool.layout, self.ranks.share) - self.layers.start
        num_quantized = settings.resolve_hot_experts(num_experts) if settings.has_quantized_slots else 0
        if settings.plan == "joint":
            num_quantized = num_experts
        bits = settings.slot_bits
        pool, load_kernel = self.pool, lambda: self._kernel
        activations = pool.layout.activations
        kernel = make_slot_kernel(module, pool.activation_of(index), activations, load_kernel, self.copies)
        slots = slots_of_module(module, kernel, self.tiers, index, num_quantized=num_quantized, slot_bits=bits)
        name = f"{next(_numbers)}:{module.layer_name}"
        self.attached[index] = AttachedLayer(name, slots, bool(module.apply_router_weight_on_input))
        return name

    @property
    def has_every_layer(self) -> bool:
        """Whether all MoE layers of the model are attached: those that vLLM makes later belong to a draft model."""
        return len(self.attached) == self.pool.shape.num_layers

    # -- once it is loaded ----------------------------------------------------------------------------------------

    def finish(self, runner: Any) -> LoadedWorker:
        """Find the device, make the first placement, connect the layers. Raises ConfigError, also where the model has
        not attached all its layers."""
        shape, opened = self.pool.shape, self.opened
        if not self.has_every_layer:
            raise ConfigError(
                f"quantization 'ndp' was asked for but only {len(self.attached)} of {shape.num_layers} "
                "MoE layers were attached: this model's layers do not go through vLLM's RoutedExperts"
            )
        replicas, planned = self.agree_on_replicas()
        setup, costs, device = self.open_device(replicas, planned)
        hot = self.open_pool(replicas)
        opened.callback(hot.close)
        late_check = self.make_late_check()
        losses, shared = self.load_losses(replicas), compat.shared_experts(runner.model)
        prices = self.measure_prices(hot, device, replicas, next(iter(shared.values()), None))
        setup, first, requests = msgspec.structs.replace(setup, prices=prices), self.attached[0], RequestTracker()
        run = Run[str](
            setup,
            self._planning.rules(losses),
            costs,
            device.devices,
            self.tiers,
            shape.top_k,
            device.counted_on,
            weighs_input=first.weighs_input,
            aliases=first.slots.aliases,
            gathers_prompts=self._gathers_prompts,
        )
        planner = PlanRunner(run, requests, hot, device)
        planner.start()
        parts = LayerParts(
            hot=hot,
            device=device,
            planner=planner,
            running=RunningStep(),
            views=HotViews(run.splitter, self._held.w13.device),
            host=self.make_host(),
            messenger=self.make_messenger(),
            weighs_input=first.weighs_input,
        )
        layers = self._connect_layers(parts, shared)
        opened.callback(layers.clear)
        return LoadedWorker(
            made=self,
            parts=parts,
            layers=layers,
            runner=runner,
            requests=requests,
            run=run,
            late_check=late_check,
        )

    @property
    def _gathers_prompts(self) -> bool:
        """Whether a prompt's experts are computed alike in slots and out of them. On a GPU one call for all slots is
        worth more; where all experts are always hot there is no other way."""
        num_experts = self.pool.shape.num_experts
        changes = self.settings.plan == "joint" or self.settings.resolve_hot_experts(num_experts) < num_experts
        return compat.on_cpu() and self.tiers.owners is None and changes

    def _connect_layers(self, parts: LayerParts, shared: dict[str, Shared]) -> list[MoELayer]:
        """shared: the shared experts of a layer by the name of its module, where they are ours to run."""
        if rows := limits.rows_in_graphs(self.vllm_config):
            limits.refuse_shared_experts_in_pieces(shared)
        layers = []
        for index, attached in self.attached.items():
            fixed = FixedOutput(rows, self._held.w13) if rows else None
            layer = MoELayer(index, parts, shared=shared.get(attached.operator.partition(":")[2]), fixed=fixed)
            layers.append(layer)
            LAYERS[attached.operator] = layer
        return layers

    @property
    def has_report(self) -> bool:
        """Whether answers carry one: vLLM hands it over as a KV connector does."""
        return self.vllm_config.kv_transfer_config is not None and self.settings.report

    @property
    def unsimulated(self) -> str:
        """Work that runs here and is in no simulated clock."""
        return drafts.unsimulated(self.vllm_config)

    @property
    def _held(self) -> SlotWeights:
        """Slot weights of any layer, for dtype and place."""
        return self.attached[0].slots.held

    @cached_property
    def digest(self) -> str:
        """Digest of the checkpoint."""
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

    def open_device(self, replicas: Path | None, planned: PlannedReplicas | None) -> tuple[Setup, Costs, DeviceView]:
        """The leader finds or starts the device; the others hear from it what they need to plan alike."""
        settings, cores, members = self.settings, self.ranks.merge(compat.bound_cores()), None
        if self.ranks.leads:
            requirements = Requirements(
                self.pool.model,
                self.hardware,
                full_precision=settings.cold_precision == "full" or settings.prefill == "split",
                quantized=self.is_quantized,
                replicas=planned,
            )
            wants_prompts = self._splits_prefill()
            members = DeviceMembers(settings, requirements, self.model_dir, self.digest, replicas, cores)
            self.opened.callback(members.close)
            self.ranks.from_leader(facts := self._facts_of(members.served, wants_prompts=wants_prompts))
        else:
            facts = self.ranks.from_leader()
        setup, costs = self.make_setup(facts)
        devices = setup.devices_of(costs, full_precision=self._planning.full_precision)
        link = None if members is None else self._make_link(members, facts, devices, replicas)
        agreed = (True,) * settings.num_devices if link is None else None
        return setup, costs, DeviceView(facts, devices, link, agreed)

    def _facts_of(self, served: Served, *, wants_prompts: bool) -> DeviceFacts:
        """wants_prompts: whether the device is to compute for prompts, if it holds the checkpoint."""
        offload_bits = self.settings.resolve_offload_bits(self.pool.model.num_experts, served.expert_bytes)
        computes_prompts = wants_prompts and FULL_PRECISION_BITS in served.expert_bytes
        same = self.settings.fallback == "same"
        return DeviceFacts(offload_bits, served.group_size, served.expert_bytes, computes_prompts, same)

    def _make_link(
        self, members: DeviceMembers, facts: DeviceFacts, devices: Devices | None, replicas: Path | None
    ) -> DeviceLink:
        local = LocalReplicas(self.model_dir, replicas, self._kernel) if facts.same_without else None
        return DeviceLink(members, facts, devices, self.pool.model, self.layers, self._held.w13.dtype, local)

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

    @cached_property
    def _planning(self) -> Planning:
        return self.settings.planning(self.pool.shape.num_experts)

    def make_setup(self, facts: DeviceFacts) -> tuple[Setup, Costs]:
        """What the run's decisions and times depend on, without measured prices. Raises ConfigError where copies on
        several devices do not fit."""
        settings, ranks, stage = self.settings, self.ranks, self.ranks.stage
        setup = Setup(
            preset=settings.preset,
            overrides=compat.hardware_overrides(settings),
            host_dims=self.shape.recorded(),
            planning=self._planning,
            expert_bytes=facts.expert_bytes,
            group_size=facts.group_size,
            activation_bytes=self.vllm_config.model_config.dtype.itemsize,
            spill_bits=facts.offload_bits,
            device_hosts=settings.device_hosts,
            splits_prefill=facts.computes_prompts,
            same_without=facts.same_without,
            num_gpus=ranks.size,
            whole_experts=ranks.holds_whole_experts,
            stage=stage.index,
            num_stages=stage.count,
            num_devices=settings.num_devices,
            may_join=settings.may_join,
            copies_asked=settings.device_copies,
            splits_experts=settings.splits_experts,
            slot_bits=settings.slot_bits,
            joint_tiers=settings.joint_tiers,
        )
        costs = setup.costs_of(self.shape)
        if setup.shares_experts:
            rules = DeviceRules.that_fit(
                costs,
                setup.num_devices,
                setup.copies_asked,
                max_moves=settings.device_moves,
                full_precision=self._planning.full_precision,
                splits_experts=setup.splits_experts,
            )
            setup = msgspec.structs.replace(setup, device_copies=rules.num_copies, device_moves=rules.max_moves)
        return setup, costs

    # -- of this worker -------------------------------------------------------------------------------------------

    def load_losses(self, replicas: Path | None) -> LossTable:
        if replicas is None:
            return LossTable.nominal(self.pool.shape.num_layers, self.pool.shape.num_experts)
        return host_replicas.load_losses(replicas, self.layers, self.settings)

    def measure_prices(
        self, hot: HotExperts, device: DeviceView, replicas: Path | None, shared: Shared | None
    ) -> dict[str, Any] | None:
        """Measure as the leader, for all ranks; None where prices are those of the simulated hardware. `shared`: the
        shared experts of a layer, where there are any."""
        if self.settings.prices != "measured":
            return None
        recorded = None
        if (link := device.link) is not None:
            wanted = self._asked_of_probe(device.facts)
            probe = PriceProbe(hot, lambda: self._kernel, self.model_dir, replicas, self.layers.start, shared)
            facts = self._facts_of_prices(hot, link) | {"wanted": asdict(wanted), "shared experts": shared is not None}
            facts["group size"] = device.facts.group_size
            measure = partial(probe.measure, wanted, link.members.beside_the_run)
            prices, said = known_prices.find_or_measure(MeasuredPrices, facts, measure)
            say(f"prices of this machine: {said}")
            recorded = prices.recorded()
        told: dict[str, Any] = self.ranks.from_leader(recorded)
        return told

    def _facts_of_prices(self, hot: HotExperts, link: DeviceLink) -> dict[str, Any]:
        """Facts that measured prices depend on, beside the processor and what is asked."""
        shape, settings, members = self.pool.shape, self.settings, link.members
        sizes = [shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k]
        return {
            "shape": [*sizes, sorted(map(str, set(self.pool.layout.activations)))],
            "dtype": str(self._held.w13.dtype),
            "kernels": [hot.layers[0].kernel_name, members.description.kernel, settings.pool, settings.pe_mode],
            "cores": [sorted(compat.engine_cores()), members.cores],
            "versions": [vllm.__version__, torch.__version__, __version__],
        }

    def _asked_of_probe(self, facts: DeviceFacts) -> WantedPrices:
        settings, served = self.settings, sorted(facts.expert_bytes)
        engine = {settings.slot_bits} - {FULL_PRECISION_BITS}
        tiers = ["gpu"]
        if settings.plan == "joint":
            tiers = [tier for tier in settings.joint_tiers.split("+") if tier != "device"]
            engine = set(LIVE_WIDTHS["gpu"]) & {*served, FULL_PRECISION_BITS}
        device_widths = [bits for bits in served if bits in REPLICA_WIDTHS and self.is_quantized]
        if FULL_PRECISION_BITS in served and (facts.computes_prompts or settings.cold_precision == "full"):
            device_widths.append(FULL_PRECISION_BITS)
        return WantedPrices(settings.slot_bits, sorted(engine), tiers, device_widths)

    def open_pool(self, replicas: Path | None) -> HotExperts:
        """The hot slots of all layers, and where they are filled from."""
        layers = {index: attached.slots for index, attached in self.attached.items()}
        streamer, fill = self._make_streamer(layers[0]), self._make_replica_fill(replicas, layers)
        beside = self.rung >= Rung.STREAMS or compat.on_cpu()
        return HotExperts(self.pool, self.tiers, layers, streamer, compat.engine_cores(), fill, beside=beside)

    def _make_streamer(self, slots: HotSlots) -> Streamer:
        return make_streamer(self.settings.pool, self.pool, slots, default_cache_dir(self.digest))

    def _make_replica_fill(self, replicas: Path | None, slots: dict[int, HotSlots]) -> ReplicaFill | None:
        """Make the object that fills hot slots with replicas; None where the checkpoint fills them."""
        if not (self.settings.has_quantized_slots and compat.on_cpu()):
            return None
        if replicas is None:
            raise ConfigError(
                f"ndp setting 'slot_bits' is {self.settings.slot_bits}, which needs the replicas in this process too: "
                "name their directory in 'replicas'"
            )
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

    @cached_property
    def rung(self) -> Rung:
        """How much of the way to run on a GPU is in force."""
        offload_bits = self.settings.resolve_offload_bits(self.pool.model.num_experts)
        return limits.rung_of(self.settings, offload_bits, on_gpu=not compat.on_cpu())

    @cached_property
    def copies(self) -> CopiesByThread | None:
        """Of all layers: weights on their way to a GPU, beside what computes; None where they go plainly."""
        return None if self.rung < Rung.STREAMS or compat.on_cpu() else CopiesByThread()

    def make_messenger(self) -> Messenger | None:
        """Where decode layers do not wait for the GPU: their way to the device and back."""
        if self.rung < Rung.ASYNCHRONOUS:
            return None
        device, shape, dtype = self._held.w13.device, self.pool.shape, self._held.w13.dtype
        form = RowForm(shape.top_k, shape.hidden_size, dtype)
        routing = routing_by(kernels=self.rung >= Rung.KERNELS and device.type != "cpu")
        sender = SenderThread() if self.rung >= Rung.THREAD and shm.native is not None else None
        return Messenger(pinned_for(device), device, form, routing, sender)

    def make_late_check(self) -> LateCheck | None:
        device = self._held.w13.device
        if self.rung < Rung.STREAMS or device.type == "cpu":
            return None
        most_rows = self.vllm_config.scheduler_config.max_num_batched_tokens
        return LateCheck(make_stream(device), pinned_for(device), device, most_rows)

    @cached_property
    def _kernel(self) -> EngineKernel:
        """The device's, in this process."""
        return load_engine_kernel(self.settings.kernel, compat.engine_cores())


def current_assembly() -> Assembly:
    """Return the assembly of the engine that this process builds. Raises when it runs without our worker."""
    if _current is None:
        raise ConfigError(
            "quantization 'ndp' needs the worker class vllm_ndp.integration.worker.NdpWorker, which is not running: "
            "drop --worker-cls, and check that VLLM_PLUGINS includes 'ndp'"
        )
    return _current


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
