"""Which hot experts of a decode layer run on the device instead, because that shortens the layer.

Two full-precision experts on the GPU take longer than one of them beside a 2- or 3-bit copy of the other on the device.
The device is idle in just those layers. The hot experts of least gate weight go to the device at `offload_bits`, as
many as make max(GPU, device) smallest:

    device = cold experts + message + offloaded experts          GPU = shared experts + hot experts that stay

Where the host's CPU computes warm experts beside both, nothing is gained below what that takes.

Each of several hosts that share the device expects the others to ask for as much as it does. The device's times count
once for each host. With two hosts and more that mostly leaves hot experts on the GPU, as the paper does. Offloading in
one layer of two, three, ... eight was tried for two hosts and lost to that as well (docs/lab.md).

A pure function of sizes, gates, prices and the number of hosts, so the live plugin and replay decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_ndp.cost_model.prices import Prices, together_ps


@dataclass(frozen=True)
class LayerLoad:
    """Work that the rows of one decode layer ask for."""

    hot: dict[int, tuple[int, float]]  # expert -> (rows, gate weight of them all)
    cold: dict[tuple[int, int], int]  # (expert, bits) -> rows
    message: tuple[int, int]  # distinct rows with a cold pair, and cold pairs
    rows: int = 0  # of the layer, which all go through its shared experts
    host_ps: int = 0  # what the host's CPU takes for warm experts, whatever becomes of hot ones

    @property
    def lightest_first(self) -> list[int]:
        """Hot experts, least gate weight first."""
        return sorted(self.hot, key=lambda expert: (self.hot[expert][1], expert))


@dataclass(frozen=True)
class Balancer:
    """The rule for one model on one hardware; csrc/split.cpp is what decides by it where there is one device."""

    prices: Prices
    """Of this machine, or of the simulated hardware. `hot_ps(0)` is a layer's on the GPU beside its experts."""
    offload_bits: int
    hosts: int = 1
    """Hosts that share the device, this one included."""

    def fewest(self, load: LayerLoad, device_ps: Iterable[float]) -> frozenset[int]:
        """The hot experts of least weight that make the layer shortest, the fewest of equally good ones.

        device_ps: the device's time with the first 0, 1, 2, ... of `load.lightest_first` on it; it may end early.
        """
        order, prices = load.lightest_first, self.prices
        gpu_ps = [prices.shared_ps(load.rows)]
        for expert in reversed(order):
            launch_ps = prices.hot_ps(0) if len(gpu_ps) == 1 else 0.0
            gpu_ps.append(gpu_ps[-1] + (prices.hot_ps(load.hot[expert][0]) + launch_ps))
        best, best_ps = 0, float("inf")
        for count, ps in enumerate(device_ps if order else ()):
            layer_ps = max(together_ps(gpu_ps[-1 - count], ps, prices.beside), load.host_ps)
            if layer_ps < best_ps:
                best, best_ps = count, layer_ps
        return frozenset(order[:best])

    def device_ps(self, bits: int, rows: int) -> float:
        """Time that an expert with so many rows adds to the device's command, and to those of the other hosts."""
        return self.hosts * self.prices.expert_ps("device", bits, rows)

    def message_ps(self, rows: int, pairs: int) -> float:
        """Time of a message without its experts; it waits for those of the other hosts."""
        return self.hosts * self.prices.message_ps(rows, pairs)
