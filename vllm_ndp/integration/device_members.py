"""The devices that one worker speaks to: started or found, each of another process, all serving the same."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ndp_device.common.errors import ConfigError, DeviceError
from ndp_device.experts.expert import WHOLE, Part
from ndp_device.probe import Probe
from ndp_device.protocol import messages as msg
from vllm_ndp.config import NdpSettings
from vllm_ndp.device_client.client import DeviceClient
from vllm_ndp.device_client.handshake import PlannedReplicas, Requirements
from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.integration import compat

_LOOK_EVERY_S = 0.02


@dataclass
class Member:
    """One of the devices; `process` is set where this worker started it."""

    address: str
    keys: Path | None
    process: DeviceProcess | None
    client: DeviceClient
    description: msg.Description | None = None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def look(self) -> dict[str, Any]:
        """Asks nobody: whoever looks is between two steps, and does not wait."""
        assert self.description is not None
        return {
            "state": self.client.state,
            "reason": "" if self.client.state == "up" else self.client.reason,
            "address": self.address,
            "pid": self.pid,
            "calls": asdict(self.client.counters),
            "resident_bytes": self.description.resident_bytes,
        }

    def close(self) -> None:
        self.client.close()
        if self.process is not None:
            self.process.terminate()


class DeviceMembers:
    """Devices in the order of the settings. `served` is what every one of them serves."""

    def __init__(
        self,
        settings: NdpSettings,
        requirements: Requirements,
        model_dir: Path,
        digest: str,
        replicas: Path | None,
        engine_cores: set[int],
    ) -> None:
        """engine_cores: of all ranks. Raises ConfigError, or what starting and connecting raise, in one sentence."""
        self._settings, self._requirements, self._model_dir, self._digest = settings, requirements, model_dir, digest
        self.replicas = replicas
        self.cores: list[int] = []
        self.each: list[Member] = []
        self._look_at_s = 0.0  # whether the embedded devices live
        try:
            if not settings.running:
                self.cores = compat.device_cores(engine_cores)
                compat.choose_spins()
            for number in range(settings.num_devices):
                self.each.append(self._open(number))
            self.served, *_ = [self._meet(member, self.each[:number]) for number, member in enumerate(self.each)]
        except BaseException:
            self.close()  # nothing else knows the processes that were started
            raise

    @property
    def planned(self) -> PlannedReplicas | None:
        """Whose losses this host plans with."""
        return self._requirements.replicas

    @property
    def deadline_ms(self) -> float:
        return self._settings.deadline_ms

    @property
    def clients(self) -> list[DeviceClient]:
        return [member.client for member in self.each]

    def _open(self, number: int) -> Member:
        settings, keys, process = self._settings, None, None
        part = Part(number, settings.num_devices) if settings.splits_experts else WHOLE
        self._requirements.check_part(part)
        if settings.running:
            address, keys = settings.running[number].address, settings.running[number].keys
        else:
            process = DeviceProcess.spawn(
                self._model_dir,
                self.replicas,
                hardware=settings.preset,
                hardware_overrides=settings.hardware_overrides,
                codes=self._requirements.stored is not None,
                cores=self.cores,
            )
            address = process.address
        file = None if keys is None else Path(keys)
        client = DeviceClient(
            address,
            self._digest,
            deadline_ms=self.deadline_ms,
            accept=partial(self._requirements.check, address, part=part),
            keys=file,
            part=part,
        )
        return Member(address, file, process, client)

    def _meet(self, member: Member, others: Sequence[Member]) -> msg.Served:
        """What the device serves, as those before. Raises ConfigError or what connecting raises, with the address."""
        try:
            welcome = member.client.connect()
        except DeviceError as error:  # what a device says does not name it
            said = f"at {member.address}: {error.message}" if len(self.each) > 1 else error.message
            raise DeviceError(error.code, said, retryable=error.retryable) from None
        with Probe(member.address, keys=member.keys) as probe:
            member.description = probe.describe()
        for other in others:
            assert other.client.welcome is not None
            if other.client.welcome.incarnation == welcome.incarnation:
                raise ConfigError(
                    f"{other.address} and {member.address} are one device: name each device once in ndp setting "
                    "'devices'"
                )
            if (theirs := other.client.welcome.served).widths != welcome.served.widths:
                raise ConfigError(
                    f"the device at {member.address} serves the widths {sorted(welcome.served.expert_bytes)}, the one "
                    f"at {other.address} serves {sorted(theirs.expert_bytes)}: start them alike"
                )
        return welcome.served

    @contextmanager
    def beside_the_run(self, deadline_ms: float) -> Iterator[DeviceClient]:
        """The first device by another connection, which has its own plans and its own simulated clock there. Requests
        on that connection leave no trace in the run. Raises what connecting raises."""
        first = self.each[0]
        client = DeviceClient(
            first.address,
            self._digest,
            deadline_ms=deadline_ms,
            name="vllm-ndp prices",
            keys=first.keys,
            part=first.client.part,
        )
        try:
            client.connect()
            yield client
        finally:
            client.close()

    @property
    def pids(self) -> list[int | None]:
        """Process id of each device that we started."""
        return [member.pid for member in self.each]

    @property
    def address(self) -> str:
        return ", ".join(member.address for member in self.each)

    @property
    def description(self) -> msg.Description:
        """Description of the first device; the others serve the same."""
        return self.descriptions[0]

    @property
    def descriptions(self) -> list[msg.Description]:
        return [member.description for member in self.each if member.description is not None]

    @property
    def up(self) -> tuple[bool, ...]:
        """[D], which devices are up now."""
        return tuple(member.client.state == "up" for member in self.each)

    @property
    def simulate(self) -> bool:
        """Whether all of them have simulated times; real hardware has none."""
        return all(one.config_hash for one in self.descriptions)

    def revive(self) -> None:
        """Between steps: start embedded devices that died again; their clients find them when they are ready.

        To ask the system costs 10 us, so devices that answer are asked after now and then only.
        """
        if self._settings.running or (time.monotonic() < self._look_at_s and all(self.up)):
            return
        self._look_at_s = time.monotonic() + _LOOK_EVERY_S
        for member in self.each:
            if member.process is not None and member.process.poll() is not None:
                member.process.respawn()

    def look(self, state: str) -> dict[str, Any]:
        """The device's state and calls now, its memory as of the greeting; of several the sums, and `devices` with
        each."""
        each = [member.look() for member in self.each]
        if len(each) == 1:
            return each[0]
        calls = {name: sum(one["calls"][name] for one in each) for name in each[0]["calls"]}
        reasons = "; ".join(f"{one['address']}: {one['reason']}" for one in each if one["reason"])
        whole = {"state": state, "reason": reasons, "address": self.address, "pid": each[0]["pid"]}
        return whole | {"calls": calls, "resident_bytes": sum(one["resident_bytes"] for one in each), "devices": each}

    def close(self) -> None:
        for member in self.each:
            member.close()
