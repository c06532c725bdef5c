"""One history: a device that dies, stops, hangs and lies, hosts that decode with it, strangers, a network that fails.

All of it is the program itself: DeviceClient, Server, its turns and Handler, the codec between them. Simulated are
time, the transport, and how long a computation takes. What must hold, whatever happens:

    1  a result that is used is the right one to the bit, with the simulated time of its own request
    2  a call ends within its deadline; what does not wait (poll, begin_execute) takes no time
    3  nothing but DeviceUnavailable comes out of a call
    4  every call is counted once; nothing is used that was not computed
    5  a device that serves another model is never used
    6  no peer ends the device, and its books agree: what waits, who is connected, who has a session
    7  hosts that compute wait for a bounded time, whatever strangers do
    8  when all faults are over, every host is served again, under its own plan, within 5 s
    9  afterwards nothing is left: no connection, no session, no held byte
    10 a device that is up has the plan that its host has now, whenever that was activated

Here is the course of a history: which faults come when, how they end, what is left. Device, host and stranger have
files of their own. Left out: shared memory, keys, and what libzmq does.
"""

import random
from dataclasses import dataclass

from failpoints import Failpoint, Failpoints

from simulation.device import Device
from simulation.host import Host
from simulation.network import Network
from simulation.stranger import STRANGERS, Stranger
from simulation.world import MS, US, Program, S, World

LIES = (
    *("drop", "dup", "stale", "bit_flip", "header_flip", "truncate", "extra_frame", "garbage", "wrong_id"),
    *("wrong_epoch", "wrong_incarnation", "wrong_shape", "wrong_dtype", "nan", "other_major"),
)
HONEST_WAIT_NS = 60 * MS
"""Of a host that computes, among strangers and on a whole network: far above what fair queueing costs it."""

FAULTS = ("kill", "kill_long", "stop", "hang", "reset", "partition", "other_model", "lie", "flip", "restart_host")


@dataclass
class History:
    """One seed. `only`: the kinds of its faults, where a test asks for some; else the seed has a mix of its own."""

    seed: int
    calls: int = 40
    only: tuple[str, ...] = ()

    def host_dies(self) -> bool:
        if not self._hosts_to_kill or self.is_quiet:
            return False
        self._hosts_to_kill -= 1
        return True

    def run(self) -> World:
        """Raises whatever went wrong."""
        world = self.world = World(self.seed)
        rng = world.rng
        network = self.network = Network(world)
        self.device = Device(world, network)
        self._hosts_to_kill = 0
        self.is_quiet = False
        self.has_faults = rng.random() < 0.8
        kinds = rng.sample(STRANGERS, rng.choice((0, 0, 1, 3))) if self.has_faults else list(STRANGERS)
        if not self.has_faults:
            network.latency_ns, network.jitter_ns = 50 * US, 20 * US
            self.device.kernel_ns = 200 * US
        if rng.random() < 0.9:
            self.device.start()
        else:
            world.after(rng.randrange(200 * MS), self._start)
        self.strangers = [Stranger(world, network, kind) for kind in kinds for _ in range(rng.choice((1, 3)))]
        deadline_ns = rng.choice((20 * MS, 100 * MS, 250 * MS)) if self.has_faults else 250 * MS
        hosts = [
            Host(world, network, self, random.Random(rng.random()), self.calls, deadline_ns)
            for _ in range(rng.choice((1, 1, 1, 2, 3)))
        ]
        # every seed has its own mix of faults: all of them at once hide each other ("swizzle")
        self.kinds = rng.sample(FAULTS, rng.randrange(1, len(FAULTS))) if self.has_faults else []
        if self.only and self.has_faults:
            self.kinds = list(self.only)
        self.num_faults = rng.choice((3, 10, 30)) if self.has_faults else 0
        world.after(rng.randrange(1, 60 * MS), self._fault)
        world.run(*(host.run for host in hosts))
        self.check_end(hosts)
        return world

    def _start(self) -> None:
        if not self.device.is_alive:
            self.device.start()

    def _fault(self) -> None:
        world, device, network, rng = self.world, self.device, self.network, self.world.rng
        if self.num_faults <= 0:
            self._heal()
            return
        self.num_faults -= 1
        kind = rng.choice(self.kinds)
        duration = rng.choice((1 * MS, 20 * MS, 300 * MS))
        match kind:
            case "kill" | "kill_long" | "other_model":
                device.kill()
                model = int(kind == "other_model")
                delay = rng.choice((0, 5 * MS, 80 * MS)) * (10 if kind == "kill_long" else 1)
                world.after(delay, lambda: None if device.is_alive else device.start(model))
            case "stop":
                device.stop()
                world.after(duration, device.go_on)
            case "hang":
                device.hang_ns = rng.choice((50 * MS, 3 * S))
            case "reset":
                if network.links:
                    link = rng.choice(list(network.links))
                    link.end()
                    link.lose()
            case "partition":
                network.held_until_ns = max(network.held_until_ns, world.now_ns + duration)
            case "lie":
                points = [Failpoint(lie, 0.3 / len(LIES), 0) for lie in LIES]
                device.failpoints = Failpoints(points, rng.getrandbits(32))
                world.after(duration, self._be_honest)
            case "flip":
                network.flips = rng.choice((0.01, 0.2))
                world.after(duration, self._be_clean)
            case "restart_host":
                self._hosts_to_kill += 1
        world.after(rng.choice((2 * MS, 20 * MS, 150 * MS)), self._fault)

    def _be_honest(self) -> None:
        self.device.failpoints = None

    def _be_clean(self) -> None:
        self.network.flips = 0.0

    def _heal(self) -> None:
        """From now on nothing goes wrong; strangers leave, except where they are what is tested."""
        device, world = self.device, self.world
        self._be_honest()
        self._be_clean()
        if device.is_stopped:
            device.go_on()
        if device.handler is None or device.model != 0:
            device.kill()
            device.start()
        device.hang_ns = 0
        if device.is_busy or world.now_ns < self.network.held_until_ns:
            world.after(50 * MS, self._heal)
            return
        if self.has_faults:
            for stranger in self.strangers:
                stranger.leave()
        self.is_quiet = True

    def check_end(self, hosts: list[Host]) -> None:
        world, device = self.world, self.device
        assert sum(host.served for host in hosts) <= device.num_computed
        if not self.has_faults:
            slowest_ns = max(host.slowest_ns for host in hosts)
            assert slowest_ns < HONEST_WAIT_NS, f"a host that computes waited {slowest_ns / MS:.1f} ms for its answer"
            assert not any(host.unserved for host in hosts), "strangers cost a call"
        for stranger in self.strangers:
            stranger.leave()
        Program(world).sleep(1 * S)
        transport, handler = device.transport, device.handler
        assert transport is not None
        assert handler is not None
        device.check_books()
        assert not transport.links, "connections are left"
        assert not handler._clients, "sessions are left"
        assert not self.network.links, "ends of connections are left"
