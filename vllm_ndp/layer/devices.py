"""Several equal devices behind one engine: who holds copies of what, who serves a layer's pairs, what the layer takes.

    device = the slowest of the devices that were asked, each by its own clock and link

Either each device has whole experts, and copies of some lie on several. Or each device has a part of every expert, and
all of them work on every pair.

The live plugin and replay use the same object, so that replay makes the same choices and the same times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import WholeModel
from ndp_device.timing.work import Timing, Work, ceil_div, execute_bytes
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import CAPACITY_OF
from vllm_ndp.layer.balance import Balancer, LayerLoad

DEFAULT_COPIES = 2
NO_COPY = -1
Alive = Sequence[bool]
"""[D], which devices may be asked."""


def copies_that_fit(
    costs: Costs, num_devices: int, asked: int | None, *, full_precision: bool, splits_experts: bool = False
) -> int:
    """Copies of each expert, on different devices. asked: None = 2 where they fit, else 1; `Devices` says the rest."""
    if splits_experts:
        return 1
    if asked is not None:
        return asked
    usual = min(DEFAULT_COPIES, num_devices)
    held = assign_copies(costs.shape.num_layers, costs.shape.num_experts, num_devices, usual)
    return usual if held.sum(axis=(0, 1)).max() <= _room(costs, num_devices, full_precision=full_precision) else 1


def _room(costs: Costs, num_devices: int, *, full_precision: bool) -> int:
    """Copies that fit on a device beside its part of all experts in full precision, for prompts and migrations."""
    shape, capacity = costs.shape, int(costs.hardware.values()[CAPACITY_OF["device"]])
    all_bytes = shape.num_layers * shape.num_experts * shape.expert_bytes
    pool = 0 if full_precision else ceil_div(all_bytes, num_devices)
    return max(capacity - pool, 0) // (shape.expert_bytes if full_precision else costs.stored_replica_bytes())


def assign_copies(num_layers: int, num_experts: int, num_devices: int, num_copies: int) -> NDArray[np.bool_]:
    """[L, E, D], who holds what: every expert has num_copies devices, and every device equally many of each layer.

    A copy goes to the device with fewest such copies of the layer. Among equal ones it is the one that shares fewest
    experts with the others, so that the load of a lost device falls to many. Raises ConfigError where there are fewer
    devices than copies.
    """
    if not 1 <= num_copies <= num_devices:
        raise ConfigError(f"{num_copies} copies of each expert need as many devices, got {num_devices}: ask for fewer")
    held = np.zeros((num_layers, num_experts, num_devices), np.bool_)
    total = [0] * num_devices
    for layer in range(num_layers):
        sums = [[0] * num_devices for _ in range(num_copies)]  # of first copies, of second ones, ...
        together = [[0] * num_devices for _ in range(num_devices)]  # experts that two devices share
        for expert in range(num_experts):
            devices: list[int] = []
            for of_copy in sums:
                others = [
                    (of_copy[device], sum(together[one][device] for one in devices), total[device], device)
                    for device in range(num_devices)
                    if device not in devices
                ]
                devices.append(min(others)[-1])
            held[layer, expert, devices] = True
            for of_copy, device in zip(sums, devices, strict=True):
                of_copy[device] += 1
                total[device] += 1
                for other in devices:
                    together[device][other] += 1
    return held


def route(
    held: NDArray[np.bool_], alive: Sequence[bool], work: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """A device for each piece of a layer's work, NO_COPY where no device with a copy of its expert is alive.

    held [E, D]; alive [D]; work: (expert, bits) -> how much. The largest piece first, to the one of its expert's
    devices that has least so far; of equal pieces the lower expert's first.
    """
    sums = [0] * len(alive)
    found: dict[tuple[int, int], int] = {}
    for name, amount in sorted(work.items(), key=lambda item: (-item[1], item[0])):
        expert = name[0]
        living = [device for device in np.flatnonzero(held[expert]).tolist() if alive[device]]
        # of devices with equally much to do another one for another expert
        *_, device = min(((sums[at], (at - expert) % len(alive), at) for at in living), default=(0, 0, NO_COPY))
        if device != NO_COPY:
            sums[device] += amount
        found[name] = device
    return found


class Devices:
    """Copies as they are now, and every choice that follows from them."""

    def __init__(
        self,
        costs: Costs,
        expert_bytes: Mapping[int, int],
        num_devices: int,
        num_copies: int = 1,
        *,
        full_precision: bool = False,
        splits_experts: bool = False,
    ) -> None:
        """expert_bytes: what one read of an expert moves, by width. num_copies: of each expert, on different devices.
        full_precision: cold experts are computed from the checkpoint's own weights, which then are what is copied.
        splits_experts: each device has 1/num_devices of every expert, once."""
        self.num_devices, self.num_copies, self.splits_experts = num_devices, num_copies, splits_experts
        self.expert_bytes = dict(expert_bytes)
        self._rows_per_pass = costs.hardware.array.rows
        self.held = assign_copies(costs.shape.num_layers, costs.shape.num_experts, num_devices, num_copies)
        room = _room(costs, num_devices, full_precision=full_precision)
        if self.held.sum(axis=(0, 1)).max() > room:
            raise ConfigError(
                f"{num_copies} copies of {costs.shape.num_layers * costs.shape.num_experts} experts do not fit "
                f"{num_devices} devices with room for {room} of them each: use more devices, larger ones or "
                "fewer copies"
            )
        if splits_experts:  # which fit, as one copy of each does
            self.held = np.ones_like(self.held)

    @property
    def num_parts(self) -> int:
        """Number of parts of an expert, one of which a device has."""
        return self.num_devices if self.splits_experts else 1

    def serves(self, layer: int, expert: int, alive: Alive) -> bool:
        """Whether devices that are up can compute the expert."""
        there = np.logical_and(self.held[layer, expert], alive)
        return bool(there.all() if self.splits_experts else there.any())

    @property
    def all_alive(self) -> Alive:
        return (True,) * self.num_devices

    def route_groups(
        self, layer: int, groups: Mapping[tuple[int, int], int], alive: Alive
    ) -> dict[tuple[int, int], int]:
        """The device of each (expert, bits) -> rows of a layer; NO_COPY where none of the expert's is alive. Where each
        has a part of every expert, the first stands for all."""
        if self.splits_experts:
            return dict.fromkeys(groups, 0 if all(alive) else NO_COPY)
        work = {
            (expert, bits): self.expert_bytes[bits] * ceil_div(rows, self._rows_per_pass)
            for (expert, bits), rows in groups.items()
        }
        return route(self.held[layer], alive, work)

    def messages(
        self, layer: int, experts: NDArray[np.integer], bits: NDArray[np.uint8], alive: Alive
    ) -> list[tuple[int, NDArray[np.int64]]]:
        """Return the devices that a layer's pairs [P] go to, and which pairs each gets. No device serves the others."""
        if self.splits_experts:
            return [(device, np.arange(len(experts))) for device in range(len(alive))] if all(alive) else []
        keys = (experts.astype(np.int64) << 8) | bits
        distinct, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
        groups = [(key >> 8, key & 255) for key in distinct.tolist()]
        found = self.route_groups(layer, dict(zip(groups, counts.tolist(), strict=True)), alive)
        devices = np.array([found[group] for group in groups], np.int64)[place.reshape(-1)]
        return [(device, np.flatnonzero(devices == device)) for device in sorted({*found.values()} - {NO_COPY})]

    def balancers(self, rule: Balancer, alive: Callable[[], Alive]) -> list[DevicesBalancer]:
        """[L], the balancing rule for each layer on these devices. alive: says which are up; called at each use."""
        on_device = rule
        if self.splits_experts and isinstance(rule.prices, Costs):  # measured ones are of a part already
            on_device = replace(rule, prices=of_part(rule.prices, self.num_parts))
        return [DevicesBalancer(rule, on_device, self, layer, alive) for layer in range(len(self.held))]


def of_part(costs: Costs, num_parts: int) -> Costs:
    """The costs of experts that have 1/num_parts of their intermediate units: what a device takes for its part."""
    shape = replace(costs.shape, intermediate_size=costs.shape.intermediate_size // num_parts)
    return replace(costs, shape=shape, stored=costs.stored and (costs.stored[0], ceil_div(costs.stored[1], num_parts)))


@dataclass(frozen=True)
class DevicesBalancer:
    """Balancer's rule where the device's time is that of the busiest of several."""

    rule: Balancer
    on_device: Balancer
    """The same rule for what one device has of an expert."""
    devices: Devices
    layer: int
    alive: Callable[[], Alive]

    def offloaded(self, load: LayerLoad) -> frozenset[int]:
        """The hot experts that run on a device in this layer; empty where nothing is gained."""
        return self.rule.fewest(load, self._busiest_ps(load, self.alive())) if load.hot else frozenset()

    def _busiest_ps(self, load: LayerLoad, alive: Alive) -> Iterator[float]:
        """The busiest device's time with the lightest 0, 1, 2, ... hot experts on devices."""
        groups = dict(load.cold)
        yield self._device_ps(groups, load.rows, alive)
        for expert in load.lightest_first:
            if not self.devices.serves(self.layer, expert, alive):
                return  # it must stay, and with it the heavier ones
            groups[expert, self.rule.offload_bits] = load.hot[expert][0]
            yield self._device_ps(groups, load.rows, alive)

    def _device_ps(self, groups: Mapping[tuple[int, int], int], rows: int, alive: Alive) -> float:
        """The busiest device's. A message is taken to hold as many rows as it has pairs, or all."""
        experts_ps = [0.0] * len(alive)
        pairs = [0] * len(alive)
        for (expert, bits), device in self.devices.route_groups(self.layer, groups, alive).items():
            if device != NO_COPY:
                experts_ps[device] += self.on_device.device_ps(bits, groups[expert, bits])
                pairs[device] += groups[expert, bits]
        return max(
            took + (self.on_device.message_ps(min(count, rows), count) if count else 0.0)
            for took, count in zip(experts_ps, pairs, strict=True)
        )


def work_of(
    shape: WholeModel,
    expert_bytes: Mapping[int, int],
    activation_bytes: int,
    rows: NDArray[np.int64],
    experts: NDArray[np.integer],
    bits: NDArray[np.integer],
) -> Work:
    """Work of one device in a layer: the pairs (row, expert, bits), experts in the order of their first.

    shape and expert_bytes, by width: of what the device has of an expert.
    """
    tokens = Counter(((experts.astype(np.int64) << 8) | bits).tolist())  # whole numbers are counted faster than pairs
    num_rows = int(np.count_nonzero(np.bincount(rows)))
    bytes_in, bytes_out = execute_bytes(num_rows, len(rows), shape.hidden_size, activation_bytes)
    return Work(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        experts=tuple((name & 255, count, expert_bytes[name & 255]) for name, count in tokens.items()),
    )


def slowest(timings: Sequence[Timing]) -> Timing:
    """Times of the last of the devices that worked on one layer at once, with what all of them read and spent."""
    return msgspec.structs.replace(
        max(timings, key=lambda timing: timing.total_ps),
        weight_bytes=sum(timing.weight_bytes for timing in timings),
        bytes_in=sum(timing.bytes_in for timing in timings),
        bytes_out=sum(timing.bytes_out for timing in timings),
        row_activations=sum(timing.row_activations for timing in timings),
        energy_pj=sum(timing.energy_pj for timing in timings),
    )
