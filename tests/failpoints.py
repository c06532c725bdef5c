"""Faults on purpose, in a device's process or in a test's: what leaves for a reply is damaged, late, twice or missing.

python tests/failpoints.py serve ... --failpoint KIND=PROBABILITY[:MILLISECONDS] --failpoint-seed N

is `ndp-device serve` with such faults. They are drawn from a seeded generator, so a run can be repeated.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ndp_device import transport
from ndp_device.__main__ import main
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Frames
from ndp_device.transport.base import write_checksum
from ndp_device.transport.shm import checked_part
from ndp_device.transport.zmq_server import ZmqServer
from vllm_ndp.device_client.process import DeviceProcess

KINDS = (
    "drop",
    "delay",
    "hang",
    "dup",
    "stale",
    "bit_flip",
    "header_flip",
    "truncate",
    "extra_frame",
    "garbage",
    "wrong_id",
    "wrong_epoch",
    "wrong_incarnation",
    "wrong_shape",
    "wrong_dtype",
    "nan",
    "other_major",
    "exit",
)
_DEFAULT_MS = {"delay": 20, "hang": 10_000}


@dataclass(frozen=True)
class Failpoint:
    kind: str
    probability: float
    milliseconds: int

    @classmethod
    def parse(cls, text: str) -> Failpoint:
        kind, _, rest = text.partition("=")
        probability, _, milliseconds = rest.partition(":")
        assert kind in KINDS
        return cls(kind, float(probability), int(milliseconds or _DEFAULT_MS.get(kind, 0)))


class Failpoints:
    """At most one fault per reply."""

    def __init__(self, points: list[Failpoint], seed: int) -> None:
        self._points = points
        self._random = random.Random(seed)
        self._previous: Frames | None = None

    def __call__(self, reply: Frames) -> Iterator[Frames]:
        draw = self._random.random()
        for point in self._points:
            if draw < point.probability:
                yield from self._fail(point, reply)
                return
            draw -= point.probability
        self._previous = reply
        yield reply

    def _fail(self, point: Failpoint, reply: Frames) -> Iterator[Frames]:
        header, body = bytes(reply[0]), bytes(reply[1])
        match point.kind:
            case "drop":
                return
            case "delay" | "hang":
                time.sleep(point.milliseconds / 1e3)
                yield reply
            case "dup":
                yield reply
                yield reply
            case "stale":
                yield self._previous or reply
                yield reply
            case "bit_flip":
                yield (header, self._flip(body)) if body else (self._flip(header), body)
            case "header_flip":
                yield self._flip(header), body
            case "truncate":
                yield (header, body[: len(body) // 2]) if body else (header[: len(header) // 2], body)
            case "extra_frame":
                yield header, body, b"more"
            case "garbage":
                yield self._random.randbytes(self._random.randrange(1, 200)), body
            case "exit":
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                yield self._rewrite(point.kind, header, body)

    def _flip(self, frame: bytes) -> bytes:
        damaged = bytearray(frame)
        damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)

    def _rewrite(self, kind: str, header: bytes, body: bytes) -> Frames:
        """A lie with a correct checksum."""
        if codec.has_fixed_head(header):
            header = codec.encode(*codec.decode_reply(header, body))[0]
        fields: dict[str, Any] = msgspec.msgpack.decode(header)
        match kind:
            case "wrong_id":
                fields["id"] += self._random.choice((-1, 1))
            case "wrong_epoch":
                fields["epoch"] = fields.get("epoch", 0) + 1
            case "wrong_incarnation":
                fields["incarnation"] = "0" * 32
            case "other_major":
                fields["ndp"] += 1 << 8
            case "nan" if fields["tensors"]:
                body = bytes(4) + b"\x00\x00\xc0\x7f" + body[8:]  # the second float32 becomes a quiet NaN
            case "wrong_shape" if fields["tensors"]:
                name, dtype, shape, offset = fields["tensors"][0]
                fields["tensors"] = [[name, dtype, shape[::-1] + [1] * (shape[0] == shape[-1]), offset]]
            case "wrong_dtype" if fields["tensors"]:
                name, _, shape, offset = fields["tensors"][0]
                fields["tensors"] = [[name, "int32", shape, offset]]
        return write_checksum(msgspec.msgpack.encode(fields), body), body


def with_checksum(server: ZmqServer, client: bytes, frames: Frames) -> Frames:
    """The frames as the server would send them."""
    header, body = frames
    peer = server._peers.get(client)
    in_memory = peer is not None and peer.channel is not None and peer.channel.has_spoken
    return write_checksum(header, checked_part(body) if in_memory else body), body


def let_fail(server: ZmqServer, failpoints: Callable[[Frames], Iterable[Frames]]) -> None:
    """What the server sends passes through the failpoints."""
    send = server.send

    def failing(client: bytes, reply: Frames) -> None:
        for frames in failpoints(with_checksum(server, client, reply)):
            send(client, frames, writes_checksum=False)

    server.send = failing  # type: ignore[method-assign, assignment]


class FailingProcess(DeviceProcess):
    """An embedded device that takes --failpoint."""

    def _start(self) -> Any:
        if "-m" in self._arguments:
            at = self._arguments.index("-m")
            self._arguments[at : at + 2] = [__file__]
        return super()._start()


if __name__ == "__main__":
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--failpoint", action="append", type=Failpoint.parse)
    parser.add_argument("--failpoint-seed", type=int, default=0)
    asked, sys.argv[1:] = parser.parse_known_args()
    points, listen = Failpoints(asked.failpoint or [], asked.failpoint_seed), transport.listen

    def failing_listen(address: str, keys: Path | None = None) -> ZmqServer:
        server = listen(address, keys)
        let_fail(server, points)
        return server

    transport.listen = failing_listen
    main()
