"""Chooses what nobody has chosen, once, while the engine is configured: experts' places, widths and the KV cache.

`vllm serve MODEL --quantization ndp` on a machine without a GPU. The choice is written into vLLM's configuration as if
a user had given it, so every process sees the same. The log says the choice, with the line that gives it by hand.
Nothing is chosen for a user who gives one of LAYOUT, names a hardware or other devices, or has several workers; but for
the width of a quantized checkpoint's experts, which is that of its own codes.
"""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import ConfigError, NdpError
from ndp_device.common.machine_memory import required_memory
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import load_losses
from vllm_ndp import __version__
from vllm_ndp.config import NdpSettings, as_options
from vllm_ndp.integration import compat
from vllm_ndp.integration.compat import model_dir
from vllm_ndp.integration.host_replicas import cached_replicas
from vllm_ndp.integration.price_probe import find_or_measure
from vllm_ndp.operating import speed
from vllm_ndp.operating.proposal import OwnSize, kv_cache_bytes, own_size
from vllm_ndp.operating.sizing import LINEAR_BITS, Sizing
from vllm_ndp.operating.sources import source_named

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LAYOUT = frozenset(
    {"hot_experts", "slot_bits", "plan", "warm_experts", "avg_bits", "cold_precision", "execution", "offload_bits"}
)
"""Settings that say what is held where, and at how many bits."""
_LEAST_KV_BYTES = 256 << 20
"""Of a KV cache whose layers are not all alike: vLLM pads their pages to one size."""
_WIDEST = 4
"""Bits of the experts that are measured."""


def choose(vllm_config: VllmConfig, settings: NdpSettings) -> NdpSettings:
    """Write the choice into `vllm_config`; returns the settings in force then. settings: in force so far."""
    is_open = compat.on_cpu() and settings.prices == "measured" and not LAYOUT & set(settings.changed())
    if not (is_open and _has_sized(vllm_config, settings)):
        if chosen := _own_width(vllm_config, settings):
            _write(vllm_config, chosen)
        if compat.on_cpu():
            _size_kv_cache(vllm_config, compat.settings_of(vllm_config))
    return compat.settings_of(vllm_config)


def _own_width(vllm_config: VllmConfig, settings: NdpSettings) -> dict[str, Any]:
    """Settings by which experts run at the checkpoint's own codes; empty where it has none, or a user wants others."""
    raw = _given(vllm_config)
    wants_others = settings.is_joint or "avg_bits" in raw or "bit_rule" in settings.policy_options
    if (
        wants_others
        or settings.replicas is not None
        or (form := CheckpointExperts(model_dir(vllm_config)).stored_form) is None
    ):
        return {}
    chosen: dict[str, Any] = {"avg_bits": form.bits}
    num_experts = vllm_config.model_config.get_num_experts()
    if settings.cold_precision == "full":
        chosen |= {"cold_precision": "quantized", "execution": "paper"}
    told, decoded = NdpSettings.from_mapping({**raw, **chosen}), ""
    if compat.on_cpu() and "slot_bits" not in raw and settings.resolve_hot_experts(num_experts):
        in_slots = NdpSettings.from_mapping({**raw, **chosen, "slot_bits": form.bits})
        if compat.has_parts_of_slots(vllm_config, in_slots):
            told, chosen["slot_bits"] = in_slots, form.bits
        else:
            decoded = "; hot ones are decoded, as ranks would cut blocks of codes: --enable-expert-parallel does not"
    if not told.runs_only_at(form.bits, num_experts, in_slots=compat.on_cpu()):
        return {}
    words = shlex.join(as_options(chosen))
    stored = f"experts below full precision run as the checkpoint stores them, at {form.bits} bits"
    compat.say(f"{stored}{decoded}; by hand: {words}")
    return chosen


def _given(vllm_config: VllmConfig) -> dict[str, Any]:
    additional = vllm_config.additional_config
    return (additional.get("ndp") or {}) if isinstance(additional, dict) else {}


def _write(vllm_config: VllmConfig, chosen: dict[str, Any]) -> None:
    vllm_config.additional_config = {**vllm_config.additional_config, "ndp": _given(vllm_config) | chosen}


def _has_sized(vllm_config: VllmConfig, settings: NdpSettings) -> bool:
    """Size everything to this machine; False where that cannot be."""
    raw = _given(vllm_config)
    try:
        size = _own_size(vllm_config, settings, settings.linear_bits if "linear_bits" in raw else LINEAR_BITS)
        chosen = {**raw, **size.settings}
        NdpSettings.from_mapping(chosen).require_use_of_prices(size.sizing.model.num_experts)
    except ConfigError as error:
        compat.say(f"not sized to this machine: {error}")
        return False
    if keeps_kv := _has_no_kv_cache(vllm_config):
        vllm_config.cache_config.kv_cache_memory_bytes = size.kv_cache_bytes
    _write(vllm_config, size.settings)
    loss = _loss(NdpSettings.from_mapping(chosen), model_dir(vllm_config), size)
    for sentence in size.said(loss, with_kv=keeps_kv):
        compat.say(sentence)
    return True


def _has_no_kv_cache(vllm_config: VllmConfig) -> bool:
    """Whether nobody has said how much: vLLM would then ask for 92 % of all memory, whatever the model needs."""
    cache = vllm_config.cache_config
    said = (
        cache.kv_cache_memory_bytes is not None or cache.gpu_memory_utilization != type(cache)().gpu_memory_utilization
    )
    return not said and "VLLM_CPU_KVCACHE_SPACE" not in os.environ


def _size_kv_cache(vllm_config: VllmConfig, settings: NdpSettings) -> None:
    """For a user who says what is held where, and not how large the KV cache is."""
    if not _has_no_kv_cache(vllm_config):
        return
    try:
        sizing = _one_request(vllm_config, settings, settings.linear_bits)
    except ConfigError:  # sizes that config.json does not give
        return
    num_hot = settings.resolve_hot_experts(sizing.model.num_experts)
    is_full = settings.slot_bits == FULL_PRECISION_BITS
    widest = _WIDEST if sizing.stored_form is None else sizing.stored_form.bits
    option = sizing.option(num_hot, widest) if is_full else sizing.in_slots(settings.slot_bits, num_hot)
    workers = vllm_config.parallel_config.world_size_across_dp
    size = kv_cache_bytes(sizing, option, max(vllm_config.scheduler_config.max_num_seqs // workers, 1))
    drafts = 1 if vllm_config.speculative_config is None else 2
    vllm_config.cache_config.kv_cache_memory_bytes = max(drafts * size, _LEAST_KV_BYTES)


def _one_request(vllm_config: VllmConfig, settings: NdpSettings, linear_bits: int | None) -> Sizing:
    source = source_named(str(model_dir(vllm_config)))
    return Sizing(
        source.model,
        required_memory().room,
        context=vllm_config.model_config.max_model_len,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        stored_bytes=source.stored_bytes,
        stored_form=source.stored_form if settings.replicas is None else None,
        linear_bits=linear_bits,
        linear_form=source.linear_form,
    )


def _own_size(vllm_config: VllmConfig, settings: NdpSettings, linear_bits: int | None) -> OwnSize:
    """Raises ConfigError where not even one request fits."""
    scheduler, sizing = vllm_config.scheduler_config, _one_request(vllm_config, settings, linear_bits)
    model, form, linear_form = sizing.model, sizing.stored_form, sizing.linear_form
    sizes = [model.hidden_size, model.intermediate_size, model.num_experts, model.top_k]
    cores = len(os.sched_getaffinity(0))
    bits = max(_WIDEST, sizing.require()[0].widest)
    facts = {"experts": sizes, "cores": cores, "bits": bits, "version": __version__}
    facts |= {"stored": form and [*form], "linear": linear_form and [*linear_form]}
    measured, _ = find_or_measure(speed.Measured, facts, partial(speed.measure, model, bits, form, linear_form))
    return own_size(sizing, scheduler.max_num_seqs, measured)


def _loss(settings: NdpSettings, model: Path, size: OwnSize) -> float | None:
    """Mean over the experts, relative to their outputs; None where there are no replicas yet."""
    bits, num_experts, form = size.option.widest, size.sizing.model.num_experts, size.sizing.stored_form
    named = settings.replicas
    if form is not None and form.bits == bits == settings.only_width(num_experts) and not named:
        return 0.0
    replicas = Path(named) if named else cached_replicas(settings, model_digest(model), num_experts)
    try:
        relative: Any = load_losses(replicas, "relative")[0]
    except (NdpError, OSError):
        return None
    of_width = np.fmin.reduce(relative[:, :, :bits], axis=2)  # absent widths are read as narrower ones
    return None if np.isnan(of_width).all() else float(np.nanmean(of_width))
