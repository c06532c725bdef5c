import numpy as np

from ndp_device.kernels.reference import ReferenceKernel


class Chip(ReferenceKernel):  # which unpacks experts to float32, for a chip that computes with that
    """numpy multiplies here; a real chip would call its driver."""

    name = "chip"

    def execute(self, x, prepared, pair_rows, pair_experts, gates):
        """x [T, H], prepared [N], of each pair: its row, its expert in `prepared`, its gate -> [T, H]."""
        y = np.zeros_like(x)
        for number, expert in enumerate(prepared):
            pairs = pair_experts == number
            np.add.at(y, pair_rows[pairs], gates[pairs, None] * expert.rows(x[pair_rows[pairs]]))
        return y
