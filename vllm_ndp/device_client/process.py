"""An embedded device: a child process on a private ipc path that ends with us."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from ndp_device.common.errors import DeviceUnavailable
from ndp_device.common.strict_files import decode_json

MAX_LOG_BYTES = 1 << 20
_PREFIX, _OWNER = "ndp-", "owner"
_ENVIRONMENT = (
    *("HOME", "LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "PATH", "TMPDIR", "TZ", "USER"),
    *("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
)
_ENVIRONMENT_PREFIXES = ("LC_", "NDP_", "PYTHON", "ASAN_", "UBSAN_")
"""Prefixes of environment variables that a device inherits. The engine's other variables may hold tokens and keys."""

RESPAWN_FIRST_S, RESPAWN_LAST_S = 0.5, 30.0
_LISTENS_WITHIN_S = 10.0
_ENDS_WITHIN_S = 2.0
_MOST_SAID = 64 << 10
"""Bytes of the line by which a device says that it is ready."""


class DeviceProcess:
    """Made by `spawn`. `respawn` starts a new one on the same address after it died."""

    def __init__(self, directory: Path, lock: int, arguments: Sequence[str]) -> None:
        """lock: an open descriptor that is closed, and its lock given up, when the directory is removed."""
        self.directory = directory
        self.address = f"ipc://{directory / 'device'}"
        self.log_path = directory / "device.log"
        self.num_spawned = 0
        self._arguments = [
            *(sys.executable, "-P", "-m", "ndp_device", "serve", "--address", self.address),
            *("--die-with-parent", str(os.getpid()), "--private-dir", str(directory)),
            *arguments,
        ]
        self._next_spawn_s, self._respawn_s = 0.0, RESPAWN_FIRST_S
        self._process = self._start()
        self._finalizer = weakref.finalize(self, _release, directory, lock)

    @classmethod
    def spawn(
        cls,
        model_dir: Path | None,
        replicas_dir: Path | None,
        *,
        codes: bool = True,
        hardware: str = "h100-ndp512",
        hardware_overrides: Mapping[str, object] | None = None,
        cores: Sequence[int] = (),
        extra_arguments: Sequence[str] = (),
        ready_timeout_s: float = 120.0,
    ) -> DeviceProcess:
        """Start a device and wait until it listens. Raises DeviceUnavailable with its last words if it does not.

        The device ends when this process does, not when the thread that calls this does. codes: whether it serves those
        of a quantized checkpoint, where it has no replicas.
        """
        arguments = ["--hardware", hardware]
        arguments += [] if model_dir is None else [str(model_dir)]
        arguments += [] if replicas_dir is None else ["--replicas", str(replicas_dir)]
        arguments += [] if codes else ["--no-codes"]
        if cores:
            arguments += ["--cores", ",".join(map(str, cores))]
        for key, override in (hardware_overrides or {}).items():
            arguments += ["--set", f"{key}={override}"]
        device = cls(*_private_directory(), [*arguments, *extra_arguments])
        try:
            device.wait_until_ready(ready_timeout_s)
        except BaseException:
            device.terminate()
            raise
        return device

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """None while it runs, else its exit code (minus the signal that ended it)."""
        return self._process.poll()

    def wait_until_ready(self, timeout_s: float) -> None:
        output = self._process.stdout
        assert output is not None
        line, deadline_s = b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n"):  # it may say half of it
            if not select.select([output], [], [], max(deadline_s - time.monotonic(), 0.0))[0]:
                raise DeviceUnavailable(
                    f"the device said nothing within {timeout_s:g} s; its log ends: {self.last_words()}"
                )
            if not (said := os.read(output.fileno(), _MOST_SAID - len(line))):
                break  # it has ended, or says something else than that it is ready
            line += said
        try:
            ready = decode_json(line)["ready"]
        except (ValueError, KeyError, TypeError):
            ready = False
        if ready is not True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise DeviceUnavailable(f"the device did not start: {self.last_words()}")

    def respawn(self) -> bool:
        """Start a new device if the old one is dead, without waiting for it. False: it lives, or died too often lately.

        Half a second must pass between two starts, twice as long after each, up to half a minute.
        """
        now = time.monotonic()
        if now < self._next_spawn_s:
            return False
        if self.poll() is None:
            if (self.directory / "device").exists() or now < self._spawned_s + _LISTENS_WITHIN_S:
                return False
            self._process.kill()  # somebody cleaned up behind it: no host can reach it any more
            self._process.wait()
        if not (self.directory / _OWNER).exists():
            self._finalizer.detach()
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._finalizer = weakref.finalize(self, _release, self.directory, _claim(self.directory))
        self._close_output()
        self._process = self._start()
        return True

    def terminate(self) -> None:
        """SIGTERM, then SIGKILL; the private directory goes too."""
        if self.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._close_output()
        self._finalizer()

    def last_words(self) -> str:
        """The last line of its log, which for an error is the one sentence that explains it."""
        try:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "it left no log"

    def _start(self) -> subprocess.Popen[bytes]:
        now = time.monotonic()
        self._respawn_s = RESPAWN_FIRST_S if now > self._next_spawn_s + RESPAWN_LAST_S else self._respawn_s
        self._next_spawn_s = now + self._respawn_s
        self._respawn_s = min(2 * self._respawn_s, RESPAWN_LAST_S)
        self.num_spawned += 1
        self._spawned_s = now
        small_enough = self.log_path.exists() and self.log_path.stat().st_size < MAX_LOG_BYTES
        with self.log_path.open("ab" if small_enough else "wb") as log:
            return subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    name: value
                    for name, value in os.environ.items()
                    if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
                },
                start_new_session=True,  # Ctrl-C is for the host, which then ends its device in order
            )

    def _close_output(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()


def _private_directory() -> tuple[Path, int]:
    """A new directory with mode 0700, where sockets belong if the system says so; and the lock that says it is ours."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_parent()))
    remove_abandoned()
    return directory, _claim(directory)


def _parent() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = bool(runtime) and os.access(runtime, os.W_OK | os.X_OK)
    return Path(runtime if usable else tempfile.gettempdir())


def _claim(directory: Path) -> int:
    """The lock on a directory, held as long as its descriptor is open."""
    unnamed = directory / f"{_OWNER}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(directory / _OWNER)  # nobody ever sees it unlocked
    return lock


def remove_abandoned() -> None:
    """Directories of hosts that were killed together with their device: nobody holds their lock."""
    for directory in _parent().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(directory / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _release(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)
