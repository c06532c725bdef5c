"""What hosts ask a device, whose right answers are known beforehand; and one client of a handler, without a socket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from small_checkpoint import EXPERTS, LAYERS

from ndp_device.common.errors import DeviceError
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.handler import Handler
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.replicas.store import ExpertStore
from ndp_device.transport.base import damage_of, write_checksum

ALL = np.full((LAYERS, EXPERTS), 31, np.uint8)
"""A plan that asks for every expert in full precision and at every width that all replicas have."""


def pairs_of(x: NDArray[Any], rows: ArrayLike, experts: ArrayLike, bits: ArrayLike, gates: ArrayLike) -> codec.Tensors:
    """What Execute carries."""
    return {
        "x": x,
        "pair_rows": np.array(rows, np.int32),
        "pair_experts": np.array(experts, np.int32),
        "pair_bits": np.array(bits, np.uint8),
        "gates": np.array(gates, np.float32),
    }


@dataclass(frozen=True)
class Call:
    layer: int
    x: NDArray[np.float32]
    rows: NDArray[np.int32]
    experts: NDArray[np.int32]
    bits: NDArray[np.uint8]
    gates: NDArray[np.float32]
    y: NDArray[np.float32]  # what a device must answer, to the bit

    def begin(self, client: Any, step: int = 0) -> Any:
        return client.begin_execute(
            self.layer, step, step * 10**6, self.x, self.rows, self.experts, self.bits, self.gates
        )


def random_calls(store: ExpertStore, kernel: Any, count: int, seed: int) -> list[Call]:
    """Random rows on random experts of every layer, in full precision; the answers come from the kernel itself."""
    rng, calls = np.random.default_rng(seed), []
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


class Caller:
    """One client of a handler: asks, checks that the answer is its own, and raises refusals."""

    def __init__(self, handler: Handler, name: bytes = b"a") -> None:
        self.handler, self.name, self.last_id = handler, name, 0

    def ask(
        self, kind: type[msg.Message], tensors: codec.Tensors | None = None, waited_us: int = 0, **fields: Any
    ) -> Any:
        self.last_id += 1
        header, body = codec.encode(kind(self.last_id, **fields), tensors)
        frames = (write_checksum(header, body), body)
        reply, arrays = codec.decode_reply(*self.handler.reply(self.name, frames, damage_of(*frames), waited_us))
        assert reply.id == self.last_id
        assert reply.incarnation == self.handler.incarnation
        if isinstance(reply, msg.Refusal):
            raise DeviceError(reply.code, reply.message, retryable=reply.retryable)
        return (reply, *arrays.values()) if arrays else reply

    def hello(self, **fields: Any) -> msg.Welcome:
        return self.ask(msg.Hello, **{"versions": (msg.VERSION, msg.VERSION), "client": "test"} | fields)

    def install(self, epoch: int, replicas: NDArray[np.uint8] = ALL, expected_epoch: int = 0) -> NDArray[np.uint8]:
        return self.ask(msg.InstallPlan, {"replicas": replicas}, epoch=epoch, expected_epoch=expected_epoch)[1]

    def ready(self, replicas: NDArray[np.uint8] = ALL) -> Caller:
        self.hello()
        self.install(1, replicas)
        self.ask(msg.ActivatePlan, epoch=1)
        return self

    def execute(self, tensors: codec.Tensors, waited_us: int = 0, **fields: Any) -> tuple[msg.Result, NDArray[Any]]:
        defaults = {"epoch": 1, "layer": 0, "step": 0, "submit_ps": 0, "ttl_us": 1000}
        return self.ask(msg.Execute, tensors, waited_us, **defaults | fields)
