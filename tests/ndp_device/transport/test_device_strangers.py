"""The account of what peers that never computed may take of the device's time: told the time, it answers with times."""

from __future__ import annotations

from ndp_device.transport.strangers import StrangersTime

MS = 1_000_000
NOW = 10**15
LISTENER = 3


def beside_a_host(now_ns: int = NOW) -> StrangersTime:
    """The account where a host has just computed and strangers have used up what they had."""
    account = StrangersTime()
    account.host_served_ns = account.serves_from_ns = now_ns
    return account


def served_again_after_ms(account: StrangersTime) -> int:
    return next(ms for ms in range(1000) if account.may_be_served(NOW + ms * MS))


def test_after_one_was_served_the_next_waits_ten_times_as_long() -> None:
    account = beside_a_host()
    account.charge(3 * MS, NOW)
    assert served_again_after_ms(account) == 30
    account.charge(1 * MS, NOW)
    assert served_again_after_ms(account) == 40


def test_no_request_of_a_stranger_costs_the_others_more_than_a_quarter_of_a_second() -> None:
    account = beside_a_host()
    account.charge(10_000 * MS, NOW)
    assert served_again_after_ms(account) == 250


def test_time_that_strangers_did_not_use_is_credited_for_20_ms() -> None:
    account = beside_a_host()
    account.serves_from_ns = 0
    account.charge(5 * MS, NOW)
    assert served_again_after_ms(account) == 30


def test_a_second_after_the_last_request_of_a_host_strangers_wait_for_nothing() -> None:
    account = beside_a_host(NOW - 1000 * MS)
    account.charge(10_000 * MS, NOW)
    assert not account.may_be_served(NOW)
    assert account.may_be_served(NOW + 1)


def test_beside_a_host_that_waits_strangers_have_every_other_turn_at_most_and_none_after_a_pause() -> None:
    account = beside_a_host()
    assert account.have_the_turn(NOW, others_wait=True, were_last=False)
    assert not account.have_the_turn(NOW, others_wait=True, were_last=True)
    assert account.have_the_turn(NOW, others_wait=False, were_last=True)
    assert not account.have_the_turn(NOW + 1001 * MS, others_wait=True, were_last=False)
    assert account.have_the_turn(NOW + 1001 * MS, others_wait=False, were_last=False)


def test_a_look_has_an_end_only_while_a_host_computes() -> None:
    assert StrangersTime().begin_look(LISTENER, NOW) is None
    account = beside_a_host()
    assert account.begin_look(LISTENER, NOW) == 5 * MS  # the first one: the last was long ago
    assert account.begin_look(LISTENER, NOW + 1 * MS) == MS // 2
    assert account.begin_look(LISTENER, NOW + 31 * MS) == 3 * MS
    assert account.begin_look(LISTENER, NOW + 1500 * MS) is None


def test_connections_rest_nine_times_as_long_as_a_look_took_and_at_most_50_ms() -> None:
    account = beside_a_host()
    account.rest_after(MS // 2, NOW)
    assert account.rest_until_ns == NOW + 9 * MS // 2
    account.rest_after(500 * MS, NOW)
    assert account.rest_until_ns == NOW + 50 * MS


def test_those_whose_time_has_come_are_looked_after_again_and_no_others() -> None:
    account = beside_a_host()
    account.rest_after(1 * MS, NOW)
    for number, ms in ((4, 9), (5, 9), (6, 20), (7, 9)):
        account.let_rest(number, NOW + ms * MS)
    account.let_rest(5, NOW + 2 * MS)  # what was said to rest longer does
    account.forget(7)
    assert [*account.end_rests(NOW + 8 * MS)] == []
    assert account.rest_until_ns
    assert [*account.end_rests(NOW + 9 * MS)] == [4, 5]
    assert not account.rest_until_ns
    assert [*account.resting] == [6]


def test_handshakes_come_first_and_then_whose_last_turn_was_longest_ago() -> None:
    account = StrangersTime()
    account.has_turn(4, NOW + 2)
    account.has_turn(5, NOW + 1)
    account.has_turn(6, NOW + 3)
    ready = {4: True, 5: True, 6: False, 7: True}
    assert sorted(ready, key=lambda number: account.order(number, is_ready=ready[number])) == [6, 7, 5, 4]
    account.forget(4)  # whoever has that number next has had no turn
    assert account.order(4, is_ready=True) == account.order(7, is_ready=True)


def test_the_listener_comes_first_every_other_time_and_else_behind_all_handshakes() -> None:
    account = StrangersTime()
    account.has_turn(4, NOW)
    places = []
    for look in range(4):
        account.begin_look(LISTENER, NOW + look)
        in_turn = sorted((LISTENER, 4), key=lambda number: account.order(number, is_ready=False))
        places.append(in_turn.index(LISTENER))
    assert places == [0, 1, 0, 1]
