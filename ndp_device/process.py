"""What a device process is to Linux: rights it gives up, the parent it ends with, its log.

The log has one line per event, whatever a peer's text holds, and no more than a disk can bear.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from ndp_device.common.errors import ConfigError, NdpError

MAX_LINES = 100
"""Most lines in one minute. Further lines are counted, and one line says how many."""

_MINUTE_S = 60.0
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_STANDARD = 2  # the highest of the three descriptors that are ours


def confine() -> None:
    """Close what was inherited beyond the standard streams, and never gain a privilege again, by no program we start.

    Before anything of this process opens a file: whatever is open then is the parent's.
    """
    for name in os.listdir("/proc/self/fd"):
        if (handle := int(name)) > _STANDARD:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(handle)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise NdpError(f"this process cannot give up new privileges: {os.strerror(ctypes.get_errno())}")


class Parent:
    def __init__(self, pid: int, private_dir: Path | None = None) -> None:
        """private_dir: made for us by our parent, who removes it unless it was killed."""
        if pid < 1:
            raise ConfigError(f"a parent's pid must be positive, got {pid}")
        self._pid, self._private_dir = pid, private_dir

    @property
    def is_gone(self) -> bool:
        return os.getppid() != self._pid

    def follow(self) -> None:
        """Before anything is loaded: ask the kernel for a signal when the parent ends.

        Linux sends it when the *thread* that started us ends, so it only makes us look who our parent is. It also
        ends a computation that hangs.
        """
        signal.signal(signal.SIGUSR1, self._look)
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0):
            raise NdpError(f"cannot follow parent {self._pid}: {os.strerror(ctypes.get_errno())}")
        self._look()  # it may have ended before

    def clean_up(self) -> None:
        """Remove the private directory, as the parent would have done."""
        if self._private_dir is not None:
            shutil.rmtree(self._private_dir, ignore_errors=True)

    def _look(self, signum: int = 0, frame: FrameType | None = None) -> None:
        if self.is_gone:
            self.clean_up()
            os._exit(0)


class OneLine(logging.Formatter):
    """Control characters of a message are written as Python writes them; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.message)
        return super().formatMessage(record)


class AtMost(logging.Filter):
    """Lets MAX_LINES a minute pass, and everything from WARNING on as long as these are few, too."""

    def __init__(self) -> None:
        super().__init__()
        self._since_s, self._left, self._lost = 0.0, {False: 0, True: 0}, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._since_s > _MINUTE_S or not self._since_s:
            if self._lost:
                record.msg = f"{record.getMessage()} ({self._lost} lines of the minute before were left out)"
                record.args = ()
            self._since_s, self._left, self._lost = now, {False: MAX_LINES, True: MAX_LINES}, 0
        urgent = record.levelno >= logging.WARNING
        if self._left[urgent] == 0:
            self._lost += 1
            return False
        self._left[urgent] -= 1
        return True


def log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(AtMost())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
