"""All results of a folder in one archive, renewed while they come: a machine that is lent gives few files back.

Every ten seconds and at the end, whole or not at all, so that what a killed call had found is in it. Knows files and
the clock; not what the results are.
"""

from __future__ import annotations

import tarfile
import threading
from pathlib import Path
from types import TracebackType

EVERY_S = 10.0


class Archive:
    """While it is entered, `file` holds the results of `folder`; a folder that it lies in may be another one."""

    def __init__(self, folder: Path, file: Path, every_s: float = EVERY_S) -> None:
        self._folder, self._file, self._every_s = folder, file, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="archive", daemon=True)

    def __enter__(self) -> None:
        self.write()
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.write()

    def write(self) -> None:
        aside = self._file.with_suffix(".part")
        with tarfile.open(aside, "w:gz") as archive:
            for path in sorted(self._folder.glob("gpu_*")):
                if path.suffix != ".part":
                    archive.add(path, path.name)
        aside.replace(self._file)

    def _renew(self) -> None:
        while not self._ended.wait(self._every_s):
            self.write()
