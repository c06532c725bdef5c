"""A request that gets the tokens it names instead of the model's: given text through decode, as if it were generated.

    vllm serve MODEL --quantization ndp --logits-processors vllm_ndp.integration.forced_tokens:ForcedTokens
    {"prompt": [1, 17, 4], "max_tokens": 2, "logprobs": 1, "vllm_xargs": {"ndp_forced_tokens": [9, 305]}}

Rows of a prompt run in full precision, so log-likelihoods of a prompt say nothing of the widths that decode uses. The
rows of forced tokens are decode rows like any other: the request's own plan, hot slots, the device, balancing. Logits
processors run after vLLM takes its raw log-probabilities, so those of the answer are the model's. Knows vLLM's logits
processors; runs beside stock vLLM too, where it changes nothing unless a request asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from ndp_device.common.errors import ConfigError
from vllm_ndp.operating.server import FORCED

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import RequestLogitsProcessor


class ForcedTokens(AdapterLogitsProcessor):
    def __init__(self, vllm_config: Any, *others: Any) -> None:
        mode = vllm_config.model_config.logprobs_mode
        if not mode.startswith("raw"):
            raise ConfigError(
                f"forced tokens have log-probability 0 where --logprobs-mode is {mode}: drop it, the default is raw"
            )
        super().__init__(vllm_config, *others)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        forced = (sampling_params.extra_args or {}).get(FORCED)
        if forced is not None and not (isinstance(forced, list) and forced and all(type(t) is int for t in forced)):
            raise ValueError(f"{FORCED} must be a list of token ids, got {forced!r:.100}")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        forced = (params.extra_args or {}).get(FORCED)
        return None if forced is None else _Forced(forced)


class _Forced:
    """Leaves only the token that comes next; any that the vocabulary lacks leaves the model's choice to be seen."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        position = len(output_ids)
        if position < len(self._tokens) and 0 <= (token := self._tokens[position]) < len(logits):
            kept = logits[token].clone()
            logits.fill_(float("-inf"))
            logits[token] = kept
        return logits
