"""Which part of the bundled calibration text is of which domain, so that some can be left out, and replicas without it.

models/tiny-mixtral/calibration.txt is a mixture of eight domains whose seams are not marked. Each paragraph gets the
domain under whose held-out text its tokens are most likely, and changing the domain from one paragraph to the next has
a price (Viterbi), so that short paragraphs follow their neighbours. The two domains without held-out text (sqldoc,
japanese) are told by script or fall to whichever English domain they resemble: that only removes more than needed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ndp_device.calibration.build import SolverName, build_calibrated

FOLDS = (("c", "dict", "german"), ("prose", "python", "xml"))
"""Each half of the domains is measured with replicas whose calibration text has nothing of it."""

_CHANGE = 25.0
"""Nats; a paragraph of some 10 tokens that speaks clearly for another domain outweighs it."""
_UNSEEN = 0.2


def replicas_without(
    fold: int, model_dir: Path, texts: Path, cache: Path, solver: SolverName = "nested", shrink: float = 0.0
) -> tuple[Path, Path]:
    """(replicas calibrated on the text beside the model `texts` less all of a fold's domains, that text), in the
    cache."""
    cache.mkdir(parents=True, exist_ok=True)
    text, replicas = cache / f"without-{'-'.join(FOLDS[fold])}.txt", cache / f"{solver}-{shrink:g}-{fold}"
    text.write_text(text_without(texts, FOLDS[fold]))
    build_calibrated(model_dir, replicas, text, solver=solver, shrink=shrink)
    return replicas, text


def text_without(model_dir: Path, domains: tuple[str, ...]) -> str:
    """The calibration text less every paragraph of these domains."""
    paragraphs, labels = labelled_paragraphs(model_dir)
    return "\n\n".join(text for text, label in zip(paragraphs, labels, strict=True) if label not in domains)


def labelled_paragraphs(model_dir: Path) -> tuple[list[str], list[str]]:
    """The paragraphs of the calibration text, and the domain of each."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    names = [path.stem for path in sorted((model_dir / "eval").glob("*.txt"))]
    likelihoods = np.stack(
        [_log_likelihoods(tokenizer, (model_dir / "eval" / f"{name}.txt").read_text()) for name in names]
    )
    paragraphs = (model_dir / "calibration.txt").read_text().split("\n\n")
    encoded = tokenizer.encode_batch(paragraphs, add_special_tokens=False)
    scores = np.stack([likelihoods[:, one.ids].sum(1) for one in encoded])
    return paragraphs, [names[label] for label in _most_likely_path(scores)]


def _log_likelihoods(tokenizer: Tokenizer, text: str) -> NDArray[np.float64]:
    counts = np.bincount(tokenizer.encode(text, add_special_tokens=False).ids, minlength=tokenizer.get_vocab_size())
    return np.log((counts + _UNSEEN) / (counts + _UNSEEN).sum())


def _most_likely_path(scores: NDArray[np.float64]) -> list[int]:
    """[paragraphs, domains] log-likelihoods -> a domain for each paragraph."""
    best = scores[0]
    came_from = np.zeros(scores.shape, np.int64)
    for place in range(1, len(scores)):
        from_best, stay = int(best.argmax()), best
        changed = best[from_best] - _CHANGE
        came_from[place] = np.where(stay >= changed, np.arange(len(best)), from_best)
        best = np.maximum(stay, changed) + scores[place]
    path = [int(best.argmax())]
    for place in range(len(scores) - 1, 0, -1):
        path.append(int(came_from[place, path[-1]]))
    return path[::-1]
