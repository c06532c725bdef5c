"""A layer's message by a thread of C++: today's bytes and sums, and every way out of it ends in today's code."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from device_cases import MODEL
from numpy.typing import NDArray
from paths import ROOT
from until import until

from ndp_device.common.errors import DeviceUnavailable
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport import shm
from ndp_device.transport.sender_thread import Order, Places, SenderThread, SendOutcome, State
from ndp_device.transport.shm import NUM_RING_SLOTS, ShmChannel
from vllm_ndp.device_client.client import DeviceClient
from vllm_ndp.device_client.connection import ExecuteResult
from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.layer.split import Split, Splitter
from vllm_ndp.layer.tiers import WARM, Tiers
from vllm_ndp.planning.plan import BitwidthPlan

LAYERS, EXPERTS, HIDDEN, TOP_K = 4, 8, 128, 2
ASKED = (7, 2, 1, 9, 10**6, 10**6)
SPIN_NS = 50_000_000


class Packet(NamedTuple):
    """As a GPU would write one."""

    word: NDArray[np.uint32]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    x: NDArray[np.float32]
    sums: NDArray[np.float32]

    def order(self, sender: SenderThread, splitter: Splitter, layer: int) -> Order:
        rows, hidden = self.x.shape
        word, ids, weights, x, sums = (part.ctypes.data for part in self)
        places = Places(word, ids, weights, x, sums, "f", 4 * hidden, rows, hidden)
        return Order(sender, places, splitter.finder, layer)

    def write(self, rows: NDArray[np.int64]) -> None:
        """The rows that leave, and the word."""
        self.x[: len(rows)] = self.x[rows]
        self.word[0] = 1


def packet_of(rng: np.random.Generator, num_rows: int) -> Packet:
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(num_rows)]).astype(np.int32)
    x = rng.standard_normal((num_rows, HIDDEN), np.float32)
    sums = np.full((num_rows, HIDDEN), np.nan, np.float32)
    return Packet(np.zeros(4, np.uint32), ids, rng.random((num_rows, TOP_K), np.float32), x, sums)


def splitter_of(num_rows: int, *, place: int = -1) -> Splitter:
    """Experts 0 to 3 are hot, the others lie at `place`."""
    tiers = Tiers(LAYERS, EXPERTS)
    tiers.where[:] = [0, 1, 2, 3, *[place] * 4]
    splitter = Splitter(tiers, TOP_K, aliases=False)
    plan = BitwidthPlan(np.full((LAYERS, EXPERTS), 3, np.uint8))
    splitter.begin_step(np.zeros(num_rows, np.int32), np.ones(num_rows, np.bool_), [plan])
    return splitter


def wanted(splitter: Splitter, packet: Packet, layer: int) -> Split:
    at = packet.ids.ctypes.data, packet.weights.ctypes.data
    found = splitter.split(layer, *at, with_device=False)
    return found._replace(device=type(found.device)(*(part.copy() for part in found.device)))


@pytest.fixture
def sender(channels: tuple[ShmChannel, ShmChannel]) -> Iterator[SenderThread]:
    sender = SenderThread()
    yield sender
    sender.cancel()  # before the memory goes


def patience() -> Callable[[], None]:
    """The packet is there; on a busy machine the thread may get no core for a while."""
    until_s = time.monotonic() + 60

    def require_packet() -> None:
        assert time.monotonic() < until_s

    return require_packet


def answer_to(device: ShmChannel, reply: msg.Result | msg.Refusal, y: NDArray[np.float32] | None = None) -> None:
    device.put(codec.encode(reply, {} if y is None else {"y": y}, fixed_head=True), writes_checksum=True)


def until_taken(device: ShmChannel) -> Any:
    return until(device.take, pause_s=0.0002)


def test_the_thread_sends_the_bytes_that_the_host_would_and_puts_the_sums_where_it_is_told(
    channels: tuple[ShmChannel, ShmChannel], sender: SenderThread
) -> None:
    host, device = channels
    rng = np.random.default_rng(1)
    for number in range(60):
        num_rows, layer = int(rng.integers(1, 9)), number % LAYERS
        packet, splitter = packet_of(rng, num_rows), splitter_of(num_rows)
        split = wanted(splitter_of(num_rows), packet, layer)
        asked = (number + 1, *ASKED[1:])
        sender.begin(host, packet.order(sender, splitter, layer), asked, SPIN_NS)
        packet.write(split.device.sent_rows)
        if not split.device:
            assert sender.end(patience()).state is State.NOTHING
            continue
        header, body, intact = until_taken(device)
        assert intact
        sent = packet.x[: len(split.device.sent_rows)].copy(), *split.device[1:]
        y = rng.standard_normal((len(split.device.sent_rows), HIDDEN), np.float32)
        result = msg.Result(asked[0], incarnation="i", epoch=2, timing=None)
        answer_to(device, result, y)
        time.sleep(0.002)  # the host does something else
        outcome = sender.end(patience())
        if outcome.state is State.SENT:  # the machine was busy
            sound = host.take_result()
            assert sound is not None
            np.testing.assert_array_equal(sound.y, y)
        else:
            assert outcome.state is State.TAKEN
            assert outcome.reply is not None
            assert (outcome.reply.id, outcome.reply.epoch) == (asked[0], 2)
            np.testing.assert_array_equal(packet.sums[: len(y)], y)
        found = splitter.found()
        assert found[3:] == split[3:]
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found.device, split.device, strict=True))
        assert packet.word[0] == 0
        assert host.put_execute(asked, sent) is shm.Put.DONE  # now the ring is the host's again
        again, same, _ = until_taken(device)
        assert (header, bytes(body)) == (again, bytes(same))
        for end in (host, device, device):
            end.release()


def cold(num_rows: int = 1) -> Packet:
    packet = packet_of(np.random.default_rng(3), num_rows)
    packet.ids[:] = [0, 7]
    return packet


def run(host: ShmChannel, sender: SenderThread, splitter: Splitter, packet: Packet) -> SendOutcome:
    sender.begin(host, packet.order(sender, splitter, 0), ASKED, SPIN_NS)
    packet.write(np.arange(len(packet.x)))
    return sender.end(patience())


def test_what_wants_python_is_left_to_it(channels: tuple[ShmChannel, ShmChannel], sender: SenderThread) -> None:
    """Warm experts have prices that Python knows, and an unknown expert an error."""
    host, device = channels
    assert run(host, sender, splitter_of(1, place=WARM), cold()).state is State.LEFT
    unknown = cold()
    unknown.ids[0, 1] = EXPERTS
    assert run(host, sender, splitter_of(1), unknown).state is State.LEFT
    hot = cold()
    hot.ids[:] = [0, 1]
    assert run(host, sender, splitter_of(1), hot).state is State.NOTHING
    assert device.take() is None


def test_a_message_that_finds_no_room_is_the_caller_s_to_send(
    channels: tuple[ShmChannel, ShmChannel], sender: SenderThread
) -> None:
    host, _ = channels
    for _ in range(NUM_RING_SLOTS):
        assert run(host, sender, splitter_of(1), cold()).state is State.SENT
    splitter = splitter_of(1)
    assert run(host, sender, splitter, cold()).state is State.FOUND
    assert splitter.found().device.experts.tolist() == [7]


def test_an_answer_that_is_no_sound_result_stays_for_the_codec(
    channels: tuple[ShmChannel, ShmChannel], sender: SenderThread
) -> None:
    host, device = channels
    y = np.zeros((1, HIDDEN), np.float32)
    result = msg.Result(7, incarnation="i", epoch=2, timing=None)
    others: list[tuple[Any, Any]] = [
        (msg.Refusal(7, incarnation="i", code="busy", message="later"), None),
        (result, np.full_like(y, np.inf)),
        (result, np.zeros((2, HIDDEN), np.float32)),  # more rows than there is room for
        (result, np.zeros((1, HIDDEN // 2), np.float32)),
    ]
    for reply, sums in others:
        answer_to(device, reply, sums)
        assert run(host, sender, splitter_of(1), cold()).state is State.SENT
        assert host.take_result() is not None or host.take() is not None
        device.take()
        for end in channels:
            end.release()


def test_a_packet_that_never_comes_holds_up_nobody(
    channels: tuple[ShmChannel, ShmChannel], sender: SenderThread
) -> None:
    host, device = channels
    packet = cold()
    sender.begin(host, packet.order(sender, splitter_of(1), 0), ASKED, SPIN_NS)
    with pytest.raises(RuntimeError, match="a layer is under way"):
        sender.begin(host, packet.order(sender, splitter_of(1), 0), ASKED, SPIN_NS)
    with pytest.raises(ZeroDivisionError):
        sender.end(lambda: 1 / 0)  # as a stream does on which a kernel failed
    assert not sender.cancel()
    assert not sender.cancel()
    assert device.take() is None
    assert run(host, sender, splitter_of(1), cold()).state is State.SENT


def test_a_thread_whose_packet_never_comes_ends_with_its_owner(channels: tuple[ShmChannel, ShmChannel]) -> None:
    sender, packet = SenderThread(), cold()
    sender.begin(channels[0], packet.order(sender, splitter_of(1), 0), ASKED, SPIN_NS)
    threads = set(os.listdir("/proc/self/task"))
    native = sender._native
    del sender
    assert sys.getrefcount(native) == 2
    del native
    assert len(threads - set(os.listdir("/proc/self/task"))) == 1


def test_it_sleeps_when_no_layer_comes_and_wakes_for_the_next(
    channels: tuple[ShmChannel, ShmChannel], sender: SenderThread
) -> None:
    host, device = channels
    for spin_ns in (0, 1_000_000):
        packet = cold()
        sender.begin(host, packet.order(sender, splitter_of(1), 0), ASKED, spin_ns)
        packet.write(np.arange(1))
        assert sender.end(patience()).state is State.SENT
        until_taken(device)
        device.release()
        time.sleep(0.02)
        before = time.process_time()
        time.sleep(0.1)
        assert time.process_time() - before < 0.02


@contextmanager
def spawned() -> Iterator[DeviceProcess]:
    process = DeviceProcess.spawn(MODEL, ROOT / "models/tiny-mixtral-replicas")
    yield process
    process.terminate()


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceProcess]:
    with spawned() as process:
        yield process


def client_of(device: DeviceProcess, **settings: Any) -> DeviceClient:
    client = DeviceClient(device.address, **settings)
    client.connect(20)
    client.install_plan(1, np.full((LAYERS, EXPERTS), 0b11111, np.uint8))
    assert client.activate_plan(1)
    return client


def ask_ahead(client: DeviceClient, sender: SenderThread, packet: Packet, between: Any = None) -> ExecuteResult:
    splitter = splitter_of(len(packet.x))
    handle = client.execute_ahead(packet.order(sender, splitter, 0), 0, 1, 0, packet.x)
    assert handle is not None
    if between is not None:
        between()
    packet.write(np.arange(len(packet.x)))
    time.sleep(0.02)  # launches
    outcome = sender.end(patience())
    rows = None if outcome.reply is None else outcome.reply.tensors[0].shape[0]
    client.executed_ahead(handle, outcome, packet.x, None if rows is None else packet.sums[:rows])
    return client.finish_execute(handle)


def test_a_real_device_gives_the_sums_and_times_that_it_gives_without_the_thread(
    device: DeviceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDP_SPIN_US", "50000")
    for pause in ("CALM_FIRST_NS", "CALM_LAST_NS"):  # else the thread does not look where others took a core
        monkeypatch.setattr(shm, pause, 0)
    sender, taken = SenderThread(), 0
    ahead, plain = client_of(device), client_of(device)
    patience_s, sizes = time.monotonic() + 60, itertools.cycle((1, 2, 5, 1, 8))
    for count, num_rows in enumerate(sizes):
        if count >= 30 and (taken or time.monotonic() > patience_s):  # on a busy machine the thread is often too late
            break
        packet = cold(num_rows)
        mine = ask_ahead(ahead, sender, packet)
        pairs = wanted(splitter_of(num_rows), packet, 0).device
        theirs = plain.finish_execute(plain.begin_execute(0, 1, 0, packet.x, *pairs[1:]))
        np.testing.assert_array_equal(mine.y, theirs.y)
        assert mine.timing is not None
        assert theirs.timing is not None
        assert mine.timing.bytes_in == theirs.timing.bytes_in
        taken += np.shares_memory(mine.y, packet.sums)
    assert taken > 0
    assert ahead.counters.executed == count
    for client in (ahead, plain):
        client.close()


def test_a_device_killed_while_the_packet_is_on_its_way_is_lost_as_ever() -> None:
    with spawned() as device:
        client, sender = client_of(device), SenderThread()
        with pytest.raises(DeviceUnavailable) as failed:
            ask_ahead(client, sender, cold(), lambda: os.kill(device.pid, signal.SIGKILL))
    assert failed.value.cause == "lost"
    assert client.state == "down"
    assert client.execute_ahead(cold().order(sender, splitter_of(1), 0), 0, 1, 0, cold().x) is None
    client.close()


def test_the_deadline_begins_when_the_message_leaves(device: DeviceProcess) -> None:
    """A kernel that is compiled first may take longer than the deadline; and here the device answers late, too."""
    client, sender = client_of(device, deadline_ms=4000), SenderThread()
    wakes = threading.Timer(4.5, os.kill, (device.pid, signal.SIGCONT))

    def compile_first() -> None:
        os.kill(device.pid, signal.SIGSTOP)
        wakes.start()
        time.sleep(4.2)

    ask_ahead(client, sender, cold(), compile_first)
    wakes.join()
    assert client.counters.executed == 1
    client.close()


def test_a_device_that_stops_is_late(device: DeviceProcess) -> None:
    client, sender = client_of(device, deadline_ms=300), SenderThread()

    with pytest.raises(DeviceUnavailable) as failed:
        ask_ahead(client, sender, cold(), lambda: os.kill(device.pid, signal.SIGSTOP))
    os.kill(device.pid, signal.SIGCONT)
    assert failed.value.cause == "late"
    client.close()


def test_an_answer_to_a_layer_that_was_given_up_is_ignored(device: DeviceProcess) -> None:
    client, sender, packet = client_of(device), SenderThread(), cold()
    assert client.execute_ahead(packet.order(sender, splitter_of(1), 0), 0, 1, 0, packet.x) is not None
    packet.write(np.arange(1))
    time.sleep(0.05)
    assert sender.cancel()
    result = ask_ahead(client, sender, cold())
    assert np.isfinite(result.y).all()
    assert client.counters.connected == 1
    client.close()


def test_a_forked_child_leaves_its_parents_thread_alone(channels: tuple[ShmChannel, ShmChannel]) -> None:
    sender = SenderThread()
    assert run(channels[0], sender, splitter_of(1), cold()).state is State.SENT
    child = os.fork()
    if not child:
        del sender
        os._exit(0)
    waited = threading.Timer(10, os.kill, (child, signal.SIGKILL))
    waited.start()
    assert os.waitpid(child, 0)[1] == 0
    waited.cancel()
    assert run(channels[0], sender, splitter_of(1), cold()).state is State.SENT
