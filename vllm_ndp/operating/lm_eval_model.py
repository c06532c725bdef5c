"""A running server as a model of lm-eval whose log-likelihoods are decode's: the served path, at the widths it serves.

    loglikelihood           context but its last token = the prompt, in full precision; the rest are decode rows, so
                            that every scored token comes from decode
    loglikelihood_rolling   the first `decode_from` tokens of each window are its prompt, as a document's beginning is

`decode_from` begins decode earlier in a context too: rows from that position on run as if the context's end had been
generated. One request at a time has hot slots of its own; more at once share them, as in a batch.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoTokenizer

from ndp_device.common.errors import ConfigError
from vllm_ndp.operating.server import Scored, ScoringServer

_MAX_GENERATED = 256
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


def _tokenizer_of(source: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parts raise
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ConfigError(
            f"transformers reads no tokenizer of {source} ({type(error).__name__}: {reason}): name one with --tokenizer"
        ) from None


class NdpServer(TemplateLM):  # type: ignore[misc]
    """For `lm_eval.simple_evaluate(model=NdpServer(...))`; counts what was scored how, and where its pairs ran."""

    def __init__(
        self,
        server: ScoringServer,
        *,
        decode_from: int | None = None,
        concurrent: int = 1,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        if decode_from is not None and not 0 < decode_from < server.max_length:
            raise ConfigError(f"decode_from must be between 1 and {server.max_length - 1}, got {decode_from}")
        self.server, self.decode_from, self._concurrent = server, decode_from, concurrent
        self.tokenizer = _tokenizer_of(tokenizer or server.root)
        self.counts: Counter[str] = Counter()

    # -- text and tokens ----------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """As the server reads a prompt: with the tokens that the tokenizer puts around it, unless they are there."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(begin))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens).input_ids)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # -- what lm-eval asks --------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        found = []
        for (key, *_tokens), scored in zip(requests, self._each(self._score_pair, requests), strict=True):
            self._count(scored)
            result = math.fsum(scored.logprobs), scored.greedy
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
            found.append(result)
        return found

    def _score_pair(self, request: tuple[Any, list[int], list[int]]) -> Scored:
        _, context, continuation = request
        tokens = (context + continuation)[-self.server.max_length :]
        scored_from = len(tokens) - len(continuation)
        if scored_from < 1:
            raise ConfigError(
                f"a continuation of {len(continuation)} tokens leaves no room for its context in the "
                f"{self.server.max_length} that {self.server.name} takes at most"
            )
        before = scored_from - 1 if self.decode_from is None else min(self.decode_from, scored_from - 1)
        return self.server.score(tokens, max(before, 1), scored_from)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        if self.decode_from is None:
            raise ConfigError(
                "a perplexity over whole documents needs a beginning that counts as the prompt: give --decode-from"
            )
        found, texts = [], [request.args[0] for request in requests]
        scored_by_text = self._each(partial(self._score_document, self.decode_from), texts)
        for text, parts in zip(texts, scored_by_text, strict=True):
            for scored in parts:
                self._count(scored)
            total = math.fsum(value for scored in parts for value in scored.logprobs)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            found.append(total)
        return found

    def _score_document(self, prompt_tokens: int, text: str) -> list[Scored]:
        """Windows after the first begin with `prompt_tokens` of the one before: all that they score is decode's."""
        length = self.server.max_length - 1
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text, add_special_tokens=False),
            prefix_token=self.prefix_token_id,
            max_seq_len=length,
            context_len=min(prompt_tokens + 1, length),
        )
        scored = []
        for context, continuation in map(make_disjoint_window, windows):
            tokens = context + continuation
            scored.append(self.server.score(tokens, min(prompt_tokens, len(tokens) - 1), len(context)))
        return scored

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found = self._each(self._generate, [request.args for request in requests])
        for request, text in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return found

    def _generate(self, arguments: tuple[str, dict[str, Any]]) -> str:
        context, asked = arguments
        stop = asked.get("until", [])
        most = int(asked.get("max_gen_toks", _MAX_GENERATED))
        sampling = {name: asked[name] for name in ("top_p", "top_k", "min_p") if name in asked}
        temperature = asked.get("temperature", 0) if asked.get("do_sample", True) else 0
        prompt = self.tok_encode(context)[-(self.server.max_length - most) :]
        stops = [stop] if isinstance(stop, str) else stop
        return self.server.complete(prompt, most, stops, temperature=temperature, **sampling)

    def _each(self, ask: Callable[[Ask], Answer], questions: Iterable[Ask]) -> list[Answer]:
        with ThreadPoolExecutor(self._concurrent) as threads:
            return list(threads.map(ask, questions))

    def _count(self, scored: Scored) -> None:
        self.counts["decode_scored"] += scored.num_decoded
        self.counts["prompt_scored"] += len(scored.logprobs) - scored.num_decoded
        self.counts.update(scored.pairs)


def evaluate(
    model: NdpServer, tasks: Sequence[str], *, include: Path | None = None, **options: Any
) -> dict[str, dict[str, Any]]:
    """Metrics by task, as lm-eval names them. include: a directory of further tasks. Prints nothing."""
    manager = TaskManager(include_path=None if include is None else str(include))
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ConfigError(f"lm-eval {lm_eval.__version__} knows no task {unknown[0]!r}: `lm_eval ls tasks` lists them")
    found = lm_eval.simple_evaluate(model, tasks=list(tasks), task_manager=manager, log_samples=False, **options)
    return {task: _plain(values) for task, values in found["results"].items()}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """`acc,none` -> `acc`, and of what JSON holds."""
    named = {name.removesuffix(",none"): value for name, value in values.items() if name.strip() != "alias"}
    return json.loads(json.dumps({name: _finite(value) for name, value in named.items()}, default=float))  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    return None if (isinstance(value, float) and not math.isfinite(value)) or value == "N/A" else value
