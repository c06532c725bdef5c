"""How long until the first token: cold experts of a prompt streamed, or split between streaming and the device.

Simulated for whole published models on synthetic routing, half of the experts hot (vllm_ndp/lab). With --model also
live, on both clocks: stock vLLM, streamed and split, one engine each at the same time, asked in turns, so that
whatever else the machine does meets all of them. The time of a length is the median of its rounds.

    python benchmarks/prefill_sides.py
    python benchmarks/make_random_mixtral.py MODEL --hidden 4096 --intermediate 14336 --layers 1 --experts 8
    python benchmarks/prefill_sides.py --model MODEL [--replicas REPLICAS] [--pool packed] [--rounds 3]

Simulated: of one prompt alone on a machine whose hot set is what the prompts before left. "Both" is the time until the
hot set has moved too, after which the second token can begin. Prints tables, then one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arm import Arm, answer
from measured import Measurement, add_json_option
from rich.console import Console
from rich.table import Table

LENGTHS = (16, 64, 256, 1024)
MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
KINDS = ("streamed", "split")
LIVE = ("stock", *KINDS)
MEASURED = "measured"
"""Split by this machine's own prices."""
FIRST_TOKEN_ID = 3  # below: unknown, begin and end of text
MS_PER_PS = 1e-9


def simulated(model: str, length: int, requests: int) -> dict[str, Any]:
    """Mean over prompts: milliseconds until the first token, and until the hot set has moved too."""
    from ndp_device.timing.spec import load_hardware
    from vllm_ndp.lab.systems import SYSTEMS, ReplayOptions
    from vllm_ndp.lab.vectorised.batches import Batches
    from vllm_ndp.planning.bitwidths import LossTable
    from vllm_ndp.planning.importance import ImportanceScore
    from vllm_ndp.planning.plan import Budget
    from vllm_ndp.planning.policies import PolicySettings, load_policy
    from vllm_ndp.simulation.costs import Costs, model_named
    from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace

    costs = Costs(load_hardware("h100-ndp512"), model_named(model))
    shape, layers = costs.shape, 4
    settings = SyntheticSettings(
        layers, shape.num_experts, shape.top_k, num_requests=requests, prompt_len=length, decode_len=2
    )
    batches = Batches.of(synthetic_trace(settings, model))
    found: dict[str, Any] = {"model": model, "tokens": length}
    for kind in KINDS:
        options = ReplayOptions(
            policy=load_policy("prefill", PolicySettings()),
            budget=Budget(shape.num_experts // 2, 3.0),
            loss=LossTable.nominal(layers, shape.num_experts),
            prior=ImportanceScore.from_weights(np.ones((layers, shape.num_experts))),
            migration="kept",
            own={"prefill": kind},
        )
        outcome = SYSTEMS["balanced"].replay(batches, costs, options)
        first, moved = outcome.prefill_ps[:, 0], outcome.migration_ps
        found[f"simulated_{kind}_ttft_ms"] = round(float(first.mean()) * MS_PER_PS, 3)
        found[f"simulated_{kind}_both_ms"] = round(float((first + moved).mean()) * MS_PER_PS, 3)
    return found


# -- live ------------------------------------------------------------------------------------------------------------


def serve(kind: str, arguments: argparse.Namespace) -> None:
    """A child: one engine, which is asked with a prompt and answers with its times."""
    from vllm import LLM, SamplingParams

    engine: dict[str, Any] = {}
    if kind != "stock":
        ndp = {"prefill": kind, "pool": arguments.pool, "deadline_ms": 60_000.0}
        ndp |= {"prefill": "split", "prices": "measured"} if kind == MEASURED else {}
        ndp |= {"cold_precision": "full"} if arguments.replicas is None else {"replicas": str(arguments.replicas)}
        engine = {"quantization": "ndp", "additional_config": {"ndp": ndp}}
    longest = max(arguments.lengths)
    llm = LLM(
        str(arguments.model),
        dtype="bfloat16",
        max_model_len=longest + 32,
        max_num_batched_tokens=longest,
        max_num_seqs=1,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        disable_log_stats=True,
        enable_prefix_caching=False,
        **engine,
    )
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    numbers = itertools.count()

    def first_token(prompt: list[int]) -> dict[str, Any]:
        begin, first_s = time.perf_counter(), 0.0
        llm.llm_engine.add_request(str(next(numbers)), {"prompt_token_ids": prompt}, params)
        times: dict[str, Any] = {}
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                first_s = first_s or time.perf_counter() - begin
                if output.finished and kind != "stock":
                    report = output.kv_transfer_params["ndp"]
                    kept = ("simulated_ttft_us", "prefill_pairs", "prefill_device_pairs", "fallback_pairs")
                    times |= {name: report[name] for name in kept}
        return times | {"measured_ttft_ms": first_s * 1e3}

    answer(first_token)
    llm.llm_engine.engine_core.shutdown()


def start_child(kind: str, arguments: argparse.Namespace) -> Arm:
    words = [sys.executable, __file__, "--child", kind, "--model", str(arguments.model), "--pool", arguments.pool]
    words += ["--lengths", ",".join(map(str, arguments.lengths))]
    words += [] if arguments.replicas is None else ["--replicas", str(arguments.replicas)]
    return Arm(words)


def live(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    vocabulary = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    kinds = (*LIVE, MEASURED) if arguments.measured else LIVE
    children = {kind: start_child(kind, arguments) for kind in kinds}
    try:
        times: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for turn in range(arguments.rounds + 1):  # in the first one pages and kernels get ready
            for length in arguments.lengths:
                prompt = rng.integers(FIRST_TOKEN_ID, vocabulary, length).tolist()
                for kind, child in children.items():
                    if turn:
                        times.setdefault((kind, length), []).append(child.ask(prompt))
                    else:
                        child.ask(prompt)
    finally:
        for child in children.values():
            child.close()
    return [_row(length, {kind: times[kind, length] for kind in kinds}) for length in arguments.lengths]


def _row(length: int, times: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": length}
    for kind, of_kind in times.items():
        row[f"measured_{kind}_ttft_ms"] = round(statistics.median(one["measured_ttft_ms"] for one in of_kind), 1)
        if kind != "stock":
            row[f"simulated_{kind}_ttft_us"] = round(statistics.median(one["simulated_ttft_us"] for one in of_kind), 1)
            ratios = [
                stock["measured_ttft_ms"] / one["measured_ttft_ms"]
                for stock, one in zip(times["stock"], of_kind, strict=True)
            ]
            row[f"{kind}_over_stock"] = round(statistics.median(ratios), 3)
            row[f"{kind}_fallback_pairs"] = sum(one["fallback_pairs"] for one in of_kind)
    prompts = times["split"]
    on_device = sum(one["prefill_device_pairs"] for one in prompts)
    row["device_share"] = round(on_device / (on_device + sum(one["prefill_pairs"] for one in prompts)), 3)
    return row


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint to run live too")
    parser.add_argument("--replicas", type=Path, help="of that model; without, cold experts stay in full precision")
    parser.add_argument("--pool", default="packed", choices=("packed", "checkpoint"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8, help="prompts of each length, simulated")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--measured", action="store_true", help="one engine more: split by prices of this machine")
    parser.add_argument("--child", choices=(*LIVE, MEASURED), help=argparse.SUPPRESS)
    add_json_option(parser)
    arguments = parser.parse_args()
    if arguments.child is not None:
        serve(arguments.child, arguments)
        return
    measurement = Measurement(__doc__)
    rows = [simulated(model, length, arguments.requests) for model in MODELS for length in arguments.lengths]
    show(rows, "simulated, whole models, h100-ndp512")
    figures: dict[str, Any] = {"simulated": rows}
    if arguments.model is not None:
        figures["live"] = live(arguments)
        show(figures["live"], "live: first token")
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
