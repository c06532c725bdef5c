"""One client of a handler, without a socket: asks, checks that the answer is its own, and raises refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from small_checkpoint import EXPERTS, LAYERS

from ndp_device.common.errors import DeviceError
from ndp_device.handler import Handler
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport.base import damage_of, write_checksum

ALL = np.full((LAYERS, EXPERTS), 31, np.uint8)
"""A plan that asks for every expert in full precision and at every width that all replicas have."""


class Caller:
    """One client of a handler."""

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
