"""Debian packages in, plain-text documents out: one reader per domain.

Knows the packages' file layouts. Does not know splits, tokens or training (build_corpus.py, train.py).
A document is a file, a chapter, a help page or a block of dictionary entries; readers return them in no useful order.
"""

from __future__ import annotations

import itertools
import random
import re
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

BINARY_PACKAGES = (
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "r-cran-janeaustenr",
    "wordnet-base",
    "postgresql-doc-15",
    "libreoffice-help-de",
    "libreoffice-help-ja",
    "tango-icon-theme",
    "unicode-cldr-core",
)
SOURCE_PACKAGES = ("lua5.4", "musl", "zlib", "sqlite3")

DICTIONARY_ENTRIES_PER_DOCUMENT = 60
XML_BLOCK_CHARS = 8_000
XML_BLOCKS_PER_FILE = 4


def fetch(cache: Path) -> Path:
    """Download and unpack every package below `cache`; does nothing when that is done. Returns the unpacked tree."""
    packages, tree, done = cache / "packages", cache / "tree", cache / "tree" / ".complete"
    if done.exists():
        return tree
    packages.mkdir(parents=True, exist_ok=True)
    run(["apt-get", "download", *BINARY_PACKAGES], packages)
    options = source_list_options(cache / "apt")
    run(["apt-get", *options, "update"], packages)
    run(["apt-get", *options, "source", "--download-only", *SOURCE_PACKAGES], packages)
    for package in sorted(packages.glob("*.deb")):
        run(["dpkg-deb", "-x", str(package), str(tree)], packages)
    for archive in sorted(packages.glob("*.orig.tar.*")):
        if archive.suffix != ".asc":
            with tarfile.open(archive) as tar:
                tar.extractall(tree / "sources", filter="data")
    done.touch()
    return tree


def run(command: list[str], directory: Path) -> None:
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command[:3])} … failed: {result.stderr.strip().splitlines()[-1]}")


def source_list_options(directory: Path) -> list[str]:
    """apt options that read the machine's own archives as source archives, with private lists."""
    sources, lists = directory / "sources", directory / "lists"
    sources.mkdir(parents=True, exist_ok=True)
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    system = Path("/etc/apt")
    for path in (system / "sources.list", *system.glob("sources.list.d/*.list")):
        if path.exists():
            (sources / f"{path.stem}.list").write_text(re.sub(r"(?m)^deb ", "deb-src ", path.read_text()))
    for path in system.glob("sources.list.d/*.sources"):
        (sources / path.name).write_text(re.sub(r"(?m)^Types:.*", "Types: deb-src", path.read_text()))
    return [
        *("-o", "Dir::Etc::SourceList=/dev/null", "-o", f"Dir::Etc::SourceParts={sources}"),
        *("-o", f"Dir::State::Lists={lists}", "-o", "APT::Sandbox::User=root"),
    ]


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")


def python_documents(tree: Path) -> Iterator[str]:
    for path in (tree / "usr/lib/python3.11").rglob("*.py"):
        if "encodings" not in path.parts:  # code page tables
            yield read_text(path)


def c_documents(tree: Path) -> Iterator[str]:
    for pattern in ("sqlite3-*/src", "sqlite3-*/ext", "lua-*", "musl-*", "zlib-*"):
        for root in (tree / "sources").glob(pattern):
            for path in itertools.chain(root.rglob("*.c"), root.rglob("*.h")):
                yield read_text(path)


def prose_documents(tree: Path) -> Iterator[str]:
    """The six novels are R character vectors, one string per printed line; a chapter heading starts a document."""
    database = (tree / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while database:
        inflate = zlib.decompressobj()
        novel = inflate.decompress(database[4:])  # 4 bytes: the size when inflated
        database = inflate.unused_data
        text = "\n".join(character_vector(novel))
        yield from re.split(r"(?m)^(?=(?:CHAPTER|Chapter) [0-9IVXL]+\s*$)", text)[1:]


def character_vector(data: bytes) -> Iterator[str]:
    """Strings of an R serialization (XDR, version 3) that holds one character vector (type 16) of CHARSXP (type 9)."""
    native_encoding_bytes = struct.unpack_from(">i", data, 14)[0]
    position = 18 + native_encoding_bytes
    kind, count = struct.unpack_from(">ii", data, position)
    if kind & 0xFF != 16:
        raise SystemExit(f"a novel must be an R character vector (type 16), got type {kind & 0xFF}")
    position += 8
    for _ in range(count):
        length = struct.unpack_from(">i", data, position + 4)[0]
        yield data[position + 8 : position + 8 + length].decode("utf-8")
        position += 8 + length


def dictionary_documents(tree: Path) -> Iterator[str]:
    """WordNet synsets as "word, word (pos.) gloss", shuffled: the files are sorted by meaning."""
    entries = []
    for name, part_of_speech in (("noun", "n."), ("verb", "v."), ("adj", "adj."), ("adv", "adv.")):
        for line in read_text(tree / "usr/share/wordnet" / f"data.{name}").splitlines():
            if line.startswith("  "):  # the licence at the top
                continue
            fields, _, gloss = line.partition(" | ")
            columns = fields.split(" ")
            words = [
                re.sub(r"\(.*\)$", "", word).replace("_", " ") for word in columns[4 : 4 + 2 * int(columns[3], 16) : 2]
            ]
            entries.append(f"{', '.join(words)} ({part_of_speech}) {gloss.strip()}")
    random.Random(0).shuffle(entries)
    for first in range(0, len(entries), DICTIONARY_ENTRIES_PER_DOCUMENT):
        yield "\n".join(entries[first : first + DICTIONARY_ENTRIES_PER_DOCUMENT])


class PageText(HTMLParser):
    """Visible text of the part of a page that `starts` (tag, attribute, value) opens, up to a div named in `ends`."""

    BLOCKS = frozenset(["p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "li", "dt", "dd", "tr", "table", "pre", "br"])
    SILENT = frozenset(("script", "style"))

    def __init__(self, starts: tuple[str, str], ends: tuple[str, str]) -> None:
        super().__init__()
        self.starts, self.ends = starts, ends
        self.inside, self.silent, self.preformatted = False, 0, 0
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.starts in attrs:
            self.inside = True
        elif self.ends in attrs:
            self.inside = False
        self.silent += tag in self.SILENT
        self.preformatted += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in self.SILENT
        self.preformatted -= tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self.inside and not self.silent:
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        lines = (
            line.strip(" ") if not line.startswith("  ") else line.rstrip() for line in "".join(self.parts).split("\n")
        )
        return "\n".join(line for line in lines if line.strip())


def page_documents(root: Path, starts: tuple[str, str], ends: tuple[str, str]) -> Iterator[str]:
    for path in root.rglob("*.html"):
        page = PageText(starts, ends)
        page.feed(read_text(path))
        yield page.text()


def xml_documents(tree: Path) -> Iterator[str]:
    """Icons whole; of each locale file up to four blocks, spread evenly."""
    for path in (tree / "usr/share/icons").rglob("*.svg"):
        yield read_text(path)[:XML_BLOCK_CHARS]
    for path in (tree / "usr/share/unicode/cldr/common").rglob("*.xml"):
        text = read_text(path)
        step = max(len(text) // XML_BLOCKS_PER_FILE, XML_BLOCK_CHARS)
        for first in range(0, len(text), step):
            yield text[first : first + XML_BLOCK_CHARS]


HELP_PAGE = (("id", "DisplayArea"), ("id", "SearchFrame"))
READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    "python": python_documents,
    "c": c_documents,
    "prose": prose_documents,
    "dict": dictionary_documents,
    "sqldoc": lambda tree: page_documents(
        tree / "usr/share/doc/postgresql-doc-15/html", ("class", "titlepage"), ("class", "navfooter")
    ),
    "german": lambda tree: page_documents(tree / "usr/share/libreoffice/help/de/text", *HELP_PAGE),
    "japanese": lambda tree: page_documents(tree / "usr/share/libreoffice/help/ja/text", *HELP_PAGE),
    "xml": xml_documents,
}
LICENCES = {
    "python": "PSF-2.0",
    "c": "public domain (SQLite), MIT (Lua, musl), Zlib",
    "prose": "public domain",
    "dict": "WordNet-3.0",
    "sqldoc": "PostgreSQL",
    "german": "MPL-2.0",
    "japanese": "MPL-2.0",
    "xml": "public domain (Tango), Unicode-DFS-2016 (CLDR)",
}
