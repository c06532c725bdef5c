"""Ours: `balanced` (or the paper's system), and a new plan when decode shows another subject than the prompt.

Decode's own routing shows drift (planning/drift.py). Then experts are exchanged towards the new placement, one at a
time beside decode, the exchange that gains most first. A copy takes the link's idle time, so decode never waits. An
expert runs on the device until its copy is complete. Without drift nothing moves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import WIDTHS
from vllm_ndp.config import DEFAULT_OFFLOAD_BITS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.systems.adaptive import copies_per_step
from vllm_ndp.lab.systems.balanced import offload
from vllm_ndp.lab.systems.context_aware import finish, memory, plan_groups
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.outcome import Outcome, layer_factor
from vllm_ndp.planning.drift import DriftRules, DriftWatch
from vllm_ndp.planning.importance import ImportanceScore

EXECUTIONS = ("balanced", "paper")


def follow(
    batches: Batches, group: int, hot: NDArray[np.bool_], bits: NDArray[np.uint8], watch: DriftWatch, copies: float
) -> tuple[NDArray[np.uint8], int, int]:
    """(widths [B, D, L, k], exchanges, changes noticed) of one group. hot [L, E] and bits [B, L, E] change on the way.

    copies: exchanges of an expert (in all layers that one of the trace stands for) that fit beside one decode step."""
    _, b, d, layers, k = batches.shape
    widths = np.zeros((b, d, layers, k), np.uint8)
    wanted: ImportanceScore | None = None
    credit, exchanged = 0.0, 0
    which = np.arange(layers)[:, None]
    for step in range(d):
        running = np.flatnonzero(batches.valid[group, :, step])
        ids = batches.ids[group, running, step]
        widths[running, step] = bits[running[:, None, None], which, ids]
        if watch.see(ids):
            wanted = watch.wanted
        if wanted is None:
            continue
        credit = min(credit + copies, 1.0 + copies)
        while credit >= 1 and wanted is not None:
            coming = np.where(hot, -np.inf, wanted.values)
            leaving = np.where(hot, wanted.values, np.inf)
            newcomer, leaver = coming.argmax(axis=1), leaving.argmin(axis=1)
            gain = coming[which[:, 0], newcomer] - leaving[which[:, 0], leaver]
            layer = int(gain.argmax())
            if not gain[layer] > 0:
                wanted = None
                break
            new, old = int(newcomer[layer]), int(leaver[layer])
            hot[layer, new], hot[layer, old] = True, False
            bits[:, layer, old], bits[:, layer, new] = bits[:, layer, new], 0
            credit, exchanged = credit - 1, exchanged + 1
    return widths, exchanged, watch.noticed


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    execution = options.word("execution", EXECUTIONS[0], EXECUTIONS)
    rules = DriftRules(once_in=options.number("once_in", DriftRules.once_in, 2.0, 1e12))
    hot, before, planned = plan_groups(batches, options)
    g, b, d, layers, k = batches.shape
    copies = copies_per_step(batches, costs, planned)
    widths = np.zeros((g, b, d, layers, k), np.uint8)
    exchanged = noticed = 0
    for group in range(g):
        known = (batches.decodes if options.clairvoyant else batches.prompts)[group]
        scores = [options.policy.score(stats).values for stats in known]
        score = ImportanceScore.from_weights(np.mean(scores, axis=0))
        now, bits = hot[group].copy(), planned[group].copy()
        watch = DriftWatch(rules, now, score, options.prior)
        widths[group], moves, alarms = follow(batches, group, now, bits, watch, float(copies[group]))
        exchanged, noticed = exchanged + moves, noticed + alarms
    if execution == "balanced":
        spill = min(options.whole("spill_bits", DEFAULT_OFFLOAD_BITS, WIDTHS[0], WIDTHS[-1]), options.widest)
        widths = offload(batches, widths, costs, spill)
    copied = exchanged * layer_factor(batches, costs)
    outcome = finish("replanned", batches, costs, options, widths, hot, before, copied)
    outcome.policy += f", {execution}"
    outcome.notes.update(copies=exchanged, noticed=noticed)
    return outcome


REPLANNED = System(
    "replanned",
    (
        "drift is noticed from decode's own routing, bounded against false alarms; nothing moves before",
        "copies take the link's idle time, one expert at a time, as in `adaptive`",
    ),
    True,
    replay,
    memory,
    is_bounded=True,
)
