"""A trace as one HTML page and as a Perfetto file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.analysis import analyse
from vllm_ndp.lab.compare import CompareSettings, Workload, compare
from vllm_ndp.lab.exact.live import recorded_rules
from vllm_ndp.lab.exact.modelled import modelled_host
from vllm_ndp.lab.exact.recorded import RecordedRun
from vllm_ndp.lab.exact.timeline import chrome_trace
from vllm_ndp.lab.frontier import frontier, frontier_of_shapes
from vllm_ndp.lab.report.page import Findings, render
from vllm_ndp.lab.vectorised.outcome import Summary
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.trace import Trace

SWEEP_BITS = (1.5, 2.0, 3.0)


def write_report(
    trace: Trace, settings: CompareSettings, out: Path, loss: LossTable | None = None, shapes: Sequence[str] = ()
) -> dict[str, object]:
    """Analyse, compare and draw; returns what the command prints last. shapes: public models to map too."""
    costs = Costs(load_hardware(settings.hardware, **settings.overrides), model_named(settings.model))
    of_shapes = frontier_of_shapes(shapes, settings)
    comparison = compare(trace, settings, loss=loss)
    analysis = analyse(trace, settings.num_hot)
    sweep: list[Summary] = []
    for bits in SWEEP_BITS:
        at = dataclasses.replace(settings, avg_bits=bits, batches=settings.batches[:1])
        systems = tuple(name for name in ("context_aware", "balanced", "adaptive") if name in settings.systems)
        rows = compare(trace, dataclasses.replace(at, systems=systems), loss=loss).rows if systems else []
        sweep += [dataclasses.replace(row, policy=f"{row.policy}@{bits}") for row in rows]
    cells = frontier(Workload(trace), settings, loss=loss)
    page = render(trace, Findings(analysis, comparison, sweep, cells, of_shapes), settings, costs)
    out.write_text(page, encoding="utf-8")
    return {
        "report": str(out),
        "bytes": len(page.encode()),
        "systems": len({row.system for row in comparison.rows}),
        "coverage": {name: value.mean for name, value in analysis.coverage.items()},
    }


def write_timeline(trace: Trace, settings: CompareSettings, out: Path, loss: LossTable, steps: int) -> int:
    """The first steps of the trace for Perfetto, run exactly; returns how many."""
    p = trace.provenance
    if p.live is not None:
        rules = recorded_rules(trace, loss)
        setup = p.live
    else:
        num_hot = p.num_experts // 2 if settings.num_hot is None else settings.num_hot
        policy = load_policy("prefill", PolicySettings(bit_rule=settings.bits))
        rules = PlannerRules(policy, Budget(num_hot, settings.avg_bits), loss, keeps_streamed=False)
        setup = modelled_host(p, settings.model, settings.hardware, settings.overrides, rules)
    recorded = RecordedRun(trace, setup, rules)
    runs = [recorded.run(int(step)) for step in islice(recorded.steps, steps)]
    moved = {r.step: r.migration_ps for r in runs if r.migrated_experts}
    measured = trace.events["measured_step_s"][: len(runs)].tolist() if trace.events else []
    out.write_text(json.dumps(chrome_trace(runs, measured, moved)), encoding="utf-8")
    return len(runs)


__all__ = ["write_report", "write_timeline"]
