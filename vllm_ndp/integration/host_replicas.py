"""Replicas on this side: found or built, their losses, and the device's arithmetic in this process."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.kept import default_cache_dir
from ndp_device.common.widths import BYTE_BITS, WIDTHS
from ndp_device.experts.expert import FullExpert
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas import format as replica_format
from ndp_device.replicas.format import ReplicaFiles, read_manifest
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.config import NdpSettings
from vllm_ndp.integration.compat import say
from vllm_ndp.layer.split import Pairs
from vllm_ndp.planning.bitwidths import LossTable


def find_replicas(settings: NdpSettings, model_dir: Path, digest: str, num_experts: int) -> Path | None:
    """The replica directory to plan and serve from.

    Where the setting names none, it is the one in the cache. If that is empty, data-free replicas are built there for
    an embedded device. A running device has its own, which replicas made here could only differ from: None.
    """
    from ndp_device.calibration.build import build_data_free

    if settings.replicas is not None:
        return Path(settings.replicas)
    cached = cached_replicas(settings, digest, num_experts)
    if not _is_whole(cached, digest):  # none yet, or an earlier build was stopped: the builder keeps what is whole
        if settings.running:
            return None
        only = settings.only_width(num_experts)
        widths = "" if only is None else f" at {only} bits"
        say(
            f"no replicas given for {model_dir.name}: building data-free ones{widths} once in {cached} "
            "(`vllm-ndp quantize` makes better ones from calibration text)"
        )
        build_data_free(model_dir, cached, bits=WIDTHS if only is None else (only,))
    return cached


def cached_replicas(settings: NdpSettings, digest: str, num_experts: int) -> Path:
    """Their place in the cache: that of all widths; or that of one, where no other runs and not all are there."""
    all_widths, only = default_cache_dir(digest), settings.only_width(num_experts)
    return all_widths if only is None or _is_whole(all_widths, digest) else default_cache_dir(f"{digest}-{only}")


def _is_whole(directory: Path, digest: str) -> bool:
    try:
        ReplicaFiles(directory, model_digest=digest, check_contents=False)
    except ReplicaError:
        return False
    return True


def load_losses(replicas: Path, layers: range, settings: NdpSettings) -> LossTable:
    """Load the losses of the MoE layers that this worker runs. Plans use the widths that the replicas have.

    Raises ConfigError where they lack a width that was asked for, or are all wider than the average.
    """
    there = read_manifest(replicas).bits
    dealt = [bits for bits in there if bits in WIDTHS]
    asked = settings.avg_bits
    wanted = {bits for bits in (settings.offload_bits, BYTE_BITS if asked == BYTE_BITS else None) if bits is not None}
    if missing := sorted(wanted - set(there)):
        raise ConfigError(
            f"the replicas in {replicas} have {list(there)} bits, and these settings need {missing} too: run "
            f"`vllm-ndp quantize` with --bits {','.join(map(str, sorted({*there, *missing})))}, or ask for those"
        )
    if asked < dealt[0]:
        raise ConfigError(
            f"ndp setting 'avg_bits' is {asked:g}, and the narrowest replicas in {replicas} have {dealt[0]} bits: ask "
            f"for {dealt[0]} or more, or make narrower ones"
        )
    if dealt[-1] < asked < BYTE_BITS:
        say(f"avg_bits is {asked:g}, and the widest replicas have {dealt[-1]} bits: cold experts read {dealt[-1]}")
    kind = settings.losses
    return LossTable.from_measured(*replica_format.load_losses(replicas, kind)).of_layers(
        slice(layers.start, layers.stop)
    )


class HostExperts:
    """The device's arithmetic in this process, by its own kernel: an expert gives here what it gives on a device.

    Weights in full precision are read where the pool has mapped them, so that nothing is copied.
    """

    def __init__(self, model_dir: Path, replicas: Path | None, kernel: NativeKernel, layers: range) -> None:
        """layers: of the model, which this worker counts from 0."""
        self._kernel, self._layers = kernel, layers
        self._store = ExpertStore(model_dir, replicas, kernel=kernel)
        self.description = f"the host's CPU, full precision, kernel {kernel.name}"

    def execute(self, layer: int, x: NDArray[np.float32], pairs: Pairs) -> NDArray[np.float32]:
        """The weighted sum over the pairs of each row of x [S, H], which are those that the pairs need. Raises
        ReplicaError where a file has been cut short."""
        of_model, keys = self._layers[layer], pairs.experts.astype(np.int64) << 8 | pairs.bits
        distinct, places = np.unique(keys, return_inverse=True)
        prepared = [self._store.get(of_model, key >> 8, key & 255) for key in distinct.tolist()]
        y = self._kernel.execute(x, prepared, pairs.local, places.astype(np.int32), pairs.topk_weights)
        self._store.check_used(of_model, np.unique(pairs.bits).tolist())
        return y


_SIDE = 512
"""Size from which on the native kernel divides an expert among its threads, even for one row."""


def load_engine_kernel(cores: Collection[int]) -> NativeKernel:
    """Its threads are started here, in a thread that may run on all these cores.

    A worker's own thread is bound to one core where vLLM binds OpenMP, and threads that it starts would share that one.
    """
    with ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, frozenset(cores))) as thread:
        return thread.submit(_load).result()


def _load() -> NativeKernel:
    kernel = NativeKernel()
    weights, one, weight = np.zeros((_SIDE, _SIDE), np.float32), np.zeros(1, np.int32), np.ones(1, np.float32)
    expert = kernel.prepare(FullExpert("float32", weights, weights, weights))
    kernel.execute(weights[:1], [expert], one, one, weight)
    return kernel
