"""How well does a checkpoint predict the held-out text of each domain?

    python models/training/evaluate.py [CHECKPOINT] [--texts DIR] [--windows N]

Documents stand between <s> and </s>, back to back; windows of 512 tokens, each predicted without what came before it;
perplexity is exp of the mean over all predicted tokens, in float32. A guess at random scores 4096.
Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-mixtral"
WINDOW_TOKENS = 512
BATCH = 8


def held_out_documents(texts: Path) -> dict[str, list[str]]:
    """{domain: documents}; documents.json holds the characters of each document, separators of two line ends apart.

    A text that documents.json does not name was joined from documents without empty lines and is split at them.
    """
    lengths_file = texts / "documents.json"
    lengths = json.loads(lengths_file.read_text()) if lengths_file.exists() else {}
    documents = {}
    for path in sorted(texts.glob("*.txt")):
        text = path.read_text()
        if path.stem in lengths:
            start, documents[path.stem] = 0, []
            for length in lengths[path.stem]:
                documents[path.stem].append(text[start : start + length])
                start += length + len("\n\n")
        else:
            documents[path.stem] = text.split("\n\n")
    return documents


def held_out_tokens(texts: Path, tokenizer: Tokenizer) -> dict[str, list[int]]:
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    return {
        domain: [
            token
            for one in tokenizer.encode_batch(documents, add_special_tokens=False)
            for token in (begin, *one.ids, end)
        ]
        for domain, documents in held_out_documents(texts).items()
    }


@torch.inference_mode()
def perplexity(model: PreTrainedModel, tokens: list[int], max_windows: int | None = None) -> float:
    windows = torch.tensor(tokens[: len(tokens) // WINDOW_TOKENS * WINDOW_TOKENS]).view(-1, WINDOW_TOKENS)[:max_windows]
    total = 0.0
    for batch in windows.split(BATCH):
        batch = batch.to(model.device)
        logits = model(batch).logits[:, :-1]
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (windows.shape[0] * (WINDOW_TOKENS - 1)))


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--texts", type=Path, default=MODEL / "eval")
    parser.add_argument("--windows", type=int, help="first N windows of each domain only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    scores = {}
    for domain, tokens in held_out_tokens(arguments.texts, tokenizer).items():
        scores[domain] = round(perplexity(model, tokens, arguments.windows), 2)
        print(f"{domain:9s} {scores[domain]:7.2f}   ({len(tokens)} tokens)")
    print(json.dumps({"perplexity": scores, "geometric_mean": round(geometric_mean(list(scores.values())), 2)}))


if __name__ == "__main__":
    main()
