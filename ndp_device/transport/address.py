"""Where a device listens, and who may go there: names, files, owners and modes."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ndp_device.common.errors import ConfigError

MAX_IPC_PATH_BYTES = 107  # sun_path of sockaddr_un holds 108 with its closing zero
INSECURE_LOOPBACK = "insecure-loopback"
"""Word in place of a file of keys: every user of this machine may connect by tcp, and nothing is encrypted."""


@dataclass(frozen=True)
class Address:
    """ipc:///absolute/path, or tcp://address:port with keys."""

    text: str
    ipc_path: Path | None

    @classmethod
    def parse(cls, text: str, *, has_keys: bool = False, insecure_loopback: bool = False) -> Address:
        """has_keys: both sides show the keys of keys.py, and encrypt. insecure_loopback: loopback may do without."""
        scheme, separator, rest = text.partition("://")
        if separator and scheme == "ipc":
            if has_keys:
                raise ConfigError(f"{text}: keys have no effect on an ipc address, which its owner alone can open")
            if rest.startswith("@"):
                raise ConfigError(f"{text}: abstract sockets have no owner, anybody may connect; give an absolute path")
            if not rest.startswith("/"):
                raise ConfigError(f"{text}: the path of an ipc address must be absolute, for example ipc:///run/x/ndp")
            if len(os.fsencode(rest)) > MAX_IPC_PATH_BYTES:
                raise ConfigError(
                    f"an ipc path may have {MAX_IPC_PATH_BYTES} bytes, got {len(os.fsencode(rest))}; use a shorter one"
                )
            return cls(text, Path(rest))
        if separator and scheme == "tcp":
            host, _, port = rest.rpartition(":")
            ip = _ip(host)
            if host in ("", "*") or (ip is not None and ip.is_unspecified):
                raise ConfigError(
                    f"{text}: name the one address that hosts come to, and a port, such as tcp://127.0.0.1:5555"
                )
            if not (port.isdecimal() and int(port) < 65536) and port != "*":
                raise ConfigError(f"{text}: the port must be 0..65535, got {port!r}")
            if insecure_loopback and host != "localhost" and not (ip is not None and ip.is_loopback):
                raise ConfigError(f"{text}: {INSECURE_LOOPBACK} is for loopback only, such as 127.0.0.1; use keys here")
            if not has_keys and not insecure_loopback:
                raise ConfigError(
                    f"{text}: tcp needs keys, which `ndp-device keygen` makes; on loopback {INSECURE_LOOPBACK!r} may "
                    "stand in their place (device: --insecure-loopback; host: keys in 'devices', --key)"
                )
            return cls(text, None)
        raise ConfigError(f"an address must look like ipc:///path or tcp://127.0.0.1:port, got {text!r}")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None of a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def make_private(directory: Path) -> None:
    """Make the directory of an ipc socket, or refuse one that others can enter."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()  # who owns a symbolic link chooses the directory
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must belong to you alone (mode 0700) because the device's socket lives in it, got "
            f"{stat.filemode(status.st_mode)}; name a directory that does not exist yet and it will be made"
        )


def require_private(path: Path) -> None:
    """Refuse a socket that others can open."""
    mode = path.lstat().st_mode
    if mode & 0o077:
        raise ConfigError(f"{path} must be closed to others, got mode {stat.filemode(mode)}")


def is_foreign(user: int | None) -> bool:
    """Whether this is a user that this one has no reason to believe; root may use anybody's device. None: not known."""
    return user not in (None, os.geteuid(), 0) and os.geteuid() != 0


def is_foreign_at(path: Path) -> bool:
    """The same of who owns the socket here."""
    try:
        return is_foreign(path.lstat().st_uid)
    except OSError:  # none yet
        return False


def take(path: Path) -> int:
    """Lock the address until the returned descriptor is closed: libzmq lets a second device steal a path in silence."""
    handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(handle, 32).decode(errors="replace").strip() or "?"
        os.close(handle)
        raise ConfigError(
            f"a device with pid {holder} already listens on ipc://{path}; stop it or choose another address"
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle
