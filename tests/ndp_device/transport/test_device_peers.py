"""Who gives way where there is not room for all peers: the rules alone, over real connections without a server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from server_by_hand import Hands

from ndp_device.transport.connection import Connection, HandshakeTime
from ndp_device.transport.peers import (
    Peer,
    Rank,
    greediest,
    greedy_process,
    others_compute,
    to_give_up_memory,
    to_send_away,
)

MS = 1_000_000
NOW = 10**15
MINUTES = 6 * 60_000
STRANGER, GREETED, COMPUTES = Rank
MakePeer = Callable[..., Peer]


@pytest.fixture
def peer() -> Iterator[MakePeer]:
    """Makes a peer that came and was heard so many milliseconds ago, and has not read so many MiB of answers."""
    sockets: list[socket.socket] = []

    def make(
        rank: Rank = STRANGER, *, silent: int = 1000, came: int = MINUTES, served: bool = False, holds: int = 0
    ) -> Peer:
        clock, (theirs, ours) = Hands(), socket.socketpair()
        clock.now_ns = NOW - came * MS
        ours.setblocking(False)
        sockets.extend((theirs, ours))
        made = Peer(b"%d" % len(sockets), Connection(b"", ours, clock, None, HandshakeTime()), 0.0)
        made.rank, made.was_served, made.connection.heard_ns = rank, served, NOW - silent * MS
        if holds:
            made.connection.send_as_is((b"an answer", bytes(holds << 20)))
        return made

    yield make
    for end in sockets:
        end.close()


def test_a_process_is_greedy_by_its_connections_that_never_computed(peer: MakePeer) -> None:
    of_processes = [peer(), peer(GREETED), peer(COMPUTES), peer(), peer(), peer(), peer()]
    for one, process in zip(of_processes, (7, 7, 7, 8, None, None, None), strict=True):
        one.process = process
    assert greedy_process(of_processes, 1) == 7
    assert greedy_process(of_processes, 2) is None
    assert greedy_process([], 0) is None


def test_the_lowest_rank_gives_way_however_lately_it_was_heard(peer: MakePeer) -> None:
    greeted, stranger = peer(GREETED, silent=5000), peer(STRANGER, silent=1)
    assert to_send_away([peer(COMPUTES), greeted, stranger], NOW) is stranger
    assert to_send_away([peer(COMPUTES), greeted], NOW) is greeted


def test_of_one_rank_the_one_silent_longest_gives_way(peer: MakePeer) -> None:
    silent = peer(GREETED, silent=300)
    assert to_send_away([peer(GREETED, silent=200), silent, peer(GREETED, silent=100)], NOW) is silent


def test_a_host_that_computes_gives_way_to_nobody_until_it_was_silent_for_minutes(peer: MakePeer) -> None:
    assert to_send_away([peer(COMPUTES), peer(COMPUTES, silent=4 * 60_000)], NOW) is None
    asleep = peer(COMPUTES, silent=MINUTES)
    assert to_send_away([peer(COMPUTES), asleep], NOW) is asleep
    assert to_send_away([], NOW) is None


def test_strangers_on_their_way_to_a_hello_go_last_of_their_rank_and_the_young_not_at_all(peer: MakePeer) -> None:
    coming, asked = peer(silent=100, came=100), peer(silent=1, came=200, served=True)
    assert to_send_away([coming, asked], NOW) is asked
    assert to_send_away([coming], NOW) is coming
    assert to_send_away([coming], NOW, spares_young=True) is None
    assert to_send_away([coming, asked], NOW, spares_young=True) is asked
    late = peer(silent=300, came=300)
    assert to_send_away([coming, late], NOW, spares_young=True) is late


def test_a_segment_is_given_up_by_who_had_it_for_a_second_and_never_computed(peer: MakePeer) -> None:
    fresh, idle, idler = peer(came=900, silent=900), peer(GREETED, silent=1100), peer(GREETED, silent=1200)
    assert to_give_up_memory([fresh, peer(COMPUTES, silent=2 * MINUTES)], NOW) is None
    assert to_give_up_memory([fresh, idle, idler], NOW) is idler


def test_who_holds_most_goes_but_a_stranger_that_holds_more_than_little_before_it(peer: MakePeer) -> None:
    most, much, stranger, little = (
        peer(COMPUTES, holds=8),
        peer(COMPUTES, holds=4),
        peer(STRANGER, holds=3),
        peer(STRANGER, holds=1),
    )
    assert greediest([much, most, little], 2 << 20) is most
    assert greediest([much, most, little, stranger], 2 << 20) is stranger


def test_a_host_is_told_of_others_that_computed_lately_and_not_of_itself(peer: MakePeer) -> None:
    one, other, greeted = peer(COMPUTES), peer(COMPUTES), peer(GREETED)
    one.computed_ns = other.computed_ns = greeted.computed_ns = NOW
    assert others_compute([one, other], one.name, NOW - 1)
    assert not others_compute([one, other], one.name, NOW)  # since then none did
    assert not others_compute([one, greeted], one.name, NOW - 1)
