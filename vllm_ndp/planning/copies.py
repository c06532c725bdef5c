"""Which of several devices hold a copy of each expert, and which copy serves the rows of a layer. Values only.

    expected load [L, E] -> Copies [L, E, D]       the heaviest expert first, to the devices with least of its layer
    rows of a layer      -> a device for each      the heaviest first, to the copy whose device has least so far

Layers run one after the other, so each is balanced by itself (longest processing time first). Every rank, and replay,
comes to the same answer by itself. Knows loads and how many copies a device has room for. Does not know which devices
are up until it is told, nor what a device's time is.
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
    load: NDArray[np.float64], num_devices: int, num_copies: int, room: Sequence[int] | None = None
) -> Copies:
    """Give every expert num_copies devices. `load` [L, E]: what each is expected to ask for. `room` [D]: how many
    copies each device can hold of all layers together; None = any number.

    Raises ConfigError where there are fewer devices than copies, or less room than needed.
    """
    num_layers, num_experts = load.shape
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
    for layer, of_layer in enumerate(load):
        sums = [[0.0] * num_devices for _ in range(num_copies)]  # of first copies, of second ones, ...
        together = [[0] * num_devices for _ in range(num_devices)]  # experts that two devices share
        for expert in np.argsort(-of_layer, kind="stable").tolist():
            left -= 1
            devices = _devices_for_one(sums, together, free, left)
            held[layer, expert, devices] = True
            for of_copy, device in zip(sums, devices, strict=True):
                of_copy[device] += float(of_layer[expert])
                free[device] -= 1
                for other in devices:
                    together[device][other] += 1
    return Copies(held)


def _devices_for_one(sums: list[list[float]], together: list[list[int]], free: list[int], left: int) -> list[int]:
    """For each copy return the device with least load of such copies. Among equal ones it is the one that shares fewest
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


def add_device(
    copies: Copies, load: NDArray[np.float64], num_copies: int, room: Sequence[int]
) -> tuple[Copies, NDArray[np.int64]]:
    """One device more, the last: where copies lie then, and how many come to each device, [D].

    Where num_copies is one more than before, every expert gets that copy first if there is room. The heaviest of its
    layer comes first, on the device with least to do. Then copies move to the new device, and between no others, until
    it holds its part of each layer. The device with most to do gives the heaviest copy that leaves the new
    device at most at the mean. `load` [L, E] as for assign_copies; `room` [D] of all layers, of the new device too.
    """
    before = np.concatenate([copies.held, np.zeros((*copies.held.shape[:2], 1), np.bool_)], axis=2)
    held, free = before.copy(), np.array(room, np.int64) - before.sum(axis=(0, 1))
    num_devices, new = before.shape[2], before.shape[2] - 1
    for layer, of_layer in enumerate(load):
        if num_copies > copies.num_copies:
            for expert in np.argsort(-of_layer, kind="stable").tolist():
                sums = _loads(of_layer, held[layer])
                without = [at for at in range(num_devices) if not held[layer, expert, at] and free[at] > 0]
                if not without:
                    return add_device(copies, load, copies.num_copies, room)
                device = min(without, key=lambda at: (sums[at], -free[at], at))
                held[layer, expert, device] = True
                free[device] -= 1
        part = len(of_layer) * num_copies // num_devices
        while held[layer, :, new].sum() < part and free[new] > 0:
            sums = _loads(of_layer, held[layer])
            mean, giver = sums.sum() / num_devices, int(sums[:new].argmax())
            movable = np.flatnonzero(held[layer, :, giver] & ~held[layer, :, new])
            if not len(movable):
                break
            fitting = movable[sums[new] + of_layer[movable] <= mean * (1 + 1e-9)]
            expert = int(fitting[of_layer[fitting].argmax()] if len(fitting) else movable[of_layer[movable].argmin()])
            held[layer, expert, [giver, new]] = False, True
            free[[giver, new]] += 1, -1
    return Copies(held), (held & ~before).sum(axis=(0, 1), dtype=np.int64)


def _fit(free: Sequence[int], num_experts: int, num_copies: int) -> bool:
    """Whether num_copies different devices can be found for each of so many experts."""
    return sum(min(count, num_experts) for count in free) >= num_experts * num_copies


def rebalance(copies: Copies, load: NDArray[np.float64], most: int) -> tuple[Copies, NDArray[np.int64]]:
    """Follow a new expectation by moving at most `most` copies; and how many come to each device, [D].

    Copies are exchanged two by two between the device with most to do in a layer and the one with least. So every
    device holds as many as before. Layers whose busiest device gains most come first.
    """
    held = copies.held.copy()
    arrived = np.zeros(copies.num_devices, np.int64)
    best = {layer: _best_exchange(held[layer], load[layer]) for layer in range(len(load))}
    for _ in range(most // 2):
        layer = max(best, key=lambda at: (best[at][0], -at))
        gain, away, back, busiest, idlest = best[layer]
        if gain <= 0:
            break
        held[layer, away, [busiest, idlest]] = False, True
        held[layer, back, [busiest, idlest]] = True, False
        arrived[[busiest, idlest]] += 1
        best[layer] = _best_exchange(held[layer], load[layer])
    return Copies(held), arrived


def _loads(load: NDArray[np.float64], held: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[D], what each device has to do in one layer: load [E] of the experts held [E, D] there. The order of the sums
    of `@` is the processor's."""
    sums: NDArray[np.float64] = (load[:, None] * held).sum(axis=0)
    return sums


def _best_exchange(held: NDArray[np.bool_], load: NDArray[np.float64]) -> tuple[float, int, int, int, int]:
    """Best exchange of one layer, held [E, D] and load [E]. Return how much less its busiest device has to do, the
    experts that leave and come there, that device, and the idlest one."""
    each = load / held[0].sum()
    sums = _loads(each, held)
    busiest, idlest = int(sums.argmax()), int(sums.argmin())
    away = np.flatnonzero(held[:, busiest] & ~held[:, idlest])
    back = np.flatnonzero(held[:, idlest] & ~held[:, busiest])
    if not len(away) or not len(back):
        return 0.0, 0, 0, busiest, idlest
    shift = each[away][:, None] - each[back][None, :]
    after = np.maximum(sums[busiest] - shift, sums[idlest] + shift)
    a, b = divmod(int(after.argmin()), len(back))
    gain = float(sums[busiest] - after[a, b])
    # a gain of rounding only would exchange two experts back and forth for ever
    return (gain if gain > 1e-9 * float(sums[busiest]) else 0.0), int(away[a]), int(back[b]), busiest, idlest


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
