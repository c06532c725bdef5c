"""Types of the C++ module (csrc/mapping.cpp)."""

import numpy as np
from numpy.typing import NDArray

class File:
    """A plain file as a read-only map that outlives being cut short."""

    def __init__(self, path: str) -> None: ...
    @property
    def faults(self) -> int:
        """How often zeros stood in for bytes that were gone."""
    def stamp(self) -> tuple[int, int, int]:
        """Size in bytes, time of the last write and of the last change (ctime) in ns, of the file as it is now.
        The last one is 0 of a file that has no name any more."""
    def release(self) -> None:
        """Give back the pages read so far."""
    def bytes(self) -> NDArray[np.uint8]:
        """The whole map, read-only; the array keeps it alive."""
