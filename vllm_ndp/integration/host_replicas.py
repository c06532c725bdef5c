"""Replicas on this side: found or built, their losses, and the device's arithmetic in this process.

That computes what a device would, or hot slots of 1 to 8 bits. A slot of 4 bits takes about a quarter of one in 16, so
the same GPU memory holds more experts. A joint plan may give every hot expert a width of its own. Experts of 16 bits
are then read from the checkpoint as it lies in memory. Experts that stream are in full precision, unless slots hold the
checkpoint's own codes.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.kept import default_cache_dir
from ndp_device.common.machine_memory import give_memory_back
from ndp_device.common.widths import BYTE_BITS, FULL_PRECISION_BITS, WIDTHS
from ndp_device.experts.expert import WHOLE, FullExpert, Part
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas import format as replica_format
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import ReplicaFiles, read_manifest
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.config import NdpSettings
from vllm_ndp.integration.compat import say
from vllm_ndp.integration.hot_slots import (
    CpuSlotKernel,
    CudaSlotKernel,
    HotSlots,
    SlotPairs,
    SlotWeights,
    weighted_sums,
)
from vllm_ndp.layer.split import Pairs
from vllm_ndp.layer.tiers import Tiers
from vllm_ndp.planning.bitwidths import LossTable


def find_replicas(settings: NdpSettings, model_dir: Path, digest: str, num_experts: int) -> Path | None:
    """The replica directory to plan and serve from.

    Where the setting names none, it is the one in the cache. If that is empty, data-free replicas are built there for
    an embedded device. A running device has its own, which replicas made here could only differ from: None.
    Raises ConfigError where they would be built for a budget that data-free ones cannot keep.
    """
    from ndp_device.calibration.build import build_data_free

    if settings.replicas is not None:
        return Path(settings.replicas)
    cached = cached_replicas(settings, digest, num_experts)
    if not _is_whole(cached, digest):  # none yet, or an earlier build was stopped: the builder keeps what is whole
        if settings.running:
            return None
        if settings.max_loss is not None:
            raise ConfigError(
                "ndp setting 'avg_bits' is {'max_loss': ...}, and no replicas are given that say what a loss costs: "
                "make them by `vllm-ndp quantize` with --calibration, name them in 'replicas', or ask for bits"
            )
        only = settings.only_width(num_experts)
        widths = "" if only is None else f" at {only} bits"
        say(
            f"no replicas given for {model_dir.name}: building data-free ones{widths} once in {cached} "
            "(`vllm-ndp quantize` makes better ones from calibration text)"
        )
        build_data_free(model_dir, cached, bits=sorted({*WIDTHS, *_asked(settings)}) if only is None else (only,))
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


def _asked(settings: NdpSettings) -> set[int]:
    """Widths that replicas must have."""
    eight = BYTE_BITS if settings.avg_bits == BYTE_BITS else None
    return {bits for bits in (settings.offload_bits, eight) if bits is not None}


def load_losses(replicas: Path, layers: range, settings: NdpSettings) -> LossTable:
    """Load the losses of the MoE layers that this worker runs. Plans use the widths that the replicas have.

    Raises ConfigError where they lack a width that was asked for, or are all wider than the average.
    """
    there = read_manifest(replicas).bits
    dealt = [bits for bits in there if bits in WIDTHS]
    asked = settings.avg_bits
    if missing := sorted(_asked(settings) - set(there)):
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


_WARM_UP_ROWS = 16


class QuantizedSlots(HotSlots):
    """Quantized slots of one layer. `held` has no slots of its own: it says dtype and place of tensors."""

    def __init__(
        self,
        kernel: CpuSlotKernel | CudaSlotKernel,
        held: SlotWeights,
        tiers: Tiers,
        layer: int,
        num_slots: int,
    ) -> None:
        super().__init__(kernel, held, tiers, layer, num_slots)
        self._experts: list[Any] = [None] * num_slots  # prepared
        self._bits = np.zeros(len(self.where), np.uint8)  # of each expert that is here or on its way
        self._low: NativeKernel | None = None

    @property
    def kernel_name(self) -> str:
        return "the device's, native"

    @property
    def num_bytes(self) -> int:
        """Bytes of quantized experts. Experts in full precision lie in the mapped checkpoint, which is the pool's."""
        return sum(expert.nbytes for expert in self._experts if expert is not None)

    @property
    def aliases(self) -> bool:
        return False

    def whole_expert_in(self, expert: int) -> None:
        """Experts in full precision are not in `held`, but in the checkpoint."""
        return None

    def bits_of(self, expert: int) -> int:
        """Width at which an expert is to be here; 0 = the setting's."""
        return int(self._bits[expert])

    def exchange(self, wanted: NDArray[np.bool_], widths: NDArray[np.uint8]) -> list[tuple[int, int]]:
        """The same for those that are not here at these widths. Experts that are not wanted, or at another width, leave
        at once."""
        for slot, expert in enumerate(self.expert_in.tolist()):
            if expert >= 0 and not (wanted[expert] and self._bits[expert] == widths[expert]):
                self._name(expert, -1)
                self.expert_in[slot], self._experts[slot] = -1, None
        self._bits = np.where(wanted, widths, 0).astype(np.uint8)
        return super().exchange(wanted, widths)

    def put(self, slot: int, kernel: NativeKernel, prepared: Any) -> None:
        self._low = kernel
        self._experts[slot] = prepared

    def prepared_of(self, expert: int) -> Any | None:
        """What the kernel reads of this expert; None where it is in no slot."""
        slot = int(self.where[expert])
        return self._experts[slot] if slot >= 0 else None

    def run(self, x: torch.Tensor, pairs: SlotPairs | None) -> torch.Tensor:
        if pairs is None:
            return torch.zeros_like(x)
        slots, weights = pairs.slots.numpy(), pairs.topk_weights.numpy()
        if pairs.rows is not None:
            return self._sums(x, pairs.rows.numpy(), slots[:, 0], weights[:, 0])
        return self._run(x, weights, slots)

    def run_anything(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Some rows only: a whole step of a model of real size takes half a minute, and its answer is thrown away."""
        out = torch.zeros_like(x)
        if self._experts and all(expert is not None for expert in self._experts):  # else before the first placement
            some = slice(_WARM_UP_ROWS)
            slots = (topk_ids[some] % len(self._experts)).numpy()
            out[some] = self._run(x[some], topk_weights[some].numpy(), slots)
        return out

    def _run(self, x: torch.Tensor, weights: NDArray[np.float32], slots: NDArray[Any]) -> torch.Tensor:
        """x [T, H]; weights [T, k]; slots [T, k], -1 = elsewhere."""
        rows, columns = np.nonzero(slots >= 0)
        return self._sums(x, rows, slots[rows, columns], weights[rows, columns])

    def _sums(
        self, x: torch.Tensor, rows: NDArray[np.int64], slots: NDArray[Any], weights: NDArray[np.float32]
    ) -> torch.Tensor:
        """x [T, H]; rows, slots and weights of each pair [P]."""
        assert self._low is not None
        return weighted_sums(self._low, self._experts, x, rows, slots, weights)


class ReplicaFill:
    """Experts for quantized slots, each at a width."""

    def __init__(
        self,
        model_dir: Path,
        replicas: Path | None,
        bits: int,
        kernel: NativeKernel,
        layers: range,
        share: Part = WHOLE,
    ) -> None:
        """replicas: None where the checkpoint holds codes of that width. bits: where a slot is not told its own.
        layers: of the model, which this worker counts from 0. share: of each expert, which only codes are cut into."""
        self._checkpoint, self._files = CheckpointExperts(model_dir), None
        self._bits, self.kernel, self._layers, self._share = bits, kernel, layers, share
        # else every rank would add whole experts
        assert share == WHOLE or (replicas is None and bits != FULL_PRECISION_BITS)
        if replicas is None:
            return
        self._files = ReplicaFiles(replicas, model_digest=model_digest(model_dir), once=True)
        if bits not in (*self._files.manifest.bits, FULL_PRECISION_BITS):
            wanted = ",".join(map(str, sorted({*self._files.manifest.bits, bits})))
            raise ConfigError(
                f"ndp setting 'slot_bits' is {bits}, the replicas in {replicas} have {list(self._files.manifest.bits)} "
                f"bits: run `vllm-ndp quantize` with --bits {wanted}"
            )

    @property
    def are_codes(self) -> bool:
        """Whether they are the checkpoint's own."""
        return self._files is None and self._bits != FULL_PRECISION_BITS

    def stream(
        self, layer: int, x: torch.Tensor, pairs: Pairs, slots: HotSlots, *, whole: bool = False
    ) -> torch.Tensor:
        """Weighted sum over the pairs of each row of x [T, H], f32 [T, H]: one expert after the other, by their ids.
        What is in no slot is made for this call. whole: of whole experts, and not of this worker's share of each."""
        assert isinstance(slots, QuantizedSlots)
        share = WHOLE if whole else self._share
        total = np.zeros(x.shape, np.float32)
        for expert in np.unique(pairs.experts).tolist():
            of_it = pairs.experts == expert
            rows = pairs.rows[of_it]  # distinct
            some, each = x[torch.from_numpy(rows)].float().numpy(), np.arange(len(rows), dtype=np.int32)
            weights = pairs.topk_weights[of_it].astype(np.float32, copy=False)
            prepared = slots.prepared_of(expert) if share == self._share else None
            if prepared is None:
                prepared = self.prepared(layer, expert, share=share)
            total[rows] += self.kernel.execute(some, [prepared], each, np.zeros_like(each), weights)
        return torch.from_numpy(total)

    def prepared(self, layer: int, expert: int, bits: int = 0, *, share: Part | None = None) -> Any:
        """For the kernel. bits: 0 = those that every slot has. share: of the expert; None: this worker's."""
        layer, bits = self._layers[layer], bits or self._bits
        if bits == FULL_PRECISION_BITS:
            return self.kernel.prepare(self._checkpoint.expert(layer, expert))
        if self._files is None:
            prepared = self.kernel.prepare((share or self._share).of(self._checkpoint.codes(layer, expert)))
            self._checkpoint.check(layer)
            if expert == self._checkpoint.shape.num_experts - 1:
                self._checkpoint.release()  # its codes were copied
                give_memory_back()
            return prepared
        prepared = self.kernel.prepare(self._files.expert(layer, expert, bits))
        self._files.check(layer)
        self._files.release(layer)
        return prepared


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
