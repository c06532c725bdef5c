"""How full-precision experts leave the pool: into a hot slot, or through the kernel for rows that need them now.

    StagingStreamer  from the checkpoint through a staging slot, expert by expert: works everywhere. On a GPU two slots
                     take turns, and one expert arrives while another one computes
    PackedStreamer   from a second memory map already in the CPU kernel's layout: one call for all experts of a layer,
                     no packing, at the price of a copy of the experts on disk

Knows pool, kernel layouts and pairs of one layer. Does not know requests or plans.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
import vllm
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from ndp_device.common import durable
from ndp_device.common.errors import ConfigError
from ndp_device.replicas.mapped import MappedBytes
from vllm_ndp.integration.cuda.streams import Event
from vllm_ndp.integration.experts_pool import ExpertsPool, tensor_over
from vllm_ndp.integration.hot_slots import CpuSlotKernel, CudaSlotKernel, HotSlots, SlotKernel, SlotWeights
from vllm_ndp.integration.ranks import Share
from vllm_ndp.layer.split import Pairs


class Streamer(Protocol):
    staging_bytes: int
    description: str

    def fill(self, layer: int, expert: int, to: SlotWeights, slot: int) -> None:
        """Write one expert into slot `slot`."""

    keeps: bool
    """Whether an expert passes through memory of its own on its way to the kernel, which may be a slot."""

    def run(
        self,
        layer: int,
        x: torch.Tensor,
        pairs: Pairs,
        slots: HotSlots,
        keep: Mapping[int, int],
        shares: Sequence[Share],
    ) -> torch.Tensor:
        """Weighted sum over the pairs of each row, f32 [T, H], in an order that the pairs alone decide. keep: expert ->
        the slot where it stays.

        shares: which parts of each expert; an expert that stays passes through in its own worker's part only.
        """

    def release(self) -> None:
        """Give back memory that calls so far have filled, and that may never be needed again."""


class StagingStreamer:
    keeps = True

    def __init__(self, pool: ExpertsPool, kernel: SlotKernel, like: SlotWeights) -> None:
        self._pool, self._kernel = pool, kernel
        self._copies, self._like = kernel.copies if isinstance(kernel, CudaSlotKernel) else None, like
        self._staging = [like.empty_like(1) for _ in range(1 if self._copies is None else 2)]
        self._free: list[Event | None] = [None for _ in self._staging]  # passed when what lay there has been read
        self._turn = 0
        self.staging_bytes = sum(slot.num_bytes for slot in self._staging)
        self.description = "the checkpoint, read page by page"
        if isinstance(kernel, CpuSlotKernel):
            self.description += '; {"debug": {"pool": "packed"}} prefills faster, for a copy on disk'

    def release(self) -> None:
        if self._copies is None:  # fresh pages take memory once they are written
            self._staging = [self._like.empty_like(1)]

    def fill(self, layer: int, expert: int, to: SlotWeights, slot: int) -> None:
        self._load(layer, expert, None, None, to, slot)

    def _load(
        self, layer: int, expert: int, share: Share | None, after: Event | None, to: SlotWeights, slot: int
    ) -> None:
        """after: where on the stream the slot has been read, if that was noted."""
        weights = self._pool.expert(layer, expert, share)
        if isinstance(self._kernel, CudaSlotKernel):
            self._kernel.load(to, slot, weights, after)
        else:
            self._kernel.load(to, slot, weights)
        self._pool.check(layer)

    def run(
        self,
        layer: int,
        x: torch.Tensor,
        pairs: Pairs,
        slots: HotSlots,
        keep: Mapping[int, int],
        shares: Sequence[Share],
    ) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if not pairs:  # every expert that is streamed is another rank's
            return total
        order = np.argsort(pairs.experts, kind="stable")  # each expert is read once per call
        all_rows, all_weights = self._upload([pairs.rows[order], pairs.topk_weights[order]], x.device)
        begin = self._record(x.device)
        experts, starts = np.unique(pairs.experts[order], return_index=True)
        ends = dict(zip(experts.tolist(), zip(starts, [*starts[1:], len(order)], strict=True), strict=True))

        def sums(expert: int, held: SlotWeights, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
            """The rows of an expert that lies in this slot, and what it gives each of them."""
            start, end = ends[expert]
            rows = all_rows[start:end]
            weights = all_weights[start:end].unsqueeze(1).clone()  # Triton compiles anew for addresses that are uneven
            index = torch.full((len(rows), 1), slot, dtype=torch.int32, device=x.device)
            return rows, slots.kernel.run(x.index_select(0, rows), held, weights, index)

        own = len(shares) == 1  # and not those of all ranks, one after the other
        here = {expert: slot for expert in ends if own and (slot := slots.whole_expert_in(expert)) is not None}
        first = {expert: sums(expert, slots.held, slot) for expert, slot in here.items() if slot in keep.values()}
        for expert in ends:  # in this order, wherever an expert lies: so does a row's sum
            if expert in here:
                rows, part = first.get(expert) or sums(expert, slots.held, here[expert])
                total.index_add_(0, rows, part.float())
                continue
            for share in shares:
                if (slot := keep.get(expert)) is not None:
                    slots.migrate(slot, expert, partial(self._load, layer, expert, None, begin))
                    rows, part = sums(expert, slots.held, slot)
                else:
                    self._turn = (self._turn + 1) % len(self._staging)
                    held = self._staging[self._turn]
                    self._load(layer, expert, share, self._free[self._turn], held, 0)
                    rows, part = sums(expert, held, 0)
                    self._free[self._turn] = self._record(x.device)
                total.index_add_(0, rows, part.float())
        return total

    def _upload(self, arrays: list[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
        if self._copies is None:
            return [torch.from_numpy(array).to(device) for array in arrays]
        return self._copies.of_this_thread(device).upload(arrays, device)

    def _record(self, device: torch.device) -> Event | None:
        return None if self._copies is None else self._copies.of_this_thread(device).record_main()


class PackedStreamer:
    """Two files per layer, w13 [E, 2I, H] and w2 [E, H, I], packed by the live kernel and mapped; biases in memory."""

    staging_bytes = 0
    keeps = False  # the kernel reads the map itself

    def __init__(self, directory: Path, pool: ExpertsPool, kernel: SlotKernel, like: SlotWeights) -> None:
        if not isinstance(kernel, CpuSlotKernel):
            raise ConfigError("ndp setting 'pool' can be 'packed' on CPU only: use 'checkpoint'")
        kernel.check_slots(pool.shape.num_experts)  # its offsets are 32 bits wide here too
        self._pool, self._kernel, self._like, self._dtype = pool, kernel, like, like.w13.dtype
        self.description = f"a packed copy in {directory}, mapped"
        if not directory.is_dir():
            self._build(directory)
        layers = range(pool.shape.num_layers)
        self._maps = [self._map(directory, layer) for layer in layers]
        self._layers = [self._with_biases(layer, *self._views(layer)) for layer in layers]
        self._files = [[path.open("rb", buffering=0) for path in _paths(directory, layer)] for layer in layers]
        self._check()

    def fill(self, layer: int, expert: int, to: SlotWeights, slot: int) -> None:
        for file, target in zip(self._files[layer], (to.w13[slot], to.w2[slot]), strict=True):
            _read(file, expert * target.nbytes, target)
        held = self._layers[layer]
        for source, bias in ((held.b13, to.b13), (held.b2, to.b2)):
            if source is not None and bias is not None:
                bias[slot].copy_(source[expert])
        self._refuse_changed(layer)

    def run(
        self,
        layer: int,
        x: torch.Tensor,
        pairs: Pairs,
        slots: HotSlots,
        keep: Mapping[int, int],
        shares: Sequence[Share],
    ) -> torch.Tensor:
        rows = torch.from_numpy(pairs.rows)
        weights = torch.from_numpy(pairs.topk_weights).unsqueeze(1).contiguous()
        experts = torch.from_numpy(pairs.experts).unsqueeze(1).contiguous()
        part = slots.kernel.fused(x.index_select(0, rows), self._layers[layer], weights, experts)
        self._refuse_changed(layer)
        return torch.zeros(x.shape, dtype=torch.float32).index_add_(0, rows, part.float())

    def release(self) -> None:
        """The map is the system's to take."""

    def _refuse_changed(self, layer: int) -> None:
        """After a read of a layer's files."""
        for file in self._maps[layer]:
            file.check()

    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = self._pool.shape
        experts, hidden, intermediate = shape.num_experts, shape.hidden_size, shape.intermediate_size
        return (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)

    def _map(self, directory: Path, layer: int) -> list[MappedBytes]:
        maps = [MappedBytes(path, f"delete {directory}") for path in _paths(directory, layer)]
        for file, size in zip(maps, self._sizes(), strict=True):
            if file.bytes.size != math.prod(size) * self._dtype.itemsize:
                raise ConfigError(f"{file.path} has the wrong size: delete {directory} and start again")
        return maps

    def _views(self, layer: int) -> list[torch.Tensor]:
        files = zip(self._maps[layer], self._sizes(), strict=True)
        return [tensor_over(file.bytes, torch.uint8).view(self._dtype).view(size) for file, size in files]

    def _with_biases(self, layer: int, w13: torch.Tensor, w2: torch.Tensor) -> SlotWeights:
        """Biases are small: the kernel's copy of them is made again at each start."""
        if self._like.b13 is None:
            return SlotWeights(w13, w2)
        one, num_experts = self._like.empty_like(1), self._pool.shape.num_experts
        held = SlotWeights(w13, w2, *self._like.empty_like(num_experts)[2:])
        for expert in range(num_experts):
            self._kernel.load(one, 0, self._pool.expert(layer, expert))
            for source, bias in ((one.b13, held.b13), (one.b2, held.b2)):
                assert source is not None
                assert bias is not None
                bias[expert].copy_(source[0])
        return held

    def _build(self, directory: Path) -> None:
        """Into a directory aside, renamed when it is whole and on disk: a half-written one is never mapped."""
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        except OSError as error:
            raise ConfigError(f"the packed pool cannot be written: {error}; set NDP_CACHE_DIR elsewhere") from None
        layers = range(self._pool.shape.num_layers)
        for layer in track(layers, f"packing experts into {directory}", console=Console(stderr=True)):
            w13, w2 = (
                torch.from_file(str(path), shared=True, size=math.prod(size), dtype=self._dtype).view(size)
                for path, size in zip(_paths(aside, layer), self._sizes(), strict=True)
            )
            for expert in range(self._pool.shape.num_experts):
                self._kernel.load(SlotWeights(w13, w2), expert, self._pool.expert(layer, expert))
        durable.move_directory(aside, directory)

    def _check(self) -> None:
        """The layout depends on the kernel's build: repack one expert and compare."""
        packed, one = self._layers[0], self._like.empty_like(1)
        self._kernel.load(one, 0, self._pool.expert(0, 0))
        if not (torch.equal(one.w13[0], packed.w13[0]) and torch.equal(one.w2[0], packed.w2[0])):
            raise ConfigError(f"{self.description} is in another kernel's layout: delete it and start again")


def make_streamer(kind: str, pool: ExpertsPool, slots: HotSlots, cache_dir: Path) -> Streamer:
    """The streamer of the setting `pool`. slots: any layer's, for kernel, layout and dtype; a packed copy lies beside
    cache_dir."""
    if kind == "checkpoint":
        return StagingStreamer(pool, slots.kernel, slots.held)
    return PackedStreamer(packed_dir(cache_dir, slots), pool, slots.kernel, slots.held)


def packed_dir(cache_dir: Path, slots: HotSlots) -> Path:
    """The layout depends on the kernel that streams, the dtype and the build of vLLM: each has a copy of its own.

    Where slots are quantized, another kernel streams than the one that computes them.
    """
    dtype = str(slots.held.w13.dtype).removeprefix("torch.")
    isa = getattr(slots.kernel, "isa", "triton")
    return cache_dir.with_name(f"{cache_dir.name}-packed-{isa}-{dtype}-{vllm.__version__}")


def _paths(directory: Path, layer: int) -> tuple[Path, Path]:
    return directory / f"w13-{layer:05d}.bin", directory / f"w2-{layer:05d}.bin"


def _shorter(file: BinaryIO) -> ConfigError:
    return ConfigError(f"{file.name} has become shorter: delete its directory and start again")


def _read(file: BinaryIO, offset: int, target: torch.Tensor) -> None:
    """Fill a contiguous tensor from one place of a file: large reads, where a map would fault page by page."""
    left = memoryview(target.view(torch.uint8).numpy()).cast("B")
    while left:
        count = os.preadv(file.fileno(), [left], offset)
        if not count:
            raise _shorter(file)
        left, offset = left[count:], offset + count
