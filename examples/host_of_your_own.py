"""A host in pyzmq and msgpack alone: what a program of yours needs to compute on a device and read its simulated times.

Imports nothing of this project. It says hello, promises two experts of layer 0, sends one row to both, and prints what
came back: sums, and the simulated picoseconds of each stage. docs/protocol.md is the definition.

    ndp-device serve models/tiny-mixtral --replicas models/tiny-mixtral-replicas --address ipc:///tmp/ndp-example/device
    python examples/host_of_your_own.py ipc:///tmp/ndp-example/device
"""

from __future__ import annotations

import itertools
import sys
import zlib
from typing import Any

import msgpack
import numpy as np
import zmq

VERSION = 2 << 8
DTYPES = {"float32": np.float32, "int32": np.int32, "uint8": np.uint8}
PATIENCE_MS = 10_000


class Device:
    """One connection, one request at a time."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._ids = itertools.count(1)

    def ask(self, kind: str, tensors: dict[str, np.ndarray] | None = None, **fields: Any) -> dict[str, Any]:
        """The reply's map, its tensors among its fields. Exits with the device's sentence where it refuses."""
        listed, body = [], b""
        for name, array in (tensors or {}).items():
            listed.append([name, array.dtype.name, list(array.shape), len(body)])
            body += array.tobytes()
            body += bytes(-len(body) % 64)  # each tensor takes a multiple of 64
        message = {"type": kind, "id": next(self._ids), **fields, "ndp": VERSION, "tensors": listed}
        header = msgpack.packb({**message, "crc": bytes(4)})[:-4]  # its last four bytes are the checksum's
        header += zlib.crc32(body, zlib.crc32(header)).to_bytes(4, "little")
        self._socket.send_multipart([header, body])
        if not self._socket.poll(PATIENCE_MS):
            sys.exit(f"no answer within {PATIENCE_MS / 1000:.0f} s: is a device listening there?")
        header, body = self._socket.recv_multipart()
        if zlib.crc32(body, zlib.crc32(header[:-4])) != int.from_bytes(header[-4:], "little"):
            sys.exit("the answer was damaged on its way")
        reply: dict[str, Any] = msgpack.unpackb(header)
        if reply["type"] == "refusal":
            sys.exit(f"the device refused: {reply['message']}")
        for name, dtype, shape, offset in reply["tensors"]:
            count = int(np.prod(shape))
            reply[name] = np.frombuffer(body, DTYPES[dtype], count, offset).reshape(shape)
        return reply


def main() -> None:
    device = Device(sys.argv[1] if len(sys.argv) > 1 else "ipc:///tmp/ndp-example/device")
    welcome = device.ask("hello", versions=[VERSION, VERSION], client="a host of your own")
    layers, experts, hidden = (welcome[name] for name in ("num_layers", "num_experts", "hidden_size"))
    print(f"{welcome['hardware']}: {layers} layers of {experts} experts, hidden size {hidden}")

    plan = np.zeros((layers, experts), np.uint8)
    plan[0, :2] = 1 << 2, 1 << 1  # expert 0 at 3 bits, expert 1 at 2: bit b - 1 of the byte promises b bits
    missing = device.ask("install_plan", {"replicas": plan}, epoch=1, expected_epoch=0)["missing"]
    if missing.any():
        sys.exit("the device lacks what the plan needs: start it with --replicas")
    device.ask("activate_plan", epoch=1)

    pairs: dict[str, np.ndarray] = {
        "x": np.random.default_rng(0).standard_normal((1, hidden)).astype(np.float32),
        "pair_rows": np.array([0, 0], np.int32),
        "pair_experts": np.array([0, 1], np.int32),
        "pair_bits": np.array([3, 2], np.uint8),
        "gates": np.array([0.75, 0.25], np.float32),
    }
    result = device.ask("execute", pairs, epoch=1, layer=0, step=0, submit_ps=0, ttl_us=1_000_000)
    print("y:", result["y"][0, :4].round(4), "...")
    print("simulated ps:", result["timing"])


if __name__ == "__main__":
    main()
