"""Rights and open files that a device process gives up when it starts, because it never needs them. Knows Linux, and
nothing of devices."""

from __future__ import annotations

import contextlib
import ctypes
import os

from ndp_device.common.errors import NdpError

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
