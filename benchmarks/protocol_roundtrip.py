"""How long does a message take to the device and back: through shared memory, through the socket, and at the least?

The peer answers with the bytes it got. Each row is one payload size; floor = C, spinning, one memcpy each way (the
limit); slot and wire = shared memory and libzmq's socket, checksums written and checked; execute = the whole
DeviceClient and ndp-device with an Execute of one row and no pairs, so no expert is computed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from ndp_device.protocol.codec import Frames
from ndp_device.protocol.messages import VERSION, SlotOffer
from ndp_device.transport import connect, listen
from ndp_device.transport.zmq_client import ZmqTransport
from vllm_ndp.device_client.client import DeviceClient
from vllm_ndp.device_client.process import DeviceProcess

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measured import Measurement, add_json_option

ROOT = Path(__file__).resolve().parent.parent
HEADER = msgspec.msgpack.encode({"type": "ping", "pad": "x" * 165, "ndp": VERSION, "crc": bytes(4)})  # as an Execute's
WARM_UP = 50


def echo(address: str) -> None:
    """The peer: the first message asks for slots, every other one comes back as it is."""
    server = listen(address, None)
    print("ready", flush=True)
    while True:
        for received in server.receive(1000):
            if bytes(received.frames[0]).startswith(b"slots"):
                offer = msgspec.msgpack.encode(server.offer_memory(received.client)) + bytes(4)
                reply: Frames = (offer, b"")
            else:
                assert received.damage is None
                reply = received.frames
            server.send(received.client, reply)
            received.release()


def wait_for(transport: ZmqTransport) -> Frames:
    while True:
        frames = transport.receive(1.0)
        if frames is not None:
            return frames


def carried(num_bytes: int, count: int, *, slots: bool) -> list[int]:
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/echo"
        peer = subprocess.Popen([sys.executable, __file__, "--echo", address], stdout=subprocess.PIPE)
        try:
            assert peer.stdout is not None
            peer.stdout.readline()
            transport = connect(address, None)
            while not transport.send((b"slots" + bytes(4), b"")):
                time.sleep(0.001)
            header, _ = wait_for(transport)
            if slots:
                offer = msgspec.msgpack.decode(bytes(header)[:-4], type=SlotOffer | None)
                assert offer is not None, "no shared memory here"
                assert transport.attach(offer)
            body = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8).tobytes()
            times = []
            for _ in range(count + WARM_UP):
                start = time.perf_counter_ns()
                while not transport.send((HEADER, body)):
                    time.sleep(0.0001)
                wait_for(transport)
                times.append(time.perf_counter_ns() - start)
            transport.close()
            return times[WARM_UP:]
        finally:
            peer.kill()
            peer.wait()


def executed(count: int, *, slots: bool) -> list[int]:
    process = DeviceProcess.spawn(ROOT / "models" / "tiny-mixtral", None)
    try:
        client = DeviceClient(process.address, shared_memory=slots)
        welcome = client.connect(30)
        assert client.uses_shared_memory == slots
        client.install_plan(1, np.zeros((welcome.num_layers, welcome.num_experts), np.uint8))
        client.activate_plan(1)
        x = np.zeros((1, welcome.hidden_size), np.float32)
        nothing = np.zeros(0, np.int32)
        pairs = (nothing, nothing, np.zeros(0, np.uint8), np.zeros(0, np.float32))
        times = []
        for step in range(count + WARM_UP):
            start = time.perf_counter_ns()
            client.finish_execute(client.begin_execute(0, step, step * 10**9, x, *pairs))
            times.append(time.perf_counter_ns() - start)
        client.close()
        return times[WARM_UP:]
    finally:
        process.terminate()


def floor(num_bytes: int, count: int, program: Path) -> list[int]:
    output = subprocess.run([program, str(num_bytes), str(count)], capture_output=True, text=True, check=True).stdout
    return [int(line) for line in output.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0,8192,65536,1048576,16777216")
    parser.add_argument("--count", type=int, default=2000, help="round trips of 8 KB; fewer for larger ones")
    parser.add_argument("--repeat", type=int, default=3, help="interleaved repetitions; the median of each percentile")
    add_json_option(parser)
    parser.add_argument("--echo", metavar="ADDR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo:
        echo(arguments.echo)
    results: dict[tuple[str, int], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "floor"
        subprocess.run(["cc", "-O2", "-o", program, ROOT / "benchmarks" / "protocol_floor.c"], check=True)
        measurement = Measurement(__doc__)
        for _ in range(arguments.repeat):
            for size in (int(text) for text in arguments.sizes.split(",")):
                count = max(min(arguments.count, arguments.count * 65536 // max(size, 1)), 20)
                for name, times in (
                    ("floor", floor(size, count, program)),
                    ("slot", carried(size, count, slots=True)),
                    ("wire", carried(size, count, slots=False)),
                ):
                    results.setdefault((name, size), []).append(np.percentile(times, [50, 90, 99]).tolist())
            for slots in (True, False):
                times = executed(arguments.count, slots=slots)
                name = f"execute_{'slot' if slots else 'wire'}"
                results.setdefault((name, 0), []).append(np.percentile(times, [50, 90, 99]).tolist())
    rows = [
        dict(
            zip(
                ("name", "bytes", "p50_us", "p90_us", "p99_us"),
                (*key, *(np.median(runs, axis=0) / 1e3).round(1).tolist()),
                strict=True,
            )
        )
        for key, runs in sorted(results.items(), key=lambda item: (item[0][1], item[0][0]))
    ]
    print(f"{'':14}{'bytes':>10}{'p50':>10}{'p90':>10}{'p99':>10}   us, measured")
    for row in rows:
        print(f"{row['name']:14}{row['bytes']:>10}{row['p50_us']:>10}{row['p90_us']:>10}{row['p99_us']:>10}")
    measurement.end({"results": rows}, arguments.json)


if __name__ == "__main__":
    main()
