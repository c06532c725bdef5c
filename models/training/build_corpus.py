"""Which text does tiny-mixtral learn from, and which text has it never seen?

    python models/training/build_corpus.py [--cache DIR] [--calibration FILE]

Eight domains from Debian packages, split by document. Six held-out texts are the ones shipped in
models/tiny-mixtral/eval and stay as they are; for the two domains without one (sqldoc, japanese) whole documents are
held out here. A training document that repeats held-out text is dropped. Same packages in, same bytes out.

Writes CACHE/corpus/{domain}.train.npy (token ids, uint16, each document between <s> and </s>), CACHE/corpus/eval/*.txt,
CACHE/corpus/manifest.json, and the calibration text: training documents that share no 200 characters with any held-out
text. Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from sources import LICENCES, READERS, fetch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-mixtral"

TRAIN_BYTES = 3_000_000
EVAL_BYTES = 100_000
CALIBRATION_BYTES = 125_000
CALIBRATION_DOCUMENT_CHARS = 6_000
DOCUMENT_CHARS = (400, 40_000)
WINDOW = 100
"""Characters without white space. A shared passage of 2 * WINDOW holds at least one whole aligned window."""
MAX_SHARED = 0.1
"""Documents share licence headers and XML preambles; with more windows shared a document repeats held-out text."""


def squeeze(text: str) -> str:
    return "".join(text.split())


class Passages:
    """Every WINDOW characters of some texts, to ask how much of another text repeats them."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def add(self, text: str) -> None:
        squeezed = squeeze(text)
        self.seen.update(hash(squeezed[i : i + WINDOW]) for i in range(len(squeezed) - WINDOW + 1))

    def shared(self, text: str) -> float:
        """Part of the aligned windows of `text` that were added."""
        squeezed = squeeze(text)
        windows = [hash(squeezed[i : i + WINDOW]) for i in range(0, len(squeezed) - WINDOW + 1, WINDOW)]
        return sum(window in self.seen for window in windows) / max(len(windows), 1)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def in_drawn_order(documents: Iterable[str]) -> list[str]:
    """Documents of a usable length, once each, in the order of their hashes: random, and the same everywhere."""
    low, high = DOCUMENT_CHARS
    usable = {digest(text): text for text in documents if low <= len(text) <= high}
    return [usable[key] for key in sorted(usable)]


def take(documents: Iterable[str], limit: int) -> Iterator[str]:
    """Documents until `limit` bytes are reached."""
    taken = 0
    for document in documents:
        if taken >= limit:
            return
        taken += len(document.encode())
        yield document


def interleaved_calibration(by_domain: dict[str, list[str]]) -> str:
    """The domains' documents, cut to a few thousand characters and spread evenly: every long stretch is a mixture."""
    placed = []
    for domain, documents in by_domain.items():
        column = list(take((text[:CALIBRATION_DOCUMENT_CHARS].strip() for text in documents), CALIBRATION_BYTES))
        placed += [((index + 0.5) / len(column), domain, text) for index, text in enumerate(column)]
    return "\n\n".join(text for _, _, text in sorted(placed)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "tiny_mixtral")
    parser.add_argument("--calibration", type=Path, default=MODEL / "calibration.txt")
    arguments = parser.parse_args()
    tree = fetch(arguments.cache.resolve())
    corpus = arguments.cache / "corpus"
    (corpus / "eval").mkdir(parents=True, exist_ok=True)

    documents = {domain: in_drawn_order(read(tree)) for domain, read in READERS.items()}
    held_out_passages, held_out = Passages(), {}
    for domain in READERS:
        shipped = MODEL / "eval" / f"{domain}.txt"
        held_out[domain] = shipped.read_text() if shipped.exists() else "\n\n".join(take(documents[domain], EVAL_BYTES))
        (corpus / "eval" / f"{domain}.txt").write_text(held_out[domain])
        held_out_passages.add(held_out[domain])
    # Dictionary entries are shuffled before they are grouped: what is held out is the entry.
    held_out_entries = set(held_out["dict"].split("\n"))
    documents["dict"] = [
        "\n".join(entry for entry in text.split("\n") if entry not in held_out_entries) for text in documents["dict"]
    ]

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    manifest: dict[str, dict[str, object]] = {}
    unshared: dict[str, list[str]] = {}
    train_tokens = 0
    for domain, drawn in documents.items():
        shared = {text: held_out_passages.shared(text) for text in drawn}
        train = list(take((text for text in drawn if shared[text] <= MAX_SHARED), TRAIN_BYTES))
        unshared[domain] = [text for text in train if shared[text] == 0]
        encoded = tokenizer.encode_batch(train, add_special_tokens=False)
        ids = np.concatenate([np.array([begin, *one.ids, end], np.uint16) for one in encoded])
        np.save(corpus / f"{domain}.train.npy", ids)
        train_tokens += len(ids)
        manifest[domain] = {
            "licence": LICENCES[domain],
            "documents": len(drawn),
            "dropped_as_held_out": sum(part > MAX_SHARED for part in shared.values()),
            "train_documents": len(train),
            "train_documents_sharing_boilerplate": len(train) - len(unshared[domain]),
            "train_bytes": sum(len(text.encode()) for text in train),
            "train_tokens": len(ids),
            "sha256_train": digest("\n\n".join(train)),
            "eval_bytes": len(held_out[domain].encode()),
            "sha256_eval": digest(held_out[domain]),
        }
        print(f"{domain:9s} " + "  ".join(f"{k} {v}" for k, v in manifest[domain].items() if isinstance(v, int)))

    calibration = interleaved_calibration(unshared)
    arguments.calibration.write_text(calibration)
    result = {
        "domains": manifest,
        "train_tokens": train_tokens,
        "calibration_bytes": len(calibration.encode()),
        "sha256_calibration": digest(calibration),
    }
    (corpus / "manifest.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "domains"}))


if __name__ == "__main__":
    main()
