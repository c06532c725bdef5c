"""Do an older release and this one understand each other? Each one's device serves each one's host, in every way.

The other release is a checkout with an environment of its own. Ways: shared memory, socket, tcp, and tcp with keys; the
three messages have 1 row, 64 rows, and so many that request and answer travel in fragments. Every combination must give
the sums that its device gives the host of its own release by socket, to the bit, and lose no call.

    git worktree add --detach ../older 3db895e && cd ../older && python -m venv .venv && .venv/bin/pip install -e .[cpu]
    python benchmarks/interoperate.py ../older
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measured import ROOT, Measurement, add_json_option
from zmq.auth import load_certificate
from zmq.utils import z85

from ndp_device.transport.keys import make_keys

HIDDEN = 512
ROWS = (1, 64, 8192)  # the last: 16 MiB each way
WAYS = ("memory", "socket", "tcp", "keys")
NAME = "host"
HOST = """
import hashlib, json, sys
from pathlib import Path
import numpy as np
from vllm_ndp.device.client import DeviceClient
address, keys, shared, hidden, rows = json.loads(sys.argv[1])
client = DeviceClient(address, deadline_ms=60000, shared_memory=shared, keys=keys and Path(keys))
client.connect(60)
client.install_plan(1, np.full((1, 2), 16, np.uint8))
client.activate_plan(1)
found = {"memory": client.uses_shared_memory, "sums": []}
for n in rows:
    x = np.random.default_rng(n).standard_normal((n, hidden)).astype(np.float32)
    pairs = np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int32) % 2, np.full(n, 16, np.uint8)
    result = client.finish_execute(client.begin_execute(0, 0, 0, x, *pairs, np.ones(n, np.float32)))
    found["sums"].append(hashlib.sha256(result.y.tobytes()).hexdigest()[:16])
found["lost"] = client.counters.lost
client.close()
print(json.dumps(found))
"""


class Release:
    """A checkout: its program, its host, and how it wants its keys."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.python = tree, str(tree / ".venv" / "bin" / "python")
        self.has_own_files = (tree / "ndp_device" / "transport" / "curve.py").exists()  # before libzmq's certificates

    def device(self, model: Path, way: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
        address = f"ipc://{folder}/private/device" if way in ("memory", "socket") else "tcp://127.0.0.1:0"
        more = ["--keys", str(folder / self.keys_dir)] if way == "keys" else []
        if way == "tcp" and not self.has_own_files:
            more = ["--insecure-loopback"]
        command = [self.python, "-m", "ndp_device", "serve", str(model), "--address", address, *more]
        process = subprocess.Popen(command, cwd=self.tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())["address"]

    @property
    def keys_dir(self) -> str:
        return "older-keys" if self.has_own_files else "keys"

    def host(self, address: str, way: str, folder: Path) -> dict[str, Any]:
        keys = None
        if way == "keys":
            keys = str(folder / self.keys_dir / (f"{NAME}.key" if self.has_own_files else f"{NAME}.key_secret"))
        elif way == "tcp" and not self.has_own_files:
            keys = "insecure-loopback"
        asked = json.dumps([address, keys, way == "memory", HIDDEN, ROWS])
        done = subprocess.run([self.python, "-c", HOST, asked], cwd=self.tree, capture_output=True, text=True)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {"failed": done.stderr.splitlines()[-1]}


def write_older_keys(new: Path, old: Path) -> None:
    """The same pairs as files of the release that spoke CURVE itself: JSON with hexadecimal digits."""
    (old / "allowed").mkdir(mode=0o700, parents=True)
    device, host = ([z85.decode(key or b"").hex() for key in load_certificate(new / f"{name}.key_secret")]
                    for name in ("device", NAME))  # fmt: skip
    for path, contents in (
        (old / "device.key", {"public": device[0], "secret": device[1]}),
        (old / f"{NAME}.key", {"public": host[0], "secret": host[1], "device": device[0]}),
        (old / "allowed" / f"{NAME}.pub", {"public": host[0]}),
    ):
        path.touch(mode=0o600)
        path.write_text(json.dumps(contents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path, help="a checkout of the other release, with .venv")
    add_json_option(parser)
    given = parser.parse_args()
    measurement = Measurement(__doc__ or "")
    releases = {"older": Release(given.older.resolve()), "this": Release(ROOT)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make = [sys.executable, str(ROOT / "benchmarks" / "make_random_mixtral.py"), str(folder / "model")]
        sizes = ["--hidden", str(HIDDEN), "--intermediate", "64", "--layers", "1", "--experts", "2"]
        subprocess.run([*make, *sizes], check=True, stdout=subprocess.DEVNULL)
        make_keys(folder / "keys", NAME)
        write_older_keys(folder / "keys", folder / "older-keys")
        found = {
            f"{device} device, {host} host, {way}": one(releases[device], releases[host], way, folder)
            for way in WAYS
            for device in releases
            for host in releases
        }
    right = {name: found[f"{name} device, {name} host, socket"].get("sums") for name in releases}
    failed = [what for what, cell in found.items() if cell.get("sums") != right[what.split()[0]] or cell.get("lost")]
    failed += [what for what, cell in found.items() if cell.get("memory") != what.endswith("memory")]
    print(f"{len(found)} combinations of {len(ROWS)} messages; not equal: {failed or 'none'}")
    measurement.end({"rows": ROWS, "hidden": HIDDEN, "combinations": found, "not_equal": failed}, given.json)
    sys.exit(bool(failed))


def one(device: Release, host: Release, way: str, folder: Path) -> dict[str, Any]:
    process, address = device.device(folder / "model", way, folder)
    try:
        return host.host(address, way, folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


if __name__ == "__main__":
    main()
