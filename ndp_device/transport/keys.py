"""Key pairs of devices and hosts as files, and the list of hosts that a device lets in.

    DIR/device.key          the device's pair; stays on the device's machine
    DIR/allowed/NAME.pub    one public key per host that may come in; deleting the file revokes it
    DIR/NAME.key            the host's pair and the device's public key: move it to the host, for `device_keys`

Files with a secret have mode 0600 and are never replaced; wider ones are refused. Knows files and libsodium's key
pairs, not how keys are used (curve.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from ndp_device import strict_json
from ndp_device.errors import ConfigError
from ndp_device.transport.curve import load_sodium

ALLOWED = "allowed"
DEVICE = "device"
_MAX_HOSTS = 1024
_T = TypeVar("_T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{64}")
_LOOK_AGAIN_S = 0.5


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    public: str
    secret: str
    device: str = ""
    """Of a host: the public key of the device it speaks to."""


class _Public(msgspec.Struct, forbid_unknown_fields=True):
    public: str


@dataclass(frozen=True)
class HostKeys:
    """What a host needs to reach a device: its own pair, and the device's public key. 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)
    device: bytes

    @classmethod
    def read(cls, path: Path) -> HostKeys:
        pair = _read_pair(path)
        if not pair.device:
            raise ConfigError(f"{path} is a device's own key: give the file that keygen made for this host")
        return cls(_bytes(path, pair.public), _bytes(path, pair.secret), _bytes(path, pair.device))


@dataclass(frozen=True)
class DeviceKeys:
    """A device's pair, and the directory whose files say who may come in. `is_allowed` looks there again and again."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed_dir: Path

    @classmethod
    def read(cls, directory: Path) -> DeviceKeys:
        path = directory / f"{DEVICE}.key"
        pair = _read_pair(path)
        keys = cls(_bytes(path, pair.public), _bytes(path, pair.secret), directory / ALLOWED)
        if not keys.allowed():
            raise ConfigError(
                f"{keys.allowed_dir} allows no host: make one with `ndp-device keygen {directory} --host NAME`"
            )
        return keys

    def allowed(self) -> dict[bytes, str]:
        """Public key -> the host's name. Files that are no public keys allow nobody, and are named."""
        found: dict[bytes, str] = {}
        for path in sorted(self.allowed_dir.glob("*.pub"))[:_MAX_HOSTS]:
            found[_bytes(path, _read(path, _Public).public)] = path.stem
        return found


class AllowList:
    """Who may come in now: the files are looked at again at most half a second after they changed."""

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


def make_keys(directory: Path, host: str | None) -> list[Path]:
    """Make the device's pair, if there is none yet, and the pair of a host. Returns the files that were written."""
    host = host or "host"
    if not _NAME.fullmatch(host) or host == DEVICE:
        raise ConfigError(f"a host's name must be letters, digits, dots and dashes and not {DEVICE!r}, got {host!r}")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / ALLOWED).mkdir(mode=0o700, exist_ok=True)
    written = []
    device = directory / f"{DEVICE}.key"
    if not device.exists():
        written.append(_write_new(device, _new_pair()))
    public = _read_pair(device).public
    pair = _new_pair() | {"device": public}
    written.append(_write_new(directory / f"{host}.key", pair))
    written.append(_write_new(directory / ALLOWED / f"{host}.pub", {"public": pair["public"]}))
    return written


def _new_pair() -> dict[str, str]:
    public, secret = load_sodium().crypto_box_keypair()
    return {"public": public.hex(), "secret": secret.hex()}


def _write_new(path: Path, contents: dict[str, str]) -> Path:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} is there already and is not replaced: delete it, or name another host") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    with open(handle, "w") as file:
        json.dump(contents, file)
        file.write("\n")
        file.flush()
        os.fsync(handle)
    return path


def _read_pair(path: Path) -> _Pair:
    with contextlib.suppress(OSError):
        status = path.stat()
        if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{path} holds a secret and must be readable by you alone (mode 0600), got "
                f"{stat.filemode(status.st_mode)}"
            )
    return _read(path, _Pair)


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return strict_json.read(path, kind, at_most=4096)
    except (OSError, strict_json.Refused) as error:
        raise ConfigError(f"{path} cannot be read as a key that `ndp-device keygen` made: {error}") from None


def _bytes(path: Path, text: str) -> bytes:
    if not _HEX.fullmatch(text):
        raise ConfigError(f"{path} cannot be read as a key: a key has 64 hex digits")
    return bytes.fromhex(text)
