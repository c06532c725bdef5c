"""A running `vllm serve`, asked over HTTP by the address that its clients use; what goes wrong is one sentence."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ndp_device.common.errors import ConfigError, DeviceUnavailable

_MOST_BYTES = 64 << 20


def _reason(error: urllib.error.HTTPError) -> str:
    text = error.read(10_000).decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200] or str(error.reason)


# -- log-likelihoods of given tokens -----------------------------------------------------------------------------------


FORCED = "ndp_forced_tokens"
"""Name in `vllm_xargs` (HTTP) or `extra_args` (SamplingParams) of the token ids. Further tokens are the model's own."""
PROCESSOR = "vllm_ndp.integration.forced_tokens:ForcedTokens"
_COUNTS = ("hot_pairs", "spilled_pairs", "warm_pairs", "cold_pairs", "fallback_pairs")
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Scored:
    """logprobs: of the tokens from scored_from on. greedy: each of them is what the model would have chosen."""

    logprobs: tuple[float, ...]
    greedy: bool
    num_decoded: int  # the last so many of them are of decode rows
    pairs: Counter[str]  # where decode ran; empty beside a stock server


class ScoringServer:
    """Those past a position come from decode rows, forced one by one.

        tokens   0 … decode_from - 1 | decode_from … end
                 the prompt          | forced (integration/forced_tokens.py): each row is a decode row

    A token's logits are those of the row before it, so tokens from decode_from + 1 on are scored by decode. One pass
    over all rows would differ: the number of rows in a step decides what a layer sends to the device. The step of a
    generated token has one row per request.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """api_key: as clients give it; only paths below /v1 get it."""
        self.name = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        models = self.json("/v1/models")["data"]
        self.model = str(models[0]["id"])
        self.root = str(models[0].get("root") or self.model)
        """Directory or hub id of its checkpoint, tokenizer included."""
        self.max_length = int(models[0]["max_model_len"])

    def json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer. Raises DeviceUnavailable where nobody is."""
        request = urllib.request.Request(self.name + path, None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        if self._api_key and path.startswith("/v1"):
            request.add_header("Authorization", f"Bearer {self._api_key}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return json.loads(answer.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                says = f"{self.name} wants its key: give --api-key, or set VLLM_API_KEY"
            else:
                says = f"{self.name}{path} answers {error.code} ({_reason(error)}): is this the address of vllm serve?"
            raise ConfigError(says) from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ConfigError(f"{self.name}{path} answers no JSON: is this the address of vllm serve?") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise DeviceUnavailable(f"no server answers at {self.name} ({reason})") from None

    def score(self, tokens: Sequence[int], decode_from: int, scored_from: int) -> Scored:
        """Log-probabilities of tokens[scored_from:], those before decode_from being the prompt."""
        prompt, forced = list(tokens[:decode_from]), list(tokens[decode_from:])
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": len(forced),
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "vllm_xargs": {FORCED: forced},
        }
        if scored_from < decode_from:
            body["prompt_logprobs"] = 0  # of the tokens themselves, with their rank
        answer = self.json("/v1/completions", body)
        (choice,) = answer["choices"]
        if choice["token_ids"] != forced:
            raise ConfigError(
                f"{self.name} was to generate {len(forced)} given tokens and generated others: start it with "
                f"--logits-processors {PROCESSOR}"
            )
        # the first token of a prompt has no row before it
        told = (choice.get("prompt_logprobs") or [])[scored_from:]
        of_prompt = [by_token[str(token)] for token, by_token in zip(prompt[scored_from:], told, strict=True)]
        first = max(scored_from - decode_from, 0)
        by_row = choice["logprobs"]["token_logprobs"][first:]
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][first:]]
        greedy = all(one["rank"] == 1 for one in of_prompt) and all(x >= y for x, y in zip(by_row, best, strict=True))
        report = (answer.get("kv_transfer_params") or {}).get("ndp", {})
        return Scored(
            logprobs=(*(float(one["logprob"]) for one in of_prompt), *map(float, by_row)),
            greedy=greedy,
            num_decoded=len(tokens) - max(scored_from, decode_from + 1),
            pairs=Counter({kind: report[kind] for kind in _COUNTS if kind in report}),
        )

    def complete(self, prompt: Sequence[int], max_tokens: int, stop: Sequence[str], **sampling: Any) -> str:
        """Text that the model makes."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "stop": list(stop), **sampling}
        return str(self.json("/v1/completions", body)["choices"][0]["text"])
