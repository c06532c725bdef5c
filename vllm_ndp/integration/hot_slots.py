"""K experts of one layer in full precision, run by vLLM's own fused kernel: one call, no loop over experts. An
activation that it lacks is run by the device's kernel.

A hot slot holds one expert; `where[e]` says which slot holds expert e, or where it is else. A pair that runs elsewhere
costs next to nothing: a CPU gets hot pairs only, and on CUDA the kernel skips experts without a slot.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform

from ndp_device.common.activation import NAMED, SILU, Activation
from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import Biases, FullExpert
from ndp_device.kernels.native import NativeKernel
from vllm_ndp.integration import vllm_private
from vllm_ndp.integration.cuda.streams import CopiesByThread, Event
from vllm_ndp.integration.experts_pool import ExpertWeights
from vllm_ndp.layer.tiers import DEVICE, Tiers

PAGE_BYTES = 2 << 20
_KERNEL_ELEMENTS = 2**31
"""vLLM's CPU kernel computes offsets of a layer's slots in 32 bits: K * 2I * H must stay below."""


def ask_for_huge_pages(tensor: torch.Tensor) -> int:
    """Ask for such pages under a fresh tensor in the host's memory; returns how many bytes, 0 where the system refused.

    It is a hint: values do not depend on it, and a system without such pages, or out of them, serves small ones.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu":
        return 0
    first = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    num_bytes = (tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES - first
    if num_bytes <= 0:
        return 0
    refused = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), ctypes.c_int(advice))
    return 0 if refused else num_bytes


class SlotPairs(NamedTuple):
    """The pairs of one layer that run in hot slots: a table of T rows, or one pair after the other."""

    slots: torch.Tensor  # i32 [T, C], or [P, 1] with `rows`; contiguous; -1 (on a GPU any below 0) = runs elsewhere
    topk_weights: torch.Tensor  # f32, likewise
    rows: torch.Tensor | None = None  # i64 [P], where pairs are listed
    idle_rows: Sequence[int] = ()
    """Rows without a hot pair, if no slot is -1. C is the largest number of hot pairs in a row; pairs of weight 0
    fill up the other rows."""


class SlotWeights(NamedTuple):
    """Weights of S slots: w13 [S, 2I, H] and w2 [S, H, I]; b13 [S, 2I] and b2 [S, H] where experts have biases."""

    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    @classmethod
    def of_layer(cls, layer: Any) -> SlotWeights:
        """Take the weights that a module of vLLM has allocated."""
        names = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
        return cls(*(None if (p := getattr(layer, name, None)) is None else p.data for name in names))

    def empty_like(self, num_slots: int) -> SlotWeights:
        fresh = SlotWeights(*(None if t is None else t.new_empty((num_slots, *t.shape[1:])) for t in self))
        for tensor in (fresh.w13, fresh.w2):
            ask_for_huge_pages(tensor)
        return fresh

    @property
    def num_bytes(self) -> int:
        return sum(int(t.nbytes) for t in self if t is not None)


class CpuSlotKernel:
    def __init__(self, dtype: torch.dtype, hidden_size: int, intermediate_size: int, activation: str) -> None:
        self.isa = "amx" if vllm_private.asks_for_amx(dtype) else "vec"
        self._operator = vllm_private.fused_experts_on_cpu()
        self._operator_activation = activation
        self._interleaved = activation == "swigluoai"  # the operator wants gate and up rows in turn for it
        self.most_slots: int | None = (_KERNEL_ELEMENTS - 1) // (2 * intermediate_size * hidden_size)

    def load(self, to: SlotWeights, slot: int, expert: ExpertWeights, after: Event | None = None) -> None:
        """after: None on a CPU, which copies at once."""
        w13, half = to.w13[slot : slot + 1], to.w13.shape[1] // 2
        if self._interleaved:
            gate_and_up = [(_interleave(expert.w1, expert.w3), w13)]
        else:
            gate_and_up = [(expert.w1, w13[:, :half]), (expert.w3, w13[:, half:])]
        for source, target in (*gate_and_up, (expert.w2, to.w2[slot : slot + 1])):
            vllm_private.pack_for_cpu(source.to(w13.dtype).unsqueeze(0), target, self.isa)
        self._load_biases(to, slot, expert)

    def _load_biases(self, to: SlotWeights, slot: int, expert: ExpertWeights) -> None:
        if expert.biases is not None and to.b13 is not None and to.b2 is not None:
            gate, up, down = expert.biases
            to.b13[slot].copy_(_interleave(gate, up) if self._interleaved else torch.cat([gate, up]))
            to.b2[slot].copy_(down)

    def run(self, x: torch.Tensor, held: SlotWeights, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Compute pairs in the form for a GPU: a slot of -1 says that the pair runs elsewhere."""
        # The kernel does not check: ids and weights must be contiguous, and no id may be -1 (heap corruption).
        here = slots >= 0
        if bool(here.all()):
            return self.fused(x, held, weights.contiguous(), slots.contiguous())
        if not bool(here.any()):
            return torch.zeros_like(x)
        rows, cols = here.nonzero(as_tuple=True)
        return self.listed(x, held, rows, weights[rows, cols].unsqueeze(1), slots[rows, cols].unsqueeze(1))

    def listed(
        self, x: torch.Tensor, held: SlotWeights, rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Pairs one after the other, in the order of their rows [P]: weights f32 and slots i32 [P, 1]."""
        partial = self.fused(x.index_select(0, rows), held, weights, slots)
        out = torch.zeros(x.shape, dtype=torch.float32)
        return out.index_add_(0, rows, partial.float()).to(x.dtype)

    def fused(self, x: torch.Tensor, held: SlotWeights, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """vLLM's operator, which checks nothing: no slot may be -1; weights f32 and slots i32 must be contiguous."""
        out = torch.empty_like(x)
        self._operator(out, x, *held, weights, slots, self._operator_activation, self.isa, False)
        return out


class NativeSlotKernel(CpuSlotKernel):
    """The device's kernel over plain [2I, H] slots, which it reads where they lie."""

    def __init__(self, kernel: NativeKernel, activation: Activation) -> None:
        self.isa, self._interleaved, self.most_slots = kernel.name, False, None
        self._kernel, self._activation = kernel, activation
        self._in_place: dict[tuple[int, int], Any] = {}  # prepared, by address and slot; keeps the memory

    def load(self, to: SlotWeights, slot: int, expert: ExpertWeights, after: Event | None = None) -> None:
        gate, up = to.w13[slot].chunk(2)
        for target, source in ((gate, expert.w1), (up, expert.w3), (to.w2[slot], expert.w2)):
            target.copy_(source)
        self._load_biases(to, slot, expert)

    def fused(self, x: torch.Tensor, held: SlotWeights, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        rows = np.repeat(np.arange(len(x)), slots.shape[1])
        experts = {slot: self._prepared(held, slot) for slot in set(slots.flatten().tolist())}
        return weighted_sums(self._kernel, experts, x, rows, slots.flatten().numpy(), weights.flatten().numpy())

    def _prepared(self, held: SlotWeights, slot: int) -> Any:
        """The native kernel reads weights where they lie, so it sees the expert that the slot holds at that moment.
        Copies are not kept: biases."""
        if held.b13 is not None:
            return self._kernel.prepare(self._expert(held, slot))
        key = held.w13.data_ptr(), slot
        if key not in self._in_place:
            self._in_place[key] = self._kernel.prepare(self._expert(held, slot))
        return self._in_place[key]

    def _expert(self, held: SlotWeights, slot: int) -> FullExpert:
        dtype = str(held.w13.dtype).removeprefix("torch.")
        w13, w2 = (part[slot].detach() for part in (held.w13, held.w2))
        if held.w13.dtype == torch.bfloat16:
            w13, w2 = w13.view(torch.uint16), w2.view(torch.uint16)
        w1, w3 = w13.chunk(2)
        biases = None
        if held.b13 is not None and held.b2 is not None:
            gate, up = held.b13[slot].detach().float().chunk(2)
            biases = Biases(gate.numpy(), up.numpy(), held.b2[slot].detach().float().numpy())
        return FullExpert(dtype, w1.numpy(), w3.numpy(), w2.numpy(), biases=biases, activation=self._activation)


def weighted_sums(
    kernel: NativeKernel,
    experts: Mapping[int, Any] | Sequence[Any],
    x: torch.Tensor,
    rows: NDArray[np.integer],
    slots: NDArray[Any],
    weights: NDArray[np.float32],
) -> torch.Tensor:
    """x [T, H]; rows, slots and weights of each pair [P]; experts: prepared, by slot. Rows without a pair are 0.

    Slots are sorted as a list: for the few pairs of a decode step numpy takes longer.
    """
    named = slots.tolist()
    used = sorted(set(named))
    place = dict(zip(used, itertools.count(), strict=False))
    sums = kernel.execute(
        x.detach().float().numpy(),
        [experts[slot] for slot in used],
        rows.astype(np.int32, copy=False),
        np.array([place[slot] for slot in named], np.int32),
        weights.astype(np.float32, copy=False),
    )
    return torch.from_numpy(sums).to(x.dtype)


class CudaSlotKernel:
    """vLLM's Triton kernel over plain [2I, H] slots. Written from vLLM's source; status in docs/gpu.md."""

    def __init__(
        self,
        activation: Any,
        num_experts: int,
        fused: Callable[..., torch.Tensor],
        tiles: Callable[..., Any],
        copies: CopiesByThread | None = None,
    ) -> None:
        """`fused`: vLLM's fused_experts. `tiles(w13 shape, w2 shape, k, dtype, T)`: a context in which `fused` uses
        the tiles of stock vLLM with all num_experts in one tensor. Else vLLM looks tiles up by the number of slots.
        `copies`: how weights get into a slot; plainly where None."""
        self.activation, self.num_experts = activation, num_experts
        self.fused, self._tiles, self.copies = fused, tiles, copies
        self._maps: dict[int, torch.Tensor] = {}
        self.most_slots: int | None = None

    @classmethod
    def of_vllm(cls, activation: Any, num_experts: int, copies: CopiesByThread | None = None) -> CudaSlotKernel:
        from vllm.model_executor.layers.fused_moe import fused_experts, override_config

        found: dict[Any, Any] = {}

        def tiles(*key: Any) -> Any:
            if key not in found:
                found[key] = vllm_private.tiles_of_stock(*key)
            return AlwaysLeft(override_config(found[key]))

        return cls(activation, num_experts, fused_experts, tiles, copies)

    def load(self, to: SlotWeights, slot: int, expert: ExpertWeights, after: Event | None = None) -> None:
        """after: copy as soon as the stream has passed this event, where copies run beside it."""
        half = to.w13.shape[1] // 2
        gate, up, down = to.w13[slot, :half], to.w13[slot, half:], to.w2[slot]
        parts = [(gate, expert.w1), (up, expert.w3), (down, expert.w2)]
        if self.copies is not None:
            self.copies.copy_all(parts, after)
            return
        for target, source in parts:
            target.copy_(source)

    def run(self, x: torch.Tensor, held: SlotWeights, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        num_slots = held.w13.shape[0]
        if num_slots == self.num_experts:  # no id past the slots then: a pair that is elsewhere counts nothing here
            return self.run_named(x, held, weights.masked_fill(slots < 0, 0), slots.clamp(min=0))
        return self.run_named(x, held, weights, torch.where(slots >= 0, slots, num_slots))

    def run_named(self, x: torch.Tensor, held: SlotWeights, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The same where a pair that runs elsewhere has a slot past the last one; none does where all experts are here.

        -1 must stay in the expert map, never in the ids, which the kernel looks up first.
        """
        num_slots, *rest = held.w13.shape
        w2_shape = (self.num_experts, *held.w2.shape[1:])
        all_here = num_slots == self.num_experts
        with self._tiles((self.num_experts, *rest), w2_shape, slots.shape[1], x.dtype, x.shape[0]):
            return self.fused(
                x,
                held.w13,
                held.w2,
                weights,
                slots,
                activation=self.activation,
                global_num_experts=num_slots + (not all_here),
                expert_map=None if all_here else self._map(num_slots, x.device),  # stock's own path, with its shortcut
                **self._beside(held),
            )

    def _beside(self, held: SlotWeights) -> dict[str, Any]:
        """Further arguments of vLLM's function for these slots."""
        return {}

    def _map(self, num_slots: int, device: torch.device) -> torch.Tensor:
        """Slot -> itself, and the one past the last to none."""
        if num_slots not in self._maps:
            found = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
            found[num_slots] = -1
            self._maps[num_slots] = found
        return self._maps[num_slots]


class AlwaysLeft:
    """A context that is told of no error: vLLM's own would keep our tiles for good after one."""

    def __init__(self, context: AbstractContextManager[object]) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)


def make_slot_kernel(
    layer: Any,
    activation: Activation,
    of_model: Collection[Activation],
    load_kernel: Callable[[], NativeKernel],
    copies: CopiesByThread | None = None,
) -> CpuSlotKernel | CudaSlotKernel:
    """For the slots that vLLM's module `layer` has allocated, whose experts compute `activation`.

    of_model: of all layers, which lay out their slots alike. load_kernel: gives the device's kernel in this process.
    copies: the worker's, to a GPU; None where they go plainly.
    """
    if not current_platform.is_cpu():
        if layer.moe_config.has_bias or activation != SILU:
            raise ConfigError(
                f"quantization 'ndp' runs experts with biases or the activation {activation} on CPU only so far"
            )
        return CudaSlotKernel.of_vllm(layer.activation, layer.moe_config.num_experts, copies)
    name = next((name for name, one in NAMED.items() if {one} == set(of_model)), None)
    if name is None:
        return NativeSlotKernel(load_kernel(), activation)
    dtype = layer.w13_weight.dtype
    return CpuSlotKernel(dtype, layer.hidden_size, layer.intermediate_size_per_partition, name)


def _interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of both in turn: gate 0, up 0, gate 1, ..."""
    return torch.stack([gate, up], dim=1).flatten(0, 1)


class HotSlots:
    """The slots of one layer and which expert each one holds."""

    def __init__(
        self,
        kernel: CpuSlotKernel | CudaSlotKernel,
        held: SlotWeights,
        tiers: Tiers,
        layer: int = 0,
        num_slots: int | None = None,
    ) -> None:
        """tiers: the worker's. num_slots: None = as many as `held` has."""
        num_held, most = held.w13.shape[0], kernel.most_slots
        if most is not None and num_held > most:
            raise ConfigError(
                f"{num_held} experts in one call do not fit vLLM's CPU kernel (32-bit offsets): at most {most} for "
                "this model"
            )
        self.kernel = kernel
        self.held = held
        self.expert_in: NDArray[np.int64] = np.full(num_held if num_slots is None else num_slots, -1)  # -1: empty
        self.where, self._without_slot = tiers.where[layer], tiers.without_slot[layer]
        self.expert_map = torch.from_numpy(self.where)
        """The same where the slots are."""
        if held.w13.device.type != "cpu":
            self.expert_map = torch.full((len(self.where),), DEVICE, dtype=torch.int32, device=held.w13.device)

    @property
    def num_bytes(self) -> int:
        return self.held.num_bytes

    def running(self) -> tuple[CpuSlotKernel | CudaSlotKernel, Any]:
        """The kernel that computes the slots, and the weights that it reads."""
        return self.kernel, self.held

    @property
    def kernel_name(self) -> str:
        return getattr(self.kernel, "isa", "triton")

    @property
    def aliases(self) -> bool:
        """Whether few pairs are best laid out by row, each with as many slots as any row has."""
        return isinstance(self.kernel, CpuSlotKernel)

    def retier(self, own: NDArray[np.bool_]) -> None:
        """A plan takes effect, and its tiers name no slot yet: those that hold one of its experts [E] are named in
        `where`. A GPU's map is the caller's to bring."""
        held = np.flatnonzero(self.expert_in >= 0)
        held = held[own[self.expert_in[held]]]
        self.where[self.expert_in[held]] = held

    def migrate(self, slot: int, expert: int, fill: Callable[[SlotWeights, int], None]) -> None:
        """Replace what `slot` holds by calling fill(held, slot).

        The map is cleared first and set last, so a half-copied slot is never named.
        """
        if (before := int(self.expert_in[slot])) >= 0:
            self._name(before, -1)
        self.expert_in[slot] = -1
        fill(self.held, slot)
        self.expert_in[slot] = expert
        self._name(expert, slot)

    def _name(self, expert: int, slot: int) -> None:
        """slot: -1 where it has none any longer."""
        self.where[expert] = slot if slot >= 0 else self._without_slot[expert]
        if self.expert_map.device.type != "cpu":
            self.expert_map[expert] = int(self.where[expert])

    def whole_expert_in(self, expert: int) -> int | None:
        """The slot that holds this expert in full precision; None where none does."""
        slot = int(self.where[expert])
        return slot if slot >= 0 else None

    def exchange(self, wanted: NDArray[np.bool_], widths: NDArray[np.uint8]) -> list[tuple[int, int]]:
        """(slot, expert) for the wanted experts [E] that are in no slot: into empty ones and those of the unwanted.
        widths [E]: where each has its own, else 0."""
        held = self.expert_in >= 0
        missing = wanted.copy()
        missing[self.expert_in[held]] = False
        free = np.flatnonzero(~(held & wanted[self.expert_in]))
        return list(zip(free.tolist(), np.flatnonzero(missing).tolist(), strict=False))

    def slots_to_keep(self, coming: NDArray[np.bool_], resident: NDArray[np.bool_]) -> dict[int, int]:
        """Expert -> slot for each of `coming` [E]: slots of experts that are not `resident` [E], lower ids first."""
        free = np.flatnonzero(~((self.expert_in >= 0) & resident[self.expert_in]))
        free = free[np.argsort(self.expert_in[free], kind="stable")]
        return dict(zip(np.flatnonzero(coming).tolist(), free.tolist(), strict=False))

    def run(self, x: torch.Tensor, pairs: SlotPairs | None) -> torch.Tensor:
        """The weighted sum over the pairs of each row [T, H], exactly 0 for a row without one; a fresh tensor."""
        if pairs is None:
            return torch.zeros_like(x)
        kernel, held = self.running()
        if not isinstance(kernel, CpuSlotKernel):
            return kernel.run(x, held, pairs.topk_weights, pairs.slots)
        if pairs.rows is not None:
            return kernel.listed(x, held, pairs.rows, pairs.topk_weights, pairs.slots)
        out = kernel.fused(x, held, pairs.topk_weights, pairs.slots)
        if pairs.idle_rows:
            out[pairs.idle_rows] = 0
        return out

    def run_anything(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Run every pair in some slot: for the profile run, in which vLLM measures peak memory with random rows."""
        if not len(self.expert_in):
            return torch.zeros_like(x)
        slots = (topk_ids % len(self.expert_in)).to(torch.int32)
        kernel, held = self.running()
        return kernel.run(x, held, topk_weights, slots)
