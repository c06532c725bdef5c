"""Weights of layers, in one pass: the nats a token that a unit of relative loss in each does to the model's answer.

Some sequences pass through the model in full precision. From each layer they go on a second time, with that layer's
replicas at one width, and all later layers in full precision. So a layer's branch passes what the layer alone spoils.
The divergence of its answer from full precision, over the layer's mean relative loss at that width, is its weight.

The model is never in memory (streamed.py). As many sequences are taken as keep all branches within what calibration
holds. Knows replicas that are complete. Does not know how they were made, nor manifests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.calibration.calibrated import FloatExpert
from ndp_device.calibration.streamed import StreamedForward
from ndp_device.experts.expert import FullExpert, QuantizedExpert
from ndp_device.kernels.reference import dequantize
from ndp_device.widths import REPLICA_WIDTHS

if TYPE_CHECKING:
    from torch import Tensor

    from ndp_device.replicas.checkpoint import CheckpointExperts
    from ndp_device.replicas.format import ReplicaFiles

WEIGHED_AT = 2
"""Bits of a layer whose weight is measured, or the nearest that there are."""
_LEAST_LOSS = 1e-12


def num_weighing(num_sequences: int, num_layers: int, most: int) -> int:
    """How many sequences are weighed on, so that all branches are no more than a calibration's sequences."""
    return max(1, min(most, num_sequences // (num_layers + 1)))


def nats_per_loss(
    model: Any, token_ids: Tensor, checkpoint: CheckpointExperts, files: ReplicaFiles
) -> NDArray[np.float64]:
    """[L] from sequences [S, T] and a model without experts (streamed.load_without_experts)."""
    bits = min(files.manifest.bits, key=lambda width: abs(width - WEIGHED_AT))
    column = REPLICA_WIDTHS.index(bits)
    forward = StreamedForward(model, token_ids, checkpoint.shape.num_layers)
    losses = []
    for layer, batch in enumerate(forward.layers(len(token_ids))):
        for expert in range(checkpoint.shape.num_experts):
            full = FloatExpert(checkpoint.expert(layer, expert), model.device)
            checkpoint.release()
            batch.answer(expert, full, model.device)
            replica = FloatExpert(in_float(files.expert(layer, expert, bits)), model.device)
            batch.answer_branch(expert, replica, model.device)
        files.release(layer)
        counts = np.bincount(batch.expert_ids[: len(token_ids)].numpy().ravel(), minlength=checkpoint.shape.num_experts)
        losses.append(max(float(np.average(files.layer_losses(layer)[1][:, column], weights=counts)), _LEAST_LOSS))
    weights: NDArray[np.float64] = _divergences(forward, len(token_ids), len(losses)) / np.array(losses)
    return weights


def in_float(replica: QuantizedExpert) -> FullExpert:
    """A replica as an expert in float32."""
    w1, w3 = np.split(dequantize(replica.w13), 2)
    return FullExpert("float32", w1, w3, dequantize(replica.w2), biases=replica.biases, activation=replica.activation)


def _divergences(forward: StreamedForward, num_sequences: int, num_layers: int) -> NDArray[np.float64]:
    """[L]: Kullback-Leibler divergence of each layer's branch from full precision, nats a token."""
    found = np.zeros(num_layers)
    for sequence in range(num_sequences):
        wanted = forward.log_probabilities(sequence)
        for layer in range(num_layers):
            answered = forward.log_probabilities(sequence + (layer + 1) * num_sequences)
            divergence = torch.nn.functional.kl_div(answered, wanted, reduction="none", log_target=True)
            found[layer] += float(divergence.sum(-1).mean())
    return found / num_sequences
