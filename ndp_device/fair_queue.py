"""Whose request is next: the host's that was served least (start-time fair queueing over measured time).

A host that has computed has an account of its own. All others share one, so many newcomers together cost a host as much
as one newcomer would. Within an account requests are served as they came. Pure: no socket, no clock.
"""

from __future__ import annotations

from collections import Counter, deque

from ndp_device.transport.base import Received

MAX_WAITING = 64
"""Requests of one client that may wait here. A host has 8 Execute in flight at most: who sends more is wrong."""

MAX_WAITING_BYTES = 512 << 20
"""Most bytes of waiting requests of all clients. Above it the device reads nothing more, and the transport's bounded
queues fill."""

GOES_ON_NS = 1_000_000_000
"""Time after its last request in which a host that computes is expected to continue."""

_NEWCOMERS = b""


class _Account:
    def __init__(self, spent_ns: float) -> None:
        self.spent_ns = spent_ns  # the start tag of its next request
        self.waiting: deque[Received] = deque()
        self.computed_ns = 0


class FairQueue:
    """The requests that wait."""

    def __init__(self) -> None:
        self._spent_ns = 0.0  # the start tag of the request that is or was being served
        self._accounts: dict[bytes, _Account] = {_NEWCOMERS: _Account(0.0)}
        self._waiting: Counter[bytes] = Counter()  # requests of each client
        self._bytes = 0

    @property
    def num_waiting(self) -> int:
        return self._waiting.total()

    @property
    def is_full(self) -> bool:
        return self._bytes > MAX_WAITING_BYTES

    def add(self, received: Received) -> bool:
        """False: too many of this client wait already."""
        client = received.client
        if self._waiting[client] >= MAX_WAITING:
            return False
        self._waiting[client] += 1
        self._bytes += _size(received)
        self._account(client).waiting.append(received)
        return True

    def next(self) -> Received | None:
        account = min(
            (account for account in self._accounts.values() if account.waiting),
            key=lambda account: account.spent_ns,
            default=None,
        )
        if account is None:
            return None
        self._spent_ns = account.spent_ns = max(account.spent_ns, self._spent_ns)
        received = account.waiting.popleft()
        self._took(received)
        return received

    def served(self, client: bytes, cost_ns: int, now_ns: int, *, computed: bool) -> None:
        """How long the request last taken was worked on, and whether it was an Execute."""
        self._account(client).spent_ns = self._spent_ns + cost_ns
        if computed:
            if client not in self._accounts:
                self._accounts[client] = self._opened(client)
            self._accounts[client].computed_ns = now_ns

    def others_compute(self, client: bytes, now_ns: int) -> bool:
        """Whether another host than this one has computed lately, and so is likely to wait for what is done now."""
        return any(
            account.computed_ns > now_ns - GOES_ON_NS
            for name, account in self._accounts.items()
            if name not in (client, _NEWCOMERS)
        )

    def forget(self, client: bytes) -> None:
        """Its connection is gone, and nobody would read its answers."""
        if self._waiting[client]:
            account = self._account(client)
            for received in account.waiting:
                if received.client == client:
                    self._took(received)
            account.waiting = deque(received for received in account.waiting if received.client != client)
        self._accounts.pop(client, None)
        self._waiting.pop(client, None)

    def _account(self, client: bytes) -> _Account:
        return self._accounts.get(client) or self._accounts[_NEWCOMERS]

    def _opened(self, client: bytes) -> _Account:
        """Open an account for this client. Its earlier requests wait there, not with the newcomers."""
        newcomers, account = self._accounts[_NEWCOMERS], _Account(self._spent_ns)
        account.waiting.extend(received for received in newcomers.waiting if received.client == client)
        newcomers.waiting = deque(received for received in newcomers.waiting if received.client != client)
        return account

    def _took(self, received: Received) -> None:
        self._waiting[received.client] -= 1
        self._bytes -= _size(received)


def _size(received: Received) -> int:
    return sum(map(len, received.frames))
