"""A device that lies with a right checksum: every answer is used as it should be, or the host computes for itself.

The lies are made by hand where one is known to have hurt, and by hypothesis everywhere else.
"""

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from device_cases import MODEL, FaultyDevice, FaultyTransport, full_plan, honest, make_calls, make_handler
from fuzzing.mutate import with_one_change
from hypothesis import given, settings
from hypothesis import strategies as st

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import DeviceUnavailable
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.protocol.codec import Frames
from ndp_device.transport.base import write_checksum
from vllm_ndp.device_client.client import DeviceClient

CALLS = make_calls(4)
DEVICE = FaultyDevice(make_handler())
FOREVER = (1 << 63) - 1


def rewritten(reply: Frames, fields: Any, body: bytes | None = None) -> Frames:
    body = bytes(reply[1]) if body is None else body
    return write_checksum(msgspec.msgpack.encode(fields), body), body


def fields_of(reply: Frames) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(bytes(reply[0]))
    return fields


@pytest.fixture
def client() -> DeviceClient:
    return new_client()


def new_client() -> DeviceClient:
    DEVICE.fault = honest
    client = DeviceClient("in-process", model_digest(MODEL), deadline_ms=100, transport=DEVICE.connect)
    client._control_s = 0.05
    client.connect()
    client.install_plan(1, full_plan())
    client.activate_plan(1)
    return client


def ask_and_check(client: DeviceClient) -> bool:
    """Whether the device's answer was used; if it was, it is the right one, with the right time."""
    call = CALLS[0]
    try:
        result = client.finish_execute(call.begin(client, 3))
    except DeviceUnavailable:
        return False
    np.testing.assert_array_equal(result.y, call.y)
    timing = result.timing
    if timing is None:  # what it did not say is no lie
        return True
    assert timing.submit_ps == 3 * 10**6 <= timing.start_ps <= timing.done_ps < 1 << 62
    assert timing.total_ps == timing.done_ps - timing.submit_ps
    return True


def assert_recovers(client: DeviceClient) -> None:
    DEVICE.fault = honest
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        client._retry_at_s = 0.0
        if client.poll() and ask_and_check(client):
            return
        time.sleep(0.001)
    raise AssertionError(client.reason)


LIES: dict[str, dict[str, Any]] = {
    "no version": {"ndp": None},
    "version 0": {"ndp": 0},
    "a negative version": {"ndp": -257},
    "a shape no array can have": {"tensors": [["y", "float32", [0, 1 << 62], 0]]},
    "rows nobody asked for": {"tensors": [["y", "float32", [0, 64], 0]]},
    "another submit time": {"timing": {"submit_ps": 7}},
    "done before it began": {"timing": {"done_ps": 1}},
    "a negative total": {"timing": {"total_ps": -1}},
    "a total that is not the difference": {"timing": {"total_ps": 5}},
    "a time without end": {"timing": {"done_ps": FOREVER, "total_ps": FOREVER - 3 * 10**6}},
    "a time beyond 64 bits": {"timing": {"dram_ps": (1 << 64) - 1}},
    "an hour and a bit": {"timing": {"done_ps": 3 * 10**6 + 3601 * 10**12, "total_ps": 3601 * 10**12}},
    "a negative energy": {"timing": {"energy_pj": -1}},
    "an infinite utilisation": {"timing": {"array_utilisation": float("inf")}},
    "a utilisation that is none": {"timing": {"dram_efficiency": float("nan")}},
    "a bound that is none": {"timing": {"bound": "luck"}},
    "other hardware": {"timing": {"config_hash": "0" * 64}},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_a_result_ends_as_unavailable_and_the_next_call_is_served(client: DeviceClient, lie: str) -> None:
    def fault(reply: Frames) -> tuple[Frames, ...]:
        fields = fields_of(reply)
        for name, value in LIES[lie].items():
            if isinstance(value, dict):
                fields[name] |= value
            elif value is None:
                del fields[name]
            else:
                fields[name] = value
        empty = "tensors" in LIES[lie]
        return (rewritten(reply, fields, b"" if empty else None),)

    DEVICE.fault = fault
    assert not ask_and_check(client)
    assert client.counters.broken >= 1
    assert_recovers(client)


def test_an_answer_of_another_kind_to_a_plan_is_a_lie(client: DeviceClient) -> None:
    """PlanActivated where PlanInstalled was asked for has the right id and the right epoch."""

    def fault(reply: Frames) -> tuple[Frames, ...]:
        fields = fields_of(reply)
        return (rewritten(reply, fields | {"type": "plan_activated", "tensors": []}, b""),)

    DEVICE.fault = fault
    with pytest.raises(DeviceUnavailable):
        client.install_plan(2, full_plan())
    assert_recovers(client)


def test_a_plan_that_misses_what_was_never_asked_for_is_a_lie(client: DeviceClient) -> None:
    DEVICE.fault = lambda reply: (rewritten(reply, fields_of(reply), b"\x01" * len(reply[1])),)
    with pytest.raises(DeviceUnavailable):
        client.install_plan(2, full_plan())
    assert_recovers(client)


CLIENT: list[DeviceClient] = []


@settings(max_examples=400)
@given(seed=st.integers(0, (1 << 64) - 1))
def test_whatever_a_device_says_the_answer_is_right_or_unavailable(seed: int) -> None:
    """Any reply of the conversation, greeting and plans included: altered in any field, sent once, twice or never."""
    if not CLIENT:
        CLIENT.append(new_client())
    client, rng = CLIENT[0], random.Random(seed)
    which, number = rng.randrange(6), 0

    def fault(reply: Frames) -> list[Frames]:
        nonlocal number
        number += 1
        if number - 1 != which:
            return [reply]
        fields = with_one_change(rng, fields_of(reply))
        body = bytes(reply[1])
        if rng.random() < 0.25:
            body = rng.choice((rng.randbytes(rng.randrange(80)), body + bytes(64), body[: len(body) // 2]))
        if isinstance(fields, dict):
            fields = {name: value for name, value in fields.items() if name != "crc"} | {"crc": bytes(4)}
        try:
            lie = rewritten(reply, fields, body)
        except (ValueError, OverflowError, TypeError, RecursionError):  # nothing MessagePack can say
            return [reply]
        return [[lie], [lie], [lie, lie], [reply, lie], [lie, reply], []][rng.randrange(6)]

    DEVICE.fault = fault
    if rng.random() < 0.5:  # from the greeting on
        client._fail(DeviceUnavailable("the test says so"))
    client._deadline_s = 0.01
    for _ in range(4):
        client._retry_at_s = 0.0
        client.poll()
        ask_and_check(client)
    client._deadline_s = 0.1
    assert_recovers(client)


DEVICE_THAT_DIES = """
import os, sys, time, zmq
from ndp_device.protocol import codec, messages as msg
from ndp_device.transport.base import write_checksum
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
print("listens", flush=True)
name = router.recv_multipart()[0]
header, body = codec.encode(msg.Pong(1, incarnation="i", queue_depth=0, num_executed=0))
for _ in range(100):
    router.send_multipart([name, write_checksum(header, body), body])
time.sleep(0.3)
os._exit(1)
"""
HOST = """
import sys, time
from ndp_device.common.errors import DeviceUnavailable
from ndp_device.protocol import codec, messages as msg
from ndp_device.transport import connect
transport = connect(sys.argv[1])
while not transport.send(codec.encode(msg.Ping(1))):
    time.sleep(0.001)
time.sleep(0.5)
arrived = 0
try:
    while True:
        arrived += transport.receive(1.0) is not None
except DeviceUnavailable:
    print(arrived)
"""


def test_a_device_that_dies_behind_its_answers_does_not_end_the_host(tmp_path: Path) -> None:
    """With IMMEDIATE or HEARTBEAT_IVL libzmq 4.3.5 ended it: more had arrived than a queue holds."""
    address = f"ipc://{tmp_path}/device"
    device = subprocess.Popen([sys.executable, "-c", DEVICE_THAT_DIES, address], stdout=subprocess.PIPE, text=True)
    assert device.stdout is not None
    device.stdout.readline()
    host = subprocess.Popen([sys.executable, "-c", HOST, address], stdout=subprocess.PIPE, text=True)
    output, _ = host.communicate(timeout=60)
    assert host.returncode == 0
    assert int(output) >= 80
    device.communicate()


class Repeating(FaultyTransport):
    """After the first request, the answer to one that was made long ago, again and again."""

    looks = 0

    def send(self, frames: Frames) -> bool:
        return True

    def receive(self, timeout_s: float) -> Frames | None:
        Repeating.looks += 1
        old = codec.encode(msg.Pong(1, incarnation="i", queue_depth=0, num_executed=0))
        return None if Repeating.looks == 1 else old


def test_a_device_that_repeats_old_answers_for_ever_does_not_keep_its_host() -> None:
    """While a connection is on its way up, `poll` looks at what has arrived: at a bounded part of it."""
    client = DeviceClient("in-process", transport=lambda address, keys: Repeating(DEVICE, b"repeating"))
    client._last_id = 5
    assert client.poll() is False
    assert client.counters.ignored == Repeating.looks - 1 < 1000
    client.close()
