"""A real device program under attack: what attackers send to it, and whether it still serves an honest host.

The attackers are plain sockets, the honest host is the plugin's own client.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
from raw_zmtp import greeted, message
from server_by_hand import LOOPBACK
from small_checkpoint import EXPERTS, HIDDEN, LAYERS

from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport.base import write_checksum
from vllm_ndp.device_client.client import DeviceClient

PROGRAM = [sys.executable, "-P", "-m", "ndp_device"]
PATIENCE_S = 60.0


class Device:
    def __init__(
        self,
        model_dir: Path,
        directory: Path,
        limits: Callable[[], None] | None = None,
        *,
        by_tcp: bool = False,
    ) -> None:
        self.path = directory / "private" / "device"
        address, without_keys = f"ipc://{self.path}", []
        if by_tcp:
            address, without_keys = "tcp://127.0.0.1:0", ["--insecure-loopback"]
        self._keys = LOOPBACK if by_tcp else None
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*PROGRAM, "serve", str(model_dir), "--address", address, *without_keys],
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=limits,
            )
        assert self.process.stdout is not None
        self.address: str = json.loads(self.process.stdout.readline())["address"]

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.communicate()

    def resident(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def raw(self) -> socket.socket:
        """A connection that has greeted as a ZeroMQ socket does and may send messages."""
        return greeted(self.address)

    @contextmanager
    def host(self, *, shared_memory: bool = True) -> Iterator[DeviceClient]:
        client = DeviceClient(self.address, deadline_ms=PATIENCE_S * 1e3, shared_memory=shared_memory, keys=self._keys)
        try:
            client.connect(PATIENCE_S)
            client.install_plan(1, np.full((LAYERS, EXPERTS), 16, np.uint8))
            client.activate_plan(1)
            yield client
        finally:
            client.close()

    @contextmanager
    def honest_host(self) -> Iterator[DeviceClient]:
        """One by the socket, whom nothing that others do meanwhile may cost a call."""
        with self.host(shared_memory=False) as client:
            execute(client)
            yield client
            execute(client)
            assert (client.counters.lost, client.counters.unavailable) == (0, 0)


def execute(client: DeviceClient) -> None:
    rows, experts, bits = np.zeros(1, np.int32), np.ones(1, np.int32), np.full(1, 16, np.uint8)
    x = np.ones((1, HIDDEN), np.float32)
    client.finish_execute(client.begin_execute(0, 0, 0, x, rows, experts, bits, np.ones(1, np.float32)))


def request(asked: msg.Message, tensors: codec.Tensors | None = None) -> bytes:
    header, body = codec.encode(asked, tensors)
    return message(write_checksum(header, body), bytes(body))


def assert_serves(device: Device) -> None:
    with device.host() as client:
        execute(client)
    assert device.process.poll() is None
