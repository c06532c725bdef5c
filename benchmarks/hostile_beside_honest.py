"""What do attackers cost an honest host? Its p50 and p99 before, during and after each attack on one real device.

The device is the program itself, with the bundled model in full precision; the honest host calls one layer with one row
over and over, by socket and by shared memory. The attacker is another process of the same user, which is the worst that
ipc lets in. Phases are of equal length, so `before` of the next attack shows whether the last one left anything behind.
Ratios only: attacker, host and device share this machine's cores; the first row is an attacker that sends nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from measured import ROOT, Measurement, add_json_option

from ndp_device.errors import DeviceUnavailable
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport import checksum
from vllm_ndp.device.client import DeviceClient

MODEL = ROOT / "models" / "tiny-mixtral"
LAYERS, EXPERTS, HIDDEN = 4, 8, 128
NEWCOMERS_PATIENCE_S = 10.0
Attack = Callable[[str, Event], None]
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
PING = b"\x04\x07\x04PING\x00\x00"


def connected(path: str) -> socket.socket:
    """A plain socket whose handshake is over."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(1.0)
    connection.connect(path)
    connection.sendall(GREETING + READY)
    said = b""
    while b"Identity" not in said:
        if not (part := connection.recv(1)):
            raise ConnectionError("the device ended the handshake")
        said += part
    connection.setblocking(False)
    return connection


def encoded(header: codec.Buffer, body: codec.Buffer) -> bytes:
    """One message of ZMTP."""
    frames = checksum.write(header, body), bytes(body)
    return b"".join(
        bytes([more | (2 if len(frame) > 255 else 0)])
        + len(frame).to_bytes(8 if len(frame) > 255 else 1, "big")
        + frame
        for more, frame in zip((1, 0), frames, strict=True)
    )


def request(asked: msg.Message) -> bytes:
    return encoded(*codec.encode(asked))


def send_for_ever(path: str, stop: Event, data: bytes, connections: int, *, reads: bool = True) -> None:
    """On each connection in turn; one that the device ended is made again."""
    peers: list[socket.socket | None] = [None] * connections
    while not stop.is_set():
        for number, peer in enumerate(peers):
            try:
                if peer is None:
                    peers[number] = peer = connected(path)
                peer.send(data)
                if reads:
                    with suppress(BlockingIOError):
                        peer.recv(1 << 20)
            except BlockingIOError:
                continue
            except OSError:
                if peer is not None:
                    peer.close()
                peers[number] = None


def a_busy_core(path: str, stop: Event) -> None:
    """No attack: what it costs that the attacker's process takes a core is seen here, and is in every other row."""
    while not stop.is_set():
        for _ in range(1000):
            pass


def flood_of_pings(path: str, stop: Event) -> None:
    send_for_ever(path, stop, request(msg.Ping(1)) * 50, 1)


def many_that_ping(path: str, stop: Event) -> None:
    send_for_ever(path, stop, request(msg.Ping(1)), 100)


def many_silent(path: str, stop: Event) -> None:
    held = []
    while not stop.is_set():
        with suppress(OSError):
            held.append(connected(path))
        held = held[-200:]
        time.sleep(0.001)


def garbage(path: str, stop: Event) -> None:
    send_for_ever(path, stop, os.urandom(1 << 16), 4)


def endless_message(path: str, stop: Event) -> None:
    send_for_ever(path, stop, b"\x01\xff" + bytes(255), 4)


def answers_not_read(path: str, stop: Event) -> None:
    send_for_ever(path, stop, request(msg.Describe(1)) * 20, 8, reads=False)


def wants_memory(path: str, stop: Event) -> None:
    hello = msg.Hello(1, versions=(msg.VERSION, msg.VERSION), client="greedy", wants_slots=True)
    send_for_ever(path, stop, request(hello), 32)


def commands_of_zeromq(path: str, stop: Event) -> None:
    """PING of ZMTP itself, which is no request."""
    send_for_ever(path, stop, PING * 2000, 60)


def bodies_that_nobody_wants(path: str, stop: Event) -> None:
    """Every message has 8 MiB, and a header that is none."""
    piece = bytes(1 << 20)
    peers: list[tuple[socket.socket, int]] = []
    while not stop.is_set():
        with suppress(OSError):
            while len(peers) < 60:
                peers.append((connected(path), 0))
        for number, (peer, sent) in enumerate(peers):
            try:
                if not sent:
                    peer.send(b"\x01\x01x\x02" + (8 << 20).to_bytes(8, "big"))
                sent += peer.send(piece[: min(1 << 20, (8 << 20) - sent)])
                peers[number] = peer, sent % (8 << 20)
            except BlockingIOError:
                continue
            except OSError:
                peer.close()
        peers = [one for one in peers if one[0].fileno() >= 0]


def plans_without_an_end(path: str, stop: Event) -> None:
    """Every expert at every width, then none, again and again, of 20 that never compute."""

    def asked(number: int, epoch: int, flags: int) -> bytes:
        plan = msg.InstallPlan(number, epoch=epoch, expected_epoch=0)
        return encoded(*codec.encode(plan, {"replicas": np.full((LAYERS, EXPERTS), flags, np.uint8)}))

    hello = request(msg.Hello(1, versions=(msg.VERSION, msg.VERSION), client="planner"))
    send_for_ever(path, stop, hello + asked(2, 5, 31) + asked(3, 6, 0), 20)


def pings_by_memory(path: str, stop: Event) -> None:
    """Hosts that say Hello and then ask through shared memory, as fast as they are answered."""
    clients = [DeviceClient(f"ipc://{path}", deadline_ms=1000) for _ in range(12)]
    number = 1 << 40
    while not stop.is_set():
        for client in clients:
            client.poll()
            connection = client._connection
            channel = getattr(connection and connection._transport, "_channel", None)
            if connection is None or channel is None or not connection.is_up:
                continue
            number += 1
            header, body = codec.encode(msg.Ping(number))
            with suppress(Exception):
                channel.put((header, body), writes_checksum=True)
                while channel.take() is not None:
                    channel.release()


def comes_and_goes(path: str, stop: Event) -> None:
    while not stop.is_set():
        with suppress(OSError):
            connected(path).close()


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        a_busy_core,
        flood_of_pings,
        many_that_ping,
        many_silent,
        garbage,
        endless_message,
        answers_not_read,
        wants_memory,
        commands_of_zeromq,
        bodies_that_nobody_wants,
        plans_without_an_end,
        pings_by_memory,
        comes_and_goes,
    )
}


class Honest:
    """A host that calls as fast as it is answered."""

    def __init__(self, address: str, *, shared_memory: bool, patience_s: float = 60.0) -> None:
        self.client = DeviceClient(address, deadline_ms=5000, shared_memory=shared_memory)
        self.client.connect(patience_s)
        self.client.install_plan(1, np.full((LAYERS, EXPERTS), 16, np.uint8))
        self.client.activate_plan(1)
        self._x = np.ones((1, HIDDEN), np.float32)

    def call_for(self, seconds: float) -> dict[str, Any]:
        rows, experts, bits = np.zeros(1, np.int32), np.ones(1, np.int32), np.full(1, 16, np.uint8)
        lost, taken, end = self.client.counters.lost, [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter_ns()
            with suppress(Exception):  # counted below
                self.client.finish_execute(
                    self.client.begin_execute(0, 0, 0, self._x, rows, experts, bits, np.ones(1, np.float32))
                )
            taken.append((time.perf_counter_ns() - start) / 1e3)
        return {
            "calls": len(taken),
            "lost": self.client.counters.lost - lost,
            "p50_us": round(float(np.percentile(taken, 50)), 1),
            "p99_us": round(float(np.percentile(taken, 99)), 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each phase")
    parser.add_argument("--newcomers", type=int, default=5, help="hosts that come while the attack lasts")
    parser.add_argument("--attack", action="append", choices=sorted(ATTACKS), help="only these")
    parser.add_argument("--transport", action="append", choices=("socket", "memory"), help="only these")
    add_json_option(parser)
    given = parser.parse_args()
    measurement = Measurement(__doc__ or "")
    figures: dict[str, Any] = {}
    of = "us before/during/after"
    print(f"{'attack':24} {'transport':9} {'p50 ' + of:>32} {'p99 ' + of:>36} lost  slowest newcomer s")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "private", "device"))
        device = subprocess.Popen(
            [sys.executable, "-m", "ndp_device", "serve", str(MODEL), "--address", f"ipc://{path}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert device.stdout is not None
        assert json.loads(device.stdout.readline())["ready"]
        try:
            for transport in given.transport or ("socket", "memory"):
                for name in given.attack or ATTACKS:
                    found = one(
                        f"ipc://{path}", path, ATTACKS[name], transport == "memory", given.seconds, given.newcomers
                    )
                    figures[f"{name}, {transport}"] = found
                    phases = [found[phase] for phase in ("before", "during", "after")]
                    p50, p99 = (" / ".join(f"{phase[key]:8.1f}" for phase in phases) for key in ("p50_us", "p99_us"))
                    print(
                        f"{name:24} {transport:9} {p50:>32} {p99:>36} {sum(phase['lost'] for phase in phases):4}"
                        f"  {slowest(found['newcomers_s']):>18}"
                    )
            figures["device_rss_mib"] = _rss_mib(device.pid)
            assert device.poll() is None, "the device ended"
        finally:
            device.send_signal(signal.SIGTERM)
            device.wait()
    measurement.end(figures, given.json)


def newcomers(address: str, host: Honest, shared_memory: bool, count: int) -> list[float | None]:
    """Seconds until a host that comes now has had its first answer, one after the other, while `host` goes on.

    None: it gave up after NEWCOMERS_PATIENCE_S, and no other came.
    """
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            host.call_for(0.05)

    beside = threading.Thread(target=go_on)
    taken: list[float | None] = []
    beside.start()
    try:
        for _ in range(count):
            begun_s = time.monotonic()
            newcomer = Honest(address, shared_memory=shared_memory, patience_s=NEWCOMERS_PATIENCE_S)
            while not newcomer.call_for(0.0001)["calls"] or not newcomer.client.counters.executed:
                pass
            taken.append(round(time.monotonic() - begun_s, 3))
            newcomer.client.close()
    except DeviceUnavailable:
        taken.append(None)
    finally:
        ended.set()
        beside.join()
    return taken


def one(
    address: str, path: str, attack: Attack, shared_memory: bool, seconds: float, num_newcomers: int
) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    host, stop = Honest(address, shared_memory=shared_memory), spawn.Event()
    host.call_for(seconds / 5)
    found = {"before": host.call_for(seconds)}
    attacker = spawn.Process(target=attack, args=(path, stop), daemon=True)
    attacker.start()
    time.sleep(1.5)  # its imports
    found["during"] = host.call_for(seconds)
    found["newcomers_s"] = newcomers(address, host, shared_memory, num_newcomers)
    stop.set()
    attacker.join(10)
    attacker.kill()
    found["after"] = host.call_for(seconds)
    host.client.close()
    return found


def slowest(seconds: list[float | None]) -> str:
    if None in seconds:
        return f"over {NEWCOMERS_PATIENCE_S:.0f}"
    return f"{max((taken for taken in seconds if taken is not None), default=0.0):.3f}"


def _rss_mib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) >> 10
    return 0


if __name__ == "__main__":
    main()
