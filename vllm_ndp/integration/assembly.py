"""A worker in the making, from its facts and what the ranks agree on (facts.py).

While the model loads, each MoE layer hands over its hot slots (`attach`). Then `finish` makes every other part, each
complete, and returns the worker whose model is loaded.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from ndp_device.common.errors import ConfigError
from ndp_device.kernels.native import NativeKernel
from ndp_device.transport.sender_thread import SenderThread
from vllm_ndp.integration import compat, host_replicas
from vllm_ndp.integration.batch import RequestTracker
from vllm_ndp.integration.cuda import limits, packet
from vllm_ndp.integration.cuda.layer import FixedOutput, RunningStep
from vllm_ndp.integration.cuda.limits import Rung
from vllm_ndp.integration.cuda.messenger import HotGraphs, Messenger
from vllm_ndp.integration.cuda.packet import RowForm
from vllm_ndp.integration.cuda.streams import LateCheck, make_stream, pinned_for
from vllm_ndp.integration.facts import WorkerFacts, agree_on_replicas, measure_prices, open_device
from vllm_ndp.integration.host_replicas import HostExperts
from vllm_ndp.integration.hot_experts import HotExperts, StagingStreamer, slots_of_module
from vllm_ndp.integration.hot_slots import HotSlots, SlotWeights, make_slot_kernel
from vllm_ndp.integration.moe_layer import LAYERS, HotViews, LayerParts, MoELayer
from vllm_ndp.integration.planner import PlanRunner
from vllm_ndp.integration.price_probe import Shared
from vllm_ndp.integration.quantized_slots import ReplicaFill
from vllm_ndp.integration.report import DEVICE_TIME
from vllm_ndp.integration.waiting import StepThreads
from vllm_ndp.layer.run import Run
from vllm_ndp.planning.bitwidths import LossTable

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

    facts: WorkerFacts
    parts: LayerParts
    layers: list[MoELayer]  # as long as the engine lives
    runner: Any  # vLLM's
    requests: RequestTracker
    run: Run[str]
    late_check: LateCheck | None
    threads: StepThreads

    @property
    def unsimulated(self) -> str:
        """Work that runs here and is in no simulated clock; empty where there is none."""
        link = self.parts.device.link
        of_device = DEVICE_TIME if link is not None and not link.members.simulate else ""
        return self.facts.unsimulated or of_device


class Assembly:
    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts
        self.attached: dict[int, AttachedLayer] = {}

    @classmethod
    def begin(cls, vllm_config: VllmConfig, opened: ExitStack) -> Assembly:
        """Layers attach themselves to this one from now on. opened: see WorkerFacts."""
        global _current
        _current = cls(WorkerFacts(vllm_config, opened))
        return _current

    # -- while the model loads ------------------------------------------------------------------------------------

    def attach(self, module: Any) -> str:
        """Take vLLM's module of a MoE layer whose weights would be ready; the name that its operator is called by."""
        facts = self.facts
        settings, num_experts = facts.settings, facts.pool.shape.num_experts
        index = compat.moe_index(module, facts.pool.layout, facts.ranks.share) - facts.layers.start
        num_quantized = settings.resolve_hot_experts(num_experts) if settings.has_quantized_slots else 0
        if settings.is_joint:
            num_quantized = num_experts
        bits = settings.slot_bits
        pool, load_kernel = facts.pool, lambda: facts.kernel
        activations = pool.layout.activations
        kernel = make_slot_kernel(module, pool.activation_of(index), activations, load_kernel, facts.copies)
        slots = slots_of_module(module, kernel, facts.tiers, index, num_quantized=num_quantized, slot_bits=bits)
        name = f"{next(_numbers)}:{module.layer_name}"
        self.attached[index] = AttachedLayer(name, slots, bool(module.apply_router_weight_on_input))
        return name

    @property
    def operators(self) -> frozenset[str]:
        """Names that compiled graphs call our layers by."""
        linears = () if self.facts.linears is None else self.facts.linears.names
        return frozenset([*(attached.operator for attached in self.attached.values()), *linears])

    @property
    def has_every_layer(self) -> bool:
        """Whether all MoE layers of the model are attached: those that vLLM makes later belong to a draft model."""
        return len(self.attached) == self.facts.pool.shape.num_layers

    # -- once it is loaded ----------------------------------------------------------------------------------------

    def finish(self, runner: Any) -> LoadedWorker:
        """Find the device, make the first placement, connect the layers. Raises ConfigError, also where the model has
        not attached all its layers."""
        facts = self.facts
        shape, opened = facts.pool.shape, facts.opened
        if not self.has_every_layer:
            raise ConfigError(
                f"quantization 'ndp' was asked for but only {len(self.attached)} of {shape.num_layers} "
                "MoE layers were attached: this model's layers do not go through vLLM's RoutedExperts"
            )
        replicas, planned = agree_on_replicas(facts)
        setup, costs, device = open_device(facts, self._held.w13.dtype, replicas, planned)
        hot = self.open_pool(replicas)
        opened.callback(hot.close)
        late_check = self.make_late_check()
        losses, shared = self.load_losses(replicas), compat.shared_experts(runner.model)
        prices = measure_prices(facts, hot, device, replicas, next(iter(shared.values()), None))
        setup, first, requests = msgspec.structs.replace(setup, prices=prices), self.attached[0], RequestTracker()
        run = Run[str](
            setup,
            facts.planning.rules(losses),
            costs,
            device.devices,
            facts.tiers,
            shape.top_k,
            device.counted_on,
            weighs_input=first.weighs_input,
            aliases=first.slots.aliases,
            gathers_prompts=facts.gathers_prompts,
        )
        planner = PlanRunner(run, requests, hot, device)
        planner.start()
        parts = LayerParts(
            hot=hot,
            device=device,
            planner=planner,
            running=RunningStep(captures_whole_steps=limits.captures_whole_steps(facts.vllm_config)),
            views=HotViews(run.splitter, self._held.w13.device),
            host=self.make_host(),
            messenger=self.make_messenger(),
            weighs_input=first.weighs_input,
        )
        layers = self._connect_layers(parts, shared)
        opened.callback(layers.clear)
        return LoadedWorker(
            facts=facts,
            parts=parts,
            layers=layers,
            runner=runner,
            requests=requests,
            run=run,
            late_check=late_check,
            threads=StepThreads(self._only_kernel()),
        )

    def _only_kernel(self) -> NativeKernel | None:
        """The kernel that computes all matrices of every step but the router's, in this process; None where others
        compute some."""
        facts = self.facts
        num_experts, settings = facts.pool.shape.num_experts, facts.settings
        is_alone = compat.on_cpu() and facts.ranks.size == 1 and not facts.stored_linears.kept
        has_all = settings.has_quantized_slots and settings.resolve_hot_experts(num_experts) == num_experts
        if not (is_alone and has_all and facts.linears is not None):
            return None
        return facts.kernel

    def _connect_layers(self, parts: LayerParts, shared: dict[str, Shared]) -> list[MoELayer]:
        """shared: the shared experts of a layer by the name of its module, where they are ours to run."""
        if rows := limits.rows_in_graphs(self.facts.vllm_config):
            limits.refuse_shared_experts_in_pieces(shared)
        layers = []
        for index, attached in self.attached.items():
            fixed = FixedOutput(rows, self._held.w13) if rows else None
            layer = MoELayer(index, parts, shared=shared.get(attached.operator.partition(":")[2]), fixed=fixed)
            layers.append(layer)
            LAYERS[attached.operator] = layer
        return layers

    @property
    def _held(self) -> SlotWeights:
        """Slot weights of any layer, for dtype and place."""
        return self.attached[0].slots.held

    def load_losses(self, replicas: Path | None) -> LossTable:
        facts = self.facts
        if replicas is None:
            return LossTable.nominal(facts.pool.shape.num_layers, facts.pool.shape.num_experts)
        return host_replicas.load_losses(replicas, facts.layers, facts.settings)

    def open_pool(self, replicas: Path | None) -> HotExperts:
        """The hot slots of all layers, and where they are filled from."""
        facts = self.facts
        layers = {index: attached.slots for index, attached in self.attached.items()}
        streamer = StagingStreamer(facts.pool, layers[0].kernel, self._held)
        fill = self._make_replica_fill(replicas, layers)
        beside = facts.rung >= Rung.STREAMS or compat.on_cpu()
        return HotExperts(facts.pool, facts.tiers, layers, streamer, compat.engine_cores(), fill, beside=beside)

    def _make_replica_fill(self, replicas: Path | None, slots: dict[int, HotSlots]) -> ReplicaFill | None:
        """Make the object that fills hot slots with replicas; None where the checkpoint fills them."""
        facts = self.facts
        if not (facts.settings.has_quantized_slots and compat.on_cpu()):
            return None
        if replicas is None and not facts.serves_its_codes:
            raise ConfigError(
                f"ndp setting 'slot_bits' is {facts.settings.slot_bits}, which needs the replicas in this process too: "
                "name their directory in 'replicas'"
            )
        return ReplicaFill(facts.model_dir, replicas, facts.settings.slot_bits, facts.kernel, facts.layers, slots)

    def make_host(self) -> HostExperts | None:
        """None where this rank's CPU computes no experts: of several ranks the leader's computes them, whole. Raises
        ConfigError where it would keep copies of them."""
        facts = self.facts
        settings = facts.settings
        if not settings.has_warm_experts:
            return None
        if not facts.pool.lies_in_place:
            raise ConfigError(
                "ndp setting 'warm_experts' needs experts that the CPU can compute where they lie, but in this "
                "checkpoint they do not lie row by row, so that it would keep copies of them: use 'warm_experts': 0"
            )
        if not facts.ranks.leads:
            return None
        return HostExperts(facts.model_dir, None, facts.kernel, facts.layers)

    def make_messenger(self) -> Messenger | None:
        """Where decode layers do not wait for the GPU: their way to the device and back."""
        facts = self.facts
        if facts.rung < Rung.ASYNCHRONOUS:
            return None
        device, shape, dtype = self._held.w13.device, facts.pool.shape, self._held.w13.dtype
        form = RowForm(shape.top_k, shape.hidden_size, dtype)
        routing = packet if facts.rung < Rung.KERNELS or device.type == "cpu" else _kernels()
        sender = SenderThread() if facts.rung >= Rung.THREAD else None
        graphs = HotGraphs(device) if facts.rung >= Rung.GRAPHS and device.type != "cpu" else None
        return Messenger(pinned_for(device), device, form, routing, sender, graphs)

    def make_late_check(self) -> LateCheck | None:
        device = self._held.w13.device
        if self.facts.rung < Rung.STREAMS or device.type == "cpu":
            return None
        most_rows = self.facts.vllm_config.scheduler_config.max_num_batched_tokens
        return LateCheck(make_stream(device), pinned_for(device), device, most_rows)


def _kernels() -> ModuleType:
    """packet.py's steps as kernels of Triton, which is imported on a GPU only."""
    from vllm_ndp.integration.cuda import kernels

    return kernels


def current_assembly() -> Assembly:
    """Return the assembly of the engine that this process builds. Raises when it runs without our worker."""
    if _current is None:
        raise ConfigError(
            "quantization 'ndp' needs the worker class vllm_ndp.integration.worker.NdpWorker, which is not running: "
            "drop --worker-cls, and check that VLLM_PLUGINS includes 'ndp'"
        )
    return _current
