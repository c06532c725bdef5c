"""Which of several devices a step could count on: what its choices and its messages went by.

A step that saw one answer from its first layer to its last can be replayed to the picosecond by that answer. One in
which a device was lost, or came back, cannot: it depends on wall time. Does not know devices, nor who asks.
"""

from __future__ import annotations

from collections.abc import Sequence


class Presence:
    """Device availability that the running step went by."""

    def __init__(self) -> None:
        self._seen: set[tuple[bool, ...]] = set()
        self._lost = False

    def note(self, up: Sequence[bool]) -> tuple[bool, ...]:
        """Some choice or message goes by this, which is given back."""
        self._seen.add(seen := tuple(up))
        return seen

    def lose(self) -> None:
        """A device that was asked gave no answer."""
        self._lost = True

    def take(self) -> tuple[bool, ...] | None:
        """Take which devices the step saw up [D], and start over. None: that changed meanwhile; (): no call looked."""
        seen, lost = self._seen, self._lost
        self._seen, self._lost = set(), False
        if lost or len(seen) > 1:
            return None
        return next(iter(seen), ())
