"""The process that started this device and that it ends with. Knows Linux, and nothing of devices."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from pathlib import Path
from types import FrameType

from ndp_device.common.errors import ConfigError, NdpError

_PR_SET_PDEATHSIG = 1


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
