"""Documents of the two lm-eval tasks beside this file, cut from the bundled model's held-out texts: no download.

held_out_text   windows of text, for a perplexity
held_out_next   a beginning, and four ways on: the true one, and three from elsewhere in the same domain
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset

TEXTS = Path(__file__).resolve().parents[2] / "models" / "tiny-mixtral" / "eval"
WINDOW, CONTEXT, CONTINUATION = 1200, 400, 48
"""In characters; bytes of a window become 350 to 500 of the bundled tokenizer's tokens."""
PER_DOMAIN, CHOICES, SEED = 20, 4, 0


def texts(**_: Any) -> dict[str, Dataset]:
    return {"test": Dataset.from_list([{"domain": domain, "text": text} for domain, text in _windows(WINDOW)])}


def choices(**_: Any) -> dict[str, Dataset]:
    chosen = random.Random(SEED)
    documents: list[dict[str, Any]] = []
    for domain, text in _windows(CONTEXT + CONTINUATION):
        whole = (TEXTS / f"{domain}.txt").read_text()
        others = [whole[start : start + CONTINUATION] for start in _starts(chosen, len(whole) - CONTINUATION)]
        label = chosen.randrange(CHOICES)
        others.insert(label, text[CONTEXT:])
        documents.append({"domain": domain, "query": text[:CONTEXT], "choices": others, "label": label})
    return {"test": Dataset.from_list(documents)}


def _starts(chosen: random.Random, end: int) -> list[int]:
    return [chosen.randrange(end) for _ in range(CHOICES - 1)]


def _windows(length: int) -> Iterator[tuple[str, str]]:
    """The domains in turns, so that the first few documents have one of each."""
    whole = {path.stem: path.read_text() for path in sorted(TEXTS.glob("*.txt"))}
    for index in range(PER_DOMAIN):
        for domain, text in whole.items():
            start = (len(text) - length) * index // (PER_DOMAIN - 1)
            yield domain, text[start : start + length]
