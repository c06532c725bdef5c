"""What a directory may hold after the machine has stopped: every state that fsync, or its absence, allows.

A file system may forget a file's contents that were not synced, and any change of a name in a directory that was not
synced since; each change alone, in any order. Only os.fsync is looked at. It still does its work.
"""

import contextlib
import itertools
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

State = dict[str, bytes]
"""Path below the root -> contents."""


class StoppedDisk:
    """`moments`: for before and after each fsync in `watched`, what may be found below `root` if the machine stops."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root, self.moments = root, list[list[State]]()
        self._contents: dict[int, bytes] = {}  # by inode, as synced
        self._names: dict[int, dict[str, int]] = {}  # of a directory's inode, as synced
        self._handles: dict[int, int] = {}  # held open, so that no inode's number is used again
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        fsync = os.fsync

        def watched_fsync(file: Any) -> None:
            with self._lock:
                self.moments.append(self._possible())
                fsync(file)
                self._note(file if isinstance(file, int) else file.fileno())
                self.moments.append(self._possible())

        try:
            with patch("os.fsync", watched_fsync):
                yield
            self.moments.append(self._possible())
        finally:
            for handle in self._handles.values():
                os.close(handle)

    def laid_out(self, place: str, aside: Path) -> Iterator[list[Path]]:
        """For each moment, the directory `place` of each state that is possible then, written below `aside`."""
        for moment, states in enumerate(self.moments):
            found = [aside / f"{moment}-{number}" for number in range(len(states))]
            for directory, state in zip(found, states, strict=True):
                for name, contents in state.items():
                    (directory / name).parent.mkdir(parents=True, exist_ok=True)
                    (directory / name).write_bytes(contents)
            yield [directory / place for directory in found]

    def _note(self, handle: int) -> None:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = self._now(Path(os.readlink(f"/proc/self/fd/{handle}")))
        else:
            self._contents[status.st_ino] = Path(f"/proc/self/fd/{handle}").read_bytes()

    def _now(self, directory: Path) -> dict[str, int]:
        return {path.name: self._hold(path) for path in directory.iterdir()}

    def _hold(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._handles:
            self._handles[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _possible(self) -> list[State]:
        return self._below(self.root, self._hold(self.root))

    def _below(self, directory: Path, inode: int) -> list[State]:
        now, synced = self._now(directory), self._names.get(inode, {})
        choices = []  # of each name: the states of what it may stand for
        for name in sorted({*now, *synced}):
            at = {names.get(name) for names in (now, synced)}
            choices.append([state for one in at for state in self._of(directory / name, one)])
        return [{k: v for state in chosen for k, v in state.items()} for chosen in itertools.product(*choices)]

    def _of(self, path: Path, inode: int | None) -> list[State]:
        if inode is None:
            return [{}]
        if path.is_dir():
            return self._below(path, inode)
        return [{path.relative_to(self.root).as_posix(): self._contents.get(inode, b"")}]
