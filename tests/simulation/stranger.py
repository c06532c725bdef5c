"""Peers that never compute: they ping, flood, come and go, greet, send garbage or halves, and never end a message."""

from __future__ import annotations

from typing import Any

import numpy as np
from small_checkpoint import EXPERTS, LAYERS

from ndp_device.errors import DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport import zmtp
from ndp_device.transport.address import Address
from ndp_device.transport.zmq_client import ZmqTransport
from simulation.material import ADDRESS, Keys
from simulation.network import Network, Process, SimSystem
from simulation.world import MS, World


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
