"""Counts of the router's choices: how often each expert was chosen, and with how much router weight."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def frozen_array(values: ArrayLike, dtype: Any) -> NDArray[Any]:
    """A private, read-only, contiguous copy: what a frozen value may hold."""
    array = np.array(values, dtype=dtype, order="C", copy=True)
    array.flags.writeable = False
    return array


WEIGHT_SAMPLES = 8
"""Router weights that stand for those of all choices of an expert."""
_FINEST_CLASS, _NUM_CLASSES = 119 << 3, 80
"""Classes of router weights: eighths of an octave, from 2^-8 up to 2^2. Their numbers are the first 12 bits of a float,
so that every processor finds the same."""


@dataclass(frozen=True)
class RoutingStats:
    """Choices of num_tokens tokens, each choosing top_k experts in each of L layers."""

    counts: NDArray[np.int64]  # [L, E], times chosen
    scores: NDArray[np.float64]  # [L, E], sum of router weights over those choices
    num_tokens: int
    top_k: int
    late_counts: NDArray[np.int64] | None = None
    """[L, E], of these the choices of the later half of the tokens; None where their order is not known."""
    choices: tuple[NDArray[Any], NDArray[Any]] | None = field(default=None, repr=False, compare=False)
    """ids and weights [T, L, k] that these are counts of; None where they are not known."""
    layer: int | None = None
    """Which layer of the model L = 1 is about; None: these are all layers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", frozen_array(self.counts, np.int64))
        object.__setattr__(self, "scores", frozen_array(self.scores, np.float64))
        if self.late_counts is not None:
            object.__setattr__(self, "late_counts", frozen_array(self.late_counts, np.int64))

    @property
    def num_layers(self) -> int:
        return int(self.counts.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.counts.shape[1])

    @classmethod
    def from_choices(cls, ids: NDArray[Any], weights: NDArray[Any], num_experts: int) -> RoutingStats:
        """ids and weights are [T, L, k]; weights in any float dtype, added up in float64."""
        num_tokens, num_layers, top_k = ids.shape
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < num_experts:
            raise ValueError(f"expert ids must lie in 0..{num_experts - 1}, got {int(ids.min())}..{int(ids.max())}")
        cells = (ids.astype(np.int64) + np.arange(num_layers)[:, None] * num_experts).ravel()
        size = num_layers * num_experts
        counts = np.bincount(cells, minlength=size)
        scores = np.bincount(cells, weights.astype(np.float64).ravel(), size).astype(np.float64)
        late = np.bincount(cells[num_tokens // 2 * num_layers * top_k :], minlength=size)
        shape = (num_layers, num_experts)
        told = counts.reshape(shape), scores.reshape(shape), num_tokens, top_k, late.reshape(shape)
        return cls(*told, choices=(ids, weights))

    @cached_property
    def weights(self) -> NDArray[np.float32] | None:
        """[L, E, WEIGHT_SAMPLES], router weights of an expert's choices, in rising order, as many choices behind each;
        of the layer's where it was not chosen. Each within 6 %. None where single choices are not known.

        The n choices stand in rising order, in classes. The q-th sample is the middle of the class of choice
        (q + 1/2) n / WEIGHT_SAMPLES.
        """
        if self.choices is None or not self.num_tokens:
            return None
        ids, weights = self.choices
        first_bits = weights.astype(np.float32).view(np.int32) >> 20
        classes = np.clip(first_bits - _FINEST_CLASS, 0, _NUM_CLASSES - 1)
        smallest = np.min_scalar_type(self.num_experts * _NUM_CLASSES)  # numbers of 16 bits are sorted much faster
        keys = (ids.astype(np.int32) * _NUM_CLASSES + classes).astype(smallest)
        by_layer = np.moveaxis(keys, 1, 0).reshape(self.num_layers, -1)  # [L, T k]
        found = _middles(np.sort(by_layer, axis=1, kind="stable"), self.counts)
        if not self.counts.all():
            of_layer = np.sort((by_layer % _NUM_CLASSES).astype(np.uint8), axis=1, kind="stable")
            whole = np.full((self.num_layers, 1), by_layer.shape[1])
            found = np.where(self.counts[:, :, None] > 0, found, _middles(of_layer, whole))
        middles = ((np.arange(_NUM_CLASSES) + _FINEST_CLASS).astype(np.uint32) << 20) + np.uint32(1 << 19)
        return frozen_array(middles.view(np.float32)[found], np.float32)

    def of_layer(self, layer: int) -> RoutingStats:
        """The same [1, E], known to be of this layer."""
        return replace(self, layer=layer)


def _middles(rising: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[L, owners, WEIGHT_SAMPLES]: classes in the middle of equal parts of each owner's choices.

    rising [L, n]: classes of choices, those of one owner after those of the other. counts [L, owners]: of choices.
    """
    first = np.cumsum(counts, axis=1) - counts
    places = first[:, :, None] + (2 * np.arange(WEIGHT_SAMPLES) + 1) * counts[:, :, None] // (2 * WEIGHT_SAMPLES)
    places = np.minimum(places, rising.shape[1] - 1)  # where an owner has none
    found = np.take_along_axis(rising, places.reshape(len(rising), -1), axis=1).reshape(places.shape)
    return found.astype(np.int64) % _NUM_CLASSES
