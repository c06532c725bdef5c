"""Facts of a worker, known before its model loads: from the settings, the checkpoint and vLLM's configuration.

And what follows from them alone. Nothing here changes afterwards. Then what the ranks of an engine agree on before they
plan: replicas, the device, the setup of the run, measured prices. The leader finds out, and the other ranks hear it, so
that all of them plan alike.

Tensor parallelism splits each layer over the ranks of a group; with expert parallelism each of them holds some of the
hot experts whole. Rank 0, the leader, speaks to the device and sends rows for whole experts. The leader adds what comes
back to its own partial sum, before vLLM's all-reduce adds up the ranks. Every rank makes the same plans by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
import vllm
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import WholeModel
from ndp_device.common.widths import FULL_PRECISION_BITS, REPLICA_WIDTHS
from ndp_device.experts.expert import WHOLE, Part
from ndp_device.kernels.native import NativeKernel
from ndp_device.model_config import whole_model
from ndp_device.protocol.messages import Served
from ndp_device.timing.work import expert_bytes
from vllm_ndp import __version__
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.prices import MeasuredPrices
from vllm_ndp.device_client.handshake import PlannedReplicas, Requirements
from vllm_ndp.integration import compat, host_replicas
from vllm_ndp.integration.compat import say
from vllm_ndp.integration.cuda import limits
from vllm_ndp.integration.cuda.limits import Rung
from vllm_ndp.integration.cuda.streams import CopiesByThread
from vllm_ndp.integration.device_link import DeviceLink, DeviceView
from vllm_ndp.integration.device_members import DeviceMembers
from vllm_ndp.integration.experts_pool import ExpertsPool
from vllm_ndp.integration.host_replicas import HostExperts, load_engine_kernel
from vllm_ndp.integration.hot_experts import HotExperts
from vllm_ndp.integration.linear_layers import LinearLayers, StoredLinears
from vllm_ndp.integration.price_probe import PriceProbe, Shared, WantedPrices, find_or_measure
from vllm_ndp.layer.devices import copies_that_fit
from vllm_ndp.layer.joint_rule import LIVE_WIDTHS
from vllm_ndp.layer.setup import Planning, Setup
from vllm_ndp.layer.tiers import Owners, Tiers
from vllm_ndp.planning.bitwidths import LossTable

if TYPE_CHECKING:
    from vllm.config import VllmConfig


T = TypeVar("T")
_MOST_CORES = 8192  # of one host


class Ranks:
    """The group of ranks that split each layer, seen from one of them; and those of the same part in other stages."""

    def __init__(self, *, holds_whole_experts: bool) -> None:
        """holds_whole_experts: each rank has some of the hot experts, and not a part of each (expert parallelism)."""
        self._group, self._stages = group, stages = get_tp_group(), get_pp_group()
        self.holds_whole_experts = holds_whole_experts and group.world_size > 1
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self.stage = Part(stages.rank_in_group, stages.world_size)
        """Of the model's layers, in a pipeline."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def share(self) -> Part:
        """Of each expert that this rank holds."""
        return WHOLE if self.holds_whole_experts else Part(self.rank, self.size)

    @property
    def description(self) -> str:
        stage = f"stage {self.stage.index} of {self.stage.count}: " if self.stage.count > 1 else ""
        if self.size == 1:
            return stage + ("a device, plan and clock of its own" if stage else "one: the whole model")
        each = f"1/{self.size} of the hot experts" if self.holds_whole_experts else f"1/{self.size} of every hot expert"
        return f"{stage}{self.size}, each {each}; rank 0 sends whole cold experts' rows to the device"

    def from_leader(self, value: Any = None) -> Any:
        """Return the leader's value; every rank of the group must ask."""
        return value if self.size == 1 else self._group.broadcast_object(value if self.leads else None)

    def after_the_first(self, act: Callable[[], T]) -> T:
        """Have the first rank of all act, and then the others, so that nothing is made twice at once."""
        is_first = self.leads and self.stage.index == 0
        made = [act()] if is_first else []
        for group in self._groups:
            group.broadcast_object(True if group.rank_in_group == 0 else None)
        return made[0] if made else act()

    def merge(self, cores: set[int]) -> set[int]:
        """The cores that any of the ranks names; every rank must ask."""
        named = torch.zeros(_MOST_CORES, dtype=torch.uint8)
        named[sorted(cores)] = 1
        for group in self._groups:
            dist.all_reduce(named, dist.ReduceOp.MAX, group=group.cpu_group)
        return set(named.nonzero().flatten().tolist())

    @property
    def _groups(self) -> list[Any]:
        """Groups with other ranks in them. A message through both groups reaches every rank."""
        return [group for group in (self._group, self._stages) if group.world_size > 1]

    def require_equal(self, seen: dict[str, str]) -> None:
        """Compare what this rank was started with with the first one's. Raises ConfigError on the rank that differs."""
        for group in self._groups:
            rank, theirs = group.rank_in_group, group.broadcast_object(seen if group.rank_in_group == 0 else None)
            for what, mine in seen.items():
                if mine != theirs[what]:
                    raise ConfigError(
                        f"rank {rank} has {what} {mine}, rank 0 has {theirs[what]}: "
                        "start every rank with the same settings, checkpoint and replicas"
                    )

    def agree(self, *, devices_up: tuple[bool, ...], plans: int) -> tuple[bool, ...]:
        """Before a step of several ranks: which of the leader's devices are up, which every rank then goes by.

        `plans`: checksum of the plans in force, which must be the same on every rank. Another plan on one rank would
        leave pairs out or count them twice, in silence.
        """
        leaders_up, leaders = self.from_leader((devices_up, plans))
        if plans != leaders:
            raise RuntimeError(
                f"rank {self.rank} planned otherwise than rank 0 (checksums {plans:08x} and {leaders:08x}): "
                "the router did not choose the same experts on both; nothing that follows would be right"
            )
        return tuple(leaders_up)


class WorkerFacts:
    def __init__(self, vllm_config: VllmConfig, opened: ExitStack) -> None:
        """opened: what is closed with the worker, the last first, whether or not it comes to start."""
        self.settings, self.model_dir = compat.check(vllm_config), compat.model_dir(vllm_config)
        self.vllm_config, self.opened = vllm_config, opened
        whole_experts = vllm_config.parallel_config.enable_expert_parallel
        self.ranks = ranks = Ranks(holds_whole_experts=whole_experts)
        self.pool = ExpertsPool(self.model_dir, ranks.share)
        decoder, self.layers = compat.layers_of_stage(vllm_config, self.pool.layout, ranks.stage)
        self.pool.restrict(self.layers)
        self.hardware = compat.hardware_of(self.settings)
        self.shape = _model_of_stage(vllm_config, self.pool, decoder)
        sizes = self.pool.shape.num_layers, self.pool.shape.num_experts
        owners = Owners(ranks.size, *sizes) if ranks.holds_whole_experts else None
        self.tiers = Tiers(*sizes, owners=owners, rank=ranks.rank if owners else None)
        self.linears = self._make_linears()
        self.stored_linears = StoredLinears(self.model_dir)

    def _make_linears(self) -> LinearLayers | None:
        """Linear layers to quantize; None where they stay as they are."""
        if self.settings.linear_bits is None:
            return None
        linears = LinearLayers(
            self.settings.linear_bits, lambda: self.kernel, compat.engine_cores(), self.pool.shape.num_experts
        )
        self.opened.callback(linears.close)
        return linears

    @cached_property
    def digest(self) -> str:
        """Digest of the checkpoint."""
        return model_digest(self.model_dir)

    @cached_property
    def serves_its_codes(self) -> bool:
        """Whether experts below full precision run by the codes that the checkpoint holds: without replicas."""
        bits, settings = self.pool.code_bits, self.settings
        only = partial(settings.runs_only_at, num_experts=self.pool.shape.num_experts, in_slots=compat.on_cpu())
        return settings.replicas is None and bits is not None and only(bits)

    @property
    def is_quantized(self) -> bool:
        """Whether some experts are hot or cold at 1 to 8 bits."""
        return self.settings.needs_replicas(self.pool.shape.num_experts, in_slots=compat.on_cpu())

    def losses(self, replicas: Path | None) -> LossTable:
        """Of experts below full precision, by which plans are made."""
        shape = self.pool.shape
        if replicas is not None:
            return host_replicas.load_losses(replicas, self.layers, self.settings)
        if self.serves_its_codes and self.pool.code_bits is not None:
            return LossTable.of_codes(shape.num_layers, shape.num_experts, self.pool.code_bits)
        return LossTable.nominal(shape.num_layers, shape.num_experts)

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
        elif not (self.pool.checkpoint.lies_in_place or self.serves_its_codes):
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
    def kernel(self) -> NativeKernel:
        """The device's, in this process."""
        return load_engine_kernel(compat.engine_cores())


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


# -- what ranks agree on -----------------------------------------------------------------------------------------------


def agree_on_replicas(worker: WorkerFacts) -> PlannedReplicas | None:
    """Find or build them, the first rank before the others; settings, checkpoint and replicas are equal on all.

    Raises ConfigError on the rank that differs from the leader.
    """
    planned = None
    if worker.is_quantized and not worker.serves_its_codes:
        num_experts = worker.pool.shape.num_experts
        find = partial(host_replicas.find_replicas, worker.settings, worker.model_dir, worker.digest, num_experts)
        if (replicas := worker.ranks.after_the_first(find)) is not None:
            planned = PlannedReplicas.of(replicas)
    said = "none" if planned is None else f"{planned.digest}, losses {planned.loss_digest}"
    worker.ranks.require_equal(
        {
            "settings": str(worker.settings),
            "a checkpoint with digest": worker.digest,
            "replicas with digest": said,
        }
    )
    return planned


def open_device(
    worker: WorkerFacts, dtype: torch.dtype, planned: PlannedReplicas | None
) -> tuple[Setup, Costs, DeviceView]:
    """The leader finds or starts the device; the others hear from it what they need to plan alike."""
    cores, members, setup = worker.ranks.merge(compat.bound_cores()), None, None
    replicas = None if planned is None else planned.directory
    if worker.ranks.leads:
        settings = worker.settings
        # a device of our own that nobody asks would hold every expert a second time: it prepares them ahead
        codes = worker.serves_its_codes
        is_idle = settings.only_width(worker.pool.model.num_experts) is not None and (codes or not settings.running)
        requirements = Requirements(
            worker.pool.model,
            worker.hardware,
            full_precision=settings.cold_precision == "full" or (settings.prefill == "split" and not codes),
            quantized=worker.is_quantized and not is_idle,
            replicas=planned,
            stored=worker.pool.checkpoint.stored_form if codes and not is_idle else None,
        )
        wants_prompts, on_device = worker.splits_prefill(), None if is_idle else replicas
        members = DeviceMembers(settings, requirements, worker.model_dir, worker.digest, on_device, cores)
        worker.opened.callback(members.close)
        setup = _make_setup(worker, members.served, planned, wants_prompts=wants_prompts)
    setup = worker.ranks.from_leader(setup)
    costs = setup.costs_of(worker.shape)
    devices = setup.devices_of(costs, full_precision=worker.planning.full_precision)
    if members is None:
        return setup, costs, DeviceView(setup, devices, None, (True,) * setup.num_devices)
    local = HostExperts(worker.model_dir, replicas, worker.kernel, worker.layers) if setup.same_without else None
    link = DeviceLink(members, setup, devices, worker.pool.model, worker.layers, dtype, local)
    return setup, costs, DeviceView(setup, devices, link)


def _make_setup(worker: WorkerFacts, served: Served, planned: PlannedReplicas | None, *, wants_prompts: bool) -> Setup:
    """What the run's decisions and times depend on, without measured prices. wants_prompts: whether the device is to
    compute for prompts, if it holds the checkpoint. Raises ConfigError where copies on several devices do not fit."""
    settings, ranks, stage = worker.settings, worker.ranks, worker.ranks.stage
    widths, group_size = served.expert_bytes, served.group_size
    if planned is not None:  # also where the device has none, since slots hold every expert
        sizes, group_size = (worker.pool.model.hidden_size, worker.pool.model.intermediate_size), planned.group_size
        widths = {bits: expert_bytes(*sizes, bits, group_size) for bits in planned.widths} | widths
    stored_bits = (worker.pool.code_bits or 0) if worker.serves_its_codes else 0
    stored_bytes = worker.pool.stored_expert_bytes if stored_bits else 0
    if stored_bits:
        widths = {stored_bits: stored_bytes} | widths
    prompt_bits = stored_bits or FULL_PRECISION_BITS
    setup = Setup(
        preset=settings.preset,
        overrides=dict(settings.hardware_overrides),
        host_dims=worker.shape.recorded(),
        planning=worker.planning,
        expert_bytes=widths,
        group_size=group_size,
        activation_bytes=worker.vllm_config.model_config.dtype.itemsize,
        spill_bits=settings.resolve_offload_bits(worker.pool.model.num_experts, widths),
        device_hosts=settings.device_hosts,
        splits_prefill=wants_prompts and prompt_bits in served.expert_bytes,
        same_without=settings.fallback == "same",
        num_gpus=ranks.size,
        whole_experts=ranks.holds_whole_experts,
        stage=stage.index,
        first_layer=worker.layers.start,
        num_stages=stage.count,
        num_devices=settings.num_devices,
        splits_experts=settings.splits_experts,
        slot_bits=settings.slot_bits,
        stored_bits=stored_bits,
        stored_bytes=stored_bytes,
        joint_tiers=settings.joint_tiers,
    )
    if setup.num_devices == 1:
        return setup
    copies = copies_that_fit(
        setup.costs_of(worker.shape),
        setup.num_devices,
        settings.device_copies,
        full_precision=worker.planning.full_precision,
        splits_experts=setup.splits_experts,
    )
    return msgspec.structs.replace(setup, device_copies=copies)


def measure_prices(
    worker: WorkerFacts, hot: HotExperts, device: DeviceView, replicas: Path | None, shared: Shared | None
) -> MeasuredPrices | None:
    """Measure as the leader, for all ranks; None where prices are those of the simulated hardware. `shared`: the
    shared experts of a layer, where there are any."""
    if worker.settings.prices != "measured":
        return None
    prices: MeasuredPrices | None = None
    if (link := device.link) is not None:
        wanted = _asked_of_probe(worker, device.setup)
        probe = PriceProbe(hot, lambda: worker.kernel, worker.model_dir, replicas, worker.layers.start, shared)
        facts = _facts_of_prices(worker, hot, link, device.setup)
        facts |= {"wanted": asdict(wanted), "shared experts": shared is not None}
        measure = partial(probe.measure, wanted, link.members.beside_the_run)
        prices, said = find_or_measure(MeasuredPrices, facts, measure)
        say(f"speed of this machine, by which plans place experts: {said}")
    told: MeasuredPrices | None = worker.ranks.from_leader(prices)
    return told


def _facts_of_prices(worker: WorkerFacts, hot: HotExperts, link: DeviceLink, setup: Setup) -> dict[str, Any]:
    """Facts that measured prices depend on, beside the processor and what is asked."""
    pool, shape, members = worker.pool, worker.pool.shape, link.members
    sizes = [shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k]
    first = pool.layout.layers[0]
    return {
        "shape": [*sizes, sorted(map(str, set(pool.layout.activations))), bool(first.biases)],
        "shared": [worker.shape.shared_weights, worker.settings.linear_bits],
        "dtype": str(hot.layers[0].held.w13.dtype),
        "stored": pool.stored_as,
        "group size": setup.group_size,
        "as stored": setup.stored_bits,
        "parts": [worker.ranks.share.count, setup.num_devices if setup.splits_experts else 1],
        "kernels": [hot.layers[0].kernel_name, members.description.kernel, members.description.pe_mode],
        "cores": [sorted(compat.engine_cores()), members.cores],
        "versions": [vllm.__version__, torch.__version__, __version__],
    }


def _asked_of_probe(worker: WorkerFacts, setup: Setup) -> WantedPrices:
    settings, served = worker.settings, sorted(setup.expert_bytes)
    engine = {settings.slot_bits} - {FULL_PRECISION_BITS}
    tiers = ["gpu"]
    if settings.is_joint:
        tiers = [tier for tier in settings.joint_tiers.split("+") if tier != "device"]
        engine = set(LIVE_WIDTHS["gpu"]) & {*served, FULL_PRECISION_BITS}
    device_widths = [bits for bits in served if bits in REPLICA_WIDTHS and worker.is_quantized]
    prompts = setup.splits_prefill and setup.prompt_bits == FULL_PRECISION_BITS
    if FULL_PRECISION_BITS in served and (prompts or settings.cold_precision == "full"):
        device_widths.append(FULL_PRECISION_BITS)
    return WantedPrices(settings.slot_bits, sorted(engine), tiers, device_widths)
