"""One way to a transport: `connect` and `listen` by the scheme of an address.

Another package adds a scheme by an entry point; nothing here changes:

    [project.entry-points."ndp_device.transports"]
    rdma = "my_package:transport"       # an object with `connect` and `listen`, such as a module

Knows no socket: what carries ipc:// and tcp:// is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ndp_device.errors import ConfigError

if TYPE_CHECKING:  # a help must not wait for numpy
    from ndp_device.transport.base import ClientTransport, ServerTransport

GROUP = "ndp_device.transports"
_OWN = {"ipc": "ndp_device.transport.zmq_both", "tcp": "ndp_device.transport.zmq_both"}


class Scheme(Protocol):
    """Carrier of the addresses of one scheme. keys: the path of its user's keys, None = none."""

    def connect(self, address: str, keys: Path | None) -> ClientTransport: ...

    def listen(self, address: str, keys: Path | None) -> ServerTransport: ...


def connect(address: str, keys: Path | None = None) -> ClientTransport:
    """The host's end of a connection attempt. Raises ConfigError where this can never be, else DeviceUnavailable."""
    return _carrier(address).connect(address, keys)


def listen(address: str, keys: Path | None = None) -> ServerTransport:
    """The device's end. Raises ConfigError."""
    return _carrier(address).listen(address, keys)


def schemes() -> list[str]:
    """Schemes that an address may begin with, before ://."""
    return [*_OWN, *(entry.name for entry in entry_points(group=GROUP) if entry.name not in _OWN)]


def is_address(text: str) -> bool:
    """Whether there is a transport for it."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme in schemes()


def _carrier(address: str) -> Scheme:
    scheme, separator, _ = address.partition("://")
    if separator and scheme in _OWN:
        return cast(Scheme, importlib.import_module(_OWN[scheme]))
    for entry in entry_points(group=GROUP, name=scheme) if separator else ():
        return cast(Scheme, entry.load())
    wanted = "ipc:///path or tcp://127.0.0.1:port"
    others = "".join(f", or {name}://" for name in schemes() if name not in _OWN)
    raise ConfigError(f"an address must look like {wanted}{others}, got {address!r}")
