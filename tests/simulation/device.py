"""A device's lives: the program itself under simulated time, and what a history may do to it.

It is killed, stopped, made to hang, to lie and to serve another model; of its books it checks after each turn that they
agree. Knows no host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from failpoints import Failpoints
from numpy.typing import NDArray

from ndp_device.handler import Handler
from ndp_device.kernels.native import NativeKernel
from ndp_device.server import Server
from ndp_device.timing.spec import load_hardware
from simulation.material import store
from simulation.network import Network, Process, SimClock, SimServer
from simulation.world import MS, US, World


class SlowKernel:
    """The kernel, and how long it takes in simulated time."""

    def __init__(self, kernel: Any, device: Device) -> None:
        self._kernel, self._device = kernel, device
        self.name = kernel.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def execute(self, *arguments: Any) -> NDArray[np.float32]:
        device = self._device
        device.process.spent_ns += device.kernel_ns + device.hang_ns
        device.hang_ns = 0
        device.num_computed += 1
        y: NDArray[np.float32] = self._kernel.execute(*arguments)
        return y


class Device:
    """A device's lives, one after the other. Whatever arrives wakes it; a request keeps it busy for a while."""

    def __init__(self, world: World, network: Network) -> None:
        self._world, self._network = world, network
        self.kernel_ns = world.rng.choice((5 * US, 200 * US, 2 * MS))
        self.hang_ns = 0
        self.num_computed = 0
        self.model = 0
        self.is_stopped = False
        self.failpoints: Failpoints | None = None
        self.process = Process(world)
        self.transport: SimServer | None = None
        self.handler: Handler | None = None
        self._server: Server | None = None
        self._busy_until_ns = 0
        self._turn_at_ns: int | None = None

    @property
    def is_alive(self) -> bool:
        return self.transport is not None

    @property
    def is_busy(self) -> bool:
        return self._world.now_ns < self._busy_until_ns

    def start(self, model: int = 0) -> None:
        """A new life, with the right model (0) or another one."""
        world = self._world
        self.process = Process(world)
        self.process.awaken = self.wake
        self.is_stopped, self._busy_until_ns, self._turn_at_ns = False, 0, None
        kernel = SlowKernel(NativeKernel(), self)
        self.transport = SimServer(self._network, self.process)
        self.model = model
        self.handler = Handler(store(model), kernel, load_hardware("h100-ndp512"))
        self.handler.incarnation = f"{world.rng.getrandbits(128):032x}"
        self.transport.passing = lambda reply: [reply] if self.failpoints is None else self.failpoints(reply)
        self._server = Server(self.transport, self.handler, clock=SimClock(self.process))
        self.wake()

    def kill(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.transport = self.handler = self._server = None

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        self.wake()

    def wake(self, delay_ns: int = 0) -> None:
        """Take a turn, not before the one under way has ended."""
        at_ns = max(self._world.now_ns + delay_ns, self._busy_until_ns)
        if self._turn_at_ns is not None and self._turn_at_ns <= at_ns:
            return
        self._turn_at_ns = at_ns
        life = self.process
        self._world.after(at_ns - self._world.now_ns, lambda: self._turn(life, at_ns))

    def _turn(self, life: Process, at_ns: int) -> None:
        if self._turn_at_ns != at_ns or life is not self.process:
            return
        self._turn_at_ns = None
        transport, server = self.transport, self._server
        if transport is None or server is None or self.is_stopped:
            return
        life.spent_ns = 0
        received = server.next_request(0)
        if received is not None:
            life.spent_ns += 3 * US
            self._world.note(received.client)
            server.serve(received)
        spent, life.spent_ns = life.spent_ns, 0
        self._busy_until_ns = self._world.now_ns + spent
        self.check_books()
        self.wake(0 if received is not None or transport.has_arrived else 20 * MS)

    def check_books(self) -> None:
        transport, handler, server = self.transport, self.handler, self._server
        assert transport is not None
        assert handler is not None
        assert server is not None
        queue = server._queue
        accounts = list(queue._accounts.values())
        assert queue.num_waiting == sum(len(account.waiting) for account in accounts)
        assert queue._bytes == sum(len(f) for a in accounts for received in a.waiting for f in received.frames)
        assert set(queue._waiting) <= set(transport.links)
        assert set(handler._clients) <= set(transport.links)
