"""What do keys cost: a message over tcp to the device's transport and back, encrypted and not, 8 KiB and 1 MiB?

The peer is a process that answers with the bytes it got, on loopback. Ours is ZmqTransport at one end and ZmqServer at
the other, with checksums; `connect` is from nothing to the first answer. Plain and encrypted take turns, run by run, so
that the ratio holds on a busy machine too; the least and the median of each are given.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from measured import Measurement, add_json_option

from ndp_device.protocol.messages import VERSION
from ndp_device.transport import connect, listen
from ndp_device.transport.address import INSECURE_LOOPBACK
from ndp_device.transport.keys import make_keys

HEADER = msgspec.msgpack.encode({"type": "ping", "pad": "x" * 165, "ndp": VERSION, "crc": bytes(4)})
WARM_UP = 20
HOST = "bench"


def echo(address: str, keys: str) -> None:
    """The peer."""
    server = listen(address, Path(keys))
    print("ready", flush=True)
    while True:
        for received in server.receive(1000):
            assert received.damage is None
            server.send(received.client, received.frames)
            received.release()


def round_trips(folder: Path, *, encrypted: bool, sizes: dict[int, int]) -> dict[str, list[float]]:
    """Microseconds of each round trip by size, and of the first one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, __file__, "--echo", address, "--keys", str(folder) if encrypted else INSECURE_LOOPBACK]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert peer.stdout is not None
        assert peer.stdout.readline()
        found: dict[str, list[float]] = {}
        begun = time.perf_counter_ns()
        transport = connect(address, folder / f"{HOST}.key_secret" if encrypted else Path(INSECURE_LOOPBACK))

        def once(body: bytes) -> float:
            start = time.perf_counter_ns()
            while not transport.send((HEADER, body)):
                transport.receive(0.001)
            while transport.receive(1.0) is None:
                pass
            return (time.perf_counter_ns() - start) / 1e3

        once(b"")
        found["connect"] = [(time.perf_counter_ns() - begun) / 1e3]
        for size, count in sizes.items():
            body = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
            found[str(size)] = [once(body) for _ in range(WARM_UP + count)][WARM_UP:]
        transport.close()
        return found
    finally:
        peer.kill()
        peer.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of both")
    parser.add_argument("--count", type=int, default=400, help="round trips of 8 KiB in each; a quarter of it at 1 MiB")
    add_json_option(parser)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    parser.add_argument("--keys", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.echo:
        echo(given.echo, given.keys)
    sizes = {0: given.count, 8192: given.count, 65536: given.count // 2, 1 << 20: given.count // 4, 16 << 20: 20}
    measurement = Measurement(__doc__ or "")
    taken: dict[bool, dict[str, list[list[float]]]] = {False: {}, True: {}}
    with tempfile.TemporaryDirectory() as folder:
        make_keys(Path(folder, "keys"), HOST)
        for _ in range(given.rounds):
            for encrypted, runs in taken.items():
                for name, times in round_trips(Path(folder, "keys"), encrypted=encrypted, sizes=sizes).items():
                    runs.setdefault(name, []).append(times)
    results: list[dict[str, Any]] = []
    print(f"{'':10}{'plain':>12}{'keys':>12}{'ratio':>8}   us, median of the runs' medians")
    for name in taken[False]:
        medians = {keys: statistics.median(map(statistics.median, runs[name])) for keys, runs in taken.items()}
        least = {keys: min(map(min, runs[name])) for keys, runs in taken.items()}
        results.append(
            {
                "what": name,
                "plain_p50_us": round(medians[False], 1),
                "keys_p50_us": round(medians[True], 1),
                "plain_min_us": round(least[False], 1),
                "keys_min_us": round(least[True], 1),
                "ratio_p50": round(medians[True] / medians[False], 2),
                "ratio_min": round(least[True] / least[False], 2),
            }
        )
        print(f"{name:10}{medians[False]:12.1f}{medians[True]:12.1f}{medians[True] / medians[False]:8.2f}")
    measurement.end({"results": results}, given.json)


if __name__ == "__main__":
    main()
