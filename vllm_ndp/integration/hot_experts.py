"""All hot slots of this worker: how an expert gets into GPU memory, stays there, or only passes through.

Migration copies experts into slots beside the step to come; streaming runs rows through experts that have no slot, by a
staging slot. On a GPU two of them take turns: one expert arrives while another one computes.

A layer waits for its own slots and for nothing else, so what a step computes does not depend on how fast copies are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.experts.expert import Part
from vllm_ndp.integration.cuda.low_bit_slots import LowBitSlots, form_of_vllm
from vllm_ndp.integration.cuda.streams import CudaStream, Event
from vllm_ndp.integration.experts_pool import ExpertsPool
from vllm_ndp.integration.host_replicas import QuantizedSlots, ReplicaFill
from vllm_ndp.integration.hot_slots import CpuSlotKernel, CudaSlotKernel, HotSlots, SlotWeights
from vllm_ndp.layer.split import Pairs
from vllm_ndp.layer.tiers import Tiers, slots_per_gpu
from vllm_ndp.planning.plan import Placement

Move = Callable[[], None]


class Migrator:
    def __init__(self, cores: Collection[int], threads: int = 1) -> None:
        """`cores`: where the threads may run; the one that makes them may be bound to a single core. None of them:
        there is no thread, and moves are carried out as they are begun, on the caller's stream. `threads`: layers moved
        at once."""
        self._cores = frozenset(cores)
        self._thread = ThreadPoolExecutor(threads, "ndp-migration", os.sched_setaffinity, (0, self._cores))
        self._pending: dict[int, Future[Event | None]] = {}  # layer -> its moves: at most one entry per layer
        self._stream: CudaStream | None = None  # of all moves, whatever their layer

    def begin(self, layer: int, moves: Sequence[Move]) -> None:
        """Carry out the moves of a layer that has none pending, in the order in which layers were begun."""
        if layer in self._pending:
            raise ValueError(f"layer {layer} still waits for the moves before these")
        if moves and not self._cores:
            self._carry_out(moves, None)
        elif moves:
            self._pending[layer] = self._thread.submit(self._carry_out, tuple(moves), self._after())

    def wait(self, layer: int) -> None:
        """Return when the slots of the layer hold what they are to hold, or will before the main stream reads them.

        Raises what went wrong on the way.
        """
        if (pending := self._pending.pop(layer, None)) is not None and (done := pending.result()) is not None:
            done.wait_on_main()

    def wait_for_all(self) -> None:
        for layer in list(self._pending):
            self.wait(layer)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _after(self) -> Event | None:
        """On a GPU: what the step before may still be reading, which moves come after."""
        if not torch.cuda.is_initialized():
            return None
        if self._stream is None:
            self._stream = CudaStream(torch.device("cuda", torch.cuda.current_device()))  # of the worker's thread
        return self._stream.record_main()

    @torch.inference_mode()
    def _carry_out(self, moves: Sequence[Move], after: Event | None) -> Event | None:
        """In the thread. The event is passed when they are done; None where they are when this returns."""
        if self._stream is None or after is None:
            for move in moves:
                move()
            return None
        with self._stream.current():
            self._stream.wait_event(after)
            for move in moves:
                move()
            return self._stream.record_event()


def slots_of_module(
    module: Any,
    kernel: CpuSlotKernel | CudaSlotKernel,
    tiers: Tiers,
    index: int,
    *,
    num_quantized: int = 0,
    slot_bits: int = FULL_PRECISION_BITS,
) -> HotSlots:
    """Slots that vLLM's module of a layer has allocated, for this kernel. `num_quantized`: slots per layer that are
    narrower than the checkpoint's, as `slot_bits` says on a GPU."""
    held = SlotWeights.of_layer(module)
    if not num_quantized:
        return HotSlots(kernel, held, tiers, index)
    if not isinstance(kernel, CudaSlotKernel):
        return QuantizedSlots(kernel, held, tiers, index, num_quantized)
    hidden, intermediate = held.w2.shape[1:]
    form = form_of_vllm(slot_bits, hidden, intermediate, held.w13.dtype)
    return LowBitSlots(kernel, held, tiers, index, num_quantized, form)


class StagingStreamer:
    """How full-precision experts leave the pool: into a hot slot, or through the kernel for rows that need them now."""

    def __init__(self, pool: ExpertsPool, kernel: CpuSlotKernel | CudaSlotKernel, like: SlotWeights) -> None:
        """kernel: of any layer's slots; like: their layout and dtype."""
        self._pool, self._kernel = pool, kernel
        self._copies, self._like = kernel.copies if isinstance(kernel, CudaSlotKernel) else None, like
        self._staging = [like.empty_like(1) for _ in range(1 if self._copies is None else 2)]
        self._free: list[Event | None] = [None for _ in self._staging]  # passed when what lay there has been read
        self._turn = 0
        self.staging_bytes = sum(slot.num_bytes for slot in self._staging)

    def release(self) -> None:
        """Give back memory that calls so far have filled, and that may never be needed again."""
        if self._copies is None:  # fresh pages take memory once they are written
            self._staging = [self._like.empty_like(1)]

    def fill(self, layer: int, expert: int, to: SlotWeights, slot: int) -> None:
        """Write one expert into slot `slot`."""
        self._load(layer, expert, None, None, to, slot)

    def _load(
        self, layer: int, expert: int, share: Part | None, after: Event | None, to: SlotWeights, slot: int
    ) -> None:
        """after: where on the stream the slot has been read, if that was noted."""
        self._kernel.load(to, slot, self._pool.expert(layer, expert, share), after)
        self._pool.check(layer)

    def run(
        self,
        layer: int,
        x: torch.Tensor,
        pairs: Pairs,
        slots: HotSlots,
        keep: Mapping[int, int],
        shares: Sequence[Part],
    ) -> torch.Tensor:
        """Weighted sum over the pairs of each row, f32 [T, H], in an order that the pairs alone decide. keep: expert ->
        the slot where it stays.

        shares: which parts of each expert; an expert that stays passes through in its own worker's part only.
        """
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if not pairs:  # every expert that is streamed is another rank's
            return total
        order = np.argsort(pairs.experts, kind="stable")  # each expert is read once per call
        arrays: list[NDArray[Any]] = [pairs.rows[order], pairs.topk_weights[order]]
        if self._copies is None:
            all_rows, all_weights = (torch.from_numpy(array).to(x.device) for array in arrays)
        else:
            all_rows, all_weights = self._copies.of_this_thread(x.device).upload(arrays, x.device)
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

    def _record(self, device: torch.device) -> Event | None:
        return None if self._copies is None else self._copies.of_this_thread(device).record_main()


class HotExperts(Migrator):
    def __init__(
        self,
        pool: ExpertsPool,
        tiers: Tiers,
        layers: Mapping[int, HotSlots],
        streamer: StagingStreamer,
        cores: Collection[int],
        replicas: ReplicaFill | None = None,
        *,
        beside: bool = True,
    ) -> None:
        """layers: all of them. cores: where the copying thread may run. replicas: what fills quantized slots. beside:
        whether experts move beside the step."""
        self.pool, self.tiers, self.layers, self.streamer = pool, tiers, layers, streamer
        self._replicas = replicas
        all_of_them = slots_per_gpu(tiers.where.shape[1], tiers.owners.num_gpus if tiers.owners else 1)
        only_at_start = replicas is not None and len(layers[0].expert_in) == all_of_them  # later, steps run
        super().__init__(cores if beside else (), threads=max(len(cores), 1) if only_at_start else 1)
        self._maps: torch.Tensor | None = None  # [L, E] on a GPU: each layer's is a row, so that one copy brings all
        if layers[0].expert_map.device.type != "cpu":
            self._maps = torch.stack([layers[layer].expert_map for layer in range(len(layers))])
            for layer, slots in layers.items():
                slots.expert_map = self._maps[layer]

    def _fill(self, layer: int, expert: int, to: SlotWeights, slot: int) -> None:
        slots = self.layers[layer]
        if isinstance(slots, QuantizedSlots):
            assert self._replicas is not None
            slots.put(slot, self._replicas.kernel, self._replicas.prepared(layer, expert, slots.bits_of(expert)))
        elif isinstance(slots, LowBitSlots):
            slots.low.load(slots.codes, slot, self.pool.expert(layer, expert))
            self.pool.check(layer)
        else:
            self.streamer.fill(layer, expert, to, slot)

    @property
    def num_bytes(self) -> int:
        return sum(slots.num_bytes for slots in self.layers.values())

    def place(self, placement: Placement) -> None:
        """A plan takes effect: begin to copy experts that became hot into the slots of those that no longer are."""
        self.wait_for_all()
        self.tiers.activate(placement.hot, placement.warm, placement.widths)
        for layer, own in enumerate(self.tiers.own):
            self.layers[layer].retier(own)
        if self._maps is not None:
            self._maps.copy_(torch.from_numpy(self.tiers.where))
        for layer, own in enumerate(self.tiers.own):
            slots = self.layers[layer]
            moves = slots.exchange(own, placement.widths[layer])
            self.begin(
                layer,
                [partial(slots.migrate, slot, expert, partial(self._fill, layer, expert)) for slot, expert in moves],
            )

    def slots_to_keep(self, layer: int, hot: NDArray[np.bool_], resident: NDArray[np.bool_]) -> dict[int, int]:
        """Expert -> slot for those that are about to pass through and shall stay: resident [E] and not hot [E]."""
        own = resident
        if (owners := self.tiers.owners) is not None:
            own = owners.place(layer, resident) == self.tiers.rank
        return self.layers[layer].slots_to_keep(own & ~hot, own)

    def stream(self, layer: int, x: torch.Tensor, pairs: Pairs, keep: Mapping[int, int]) -> torch.Tensor:
        """Weighted sum over the pairs of each row from the pool, f32 [T, H]. keep: expert -> slot.

        The sum is of this worker's share of each expert, or of its share of the experts; all ranks add up to the whole.
        Where slots hold the checkpoint's own codes, experts that pass through are computed by theirs.
        """
        if (owners := self.tiers.owners) is not None:
            mine = owners.streaming(layer)[pairs.experts] == self.tiers.rank
            pairs = Pairs.of(pairs.rows[mine], pairs.experts[mine], pairs.topk_weights[mine])
        if self._replicas is not None and self._replicas.are_codes:
            return self._replicas.stream(layer, x, pairs, self.layers[layer])
        return self.streamer.run(layer, x, pairs, self.layers[layer], keep, [self.pool.share])

    def stream_whole(self, layer: int, x: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """The same of whole experts, for pairs that no other rank computes: in full precision one share after the
        other."""
        if self._replicas is not None and self._replicas.are_codes:
            return self._replicas.stream(layer, x, pairs, self.layers[layer], whole=True)
        return self.streamer.run(layer, x, pairs, self.layers[layer], {}, self.pool.shares)
