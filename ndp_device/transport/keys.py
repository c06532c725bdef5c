"""Key pairs of devices and hosts as zmq's own certificate files, and the list of hosts that a device lets in.

    DIR/device.key_secret   the device's pair; stays on the device's machine
    DIR/device.key          its public key: goes to every host
    DIR/allowed/NAME.key    one public key per host that may come in; deleting the file revokes it
    DIR/NAME.key_secret     the host's pair: move it to the host and lay device.key beside it

Files with a secret have mode 0600 and are never replaced; wider ones are refused. So is a public key that others could
replace, as by sshd's StrictModes: it, its directory and all above belong to this user or to root. Keys are 40
characters of Z85, as libzmq takes them.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from ndp_device.common.errors import ConfigError

ALLOWED = "allowed"
DEVICE = "device"
_PUBLIC, _SECRET = ".key", ".key_secret"
_MAX_HOSTS = 1024
_MAX_BYTES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class HostKeys:
    """Keys with which a host reaches a device: its own pair, and the device's public key."""

    public: bytes
    secret: bytes = field(repr=False)
    device: bytes

    @classmethod
    def read(cls, path: Path) -> HostKeys:
        if path.name == f"{DEVICE}{_SECRET}":
            raise ConfigError(f"{path} is a device's own key: give the file that keygen made for this host")
        device = path.parent / f"{DEVICE}{_PUBLIC}"
        own, public = _read_pair(path), _read(device)[0]
        _require_own(device)
        return cls(*own, public)


@dataclass(frozen=True)
class DeviceKeys:
    """A device's pair, and the directory whose files say who may come in. AllowList looks there again and again."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed_dir: Path

    @classmethod
    def read(cls, directory: Path) -> DeviceKeys:
        keys = cls(*_read_pair(directory / f"{DEVICE}{_SECRET}"), directory / ALLOWED)
        if not keys.allowed():
            raise ConfigError(
                f"{keys.allowed_dir} allows no host: make one with `ndp-device keygen {directory} --host NAME`"
            )
        return keys

    def allowed(self) -> dict[bytes, str]:
        """Public key -> the host's name. Files that are no public keys, or that another user may have written, allow
        nobody, and are named."""
        _require_own(self.allowed_dir)
        paths = sorted(self.allowed_dir.glob(f"*{_PUBLIC}"))[:_MAX_HOSTS]
        for path in paths:
            _require_own(path, above=path.is_symlink())
        return {_read(path)[0]: path.stem for path in paths}


class AllowList:
    """Hosts that may come in now: changed files count after half a second at most."""

    def __init__(self, keys: DeviceKeys, warn: Callable[[str], None]) -> None:
        self._keys, self._warn = keys, warn
        self._looked_s, self._hosts = time.monotonic(), keys.allowed()

    def name(self, key: bytes) -> str | None:
        """The name of the host with this key; None where it may not come in."""
        if time.monotonic() - self._looked_s > _LOOK_AGAIN_S:
            self._looked_s = time.monotonic()
            try:
                self._hosts = self._keys.allowed()
            except (ConfigError, OSError) as error:
                self._hosts = {}
                self._warn(f"nobody may come in: {error}")
        return self._hosts.get(key)

    def callback(self, domain: str, key: bytes) -> bool:
        """Answer zmq.auth in a handshake: whether the key may come in."""
        name = self.name(key)
        if name is None:
            self._warn(f"a host was refused: its key {key.decode()} is not allowed")
        return name is not None


def make_keys(directory: Path, host: str | None) -> list[Path]:
    """Make the device's pair, if there is none yet, and the pair of a host. Returns the files that were written."""
    host = host or "host"
    if not _NAME.fullmatch(host) or host == DEVICE:
        raise ConfigError(f"a host's name must be letters, digits, dots and dashes and not {DEVICE!r}, got {host!r}")
    allowed = directory / ALLOWED
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    allowed.mkdir(mode=0o700, exist_ok=True)
    _require_own(allowed)
    public = allowed / f"{host}{_PUBLIC}"
    for path in (directory / f"{host}{_SECRET}", public):
        if path.exists():
            raise ConfigError(f"{path} exists and is not replaced: remove it, or choose another name")
    written = [] if (directory / f"{DEVICE}{_SECRET}").exists() else _create(directory, DEVICE)
    made, secret = _create(directory, host)
    made.rename(public)
    return [*written, public, secret]


def _create(directory: Path, name: str) -> list[Path]:
    previous = os.umask(0o077)
    try:
        return [Path(path) for path in create_certificates(directory, name)]
    finally:
        os.umask(previous)


def _require_own(path: Path, *, above: bool = True) -> None:
    """Refuse what another user than this one and root can replace. above: through a directory above it, too."""
    real = path.resolve()
    for each in (real, *real.parents) if above else (real,):
        try:
            status = each.stat()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read as a key that `ndp-device keygen` made: {error}") from None
        is_shared = each.is_dir() and each != real and status.st_mode & stat.S_ISVTX  # such as /tmp
        if status.st_uid not in (os.geteuid(), 0) or (status.st_mode & 0o022 and not is_shared):
            raise ConfigError(
                f"{each} must be writable by you and root alone, or others decide whose key {path} is: got "
                f"{stat.filemode(status.st_mode)} of user {status.st_uid}; chown it, or chmod go-w"
            )


def _read_pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _read(path)
    status = path.stat()
    if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path} holds a secret and must be readable by you alone (mode 0600), got {stat.filemode(status.st_mode)}"
        )
    if secret is None:
        raise ConfigError(f"{path} cannot be read as a key: it has no secret, give the file that ends in {_SECRET}")
    return public, secret


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ValueError(f"it must be a file of at most {_MAX_BYTES} bytes")
        public, secret = load_certificate(path)
        for key in (public, secret):
            if key is not None and (len(key) != 40 or len(z85.decode(key)) != 32):
                raise ValueError("a key has 40 characters of Z85")
    except (OSError, ValueError, KeyError, IndexError, ArithmeticError) as error:
        raise ConfigError(f"{path} cannot be read as a key that `ndp-device keygen` made: {error}") from None
    return public, secret
