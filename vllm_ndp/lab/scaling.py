"""Gain of more devices, more GPUs and larger batches, and savings of hosts that share a pool. Simulated.

    step = sum over layers ( attention + max( shared and hot experts , slowest device ) + overhead ) + head

Steady decode of one model on synthetic routing of its shape. GPU memory holds as many hot experts as fit; the devices
hold all others. Hot experts offload to the devices where that shortens a layer. Every time is one that a live run would
have: the same GpuModel, Devices and DeviceModel answer. Layers are alike here, so a few stand for all. Draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import WholeModel
from ndp_device.common.widths import PLAN_BITS
from ndp_device.experts.part import Part
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import Hardware
from ndp_device.timing.units import PS_PER_S
from ndp_device.timing.work import Work
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.cost_model.memory import CAPACITY_OF, Footprint, Memory, slots_bytes
from vllm_ndp.lab.exact.engine import Asks, ReplayedCommand, together
from vllm_ndp.layer.balance import Balancer, LayerLoad
from vllm_ndp.layer.devices import DeviceRules, Devices, HeldExperts, of_part, slowest, work_of
from vllm_ndp.planning.plan import highest
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace

MODELS = ("mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-120b")
PARTS = (
    "attention",
    "collectives",
    "hot experts",
    "device link",
    "device DRAM",
    "device arrays",
    "device queue",
    "head",
)
_PART_OF = {"link": "device link", "dram": "device DRAM", "compute": "device arrays", "queue": "device queue"}
PAYS = 0.05
"""One more device must bring so much more, or it is said not to pay."""
_LAYERS, _STEPS, _PROMPT = 2, 3, 32
"""Simulated of each model, and tokens of each prompt that hot experts are chosen by."""


@dataclass(frozen=True)
class Setup:
    """Settings that stay the same at every point."""

    hardware: Hardware
    bits: int = 3
    """Bits of every expert on a device."""
    context: int = 4096
    """Cached tokens of each request."""
    splits_experts: bool = False
    """Each device has an equal part of every expert, and not copies of some."""


@dataclass(frozen=True)
class ScalingPoint:
    """Steady decode at one size of everything."""

    model: str
    batch: int
    num_gpus: int
    num_devices: int
    num_hosts: int
    num_hot: int
    num_copies: int
    execution: str  # the faster one where hosts share devices, else balanced
    tokens_per_s: float  # of all hosts together
    bound: str  # the one of PARTS that takes most of a step
    shares: dict[str, float]  # of a step, by part


def room_for_hot(shape: WholeModel, hardware: Hardware, num_gpus: int, batch: int, context: int) -> int:
    """Hot experts per layer that fit beside all else. Raises ConfigError where not even that fits."""
    room = num_gpus * int(hardware.values()[CAPACITY_OF["gpu"]])
    beside = Footprint.of(Memory(), shape, batch * context, batch).gpu
    for num_hot in range(shape.num_experts, -1, -1):
        if beside + slots_bytes(shape, num_hot) <= room:
            return num_hot
    raise ConfigError(f"{batch} requests of {context} tokens do not fit {num_gpus} GPUs beside the model's weights")


class Scale:
    """Points of one model, on choices of its routing that are made once for all points."""

    def __init__(self, model: str, setup: Setup, num_requests: int) -> None:
        self.model, self.setup, self.num_requests = model, setup, num_requests
        self.shape = model_named(model)
        lengths = {"num_requests": num_requests, "prompt_len": _PROMPT, "decode_len": _STEPS}
        asked = SyntheticSettings.of_shape(model, num_layers=_LAYERS, signal=1.0, **lengths)
        trace = synthetic_trace(asked, model)
        self.ids = np.stack([one.decode_ids for one in trace.sequences]).astype(np.int64)  # [R, S, L, k]
        self.weights = np.stack([one.decode_weights for one in trace.sequences])
        self.prompt_counts = np.stack([trace.stats(one).counts for one in trace.sequences])  # [R, L, E]
        self._devices: dict[int, Devices] = {}
        self._costs: dict[int, Costs] = {}

    def _costs_of(self, num_gpus: int) -> Costs:
        if num_gpus not in self._costs:
            self._costs[num_gpus] = Costs(self.setup.hardware, self.shape, num_gpus=num_gpus)
        return self._costs[num_gpus]

    def _devices_of(self, num_devices: int) -> Devices:
        """Devices of the whole model: its layers' copies count against the capacity.

        Raises ConfigError where none fit, or where experts cannot be cut into so many parts.
        """
        if num_devices not in self._devices:
            costs, splits = self._costs_of(1), self.setup.splits_experts
            parts = num_devices if splits else 1
            Part(0, parts).check(self.shape.intermediate_size, costs.group_size)
            rules = DeviceRules.that_fit(costs, num_devices, None, full_precision=False, splits_experts=splits)
            sizes = {bits: of_part(costs, parts).replica_bytes(bits) for bits in PLAN_BITS}
            self._devices[num_devices] = Devices(costs, rules, sizes)
        return self._devices[num_devices]

    def point(self, batch: int, num_gpus: int, num_devices: int, num_hosts: int = 1) -> ScalingPoint | None:
        """None where the model does not fit the GPUs, or its experts the devices."""
        try:
            num_hot = room_for_hot(self.shape, self.setup.hardware, num_gpus, batch, self.setup.context)
            devices = self._devices_of(num_devices)
        except ConfigError:
            return None
        # with every expert hot nothing is offloaded, as in the plugin; one less may be faster
        counts = [num_hot] if num_hot < self.shape.num_experts else [num_hot, num_hot - 1]
        # each host offloads as if the devices were its own, so where they are shared it may be better not to
        executions = ("balanced", "paper") if num_hosts > 1 else ("balanced",)
        found = [
            self._point(batch, num_gpus, devices, num_hosts, count, execution)
            for count in counts
            for execution in executions
        ]
        return max(found, key=lambda point: point.tokens_per_s)

    def _point(
        self, batch: int, num_gpus: int, devices: Devices, num_hosts: int, num_hot: int, execution: str
    ) -> ScalingPoint:
        num_devices = devices.rules.num_devices
        costs = self._costs_of(num_gpus)
        offloads = execution == "balanced"
        hosts = [_Host(self, costs, devices, number, batch, num_hot, offloads=offloads) for number in range(num_hosts)]
        ended_ps = together([host.run() for host in hosts], *(DeviceModel(costs.hardware) for _ in range(num_devices)))
        made = num_hosts * batch * _STEPS  # while the hosts run side by side, which they do to nearly the end
        parts = {part: sum(host.parts[part] for host in hosts) for part in PARTS}
        whole = sum(parts.values())
        return ScalingPoint(
            model=self.model,
            batch=batch,
            num_gpus=num_gpus,
            num_devices=num_devices,
            num_hosts=num_hosts,
            num_hot=num_hot,
            num_copies=devices.rules.num_copies,
            execution=execution,
            tokens_per_s=made * PS_PER_S / (sum(ended_ps) / num_hosts)
            if num_hosts > 1
            else made * PS_PER_S / ended_ps[0],
            bound=max(parts, key=lambda part: parts[part]),
            shares={part: took / whole for part, took in parts.items()},
        )


@dataclass(frozen=True)
class _LayerWork:
    gpu_ps: int
    for_devices: tuple[tuple[int, Work], ...]


class _Host:
    """One engine that decodes its batch; asks the devices layer by layer."""

    def __init__(
        self,
        scale: Scale,
        costs: Costs,
        devices: Devices,
        number: int,
        batch: int,
        num_hot: int,
        *,
        offloads: bool = True,
    ) -> None:
        self._scale, self._costs, self._devices = scale, costs, devices
        first = number * batch % max(scale.num_requests - batch + 1, 1)
        self._requests = slice(first, first + batch)
        self._batch = batch
        shape = costs.shape
        self._hot = highest(scale.prompt_counts[self._requests].sum(axis=0), num_hot)
        may = offloads and 0 < num_hot < shape.num_experts
        self._balancer = Balancer(costs, scale.setup.bits) if may else None
        self._known: dict[tuple[int, int], _LayerWork] = {}
        self.parts = dict.fromkeys(PARTS, 0)

    def run(self) -> Asks[int]:
        """Decode the steps; when the last one has ended, in ps of this host's clock."""
        gpu, batch = self._costs.gpu, self._batch
        before, overhead_ps = gpu.before_experts_ps(batch, batch * self._scale.setup.context), self._costs.overhead_ps
        collectives_ps, head_ps = 2 * gpu.reduce_ps(batch), gpu.head_ps(batch, batch)
        now = 0
        for step in range(_STEPS):
            for layer, before_ps in enumerate(before):
                self.parts["collectives"] += collectives_ps
                self.parts["attention"] += before_ps - collectives_ps + overhead_ps
                now += before_ps
                now += yield from self._experts(self._work(step, layer % _LAYERS), now)
                now += overhead_ps
            self.parts["head"] += head_ps
            now += head_ps
        return now

    def _experts(self, work: _LayerWork, now_ps: int) -> Asks[int]:
        """Picoseconds that the experts of one layer take."""
        timings = []
        for device, part in work.for_devices:
            timings.append((yield ReplayedCommand(part, now_ps, device)))
        last = slowest(timings) if timings else None
        if last is None or last.total_ps <= work.gpu_ps:
            self.parts["hot experts"] += work.gpu_ps
            return work.gpu_ps
        self.parts[_PART_OF[last.bound]] += last.total_ps
        return last.total_ps

    def _work(self, step: int, layer: int) -> _LayerWork:
        """Where the pairs of a step's layer run; layer: of the routing, which stands for all that are like it."""
        if (step, layer) not in self._known:
            self._known[step, layer] = self._split(step, layer)
        return self._known[step, layer]

    def _split(self, step: int, layer: int) -> _LayerWork:
        ids = self._scale.ids[self._requests, step, layer]
        weights = self._scale.weights[self._requests, step, layer]
        bits, here = self._scale.setup.bits, self._hot[layer]
        everywhere = self._devices.all_alive
        if self._balancer is not None:
            load = LayerLoad.of_arrays(here, ids, weights, np.full((self._batch, len(here)), bits, np.uint8))
            leaving = self._devices.balancer(self._balancer, layer, lambda: everywhere).offloaded(load)
            here = here.copy()
            here[list(leaving)] = False
        on_gpu = here[ids]
        pairs = np.bincount(ids[on_gpu], minlength=len(here))
        gpu_ps = self._costs.shared_ps(self._batch) + self._costs.gpu.hot_experts_ps(pairs[pairs > 0].tolist())
        rows, columns = np.nonzero(~on_gpu)
        experts, widths = ids[rows, columns], np.full(len(rows), bits, np.uint8)
        messages, devices, costs = [], self._devices, self._costs
        held = HeldExperts(devices.expert_bytes, costs.shape.dtype_bytes, devices.num_parts)
        for device, own in self._devices.messages(layer, experts, widths, everywhere) if len(rows) else ():
            work = work_of(self._costs.shape, held, rows[own], experts[own], widths[own])
            messages.append((device, work))
        return _LayerWork(gpu_ps, tuple(messages))


def curve(
    scale: Scale, batches: Iterable[int], gpus: Iterable[int], devices: Sequence[int], num_hosts: int = 1
) -> list[ScalingPoint]:
    """Every combination that fits."""
    asked = ((batch, num_gpus, count) for num_gpus in gpus for batch in batches for count in devices)
    found = (scale.point(*at, num_hosts=num_hosts) for at in asked)
    return [point for point in found if point is not None]


def stops_paying(points: Sequence[ScalingPoint]) -> int | None:
    """Number of devices after which one more brings less than PAYS; None where each one pays.

    The points differ in the number of devices alone.
    """
    by_devices = {point.num_devices: point.tokens_per_s for point in points}
    for count in sorted(by_devices):
        if count + 1 in by_devices and by_devices[count + 1] < by_devices[count] * (1 + PAYS):
            return count
    return None


@dataclass(frozen=True)
class Pool:
    """Devices that hosts with a shared pool need for as many tokens as hosts with devices of their own."""

    model: str
    num_hosts: int
    batch: int
    private_tokens_per_s: float  # of all hosts, with num_private devices each
    num_private: int
    shared: tuple[ScalingPoint, ...]  # the same hosts on a pool, by its size

    @property
    def enough(self) -> int | None:
        """Devices of a pool that makes nine tenths of what private ones make."""
        return next(
            (one.num_devices for one in self.shared if one.tokens_per_s >= 0.9 * self.private_tokens_per_s), None
        )

    @property
    def saved(self) -> float | None:
        """Share of the devices that are not needed."""
        return None if self.enough is None else 1 - self.enough / (self.num_hosts * self.num_private)


def pool(scale: Scale, batch: int, num_gpus: int, devices: Sequence[int], num_hosts: int) -> Pool | None:
    """Private: as few devices as hold the model. None where it fits none of them."""
    private = next((one for count in devices if (one := scale.point(batch, num_gpus, count)) is not None), None)
    if private is None:
        return None
    shared = curve(scale, [batch], [num_gpus], devices, num_hosts)
    whole = private.tokens_per_s * num_hosts
    return Pool(scale.model, num_hosts, batch, whole, private.num_devices, tuple(shared))
