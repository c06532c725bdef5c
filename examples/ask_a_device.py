"""A device of its own, asked from Python: start it, let it compute one layer's cold pairs, read the simulated time.

python examples/ask_a_device.py models/tiny-mixtral models/tiny-mixtral-replicas
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from ndp_device.common.widths import FLAG_OF_BITS
from ndp_device.probe import Probe
from ndp_device.protocol import messages as msg


def main(model: str, replicas: str) -> None:
    with tempfile.TemporaryDirectory() as directory:  # 0700: whoever reaches the socket may use the device
        address = f"ipc://{directory}/device"
        program = [str(Path(sys.executable).parent / "ndp-device"), "serve", model]
        command = [*program, "--replicas", replicas, "--address", address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as device:
            assert device.stdout is not None
            try:
                json.loads(device.stdout.readline())  # printed once it listens
                ask(address)
            finally:
                device.terminate()


def ask(address: str) -> None:
    """Two rows through experts 1 and 5 of layer 0, at 3 and at 2 bits."""
    with Probe(address) as probe:
        welcome = probe.hello()
        wanted = np.zeros((welcome.num_layers, welcome.num_experts), np.uint8)
        wanted[0, 1], wanted[0, 5] = FLAG_OF_BITS[3], FLAG_OF_BITS[2]
        probe.ask(msg.InstallPlan(probe.next_id(), epoch=1, expected_epoch=0), {"replicas": wanted})
        probe.ask(msg.ActivatePlan(probe.next_id(), epoch=1))
        x = np.random.default_rng(0).standard_normal((2, welcome.hidden_size), np.float32)
        reply, tensors = probe.ask(
            msg.Execute(probe.next_id(), epoch=1, layer=0, step=0, submit_ps=0, ttl_us=5_000_000),
            {
                "x": x,
                "pair_rows": np.array([0, 1], np.int32),
                "pair_experts": np.array([1, 5], np.int32),
                "pair_bits": np.array([3, 2], np.uint8),
                "gates": np.array([0.7, 0.4], np.float32),
            },
        )
        assert isinstance(reply, msg.Result)
        print(f"y {tensors['y'].shape}, norm {np.linalg.norm(tensors['y']):.4f}")
        assert reply.timing is not None  # what is real hardware has none
        print(f"simulated_ns {reply.timing.total_ps / 1000:.1f}, bytes of weights {reply.timing.weight_bytes}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["models/tiny-mixtral", "models/tiny-mixtral-replicas"]))
