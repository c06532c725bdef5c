"""The client against a device in this process that lies, loses, repeats or restarts: costs time, never a number."""

import logging
import random
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_cases import MODEL, FaultyDevice, failing, full_plan, honest, make_calls, make_handler
from failpoints import KINDS
from until import until

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import DeviceError, DeviceUnavailable, LocalProtocolError
from ndp_device.protocol.codec import VersionMismatch
from vllm_ndp.device_client.client import MAX_IN_FLIGHT, DeviceClient

CALLS = make_calls()


@pytest.fixture
def device() -> FaultyDevice:
    return FaultyDevice(make_handler())


@pytest.fixture
def client(device: FaultyDevice) -> DeviceClient:
    client = DeviceClient("in-process", model_digest(MODEL), deadline_ms=50, transport=device.connect)
    client.connect()
    assert client.install_plan(1, full_plan()) == []
    assert client.activate_plan(1)
    return client


def until_up(client: DeviceClient) -> None:
    until(client.poll, told=lambda: client.reason, pause_s=0)


def assert_serves(client: DeviceClient) -> None:
    for step, call in enumerate(CALLS):
        np.testing.assert_array_equal(client.finish_execute(call.begin(client, step)).y, call.y)


def test_results_are_the_kernels_to_the_bit_and_carry_their_simulated_time(client: DeviceClient) -> None:
    assert_serves(client)
    first = client.finish_execute(CALLS[0].begin(client, step=10**9))
    assert first.timing.submit_ps == 10**15
    assert first.timing.total_ps > 0
    assert first.y.flags.writeable
    assert client.counters.executed == len(CALLS) + 1


def test_calls_may_overlap_and_finish_in_any_order(client: DeviceClient) -> None:
    handles = [call.begin(client) for call in CALLS[:MAX_IN_FLIGHT]]
    with pytest.raises(LocalProtocolError, match="in flight"):
        CALLS[0].begin(client)
    for call, handle in reversed(list(zip(CALLS, handles, strict=False))):
        np.testing.assert_array_equal(client.finish_execute(handle).y, call.y)


def test_bfloat16_rows_travel_as_uint16(client: DeviceClient) -> None:
    call = CALLS[0]
    halves = (call.x.view(np.uint32) >> 16).astype(np.uint16)
    rounded = (halves.astype(np.uint32) << 16).view(np.float32)
    pairs = (call.rows, call.experts, call.bits, call.gates)
    from_halves = client.finish_execute(client.begin_execute(0, 0, 0, halves, *pairs))
    from_floats = client.finish_execute(client.begin_execute(0, 0, 0, rounded, *pairs))
    np.testing.assert_array_equal(from_halves.y, from_floats.y)


# What each fault does to the call it hits: (why its result is not used, "" if it is; is the connection replaced?).
CONSEQUENCES = {
    "drop": ("late", True),
    # in process a reply that hangs is merely late; a real hang is in test_device_client_faults.py
    **dict.fromkeys(("delay", "hang", "dup", "stale"), ("", False)),
    **dict.fromkeys(("bit_flip", "header_flip", "truncate", "extra_frame", "garbage"), ("broken", True)),
    **dict.fromkeys(("wrong_id", "wrong_epoch", "wrong_incarnation", "wrong_shape", "wrong_dtype"), ("broken", True)),
    "nan": ("broken", False),
    "other_major": ("broken", True),
}


def test_every_kind_of_fault_has_a_consequence_listed_here() -> None:
    assert {*CONSEQUENCES, "exit"} == set(KINDS)


@pytest.mark.parametrize("kind", CONSEQUENCES)
def test_a_fault_costs_time_and_nothing_else(kind: str, device: FaultyDevice, client: DeviceClient) -> None:
    cause, replaced = CONSEQUENCES[kind]
    client.finish_execute(CALLS[1].begin(client))  # something earlier that a stale reply may repeat
    connections = device.num_connections
    device.fault = failing(kind)
    call = CALLS[0]
    handle = call.begin(client)
    if cause:
        with pytest.raises(DeviceUnavailable) as error:
            client.finish_execute(handle)
        assert error.value.cause == cause
    else:
        np.testing.assert_array_equal(client.finish_execute(handle).y, call.y)
    device.fault = honest
    until_up(client)
    assert (device.num_connections > connections) == replaced
    assert client.counters.lost == int(replaced)
    assert_serves(client)


def test_nan_from_finite_input_is_rejected_but_nan_from_nan_is_the_models_own(
    device: FaultyDevice, client: DeviceClient
) -> None:
    device.fault = failing("nan")
    with pytest.raises(DeviceUnavailable, match="not finite"):
        client.finish_execute(CALLS[0].begin(client))
    assert (client.counters.nonfinite, client.state) == (1, "up")
    device.fault = honest
    call = CALLS[0]
    for x in (np.full_like(call.x, np.nan), np.full(call.x.shape, 0x7FC0, np.uint16)):
        pairs = (call.rows, call.experts, call.bits, call.gates)
        result = client.finish_execute(client.begin_execute(0, 0, 0, x, *pairs))
        assert np.isnan(result.y[call.rows]).all()


def test_a_late_look_at_a_result_in_time_is_not_a_miss(client: DeviceClient) -> None:
    handle = CALLS[0].begin(client)
    time.sleep(0.08)  # the deadline of 50 ms passes while the host is busy with its hot experts
    np.testing.assert_array_equal(client.finish_execute(handle).y, CALLS[0].y)


def test_a_device_that_is_down_costs_each_call_nothing_and_one_log_line(
    device: FaultyDevice, client: DeviceClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # what is seen where nobody has asked for more
    device.fault = failing("drop")
    device.reachable = True
    with pytest.raises(DeviceUnavailable, match="50 ms"):
        client.finish_execute(CALLS[0].begin(client))
    device.reachable = False
    for _ in range(200):
        with pytest.raises(DeviceUnavailable, match="the device is down: no answer within 50 ms"):
            client.finish_execute(CALLS[0].begin(client))
    assert client.counters.unavailable == 201
    assert client.refuses()  # so that its caller need not even make one
    assert client.counters.unavailable == 202
    device.reachable, device.fault = True, honest
    until_up(client)
    assert not client.refuses()
    states = [record.getMessage() for record in caplog.records if record.name == "vllm_ndp.device_client.client"]
    assert len(states) == 2
    assert "is down: no answer within 50 ms" in states[0]
    assert "is back" in states[1]


class _Hours:
    """A clock that goes when it is told to."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class _WithoutJitter(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return max(a, b)


def test_the_pause_before_each_new_connection_doubles_up_to_its_end_and_begins_anew_with_an_answer() -> None:
    """On a clock of the test's own: when does a client that is asked at every moment try again?"""
    device, clock, tries = FaultyDevice(make_handler()), _Hours(), list[float]()

    def transport(address: str, keys: Path | None) -> Any:
        tries.append(clock.now_s)
        if not device.reachable:
            raise DeviceUnavailable("nobody is there")
        return device.connect(address, keys)

    def pauses(count: int) -> list[int]:
        tries.clear()
        while len(tries) <= count:
            client.poll()
            clock.sleep(0.0005)
        return [round((after - before) * 1e3) for before, after in pairwise(tries)]

    client = DeviceClient(
        "in-process", model_digest(MODEL), transport=transport, clock=clock, jitter=_WithoutJitter(), deadline_ms=50
    )
    device.reachable = False
    assert pauses(8) == [5, 10, 20, 40, 80, 160, 200, 200]
    device.reachable = True
    client.connect()
    client.install_plan(1, full_plan())
    client.activate_plan(1)
    assert_serves(client)
    device.reachable = False
    with pytest.raises(DeviceUnavailable):
        client.finish_execute(CALLS[0].begin(client))
    assert pauses(3) == [10, 20, 40]
    assert client.counters.lost == 1, "a try that failed is no further loss"


@pytest.mark.parametrize("looks", range(5))
def test_a_plan_that_changes_on_the_way_up_costs_no_call(
    looks: int, device: FaultyDevice, client: DeviceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.handler = make_handler()
    with pytest.raises(DeviceUnavailable):
        client.finish_execute(CALLS[0].begin(client))
    monkeypatch.setattr("vllm_ndp.device_client.client._LOOKS_AT_ONCE", 1)  # greeting, Welcome, plan, epoch, up
    while client._connection is None:
        client.poll()
    for _ in range(looks):
        client.poll()
    for epoch in (2, 4):
        with suppress(DeviceUnavailable):
            client.install_plan(epoch, full_plan())
        client.activate_plan(epoch)
    with suppress(DeviceUnavailable):
        client.install_plan(5, full_plan())  # not active yet
    until_up(client)
    assert_serves(client)
    assert client.activate_plan(5)
    assert_serves(client)
    assert (client.counters.refused, client.counters.lost) == (0, 1)


def test_connect_says_why_a_device_refuses(device: FaultyDevice) -> None:
    with pytest.raises(DeviceError, match="digest: the host serves model beef"):
        DeviceClient("in-process", "beef", transport=device.connect).connect()
    device.fault = failing("other_major")
    with pytest.raises(VersionMismatch, match=r"the peer 3\.0"):
        DeviceClient("in-process", transport=device.connect).connect(0.1)


def test_a_device_without_the_replica_refuses_that_call_and_serves_the_next(client: DeviceClient) -> None:
    plan = full_plan()
    plan[1, 3] |= 0b00110
    assert client.install_plan(2, plan) == [(1, 3, 2), (1, 3, 3)]
    client.activate_plan(2)
    assert client.missing == [(1, 3, 2), (1, 3, 3)]
    call = CALLS[0]
    handle = client.begin_execute(1, 0, 0, call.x, call.rows, call.experts, np.full_like(call.bits, 4), call.gates)
    with pytest.raises(DeviceUnavailable, match="not_loaded"):
        client.finish_execute(handle)
    assert (client.counters.refused, client.state) == (1, "up")
    assert_serves(client)


def test_the_answer_to_a_plan_may_be_waited_for_later(client: DeviceClient) -> None:
    plan = full_plan()
    plan[1, 3] |= 0b00010
    client.begin_install_plan(2, plan)
    assert_serves(client)  # under the plan before
    assert client.finish_install_plan() == [(1, 3, 2)]
    assert client.activate_plan(2)
    assert_serves(client)
    with pytest.raises(LocalProtocolError, match="on its way"):
        client.finish_install_plan()


def test_a_session_the_device_forgot_is_made_again(device: FaultyDevice, client: DeviceClient) -> None:
    device.handler._clients.clear()
    with pytest.raises(DeviceUnavailable, match="no_session"):
        client.finish_execute(CALLS[0].begin(client))
    until_up(client)
    assert_serves(client)


def test_plans_out_of_order_are_our_own_mistake(client: DeviceClient) -> None:
    with pytest.raises(LocalProtocolError, match="above 1"):
        client.install_plan(1, full_plan())
    with pytest.raises(LocalProtocolError, match="must be installed"):
        client.activate_plan(2)
    with pytest.raises(LocalProtocolError, match="before the first Execute"):
        CALLS[0].begin(DeviceClient("nowhere"))


def test_a_closed_client_stays_closed(client: DeviceClient) -> None:
    handle = CALLS[0].begin(client)
    client.close()
    for waiting in (handle, CALLS[0].begin(client)):
        with pytest.raises(DeviceUnavailable, match="closed"):
            client.finish_execute(waiting)
