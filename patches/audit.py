"""`make audit`: is what is installed what the tests passed with, and free of what is known? Asks no network.

Compares installed versions with patches/lock-*.txt, the files of each package with the hashes in its own RECORD
(--files, slow), and both with patches/advisories.json, a list that is kept by hand. Prints a sentence for each finding,
and one JSON line last. Knows this environment only; `pip-audit` asks the world.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.version import Version

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="also compare every installed file with its RECORD")
    given = parser.parse_args()
    installed = {canonical(found.metadata["Name"]): found for found in distributions() if found.metadata["Name"]}
    versions = {name: found.version for name, found in installed.items()}
    locked = all_pins()
    known = json.loads((HERE / "advisories.json").read_text())
    findings = differing(versions, locked) + affected(versions, known["advisories"])
    if given.files:
        for name in sorted(installed):
            findings += changed_files(installed[name])
    for finding in findings:
        print(finding)
    print(
        json.dumps(
            {
                "installed": len(versions),
                "pinned": len(locked),
                "advisories": len(known["advisories"]),
                "looked_at": known["looked_at"],
                "findings": len(findings),
            }
        )
    )
    return 1 if findings else 0


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def all_pins() -> dict[str, str]:
    """Of every lock file. Raises ValueError for a package that two of them pin."""
    found: dict[str, str] = {}
    for path in sorted(HERE.glob("lock-*.txt")):
        here = pins(path.read_text())
        if twice := here.keys() & found.keys():
            raise ValueError(f"{path.name} pins {', '.join(sorted(twice))}, which another lock file pins already")
        found |= here
    return found


def pins(text: str) -> dict[str, str]:
    """name -> version. Raises ValueError for a line without a hash."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
            if match is None:
                raise ValueError(f"a pin must be name==version --hash=sha256:..., got {line!r}")
            found[canonical(match[1])] = match[2]
    return found


def differing(versions: dict[str, str], locked: dict[str, str]) -> list[str]:
    return [
        f"{name} is installed as {versions[name]}, the tests passed with {version}"
        for name, version in sorted(locked.items())
        if name in versions and Version(versions[name]) != Version(version)
    ]


def affected(versions: dict[str, str], advisories: list[dict[str, str]]) -> list[str]:
    return [
        f"{known['package']} {versions[known['package']]} has {known['id']} ({known['what']}): "
        f"fixed in {known['fixed_in']}"
        for known in advisories
        if known["package"] in versions and Version(versions[known["package"]]) < Version(known["fixed_in"])
    ]


def changed_files(found: Distribution) -> list[str]:
    findings = []
    for file in found.files or ():
        if file.hash is not None and file.suffix != ".pyc":
            path = Path(str(file.locate()))
            digest = hashlib.new(file.hash.mode, path.read_bytes() if path.is_file() else b"").digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                findings.append(f"{found.metadata['Name']}: {file} is not the file that was installed")
    return findings


if __name__ == "__main__":
    sys.exit(main())
