"""Where each (row, expert) pair of a layer runs, for any rows: one native call (csrc/split.cpp), and what it found.

    decode rows   hot pairs -> slots    cold and offloaded pairs -> the device    warm pairs -> the host's CPU
    prompt rows   hot pairs -> slots    others -> streamed, or the device where both sides then end together

The plugin's layers and the exact replay make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.layer import _split
from vllm_ndp.layer.balance import Balancer, LayerLoad
from vllm_ndp.layer.devices import DevicesBalancer
from vllm_ndp.layer.prefill_split import PrefillSplit
from vllm_ndp.layer.tiers import DEVICE, STREAM, WARM, Tiers
from vllm_ndp.planning.plan import BitwidthPlan

DECODE_KINDS = ("hot", "spilled", "warm", "cold", "fallback")
"""Kinds of pairs of decode rows. `hot`: in hot slots. `spilled`: of hot experts, on the device to save time. `warm`: on
the host's CPU. `cold`: on the device. `fallback`: computed here because the device did not answer."""
PROMPT_KINDS = ("prefill", "prefill_device", "prefill_fallback")
"""Pairs of prompt rows: here, on the device, and here because the device did not answer."""
PAIR_KINDS = DECODE_KINDS + PROMPT_KINDS
"""Each pair is of one kind, so the kinds of a phase add up to its rows x top-k x layers. csrc/split.cpp has the same
order."""
_LEAST_PAIRS = 128
_MOST_VIEWS = 4096
"""Number of cut lists of pairs that are kept: cutting takes longer than splitting few rows."""


class Pairs(NamedTuple):
    """P pairs of S rows, in the order of their rows: as a message has them."""

    sent_rows: NDArray[np.int64]  # [S], rows of the step, in order
    local: NDArray[np.int32]  # [P], index into sent_rows
    experts: NDArray[np.int32]  # [P]
    bits: NDArray[np.uint8]  # [P]
    topk_weights: NDArray[np.float32]  # [P], what an output is multiplied with

    @classmethod
    def of(cls, rows: NDArray[np.integer], experts: NDArray[np.integer], topk_weights: NDArray[np.float32]) -> Pairs:
        """Pairs in full precision, in any order of their rows."""
        sent, local = np.unique(rows, return_inverse=True)
        bits = np.full(len(rows), 16, np.uint8)
        return cls(sent.astype(np.int64), local.astype(np.int32), experts.astype(np.int32), bits, topk_weights)

    @property
    def rows(self) -> NDArray[np.int64]:
        """[P], row of the step."""
        rows: NDArray[np.int64] = self.sent_rows[self.local]
        return rows

    def __bool__(self) -> bool:
        return bool(len(self.experts))


NO_PAIRS = Pairs(
    np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.uint8), np.empty(0, np.float32)
)


class Split(NamedTuple):
    """Every pair of a layer exactly once: hot ones run in slots, the others are listed. Valid until the next split."""

    device: Pairs  # decode rows, and prompt rows that the device computes
    warm: Pairs  # decode rows, on the host's CPU
    stream: Pairs  # prompt rows; with `gathers_prompts` also those of hot experts
    num_hot: int
    """Number of hot pairs in slots of this worker."""
    hot_loads: list[tuple[int, int]]
    """(experts, pairs) in slots of each GPU, where GPUs hold whole experts; else of all together."""
    hot_bytes: int | None
    """Bytes of the hot experts in use, if their widths differ."""
    stream_experts: int
    """Distinct experts of `stream` that are not hot, and below their pairs: what is copied."""
    stream_pairs: int
    host_ps: int
    """Simulated time of the host's CPU for the warm pairs."""
    num_columns: int
    """C of the table [T, C] of hot pairs; 0: they are listed one after the other."""
    idle_rows: list[int]
    """Rows of that table without a hot pair; they have another row's pair at weight 0."""


class HotArrays(NamedTuple):
    """Hot pairs as they run in slots, for steps of up to P pairs."""

    where: NDArray[np.int32]  # [P], of each pair [T, k]: a slot, or a place that is none
    slots: NDArray[np.int32]  # [P], of the hot pairs as they are laid out
    topk_weights: NDArray[np.float32]  # [P]
    rows: NDArray[np.int64]  # [P], of each hot pair where pairs are listed


class Splitter:
    """One per worker. Per step `begin_step`, per layer `split`."""

    def __init__(
        self,
        tiers: Tiers,
        top_k: int,
        *,
        balancers: Sequence[Balancer | DevicesBalancer] | None = None,
        prompts: PrefillSplit | None = None,
        host: Costs | None = None,
        bytes_of_width: NDArray[np.int64] | None = None,
        weighs_input: bool = False,
        aliases: bool = True,
        gathers_prompts: bool = False,
    ) -> None:
        """`balancers` [L]; None: hot experts never leave the GPU. `prompts`: None: the device computes none of prompts.
        A rule with prices of this machine chooses among all experts, hot ones too: the prompt alone decides what the
        device computes, and not what earlier requests have left in slots. `host`: costs of warm experts; None: no
        expert is warm. `bytes_of_width` [256]: bytes of a hot expert by width, if widths differ. `weighs_input`: inputs
        are weighed, so outputs are not. `aliases`: few hot pairs form a table with one line per row. Short lines are
        filled up with slots of weight 0. Else hot pairs are listed one after the other. `gathers_prompts`: a prompt's
        pairs of experts in slots are counted as hot, and listed in `stream` beside the others, so that one sum in one
        order has all."""
        self.top_k = top_k
        self.notes = False
        self._no_bits: NDArray[np.uint8] = np.zeros(tiers.where.shape, np.uint8)
        gpus = [] if tiers.gpus is None else list(tiers.gpus)
        anywhere, prompt_bits = (False, 0) if prompts is None else (prompts.prices is not None, prompts.bits)
        widths = ([], []) if bytes_of_width is None else (list(tiers.hot_bits), bytes_of_width.tolist())
        self.native = _split.Splitter(
            list(tiers.where), top_k, aliases, weighs_input, gathers_prompts, anywhere, prompt_bits, gpus, *widths
        )
        none = [False] * len(tiers.where)
        self._rules = none if balancers is None else [self._rule(each) for each in balancers]
        self._prompts = None if prompts is None else _on_device(prompts)
        if host is not None:
            self.native.price_host(host.hop_ps, host.cpu_expert_ps)
        self.finder = self.native.finder()
        self.hot: HotArrays
        self._parts: dict[int, Pairs] = {}
        self._views: dict[tuple[int, int, int], Pairs] = {}  # of parts, by place, rows and pairs: of few rows the same
        self._room = 0
        self._make_room(_LEAST_PAIRS)

    def note_into(self, ids: NDArray[np.int16], weights: NDArray[np.float32]) -> None:
        """Note the router's choices here from now on, [L, N, k], at the entries that a step names."""
        self.native.note_into(ids, weights)
        self.notes = True

    def _rule(self, balancer: Balancer | DevicesBalancer) -> bool | Callable[..., frozenset[int]]:
        """True: natively."""
        rule = balancer if isinstance(balancer, Balancer) else balancer.rule
        prices, of_device = rule.prices, (rule.message_ps, rule.device_ps)
        self.native.price(rule.offload_bits, prices.beside, prices.hot_ps, *of_device, prices.shared_ps)
        return True if isinstance(balancer, Balancer) else _asked(balancer)

    def _make_room(self, num_pairs: int) -> None:
        if num_pairs <= self._room:
            return
        size = self._room = max(num_pairs, 2 * self._room)
        empty: Callable[[type], NDArray[Any]] = partial(np.empty, size)
        self.hot = HotArrays(empty(np.int32), empty(np.int32), empty(np.float32), empty(np.int64))
        self.native.use_hot(*self.hot)
        self._views.clear()
        for place in (DEVICE, WARM, STREAM):
            part = Pairs(empty(np.int64), empty(np.int32), empty(np.int32), empty(np.uint8), empty(np.float32))
            self._parts[place] = part
            self.native.use(place, *part)

    def begin_step(
        self,
        owners: NDArray[np.int32],
        is_decode: NDArray[np.bool_],
        plans: Sequence[BitwidthPlan | None],
        entries: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """owners [T]: the request of each row; plans [R], None before a request's first; entries [T]: of the KV cache.

        Returns counts [R, kinds] of pairs, by request, to which every layer adds; PAIR_KINDS names the kinds.
        """
        self._make_room(len(owners) * self.top_k)
        counts = np.zeros((len(plans), len(PAIR_KINDS)), np.int64)
        decode = is_decode.view(np.uint8)
        bits = [self._no_bits if plan is None else plan.bits for plan in plans]
        from_weights = [None if plan is None else plan.from_weight for plan in plans]
        noted = entries if self.notes else None
        self.native.begin_step(noted, owners, decode, bits, from_weights, counts)
        return counts

    def split(self, layer: int, topk_ids: int, topk_weights: int, *, with_device: bool) -> Split:
        """topk_ids i32 [T, k] and topk_weights f32 [T, k]: addresses of contiguous arrays; what the router chose.

        with_device: whether there is a device, which hot experts and prompts then may use.
        """
        rule, prompts = (self._rules[layer], self._prompts) if with_device else (False, None)
        return self._listed(self.native.split(layer, topk_ids, topk_weights, rule, prompts))

    def found(self) -> Split:
        """The split of a layer that a thread has made (`native.finder`, ndp_device/transport/sender_thread.py)."""
        return self._listed(self.native.found())

    def _listed(self, found: Sequence[Any]) -> Split:
        device = self._pairs(DEVICE, found[0], found[1]) if found[1] else NO_PAIRS
        warm = self._pairs(WARM, found[2], found[3]) if found[3] else NO_PAIRS
        stream = self._pairs(STREAM, found[4], found[5]) if found[5] else NO_PAIRS
        return Split._make((device, warm, stream, *found[6:]))

    def _pairs(self, place: int, num_rows: int, count: int) -> Pairs:
        key = place, num_rows, count
        if (known := self._views.get(key)) is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            sent, local, experts, bits, weights = self._parts[place]
            of_pairs = local[:count], experts[:count], bits[:count], weights[:count]
            known = self._views[key] = Pairs(sent[:num_rows], *of_pairs)
        return known

    def fall_back(self) -> int:
        """The device gave no answer: its pairs count as computed here. Distinct experts that are streamed with them."""
        return self.native.fall_back()


def _asked(balancer: DevicesBalancer) -> Callable[..., frozenset[int]]:
    """The rule over several devices, as the native call asks it."""

    def offloaded(hot: Any, cold: Any, rows: int, pairs: int, of_layer: int, host_ps: int) -> frozenset[int]:
        return balancer.offloaded(LayerLoad(hot, cold, (rows, pairs), of_layer, host_ps))

    return offloaded


def _on_device(rule: PrefillSplit) -> Callable[..., list[int]]:
    """The rule of prompts, as the native call asks it."""

    def chosen(experts: list[int], rows: list[int], decode_experts: list[int], decode_bits: list[int]) -> list[int]:
        decode = np.array(decode_experts, np.int64), np.array(decode_bits, np.uint8)
        there: list[int] = rule.of_counts(np.array(experts, np.int64), np.array(rows, np.int64), *decode).tolist()
        return there

    return chosen
