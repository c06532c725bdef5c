"""A trace arranged for replay: G groups of B requests that decode together, as dense arrays.

Requests join groups in trace order; what does not fill a group is left out. Within a group prompts run one after the
other, then all decode in step until the longest is done. Knows routing. Does not know hardware, policies or time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import TraceError
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.trace import Trace


@dataclass(frozen=True)
class Batches:
    """D decode steps, L layers, k choices, E experts; `valid` marks the (group, request, step) rows that exist."""

    num_experts: int
    ids: NDArray[np.int64]  # [G, B, D, L, k]; 0 where not valid
    weights: NDArray[np.float32]  # [G, B, D, L, k]
    valid: NDArray[np.bool_]  # [G, B, D]
    prompts: tuple[tuple[RoutingStats, ...], ...]  # [G][B]
    decodes: tuple[tuple[RoutingStats, ...], ...]  # [G][B], what a clairvoyant knows
    requests: NDArray[np.int64]  # [G, B], index in the trace

    @classmethod
    def of(cls, trace: Trace, batch: int = 1) -> Batches:
        """Raises TraceError when the trace has fewer requests than one group takes, or no decode."""
        sequences = trace.sequences
        groups = len(sequences) // batch if batch > 0 else 0
        if groups == 0:
            raise TraceError(f"a batch of {batch} needs as many requests, the trace has {len(sequences)}")
        sequences = sequences[: groups * batch]
        steps = max(len(s.decode_ids) for s in sequences)
        if steps == 0:
            raise TraceError("the trace has no decode tokens: nothing can be replayed")
        p = trace.provenance
        ids = np.zeros((len(sequences), steps, p.num_layers, p.top_k), np.int64)
        weights = np.zeros(ids.shape, np.float32)
        valid = np.zeros((len(sequences), steps), np.bool_)
        for row, sequence in enumerate(sequences):
            decoded = len(sequence.decode_ids)
            ids[row, :decoded], weights[row, :decoded] = sequence.decode_ids, sequence.decode_weights
            valid[row, :decoded] = True
        prompts = [trace.stats(s) for s in sequences]
        decodes = [trace.stats(s, "decode") for s in sequences]
        return cls(
            num_experts=p.num_experts,
            ids=ids.reshape(groups, batch, *ids.shape[1:]),
            weights=weights.reshape(groups, batch, *ids.shape[1:]),
            valid=valid.reshape(groups, batch, steps),
            prompts=tuple(tuple(prompts[g * batch : (g + 1) * batch]) for g in range(groups)),
            decodes=tuple(tuple(decodes[g * batch : (g + 1) * batch]) for g in range(groups)),
            requests=np.arange(groups * batch).reshape(groups, batch),
        )

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """G, B, D, L, k."""
        g, b, d, layers, k = self.ids.shape
        return g, b, d, layers, k

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """[G, D], requests still decoding in each step."""
        counts: NDArray[np.int64] = self.valid.sum(axis=1, dtype=np.int64)
        return counts

    @cached_property
    def kv_tokens(self) -> NDArray[np.int64]:
        """[G, D], context of all rows together in each step."""
        prompt = np.array([[stats.num_tokens for stats in group] for group in self.prompts])
        context = prompt[:, :, None] + 1 + np.arange(self.valid.shape[2])
        total: NDArray[np.int64] = (context * self.valid).sum(axis=1, dtype=np.int64)
        return total

    @property
    def num_decisions(self) -> int:
        """(token, layer) routing decisions of all decode rows."""
        return int(self.valid.sum()) * int(self.ids.shape[3])

    @cached_property
    def pairs(self) -> NDArray[np.bool_]:
        """[G, B, D, 1, 1], valid as a mask over pairs."""
        return self.valid[:, :, :, None, None]

    def tokens_per_expert(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Step by step: rows of each expert, [G, L, E]."""
        g, _, steps, layers, _ = self.shape
        cells = (np.arange(g)[:, None, None, None] * layers + np.arange(layers)[:, None]) * self.num_experts
        size = g * layers * self.num_experts
        for step in range(steps):
            keys = (cells + self.ids[:, :, step])[self.valid[:, :, step]]
            yield step, np.bincount(keys.ravel(), minlength=size).reshape(g, layers, self.num_experts)
