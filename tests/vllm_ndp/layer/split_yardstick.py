"""Where each pair of a layer runs, in numpy: what csrc/split.cpp must give to the bit."""

from dataclasses import dataclass, field

import balance_yardstick
import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.layer.balance import Balancer
from vllm_ndp.layer.devices import DevicesBalancer
from vllm_ndp.layer.prefill_split import PrefillSplit
from vllm_ndp.layer.split import PAIR_KINDS, Pairs
from vllm_ndp.layer.tiers import DEVICE, ELSEWHERE, STREAM, WARM


@dataclass
class Layer:
    """What is known of one layer of a step: T rows of k pairs, R requests, E experts."""

    tiers: NDArray[np.int32]  # [E]
    ids: NDArray[np.int32]  # [T, k]
    weights: NDArray[np.float32]  # [T, k]
    owner: NDArray[np.int32]  # [T]
    decode: NDArray[np.bool_]  # [T]
    bits: NDArray[np.uint8]  # [R, E]
    gpus: NDArray[np.int64] | None = None  # [E]
    hot_bytes: NDArray[np.int64] | None = None  # [E]
    from_weight: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # request -> [E, 3]


@dataclass
class Found:
    where: NDArray[np.int32]  # [T, k]
    offloaded: frozenset[int]
    device: Pairs
    warm: Pairs
    stream: Pairs
    counts: NDArray[np.int64]  # [R, kinds]
    hot_loads: list[tuple[int, int]]
    hot_bytes: int
    copied: NDArray[np.int64]  # the expert of each pair in `stream` that is not hot
    host_ps: int


def split(
    layer: Layer,
    balancer: Balancer | DevicesBalancer | None,
    prompts: PrefillSplit | None,
    costs: Costs,
    *,
    weighs_input: bool,
    gathers_prompts: bool = False,
) -> Found:
    ids, decode = layer.ids.astype(np.int64), layer.decode[:, None]
    in_gpu = (layer.tiers >= 0) | (layer.tiers == ELSEWHERE)
    bits = _bits_of_rows(layer)
    is_warm = (layer.tiers == WARM)[ids] & decode
    warm_counts = np.unique(ids[is_warm], return_counts=True)[1].tolist()
    host_ps = costs.hop_ps(int(is_warm.any(axis=1).sum())) + sum(map(costs.cpu_expert_ps, warm_counts))
    offloaded = frozenset[int]()
    if balancer is not None and decode.all():
        load = balance_yardstick.load_of(in_gpu, ids, layer.weights, bits, layer.tiers == WARM, host_ps)
        one = isinstance(balancer, Balancer)
        offloaded = balance_yardstick.offloaded(balancer, load) if one else balancer.offloaded(load)
    where = layer.tiers[ids]
    where[np.isin(ids, list(offloaded))] = DEVICE
    where[~decode & ~in_gpu[ids]] = STREAM
    planned = np.take_along_axis(bits, ids, axis=1)
    if offloaded and balancer is not None:
        rule = balancer if isinstance(balancer, Balancer) else balancer.rule
        planned[planned == 0] = rule.offload_bits
    asked = (where == STREAM) if prompts is None or prompts.prices is None else np.broadcast_to(~decode, where.shape)
    if prompts is not None and not decode.all() and asked.any():
        sent = (where == DEVICE) & decode
        there = prompts.of_counts(*np.unique(ids[asked], return_counts=True), ids[sent], planned[sent])
        where[asked & np.isin(ids, there)] = DEVICE
    applied = np.ones_like(layer.weights) if weighs_input else layer.weights
    widths = np.where(decode & (where == DEVICE), planned, 16).astype(np.uint8)
    if prompts is not None:
        widths[~decode & (where == DEVICE)] = prompts.bits
    gathered = (where >= 0) & ~decode & gathers_prompts
    sides = where == DEVICE, where == WARM, (where == STREAM) | gathered
    device, warm, stream = (_pairs(side, ids, widths, applied) for side in sides)
    hot = (where >= 0) | (where == ELSEWHERE)
    touched = np.unique(ids[hot])
    gpus = np.zeros(len(layer.tiers), np.int64) if layer.gpus is None else layer.gpus
    most = int(gpus[touched].max(initial=-1)) + 1
    loads = [(int((gpus[touched] == gpu).sum()), int((gpus[ids[hot]] == gpu).sum())) for gpu in range(most)]
    hot_bytes = 0 if layer.hot_bytes is None else int(layer.hot_bytes[touched].sum())
    counts = _counts(layer, ids, where, offloaded)
    copied = ids[where == STREAM]
    where = np.where(gathered, STREAM, where)
    return Found(where, offloaded, device, warm, stream, counts, loads, hot_bytes, copied, host_ps)


def _bits_of_rows(layer: Layer) -> NDArray[np.uint8]:
    """[T, E], what each row's plan says of the experts that it chose, by the weight that each has there."""
    bits = layer.bits[layer.owner]
    for row, owner in enumerate(layer.owner.tolist()):
        for expert, weight in zip(layer.ids[row].tolist(), layer.weights[row], strict=True):
            if owner in layer.from_weight and 1 <= bits[row, expert] <= 4:
                bits[row, expert] = 1 + sum(weight >= least for least in layer.from_weight[owner][expert])
    return bits


def _pairs(
    chosen: NDArray[np.bool_], ids: NDArray[np.int64], widths: NDArray[np.uint8], applied: NDArray[np.float32]
) -> Pairs:
    rows = np.nonzero(chosen)[0]
    sent, local = np.unique(rows, return_inverse=True)
    return Pairs(sent, local.astype(np.int32), ids[chosen].astype(np.int32), widths[chosen], applied[chosen])


def _counts(
    layer: Layer, ids: NDArray[np.int64], where: NDArray[np.int32], offloaded: frozenset[int]
) -> NDArray[np.int64]:
    hot = (where >= 0) | (where == ELSEWHERE)
    moved = np.isin(ids, list(offloaded))
    decode = np.broadcast_to(layer.decode[:, None], where.shape)
    kinds = {
        "hot": hot & decode,
        "spilled": (where == DEVICE) & decode & moved,
        "cold": (where == DEVICE) & decode & ~moved,
        "warm": where == WARM,
        "prefill": (hot & ~decode) | (where == STREAM),
        "prefill_device": (where == DEVICE) & ~decode,
    }
    counts = np.zeros((len(layer.bits), len(PAIR_KINDS)), np.int64)
    for kind, chosen in kinds.items():
        np.add.at(counts[:, PAIR_KINDS.index(kind)], layer.owner, chosen.sum(axis=1))
    return counts
