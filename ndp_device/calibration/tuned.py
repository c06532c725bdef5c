"""Scales and offsets of all experts, trained together through the whole model towards its answers in full precision.

GPTQ makes each matrix right by itself. The model's answers still drift, and levels alone can take back much of the
drift. Codes stay as they are, so size, container and kernels do too. Text passes through the model twice: in full
precision, and with a mixture of widths such as plans deal out. Some experts are hot, the others around an average that
changes from step to step. Every level goes down the gradient of the divergence between the two answers. A width whose
divergence on held-out text did not fall keeps the levels that it had.

Knows a model in memory, all of it: for models that fit there in float32. Knows no solver and no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ndp_device.calibration.calibrated import FloatExpert, RoutedInputs, activated, bias_tensors
from ndp_device.calibration.streamed import expert_modules, of_zero_experts
from ndp_device.common.widths import FULL_PRECISION_BITS, WIDTHS
from ndp_device.experts.expert import QuantizedExpert, QuantizedMatrix, unpack

SEQUENCES_PER_STEP = 4
RATES = {1: 3e-3, 2: 2e-3, 3: 5e-4, 4: 2e-4}
"""Adam's rates at each width, in parts of a group's scale. At one rate for all, wide widths lose their small gains to
noise (docs/log/calibration.md)."""
_MIDDLE = {1: 0.15, 2: 0.35, 3: 0.35, 4: 0.15}
"""How often the widths of a step lie around each of these."""
_HOT = (0.0, 0.0, 0.25, 0.5)
"""Parts of the experts that a step leaves in full precision, each as often as the others."""
_TOLD_EVERY = 25


class TrainedMatrix:
    """One matrix at one width: codes that stay, and levels that are trained."""

    def __init__(self, matrix: QuantizedMatrix, device: torch.device) -> None:
        self._matrix = matrix
        self._codes = torch.from_numpy(unpack(matrix.planes)).to(device)
        self._scale, self._offset = (
            torch.from_numpy(values.astype(np.float32)).to(device) for values in (matrix.scale, matrix.offset)
        )
        self._order = None if matrix.perm is None else torch.from_numpy(matrix.perm.astype(np.int64)).to(device)
        # in parts of the scale, those of the offset in parts of half the range, so that one rate suits all
        self.steps = [torch.zeros_like(self._scale, requires_grad=True) for _ in range(2)]

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows [n, C] in the input's order -> their products with the matrix, [n, N]."""
        return (rows if self._order is None else rows[:, self._order]) @ self._weights().T

    def stored(self) -> QuantizedMatrix:
        scale, offset = (values.detach().half().cpu().numpy() for values in self._levels())
        return replace(self._matrix, scale=scale, offset=offset)

    def _levels(self) -> tuple[Tensor, Tensor]:
        half_range = self._scale.abs() * (((1 << self._matrix.bits) - 1) / 2)
        return self._scale * (1 + self.steps[0]), self._offset + half_range * self.steps[1]

    def _weights(self) -> Tensor:
        scale, offset = self._levels()
        size = self._matrix.group_size
        groups = enumerate(self._codes.split(size, dim=1))
        return torch.cat([scale[:, g, None] * codes + offset[:, g, None] for g, codes in groups], dim=1)


class TrainedExpert:
    """One expert at one width."""

    def __init__(self, replica: QuantizedExpert, device: torch.device) -> None:
        self._replica = replica
        self._w13, self._w2 = TrainedMatrix(replica.w13, device), TrainedMatrix(replica.w2, device)
        self._biases = bias_tensors(replica.biases, device)

    @property
    def parameters(self) -> list[Tensor]:
        return self._w13.steps + self._w2.steps

    def __call__(self, hidden: Tensor) -> Tensor:
        """Rows [n, H] -> the expert's outputs [n, H]."""
        gate, up = self._w13(hidden).chunk(2, dim=1)
        out = self._w2(activated(gate, up, self._biases, self._replica.activation))
        return out if self._biases is None else out + self._biases[2]

    def stored(self) -> QuantizedExpert:
        return replace(self._replica, w13=self._w13.stored(), w2=self._w2.stored())


class TrainedLayer:
    """The experts of one layer, each at its own width. Computes in place of the model's experts."""

    def __init__(
        self, full: Sequence[FloatExpert], replicas: Sequence[Mapping[int, QuantizedExpert]], device: torch.device
    ) -> None:
        self.full = full
        self.experts = [{bits: TrainedExpert(one, device) for bits, one in each.items()} for each in replicas]
        self.widths = [FULL_PRECISION_BITS] * len(full)
        self.seen: list[tuple[Tensor, Tensor]] | None = None
        """A list that is set here receives what enters: hidden states and chosen experts."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, expert_ids, weights = (*args, *kwargs.values())[:3]
        rows = hidden.flatten(0, -2)
        expert_ids, weights = expert_ids.flatten(0, -2), weights.flatten(0, -2)
        if self.seen is not None:
            self.seen.append((rows, expert_ids))
        answer = of_zero_experts(rows, expert_ids, weights, len(self.widths))
        for expert, bits in enumerate(self.widths):
            chosen, choice = torch.eq(expert_ids, expert).nonzero(as_tuple=True)
            if len(chosen):
                compute = self.full[expert] if bits == FULL_PRECISION_BITS else self.experts[expert][bits]
                part = compute(rows[chosen].float()) * weights[chosen, choice, None]
                answer = answer.index_add(0, chosen, part.to(answer.dtype))
        return answer.view_as(hidden)


class Tuning:
    """A model whose experts are computed here, and what is done to their levels."""

    def __init__(
        self,
        model: Any,
        full: Sequence[Sequence[FloatExpert]],
        replicas: Sequence[Sequence[Mapping[int, QuantizedExpert]]],
        *,
        seed: int = 0,
    ) -> None:
        """model: without experts (streamed.load_without_experts); full, replicas: its experts by layer."""
        self._model = model
        for parameter in model.parameters():
            parameter.requires_grad_(requires_grad=False)
        self._layers = [TrainedLayer(*each, model.device) for each in zip(full, replicas, strict=True)]
        for module, layer in zip(expert_modules(model.base_model), self._layers, strict=True):
            module.forward = layer.forward
        self.bits = tuple(bits for bits in replicas[0][0] if bits in WIDTHS)  # 8 bits have nothing to gain
        self._draw = torch.Generator().manual_seed(seed)

    def improve(self, token_ids: Tensor, held_out: Tensor, num_steps: int) -> Iterator[str]:
        """Train, and keep what helped on held-out sequences, width by width; tells what is being done."""
        before = {bits: self.divergence_at(bits, held_out) for bits in self.bits}
        recent: list[float] = []
        for step, divergence in enumerate(self.train(token_ids, num_steps), 1):
            recent.append(divergence)
            if len(recent) == _TOLD_EVERY:
                yield f"tuning: step {step} of {num_steps}, divergence {np.mean(recent):.4f} nats per token"
                recent.clear()
        for bits, was in before.items():
            now = self.divergence_at(bits, held_out)
            if not now < was:
                self.take_back(bits)
            verdict = "kept" if now < was else "not better, so its levels stay as they were"
            yield f"tuning: at {bits} bits the divergence is {now:.4f} nats per token, it was {was:.4f}: {verdict}"

    def train(self, token_ids: Tensor, num_steps: int) -> Iterator[float]:
        """A step per draw of some sequences out of [S, T]; gives the mean divergence of each, nats per token."""
        by_width = [
            {
                "params": [p for layer in self._layers for each in layer.experts for p in each[bits].parameters],
                "lr": 0.0,
            }
            for bits in self.bits
        ]
        optimizer = torch.optim.Adam(by_width, betas=(0.9, 0.99))
        for step in range(num_steps):
            for bits, group in zip(self.bits, optimizer.param_groups, strict=True):
                group["lr"] = RATES[bits] * 0.5 * (1 + math.cos(math.pi * step / num_steps))
            widths = self._some_widths()
            optimizer.zero_grad()  # to None: a width that a step does not use keeps its momentum for when it does
            rows = torch.randint(len(token_ids), (SEQUENCES_PER_STEP,), generator=self._draw)
            divergence = self._divergence(token_ids[rows], widths)
            divergence.backward()
            optimizer.step()
            yield float(divergence.detach())

    def divergence_at(self, bits: int, token_ids: Tensor) -> float:
        """Mean over sequences [S, T] with every expert at one width, nats per token."""
        return self.divergence(token_ids, [[bits] * len(layer.full) for layer in self._layers])

    def take_back(self, bits: int) -> None:
        """The levels of one width are what they were before training."""
        with torch.no_grad():
            for layer in self._layers:
                for each in layer.experts:
                    for step in each[bits].parameters:
                        step.zero_()

    def inputs(self, token_ids: Tensor) -> list[RoutedInputs]:
        """Inputs of sequences [S, T] to the experts of each layer in full precision."""
        self._set([[FULL_PRECISION_BITS] * len(layer.full) for layer in self._layers])
        for layer in self._layers:
            layer.seen = []
        with torch.no_grad():
            for ids in token_ids.split(SEQUENCES_PER_STEP):
                self._model(input_ids=ids.to(self._model.device), use_cache=False)
        found = []
        for layer in self._layers:
            hidden, expert_ids = (torch.cat(parts) for parts in zip(*(layer.seen or []), strict=True))
            found.append(RoutedInputs(hidden.cpu(), expert_ids.cpu()))
            layer.seen = None
        return found

    def stored(self, layer: int) -> list[dict[int, QuantizedExpert]]:
        """The experts of one layer with the levels that they have now."""
        return [{bits: one.stored() for bits, one in each.items()} for each in self._layers[layer].experts]

    def divergence(self, token_ids: Tensor, widths: Sequence[Sequence[int]]) -> float:
        """Mean over sequences [S, T] with experts at these widths, by layer and expert, nats per token."""
        parts = token_ids.split(SEQUENCES_PER_STEP)
        with torch.no_grad():
            return sum(float(self._divergence(part, widths)) * len(part) for part in parts) / len(token_ids)

    def _divergence(self, token_ids: Tensor, widths: Sequence[Sequence[int]]) -> Tensor:
        """Kullback-Leibler divergence of the answers at these widths from full precision, mean over tokens."""
        with torch.no_grad():
            self._set([[FULL_PRECISION_BITS] * len(each) for each in widths])
            wanted = self.log_probabilities(token_ids)
        self._set(widths)
        answered = self.log_probabilities(token_ids)
        return torch.nn.functional.kl_div(answered, wanted, reduction="none", log_target=True).sum(-1).mean()

    def log_probabilities(self, token_ids: Tensor) -> Tensor:
        """Sequences [S, T] -> [S, T, vocabulary]."""
        logits = self._model(input_ids=token_ids.to(self._model.device), use_cache=False).logits
        return torch.log_softmax(logits.float(), -1)

    def _set(self, widths: Sequence[Sequence[int]]) -> None:
        for layer, each in zip(self._layers, widths, strict=True):
            layer.widths = list(each)

    def _some_widths(self) -> list[list[int]]:
        """Widths of all experts of all layers for one step: one average and one part of hot experts for all layers."""
        chances = torch.tensor([_MIDDLE[bits] for bits in self.bits])
        middle = int(torch.multinomial(chances, 1, generator=self._draw))
        around = torch.tensor([{0: 1.0, 1: 0.4}.get(abs(place - middle), 0.0) for place in range(len(self.bits))])
        hot_part = _HOT[int(torch.randint(len(_HOT), (1,), generator=self._draw))]
        found = []
        for layer in self._layers:
            num_experts = len(layer.full)
            widths = torch.tensor(self.bits)[torch.multinomial(around, num_experts, True, generator=self._draw)]
            widths[torch.randperm(num_experts, generator=self._draw)[: int(hot_part * num_experts)]] = (
                FULL_PRECISION_BITS
            )
            found.append(widths.tolist())
        return found
