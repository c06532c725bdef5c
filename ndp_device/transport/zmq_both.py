"""Transport of ipc:// and tcp://: libzmq, with shared memory beside it where both ends are on one machine."""

from __future__ import annotations

from pathlib import Path

from ndp_device.transport.address import INSECURE_LOOPBACK, Address
from ndp_device.transport.keys import DeviceKeys, HostKeys
from ndp_device.transport.zmq_client import ZmqTransport
from ndp_device.transport.zmq_server import ZmqServer


def connect(address: str, keys: Path | None) -> ZmqTransport:
    """keys: the file that keygen made for this host, or INSECURE_LOOPBACK."""
    where = _parsed(address, keys)
    return ZmqTransport(where, HostKeys.read(keys) if keys is not None and not _insecure(keys) else None)


def listen(address: str, keys: Path | None) -> ZmqServer:
    """keys: the directory that keygen made, or INSECURE_LOOPBACK."""
    where = _parsed(address, keys)
    return ZmqServer(where, DeviceKeys.read(keys) if keys is not None and not _insecure(keys) else None)


def _parsed(address: str, keys: Path | None) -> Address:
    insecure = keys is not None and _insecure(keys)
    return Address.parse(address, has_keys=keys is not None and not insecure, insecure_loopback=insecure)


def _insecure(keys: Path) -> bool:
    return str(keys) == INSECURE_LOOPBACK
