"""Peers that never compute: they ping, flood, come and go, greet, send garbage, and leave answers unread."""

import numpy as np
from small_checkpoint import EXPERTS, LAYERS

from ndp_device.common.errors import DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from simulation.network import Network, Process, SimTransport
from simulation.world import MS, World


class Stranger:
    """A peer that never computes. Acts now and then; waits for nothing."""

    def __init__(self, world: World, network: Network, kind: str) -> None:
        self._world, self._network, self._kind = world, network, kind
        self._process = Process(world)
        self._transport: SimTransport | None = None
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
        except (DeviceUnavailable, RemoteProtocolError):
            self._process.die()
            self._transport = None
        self._world.after(self._world.rng.randrange(1 * MS, 25 * MS), self._act)

    def _speaks(self) -> SimTransport:
        self._transport = self._transport or SimTransport(self._network, self._process)
        return self._transport

    def _ping(self, reads: bool = True, count: int = 12) -> None:
        transport = self._speaks()
        for _ in range(count):
            self._number += 1
            transport.send(codec.encode(msg.Ping(self._number)))
        while reads and transport.receive(0.0) is not None:
            pass

    def _pinger(self) -> None:
        self._ping()

    def _deaf(self) -> None:
        self._ping(reads=False, count=40)

    def _flood(self) -> None:
        self._ping(count=200)

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
        while transport.receive(0.0) is not None:
            pass

    def _garbage(self) -> None:
        rng = self._world.rng
        self._speaks().send((rng.randbytes(rng.randrange(5, 400)), bytearray(rng.randbytes(rng.randrange(400)))))


STRANGERS = ("pinger", "deaf", "flood", "churn", "greeter", "garbage")
