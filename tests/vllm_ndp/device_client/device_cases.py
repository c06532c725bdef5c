"""A device of the bundled model in full precision, and calls whose right answers are known beforehand."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paths import MODEL

from ndp_device.common.errors import RemoteProtocolError
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.handler import DeviceConfig, Handler
from ndp_device.kernels import load_kernel
from ndp_device.protocol.codec import Frames
from ndp_device.replicas.store import ExpertStore
from ndp_device.transport.base import damage_of, require_intact, write_checksum
from vllm_ndp.device_client.client import DeviceClient, ExecuteHandle


@dataclass(frozen=True)
class Call:
    layer: int
    x: NDArray[np.float32]
    rows: NDArray[np.int32]
    experts: NDArray[np.int32]
    bits: NDArray[np.uint8]
    gates: NDArray[np.float32]
    y: NDArray[np.float32]  # what the device must answer, to the bit

    def begin(self, client: DeviceClient, step: int = 0) -> ExecuteHandle:
        return client.begin_execute(
            self.layer, step, step * 10**6, self.x, self.rows, self.experts, self.bits, self.gates
        )


def make_calls(count: int = 16) -> list[Call]:
    """Random rows on random experts of every layer; the answers come from the reference kernel, called directly."""
    kernel = load_kernel("reference")
    store = ExpertStore(MODEL, None, kernel=kernel)
    rng = np.random.default_rng(7)
    calls = []
    for number in range(count):
        layer, pairs = number % store.shape.num_layers, int(rng.integers(1, 5))
        x = rng.standard_normal((int(rng.integers(1, 4)), store.shape.hidden_size), np.float32)
        rows = rng.integers(0, len(x), pairs).astype(np.int32)
        experts = rng.integers(0, store.shape.num_experts, pairs).astype(np.int32)
        gates = rng.uniform(0, 1, pairs).astype(np.float32)
        distinct = list(dict.fromkeys(experts.tolist()))
        index = np.array([distinct.index(expert) for expert in experts], np.int32)
        prepared = [store.get(layer, expert, FULL_PRECISION_BITS) for expert in distinct]
        y = kernel.execute(x, prepared, rows, index, gates)
        calls.append(Call(layer, x, rows, experts, np.full(pairs, FULL_PRECISION_BITS, np.uint8), gates, y))
    return calls


def make_handler(model_dir: Path = MODEL) -> Handler:
    return Handler.from_config(DeviceConfig(address="ipc:///in/process", model_dir=model_dir, kernel="reference"))


def full_plan(layers: int = 4, experts: int = 8) -> NDArray[np.uint8]:
    """Every expert in full precision: bit 4 of a plan's mask."""
    return np.full((layers, experts), 1 << 4, np.uint8)


class FaultyDevice:
    """Connections to a handler in this process whose replies pass through `fault`, a callable like Failpoints."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.reachable = True
        self.num_connections = 0
        self.fault: Any = lambda reply: (reply,)

    def connect(self, address: str, keys: Path | None) -> FaultyTransport:
        self.num_connections += 1
        return FaultyTransport(self, b"%d" % self.num_connections)


class FaultyTransport:
    """Asks the handler where a socket would: same frames, same checks, no other process."""

    is_ready = True
    can_share_memory = False

    def __init__(self, device: FaultyDevice, client: bytes) -> None:
        self._device, self._client = device, client
        self._replies: deque[Frames] = deque(maxlen=64)

    def attach(self, offer: object) -> bool:
        return False

    def send(self, frames: Frames) -> bool:
        if not self._device.reachable:
            return False
        header, body = frames
        request = write_checksum(header, body), body
        header, body = self._device.handler.reply(self._client, request, damage_of(*request))
        self._replies.extend(self._device.fault((write_checksum(header, body), body)))
        return True

    def send_execute(self, asked: object, tensors: object) -> bool:
        return False

    def send_ahead(self, order: object, asked: object) -> bool:
        return False

    def sent_ahead(self, crossed: object) -> None: ...

    def receive(self, timeout_s: float) -> Frames | None:
        if not self._replies:
            return None
        frames = self._replies.popleft()
        if len(frames) != 2:
            raise RemoteProtocolError(f"a message has two frames, the device sent {len(frames)}")
        require_intact(*frames)
        return frames

    def close(self) -> None:
        self._replies.clear()
