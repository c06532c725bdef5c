"""Limits of the plugin together with vLLM on a GPU, and what it changes there: sentences, settings, sizes.

Written from vLLM's source and checked against it by tests/integration/vllm_hooks.py; docs/gpu.md says what ran where.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from ndp_device.common.errors import ConfigError
from vllm_ndp.config import GPU_RUNGS
from vllm_ndp.integration import vllm_private
from vllm_ndp.integration.cuda.messenger import MOST_ROWS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ndp.config import NdpSettings


class Rung(IntEnum):
    """Values of the setting `gpu` in their order: each has all that the ones before it have."""

    PLAIN, STREAMS, ASYNCHRONOUS, KERNELS, THREAD, GRAPHS = range(len(GPU_RUNGS))


PASSED = Rung.GRAPHS
"""What a GPU runs unless it is told: the last rung that a run on a GPU has passed (benchmarks/gpu_check.py)."""
ENGINE_CORES = 4
"""Cores that an embedded device leaves to a GPU engine, of 16: for threads that launch, send and hand out tokens."""
LONG_SPIN_US, MANY_CORES = "5000", 8
"""How long whoever waits for a layer looks before it sleeps, and the cores that allow it. On an H100 with 16 cores and
half of Mixtral's experts cold, `plain` gave 93 tokens/s with it, and `thread` 72 with shm.HOST_SPIN_US."""
SLOT_BITS = (8, 4)
"""Bits of hot slots that a GPU has beside full precision (low_bit_slots.py)."""
WHOLE_STEPS = "FULL_DECODE_ONLY"
"""vLLM's name for graphs of whole decode steps, and of nothing else."""
SPLITTING = ("vllm::moe_forward", "vllm_ndp::moe")
"""Operators that a captured graph must end before: vLLM's own around our layer, and ours where vLLM's is not opaque."""


def settings_on_gpu(settings: NdpSettings) -> NdpSettings:
    """`auto` is the paper's execution: to balance by simulated hardware on the host costs every layer a wait."""
    if settings.execution == "auto" and settings.offload_bits is None:
        return dataclasses.replace(settings, execution="paper")
    return settings


def rung_of(settings: NdpSettings, offload_bits: int, *, on_gpu: bool) -> Rung:
    """How a worker runs. offload_bits: 0 where hot experts stay on the GPU.

    Raises ConfigError for what was asked for and cannot be.
    """
    if settings.gpu == "auto":
        rung = PASSED if on_gpu else Rung.PLAIN
        return min(rung, Rung.STREAMS) if offload_bits else rung
    rung = Rung(GPU_RUNGS.index(settings.gpu))
    if offload_bits and rung >= Rung.ASYNCHRONOUS:
        raise ConfigError(
            f"ndp setting 'gpu' is {settings.gpu!r}, so that the GPU begins before the host has seen what the router "
            f"chose, but execution {settings.execution!r} decides from just that which hot experts leave the GPU: use "
            "'execution': 'paper'"
        )
    if not on_gpu and rung in (Rung.STREAMS, Rung.KERNELS, Rung.GRAPHS):
        raise ConfigError(
            f"ndp setting 'gpu' is {settings.gpu!r}, which adds streams, kernels or graphs of a GPU, but this engine "
            "runs on CPU: use 'plain', 'asynchronous' or 'thread'"
        )
    return rung


def refusals(vllm_config: VllmConfig, settings: NdpSettings) -> Iterable[tuple[bool, str]]:
    """(whether it was asked for, what it is and what to do)."""
    yield (
        settings.slot_bits not in (16, *SLOT_BITS),
        f"'slot_bits' {settings.slot_bits} on a GPU, where vLLM's kernels run slots of "
        f"{' and '.join(map(str, SLOT_BITS))} bits: use one of them, or 16",
    )
    yield (
        settings.linear_bits is not None,
        "'linear_bits' on a GPU, where the device's kernel does not run: drop it, or give a checkpoint whose linear "
        "layers are quantized for vLLM's kernels",
    )
    yield (
        settings.record is not None and vllm_config.speculative_config is not None,
        "a recording of drafts on a GPU, where sampled tokens are not on the host when the step ends: drop 'record' or "
        "--speculative-config",
    )
    mode = graph_mode(vllm_config)
    yield (
        "FULL" in mode and mode != WHOLE_STEPS,
        'full CUDA graphs of prompts: set "cudagraph_mode":"FULL_DECODE_ONLY" in --compilation-config, or "NONE"',
    )
    parallel, several = vllm_config.parallel_config, 'with "cudagraph_mode":"FULL_DECODE_ONLY": set it to "NONE"'
    yield (
        mode == WHOLE_STEPS and parallel.world_size * parallel.data_parallel_size > 1,
        f"several GPUs {several}",
    )
    yield mode == WHOLE_STEPS and vllm_config.speculative_config is not None, f"drafts {several}"
    yield (
        mode == WHOLE_STEPS and settings.gpu != "auto" and Rung(GPU_RUNGS.index(settings.gpu)) < Rung.KERNELS,
        f"'gpu' {settings.gpu!r} {several}",
    )
    yield (
        mode == "PIECEWISE" and bool(os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") not in ("", "0")),
        "VLLM_USE_BREAKABLE_CUDAGRAPH, under which a graph is not split at our operator: unset it, or set "
        '"cudagraph_mode":"NONE" in --compilation-config',
    )
    yield (
        mode == "PIECEWISE" and bool(vllm_config.compilation_config.use_inductor_graph_partition),
        'use_inductor_graph_partition beside "cudagraph_mode":"PIECEWISE": drop one of the two',
    )


def captures_whole_steps(vllm_config: VllmConfig) -> bool:
    """Whether vLLM captures decode steps with our layers in them."""
    return graph_mode(vllm_config) == WHOLE_STEPS


def cannot_capture(what: str, mode: str = WHOLE_STEPS) -> str:
    return (
        f'quantization \'ndp\' does not work together with "cudagraph_mode":"{mode}" for {what}: set '
        '"cudagraph_mode":"NONE" in --compilation-config'
    )


def graph_mode(vllm_config: VllmConfig) -> str:
    """The name of the mode that was asked for; empty where none was."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return "" if mode is None else str(getattr(mode, "name", mode)).upper()


def configure_graphs(vllm_config: VllmConfig) -> bool:
    """Split captured graphs at our operator where piecewise ones were asked for; capture whole decode steps where that
    was, else none. Returns whether any are captured."""
    from vllm.config import CUDAGraphMode

    compilation = vllm_config.compilation_config
    if captures_whole_steps(vllm_config):
        most = min(vllm_config.scheduler_config.max_num_seqs, MOST_ROWS)
        compilation.max_cudagraph_capture_size = min(compilation.max_cudagraph_capture_size or most, most)
        return True
    if graph_mode(vllm_config) != "PIECEWISE":
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        return False
    if compilation.splitting_ops is None:
        compilation.splitting_ops = [
            *vllm_private.attention_operators(compilation),
            "vllm::unified_kv_cache_update",
            "vllm::unified_mla_kv_cache_update",
        ]
    compilation.splitting_ops = [*compilation.splitting_ops, *SPLITTING]  # a new list: vLLM's own is shared
    return True


def rows_in_graphs(vllm_config: VllmConfig) -> int:
    """The largest step that pieces of graphs are captured for; 0 where none is."""
    if graph_mode(vllm_config) != "PIECEWISE":
        return 0
    return int(vllm_config.compilation_config.max_cudagraph_capture_size or 0)


def refuse_shared_experts_in_pieces(names: Iterable[str]) -> None:
    """names: of layers with shared experts. Their output is a fresh tensor of vLLM's, whose address no graph knows."""
    if name := next(iter(names), None):
        raise ConfigError(cannot_capture(f"{name}, which has shared experts", "PIECEWISE"))


def refuse_capture(layer: int, x: torch.Tensor) -> None:
    """Outside of steps only: a replay would run what vLLM's warm-up runs, without the device and without a word."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"quantization 'ndp' does not work together with a CUDA graph that holds MoE layer {layer}, which no "
            'refusal has foreseen: set "cudagraph_mode":"NONE" in --compilation-config'
        )


def cores_beside_engine(usable: Iterable[int]) -> list[int]:
    """Cores of an embedded device on a machine with a GPU, whose engine binds no cores."""
    cores = sorted(usable)
    return cores[min(ENGINE_CORES, len(cores) // 4) :]


def leave_room(available: int, sidecar_bytes: int, kv_bytes: int) -> int:
    """Bytes left for the KV cache when its sidecar lies beside it, of those available. Both sizes: of a token."""
    return available * kv_bytes // (kv_bytes + sidecar_bytes)


def kv_bytes_per_token(specs: Mapping[str, Any]) -> int:
    """KV bytes of a token in the layers whose entries hold every position of a request. `specs`: vLLM's, by layer."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    pages = [spec for spec in specs.values() if isinstance(spec, FullAttentionSpec)]
    return sum(spec.page_size_bytes // spec.block_size for spec in pages)
