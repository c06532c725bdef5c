"""Forced tokens (forced_tokens.py) on vLLM's runner V2, which has them itself: `--enable-trace-replay`.

    vllm serve MODEL --quantization ndp --enable-trace-replay \\
        --logits-processors vllm_ndp.integration.serving.traced_tokens:TracedTokens

vLLM takes a trace by SamplingParams only, not over HTTP. Here a request that names its tokens in `vllm_xargs` gets one,
when it is admitted. Nothing is done to logits: vLLM's sampler writes the tokens, log-probabilities stay the model's.
Runner V2 takes no processor of V1's kind, and V1 has no trace replay: hence two classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from vllm_ndp.integration.forced_tokens import ForcedTokens
from vllm_ndp.operating.scoring import FORCED

if TYPE_CHECKING:
    from vllm import SamplingParams


class TracedTokens(LogitsProcessor):
    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called where vLLM admits a request, before it asks whether the engine replays traces."""
        forced = (sampling_params.extra_args or {}).get(FORCED)
        if forced is None:
            return
        ForcedTokens.validate_params(sampling_params)
        if sampling_params.n != 1 or sampling_params.prompt_logprobs is not None:
            raise ValueError(f"{FORCED} wants n=1 and no prompt_logprobs, as vLLM's trace replay does")
        if min(forced) < 0:
            raise ValueError(f"{FORCED} must be a list of token ids, got {min(forced)}")
        sampling_params.trace_decode_token_ids = forced

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return False

    def apply(self, logits: Any, ctx: Any) -> Any:
        return logits
