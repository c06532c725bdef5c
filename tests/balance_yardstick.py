"""The rule of layer/balance.py for one device in Python: what csrc/split.cpp must decide to the bit."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.layer.balance import Balancer, LayerLoad


def load_of(
    is_hot: NDArray[np.bool_],
    ids: NDArray[np.int64],
    gates: NDArray[np.float32],
    bits: NDArray[np.uint8],
    is_warm: NDArray[np.bool_] | None = None,
    host_ps: int = 0,
) -> LayerLoad:
    """is_hot and is_warm [E]; ids and gates [T, k]; bits [T, E], each row's plan of this layer."""
    here = is_hot[ids]
    counts = np.bincount(ids[here], minlength=len(is_hot))
    mass = np.bincount(ids[here], weights=gates[here], minlength=len(is_hot))
    rows, columns = np.nonzero(~here if is_warm is None else ~(here | is_warm[ids]))
    experts = ids[rows, columns].astype(np.int64)
    keys, cold_counts = np.unique((experts << 8) | bits[rows, experts], return_counts=True)
    hot = {int(e): (int(counts[e]), float(mass[e])) for e in np.flatnonzero(counts)}
    cold = {(int(key) >> 8, int(key) & 255): int(count) for key, count in zip(keys, cold_counts, strict=True)}
    return LayerLoad(hot, cold, (len(np.unique(rows)), len(rows)), len(ids), host_ps)


def offloaded(rule: Balancer, load: LayerLoad) -> frozenset[int]:
    """The hot experts that run on the device in this layer; empty where nothing is gained."""
    return rule.fewest(load, _device_ps(rule, load))


def _device_ps(rule: Balancer, load: LayerLoad) -> Iterator[float]:
    device_ps = moved = 0.0
    for (_, bits), rows in load.cold.items():  # not sum(): Python 3.12 and later add floats in another way
        device_ps += rule.device_ps(bits, rows)
    if load.cold:
        device_ps += rule.message_ps(*load.message)
    yield device_ps
    opening = 0.0 if load.cold else rule.message_ps(1, 1)
    for expert in load.lightest_first:
        moved += rule.device_ps(rule.offload_bits, load.hot[expert][0])
        yield device_ps + moved + opening
