"""A host that decodes with the device: calls one after the other or several at once, plans in between, all checked.

Most of what must hold (life.py) is asserted here, where a call ends. Knows the device by its address only.
"""

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from caller import Call
from small_checkpoint import EXPERTS, LAYERS

from ndp_device.common.errors import DeviceError, DeviceUnavailable
from simulation.material import ADDRESS, calls, store
from simulation.network import Network, Process, SimClock, connecting
from simulation.world import MS, US, Program, S, World
from vllm_ndp.device_client.client import MAX_IN_FLIGHT, DeviceClient
from vllm_ndp.device_client.connection import ExecuteHandle

BACK_WITHIN_NS = 5 * S


class Fate(Protocol):
    """What a host is told of its history."""

    has_faults: bool
    is_quiet: bool
    """No fault will come any more."""

    def host_dies(self) -> bool:
        """Whether it is this host's turn, now."""
        ...


@dataclass
class Host:
    """Calls one after the other or several at once, plans in between; all of it checked."""

    world: World
    network: Network
    fate: Fate
    rng: random.Random
    num_calls: int
    deadline_ns: int
    served: int = 0
    unserved: int = 0
    client: DeviceClient = field(init=False)
    epoch: int = 0
    step: int = 0
    slowest_ns: int = 0

    def run(self, program: Program) -> None:
        self.program = program
        self.process = Process(self.world, program)
        self.connect()
        if not self.fate.has_faults:
            self.client.connect(1.0)
        self.plan()
        while self.step < self.num_calls:
            if self.rng.random() < 0.05:
                self.plan()
            if self.fate.host_dies():
                self.process.die()
                self.connect()
                self.epoch = 0
                self.plan()
            self.some_calls(self.rng.choice((1, 1, 1, 2, 8)))
            self.sleep(self.rng.choice((0, 100 * US, 2 * MS, 30 * MS)))
        while not self.fate.is_quiet:
            self.some_calls(1)
            self.sleep(20 * MS)
        end_ns = self.world.now_ns + BACK_WITHIN_NS
        before = self.served
        while self.served < before + 3:
            assert self.world.now_ns < end_ns, f"not served again: {self.client.reason}"
            self.some_calls(1)
            self.sleep(5 * MS)
        assert self.client.missing == []
        assert self.client.counters.executed == self.used
        assert self.client.counters.unavailable <= self.unserved
        self.client.close()

    def connect(self) -> None:
        self.used = 0
        self.client = DeviceClient(
            ADDRESS,
            store(0).model_digest,
            deadline_ms=self.deadline_ns / MS,
            control_deadline_ms=500,
            transport=connecting(self.network, self.process),
            clock=SimClock(self.process),
            jitter=random.Random(self.rng.random()),
        )

    def sleep(self, duration_ns: int) -> None:
        self.program.sleep(duration_ns)

    def at_once(self, act: Callable[[], Any]) -> Any:
        """What must not wait."""
        before = self.world.now_ns
        result = act()
        assert self.world.now_ns == before, "it waited"
        return result

    def plan(self) -> None:
        self.epoch += self.rng.choice((1, 1, 3))
        flags = np.full((LAYERS, EXPERTS), 1 << 4, np.uint8)
        with suppress(DeviceUnavailable, DeviceError):  # it is given the plan when it is back
            self.client.install_plan(self.epoch, flags)
        self.client.activate_plan(self.epoch)
        self.at_once(self.client.poll)

    def some_calls(self, count: int) -> None:
        pending: deque[tuple[Call, ExecuteHandle, int]] = deque()
        for _ in range(min(count, MAX_IN_FLIGHT)):
            self.step += 1
            call = self.rng.choice(calls())
            begun_ns = self.world.now_ns
            handle = self.at_once(lambda call=call: call.begin(self.client, self.step))
            pending.append((call, handle, begun_ns))
        if self.rng.random() < 0.3:
            self.sleep(self.rng.choice((50 * US, 1 * MS, 10 * MS)))
        while pending:
            self.finish(*pending.popleft())

    def finish(self, call: Call, handle: ExecuteHandle, begun_ns: int) -> None:
        asked_ns = self.world.now_ns
        failed_before = handle.failure is not None
        latest_ns = max(begun_ns + self.deadline_ns, asked_ns) + 20 * US
        try:
            result = self.client.finish_execute(handle)
        except DeviceUnavailable as error:
            self.up_under_our_plan(error)
            self.in_time(begun_ns, latest_ns)
            self.unserved += 1
            assert not failed_before or self.world.now_ns == asked_ns
            self.sleep(2 * MS)  # the host computes it
        else:
            self.in_time(begun_ns, latest_ns)
            assert np.array_equal(result.y, call.y), "a wrong number was used"
            assert result.timing.submit_ps == handle.submit_ps
            self.served += 1
            self.used += 1
            self.slowest_ns = max(self.slowest_ns, self.world.now_ns - begun_ns)

    def up_under_our_plan(self, error: DeviceUnavailable) -> None:
        assert getattr(error.__cause__, "code", "") != "stale_epoch", "up under another plan than its host's"

    def in_time(self, begun_ns: int, latest_ns: int) -> None:
        assert self.world.now_ns <= latest_ns, f"a call took {(self.world.now_ns - begun_ns) / MS:.3f} ms"
