"""When a device dies under its host: how soon is it noticed, and how soon is the next one in use?

Real processes and kill -9 at a random instant, again and again; the host is the plugin's client and calls all the time.

    ended     from the kill until the system has ended the process: nobody can notice before
    noticed   from the kill until the call that it hit has failed, or the first call after it
    again     from the moment the next device says that it is ready until it has served a call
    away      a call while there is no device, until its host knows that it has to compute it: what being degraded adds
    wrong     results that are not the kernel's own to the bit: must be 0
    late      calls that ended after their deadline: must be 0
    slow      calls that a device which was up did not answer in time, or while its host came back from that

Lives are forked from a process that has every expert loaded, so that thousands fit into minutes; `--fresh` starts the
program itself each time, as the plugin does, and `again` has the experts of the plan in it. Not in the figures: what a
host spends on computing a lost call itself.

What there is so far goes to FILE every hundred kills, and `--seconds` ends a run: a run that is stopped is a run.

    python benchmarks/device_deaths.py --kills 1000 [--way memory|socket] [--fresh] [--pause MS] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from typing import IO, Any

import numpy as np
from measured import ROOT, Measurement, add_json_option

from ndp_device.config import DeviceConfig
from ndp_device.errors import DeviceUnavailable
from ndp_device.handler import Handler
from ndp_device.kernels import load_kernel
from ndp_device.parent import Parent
from ndp_device.replicas.store import ExpertStore
from ndp_device.server import Server
from ndp_device.transport import listen
from ndp_device.widths import FULL_PRECISION_BITS
from vllm_ndp.device.client import DeviceClient

MODEL = ROOT / "models" / "tiny-mixtral"
DEADLINE_MS = 1000.0
PROGRAM = [sys.executable, "-P", "-m", "ndp_device", "serve", str(MODEL), "--kernel", "native"]
NOTICED_GOAL_MS, AGAIN_GOAL_MS = 5.0, 100.0


def nursery(address: str, fresh: bool) -> None:
    """Reads "start" and "kill SECONDS" from its input; says when a device was ready, and when it was killed."""
    config = DeviceConfig(address=address, model_dir=MODEL, kernel="native")
    handler = None if fresh else Handler.from_config(config)
    if handler is not None:
        store = next(iter(handler._shelves)).store
        for layer, expert in itertools.product(range(store.shape.num_layers), range(store.shape.num_experts)):
            store.get(layer, expert, FULL_PRECISION_BITS)
    child = 0
    process: subprocess.Popen[bytes] | None = None
    for line in sys.stdin:
        word, _, seconds = line.strip().partition(" ")
        if word == "start" and handler is None:
            follow = ["--address", address, "--die-with-parent", str(os.getpid())]
            process = subprocess.Popen([*PROGRAM, *follow], stdout=subprocess.PIPE)
            assert process.stdout is not None
            assert b"ready" in process.stdout.readline()
            child = process.pid
            say("ready")
        elif word == "start":
            child = os.fork()
            if not child:
                sys.stdin.close()
                assert handler is not None
                handler.incarnation = uuid.uuid4().hex
                Server(listen(address), handler, parent=Parent(os.getppid())).run(lambda: say("ready"))
                os._exit(0)
        else:
            time.sleep(float(seconds))
            at_s = time.monotonic()
            os.kill(child, signal.SIGKILL)
            print(f"killed {at_s}", flush=True)
            if process is None:
                os.waitpid(child, 0)
            else:
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
            say("gone")


def say(word: str) -> None:
    os.write(1, f"{word} {time.monotonic()}\n".encode())


class Lives:
    """The process that devices come from, and what it says."""

    def __init__(self, address: str, fresh: bool) -> None:
        command = [sys.executable, __file__, "--nursery", address, *(["--fresh"] if fresh else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._held = b""

    def ask(self, what: str) -> None:
        pipe: IO[bytes] | None = self._process.stdin
        assert pipe is not None
        pipe.write(f"{what}\n".encode())

    def heard(self, timeout_s: float) -> tuple[str, float] | None:
        output = self._process.stdout
        assert output is not None
        while b"\n" not in self._held:
            if not select.select([output], [], [], timeout_s)[0]:
                return None
            data = os.read(output.fileno(), 4096)
            assert data, "the process that devices come from has ended"
            self._held += data
        line, _, self._held = self._held.partition(b"\n")
        word, _, at_s = line.decode().partition(" ")
        return word, float(at_s)

    def wait_for(self, word: str) -> float:
        while (heard := self.heard(60.0)) is None or heard[0] != word:
            assert heard is not None, f"nobody said {word}"
        return heard[1]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Host:
    """Calls of one row with known answers."""

    def __init__(self, address: str, *, memory: bool) -> None:
        kernel, store = load_kernel("native"), ExpertStore(MODEL, None, kernel=load_kernel("native"))
        shape = store.shape
        self.client = DeviceClient(address, deadline_ms=DEADLINE_MS, shared_memory=memory)
        self._x = np.random.default_rng(0).standard_normal((1, shape.hidden_size), np.float32)
        self._pairs = (
            np.zeros(2, np.int32), np.array([1, 2], np.int32), np.full(2, FULL_PRECISION_BITS, np.uint8),
            np.array([0.25, 0.75], np.float32),
        )  # fmt: skip
        self._answers = [
            kernel.execute(
                self._x, [store.get(layer, expert, FULL_PRECISION_BITS) for expert in (1, 2)], self._pairs[0],
                np.array([0, 1], np.int32), self._pairs[3],
            )
            for layer in range(shape.num_layers)
        ]  # fmt: skip
        self.plan = np.full((shape.num_layers, shape.num_experts), 1 << 4, np.uint8)
        self.step = self.served = self.wrong = self.late = self.slow = 0

    def call(self) -> bool:
        self.step += 1
        layer = self.step % len(self._answers)
        begun_s = time.monotonic()
        try:
            handle = self.client.begin_execute(layer, self.step, self.step * 1000, self._x, *self._pairs)
            result = self.client.finish_execute(handle)
        except DeviceUnavailable:
            return False
        finally:
            self.late += time.monotonic() - begun_s > DEADLINE_MS / 1e3 + 0.1
        self.served += 1
        self.wrong += not np.array_equal(result.y, self._answers[layer])
        return True


def percentiles(times_s: list[float]) -> dict[str, float]:
    found = np.percentile(np.array(times_s) * 1e3, [50, 90, 99, 100])
    return dict(zip(("p50_ms", "p90_ms", "p99_ms", "max_ms"), found.round(3).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--way", choices=("memory", "socket"), default="memory")
    parser.add_argument("--fresh", action="store_true", help="the whole program each time, not a fork")
    parser.add_argument("--pause", type=float, default=2.0, metavar="MS", help="between calls while none is served")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    add_json_option(parser)
    parser.add_argument("--nursery", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.nursery:
        nursery(given.nursery, given.fresh)
        return
    measurement, rng, begun_s = Measurement(__doc__), random.Random(given.seed), time.monotonic()
    ended, noticed, again, away = [], [], [], []

    def so_far() -> dict[str, Any]:
        return {
            "way": given.way, "fresh": given.fresh, "kills": len(noticed), "served": host.served, "wrong": host.wrong,
            "late": host.late, "slow": host.slow, "ended": percentiles(ended), "noticed": percentiles(noticed),
            "again": percentiles(again), "away": percentiles(away),
            "noticed_within_5_ms": round(float(np.mean(np.array(noticed) < NOTICED_GOAL_MS / 1e3)), 4),
            "again_within_100_ms": round(float(np.mean(np.array(again) < AGAIN_GOAL_MS / 1e3)), 4),
            "seconds": round(time.monotonic() - begun_s, 1),
        }  # fmt: skip

    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/private/device"
        lives, host = Lives(address, given.fresh), Host(address, memory=given.way == "memory")
        try:
            lives.ask("start")
            lives.wait_for("ready")
            host.client.connect(30)
            host.client.install_plan(1, host.plan)
            host.client.activate_plan(1)
            for _ in range(given.kills):
                for _ in range(rng.randrange(1, 20)):
                    while not host.call():  # on a busy machine a device that is up can miss a deadline
                        host.slow += 1
                        time.sleep(given.pause / 1e3)
                lives.ask(f"kill {rng.random() * 0.004}")
                while host.call():
                    pass
                failed_s = time.monotonic()
                killed_s = lives.wait_for("killed")
                noticed.append(failed_s - killed_s)
                ended.append(lives.wait_for("gone") - killed_s)
                lives.ask("start")
                ready_s = 0.0
                while not ready_s:  # a host goes on meanwhile, and computes for itself
                    call_s = time.monotonic()
                    if not host.call():
                        away.append(time.monotonic() - call_s)
                    if (heard := lives.heard(given.pause / 1e3)) is not None and heard[0] == "ready":
                        ready_s = heard[1]
                while not host.call():
                    time.sleep(given.pause / 1e3)
                again.append(max(time.monotonic() - ready_s, 0.0))
                if len(again) % 100 == 0:
                    measurement.save(so_far(), given.json)
                if time.monotonic() - begun_s > given.seconds:
                    break
        finally:
            host.client.close()
            lives.close()
    figures = so_far()
    for name in ("ended", "noticed", "again", "away"):
        print(f"{name:9} " + "  ".join(f"{key} {value}" for key, value in figures[name].items()))
    measurement.end(figures, given.json)


if __name__ == "__main__":
    main()
