"""Speculative decoding: which proposers of vLLM we serve beside, and what is said of them.

vLLM makes a proposer's own layers, experts among them, once the model's are loaded. They run by vLLM's methods, in full
precision, after a step has ended, so that no simulated clock holds their time. Accepted drafts are counted where steps
are (report.py). Knows vLLM's configuration only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ndp.config import NdpSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODEL_FREE = ("ngram", "suffix")
"""Proposers that take next to no time and route nothing."""
WITH_LAYERS = ("draft_model", "eagle", "eagle3", "medusa", "mtp")


def refusals(vllm_config: VllmConfig, settings: NdpSettings, *, on_cpu: bool) -> list[tuple[bool, str]]:
    """Pairs: whether the engine asked for something that is refused, and the sentence that refuses it."""
    proposer, speculative = _proposer(vllm_config), vllm_config.speculative_config
    quantization = getattr(speculative, "quantization", None)
    known = ("", *MODEL_FREE, *WITH_LAYERS)
    return [
        (proposer not in known, f"drafts by {proposer!r}, which nobody has compared with stock here: use one of "
         f"{', '.join(known[1:])} in --speculative-config"),
        (proposer != "mtp" and quantization == "ndp",
         "itself for a draft, whose layers are vLLM's: drop 'quantization' from --speculative-config"),
        (_has_layers(vllm_config) and _schedules_ahead(vllm_config, on_cpu=on_cpu), "drafts with layers of their own "
         "under asynchronous scheduling, where the host learns too late which were accepted: add "
         "--no-async-scheduling"),
        (on_cpu and bool(proposer) and _caches_states(vllm_config), "drafts beside a prefix cache of recurrent states, "
         "which vLLM copies by a kernel of Triton's: add --no-enable-prefix-caching"),
        (settings.record is not None and _has_layers(vllm_config),
         "'record' beside a draft model, whose time is in no simulated clock, so that a replay could not be compared: "
         f"drop 'record', or use a proposer without a model ({', '.join(MODEL_FREE)})"),
    ]  # fmt: skip


def description(vllm_config: VllmConfig) -> str:
    """The proposer and its number of tokens, for the start-up table; empty without one."""
    if not (proposer := _proposer(vllm_config)):
        return ""
    beside = "; its layers are vLLM's, in full precision, and in no clock" if _has_layers(vllm_config) else ""
    return f"{proposer}, up to {vllm_config.speculative_config.num_speculative_tokens} tokens a step{beside}"


def unsimulated(vllm_config: VllmConfig) -> str:
    """Work of a proposer that is in no simulated clock, in words for reports; empty where there is none."""
    return "the draft model's time" if _has_layers(vllm_config) else ""


def _proposer(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    return "" if speculative is None else str(speculative.method)


def _has_layers(vllm_config: VllmConfig) -> bool:
    return _proposer(vllm_config) in WITH_LAYERS


def _caches_states(vllm_config: VllmConfig) -> bool:
    return bool(vllm_config.model_config.is_hybrid and vllm_config.cache_config.enable_prefix_caching)


def _schedules_ahead(vllm_config: VllmConfig, *, on_cpu: bool) -> bool:
    """Whether a step is scheduled before the one before has ended: on a GPU, where nobody has said so."""
    asked = vllm_config.scheduler_config.async_scheduling
    return not on_cpu if asked is None else bool(asked)
