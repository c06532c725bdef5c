"""The program `ndp-device`: serve | ping | describe | verify | time.

Every command's last line on stdout is one JSON object. An error is one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ndp_device.config import DeviceConfig
from ndp_device.errors import ConfigError, NdpError
from ndp_device.failpoints import Failpoint, Failpoints
from ndp_device.handler import Handler
from ndp_device.log import log_to_stderr
from ndp_device.probe import Probe, verify_device
from ndp_device.protocol import messages as msg
from ndp_device.replicas.format import ReplicaFiles
from ndp_device.server import Server
from ndp_device.timing.spec import PE_MODES
from ndp_device.timing_cli import app as time_app
from ndp_device.transport.zmq_server import ZmqServer

app = typer.Typer(help="An emulated CXL near-data-processing device.", no_args_is_help=True, add_completion=False)
app.add_typer(time_app, name="time")
AddressArgument = Annotated[str, typer.Argument(metavar="ADDR", help="ipc:///path or tcp://127.0.0.1:port")]


@app.command()
def serve(
    address: Annotated[str, typer.Option(help="ipc:///absolute/path or tcp://127.0.0.1:port")],
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory: full-precision experts")] = None,
    replicas: Annotated[Path | None, typer.Option(help="Replica directory: 1 to 4 bit experts")] = None,
    hardware: Annotated[str, typer.Option(help="Hardware preset the simulated times are for")] = "h100-ndp512",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Hardware value: section.field=value")] = None,
    pe_mode: Annotated[str | None, typer.Option(help=" | ".join(PE_MODES))] = None,
    kernel: Annotated[str, typer.Option(help="auto | reference | native")] = "auto",
    prepare: Annotated[
        str, typer.Option(help="idle: convert experts while nothing is asked | asked: when a plan needs them")
    ] = "idle",
    cores: Annotated[str, typer.Option(help="Run on these processor cores only, such as 4,5,6")] = "",
    die_with_parent: Annotated[int | None, typer.Option(metavar="PID", help="End when this parent does")] = None,
    private_dir: Annotated[Path | None, typer.Option(hidden=True, help="Remove it when the parent was killed")] = None,
    failpoint: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    failpoint_seed: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Load the experts, listen, print {"ready": true, …}, serve until SIGTERM."""
    log_to_stderr()
    if cores:
        _run_on(cores)
    config = DeviceConfig(
        address=address,
        model_dir=model,
        replicas_dir=replicas,
        hardware=hardware,
        hardware_overrides=tuple(_key_value(text) for text in set_ or ()),
        pe_mode=pe_mode,
        kernel=kernel,
        prepare=prepare,
        parent_pid=die_with_parent,
        private_dir=private_dir,
    )
    points = Failpoints([Failpoint.parse(text) for text in failpoint], failpoint_seed) if failpoint else None
    transport = ZmqServer(config.address)
    try:
        handler = Handler.from_config(config)
        server = Server(
            transport, handler, parent_pid=config.parent_pid, private_dir=config.private_dir, failpoints=points
        )
        _print({"ready": True, "address": transport.address, "pid": os.getpid(), "incarnation": handler.incarnation})
        server.run()
    finally:
        transport.close()
    _print({"stopped": True, "executed": handler.num_executed, "refused": handler.num_refused})


@app.command()
def ping(address: AddressArgument, timeout_s: float = 5.0) -> None:
    """Ask the device's computing loop whether it is there."""
    with Probe(address, timeout_s=timeout_s) as probe:
        probe.ask(msg.Ping(probe.next_id()))  # the connection is made first, so the second one is a round trip
        start = time.perf_counter_ns()
        reply, _ = probe.ask(msg.Ping(probe.next_id()))
        elapsed_ns = time.perf_counter_ns() - start
    _print({"pong": True, "incarnation": _fields(reply)["incarnation"], "measured_us": round(elapsed_ns / 1e3, 1)})


@app.command()
def describe(address: AddressArgument, timeout_s: float = 5.0) -> None:
    """What the device is: protocol, incarnation, model digest, replicas, hardware, kernel."""
    with Probe(address, timeout_s=timeout_s) as probe:
        reply, _ = probe.ask(msg.Describe(probe.next_id()))
    _print({name: value for name, value in _fields(reply).items() if name not in ("id", "ndp", "tensors", "crc")})


@app.command()
def verify(
    address: Annotated[str | None, typer.Argument(metavar="[ADDR]", help="A running device")] = None,
    replicas: Annotated[Path | None, typer.Option(help="A replica directory on disk")] = None,
    timeout_s: float = 60.0,
) -> None:
    """Check every byte of a replica directory, or every expert of a running device."""
    if (address is None) == (replicas is None):
        raise ConfigError("verify needs one thing to look at: the address of a device, or --replicas DIR")
    if address is not None:
        _print(verify_device(address, timeout_s=timeout_s))
    elif replicas is not None:
        files = ReplicaFiles(replicas)
        manifest = files.manifest
        _print(
            {
                "ok": True,
                "model_digest": manifest.model_digest,
                "replicas": manifest.source,
                "bits": list(manifest.bits),
                "layers": len(manifest.layers),
                "bytes": files.num_bytes,
            }
        )


def main() -> None:
    try:
        app(standalone_mode=True)
    except NdpError as error:
        print(f"ndp-device: {error}", file=sys.stderr)
        sys.exit(2)


def _fields(message: msg.Message) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(message)
    return {name: value for name, value in fields.items() if name != "type"}


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _key_value(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not (key and separator and value):
        raise ConfigError(f"--set needs section.field=value, got {text!r}")
    return key, value


def _run_on(cores: str) -> None:
    """Before any thread starts, so that all of them inherit it."""
    try:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    except (ValueError, OSError) as error:
        raise ConfigError(f"--cores must list cores of this machine, such as 0,1, got {cores!r}: {error}") from None


if __name__ == "__main__":
    main()
