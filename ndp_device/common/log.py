"""The device's log on stderr: one line per event, whatever a peer's text holds, and no more than a disk can bear."""

from __future__ import annotations

import logging
import sys
import time

MAX_LINES = 100
"""Most lines in one minute. Further lines are counted, and one line says how many."""

_MINUTE_S = 60.0


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
