"""Workers end when the process that asked for their engine ends, at any moment of the start-up.

vLLM's own processes notice it once the engine serves; while it loads, nobody looks. A worker that quantizes would go on
and start a device for nobody. Knows processes of Linux. Does not know engines or devices.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time

_OWNER = "NDP_ENGINE_OWNER"
_GRACE_S = 10.0
"""Time that a worker has to end in order. Its device ends with it either way."""


def own_engines() -> None:
    """In the front: workers of engines that this process starts from now on follow it."""
    os.environ[_OWNER] = str(os.getpid())


def follow_owner() -> None:
    """In a worker, before it starts anything. Without an owner on this machine (Ray) it follows nobody."""
    owner = int(os.environ.get(_OWNER, os.getpid()))
    if owner == os.getpid():
        return
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_after, args=(handle,), name="ndp-owner", daemon=True).start()


def _end_after(owner: int) -> None:
    """owner: a descriptor of the process."""
    select.select([owner], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
