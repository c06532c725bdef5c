"""Where may a command write? Never into what it reads, into a folder with files of others, or over a file.

Knows paths and names. Does not know commands: a command marks its parameters with `Output` (command_line.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ndp_device.common.errors import ConfigError


@dataclass(frozen=True)
class Output:
    """What a command writes: a file, or a folder that may hold only files of these names."""

    files: tuple[str, ...] | None = None
    """Patterns of names; none of them: the folder must be empty or absent. None: a file, which must be absent."""
    endings: tuple[str, ...] = ()
    """That a file's name may have; none of them: any."""


_OF_A_SET = ("config.json", "manifest.json")
"""Files by which a folder is a whole that no single file may be put into."""
A_NEW_FILE = Output()
A_NEW_TABLE = Output(endings=(".parquet", ".csv", ".md"))
A_NEW_FOLDER = Output(())
REPLICAS = Output(("manifest.json", "experts-*.safetensors", ".*.unfinished", "README.md", ".cache", ".gitattributes"))
"""A replica set, whole or begun, from a hub or not."""
KEYS = Output(("allowed", "*.key", "*.key_secret"))


def require_own_folder(folder: Path, output: Output = A_NEW_FOLDER) -> None:
    """Raise ConfigError in one sentence where this is a file, or holds something that the writer did not write."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give the name of a folder, which is made")
    for path in sorted(folder.iterdir()):
        if not any(fnmatchcase(path.name, pattern) for pattern in output.files or ()):
            raise ConfigError(
                f"{folder} is not empty: {path.name} lies in it and is not continued, give another folder"
            )


def check_outputs(outputs: Iterable[tuple[Path, Output]], inputs: Iterable[Path]) -> None:
    """Raise ConfigError where an output is, or lies in, an input or another output, or cannot be written."""
    read, asked = {path.resolve(): path for path in inputs}, list(outputs)
    written = [path.resolve() for path, _ in asked]
    for number, (path, output) in enumerate(asked):
        place = written[number]
        if {place, *place.parents} & {*written[:number], *written[number + 1 :]}:
            raise ConfigError(f"{path} is where two outputs would be written: give each a place of its own")
        if within := next((read[one] for one in (place, *place.parents) if one in read), None):
            raise ConfigError(f"{path} would be written into {within}, which is read: give a place outside of it")
        if output.files is not None:
            require_own_folder(path, output)
        elif path.is_dir():
            raise ConfigError(f"{path} cannot be used: it is a directory")
        elif any((place.parent / name).exists() for name in _OF_A_SET):
            raise ConfigError(
                f"{path} would be written among the files of a model, replica set or trace: give another folder"
            )
        elif path.exists():  # also a named pipe, which nobody may ever read
            raise ConfigError(f"{path} is there already and would be written over: give another name")
        elif not place.parent.is_dir():
            raise ConfigError(f"{path} cannot be used: there is no directory {place.parent}")
        elif output.endings and path.suffix not in output.endings:
            raise ConfigError(f"{path} must end with one of {', '.join(output.endings)}")
