"""The layers of a decode step with few rows, in one native call each: split, offloading, message, counts and clock.

On a few dozen numbers Python's arithmetic costs more than vLLM's kernel. `_decode_layers` (csrc/) gives the results of
pairs.py, step.py, simulation/balance.py and simulation/gpu_timing.py, to the bit and to the picosecond; those remain
for prompts, larger batches and GPUs. Knows hot slots, the routing sidecar and prices. Does not know the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.integration.batch import BatchRows
from vllm_ndp.integration.hot_slots import ALIAS_PAIRS, HotSlots
from vllm_ndp.integration.pairs import Pairs, add_sums
from vllm_ndp.integration.report import PAIR_KINDS
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.simulation.balance import Balancer
from vllm_ndp.simulation.gpu_timing import GpuModel, StepClock

try:
    from vllm_ndp.integration import _decode_layers
    from vllm_ndp.integration._decode_layers import MOST_PAIRS, DecodeLayers

    BUILT = _decode_layers.ALIAS_PAIRS == ALIAS_PAIRS and hasattr(DecodeLayers, "num_columns")
except (ImportError, AttributeError):  # not built, or of other sources: every step takes the Python path, and the
    BUILT, MOST_PAIRS = False, ALIAS_PAIRS  # start-up table says so

_ON_HOST: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float16: np.dtype("<f2"),
    torch.bfloat16: np.dtype("<u2"),
}
"""As device_link sends activations; numpy lacks bfloat16."""


class FewRows:
    """One per worker. `take` says whether a step is its own; then each layer calls `split` and perhaps `end_layer`."""

    most_pairs = MOST_PAIRS

    def __init__(
        self,
        layers: dict[int, HotSlots],
        sidecar: RoutingSidecar,
        clock: StepClock,
        balancer: Balancer | None,
        *,
        weighs_input: bool = False,
    ) -> None:
        """balancer: None where hot experts never leave the GPU. The sidecar has its size. weighs_input: the rows that
        are given are weighed already, so that outputs are not."""
        slots = layers[0]
        hidden, dtype = slots.held.w13.shape[2], _ON_HOST[slots.held.w13.dtype]
        self._clock = clock
        self._top_k = sidecar.top_k
        self._no_plan = np.zeros((len(layers), len(slots.expert_map)), np.uint8)
        self._slots = torch.empty(MOST_PAIRS, dtype=torch.int32)
        self._weights = torch.empty(MOST_PAIRS, dtype=torch.float32)
        self._hot_rows = torch.empty(MOST_PAIRS, dtype=torch.int64)  # of each hot pair, where they are listed
        self._num_rows = 0  # of the step
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.sent_rows = np.empty(MOST_PAIRS, np.int64)
        self.pair_rows = np.empty(MOST_PAIRS, np.int32)  # index into sent_rows
        self.pair_experts = np.empty(MOST_PAIRS, np.int32)
        self.pair_bits = np.empty(MOST_PAIRS, np.uint8)
        self.pair_weights = np.empty(MOST_PAIRS, np.float32)
        self.activations: NDArray[Any] = np.empty((MOST_PAIRS, hidden), dtype)
        self._row_bytes = hidden * dtype.itemsize
        ids, weights = sidecar.on_host
        self.native = DecodeLayers(
            ids,
            weights,
            [layers[index].expert_map.numpy() for index in range(len(layers))],
            hot_experts_ps(clock.model),
            clock.model.hardware.gpu.layer_overhead_ps,
            self._slots.numpy(),
            self._weights.numpy(),
            self.sent_rows,
            self.pair_rows,
            self.pair_experts,
            self.pair_bits,
            self.pair_weights,
            self.activations.view(np.uint8),
            self._hot_rows.numpy(),
            weighs_input,
        )
        if balancer is not None:
            self.native.price(balancer.offload_bits, *price_tables(balancer), balancer.device_ps)

    @staticmethod
    def fits(layers: dict[int, HotSlots], top_k: int) -> bool:
        """Whether the module is built, tensors lie in the host's memory, and a row's pairs fit the tables."""
        return BUILT and layers[0].takes_few_rows and top_k <= MOST_PAIRS

    def take(self, rows: BatchRows, slot_mapping: torch.Tensor) -> bool:
        """Begin a step if its layers are to run here: few decode rows. The clock's step has begun."""
        num_rows = rows.num_rows
        if num_rows * self._top_k > MOST_PAIRS or not rows.all_decode:
            return False
        self._num_rows = num_rows
        plans = [self._no_plan if (plan := span.request.plan) is None else plan.bits.bits for span in rows.spans]
        clock = self._clock
        self.native.begin_step(
            slot_mapping.tolist(), rows.owners, plans, clock.now_ps, clock.before_ps, clock.shared_ps
        )
        return True

    def split(self, layer: int, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *, offload: bool) -> int:
        """Split the pairs of a layer, f32 and i32 [T, k]; returns how many the device is to compute.

        Without any, the layer is accounted for; else `end_layer` must follow.
        """
        if topk_ids.dtype is not torch.int32 or topk_weights.dtype is not torch.float32:
            topk_ids, topk_weights = topk_ids.to(torch.int32), topk_weights.to(torch.float32)
        topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
        return self.native.split(layer, topk_ids.data_ptr(), topk_weights.data_ptr(), offload)

    def run_hot(self, slots: HotSlots, x: torch.Tensor) -> torch.Tensor:
        """What the layer's hot slots make of x [T, H]; 0 for a row without a hot pair. A fresh tensor."""
        num_hot = self.native.num_hot
        if not num_hot:
            return torch.zeros_like(x)
        if self.native.is_listed and num_hot < self._num_rows * self._top_k:
            pairs = self._weights[:num_hot].unsqueeze(1), self._slots[:num_hot].unsqueeze(1)
            return slots.run_listed(x, self._hot_rows[:num_hot], *pairs)
        out = slots.run_aliased(x, *self._table(self._num_rows, self.native.num_columns))
        if idle := self.native.idle_rows:
            out[idle] = 0
        return out

    def _table(self, num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights f32 and slots i32 [T, C], as the last split has laid them out: 0 where a row has fewer hot pairs."""
        key = num_rows, num_columns
        if key not in self._views:
            size = num_rows * num_columns
            self._views[key] = self._weights[:size].view(key), self._slots[:size].view(key)
        return self._views[key]

    def gather(self, x: torch.Tensor) -> NDArray[Any]:
        """The rows of x [T, H] that the device needs, as it takes them; valid until the next call."""
        x = x.contiguous()
        self.native.gather(x.data_ptr(), self._row_bytes)
        return self.activations[: self.native.num_sent]

    def add(self, out: torch.Tensor, sums: NDArray[np.float32]) -> None:
        """Add the device's partial sums [sent, H] to the rows of out [T, H] that were sent."""
        if out.dtype is torch.float16:
            add_sums(out, sums, self.sent_rows[: len(sums)])
        else:
            self.native.add(out.data_ptr(), sums, out.dtype is torch.bfloat16)

    def device_pairs(self, count: int) -> Pairs:
        """The pairs that were meant for the device, for computing them here."""
        rows = self.sent_rows[self.pair_rows[:count]]
        return Pairs(rows, self.pair_experts[:count].astype(np.int64), self.pair_weights[:count].copy())

    def end_layer(self, count: int, device_ps: int | None) -> None:
        """Account for a layer with `count` pairs for the device. device_ps: None where it gave no answer."""
        if device_ps is not None:
            self.native.end_layer(device_ps, 0, True)
            return
        experts = len(np.unique(self.pair_experts[:count]))
        self.native.end_layer(0, self._clock.model.prefill_stream_ps(experts, count), False)

    def pairs_by_request(self, rows: BatchRows, pairs_per_row: int) -> dict[str, dict[str, int]]:
        """How many (row, expert) pairs of each request ran where, over all layers of the step."""
        found = {}
        for span, (cold, offloaded, fallback) in zip(rows.spans, self.native.counts(), strict=True):
            hot = span.num_tokens * pairs_per_row - cold - offloaded - fallback
            counts = dict.fromkeys(PAIR_KINDS, 0) | {
                "hot": hot,
                "spilled": offloaded,
                "cold": cold,
                "fallback": fallback,
            }
            found[span.request.request_id] = counts
        return found


def hot_experts_ps(model: GpuModel) -> NDArray[np.int64]:
    """[experts touched, pairs]: GpuModel.hot_experts_ps as a table; 0 where fewer pairs than experts."""
    table = np.zeros((MOST_PAIRS + 1, MOST_PAIRS + 1), np.int64)
    for pairs in range(1, MOST_PAIRS + 1):
        for touched in range(1, pairs + 1):
            table[touched, pairs] = model.hot_experts_ps([pairs - touched + 1] + [1] * (touched - 1))
    return table


def price_tables(balancer: Balancer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What Balancer asks for, in simulated ps: hot experts by rows, messages by rows and pairs (NaN: impossible)."""
    gpu = np.array([balancer.gpu_ps(rows) if rows else 0.0 for rows in range(MOST_PAIRS + 1)])
    message = np.full((MOST_PAIRS + 1, MOST_PAIRS + 1), np.nan)
    for pairs in range(1, MOST_PAIRS + 1):
        message[1 : pairs + 1, pairs] = [balancer.message_ps(rows, pairs) for rows in range(1, pairs + 1)]
    return gpu, message
