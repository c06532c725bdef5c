"""What peers that never computed may take of the device's time: while a host computes, one part in ten.

The account of it: when one of them may be served, how long their connections may be looked after, in which order these
have their turns, and when they rest. A connection is a number here. Knows no peer, no socket and no clock: whoever asks
says what time it is.
"""

from __future__ import annotations

from collections.abc import Iterator

SHARE = 10
"""While a host computes, all peers that never did get one part in this many of the device's time."""

PAUSE_NS = 1_000_000_000
"""So long after its last request a host that computes is taken to go on."""

WAIT_NS = 250_000_000  # at most, after one of them was served
_CREDIT_NS = 20_000_000  # of time that was not used for their requests
_LOOK_NS = 500_000  # for their connections, before they rest
_LONG_LOOK_NS = 5_000_000  # where the last one was long ago, because this process had no core
_REST_NS = 50_000_000  # at most; the half of a millisecond above earns 4.5
_LAST = 1 << 62


class StrangersTime:
    """The account. One for their requests, one for their bytes: each has its own tenth."""

    def __init__(self) -> None:
        self.host_served_ns = 0  # when one that computes was served last
        self.serves_from_ns = 0
        self.rest_until_ns = 0  # connections of strangers, the listener among them; 0 = they are looked after
        self.resting: dict[int, int] = {}  # those that something has happened to meanwhile, and until when
        self._last_turns: dict[int, int] = {}  # of the same
        self._accepted_first = False
        self._looked_ns = 0

    # -- their requests ------------------------------------------------------------------------------------------

    def have_the_turn(self, now_ns: int, *, others_wait: bool, were_last: bool) -> bool:
        """Never twice in a row while a host that computes waits, and not before one that comes back after a pause."""
        if not others_wait:
            return self.may_be_served(now_ns)
        return now_ns >= self.serves_from_ns and not (were_last or self._hosts_pause(now_ns))

    def may_be_served(self, now_ns: int) -> bool:
        return now_ns >= self.serves_from_ns or self._hosts_pause(now_ns)

    def charge(self, busy_ns: int, now_ns: int) -> None:
        """One of them was served and kept the processor busy for so long."""
        after_ns = max(self.serves_from_ns, now_ns - _CREDIT_NS) + busy_ns * SHARE
        self.serves_from_ns = min(after_ns, now_ns + WAIT_NS)  # else an idle device runs up hours

    def _hosts_pause(self, now_ns: int) -> bool:
        """No host that computes has asked for anything lately."""
        return now_ns > self.host_served_ns + PAUSE_NS

    # -- their connections ---------------------------------------------------------------------------------------

    def begin_look(self, listener: int, now_ns: int) -> int | None:
        """For how much processor time their connections may be looked after now; None: for as much as they need.

        The listener comes first every other time, else last: as many are let in as can be heard.
        """
        length_ns = min((now_ns - self._looked_ns) // SHARE, _LONG_LOOK_NS)
        if not self.rest_until_ns:
            self._looked_ns = now_ns
        self._accepted_first = not self._accepted_first
        self._last_turns[listener] = 0 if self._accepted_first else _LAST
        return None if self._hosts_pause(now_ns) else max(length_ns, _LOOK_NS)

    def order(self, number: int, *, is_ready: bool) -> tuple[bool, int]:
        """Handshakes first, which are short and whose hosts give up soon; then whose last turn was longest ago."""
        return is_ready, self._last_turns.get(number, 0)

    def has_turn(self, number: int, now_ns: int) -> None:
        self._last_turns[number] = now_ns

    def rest_after(self, taken_ns: int, now_ns: int) -> None:
        """A look that had an end took so long: from now on all of them rest for nine times that."""
        self.rest_until_ns = now_ns + min(taken_ns * (SHARE - 1), _REST_NS)

    def let_rest(self, number: int, until_ns: int) -> None:
        self.resting[number] = max(until_ns, self.resting.get(number, 0))

    def end_rests(self, now_ns: int) -> Iterator[int]:
        """The connections that are to be looked after again."""
        if now_ns >= self.rest_until_ns:
            self.rest_until_ns = 0
        for number in [number for number, until_ns in self.resting.items() if now_ns >= until_ns]:
            del self.resting[number]
            yield number

    def forget(self, number: int) -> None:
        """The connection is closed: its number may be another one's soon."""
        self.resting.pop(number, None)
        self._last_turns.pop(number, None)
