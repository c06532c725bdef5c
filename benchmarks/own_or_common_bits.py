"""From how many running requests on do common bits with up to half a bit more beat bits of each request's own?

What `bits_for: auto` decides, at both ends: batches of 1 to 64 requests that decode together, `balanced` with 3-bit
offload, synthetic routing (signal 1), Mixtral-8x7B on h100-ndp512 with ideal DRAM, half of the experts hot. Each batch
twice: by the vectorised engine of `compare`, and step by step by the engine that a live run of the plugin equals to the
picosecond. Tokens/s of decode, and the loss that the plans expect of the choices that were made: step by step by
squares of router weights, as they count. Own bits are those of single pairs, as by default, or of experts. The
vectorised engine knows only the latter. Simulated.

    python benchmarks/own_or_common_bits.py [--batches 1,2,3,4,8,16,32,64] [--decode 16]
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np
from measured import Measurement, add_json_option
from quality import widths_of
from rich.console import Console
from rich.table import Table

from ndp_device.timing.spec import load_hardware
from vllm_ndp.lab.exact.modelled import modelled_host
from vllm_ndp.lab.exact.recorded import RecordedRun
from vllm_ndp.lab.systems import SYSTEMS, ReplayOptions
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.outcome import step_times
from vllm_ndp.planning.bitwidths import OF_PAIRS, OVER_LAYERS, LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.simulation.costs import Costs, model_named
from vllm_ndp.simulation.joint_menu import OF_ONE_BIT, losses_by_width
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace
from vllm_ndp.traces.trace import Trace

MODEL, HARDWARE, IDEAL = "mixtral-8x7b", "h100-ndp512", {"dram.kind": "ideal"}
LAYERS, EXPERTS, OFFLOAD = 32, 8, 3
MORE_BITS = (0.0, 0.25, 0.5)
ARMS = [
    (name, rule, bits_for, bits + more)
    for bits in (3.0, 2.0)
    for name, rule, bits_for, each in (
        ("own", OF_PAIRS, "request", (0.0,)),
        ("own of experts", OVER_LAYERS, "request", (0.0,)),
        ("common", OVER_LAYERS, "batch", MORE_BITS),
    )
    for more in each
]


def together(trace: Trace) -> Trace:
    """The same requests in one batch: prompts one after the other, then every step a token of each."""
    decoding = trace.position >= trace.prompt_len[trace.request]
    after = trace.position - trace.prompt_len[trace.request] + len(trace.prompt_len)
    step = np.where(decoding, after, trace.request).astype(np.int32)
    order = np.lexsort((trace.position, trace.request, step))
    columns = ("request", "position", "phase", "ids", "weights")
    return dataclasses.replace(trace, step=step[order], **{name: getattr(trace, name)[order] for name in columns})


def stepwise(trace: Trace, loss: LossTable, rule: str, bits_for: str, avg_bits: float) -> tuple[float, float]:
    """(tokens/s of decode, loss of the plans' bits; what is offloaded on top is not in it)."""
    policy, budget = load_policy("prefill", PolicySettings(bit_rule=rule)), Budget(EXPERTS // 2, avg_bits)
    rules = PlannerRules(policy, budget, loss, keeps_streamed=True, bits_for=bits_for)
    setup = modelled_host(trace.provenance, MODEL, HARDWARE, IDEAL, rules, offload_bits=OFFLOAD)
    host = RecordedRun(trace, setup, rules)
    runs = [host.run(step) for step in host.steps.tolist()][len(trace.prompt_len) :]
    decode_ps = runs[-1].time.end_ps - runs[0].time.start_ps
    table, lost, weight = losses_by_width(loss, OF_ONE_BIT), 0.0, 0.0
    for sequence, request in zip(trace.sequences, host.engine.requests, strict=True):
        assert request.plan is not None
        widths = widths_of(request.plan.bits, (sequence.decode_ids, sequence.decode_weights))
        square = np.square(sequence.decode_weights, dtype=np.float64)
        lost += float((square * table[np.arange(LAYERS)[:, None], sequence.decode_ids, widths]).sum())
        weight += float(square.sum())
    tokens = sum(len(sequence.decode_ids) for sequence in trace.sequences)
    return tokens / (decode_ps * 1e-12), lost / weight


def vectorised(trace: Trace, loss: LossTable, bits_for: str, avg_bits: float, batch: int) -> tuple[float, float]:
    options = ReplayOptions(
        policy=load_policy("prefill", PolicySettings()),
        budget=Budget(EXPERTS // 2, avg_bits),
        loss=loss,
        prior=ImportanceScore.from_weights(np.ones((LAYERS, EXPERTS))),
        bits_for=bits_for,
        migration="free",  # the hot set has moved before the first step that counts, as step by step
        own={"spill_bits": OFFLOAD},
    )
    costs, batches = Costs(load_hardware(HARDWARE, **IDEAL), model_named(MODEL)), Batches.of(trace, batch)
    outcome = SYSTEMS["balanced"].replay(batches, costs, options)
    decode_ps = float(step_times(outcome, batches, costs).sum())
    return int(batches.valid.sum()) / (decode_ps * 1e-12), float(outcome.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,2,3,4,8,16,32,64")
    parser.add_argument("--decode", type=int, default=16)
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement, loss, rows = Measurement(__doc__), LossTable.nominal(LAYERS, EXPERTS), []
    for batch in map(int, arguments.batches.split(",")):
        sizes = {"num_requests": batch, "prompt_len": 128, "decode_len": arguments.decode}
        trace = synthetic_trace(SyntheticSettings(LAYERS, EXPERTS, 2, **sizes, signal=1.0, seed=3))
        row: dict[str, Any] = {"requests": batch}
        for name, rule, bits_for, avg_bits in ARMS:
            steps, lost = stepwise(together(trace), loss, rule, bits_for, avg_bits)
            found = [round(steps, 1), round(lost, 4)]
            if rule != OF_PAIRS:
                whole, replayed = vectorised(trace, loss, bits_for, avg_bits, batch)
                found += [round(whole, 1), round(replayed, 4)]
            row[f"{name}, {avg_bits:g} bits"] = found
        rows.append(row)
    table = Table(
        title="tokens/s as live (loss of the plan) | vectorised (loss, offload included)", title_justify="left"
    )
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = (
            " | ".join(f"{v[i]:.0f} ({v[i + 1]:.3f})" for i in range(0, len(v), 2)) if isinstance(v, list) else str(v)
            for v in row.values()
        )
        table.add_row(*cells)
    Console(width=160).print(table)
    measurement.end({"rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
