"""Weights of layers, in one pass: the nats a token that a unit of relative loss in each does to the model's answer.

Some sequences pass through the model in full precision. From each layer they go on a second time, with that layer's
replicas at one width, and all later layers in full precision. So a layer's branch passes what the layer alone spoils.
The divergence of its answer from full precision, over the layer's mean relative loss at that width, is its weight.

More sequences pass with replicas in every layer. The text loses something else by that than the sum of divergences:
layers spoil together, and text is not the model's own answer. All weights are in proportion to what the text loses.

The model is never in memory (streamed.py). As many sequences branch as keep all passes within what calibration holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.calibration.calibrated import FloatExpert
from ndp_device.calibration.data_free import dequantize
from ndp_device.calibration.streamed import StreamedForward
from ndp_device.common.widths import REPLICA_WIDTHS
from ndp_device.experts.expert import FullExpert, QuantizedExpert, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

    from ndp_device.replicas.checkpoint import CheckpointExperts
    from ndp_device.replicas.format import ReplicaFiles

WEIGHED_AT = 2
"""Bits of a layer whose weight is measured, or the nearest that there are."""
_LEAST_LOSS = 1e-12
_LEAST_PART = 0.25
"""Least part of the sum of divergences that counts: a short text may happen to lose nothing."""


def num_branching(num_sequences: int, num_layers: int, held_out: int) -> int:
    """How many of the sequences held out branch, so that all their passes are no more than a calibration's sequences.

    All of them pass twice: in full precision and in replicas.
    """
    return max(1, min(held_out, (num_sequences - 2 * held_out) // num_layers))


def nats_per_loss(
    model: Any, token_ids: Tensor, branching: int, checkpoint: CheckpointExperts, files: ReplicaFiles
) -> NDArray[np.float64]:
    """[L] from sequences [S, T], the first of which branch, and a model without experts
    (streamed.load_without_experts)."""
    bits = min(files.manifest.bits, key=lambda width: abs(width - WEIGHED_AT))
    column = REPLICA_WIDTHS.index(bits)
    once = len(token_ids)
    forward = StreamedForward(model, torch.cat([token_ids, token_ids]), checkpoint.shape)
    losses = []
    for layer, batch in enumerate(forward.layers(branching)):
        in_full, in_replicas = (slice(once), slice(2 * once, None)), slice(once, 2 * once)
        for expert in range(checkpoint.shape.num_experts):
            full = FloatExpert(checkpoint.expert(layer, expert), model.device)
            checkpoint.release()
            for some in in_full:
                batch.add(expert, full.answers(batch.inputs(some), expert), some)
            del full  # at Mixtral's width each has 0.7 GB
            replica = FloatExpert(in_float(files.expert(layer, expert, bits)), model.device)
            batch.add(expert, replica.answers(batch.inputs(in_replicas), expert), in_replicas)
            batch.add_to_branch(expert, replica.answers(batch.inputs(batch.branching), expert))
        files.release(layer)
        of_experts = files.layer_losses(layer)[1][:, column]
        counts = np.bincount(batch.expert_ids[:once].numpy().ravel(), minlength=len(of_experts))[: len(of_experts)]
        losses.append(max(float(np.average(of_experts, weights=counts)), _LEAST_LOSS))
    alone, rise = _spoiled(forward, token_ids, branching, len(losses))
    together = max(rise, _LEAST_PART * alone.sum())
    weights: NDArray[np.float64] = alone / np.array(losses) * (together / max(alone.sum(), _LEAST_LOSS))
    return weights


def in_float(replica: QuantizedExpert) -> FullExpert:
    """A replica as an expert in float32."""
    w1, w3 = np.split(_values(replica.w13), 2)
    return FullExpert("float32", w1, w3, _values(replica.w2), biases=replica.biases, activation=replica.activation)


def _values(matrix: QuantizedMatrix) -> NDArray[np.float32]:
    """Columns in the order of what they multiply. In numpy alone it would take five times its size on the way."""
    values = dequantize(matrix)
    if matrix.perm is None:
        return values
    in_order = np.empty_like(values)
    in_order[:, matrix.perm] = values
    return in_order


def _spoiled(
    forward: StreamedForward, token_ids: Tensor, branching: int, num_layers: int
) -> tuple[NDArray[np.float64], float]:
    """Nats a token: [L], each branch's Kullback-Leibler divergence from full precision; and how much the text's
    negative log-likelihood rises by replicas in every layer.

    The S sequences lie in full precision, in replicas, and the first of them again for each branch.
    """
    divergences, rise, once = np.zeros(num_layers), 0.0, len(token_ids)

    def likelihood(answered: Tensor, sequence: int) -> float:
        return float(answered[:-1].cpu().gather(1, token_ids[sequence, 1:, None]).mean())

    for sequence in range(once):
        wanted = forward.log_probabilities(sequence)
        rise += likelihood(wanted, sequence) - likelihood(forward.log_probabilities(once + sequence), sequence)
        if sequence < branching:
            chance = wanted.exp().flatten()
            for layer in range(num_layers):
                answered = forward.log_probabilities(2 * once + layer * branching + sequence)
                divergences[layer] += float(chance.dot((wanted - answered).flatten())) / len(wanted)
    return divergences / branching, rise / once
