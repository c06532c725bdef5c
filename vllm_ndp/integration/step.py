"""One forward pass as the plugin sees it: its rows, its messages to the device, its simulated time, its counts.

Lives from the worker's `execute_model` to its end. All layers of a step run under one plan epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.forward_context import get_forward_context

from vllm_ndp.device_calls import ExecuteHandle
from vllm_ndp.integration.batch import BatchRows, Span
from vllm_ndp.integration.dispatch import NOTHING, Pairs
from vllm_ndp.integration.report import PAIR_KINDS
from vllm_ndp.replay.balance import Balancer, LayerLoad

if TYPE_CHECKING:
    from vllm_ndp.integration.controller import NdpController


@dataclass
class DeviceCall:
    """One message under way: which rows it covers and where its answer goes."""

    controller: NdpController
    handle: ExecuteHandle
    rows: NDArray[np.int64]  # rows of the step whose activations were sent

    def add_into(self, out: torch.Tensor) -> int:
        """Collect the partial sum, add it, return simulated ps. Raises DeviceUnavailable within the deadline."""
        result = self.controller.device.client.finish_execute(self.handle)
        partial = torch.from_numpy(result.y)
        if len(self.rows) == out.shape[0]:
            out.add_(partial.to(out.device))
        else:
            index = torch.from_numpy(self.rows).to(out.device)
            out.index_add_(0, index, partial.to(out.device, out.dtype))
        return int(result.timing.total_ps)


class StepContext:
    def __init__(self, controller: NdpController, number: int, spans: dict[str, Span]) -> None:
        self.number = number
        self.spans = spans
        self._controller = controller
        self._rows: BatchRows | None = None
        self._slots: torch.Tensor | None = None
        self._bits: NDArray[np.uint8] | None = None
        self._spilled: dict[int, frozenset[int]] = {}  # layer -> hot experts that ran on the device
        self.streamed = np.zeros(controller.pool_shape, dtype=np.bool_)  # [L, E], by this step's prefill rows
        self._ending = [span.request for span in spans.values() if span.ends_prefill]
        self._fallen_back: list[int] = []  # layers whose cold pairs were computed here
        self._routing: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None

    @property
    def started(self) -> bool:
        """Whether a layer has run: vLLM may schedule a step that needs no forward pass."""
        return self._slots is not None

    # -- rows -----------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> BatchRows:
        if self._rows is None:
            # The runner's order, not the scheduler's; known only once the runner has updated its own state.
            order = [r for r in self._controller.runner.input_batch.req_ids if r in self.spans]
            self._rows = BatchRows.of([self.spans[request_id] for request_id in order])
        return self._rows

    def enter_layer(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> int:
        """Write the router's choices beside the KV cache; returns the number of real rows."""
        rows = self.rows
        if self._slots is None:
            self._slots = self._checked_slots()
            self._controller.clock.begin_step(rows.num_rows, rows.kv_tokens, rows.attended)
        self._controller.sidecar.write(layer, self._slots, ids[: rows.num_rows], weights[: rows.num_rows])
        self._controller.clock.begin_layer()
        return rows.num_rows

    def _checked_slots(self) -> torch.Tensor:
        """The KV slots vLLM writes in this step, checked against the requests we believe own the rows."""
        mapping = get_forward_context().slot_mapping
        slots = next(iter(mapping.values()))[: self.rows.num_rows].to(torch.int64)
        expected = self.rows.expected_slots(self._controller.sidecar.block_size)
        self._controller.totals.row_checks += 1
        if not np.array_equal(slots.cpu().numpy(), expected):
            self._controller.totals.sidecar_mismatches += 1
            raise RuntimeError(
                "the rows of this step do not belong to the requests vllm-ndp expected (KV slots differ): "
                "this vLLM version orders its batch differently; see docs/compatibility.md"
            )
        return slots

    # -- the device -----------------------------------------------------------------------------------------------

    def send(self, layer: int, x: torch.Tensor, pairs: Pairs) -> DeviceCall:
        """One message with the rows that have a cold pair; waits for nothing but a new plan, and never fails."""
        self._controller.planner.settle()
        sent, local = np.unique(pairs.rows, return_inverse=True)
        if len(sent) < x.shape[0]:
            x = x.index_select(0, torch.from_numpy(sent).to(x.device))
        handle = self._controller.device.client.begin_execute(
            layer,
            self.number,
            self._controller.clock.now_ps,
            _as_numpy(x),
            local.astype(np.int32),
            pairs.experts.astype(np.int32),
            self._bits_of(layer, pairs),
            pairs.gates,
        )
        return DeviceCall(self._controller, handle, sent)

    @property
    def bits(self) -> NDArray[np.uint8]:
        """Every request's plan, [R, L, E]; 0 = hot."""
        if self._bits is None:
            planned = [span.request.bits for span in self.rows.spans]
            empty = np.zeros(self._controller.pool_shape, dtype=np.uint8)
            self._bits = np.stack([empty if plan is None else plan.bits for plan in planned])
        return self._bits

    def _bits_of(self, layer: int, pairs: Pairs) -> NDArray[np.uint8]:
        bits: NDArray[np.uint8] = self.bits[self.rows.owner[pairs.rows], layer, pairs.experts]
        if self._spilled.get(layer) and self.balancer is not None:
            bits[bits == 0] = self.balancer.spill_bits
        return bits

    @cached_property
    def balancer(self) -> Balancer | None:
        """None where hot experts stay on the GPU: by the settings, in a step with prompts, and without a device."""
        up = self._controller.balancer is not None and self._controller.device.client.state == "up"
        return self._controller.balancer if up and self.rows.all_decode else None

    def spill_few(self, layer: int, slot_of: list[int], ids: list[list[int]], gates: list[list[float]]) -> list[int]:
        """The slots of one layer [E] with -1 for hot experts that run on the device this time. ids and gates [T][k]."""
        if self.balancer is None:
            return slot_of
        load = LayerLoad.of_lists([slot >= 0 for slot in slot_of], ids, gates, self._bits_by_row(layer))
        spilled = self._spilled[layer] = self.balancer.spilled(load)
        return [-1 if expert in spilled else slot for expert, slot in enumerate(slot_of)] if spilled else slot_of

    def spill(self, layer: int, slot_of: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same for many rows. slot_of [E]; ids and weights [T, k]."""
        if self.balancer is None:
            return slot_of
        is_hot, gates = (slot_of >= 0).cpu().numpy(), weights.float().cpu().numpy()
        load = LayerLoad.of_arrays(is_hot, ids.cpu().numpy().astype(np.int64), gates, self._bits_by_row(layer))
        spilled = self._spilled[layer] = self.balancer.spilled(load)
        return slot_of.index_fill(0, torch.tensor(sorted(spilled), device=slot_of.device), -1) if spilled else slot_of

    def keep(self, layer: int, pairs: Pairs) -> Mapping[int, int]:
        """Of the prefill pairs that are about to be streamed: expert -> slot for those that will be hot."""
        experts = pairs.distinct_experts.tolist()
        self.streamed[layer, experts] = True
        controller = self._controller
        if not (self._ending and controller.settings.migration == "kept" and controller.streamer.keeps):
            return NOTHING
        return controller.planner.foresee(layer, list(controller.tracker.requests.values()), self._ending, experts)

    def _bits_by_row(self, layer: int) -> NDArray[np.uint8]:
        bits: NDArray[np.uint8] = self.bits[self.rows.owner, layer]
        return bits

    def compute_locally(
        self,
        layer: int,
        out: torch.Tensor,
        x: torch.Tensor,
        pairs: Pairs,
        stream: Callable[[torch.Tensor, torch.Tensor, Pairs], None],
    ) -> None:
        """The device gave no valid answer: same pairs, here, in full precision or with the same replicas."""
        kernel = self._controller.device.local_replicas
        if kernel is None:
            stream(out, x, pairs)
            return
        activations = x.detach().float().cpu().numpy()
        partial = kernel.execute(
            layer, activations, pairs.rows.astype(np.int32), pairs.experts, self._bits_of(layer, pairs), pairs.gates
        )
        out.add_(torch.from_numpy(partial).to(out.device))

    # -- accounts -------------------------------------------------------------------------------------------------

    def leave_layer(
        self, layer: int, hot_pairs: list[int], to_stream: Pairs | None, fallen_back: Pairs | None, device_ps: int
    ) -> None:
        """hot_pairs: pairs of each slot in use. to_stream: prefill pairs that came from the pool."""
        streamed = [pairs for pairs in (to_stream, fallen_back) if pairs is not None and len(pairs.rows)]
        if fallen_back is not None:
            self._fallen_back.append(layer)
        self._controller.clock.end_layer(
            hot_pairs,
            device_ps=device_ps,
            streamed_experts=len(set().union(*(pairs.experts.tolist() for pairs in streamed))),
            streamed_pairs=sum(len(pairs.rows) for pairs in streamed),
        )

    def routing(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Expert ids [T, L, k] and router weights f32 [T, L, k] of this step's rows."""
        if self._routing is None:
            slots = self.rows.expected_slots(self._controller.sidecar.block_size)
            self._routing = self._controller.sidecar.read(slots)
        return self._routing

    def pairs_by_request(self) -> dict[str, dict[str, int]]:
        """How many (row, expert) pairs of each request ran where, over all layers."""
        rows = self.rows
        ids = self.routing()[0]
        placement = self._controller.planner.placement
        assert placement is not None
        layers = np.arange(ids.shape[1])[None, :, None]
        moved = np.zeros_like(placement.hot)
        for layer, experts in self._spilled.items():
            moved[layer, list(experts)] = True
        hot, spilled = (placement.hot & ~moved)[layers, ids], moved[layers, ids]  # [T, L, k]
        lost = np.zeros(ids.shape[1], dtype=np.bool_)
        lost[self._fallen_back] = True
        decode = rows.decode[:, None, None]
        here = lost[:, None]
        kinds = (
            decode & hot,
            decode & spilled & ~here,
            decode & ~hot & ~spilled & ~here,
            np.broadcast_to(~decode, ids.shape),
            decode & ~hot & here,
        )
        per_row = [kind.sum(axis=(1, 2)) for kind in kinds]
        counts = [np.bincount(rows.owner, weights=of_row, minlength=len(rows.spans)) for of_row in per_row]
        return {
            span.request.request_id: {kind: int(count[i]) for kind, count in zip(PAIR_KINDS, counts, strict=True)}
            for i, span in enumerate(rows.spans)
        }


def _as_numpy(x: torch.Tensor) -> np.ndarray:
    """float32 and float16 as they are; bfloat16, which numpy lacks, as uint16."""
    host = x.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16)
    return host.numpy()
