"""Which of several devices hold a copy of each expert, and which copy serves the rows of a layer. Values only.

    sizes           -> Copies [L, E, D]       each to the devices with fewest of its layer
    rows of a layer -> a device for each      the heaviest first, to the copy whose device has least so far

Layers run one after the other, so each is balanced by itself (longest processing time first). Every rank, and replay,
comes to the same answer by itself. Does not know which devices are up until it is told, nor what a device's time is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.stats import frozen_array

NO_COPY = -1


@dataclass(frozen=True)
class Copies:
    held: NDArray[np.bool_]  # [L, E, D]

    def __post_init__(self) -> None:
        object.__setattr__(self, "held", frozen_array(self.held, np.bool_))
        if self.held.ndim != 3 or self.held.size == 0:
            raise ValueError(f"copies must be [L, E, D], got {list(self.held.shape)}")
        of_expert = self.held.sum(axis=2)
        if of_expert.min() != of_expert.max() or of_expert.min() < 1:
            raise ValueError(
                f"every expert must have equally many copies, got {of_expert.min()} to {of_expert.max()} of them"
            )

    @property
    def num_copies(self) -> int:
        return int(self.held[0, 0].sum())

    @property
    def num_devices(self) -> int:
        return int(self.held.shape[2])

    @property
    def per_device(self) -> NDArray[np.int64]:
        """[D], copies of all layers that each device holds."""
        counts: NDArray[np.int64] = self.held.sum(axis=(0, 1), dtype=np.int64)
        return counts


def assign_copies(
    num_layers: int, num_experts: int, num_devices: int, num_copies: int, room: Sequence[int] | None = None
) -> Copies:
    """Give every expert num_copies devices, and every device equally many of each layer. `room` [D]: how many copies
    each device can hold of all layers together; None = any number.

    Raises ConfigError where there are fewer devices than copies, or less room than needed.
    """
    if not 1 <= num_copies <= num_devices:
        raise ConfigError(f"{num_copies} copies of each expert need as many devices, got {num_devices}: ask for fewer")
    left = num_layers * num_experts
    free = [left] * num_devices if room is None else [min(count, left) for count in room]
    if not _fit(free, left, num_copies):
        raise ConfigError(
            f"{num_copies} copies of {left} experts do not fit devices with room for {list(room or ())} of them: "
            "use more devices, larger ones or fewer copies"
        )
    held = np.zeros((num_layers, num_experts, num_devices), np.bool_)
    for layer in range(num_layers):
        sums = [[0] * num_devices for _ in range(num_copies)]  # of first copies, of second ones, ...
        together = [[0] * num_devices for _ in range(num_devices)]  # experts that two devices share
        for expert in range(num_experts):
            left -= 1
            devices = _devices_for_one(sums, together, free, left)
            held[layer, expert, devices] = True
            for of_copy, device in zip(sums, devices, strict=True):
                of_copy[device] += 1
                free[device] -= 1
                for other in devices:
                    together[device][other] += 1
    return Copies(held)


def _devices_for_one(sums: list[list[int]], together: list[list[int]], free: list[int], left: int) -> list[int]:
    """For each copy return the device with fewest such copies. Among equal ones it is the one that shares fewest
    experts with the others: the load of a lost device falls to many. But devices with most room come first where the
    `left` experts to come would otherwise not find enough devices each. `sums` [copies, D]; `together` [D, D].
    """
    num_copies = len(sums)
    with_room = [device for device, count in enumerate(free) if count > 0]
    by_room = sorted(with_room, key=lambda device: (-free[device], sum(of[device] for of in sums), device))
    for forced in range(num_copies + 1):
        chosen = by_room[:forced]
        for of_copy in sums[forced:]:
            others = [
                (of_copy[device], sum(together[one][device] for one in chosen), -free[device], device)
                for device in with_room
                if device not in chosen
            ]
            chosen += [min(others)[-1]] if others else []
        if len(chosen) == num_copies and _fit([n - (at in chosen) for at, n in enumerate(free)], left, num_copies):
            return chosen
    raise AssertionError("the devices with most room always leave enough for the rest")


def _fit(free: Sequence[int], num_experts: int, num_copies: int) -> bool:
    """Whether num_copies different devices can be found for each of so many experts."""
    return sum(min(count, num_experts) for count in free) >= num_experts * num_copies


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
