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

from vllm_ndp.device.calls import ExecuteHandle
from vllm_ndp.integration.batch import BatchRows, Span
from vllm_ndp.integration.dispatch import NOTHING, Pairs
from vllm_ndp.integration.report import PAIR_KINDS
from vllm_ndp.simulation.balance import Balancer, LayerLoad

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
        self._tally: dict[str, NDArray[np.int64]] = {}  # kind -> [T], pairs of each decode row that left the slots
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
        begins = np.ones(len(pairs.rows), dtype=np.bool_)  # pairs come row by row
        np.not_equal(pairs.rows[1:], pairs.rows[:-1], out=begins[1:])
        sent, local = pairs.rows[begins], np.cumsum(begins, dtype=np.int32) - np.int32(1)
        if len(sent) < x.shape[0]:
            x = x.index_select(0, torch.from_numpy(sent).to(x.device))
        handle = self._controller.device.client.begin_execute(
            layer,
            self.number,
            self._controller.clock.now_ps,
            _as_numpy(x),
            local,
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
            bits[bits == 0] = self.balancer.offload_bits
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
        spilled = self._spilled[layer] = self.balancer.offloaded(load)
        return [-1 if expert in spilled else slot for expert, slot in enumerate(slot_of)] if spilled else slot_of

    def spill(self, layer: int, slot_of: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same for many rows. slot_of [E]; ids and weights [T, k]."""
        if self.balancer is None:
            return slot_of
        is_hot, gates = (slot_of >= 0).cpu().numpy(), weights.float().cpu().numpy()
        load = LayerLoad.of_arrays(is_hot, ids.cpu().numpy().astype(np.int64), gates, self._bits_by_row(layer))
        spilled = self._spilled[layer] = self.balancer.offloaded(load)
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
        self, layer: int, hot_pairs: list[int], to_stream: Pairs, to_device: Pairs, device_ps: int | None
    ) -> None:
        """hot_pairs: pairs of each slot in use. to_stream: prefill pairs that came from the pool.

        device_ps: None where the device did not answer, or was not asked.
        """
        streamed = [to_stream] if len(to_stream.rows) else []
        if len(to_device.rows):
            if device_ps is None:
                streamed.append(to_device)
                self._count("fallback", to_device.rows)
            else:
                self._count_device_pairs(to_device, self._spilled.get(layer, frozenset()))
        self._controller.clock.end_layer(
            hot_pairs,
            device_ps=device_ps or 0,
            streamed_experts=len(set().union(*(pairs.experts.tolist() for pairs in streamed))),
            streamed_pairs=sum(len(pairs.rows) for pairs in streamed),
        )

    def _count_device_pairs(self, pairs: Pairs, spilled: frozenset[int]) -> None:
        if not spilled:
            self._count("cold", pairs.rows)
            return
        moved = np.array([expert in spilled for expert in pairs.experts.tolist()])
        self._count("spilled", pairs.rows[moved])
        self._count("cold", pairs.rows[~moved])

    def _count(self, kind: str, rows: NDArray[np.int64]) -> None:
        counts = np.bincount(rows, minlength=self.rows.num_rows)
        self._tally[kind] = self._tally[kind] + counts if kind in self._tally else counts

    def routing(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Expert ids [T, L, k] and router weights f32 [T, L, k] of this step's rows."""
        if self._routing is None:
            slots = self.rows.expected_slots(self._controller.sidecar.block_size)
            self._routing = self._controller.sidecar.read(slots)
        return self._routing

    def pairs_by_request(self) -> dict[str, dict[str, int]]:
        """How many (row, expert) pairs of each request ran where, over all layers."""
        rows, per_row = self.rows, self._controller.pool.shape.num_layers * self._controller.pool.shape.top_k
        left = {kind: np.add.reduceat(counts, rows.first_rows).tolist() for kind, counts in self._tally.items()}
        decode = np.add.reduceat(rows.decode, rows.first_rows, dtype=np.int64).tolist()
        found = {}
        for i, span in enumerate(rows.spans):
            pairs = dict.fromkeys(PAIR_KINDS, 0) | {kind: counts[i] for kind, counts in left.items()}
            pairs["hot"] = decode[i] * per_row - sum(counts[i] for counts in left.values())
            pairs["prefill"] = (span.num_tokens - decode[i]) * per_row
            found[span.request.request_id] = pairs
        return found


def _as_numpy(x: torch.Tensor) -> np.ndarray:
    """float32 and float16 as they are; bfloat16, which numpy lacks, as uint16."""
    host = x.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16)
    return host.numpy()
