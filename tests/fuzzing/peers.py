"""What a device receives: real messages, ways to damage them, and the code that meets them first.

An input is one string of bytes, so that any fuzzer can make it; it ends well when nothing but what is allowed is raised
and every answer can be read. Damaged headers and lies to a host: test_device_codec.py, test_device_client_lies.py.
"""

import contextlib
import functools
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from caller import pairs_of
from paths import ROOT
from reference_kernel import REFERENCE
from small_checkpoint import write_small_checkpoint

from fuzzing.mutate import mutated_bytes, with_one_change
from ndp_device.handler import Handler
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.protocol.codec import Frames
from ndp_device.replicas.store import ExpertStore
from ndp_device.timing.spec import load_hardware
from ndp_device.transport.base import damage_of, write_checksum

Run = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """`seeds`: real inputs. `run`: raises where an input ends badly."""

    name: str
    seeds: Callable[[], list[bytes]]
    mutated: Callable[[random.Random, bytes], bytes]
    run: Run
    cases: int
    """Of these, for one of a file."""


def joined(header: bytes, body: bytes) -> bytes:
    """Two frames as one input."""
    header = bytes(header)[:65535]
    return len(header).to_bytes(2, "little") + header + bytes(body)


def split(data: bytes) -> tuple[bytes, bytes]:
    end = 2 + int.from_bytes(data[:2], "little")
    return data[2:end], data[end:]


def sealed(header: bytes, body: bytes) -> Frames:
    """With a checksum that is right, whatever the rest is."""
    return write_checksum(header, body), body


def mutated_frames(rng: random.Random, data: bytes) -> bytes:
    """Fields of the header replaced and sealed again, mostly; else any bytes."""
    if rng.random() < 0.25:
        return mutated_bytes(rng, data)
    header, body = split(data)
    try:
        fields = msgspec.msgpack.decode(header)
        header = msgspec.msgpack.encode(with_one_change(rng, fields))
    except (msgspec.DecodeError, msgspec.EncodeError, OverflowError, TypeError, RecursionError, UnicodeError):
        header = mutated_bytes(rng, header)
    if rng.random() < 0.2:
        body = mutated_bytes(rng, body)
    return joined(header, body)


@functools.cache
def _server_and_host() -> Any:
    """A device's socket, and a host that has sent something: made once, because no peer may cost a host anything."""
    sys.path.append(str(ROOT / "tests" / "ndp_device" / "transport"))
    import raw_zmtp
    import server_by_hand

    server = server_by_hand.serving(Path(tempfile.mkdtemp(prefix="ndp-fuzz-")))
    host = server_by_hand.host_of(server.address)
    ping = codec.encode(msg.Ping(1))
    server_by_hand.ask(server, host, ping)
    return raw_zmtp, server, host, ping


def _stream_seeds() -> list[bytes]:
    zmtp, _, _, ping = _server_and_host()
    hello = zmtp.GREETING + zmtp.READY
    sound = write_checksum(*ping), bytes(ping[1])
    return [*zmtp.WITHOUT_HANDSHAKE.values(), hello + zmtp.message(*map(bytes, sound)), hello + zmtp.message(b"", b"x")]


def _run_stream(data: bytes) -> None:
    """Whatever a connection carries: nothing is raised, and the message that an honest host sends meanwhile arrives."""
    zmtp, server, host, ping = _server_and_host()
    with zmtp.connected(server.address) as peer:
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.sendall(data)
        assert host.send(ping)
        honest = bytes(write_checksum(*ping))
        while bytes(server.until_one().frames[0]) != honest:
            pass


@functools.cache
def _store() -> ExpertStore:
    folder = Path(tempfile.mkdtemp(prefix="ndp-fuzz-"))
    return ExpertStore(write_small_checkpoint(folder / "model"), None, kernel=REFERENCE)


def _handler() -> Handler:
    return Handler(_store(), REFERENCE, load_hardware("h100-ndp512"))


def _conversation() -> list[Frames]:
    """A host's whole life: hello, a plan, two calls, a question."""
    flags = np.full((2, 3), 16, np.uint8)
    pairs = pairs_of(np.ones((2, 16), np.float32), [0, 1], [0, 2], [16, 16], [0.5, 0.25])
    asked: list[tuple[msg.Message, Any]] = [
        (msg.Hello(1, versions=(msg.VERSION, msg.VERSION), client="fuzz"), None),
        (msg.InstallPlan(2, epoch=1, expected_epoch=0), {"replicas": flags}),
        (msg.ActivatePlan(3, epoch=1), None),
        (msg.Execute(4, epoch=1, layer=0, step=0, submit_ps=0, ttl_us=1000), pairs),
        (msg.Execute(5, epoch=1, layer=1, step=0, submit_ps=10, ttl_us=1000), pairs),
        (msg.Ping(6), None),
        (msg.Describe(7), None),
    ]
    return [codec.encode(request, tensors) for request, tensors in asked]


def _handler_seeds() -> list[bytes]:
    whole = [joined(*frames) for frames in _conversation()]
    return [b"".join(len(one).to_bytes(4, "little") + one for one in whole)]


def _messages(data: bytes) -> list[bytes]:
    found = []
    while len(data) > 4 and len(found) < 16:
        end = 4 + int.from_bytes(data[:4], "little")
        found.append(data[4:end])
        data = data[end:]
    return found


def _mutated_conversation(rng: random.Random, data: bytes) -> bytes:
    whole = _messages(data)
    at = rng.randrange(len(whole)) if whole else 0
    kind = rng.randrange(6)
    if not whole or kind == 0:
        return mutated_bytes(rng, data)
    if kind == 1:
        del whole[at]
    elif kind == 2:
        whole.insert(at, rng.choice(whole))
    else:
        whole[at] = mutated_frames(rng, whole[at])
    return b"".join(len(one).to_bytes(4, "little") + one for one in whole)


def _run_handler(data: bytes) -> None:
    """Exactly one answer to each message, readable and by this device; never an exception."""
    handler = _handler()
    for one in _messages(data):
        frames = sealed(*split(one))
        answer = handler.reply(b"host", frames, damage_of(*frames), 0)
        reply, _ = codec.decode_reply(*answer)
        assert reply.incarnation == handler.incarnation
        assert not (isinstance(reply, msg.Refusal) and reply.code == "internal"), reply.message


def targets() -> list[Target]:
    return [
        Target("stream", _stream_seeds, mutated_bytes, _run_stream, 8),
        Target("handler", _handler_seeds, _mutated_conversation, _run_handler, 1),
    ]
