"""Which part of every expert is held: some of its intermediate units, in the order in which this form of it has them.

    y = sum over units of w2[:, unit] * act(w1[unit] @ x, w3[unit] @ x)

so the parts of one expert add up to it, in any order of its units. Parts of two forms of it need not: replicas have
their units in the order that their calibration found, not in the checkpoint's. Knows no device and no file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import Biases, Expert, FullExpert, QuantizedMatrix

_UNITS_PER_BYTE = 8  # of a bit plane


@dataclass(frozen=True)
class Part:
    """One of `count` equal runs of an expert's intermediate units."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(f"a part of an expert must be 0 to {self.count - 1} of {self.count}, got {self.index}")

    def __str__(self) -> str:
        return "whole experts" if self.count == 1 else f"part {self.index + 1} of {self.count} of every expert"

    def check(self, intermediate_size: int, group_size: int) -> None:
        """Raise ConfigError where a border would lie within a group of weights that share a scale."""
        if self.count > 1 and intermediate_size % (self.count * lcm(group_size, _UNITS_PER_BYTE)):
            raise ConfigError(
                f"experts of {intermediate_size} units with {group_size} to a scale cannot be cut into {self.count} "
                "equal parts at borders of scales: use another number of devices, or whole experts"
            )

    def of(self, expert: Expert) -> Expert:
        """Cut this part out of an expert that `check` found divisible. The bias of the expert's output goes to the
        first part."""
        if self.count == 1:
            return expert
        intermediate = expert.w2.shape[1]
        length = intermediate // self.count
        first, last = self.index * length, (self.index + 1) * length
        biases = None if expert.biases is None else self._biases(expert.biases, first, last)
        if isinstance(expert, FullExpert):
            w1, w3, w2 = expert.w1[first:last], expert.w3[first:last], expert.w2[:, first:last]
            return replace(expert, w1=w1, w3=w3, w2=w2, biases=biases)
        rows = np.r_[first:last, intermediate + first : intermediate + last]
        return replace(expert, w13=expert.w13.at_rows(rows), w2=_columns(expert.w2, first, last), biases=biases)

    def _biases(self, biases: Biases, first: int, last: int) -> Biases:
        part = biases.reordered(np.arange(first, last))
        return part if self.index == 0 else replace(part, down=np.zeros_like(part.down))


WHOLE = Part()


def _columns(matrix: QuantizedMatrix, first: int, last: int) -> QuantizedMatrix:
    """Raises ConfigError for columns in another order than that of the rows before them: no file of ours has any."""
    if matrix.perm is not None:
        raise ConfigError("an expert whose w2 has an order of columns of its own cannot be cut into parts")
    group = matrix.group_size
    groups = slice(first // group, last // group)
    return replace(
        matrix,
        planes=matrix.planes[:, :, first // _UNITS_PER_BYTE : last // _UNITS_PER_BYTE],
        scale=matrix.scale[:, groups],
        offset=matrix.offset[:, groups],
    )
