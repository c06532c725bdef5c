"""Several devices in this process asked like one: lost, late or refusing, no pair goes unserved where a copy lives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import msgspec
import numpy as np
import pytest
from caller import Call
from device_cases import MODEL, FaultyDevice, failing, full_plan, honest, make_calls, make_handler
from numpy.typing import NDArray
from until import until

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import DeviceUnavailable
from ndp_device.experts.expert import WHOLE, Part
from ndp_device.protocol.codec import Frames
from ndp_device.transport.base import write_checksum
from vllm_ndp.device_client.client import DeviceClient
from vllm_ndp.device_client.connection import ExecuteResult
from vllm_ndp.device_client.device_group import DeviceGroup
from vllm_ndp.layer.devices import NO_COPY, assign_copies, route, slowest

CALLS = make_calls()
DEADLINE_MS = 400


@dataclass
class Rack:
    """Devices, and who holds what."""

    devices: list[FaultyDevice]
    copies: np.ndarray
    asked: list[tuple[bool, ...]]  # which devices could be asked, call by call
    client: DeviceGroup

    def serve(self, call: Call, step: int = 0) -> ExecuteResult:
        return self.client.finish_execute(call.begin(self.client, step))

    def executed(self) -> list[int]:
        return [device.handler.num_executed for device in self.devices]


def make_rack(num_devices: int, num_copies: int) -> Rack:
    copies = assign_copies(4, 8, num_devices, num_copies)

    def where(layer: int, experts: NDArray[np.int32], usable: Sequence[bool]) -> list[tuple[int, NDArray[np.int64]]]:
        distinct, rows = np.unique(experts, return_counts=True)
        work = {(int(expert), 16): int(count) for expert, count in zip(distinct, rows, strict=True)}
        found = route(copies[layer], usable, work)
        of_pairs = np.array([found[int(expert), 16] for expert in experts], np.int64)
        return [(device, np.flatnonzero(of_pairs == device)) for device in sorted({*of_pairs.tolist()} - {NO_COPY})]

    return racked(copies, num_copies, where)


def make_split_rack(num_devices: int) -> Rack:
    """Each device has a part of every expert. Every call goes to all devices, or to none where one may not be asked."""

    def everywhere(layer: int, experts: NDArray[np.int32], usable: Sequence[bool]) -> list[tuple[int, Any]]:
        return [(device, np.arange(len(experts))) for device in range(num_devices)] if all(usable) else []

    parts = [Part(at, num_devices) for at in range(num_devices)]
    return racked(np.ones((4, 8, num_devices), np.bool_), 1, everywhere, parts)


def racked(copies: np.ndarray, num_copies: int, where: Callable[..., Any], parts: Sequence[Part] | None = None) -> Rack:
    devices = [FaultyDevice(make_handler()) for _ in range(copies.shape[2])]
    asked: list[tuple[bool, ...]] = []

    def routed(layer: int, experts: NDArray[np.int32], bits: NDArray[np.uint8], usable: Sequence[bool]) -> Any:
        asked.append(tuple(usable))
        return where(layer, experts, usable)

    clients = [
        DeviceClient(
            f"in-process-{at}",
            model_digest(MODEL),
            deadline_ms=DEADLINE_MS,
            transport=device.connect,
            part=WHOLE if parts is None else parts[at],
        )
        for at, device in enumerate(devices)
    ]
    for client in clients:
        client.connect()
    several = DeviceGroup(
        clients,
        routed,
        lambda device: copies[:, :, device],
        slowest,
        num_copies=num_copies,
        deadline_ms=DEADLINE_MS,
    )
    several.begin_install_plan(1, full_plan())
    assert several.finish_install_plan() == []
    assert several.activate_plan(1)
    return Rack(devices, copies, asked, several)


@pytest.fixture
def rack() -> Rack:
    return make_rack(2, 2)


def assert_right(rack: Rack, calls: Sequence[Call] = CALLS) -> None:
    """Partial sums of two devices are added in another order than one device's."""
    for step, call in enumerate(calls):
        np.testing.assert_allclose(rack.serve(call, step).y, call.y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_devices", "num_copies"), [(1, 1), (2, 1), (2, 2), (3, 2), (4, 1), (8, 3)])
def test_any_number_of_devices_gives_the_answer_of_one_and_most_of_them_work(num_devices: int, num_copies: int) -> None:
    rack = make_rack(num_devices, num_copies)
    assert_right(rack)
    assert np.count_nonzero(rack.executed()) > num_devices // 2  # a few rows each do not reach all of eight
    assert sum(rack.executed()) > (len(CALLS) if num_devices > 1 else 0)


def test_each_device_is_sent_one_message_with_its_own_rows_only(rack: Rack) -> None:
    call = next(call for call in CALLS if len(set(call.experts.tolist())) > 1 and len(call.x) > 1)
    handle = call.begin(rack.client)
    assert rack.executed() == [1, 1], "every message has left before an answer is waited for"
    assert sorted(np.concatenate([message.pairs for message in handle.messages]).tolist()) == list(
        range(len(call.rows))
    )
    for message in handle.messages:
        assert message.rows.tolist() == sorted(set(call.rows[message.pairs].tolist()))
        assert set(rack.copies[call.layer, call.experts[message.pairs], message.device]) == {np.True_}
    rack.client.finish_execute(handle)


def test_a_layer_takes_as_long_as_its_slowest_device_and_spends_what_all_of_them_do(rack: Rack) -> None:
    call = next(call for call in CALLS if len(set(call.experts.tolist())) > 1)
    handle = call.begin(rack.client, step=1000)
    timing = rack.client.finish_execute(handle).timing
    timings = [result.timing for _, result in handle.answered]
    assert len(timings) == 2
    assert timing.total_ps == max(one.total_ps for one in timings)
    assert timing.submit_ps == 10**9
    for spent in ("energy_pj", "weight_bytes", "row_activations", "bytes_in", "bytes_out"):
        assert getattr(timing, spent) == sum(getattr(one, spent) for one in timings)


def test_a_sum_over_devices_does_not_depend_on_the_order_in_which_their_answers_are_taken() -> None:
    """Two summands can be swapped and three cannot: a row of eight experts on four devices."""
    rack, row = make_rack(4, 1), np.random.default_rng(3).standard_normal((1, CALLS[0].x.shape[1]), np.float32)
    pairs = np.zeros(8, np.int32), np.arange(8, dtype=np.int32), np.full(8, 16, np.uint8), np.ones(8, np.float32)
    sums, naive = set(), set()
    for order in permutations(range(4)):
        handle = rack.client.begin_execute(0, 0, 0, row, *pairs)
        handle.messages = [handle.messages[at] for at in order]
        sums.add(rack.client.finish_execute(handle).y.tobytes())
        parts = [answer.y for _, answer in handle.answered]
        naive.add((((parts[0] + parts[1]) + parts[2]) + parts[3]).tobytes())
    assert len(naive) > 1
    assert len(sums) == 1


def test_where_one_device_has_no_simulated_time_the_layer_has_none_and_its_sum_all_the_same(rack: Rack) -> None:
    def without_time(reply: Frames) -> tuple[Frames, ...]:
        fields = msgspec.msgpack.decode(bytes(reply[0]))
        if fields["type"] != "result":
            return (reply,)
        return write_checksum(msgspec.msgpack.encode(fields | {"timing": None}), reply[1]), reply[1]

    call = next(call for call in CALLS if len(set(call.experts.tolist())) > 1)
    rack.devices[0].fault = lambda reply: (without_time(reply),)
    handle = call.begin(rack.client)
    result = rack.client.finish_execute(handle)
    assert {answer.timing is None for _, answer in handle.answered} == {True, False}
    assert result.timing is None
    np.testing.assert_allclose(result.y, call.y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["drop", "bit_flip", "truncate", "nan", "wrong_shape", "wrong_id"])
def test_what_one_device_loses_or_spoils_in_mid_call_its_copies_serve(rack: Rack, kind: str) -> None:
    rack.devices[0].fault = failing(kind)
    assert_right(rack, CALLS[:6])
    rack.devices[0].fault = honest
    rack.devices[1].fault = failing(kind)
    until_all_up(rack)
    assert_right(rack, CALLS[:6])


def until_all_up(rack: Rack) -> None:
    until(lambda: all(client.poll() for client in rack.client.clients), pause_s=0)


def test_a_silent_device_costs_half_a_deadline_once_and_then_nothing(rack: Rack) -> None:
    """The other half is for the copy. What is known to be down is not asked again until it answers."""
    rack.devices[0].fault = failing("drop")
    call = next(call for call in CALLS if len(set(call.experts.tolist())) > 1)
    handle = call.begin(rack.client)
    halves = [message.handle.patience_s for message in handle.messages]
    assert max(halves) <= DEADLINE_MS / 2000 + 1e-6
    np.testing.assert_allclose(rack.client.finish_execute(handle).y, call.y, rtol=1e-5, atol=1e-6)
    executed = rack.executed()
    rack.asked.clear()
    assert_right(rack, CALLS[:6])
    assert set(rack.asked) == {(False, True)}
    assert rack.executed()[0] == executed[0]


def test_a_device_that_is_back_serves_its_experts_again(rack: Rack) -> None:
    rack.devices[0].reachable = False
    rack.devices[0].fault = failing("drop")
    assert_right(rack, CALLS[:4])
    assert rack.client.alive == (False, True)
    assert rack.client.state == "up"
    rack.devices[0].handler = make_handler()  # another process
    rack.devices[0].reachable, rack.devices[0].fault = True, honest
    until_all_up(rack)
    assert rack.devices[0].handler.num_executed == 0
    assert_right(rack)
    assert rack.devices[0].handler.num_executed > 0


def test_a_plan_made_while_a_device_is_down_is_there_when_it_is_back(rack: Rack) -> None:
    rack.devices[1].reachable = False
    rack.devices[1].fault = failing("drop")
    assert_right(rack, CALLS[:4])
    rack.client.begin_install_plan(2, full_plan())
    assert rack.client.finish_install_plan() == []
    assert not rack.client.activate_plan(2)
    assert_right(rack, CALLS[:4])
    rack.devices[1].reachable, rack.devices[1].fault = True, honest
    until_all_up(rack)
    before = rack.executed()[1]
    assert_right(rack)
    assert rack.executed()[1] > before


def test_without_a_copy_on_a_device_that_is_up_a_call_fails() -> None:
    rack = make_rack(2, 1)
    rack.devices[0].fault = failing("drop")
    failed = 0
    for call in CALLS[:8]:
        if not rack.copies[call.layer, call.experts, 0].any():
            np.testing.assert_allclose(rack.serve(call).y, call.y, rtol=1e-5, atol=1e-6)
            continue
        with pytest.raises(DeviceUnavailable, match="have no copy on a device that is up"):
            rack.serve(call)
        failed += 1
    assert failed > 0


def test_a_step_knows_which_devices_it_went_by_and_whether_that_changed(rack: Rack) -> None:
    availability = rack.client.availability
    assert availability.take() == ()
    assert_right(rack, CALLS[:4])
    assert availability.take() == (True, True)
    rack.devices[0].reachable, rack.devices[0].fault = False, failing("drop")
    assert_right(rack, CALLS[:6])
    assert availability.take() is None, "it was lost in mid-call"
    assert_right(rack, CALLS[:6])
    assert availability.take() == (False, True)
    availability.note((True, True))  # a choice that counted on it before it was found down
    assert_right(rack, CALLS[:1])
    assert availability.take() is None
    assert availability.take() == ()


def test_a_device_is_told_of_the_experts_that_it_holds_and_of_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rack = make_rack(3, 1)
    told: list[Any] = []
    for client in rack.client.clients:
        monkeypatch.setattr(client, "begin_install_plan", lambda epoch, replicas: told.append(replicas))
    rack.client.begin_install_plan(2, full_plan())
    assert (np.sum([flags != 0 for flags in told], axis=0) == 1).all()
    for device, flags in enumerate(told):
        assert ((flags != 0) == rack.copies[:, :, device]).all()


# -- each device with a part of every expert -------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [2, 4])
def test_devices_with_parts_give_the_answer_of_one_with_whole_experts_and_all_of_them_always_work(
    num_devices: int,
) -> None:
    rack = make_split_rack(num_devices)
    assert_right(rack)
    assert rack.executed() == [len(CALLS)] * num_devices


@pytest.mark.parametrize("kind", ["drop", "bit_flip", "truncate", "nan", "wrong_shape", "wrong_id"])
def test_where_one_part_is_lost_or_spoilt_no_part_is_used(kind: str) -> None:
    """The caller computes the pairs whole; half an answer would count units twice beside it."""
    rack = make_split_rack(2)
    rack.devices[1].fault = failing(kind)
    for call in CALLS[:3]:
        with pytest.raises(DeviceUnavailable, match=f"{len(call.rows)} of {len(call.rows)} pairs"):
            rack.serve(call)
    rack.devices[1].fault = honest
    until_all_up(rack)
    assert_right(rack)


def test_a_part_that_is_known_to_be_down_keeps_the_others_from_working_for_nothing() -> None:
    rack = make_split_rack(2)
    rack.devices[0].reachable, rack.devices[0].fault = False, failing("drop")
    with pytest.raises(DeviceUnavailable):
        rack.serve(CALLS[0])
    before = rack.executed()
    for call in CALLS[:5]:
        with pytest.raises(DeviceUnavailable):
            rack.serve(call)
    assert rack.executed() == before
    assert rack.client.availability.take() is None
