"""One forward pass as the plugin sees it: its rows, its messages to the device, its simulated time, its counts.

Lives from the worker's `execute_model` to its end. All layers of a step run under one plan epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.forward_context import get_forward_context

from vllm_ndp.device_calls import ExecuteHandle
from vllm_ndp.integration.batch import BatchRows, Span
from vllm_ndp.integration.dispatch import Pairs

if TYPE_CHECKING:
    from vllm_ndp.integration.controller import NdpController

PAIR_KINDS = ("hot", "cold", "prefill", "fallback")
"""Decode pairs in hot slots, decode pairs the device computed, prefill pairs, decode pairs computed here instead."""


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
        self.counts: dict[str, NDArray[np.int64]] = {}  # per request: pairs by PAIR_KINDS
        self.device_seconds = 0.0
        self._controller = controller
        self._rows: BatchRows | None = None
        self._slots: torch.Tensor | None = None
        self._bits: NDArray[np.uint8] | None = None
        self._pair_counts: NDArray[np.int64] | None = None

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
            self._pair_counts = np.zeros((len(order), len(PAIR_KINDS)), dtype=np.int64)
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
        """One message with the rows that have a cold pair; does not wait and never fails."""
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

    def _bits_of(self, layer: int, pairs: Pairs) -> NDArray[np.uint8]:
        if self._bits is None:
            planned = [span.request.bits for span in self.rows.spans]
            empty = np.zeros(self._controller.pool_shape, dtype=np.uint8)
            self._bits = np.stack([empty if plan is None else plan.bits for plan in planned])
        bits: NDArray[np.uint8] = self._bits[self.rows.owner[pairs.rows], layer, pairs.experts]
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
        self,
        layer: int,
        slots: torch.Tensor,
        to_device: Pairs,
        to_stream: Pairs,
        fallen_back: Pairs | None,
        device_ps: int,
    ) -> None:
        host_slots = slots.cpu().numpy()
        here = host_slots >= 0
        hot_pairs = np.bincount(host_slots[here], minlength=len(self._controller.slots(layer).expert_in))
        streamed = to_stream if fallen_back is None else _merge(to_stream, fallen_back)
        self._controller.clock.end_layer(
            hot_pairs[hot_pairs > 0].tolist(),
            device_ps=device_ps,
            streamed_experts=len(streamed.distinct_experts),
            streamed_pairs=len(streamed.rows),
        )
        self._count(here, to_device, fallen_back)

    def _count(self, here: NDArray[np.bool_], to_device: Pairs, fallen_back: Pairs | None) -> None:
        rows, counts = self.rows, self._pair_counts
        assert counts is not None
        owners, top_k = rows.owner, here.shape[1]
        hot_of_row = here.sum(axis=1)
        num = len(rows.spans)
        counts[:, 0] += np.bincount(owners, weights=hot_of_row * rows.decode, minlength=num).astype(np.int64)
        counts[:, 2] += np.bincount(owners, weights=top_k * ~rows.decode, minlength=num).astype(np.int64)
        kind = 1 if fallen_back is None else 3
        counts[:, kind] += np.bincount(owners[to_device.rows], minlength=num)

    def pairs_by_request(self) -> dict[str, dict[str, int]]:
        if self._rows is None or self._pair_counts is None:
            return {}
        return {
            span.request.request_id: dict(zip(PAIR_KINDS, counts.tolist(), strict=True))
            for span, counts in zip(self._rows.spans, self._pair_counts, strict=True)
        }


def _merge(first: Pairs, second: Pairs) -> Pairs:
    return Pairs(*(np.concatenate(both) for both in zip(first, second, strict=True)))


def _as_numpy(x: torch.Tensor) -> np.ndarray:
    """float32 and float16 as they are; bfloat16, which numpy lacks, as uint16."""
    host = x.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16)
    return host.numpy()
