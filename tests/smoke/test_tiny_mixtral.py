"""The bundled model is the trained one, and no calibration text was held out. Knows transformers, not vLLM."""

import math

import pytest
from paths import MODEL

pytestmark = pytest.mark.slow  # together: a forward pass over held-out texts

DOMAINS = ("c", "dict", "german", "prose", "python", "xml")


def held_out(domain: str) -> str:
    return (MODEL / "eval" / f"{domain}.txt").read_text()


def test_the_checkpoint_predicts_held_out_text_as_measured() -> None:
    """First 12 windows of 512 tokens in float32; a random guess scores 4096."""
    import torch
    from tokenizers import Tokenizer
    from transformers import MixtralForCausalLM

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    model = MixtralForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for domain, measured in (("german", 18.85), ("xml", 8.72), ("prose", 31.98)):
        ids = tokenizer.encode(held_out(domain), add_special_tokens=False).ids[: 12 * 512]
        windows = torch.tensor(ids).view(12, 512)
        with torch.inference_mode():
            logits = model(windows).logits[:, :-1]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        assert math.exp(nll.item()) == pytest.approx(measured, rel=0.02), domain


def test_calibration_text_shares_no_200_characters_with_held_out_text() -> None:
    calibration = (MODEL / "calibration.txt").read_text()
    assert len(calibration.encode()) > 800_000
    seen: set[int] = set()
    for domain in DOMAINS:
        text = held_out(domain)
        seen.update(hash(text[i : i + 200]) for i in range(len(text) - 199))
    assert not any(hash(calibration[i : i + 200]) in seen for i in range(len(calibration) - 199))
