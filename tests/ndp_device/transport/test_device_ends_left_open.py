"""A server and a client that nobody closed: neither keeps the process, nor the collector, nor ends it by an abort."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BOTH_ENDS = """
import gc, os, sys, time
from pathlib import Path
from ndp_device.transport import connect, listen
from ndp_device.transport.keys import make_keys

how, folder = sys.argv[1].split(), Path(sys.argv[2])
keys, own, address = None, None, f"ipc://{folder}/private/device"
if "keys" in how:
    make_keys(folder / "keys", "host")
    keys, own, address = folder / "keys", folder / "keys" / "host.key_secret", "tcp://127.0.0.1:*"
server = listen(address, keys)
client = connect(server.address, own)
while not client.send((bytes(12), b"question")):
    server.receive(1)
while not (arrived := server.receive(100)):
    pass
for _ in range(8):  # of which nobody reads one, and whose memory is lent to libzmq
    server.send(arrived[0].client, (bytes(12), bytes(1 << 20)))
if "cycle" in how:
    server.on_gone = lambda client, server=server: None
if "dropped" in how:
    del server, client, arrived
    gc.collect()
if "forked" in how:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        client.receive(10)
        client.send((bytes(12), b"still here"))
        assert bytes(server.receive(10_000)[0].frames[1]) == b"still here"
print("ended")
"""


@pytest.mark.parametrize("how", ["left", "dropped", "dropped cycle", "forked"])
@pytest.mark.parametrize("way", ["ipc", "keys"])
def test_what_nobody_closed_ends_with_its_owner_or_with_the_process(way: str, how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BOTH_ENDS, f"{way} {how}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ended\n")
