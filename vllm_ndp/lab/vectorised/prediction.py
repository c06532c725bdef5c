"""Which experts the next layer will use, guessed from this layer's choices: what `--prefetch measured` fetches by.

The predictor: how often a token that chose e' in one layer chose e in the next one. It counts tokens of requests that
are not replayed. An expert's score is the mean of those chances over a row's choices in the layer before, by router
weight. A row's guess for a layer is the top_k experts of highest score; for the first layer popularity is the score.
(Published ones run later routers on earlier activations, which traces do not hold.) Knows routing. Does not know time
or memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.traces.trace import Trace

_ROWS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class NextLayer:
    """P(expert of this layer | an expert of the layer before)."""

    chances: NDArray[np.float64]  # [L, E, E], rows sum to 1; of the first layer all rows are its popularity

    @classmethod
    def learned(cls, trace: Trace, rows: NDArray[np.bool_] | None = None) -> NextLayer:
        """From all tokens of a trace, or some; each next choice also counts as one token of its layer's popularity."""
        ids = (trace.ids if rows is None else trace.ids[rows]).astype(np.int64)
        num_experts, (tokens, layers, k) = trace.provenance.num_experts, ids.shape
        if tokens == 0:
            raise ConfigError("a predictor needs tokens to learn from: record prompts, or take --prefetch published")
        chances = np.empty((layers, num_experts, num_experts))
        for layer in range(layers):
            popularity = np.bincount(ids[:, layer].ravel(), minlength=num_experts) / (tokens * k)
            counts = np.broadcast_to(popularity, (num_experts, num_experts))
            if layer:
                pairs = ids[:, layer - 1, :, None] * num_experts + ids[:, layer, None, :]
                seen = np.bincount(pairs.ravel(), minlength=num_experts**2)
                counts = counts + seen.reshape(num_experts, num_experts)
            chances[layer] = counts / counts.sum(axis=1, keepdims=True)
        return cls(chances)

    def accuracy(self, batches: Batches) -> float:
        """Share of decode choices that were among the guessed ones."""
        g, b, d, layers, k = batches.shape
        ids = np.zeros(batches.ids.shape, np.int64)  # best first
        for layer in range(layers):
            before = batches.ids[..., max(layer - 1, 0), :].reshape(-1, k)
            gates = batches.weights[..., max(layer - 1, 0), :].reshape(-1, k, 1)
            best = np.empty((len(before), k), np.int64)
            at_once = max(_ROWS_AT_ONCE // (k * batches.num_experts), 1)
            for start in range(0, len(before), at_once):
                part = slice(start, start + at_once)
                sums = (self.chances[layer][before[part]] * gates[part]).sum(axis=1)
                best[part] = np.argsort(-sums, axis=1, kind="stable")[:, :k]
            ids[..., layer, :] = best.reshape(g, b, d, k)
        found = (batches.ids[..., :, None] == ids[..., None, :]).any(axis=-1)
        return float(found[np.broadcast_to(batches.pairs, found.shape)].mean())


MOST_PREDICTED = 20_000


def found_ahead(trace: Trace) -> dict[str, float]:
    """Share of decode choices among the k experts predicted from the layer before, learned from every other request.

    Measured on the first tokens of each request, as many as take a moment. Empty where there are fewer than 2 requests
    or no decode.
    """
    requests = [r for r, s in enumerate(trace.sequences[:64]) if len(s.decode_ids)]
    if len(requests) < 2:
        return {}
    found = NextLayer.learned(trace.select(requests[::2])).accuracy(
        Batches.of(trace.select(requests[1::2])).first_steps(max(MOST_PREDICTED // len(requests), 1))
    )
    chance = trace.provenance.top_k / trace.provenance.num_experts
    return {"next_layer": found, "chance": chance}
