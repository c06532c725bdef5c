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
from vllm_ndp.integration import compat
from vllm_ndp.integration.batch import RequestTracker
from vllm_ndp.integration.cuda import limits, packet
from vllm_ndp.integration.cuda.layer import FixedOutput, RunningStep
from vllm_ndp.integration.cuda.limits import Rung
from vllm_ndp.integration.cuda.messenger import HotGraphs, Messenger
from vllm_ndp.integration.cuda.packet import RowForm
from vllm_ndp.integration.cuda.streams import LateCheck, make_stream, pinned_for
from vllm_ndp.integration.facts import WorkerFacts, agree_on_replicas, measure_prices, open_device
from vllm_ndp.integration.host_replicas import HostExperts, ReplicaFill
from vllm_ndp.integration.hot_experts import HotExperts, StagingStreamer, slots_of_module
from vllm_ndp.integration.hot_slots import HotSlots, SlotWeights, make_slot_kernel
from vllm_ndp.integration.moe_layer import LAYERS, HotViews, LayerParts, MoELayer
from vllm_ndp.integration.planner import PlanRunner
from vllm_ndp.integration.price_probe import Shared
from vllm_ndp.integration.report import DEVICE_TIME
from vllm_ndp.integration.waiting import StepThreads
from vllm_ndp.layer.run import Run
from vllm_ndp.layer.tiers import slots_per_gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_current: Assembly | None = None
_numbers = itertools.count()


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
        return compat.unsimulated(self.facts.vllm_config) or of_device


class Assembly(WorkerFacts):
    def __init__(self, vllm_config: VllmConfig, opened: ExitStack) -> None:
        super().__init__(vllm_config, opened)
        self.slots: dict[int, HotSlots] = {}
        """Of the MoE layers whose weights would be ready, as each has handed itself over."""
        self.operators: dict[int, str] = {}
        """The names that compiled graphs call these layers by."""
        self.weighs_input = False

    @classmethod
    def begin(cls, vllm_config: VllmConfig, opened: ExitStack) -> Assembly:
        """Layers attach themselves to this one from now on. opened: see WorkerFacts."""
        global _current
        _current = cls(vllm_config, opened)
        return _current

    # -- while the model loads ------------------------------------------------------------------------------------

    def attach(self, module: Any) -> str:
        """Take vLLM's module of a MoE layer whose weights would be ready; the name that its operator is called by."""
        settings, num_experts = self.settings, self.pool.shape.num_experts
        index = compat.moe_index(module, self.pool.layout, self.ranks.share) - self.layers.start
        owners = self.tiers.owners
        num_hot = slots_per_gpu(settings.resolve_hot_experts(num_experts), owners.num_gpus if owners else 1)
        num_quantized = num_hot if settings.has_quantized_slots else 0
        if settings.is_joint:
            num_quantized = num_experts
        bits = settings.slot_bits
        activation, all_of_them = self.pool.activation_of(index), self.pool.layout.activations
        kernel = make_slot_kernel(module, activation, all_of_them, lambda: self.kernel, self.copies)
        slots = slots_of_module(module, kernel, self.tiers, index, num_quantized=num_quantized, slot_bits=bits)
        name = f"{next(_numbers)}:{module.layer_name}"
        self.slots[index], self.operators[index] = slots, name
        self.weighs_input = bool(module.apply_router_weight_on_input)
        return name

    @property
    def has_every_layer(self) -> bool:
        """Whether all MoE layers of the model are attached: those that vLLM makes later belong to a draft model."""
        return len(self.slots) == self.pool.shape.num_layers

    # -- once it is loaded ----------------------------------------------------------------------------------------

    def finish(self, runner: Any) -> LoadedWorker:
        """Find the device, make the first placement, connect the layers. Raises ConfigError, also where the model has
        not attached all its layers."""
        shape, opened = self.pool.shape, self.opened
        if not self.has_every_layer:
            raise ConfigError(
                f"quantization 'ndp' was asked for but only {len(self.slots)} of {shape.num_layers} "
                "MoE layers were attached: this model's layers do not go through vLLM's RoutedExperts"
            )
        planned = agree_on_replicas(self)
        replicas = None if planned is None else planned.directory
        setup, costs, device = open_device(self, self._held.w13.dtype, planned)
        hot = self.open_pool(replicas)
        opened.callback(hot.close)
        late_check = self.make_late_check()
        shared = compat.shared_experts(runner.model)
        prices = measure_prices(self, hot, device, replicas, next(iter(shared.values()), None))
        setup, requests = msgspec.structs.replace(setup, prices=prices), RequestTracker()
        run = Run[str](
            setup,
            self.planning.rules(self.losses(replicas)),
            costs,
            device.devices,
            self.tiers,
            shape.top_k,
            device.counted_on,
            weighs_input=self.weighs_input,
            aliases=self.slots[0].aliases,
            gathers_prompts=self.gathers_prompts,
        )
        planner = PlanRunner(run, requests, hot, device)
        planner.start()
        parts = LayerParts(
            hot=hot,
            device=device,
            planner=planner,
            running=RunningStep(captures_whole_steps=limits.captures_whole_steps(self.vllm_config)),
            views=HotViews(run.splitter, self._held.w13.device),
            host=self.make_host(),
            messenger=self.make_messenger(),
            weighs_input=self.weighs_input,
        )
        layers = self._connect_layers(parts, shared)
        opened.callback(layers.clear)
        return LoadedWorker(
            facts=self,
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
        num_experts, settings = self.pool.shape.num_experts, self.settings
        is_alone = compat.on_cpu() and self.ranks.size == 1 and not self.stored_linears.kept
        has_all = settings.has_quantized_slots and settings.resolve_hot_experts(num_experts) == num_experts
        if not (is_alone and has_all and self.linears is not None):
            return None
        return self.kernel

    def _connect_layers(self, parts: LayerParts, shared: dict[str, Shared]) -> list[MoELayer]:
        """shared: the shared experts of a layer by the name of its module, where they are ours to run."""
        if rows := limits.rows_in_graphs(self.vllm_config):
            limits.refuse_shared_experts_in_pieces(shared)
        layers = []
        for index, operator in self.operators.items():
            fixed = FixedOutput(rows, self._held.w13) if rows else None
            layer = MoELayer(index, parts, shared=shared.get(operator.partition(":")[2]), fixed=fixed)
            layers.append(layer)
            LAYERS[operator] = layer
        return layers

    @property
    def _held(self) -> SlotWeights:
        """Slot weights of any layer, for dtype and place."""
        return self.slots[0].held

    def open_pool(self, replicas: Path | None) -> HotExperts:
        """The hot slots of all layers, and where they are filled from."""
        streamer = StagingStreamer(self.pool, self.slots[0].kernel, self._held)
        fill = self._make_replica_fill(replicas)
        beside = self.rung >= Rung.STREAMS or compat.on_cpu()
        return HotExperts(self.pool, self.tiers, self.slots, streamer, compat.engine_cores(), fill, beside=beside)

    def _make_replica_fill(self, replicas: Path | None) -> ReplicaFill | None:
        """Make the object that fills hot slots with replicas; None where the checkpoint fills them."""
        if not (self.settings.has_quantized_slots and compat.on_cpu()):
            return None
        if replicas is None and not self.serves_its_codes:
            raise ConfigError(
                f"ndp setting 'slot_bits' is {self.settings.slot_bits}, which needs the replicas in this process too: "
                "name their directory in 'replicas'"
            )
        share = self.ranks.share
        return ReplicaFill(self.model_dir, replicas, self.settings.slot_bits, self.kernel, self.layers, share)

    def make_host(self) -> HostExperts | None:
        """None where this rank's CPU computes no experts: of several ranks the leader's computes them, whole. Raises
        ConfigError where it would keep copies of them."""
        settings = self.settings
        if not settings.has_warm_experts:
            return None
        if not self.pool.checkpoint.lies_in_place:
            raise ConfigError(
                "ndp setting 'warm_experts' needs experts that the CPU can compute where they lie, but in this "
                "checkpoint they do not lie row by row, so that it would keep copies of them: use 'warm_experts': 0"
            )
        if not self.ranks.leads:
            return None
        return HostExperts(self.model_dir, None, self.kernel, self.layers)

    def make_messenger(self) -> Messenger | None:
        """Where decode layers do not wait for the GPU: their way to the device and back."""
        if self.rung < Rung.ASYNCHRONOUS:
            return None
        device, shape, dtype = self._held.w13.device, self.pool.shape, self._held.w13.dtype
        form = RowForm(shape.top_k, shape.hidden_size, dtype)
        routing: ModuleType = packet
        if self.rung >= Rung.KERNELS and device.type != "cpu":  # packet.py's steps as kernels of Triton
            from vllm_ndp.integration.cuda import kernels

            routing = kernels
        sender = SenderThread() if self.rung >= Rung.THREAD else None
        graphs = HotGraphs(device) if self.rung >= Rung.GRAPHS and device.type != "cpu" else None
        return Messenger(pinned_for(device), device, form, routing, sender, graphs)

    def make_late_check(self) -> LateCheck | None:
        device = self._held.w13.device
        if self.rung < Rung.STREAMS or device.type == "cpu":
            return None
        most_rows = self.vllm_config.scheduler_config.max_num_batched_tokens
        return LateCheck(make_stream(device), pinned_for(device), device, most_rows)


def current_assembly() -> Assembly:
    """Return the assembly of the engine that this process builds. Raises when it runs without our worker."""
    if _current is None:
        raise ConfigError(
            "quantization 'ndp' needs the worker class vllm_ndp.integration.worker.NdpWorker, which is not running: "
            "drop --worker-cls, and check that VLLM_PLUGINS includes 'ndp'"
        )
    return _current
