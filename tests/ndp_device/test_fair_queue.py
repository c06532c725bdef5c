"""Whose request is next: hosts that compute are charged alike, newcomers together like one of them."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ndp_device import server
from ndp_device.server import FairQueue
from ndp_device.transport.base import Received


def request(client: bytes, size: int = 0) -> Received:
    return Received(client, (b"header", bytes(size)), None, 0)


def served(waiting: FairQueue, cost_ns: int = 10, *, computed: bool = True) -> bytes:
    """Whose request was next; it cost so much."""
    received = waiting.next()
    assert received is not None
    waiting.served(received.client, cost_ns, 0, computed=computed)
    return received.client


def charged(waiting: FairQueue, cost_ns: dict[bytes, int], count: int, computed: set[bytes]) -> Counter[bytes]:
    """What each was charged after so many requests; who was served asks again at once."""
    spent = Counter[bytes]()
    for _ in range(count):
        received = waiting.next()
        assert received is not None
        client = received.client
        waiting.served(client, cost_ns[client], 0, computed=client in computed)
        spent[client] += cost_ns[client]
        waiting.add(request(client))
    return spent


@pytest.mark.parametrize("cost_ns", [{b"a": 3, b"b": 3}, {b"a": 40_000, b"b": 1_000}, {b"a": 7, b"b": 5, b"c": 11}])
def test_hosts_that_compute_are_charged_alike_but_for_one_request(cost_ns: dict[bytes, int]) -> None:
    """Start-time fair queueing: at any time two hosts that always ask differ by their largest requests at most."""
    waiting = FairQueue()
    for client in cost_ns:
        waiting.add(request(client))
    charged(waiting, cost_ns, 3 * len(cost_ns), set(cost_ns))
    spent = charged(waiting, cost_ns, 400, set(cost_ns))
    assert max(spent.values()) - min(spent.values()) <= sum(cost_ns.values())


def test_a_flood_of_one_host_lets_the_request_of_another_pass_at_once() -> None:
    waiting = FairQueue()
    for client in (b"flood", b"honest"):
        waiting.add(request(client))
        served(waiting)
    for _ in range(50):
        waiting.add(request(b"flood"))
    served(waiting)
    waiting.add(request(b"honest"))
    assert served(waiting) == b"honest"


def test_newcomers_together_cost_a_host_what_one_of_them_would() -> None:
    waiting, cost_ns = FairQueue(), {b"%d" % number: 10 for number in range(50)} | {b"host": 10}
    for client in cost_ns:
        waiting.add(request(client))
    charged(waiting, cost_ns, 60, {b"host"})
    spent = charged(waiting, cost_ns, 1000, {b"host"})
    assert spent[b"host"] == pytest.approx(sum(spent.values()) / 2, rel=0.05)


def test_a_host_that_paused_has_no_credit_and_no_debt() -> None:
    waiting = FairQueue()
    cost_ns = {b"a": 10, b"b": 10}
    for client in cost_ns:
        waiting.add(request(client))
    charged(waiting, cost_ns, 10, set(cost_ns))
    waiting.forget(b"none")
    while waiting.num_waiting:
        served(waiting)
    for _ in range(40):
        waiting.add(request(b"a"))
        served(waiting)
    for client in cost_ns:
        waiting.add(request(client))
    spent = charged(waiting, cost_ns, 100, set(cost_ns))
    assert abs(spent[b"a"] - spent[b"b"]) <= 20


def test_a_client_may_have_only_so_many_waiting_and_all_of_them_only_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = FairQueue()
    assert all(waiting.add(request(b"a")) for _ in range(server.MAX_WAITING))
    assert not waiting.add(request(b"a"))
    assert waiting.add(request(b"b"))
    monkeypatch.setattr(server, "MAX_WAITING_BYTES", 1000)
    assert not waiting.is_full
    waiting.add(request(b"b", 1000))
    assert waiting.is_full


@pytest.mark.parametrize("computed", [True, False])
def test_what_a_client_that_is_gone_had_asked_is_not_served(computed: bool) -> None:
    waiting = FairQueue()
    for client in (b"gone", b"here"):
        waiting.add(request(client))
    for _ in range(2):
        served(waiting, computed=computed)
    for client in (b"gone", b"here", b"gone"):
        waiting.add(request(client, 100))
    waiting.forget(b"gone")
    assert waiting.num_waiting == 1
    assert served(waiting, computed=computed) == b"here"
    assert waiting.next() is None
    assert (waiting.num_waiting, waiting._bytes) == (0, 0)


def test_a_host_is_told_of_others_that_computed_lately_and_not_of_itself() -> None:
    waiting = FairQueue()
    waiting.served(b"a", 1, 5 * server.GOES_ON_NS, computed=True)
    assert not waiting.others_compute(b"a", 5 * server.GOES_ON_NS)
    assert waiting.others_compute(b"b", 5 * server.GOES_ON_NS)
    assert not waiting.others_compute(b"b", 7 * server.GOES_ON_NS)


def test_how_long_a_request_lay_behind_others_is_told_with_it() -> None:
    """Each answer takes 200 µs, and the handler drops what waited longer than its host waits for it. Nobody waits for
    the socket while a request does, and who asks without computing does not count as a host that does."""
    told, behind, waits = list[int](), list[int](), list[int]()
    clock, arrives = SimpleNamespace(now_ns=0), [[request(b"a"), request(b"b"), request(b"a")]]

    def reply(client: bytes, frames: Any, damage: Any, waited_us: int) -> tuple[bytes, bytes]:
        told.append(waited_us)
        behind.append(handler.queue_depth)
        handler.num_executed += client == b"a"
        clock.now_ns += 200_000
        return b"", b""

    def receive(timeout_ms: int) -> list[Received]:
        waits.append(timeout_ms)
        return arrives.pop() if arrives else []

    transport = SimpleNamespace(receive=receive, send=lambda client, reply: None, offer_memory=None)
    clock.monotonic_ns = lambda: clock.now_ns
    handler: Any = SimpleNamespace(num_executed=0, reply=reply)
    serving = server.Server(transport, handler, clock=clock)  # type: ignore[arg-type]
    while (received := serving.next_request(250)) is not None:
        serving.serve(received)
    assert (told, behind, waits) == ([0, 200, 400], [2, 1, 0], [250, 0, 0, 250])
    assert handler.others_compute(b"b")
    assert not handler.others_compute(b"a")


def test_a_host_that_asks_once_too_often_is_sent_away_with_the_reason() -> None:
    dropped: list[tuple[bytes, str]] = []
    arrives = [request(b"a")] * (server.MAX_WAITING + 1)
    transport = SimpleNamespace(
        receive=lambda timeout_ms: arrives, drop=lambda *who: dropped.append(who), offer_memory=None
    )
    server.Server(transport, SimpleNamespace()).next_request(0)  # type: ignore[arg-type]
    assert dropped == [(b"a", "64 requests of it wait here, and it sent another")]
