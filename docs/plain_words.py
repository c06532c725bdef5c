"""Finds sentences that a reader must read twice, in README, docs and docstrings, and counts the words of pages.

    python docs/plain_words.py              how many per file, and the totals
    python docs/plain_words.py FILE...      each sentence with its reason
    python docs/plain_words.py --keep       write today's counts to plain_words.toml, where they are lower
    python docs/plain_words.py --words      words by page

Rules: at most 25 words a sentence (numbers are none); no word of DIALECT; a sentence that starts with "Of", "What",
a question; at most two passive verbs in a sentence. plain_words.toml lists how many each file may still hold, and how
many words the pages may have (`make check`).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "docs" / "plain_words.toml"
MOST_WORDS = 25
MOST_PASSIVES = 2
PAGES_OF_USERS = (
    "README.md",
    *(f"docs/{name}.md" for name in ("start", "howto", "serving", "families", "compatibility")),
)
DIALECT = (
    "nobodies",
    "whoever",
    "whosoever",
    "whichever",
    "wherever",
    "nought",
    "thereof",
    "therein",
    "whereby",
    "hereby",
    "nowhere else",
    "as no room does",
    "of one's own",
    "of its own accord",
    "by then",
    "till",
    "ere",
    "anew",
    "apart from that",
    "one that none",
    "those that it",
)
SKIPPED = re.compile(r"```.*?```|<!-- generated: .*?<!-- end -->|<!--.*?-->", re.DOTALL)
NO_PROSE = re.compile(r"^\s*(\||#|>?\s*$|\$|\d+\.\s*$|    \S)")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"`[^`]*`")
BULLET = re.compile(r"^\s*(?:[*+-]|\d+\.)\s+")
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_`]*[A-Z0-9`])")
PASSIVE = re.compile(
    r"\b(?:is|are|was|were|be|been|being)\s+(?:not\s+|never\s+|also\s+)?(?:\w+ed|\w+en|made|kept|held|read|set|put|sent|said|told|found|left|cut|built|taken|run)\b"
)
STARTS = re.compile(r"^[\"'(*_]*(Of|What|Who|Whoever|Those)\b")
WORD = re.compile(r"[A-Za-z][\w'./%+-]*")


def sentences(text: str) -> Iterator[str]:
    """Of the prose in Markdown or in a docstring: without code, tables, headings and generated parts."""
    for block in paragraphs(SKIPPED.sub("", text)):
        plain = CODE.sub("Code", LINK.sub(r"\1", block))
        yield from (part.strip() for part in END.split(plain) if WORD.search(part))


def paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if (NO_PROSE.match(line) or BULLET.match(line)) and lines:
            yield " ".join(lines)
            lines = []
        if not NO_PROSE.match(line):
            lines.append(BULLET.sub("", line).strip())


def faults(sentence: str) -> list[str]:
    """Why a sentence must be read twice; empty for a plain one."""
    words, low = len(WORD.findall(sentence)), f" {sentence.lower()} "
    found = [f"{words} words"] if words > MOST_WORDS else []
    found += [f"the word {word!r}" for word in DIALECT if re.search(rf"\b{re.escape(word)}\b", low)]
    if (start := STARTS.match(sentence)) and "?" not in sentence:
        found.append(f"starts with {start[1]!r}")
    if len(PASSIVE.findall(low)) > MOST_PASSIVES:
        found.append("a chain of passive verbs")
    return found


def texts(path: Path) -> list[str]:
    """The page, or the docstrings of a Python file, those below constants and fields among them."""
    text = path.read_text()
    if path.suffix != ".py":
        return [text]
    alone = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    return [
        inspect.cleandoc(one.value) for one in alone if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]


def found_in(path: Path) -> list[tuple[str, list[str]]]:
    every = ((sentence, faults(sentence)) for text in texts(path) for sentence in sentences(text))
    return [(sentence, why) for sentence, why in every if why]


def files(root: Path = ROOT) -> list[Path]:
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "patches").rglob("*.md")]
    code = [path for package in ("ndp_device", "vllm_ndp") for path in (root / package).rglob("*.py")]
    return sorted(path for path in (*pages, *code) if "__pycache__" not in path.parts)


def counts(root: Path = ROOT) -> dict[str, int]:
    """Sentences to mend by file, of those that have any."""
    found = {path.relative_to(root).as_posix(): len(found_in(path)) for path in files(root)}
    return {name: number for name, number in found.items() if number}


def allowed(root: Path = ROOT) -> dict[str, int]:
    path = root / "docs" / ALLOWED.name
    return dict(tomllib.loads(path.read_text())["sentences"]) if path.is_file() else {}


def too_many(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Files with more sentences to mend than they may hold: name -> (found, allowed)."""
    limit = allowed(root)
    return {name: (now, limit.get(name, 0)) for name, now in counts(root).items() if now > limit.get(name, 0)}


def words(root: Path = ROOT) -> dict[str, int]:
    """Words by page, tables and code included: README, SECURITY and everything in docs/."""
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    return {path.relative_to(root).as_posix(): len(path.read_text().split()) for path in sorted(pages)}


def totals(root: Path = ROOT) -> dict[str, int]:
    """Words of all pages, and of those that a user meets."""
    by_page = words(root)
    return {"all": sum(by_page.values()), "of users": sum(by_page[page] for page in PAGES_OF_USERS)}


def most_words(root: Path = ROOT) -> dict[str, int]:
    return dict(tomllib.loads((root / "docs" / ALLOWED.name).read_text())["words"])


def too_wordy(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Groups of pages with more words than they may have: name -> (found, allowed)."""
    limit = most_words(root)
    return {name: (now, limit[name]) for name, now in totals(root).items() if now > limit[name]}


def keep() -> None:
    limit, now, most = allowed(), counts(), most_words()
    rows = [f'"{name}" = {min(number, limit.get(name, number))}' for name, number in sorted(now.items())]
    ALLOWED.write_text(
        "# Sentences that plain_words.py finds, by file. A number may fall, and never rise.\n[sentences]\n"
        + "\n".join(rows)
        + "\n\n# Words that all pages may have, and those that a user meets.\n[words]\n"
        + "".join(f'"{name}" = {number}\n' for name, number in most.items())
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--keep", action="store_true", help="lower the counts of plain_words.toml to today's")
    parser.add_argument("--words", action="store_true", help="print the words of each page")
    given = parser.parse_args()
    for path in given.files:
        for sentence, why in found_in(path):
            print(f"{path}: {', '.join(why)}: {sentence}")
    if given.files:
        return 0
    if given.keep:
        keep()
    now = words() if given.words else counts()
    for name, number in sorted(now.items(), key=lambda item: item[1]):
        print(f"{number:5}  {name}")
    print(f"{sum(now.values()):5}  in all")
    return 1 if too_many() or too_wordy() else 0


if __name__ == "__main__":
    sys.exit(main())
