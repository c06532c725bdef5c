"""How many words has each page, and how many sentences must be read twice, at an older commit and now?

    python benchmarks/page_words.py [--since 3db895e] [--json docs/measured/words.json]

docs/plain_words.py as it is now counts both: words of README, SECURITY and docs/; sentences of these pages, of the
READMEs of patches/ and of docstrings. Sentences are listed by folder.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from measured import ROOT, Measurement, add_json_option

sys.path.insert(0, str(ROOT / "docs"))
import plain_words

START_OF_THE_REWRITE = "3db895e"


def tree_of(commit: str, folder: Path) -> Path:
    """The files of `commit` below `folder`."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def room(name: str) -> str:
    """Where sentences of a file are listed: its page, or the folder of its docstrings."""
    parts = Path(name).parts
    return name if name.endswith(".md") else "/".join(parts[: min(2, len(parts) - 1)])


def sentences(root: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, number in plain_words.counts(root).items():
        found[room(name)] += number
    return found


def rows(before: dict[str, int], now: dict[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "before": before.get(name, 0), "now": now.get(name, 0)} for name in sorted({*before, *now})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default=START_OF_THE_REWRITE, metavar="COMMIT")
    add_json_option(parser)
    given = parser.parse_args()
    measurement = Measurement(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        older = tree_of(given.since, Path(folder))
        words, found = plain_words.words(older), sentences(older)
        figures = {
            "since": given.since,
            "words": rows(words, plain_words.words(ROOT)),
            "sentences": rows(found, sentences(ROOT)),
            "pages_of_users": list(plain_words.PAGES_OF_USERS),
        }
    measurement.end(figures, given.json)


if __name__ == "__main__":
    main()
