"""The program `ndp-device`: serve | ping | describe | verify | keygen | time.

How commands read their line and end: command_line.py. Commands import what they need when they run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ndp_device import timing_cli
from ndp_device.common.command_line import HardwareOption, SetOption, assignments, command, print_json, program, run
from ndp_device.common.errors import ConfigError
from ndp_device.common.outputs import KEYS
from ndp_device.transport.address import INSECURE_LOOPBACK

SOCKET = "ipc://$HOME/.ndp/device"  # in examples: a directory that serve makes for its owner alone

app = program(
    "An emulated CXL near-data-processing device.",
    examples=(
        f"ndp-device serve models/tiny-mixtral --replicas models/tiny-mixtral-replicas --address {SOCKET}",
        "ndp-device time --help",
    ),
)
app.add_typer(timing_cli.app, name="time")
AddressArgument = Annotated[str, typer.Argument(metavar="ADDR", help="ipc:///path or tcp://127.0.0.1:port.")]
KeyOption = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="This host's key file for tcp, or the word insecure-loopback."),
]
TimeoutOption = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]


@command(
    app,
    "serve",
    examples=(
        f"ndp-device serve models/tiny-mixtral --replicas models/tiny-mixtral-replicas --address {SOCKET}",
        "ndp-device serve models/tiny-mixtral --address tcp://127.0.0.1:0 --insecure-loopback",
    ),
)
def serve(
    address: Annotated[str, typer.Option(help="ipc:///absolute/path or tcp://127.0.0.1:port; port 0: any free one.")],
    hardware: HardwareOption = "h100-ndp512",
    set_: SetOption = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of `keygen`: only allowed hosts come in, by encrypted tcp."),
    ] = None,
    insecure_loopback: Annotated[
        bool, typer.Option("--insecure-loopback", help="tcp on loopback for everybody on this machine, without keys.")
    ] = False,
    die_with_parent: Annotated[int | None, typer.Option(metavar="PID", help="End when this parent does.")] = None,
    private_dir: Annotated[Path | None, typer.Option(hidden=True, help="Remove it when the parent was killed.")] = None,
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", help="Checkpoint directory: experts in full precision and, if it is quantized, as stored."
        ),
    ] = None,
    replicas: Annotated[
        Path | None, typer.Option(help="Replica directory: 1 to 8 bit experts, in place of those as stored.")
    ] = None,
    codes: Annotated[
        bool, typer.Option("--codes/--no-codes", help="Serve a quantized checkpoint's experts as it stores them.")
    ] = True,
    cores: Annotated[str, typer.Option(help="Run on these processor cores only, such as 4,5,6.")] = "",
) -> None:
    """Load the experts and serve them until SIGTERM.

    Prints {"ready": true, …} as soon as it listens.
    """
    from ndp_device.process import Parent, confine, log_to_stderr

    confine()
    from ndp_device.handler import Handler
    from ndp_device.server import Server
    from ndp_device.transport import listen

    log_to_stderr()
    parent = None if die_with_parent is None else Parent(die_with_parent, private_dir)
    if parent is not None:
        parent.follow()
    if cores:
        try:  # before any thread starts, so that all of them inherit it
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        except (ValueError, OSError) as error:
            raise ConfigError(f"--cores must list cores of this machine, such as 0,1, got {cores!r}: {error}") from None
    if keys is not None and insecure_loopback:
        raise ConfigError("--keys and --insecure-loopback exclude each other: give one of them")
    transport = listen(address, Path(INSECURE_LOOPBACK) if insecure_loopback else keys)
    try:
        overrides = assignments(set_, "--set", "section.field=value")
        handler = Handler.of_files(model, replicas, hardware, codes=codes, **overrides)
        server = Server(transport, handler, parent=parent)
        ready = {"ready": True, "address": transport.address, "pid": os.getpid(), "incarnation": handler.incarnation}
        server.run(lambda: print_json(ready))
    finally:
        transport.close()
    print_json({"stopped": True, "executed": handler.num_executed, "refused": handler.num_refused})


@command(app, "ping", examples=(f"ndp-device ping {SOCKET}",))
def ping(address: AddressArgument, timeout_s: TimeoutOption = 5.0, key: KeyOption = None) -> None:
    """Measure one round trip to the computing loop of a device."""
    from ndp_device.probe import Probe
    from ndp_device.protocol import messages as msg

    with Probe(address, timeout_s=timeout_s, keys=key) as probe:
        probe.ask(msg.Ping(probe.next_id()))  # the connection is made first, so the second one is a round trip
        start = time.perf_counter_ns()
        reply, _ = probe.ask(msg.Ping(probe.next_id()))
        elapsed_ns = time.perf_counter_ns() - start
    assert isinstance(reply, msg.Pong)
    print_json({"pong": True, "incarnation": reply.incarnation, "measured_us": round(elapsed_ns / 1e3, 1)})


@command(app, "describe", examples=(f"ndp-device describe {SOCKET}",))
def describe(address: AddressArgument, timeout_s: TimeoutOption = 5.0, key: KeyOption = None) -> None:
    """Print what a device is.

    Protocol, incarnation, model digest, replicas, hardware, kernel.
    """
    import msgspec

    from ndp_device.probe import Probe

    with Probe(address, timeout_s=timeout_s, keys=key) as probe:
        fields: dict[str, Any] = msgspec.to_builtins(probe.describe())
    print_json({name: fields[name] for name in fields if name not in ("type", "id", "ndp", "tensors", "crc")})


@command(app, "verify", examples=("ndp-device verify --replicas models/tiny-mixtral-replicas",))
def verify(replicas: Annotated[Path, typer.Option(help="A replica directory on disk.")]) -> None:
    """Check every byte of replicas."""
    from ndp_device.replicas.format import ReplicaFiles

    files = ReplicaFiles(replicas)
    manifest = files.manifest
    print_json(
        {
            "ok": True,
            "model_digest": manifest.model_digest,
            "replicas": manifest.source,
            "bits": list(manifest.bits),
            "layers": len(manifest.layers),
            "bytes": files.num_bytes,
        }
    )


@command(app, "keygen", examples=("ndp-device keygen keys", "ndp-device keygen keys --host rack7"))
def keygen(
    directory: Annotated[
        Path, KEYS, typer.Argument(metavar="DIR", help="Where the device's keys are, or will be made.")
    ],
    host: Annotated[str | None, typer.Option(help="Name of the host that the new key is for.")] = None,
) -> None:
    """Make the keys of a device and of a host that it lets in.

    The device's are made once. NAME.key_secret and device.key go to that host, into one directory (setting
    `devices`, option --key: the former); deleting allowed/NAME.key revokes it.
    """
    from ndp_device.transport.keys import make_keys

    print_json({"written": [str(path) for path in make_keys(directory, host)]})


def main() -> None:
    run(app, "ndp-device")


if __name__ == "__main__":
    main()
