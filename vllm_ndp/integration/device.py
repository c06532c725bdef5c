"""The device, or several of them, as every rank sees them: what plans are made from, and which are up in a step.

One rank of a group, the leader, speaks to them by a `DeviceLink`; the others go by what it says before each step. Knows
no messages, pairs or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ndp.integration.device_link import DeviceFacts, DeviceLink
from vllm_ndp.layer.devices import Devices


@dataclass
class DeviceView:
    facts: DeviceFacts
    devices: Devices | None
    """Where there are several: who holds and serves what, the same on every rank."""
    link: DeviceLink | None
    """None: another rank sends, waits, stands in and counts."""
    agreed: tuple[bool, ...] | None = None
    """Devices that all of several ranks use in this step, whatever happens in it."""

    @property
    def up(self) -> tuple[bool, ...]:
        """Which devices are up now [D]."""
        if self.link is not None:
            return self.link.members.up
        return self.agreed or ()

    @property
    def takes_pairs(self) -> bool:
        """Whether this step's hot experts and prompts may have pairs for a device, or for what stands in for it."""
        if self.facts.same_without:
            return True
        if self.link is not None and self.agreed is None and self.devices is None:  # asked in every layer
            return self.link.state == "up"
        return any(self.counted_on())

    @property
    def state(self) -> str:
        return "the leader's" if self.link is None else self.link.state

    def counted_on(self) -> tuple[bool, ...]:
        """[D], which devices this step's experts may run on, for a choice that is made by it."""
        if self.facts.same_without:
            assert self.devices is not None
            return tuple(self.devices.all_alive)
        alive = self.up if self.agreed is None else self.agreed
        return alive if self.link is None else self.link.note_availability(alive)

    def join(self) -> None:
        """There is one device more; who holds what is known on every rank."""
        if self.link is not None:
            self.link.join()
        if self.agreed is not None:
            self.agreed = (*self.agreed, True)
