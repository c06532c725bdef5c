"""One history: a device that dies, stops, hangs and lies, hosts that decode with it, strangers, a network that fails.

All of it is the program itself: DeviceClient over ZmqTransport, ZmqServer under Server and Handler, the codec between
them. Simulated are time, sockets, and how long a computation takes. What must hold, whatever happens:

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

    11 where the device wants keys, nothing is ever answered to who has none or others

One seed in four has keys. Left out: shared memory, and the device's second thread, which looks after sockets while it
computes.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from small_checkpoint import EXPERTS, HIDDEN, LAYERS, write_small_checkpoint

from ndp_device.errors import DeviceError, DeviceUnavailable, RemoteProtocolError
from ndp_device.failpoints import Failpoint, Failpoints
from ndp_device.handler import Handler
from ndp_device.kernels import load_kernel
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.replicas.store import ExpertStore
from ndp_device.server import Server
from ndp_device.timing.spec import load_hardware
from ndp_device.transport import zmtp
from ndp_device.transport.address import Address
from ndp_device.transport.keys import DeviceKeys, HostKeys, make_keys
from ndp_device.transport.zmq_client import ZmqTransport
from ndp_device.transport.zmq_server import MAX_HELD_BYTES, MAX_PEERS, ZmqServer
from ndp_device.widths import FULL_PRECISION_BITS
from simulation.network import Network, Process, SimClock, SimSystem
from simulation.world import MS, US, Program, S, World
from vllm_ndp.device.client import MAX_IN_FLIGHT, DeviceClient, ExecuteHandle

ADDRESS = "tcp://127.0.0.1:7777"
LIES = (
    *("drop", "dup", "stale", "bit_flip", "header_flip", "truncate", "extra_frame", "garbage", "wrong_id"),
    *("wrong_epoch", "wrong_incarnation", "wrong_shape", "wrong_dtype", "nan", "other_major"),
)
BACK_WITHIN_NS = 5 * S
HONEST_WAIT_NS = 60 * MS
"""Of a host that computes, among strangers and on a whole network: far above what fair queueing costs it."""

FAULTS = ("kill", "kill_long", "stop", "hang", "reset", "partition", "other_model", "lie", "flip", "restart_host")


@dataclass(frozen=True)
class Keys:
    device: DeviceKeys
    host: HostKeys
    stranger: HostKeys
    """Knows the device, which does not know it."""


@cache
def _keys() -> Keys:
    folder = tempfile.TemporaryDirectory(prefix="ndp-simulation-")
    _folders.append(folder)
    ours, others = Path(folder.name) / "ours", Path(folder.name) / "others"
    for directory in (ours, others):
        make_keys(directory, "host")
    host = HostKeys.read(ours / "host.key")
    stranger = replace(HostKeys.read(others / "host.key"), device=host.device)
    return Keys(DeviceKeys.read(ours), host, stranger)


@dataclass(frozen=True)
class Call:
    layer: int
    x: NDArray[np.float32]
    rows: NDArray[np.int32]
    experts: NDArray[np.int32]
    gates: NDArray[np.float32]
    y: NDArray[np.float32]  # what a device must answer, to the bit


@cache
def _store(seed: int) -> ExpertStore:
    folder = tempfile.TemporaryDirectory(prefix="ndp-simulation-")
    _folders.append(folder)
    return ExpertStore(write_small_checkpoint(Path(folder.name) / "model", seed=seed), None, kernel=load_kernel("auto"))


_folders: list[tempfile.TemporaryDirectory[str]] = []


@cache
def _calls() -> list[Call]:
    """Random rows on random experts; the answers come from the kernel, called directly."""
    rng, kernel, store = np.random.default_rng(5), load_kernel("auto"), _store(0)
    calls = []
    for number in range(24):
        layer, count = number % LAYERS, int(rng.integers(1, 5))
        x = rng.standard_normal((int(rng.integers(1, 4)), HIDDEN), np.float32)
        rows = rng.integers(0, len(x), count).astype(np.int32)
        experts = rng.integers(0, EXPERTS, count).astype(np.int32)
        gates = rng.uniform(0, 1, count).astype(np.float32)
        distinct = list(dict.fromkeys(experts.tolist()))
        places = np.array([distinct.index(expert) for expert in experts], np.int32)
        prepared = [store.get(layer, expert, FULL_PRECISION_BITS) for expert in distinct]
        y = kernel.execute(x, prepared, rows, places, gates)
        calls.append(Call(layer, x, rows, experts, gates, y))
    return calls


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

    def __init__(self, world: World, network: Network, keys: Keys | None) -> None:
        self._world, self._network, self._keys = world, network, keys
        self.kernel_ns = world.rng.choice((5 * US, 200 * US, 2 * MS))
        self.hang_ns = 0
        self.num_computed = 0
        self.model = 0
        self.is_stopped = False
        self.failpoints: Failpoints | None = None
        self.process = Process(world)
        self.transport: ZmqServer | None = None
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
        system, kernel = SimSystem(self._network, self.process), SlowKernel(load_kernel("auto"), self)
        self.transport = ZmqServer(ADDRESS, self._keys and self._keys.device, system=system)
        self.model = model
        self.handler = Handler(_store(model), kernel, load_hardware("h100-ndp512"))
        self.handler.incarnation = f"{world.rng.getrandbits(128):032x}"
        lies = partial(_lies, self)
        self._server = Server(self.transport, self.handler, failpoints=lies, clock=SimClock(self.process))
        self.wake()

    def kill(self) -> None:
        if self.transport is not None:
            self.transport._listener.close()
            self.process.die()
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
        received = transport.receive(0)
        if received is not None:
            life.spent_ns += 3 * US
            self._world.note(received.client)
            server.serve(received)
        spent, life.spent_ns = life.spent_ns, 0
        self._busy_until_ns = self._world.now_ns + spent
        self.check_books()
        # a look may have taken a part of what there was to read only
        self.wake(
            0 if received is not None or transport._poll.poll(0.0) else 1 * MS if transport.num_waiting else 20 * MS
        )

    def check_books(self) -> None:
        transport, handler = self.transport, self.handler
        assert transport is not None
        assert handler is not None
        peers = transport._peers
        assert transport.num_waiting == sum(len(peer.connection.waiting) for peer in peers.values())
        assert sorted(transport._by_fd) == sorted(peer.connection.fileno() for peer in peers.values())
        assert len(peers) <= MAX_PEERS
        assert sum(peer.connection.held_bytes for peer in peers.values()) <= MAX_HELD_BYTES
        assert set(handler._clients) - set(peers) <= set(transport._gone)


def _lies(device: Device, reply: codec.Frames) -> Sequence[codec.Frames]:
    return [reply] if device.failpoints is None else list(device.failpoints(reply))


@dataclass
class Host:
    """Calls one after the other or several at once, plans in between; all of it checked."""

    world: World
    network: Network
    device: Device
    history: History
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
        if not self.history.has_faults:
            self.client.connect(1.0)
        self.plan()
        while self.step < self.num_calls:
            if self.rng.random() < 0.05:
                self.plan()
            if self.history.host_dies(self):
                self.process.die()
                self.connect()
                self.epoch = 0
                self.plan()
            self.some_calls(self.rng.choice((1, 1, 1, 2, 8)))
            self.sleep(self.rng.choice((0, 100 * US, 2 * MS, 30 * MS)))
        while not self.history.is_quiet:
            self.some_calls(1)
            self.sleep(20 * MS)
        end_ns = self.world.now_ns + BACK_WITHIN_NS
        before = self.served
        while self.served < before + 3:
            assert self.world.now_ns < end_ns, f"not served again: {self.client.reason} ({self.client.stage})"
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
            _store(0).model_digest,
            deadline_ms=self.deadline_ns / MS,
            control_deadline_ms=500,
            transport=partial(
                ZmqTransport,
                system=SimSystem(self.network, self.process),
                keys=self.history.keys and self.history.keys.host,
            ),
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
        try:
            self.client.install_plan(self.epoch, flags)
        except (DeviceUnavailable, DeviceError):
            self.history.note("plan while down")
        self.client.activate_plan(self.epoch)
        self.at_once(self.client.poll)

    def some_calls(self, count: int) -> None:
        pending: deque[tuple[Call, ExecuteHandle, int]] = deque()
        for _ in range(min(count, MAX_IN_FLIGHT)):
            self.step += 1
            call = self.rng.choice(_calls())
            bits = np.full(len(call.rows), FULL_PRECISION_BITS, np.uint8)
            begun_ns = self.world.now_ns
            handle = self.at_once(
                lambda call=call, bits=bits: self.client.begin_execute(
                    call.layer, self.step, self.step * 10**6, call.x, call.rows, call.experts, bits, call.gates
                )
            )
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


class Stranger:
    """A peer that never computes. Acts now and then; waits for nothing."""

    def __init__(self, world: World, network: Network, kind: str, keys: Keys | None) -> None:
        self._world, self._network, self._kind, self._keys = world, network, kind, keys
        self._process = Process(world)
        self._system = SimSystem(network, self._process)
        self._transport: ZmqTransport | None = None
        self._raw: Any = None
        self._number = 0
        self.is_gone = False
        world.after(world.rng.randrange(20 * MS), self._act)

    def leave(self) -> None:
        self.is_gone = True
        self._process.die()

    def _act(self) -> None:
        if self.is_gone:
            return
        try:
            getattr(self, f"_{self._kind}")()
        except (DeviceUnavailable, RemoteProtocolError, OSError):
            self._process.die()
            self._transport = self._raw = None
        self._world.after(self._world.rng.randrange(1 * MS, 25 * MS), self._act)

    def _speaks(self) -> ZmqTransport:
        if self._transport is None:
            own = self._keys.stranger if self._keys is not None and self._world.rng.random() < 0.5 else None
            self._transport = ZmqTransport(ADDRESS, system=self._system, keys=own)
        return self._transport

    def _hears(self, transport: ZmqTransport) -> bool:
        heard = transport.receive(0.0) is not None
        assert not (heard and self._keys), "a stranger was answered"
        return heard

    def _open(self) -> Any:
        if self._raw is None:
            self._raw = self._system.connect(Address.parse(ADDRESS))
        return self._raw

    def _ping(self, reads: bool = True, count: int = 12) -> None:
        transport = self._speaks()
        for _ in range(count):
            self._number += 1
            transport.send(codec.encode(msg.Ping(self._number)))
        while reads and self._hears(transport):
            pass

    def _pinger(self) -> None:
        self._ping()

    def _deaf(self) -> None:
        self._ping(reads=False, count=40)

    def _churn(self) -> None:
        self._ping(count=1)
        if self._world.rng.random() < 0.5:
            self._process.die()
            self._transport = None

    def _greeter(self) -> None:
        """Says Hello and plans, and never computes."""
        transport = self._speaks()
        self._number += 1
        transport.send(codec.encode(msg.Hello(self._number, versions=(msg.VERSION, msg.VERSION), client="stranger")))
        plan = {"replicas": np.full((LAYERS, EXPERTS), 16, np.uint8)}
        transport.send(codec.encode(msg.InstallPlan(self._number + 1, epoch=self._number, expected_epoch=0), plan))
        while self._hears(transport):
            pass

    def _garbage(self) -> None:
        self._open().sendmsg([self._world.rng.randbytes(self._world.rng.randrange(1, 400))])

    def _half(self) -> None:
        raw = self._open()
        if self._number == 0:
            raw.sendmsg([zmtp.GREETING[: self._world.rng.randrange(64)]])
            self._number = 1

    def _endless(self) -> None:
        """A message that has begun, and goes on by a frame at a time."""
        raw = self._open()
        if self._number == 0:
            raw.sendmsg([zmtp.GREETING + zmtp.HOST_READY])
        self._number += 1
        raw.sendmsg([b"\x01\x20" + bytes(32)])


STRANGERS = ("pinger", "deaf", "churn", "greeter", "garbage", "half", "endless")


@dataclass
class History:
    """One seed. `faults`: none where only strangers disturb."""

    seed: int
    calls: int = 40
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> Keys | None:
        return _keys() if self.seed % 4 == 1 else None

    def note(self, what: str) -> None:
        self.counted[what] = self.counted.get(what, 0) + 1

    def host_dies(self, host: Host) -> bool:
        if not self._hosts_to_kill or self.is_quiet:
            return False
        self._hosts_to_kill -= 1
        return True

    def run(self) -> World:
        """Raises whatever went wrong."""
        world = self.world = World(self.seed)
        rng = world.rng
        network = self.network = Network(world)
        self.device = Device(world, network, self.keys)
        self._hosts_to_kill = 0
        self.is_quiet = False
        self.has_faults = rng.random() < 0.8
        kinds = rng.sample(STRANGERS, rng.choice((0, 0, 1, 3))) if self.has_faults else list(STRANGERS)
        if not self.has_faults:
            network.latency_ns, network.jitter_ns, network.most_at_once = 50 * US, 20 * US, 1 << 20
            network.capacity = 208 << 10
            self.device.kernel_ns = 200 * US
        if rng.random() < 0.9:
            self.device.start()
        else:
            world.after(rng.randrange(200 * MS), self._start)
        self.strangers = [
            Stranger(world, network, kind, self.keys) for kind in kinds for _ in range(rng.choice((1, 3)))
        ]
        deadline_ns = rng.choice((20 * MS, 100 * MS, 250 * MS)) if self.has_faults else 250 * MS
        hosts = [
            Host(world, network, self.device, self, random.Random(rng.random()), self.calls, deadline_ns)
            for _ in range(rng.choice((1, 1, 1, 2, 3)))
        ]
        # every seed has its own mix of faults: all of them at once hide each other ("swizzle")
        self.kinds = rng.sample(FAULTS, rng.randrange(1, len(FAULTS))) if self.has_faults else []
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
        self.note(kind)
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
                ends = [end for end in network.ends.values() if hasattr(end, "reset")]
                if ends:
                    rng.choice(ends).reset()
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
        assert not transport._peers, "connections are left"
        assert not handler._clients, "sessions are left"
        assert len(self.network.ends) == 1, "sockets are left"
        self.note("served")
        self.counted["served"] = sum(host.served for host in hosts)
        self.counted["unserved"] = sum(host.unserved for host in hosts)


LOGGERS = ("ndp_device", "vllm_ndp")


def silence() -> None:
    """Devices and hosts say much about faults; a history says it all again."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
