"""How many routing decisions per second does the lab record and replay?

    python benchmarks/lab_speed.py [--model mixtral-8x7b] [--requests 64] [--rounds 5]

Recording: token-layer rows per second through TraceWriter, closing included, in steps of 1, 8 and 64 rows; of wall time
beside what the disk takes for the same bytes, and of CPU time. Replay: (token, layer) decisions per second of CPU time
at batch 1, planning included, one row per system and variant that `compare` shows; and arranging the trace for them. Of
each the best of the rounds, which take turns. A synthetic trace of the model's shape. Last line of stdout: one JSON
object.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.compare import VARIANTS, popularity, split_requests
from vllm_ndp.lab.systems import SYSTEMS, ReplayOptions
from vllm_ndp.lab.systems.system import System, TooFewPlaces
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.traces.recorder import TraceWriter
from vllm_ndp.traces.synthetic import read_routing, synthetic_trace
from vllm_ndp.traces.trace import Trace

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measured import Measurement, add_json_option

ROWS_PER_STEP = (1, 8, 64)
MOST_STEPS = 4000


def recording(trace: Trace, rows_per_step: int) -> dict[str, float]:
    """The trace in steps of so many rows, as a serving run would hand them over."""
    num_rows = min(len(trace.step), MOST_STEPS * rows_per_step)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trace"
        started, used = time.perf_counter(), time.process_time()
        with TraceWriter(out, trace.provenance) as writer:
            for request, prompt_len in enumerate(trace.prompt_len.tolist()):
                writer.add_request(request, str(request), prompt_len)
            for step, start in enumerate(range(0, num_rows, rows_per_step)):
                rows = slice(start, min(start + rows_per_step, num_rows))
                columns = (trace.request[rows], trace.position[rows], trace.phase[rows])
                writer.append_step(step, *columns, trace.ids[rows], trace.weights[rows])
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - used
        num_bytes = sum(file.stat().st_size for file in out.iterdir())
        started = time.perf_counter()
        with (Path(folder) / "plain").open("wb") as file:
            file.write(os.urandom(num_bytes))
            file.flush()
            os.fsync(file.fileno())
        disk = time.perf_counter() - started
    token_layers = num_rows * trace.provenance.num_layers
    return {
        "token_layer_rows_per_s": token_layers / seconds,
        "token_layer_rows_per_cpu_s": token_layers / cpu_seconds,
        "bytes_per_token_layer_row": num_bytes / token_layers,
        "plain_write_of_the_same_bytes_s": disk,
        "seconds": seconds,
    }


def fitting(system: System, batches: Batches, costs: Costs, options: ReplayOptions) -> ReplayOptions:
    """The options, with a place for every expert where the system cannot do with fewer."""
    try:
        system.replay(batches, costs, options)
    except TooFewPlaces:
        num_experts = options.prior.values.shape[1]
        return replace(options, budget=replace(options.budget, num_hot=num_experts))
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mixtral-8x7b")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(__doc__)
    settings = read_routing("", arguments.model).settings(
        arguments.model, num_requests=arguments.requests, prompt_len=128, decode_len=256
    )
    trace = synthetic_trace(settings, arguments.model)
    recorded = {str(rows): recording(trace, rows) for rows in ROWS_PER_STEP}
    known, rest = split_requests(trace)
    prior, batches = popularity(known), Batches.of(rest)
    costs = Costs(load_hardware("h100-ndp512"), model_named(arguments.model))
    costs.device_expert_ps(2, 1)  # not part of any replay: asked once per model and hardware
    options = ReplayOptions(
        policy=load_policy("prefill", PolicySettings(prior=prior)),
        budget=Budget(settings.num_experts // 2, 2.0),
        loss=LossTable.nominal(settings.num_layers, settings.num_experts),
        prior=prior,
    )
    table = Table(title=f"{batches.num_decisions:,} decisions, {arguments.model}, load {np.round(os.getloadavg(), 1)}")
    table.add_column("system")
    table.add_column("decisions/s of CPU time", justify="right")
    variants = {
        " ".join([system.name, *map(str, own.values())]): (
            system,
            fitting(system, batches, costs, replace(options, own=own)),
        )
        for system in SYSTEMS.values()
        for own in VARIANTS.get(system.name, ({},))
    }
    speeds = dict.fromkeys(variants, 0.0)
    arranging = 0.0
    for _ in range(arguments.rounds):
        started = time.process_time()
        replace(batches).loads  # noqa: B018  arranged anew: a value keeps its own
        arranging = max(arranging, batches.num_decisions / (time.process_time() - started))
        for name, (system, chosen) in variants.items():
            started = time.process_time()
            system.replay(batches, costs, chosen)
            speeds[name] = max(speeds[name], batches.num_decisions / (time.process_time() - started))
    for name, speed in speeds.items():
        table.add_row(name, f"{speed:,.0f}")
    table.add_row("arranging the trace, once for all systems", f"{arranging:,.0f}")
    Console().print(table)
    for rows, figure in recorded.items():
        wall, cpu = figure["token_layer_rows_per_s"], figure["token_layer_rows_per_cpu_s"]
        print(f"recording, {rows} rows a step: {wall:,.0f} token-layer rows/s of wall time, {cpu:,.0f} of CPU time")
    figures = {
        "model": arguments.model,
        "decisions": batches.num_decisions,
        "recording": recorded,
        "decisions_per_cpu_s": speeds,
        "arranged_per_cpu_s": arranging,
    }
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
