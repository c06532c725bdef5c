"""The device as a rank sees it that does not speak to it: rank 0 of its group sends, waits, stands in and counts.

Has the methods of `device_link.DeviceLink` that a layer and the planner call. Knows nothing of the device but what the
leader says of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.integration.device_link import DeviceLink
from vllm_ndp.simulation.devices import Devices


@dataclass
class LeadersDevice:
    offload_bits: int
    group_size: int
    """Weights that share a scale in the device's replicas."""
    expert_bytes: dict[int, int]
    """What one read of an expert moves in the device's DRAM, by width."""
    computes_prompts: bool
    alive: tuple[bool, ...]
    """Which devices are up, as the leader said before this step."""
    state: str = field(default="the leader's", init=False)
    devices: Devices | None = field(default=None, init=False)

    @property
    def is_up(self) -> bool:
        return any(self.alive)

    @property
    def up(self) -> tuple[bool, ...]:
        return self.alive

    def counted_on(self) -> tuple[bool, ...]:
        return self.alive

    def steer(self, devices_up: tuple[bool, ...]) -> None:
        self.alive = devices_up

    def share_among(self, devices: Devices) -> None:
        """There are several devices: these rules say who holds and serves what, here as on the leader."""
        self.devices = devices

    def join(self) -> None:
        """The leader has found one device more; who holds what follows on every rank."""
        self.alive = (*self.alive, True)

    def revive(self) -> None: ...

    def begin_install(self, epoch: int, widths: NDArray[np.uint8], hot: NDArray[np.bool_]) -> None: ...

    def wait_installed(self) -> None: ...

    def take_round_trips(self) -> list[float]:
        return []

    def take_fallbacks(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


Device = DeviceLink | LeadersDevice
