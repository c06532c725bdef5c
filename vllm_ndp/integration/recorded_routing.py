"""A recorded trace's routing inside stock vLLM: every layer gets the experts that were recorded, whatever its weights.

    VLLM_MOE_ROUTING_SIMULATION_STRATEGY=ndp:TRACE vllm serve MODEL --load-format dummy

vLLM then measures the very routing whose simulated time a replay gives. Its n-th request is the trace's n-th, round and
round, and must have its prompt's length; tokens themselves are of no account. What layers read lies at addresses that
do not change, for graphs of vLLM's; no GPU has run this yet. Beside the plugin the strategy stands for the model's
router, too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator, RoutingStrategy

from ndp_device.common.errors import ConfigError, TraceError
from vllm_ndp.integration import vllm_private
from vllm_ndp.traces.trace import Trace

STRATEGY, PREFIX = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "ndp:"


def register() -> None:
    """Offer vLLM the strategy that its environment names, where that is one of ours."""
    name = os.environ.get(STRATEGY, "")
    if not name.startswith(PREFIX):
        return
    if os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        raise ConfigError("recorded routing needs vLLM's model runner V1: set VLLM_USE_V2_MODEL_RUNNER=0")
    strategy = RecordedRouting(Trace.load(Path(name.removeprefix(PREFIX))))
    RoutingSimulator.register_strategy(name, strategy)
    vllm_private.before_each_forward(strategy.place)


class RecordedRouting(RoutingStrategy):
    """Routing of N recorded rows, L layers and k experts a row."""

    def __init__(self, trace: Trace) -> None:
        order, self._begins, _ = trace.executed  # [N], [R + 1]
        self._prompt_len, self._num_experts = trace.prompt_len, trace.provenance.num_experts
        if late := [r for r, at in enumerate(self._begins[:-1]) if trace.position[order[at : at + 1]].any()]:
            raise TraceError(
                f"request {late[0]} of the trace has no row for its first tokens: record it without a cache"
            )
        self._recorded = torch.from_numpy(trace.ids[order].astype(np.int32)), torch.from_numpy(trace.weights[order])
        self._requests: dict[str, int] = {}
        self._came = 0
        self._now: tuple[torch.Tensor, ...] | None = None
        """Ids and weights of the running step, each [L, T, k]."""
        self._context: Any = None
        self._layer = 0

    def place(self, runner: Any) -> None:
        """Before a forward pass: the rows of its requests, in the order of the batch. Raises TraceError where a request
        is not the recorded one."""
        for name, request in runner.requests.items():  # in the order in which they came
            if name not in self._requests:
                number = self._came % len(self._prompt_len)
                if request.num_prompt_tokens != (recorded := int(self._prompt_len[number])):
                    raise TraceError(
                        f"vLLM's request {self._came} is the trace's {number}, whose prompt has {recorded} tokens, and "
                        f"came with {request.num_prompt_tokens}: send the recorded lengths in their order"
                    )
                self._requests[name] = number
                self._came += 1
        self._requests = {name: number for name, number in self._requests.items() if name in runner.requests}
        batch = runner.input_batch
        counts = np.diff(runner.query_start_loc.np[: batch.num_reqs + 1])
        rows = []
        for name, count, computed in zip(batch.req_ids, counts, batch.num_computed_tokens_cpu, strict=False):
            number = self._requests[name]
            first = self._begins[number] + computed
            if first + count > self._begins[number + 1]:
                raise TraceError(
                    f"request {number} of the trace has {self._begins[number + 1] - self._begins[number]} rows, and "
                    f"vLLM asks for row {computed + count - 1}: give max_tokens as recorded"
                )
            rows.append(np.arange(first, first + count))
        wanted = torch.from_numpy(np.concatenate(rows))
        for now, recorded in zip(self._buffers(runner.max_num_tokens, runner.device), self._recorded, strict=True):
            now[:, : len(wanted)] = recorded[wanted.to(recorded.device)].swapaxes(0, 1)

    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, ids) [T, k] of the next layer of this forward pass."""
        num_layers, wide = self._recorded[0].shape[1:]
        if (context := get_forward_context()) is not self._context:
            self._require_layers(self._layer in (0, num_layers), self._layer)
            self._context, self._layer = context, 0
        if (top_k, router_logits.shape[-1]) != (wide, self._num_experts):
            raise TraceError(
                f"the trace has {wide} of {self._num_experts} experts a token, the model {top_k} of "
                f"{router_logits.shape[-1]}: take the model it was recorded with, or one of its sizes"
            )
        self._require_layers(self._layer < num_layers, self._layer + 1)
        now = self._buffers(len(hidden_states), hidden_states.device)
        ids, weights = (each[self._layer, : len(hidden_states)] for each in now)
        self._layer += 1
        return weights.clone(), ids.to(indices_type or torch.int32, copy=True)

    def _require_layers(self, fits: bool, counted: int) -> None:
        if not fits:
            raise TraceError(
                f"the trace has {self._recorded[0].shape[1]} MoE layers and the model's forward pass {counted}: take "
                "one of its depth, on one pipeline stage"
            )

    def _buffers(self, num_rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Ids and weights that layers read; before there are requests, rows take experts in turn."""
        if self._now is None or self._now[0].shape[1] < num_rows:
            self._recorded = tuple(each.to(device) for each in self._recorded)
            num_layers, top_k = self._recorded[0].shape[1:]
            in_turn = torch.arange(num_rows * top_k, dtype=torch.int32, device=device).reshape(num_rows, top_k)
            ids = (in_turn % self._num_experts).expand(num_layers, -1, -1).contiguous()
            self._now = ids, torch.full(ids.shape, 1 / top_k, device=device)
        return self._now
