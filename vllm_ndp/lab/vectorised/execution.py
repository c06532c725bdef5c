"""How long decode pairs and prompts take once it is settled where each pair runs. Vectorised over the whole trace.

A width of 0 means the GPU's full-precision expert, 1..4 or 16 the device at that many bits. SKIPPED (where losses are
counted): nothing computes the pair.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, each_case, each_ps
from vllm_ndp.lab.vectorised.batches import Batches, add_up, sums_before
from vllm_ndp.lab.vectorised.outcome import Cold, Outcome, Traffic, layer_factor
from vllm_ndp.layer.joint_rule import OF_ONE_BIT, losses_by_width
from vllm_ndp.planning.bitwidths import LossTable

Prompts = NDArray[np.bool_] | Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Experts, [L, E] or [G, L, E], that the GPU holds while prompts stream the others; or counts [L, E] of a prompt ->
[L], what the experts of each layer take."""
SKIPPED = FULL_PRECISION_BITS + 1
LOSS_OF_SKIPPING = 1 / (1 - 2 / np.pi)
"""Loss of an expert that is not computed at all, in units of its loss at 1 bit, if only that is known. The best one-bit
quantizer of a normal variable leaves 1 - 2 / pi of its energy (Max 1960); skipping leaves all of it."""


def run_pairs(
    batches: Batches, widths: NDArray[np.uint8], costs: Costs
) -> tuple[NDArray[np.float64], NDArray[np.float64], Traffic]:
    """(GPU's time, device's time, both [G, D, L], and what moves). widths [G, B, D, L, k]: where each pair runs.

    Experts of one side run one after the other."""
    g, b, d, layers, _ = batches.shape
    exist = np.broadcast_to(batches.pairs, widths.shape)
    # rows that chose the same expert at the same width share one read of it
    cell = np.arange(g * d * layers).reshape(g, 1, d, layers, 1)
    keys = ((cell * batches.num_experts + batches.ids) << 8) + widths
    distinct, counts = np.unique(keys[exist], return_counts=True)
    width = distinct & 255
    where = (distinct >> 8) // batches.num_experts

    def expert_ps(bits: int, tokens: int) -> float:
        return costs.device_expert_ps(bits, tokens) if bits else costs.gpu_expert_ps(tokens)

    cost, energy = each_case(width, counts, expert_ps), costs.device_energy(b)
    gpu, dev = (
        np.bincount(where, weights=cost * side, minlength=cell.size).astype(np.float64).reshape(g, d, layers)
        for side in (width == 0, width > 0)
    )
    per_row = add_up((widths > 0) & exist)
    pairs, rows = per_row.sum(axis=1), (per_row > 0).sum(axis=1)
    dev += np.where(rows > 0, each_case(rows, pairs, costs.link_ps) + costs.device_fill_ps, 0.0)
    reads = np.bincount(width * (b + 1) + counts, minlength=energy[0].size).reshape(energy[0].shape)
    dram_pj, arrays_pj = (energy * reads).sum(axis=(1, 2))
    traffic = Traffic(
        hbm_bytes=float(reads[0].sum()) * costs.shape.expert_bytes,
        link_bytes=float(each_case(rows, pairs, costs.message_wire_bytes).sum()),
        device_dram_pj=float(dram_pj),
        device_arrays_pj=float(arrays_pj),
    )
    return launched(gpu, costs) + shared_ps(batches, costs), dev, traffic


def launched(compute_ps: NDArray[np.float64], costs: Costs, expert_bytes: int | None = None) -> NDArray[np.float64]:
    """[...]: what the GPU takes for a layer's experts, with its launch where it computes any at all."""
    times: NDArray[np.float64] = compute_ps + np.where(compute_ps > 0, costs.launch_ps(expert_bytes), 0)
    return times


def here_ps(costs: Costs, rows: NDArray[np.int64], expert_bytes: int | None = None) -> NDArray[np.float64]:
    """[G, D, L]: what experts of so many rows [G, D, L, S] take in GPU memory, each of that size."""
    each = each_ps(rows, partial(costs.gpu_expert_ps, num_bytes=expert_bytes))
    return launched(add_up(each), costs, expert_bytes)


def shared_ps(batches: Batches, costs: Costs) -> NDArray[np.float64]:
    """Time of the shared experts of one layer in each step [G, D, 1]."""
    return each_ps(batches.rows, costs.shared_ps)[:, :, None]


def with_copies(
    compute_ps: NDArray[np.float64],
    missing: NDArray[np.bool_],
    costs: Costs,
    *,
    before_ps: NDArray[np.float64] | float = 0.0,
    copy_ps: NDArray[np.float64] | float | None = None,
) -> NDArray[np.float64]:
    """[...]: a layer whose missing experts are copied to the GPU; one rule by which every system pays its fetches.

    compute_ps and missing [..., S]; copy_ps [..., S] or one number: each copy's time on the link, a whole expert's
    unless told otherwise. Copies are handed over together, as prompts stream: one launch, then one after the other at
    the rate of long copies, what computes longest first. The GPU computes what is there meanwhile; an expert computes
    once it has arrived. So the layer ends with the last of three. These are all its compute; the first copy and the
    compute of all copied experts; the last copy and the shortest such compute. That is exact for copies of equal
    length, and where a copy takes longer than its compute. `before_ps`: time into the layer that earlier copies keep
    the link busy. The layer's launch passes while copies arrive.
    """
    copies = np.broadcast_to(costs.copy_ps if copy_ps is None else copy_ps, missing.shape)
    free = before_ps + costs.copy_opening_ps
    waiting, link = (add_up(np.where(missing, of, 0.0)) for of in (compute_ps, copies))
    lightest, shortest = (np.where(missing, of, np.inf).min(axis=-1) for of in (compute_ps, copies))
    ends = np.maximum(free + shortest + waiting, free + link + lightest)
    every = launched(add_up(compute_ps), costs)
    times: NDArray[np.float64] = np.maximum(every, np.where(np.isfinite(ends), ends, 0.0))
    return times


def copied_in_order(
    compute_ps: NDArray[np.float64], resident_ps: NDArray[np.float64], costs: Costs
) -> NDArray[np.float64]:
    """Times [..., S + 1] by the same rule; entry h: the GPU gets copies of the first h experts of compute_ps [..., S].

    compute_ps falls along S; zeros at its end are no experts. resident_ps [..., 1]: of the GPU's other experts.
    """
    span = compute_ps.shape[-1]
    every = sums_before(compute_ps)
    copies = np.minimum(np.arange(span + 1), (compute_ps > 0).sum(axis=-1, keepdims=True))
    lightest = np.minimum.accumulate(np.where(compute_ps > 0, compute_ps, np.inf), axis=-1)
    last = np.concatenate([np.zeros_like(compute_ps[..., :1]), lightest], axis=-1)
    link = costs.copy_opening_ps + copies * costs.copy_ps
    ends = np.maximum(costs.copy_opening_ps + costs.copy_ps + every, link + last)
    times: NDArray[np.float64] = np.maximum(launched(resident_ps + every, costs), np.where(copies > 0, ends, 0.0))
    return times


def without_device(
    policy: str,
    batches: Batches,
    costs: Costs,
    loss: LossTable,
    moe_ps: NDArray[np.float64],
    *,
    found: NDArray[np.bool_] | int,
    prompts: Prompts,
    fetched: float = 0.0,
    bits: NDArray[np.int64] | int = FULL_PRECISION_BITS,
    on_host: NDArray[np.bool_] | bool = False,
    crossing: float = 0.0,
    traffic: Traffic | None = None,
    cold: Cold | None = None,
) -> Outcome:
    """Outcome of a system whose experts run on the GPU or the host's CPU.

    `moe_ps` [G, D, L]: without shared experts. `found`: slots whose expert was in GPU memory, or how many pairs were.
    `fetched`: whole experts that crossed the link in decode, in the trace's layers. `bits` and `on_host`, of each
    slot or of all: width of its expert, and whether the CPU reads it. `crossing`: rows whose activations go to the CPU
    and back. Loss and traffic follow from these unless given.
    """
    g, _, d, layers, _ = batches.shape
    loads, shape, on_host = batches.loads, costs.shape, np.broadcast_to(on_host, batches.loads.rows.shape)
    if cold is None:
        widths = np.where(on_host, bits, np.asarray(bits) % FULL_PRECISION_BITS)
        cold = cold_at(batches, loads.of_pairs(widths), loss) if widths.any() else Cold()
    if traffic is None:
        read = np.where(loads.rows > 0, costs.bytes_of_width[bits], 0)
        traffic = Traffic(
            hbm_bytes=float(read[~on_host].sum()),
            host_bytes=float(read[on_host].sum()),
            link_bytes=2.0 * crossing * shape.hidden_size * shape.dtype_bytes,
        )
    return Outcome(
        policy=policy,
        moe_ps=moe_ps + shared_ps(batches, costs),
        device_ps=np.zeros((g, d, layers)),
        prefill_ps=prompts_ps(batches, costs, prompts),
        migrated_bytes=fetched * layer_factor(batches, costs) * shape.expert_bytes,
        hot_pairs=found if isinstance(found, int) else int(loads.rows[found].sum()),
        cold=cold,
        traffic=traffic,
    )


def cold_at(batches: Batches, widths: NDArray[np.integer] | int, known: LossTable) -> Cold:
    """widths [G, B, D, L, k] or of all pairs: 0 on the GPU in full precision, 16 elsewhere in full precision."""
    widths = np.broadcast_to(np.asarray(widths, np.uint8), batches.ids.shape)
    cold = widths[(widths > 0) & batches.pairs]
    return Cold(float(cold.sum()), len(cold), gate_loss(batches, widths, known))


def gate_loss(batches: Batches, widths: NDArray[np.integer], known: LossTable) -> float:
    """Mean over decode pairs of gate x loss of the width it ran at, in units of that expert's loss at 1 bit.

    In its own units because output energies of experts differ by many orders. An expert that serves only the first
    token of a text can outweigh all others together. 0 in full precision.
    """
    if not (widths % FULL_PRECISION_BITS).any():
        return 0.0
    by_width = losses_by_width(known, OF_ONE_BIT)
    table = np.insert(by_width, SKIPPED, LOSS_OF_SKIPPING, axis=2)
    layers, experts, columns = table.shape
    rows = (np.arange(layers)[:, None] * experts + batches.ids) * columns
    lost = table.ravel().take(rows + widths) * batches.weights
    return float((lost * batches.pairs).sum() / (batches.valid.sum() * layers))


def prompts_ps(batches: Batches, costs: Costs, prompts: Prompts) -> NDArray[np.float64]:
    """[G, B], each prompt of the whole model. What the GPU does not hold is streamed in full precision, beside shared
    and resident experts."""
    g, b, _, layers, _ = batches.shape
    out = np.zeros((g, b))
    for group, request in np.ndindex(g, b):
        stats = batches.prompts[group][request]
        rows, counts, shared = stats.num_tokens, stats.counts, costs.shared_ps(stats.num_tokens)
        if isinstance(prompts, np.ndarray):
            here = prompts if prompts.ndim == 2 else prompts[group]
            hot, cold = np.where(here, counts, 0), np.where(here, 0, counts)
            resident = each_case((hot > 0).sum(axis=1), hot.sum(axis=1), costs.resident_ps)
            streamed = each_case((cold > 0).sum(axis=1), cold.sum(axis=1), costs.streamed_ps)
            experts = np.maximum(shared + resident, streamed).sum()
        else:
            experts = prompts(counts).sum() + layers * shared
        before = costs.gpu.before_experts_ps(rows, rows, rows * (rows + 1) // 2, [(0, rows)])
        beside = sum(before) + costs.shape.num_layers * costs.overhead_ps
        out[group, request] = layer_factor(batches, costs) * experts + beside + costs.gpu.head_ps(1)
    return out


def on_gpu_ps(costs: Costs, expert_bytes: int, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """[...], the experts of counts [..., E] in GPU memory, each used one read once at that size."""
    touched, pairs = (counts > 0).sum(axis=-1), counts.sum(axis=-1)
    return each_case(touched, pairs, lambda n, rows: costs.gpu.experts_ps(n, rows, n * expert_bytes))


def streamed_ps(costs: Costs, expert_bytes: int, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same where each used one comes over the link, one after the other, while others compute."""
    copies = (counts > 0).sum(axis=-1) * costs.fetch_ps(expert_bytes)
    times: NDArray[np.float64] = np.maximum(copies, on_gpu_ps(costs, expert_bytes, counts))
    return times
