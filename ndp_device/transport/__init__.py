"""One way to a transport: `connect` and `listen` by an address.

ipc:// and tcp:// are carried by libzmq, with shared memory beside it where both ends are on one machine. What
carries an address is imported when it is first asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a help must not wait for numpy
    from ndp_device.transport.address import Address
    from ndp_device.transport.zmq_client import ZmqTransport as ZmqTransport
    from ndp_device.transport.zmq_server import ZmqServer as ZmqServer


def connect(address: str, keys: Path | None = None) -> ZmqTransport:
    """The host's end of a connection attempt. keys: the file that keygen made for this host, or INSECURE_LOOPBACK.

    Raises ConfigError where this can never be, else DeviceUnavailable.
    """
    from ndp_device.transport.keys import HostKeys
    from ndp_device.transport.zmq_client import ZmqTransport

    where, keys = _parsed(address, keys)
    return ZmqTransport(where, None if keys is None else HostKeys.read(keys))


def listen(address: str, keys: Path | None = None) -> ZmqServer:
    """The device's end. keys: the directory that keygen made, or INSECURE_LOOPBACK. Raises ConfigError."""
    from ndp_device.transport.keys import DeviceKeys
    from ndp_device.transport.zmq_server import ZmqServer

    where, keys = _parsed(address, keys)
    return ZmqServer(where, None if keys is None else DeviceKeys.read(keys))


def is_address(text: str) -> bool:
    """Whether there is a transport for it."""
    return text.startswith(("ipc://", "tcp://"))


def _parsed(address: str, keys: Path | None) -> tuple[Address, Path | None]:
    """The address, and the keys that are files."""
    from ndp_device.transport.address import INSECURE_LOOPBACK, Address

    insecure = str(keys) == INSECURE_LOOPBACK
    files = None if insecure else keys
    return Address.parse(address, has_keys=files is not None, insecure_loopback=insecure), files
