"""Two hosts that always have requests waiting get equal parts of the device's time, whatever their requests cost."""

from __future__ import annotations

import time

import pytest

from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport.zmq_client import ZmqTransport
from ndp_device.transport.zmq_server import ZmqServer

PATIENCE_S = 60
WAITING = 4


def host(server: ZmqServer, number: int) -> ZmqTransport:
    """One whose requests carry its number, with some of them on their way."""
    transport, deadline = ZmqTransport(server.address), time.monotonic() + PATIENCE_S
    for _ in range(WAITING):
        while not transport.send(codec.encode(msg.Ping(number))):
            server._connections.look(0.001)
            assert time.monotonic() < deadline
    return transport


def charged(server: ZmqServer, hosts: dict[int, ZmqTransport], cost_ns: dict[int, int], turns: int) -> dict[int, int]:
    """What each host was charged after so many requests; a host asks again as soon as it was served."""
    spent = dict.fromkeys(hosts, 0)
    deadline = time.monotonic() + PATIENCE_S
    for _ in range(turns):
        while sum(len(peer.connection.waiting) > 0 for peer in server._peers.values()) < len(hosts):
            server._connections.look(0.001)
            assert time.monotonic() < deadline
        received = server.receive(50)
        assert received is not None
        number = codec.peek_id(received.frames[0])
        server.served(received.client, cost_ns[number], computed=True, greeted=True)
        spent[number] += cost_ns[number]
        hosts[number].send(codec.encode(msg.Ping(number)))
    return spent


@pytest.mark.parametrize("cost_ns", [{1: 3_000_000, 2: 3_000_000}, {1: 40_000_000, 2: 1_000_000}, {1: 7, 2: 5, 3: 11}])
def test_hosts_are_charged_alike_but_for_one_request(server: ZmqServer, cost_ns: dict[int, int]) -> None:
    """Start-time fair queueing: at any time two hosts that always ask differ by their largest requests at most. A host
    that is new is taken as served for a millisecond already."""
    hosts = {number: host(server, number) for number in cost_ns}
    charged(server, hosts, cost_ns, 3 * len(hosts))  # newcomers catch up
    spent = charged(server, hosts, cost_ns, 400)
    assert max(spent.values()) - min(spent.values()) <= sum(cost_ns.values()) + 2_000_000
    for transport in hosts.values():
        transport.close()
