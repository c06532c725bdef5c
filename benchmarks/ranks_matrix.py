"""Does the plugin give the same tokens however many ranks run the model, whoever starts them, compiled or not?

    python benchmarks/ranks_matrix.py --json docs/measured/ranks_matrix.json                    every cell
    python benchmarks/ranks_matrix.py --executors mp --forms eager --modes TP1 TP2 --json FILE  some of them
    python benchmarks/ranks_matrix.py --wall 3 --modes TP1 TP2 --json FILE                      stock's time, in turns

Each cell is an engine of its own, fp32, greedy, 4 prompts in two passes: chunked prefill, then prefix cache. Cells that
FILE holds of today's sources are kept; those of earlier ones that are not asked for say so. `identity` computes every
expert in full precision and is compared with stock vLLM in one process, and with stock of the same ranks and form where
its CPU build runs them.
`quantized` is compared with the plugin in one process, eager, at the same settings. Of a pipeline, two batches are in
flight, so other requests decode while a prompt ends, and plans change at other tokens: `alone` sends one request after
the other, in both. Engines and workers are forked from this process, which has imported vLLM once; Ray starts its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measured import Measurement, add_json_option, commit

ROOT = Path(__file__).resolve().parents[1]
MODEL, REPLICAS = ROOT / "models" / "tiny-mixtral", ROOT / "models" / "tiny-mixtral-replicas"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
MODES: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": TWO_RANKS,
    "EP2": TWO_RANKS | {"enable_expert_parallel": True},
    "PP2": {"pipeline_parallel_size": 2},
    "TP2 x PP2": TWO_RANKS | {"pipeline_parallel_size": 2},
    "DP2": {},
}
BESIDE: dict[str, dict[str, Any]] = {
    "TP2, two devices": TWO_RANKS,
    "TP2, two halves of experts": TWO_RANKS,
    "n-gram drafts, TP1": {"speculative_config": NGRAM},
    "n-gram drafts, TP2": TWO_RANKS | {"speculative_config": NGRAM},
}
DEVICES_OF: dict[str, dict[str, Any]] = {
    "TP2, two devices": {"devices": 2},
    "TP2, two halves of experts": {"devices": 2, "device_experts": "split"},
}
FAMILIES = ("qwen2_moe", "deepseek_v3")
"""With shared experts, behind a gate and without; tiny ones of benchmarks/make_family_models.py."""
BESIDE |= {f"{family}, {mode}": MODES[mode] for family in FAMILIES for mode in ("TP2", "EP2")}
"""Not of the matrix, but of the same page: mp, eager, identity."""
FORMS: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "identity": {"cold_precision": "full", "hot_experts": 3},
    # a rule for each layer: by default bits are dealt over all layers that a process has, and a stage has its own
    "quantized": {
        "hot_experts": 4,
        "avg_bits": 2.0,
        "replicas": str(REPLICAS),
        "policy_options": {"bit_rule": "importance"},
    },
}
SETTINGS["alone"] = SETTINGS["quantized"]
EXECUTORS = ("mp", "ray")
STOCK_CANNOT = {
    ("EP2", "eager"): "segmentation fault: its CPU kernel ignores the expert map",
    ("EP2", "compiled"): "segmentation fault: its CPU kernel ignores the expert map",
    ("PP2", "eager"): "assert self.intermediate_tensors is not None",
    ("TP2 x PP2", "eager"): "assert self.intermediate_tensors is not None",
    ("DP2", "eager"): "all_gatherv is not implemented",
    ("DP2", "compiled"): "all_gatherv is not implemented",
}
"""Why stock vLLM's CPU build gives nothing to compare with at the same ranks and form; Ray it refuses altogether."""
PROMPTS = (
    "def parse(line):\n    parts = line.split(',')\n    for part in parts:\n        if not part:\n",
    "static void free_list(struct node *head)\n{\n    while (head) {\n        struct node *next = head->next;\n",
    "She had always wished to see the sea, and now that the carriage stood at the door she could hardly",
    "CREATE TABLE orders (id integer PRIMARY KEY, total numeric); The table is created in the current schema",
)
OF_REPLICA = ((0, 2), (1, 3))
"""Which prompts each of two replicas of data parallelism gets."""
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "disable_log_stats": True,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
PATIENCE_S = 1200.0
RAY_GAVE_UP = "The current node timed out during startup"
Result = dict[str, Any]
"""`passes` [pass][prompt][token], `totals` by rank, `seconds` by pass; or `failed`: why not, and the `log`."""


# -- one engine --------------------------------------------------------------------------------------------------------


def run_engine(
    options: dict[str, Any], settings: dict[str, Any] | None, prompts: list[int], tokens: int, num_passes: int
) -> Result:
    """Tokens of the passes, how long each took, and what each rank counted."""
    import vllm.v1.executor.multiproc_executor as executor
    from vllm import LLM, SamplingParams

    executor.get_mp_context = lambda: multiprocessing.get_context("fork")  # workers have what we have imported
    plugin: dict[str, Any] = {}
    if settings is not None:
        ndp = {"deadline_ms": 20_000.0} | settings
        plugin = {"quantization": "ndp", "additional_config": {"ndp": ndp}}
    llm = LLM(**({"model": str(MODEL)} | ENGINE | plugin | options))
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    passes, seconds = [], []
    for _ in range(num_passes):
        begun = time.perf_counter()
        outputs = llm.generate([PROMPTS[at] * 4 for at in prompts], sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
        passes.append([list(output.outputs[0].token_ids) for output in outputs])
    totals = llm.collective_rpc("ndp_totals") if settings is not None else []
    llm.llm_engine.engine_core.shutdown()
    return {"passes": passes, "totals": totals, "seconds": seconds}


def forked(environments: list[dict[str, str]], act: Callable[[int], Result]) -> list[Result]:
    """act(i) in a process of its own for each environment, all at once."""
    with tempfile.TemporaryDirectory() as directory:
        outs = [Path(directory) / f"{at}.json" for at in range(len(environments))]
        logs = [out.with_suffix(".log") for out in outs]
        pids = []
        for at, environment in enumerate(environments):
            sys.stdout.flush()
            if pid := os.fork():
                pids.append(pid)
                continue
            with contextlib.suppress(BaseException):
                os.setpgid(0, 0)
                log = os.open(logs[at], os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ |= environment
                try:
                    outs[at].write_text(json.dumps(act(at)))
                except BaseException as error:
                    print(f"\n{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(0)
        give_up_at = time.monotonic() + PATIENCE_S
        waiting = set(pids)
        while waiting and time.monotonic() < give_up_at:
            waiting -= {pid for pid in list(waiting) if os.waitpid(pid, os.WNOHANG)[0]}
            if any(pid not in waiting and not out.exists() for pid, out in zip(pids, outs, strict=True)):
                break  # the others of the group would wait for the one that failed
            time.sleep(0.1)
        late = waiting if time.monotonic() >= give_up_at else set()
        for pid in pids:  # and what the engine has left behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in waiting:
            os.waitpid(pid, 0)
        return [
            json.loads(out.read_text())
            if out.exists()
            else failure(log.read_text(errors="replace"), is_late=pid in late, is_ended=pid in waiting - late)
            for out, log, pid in zip(outs, logs, pids, strict=True)
        ]


def failure(log: str, *, is_late: bool, is_ended: bool) -> Result:
    """is_ended: by us, since another of its group had failed."""
    first = re.search(r"(?:^|\] )(\w*(?:Error|Exception): .+)", log, re.MULTILINE)  # others follow from it
    said = first[1] if first else (log.strip().splitlines() or ["it ended without a word"])[-1]
    return {"failed": f"no answer within {PATIENCE_S:.0f} s" if is_late else said, "log": log, "is_ended": is_ended}


class Runs:
    """Engines one after the other; what was asked before is remembered in a directory."""

    def __init__(self, directory: Path, tokens: int) -> None:
        self._directory, self._tokens = directory, tokens
        directory.mkdir(parents=True, exist_ok=True)

    def run(
        self,
        options: dict[str, Any],
        settings: dict[str, Any] | None,
        prompts: tuple[int, ...] = (0, 1, 2, 3),
        *,
        num_passes: int = 2,
    ) -> Result:
        def act(_: int) -> Result:
            return run_engine(options, settings, list(prompts), self._tokens, num_passes)

        return forked([{}], act)[0]

    def family(self, name: str) -> dict[str, Any]:
        """The model of a cell that names a family; of any other nothing."""
        family = name.partition(",")[0]
        if family not in FAMILIES:
            return {}
        if not (self._directory / "models" / family).exists():
            maker = [sys.executable, str(ROOT / "benchmarks" / "make_family_models.py")]
            subprocess.run([*maker, str(self._directory / "models"), *FAMILIES], check=True, capture_output=True)
        return {"model": str(self._directory / "models" / family)}

    def once(self, name: str, *asked: Any, **more: Any) -> Result:
        """The same, or what an earlier invocation with this directory got."""
        path = self._directory / f"{name}.json".replace(" ", "-")
        if not path.exists():
            result = self.run(*asked, **more)
            if "failed" in result:
                return result
            path.write_text(json.dumps(result))
        found: Result = json.loads(path.read_text())
        return found

    def run_replicas(self, options: dict[str, Any], settings: dict[str, Any]) -> Result:
        """Two engines of data parallelism on one device; tokens in the order of the prompts."""
        from vllm_ndp.device.process import DeviceProcess

        quantized = settings.get("cold_precision") != "full"
        device = DeviceProcess.spawn(MODEL, REPLICAS if quantized else None)
        try:
            settings = settings | {"device": device.address}
            group = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(free_port())}
            ranks = [{"VLLM_DP_RANK": str(at), "VLLM_DP_RANK_LOCAL": str(at)} for at in range(2)]

            def act(rank: int) -> Result:
                return run_engine(options, settings, list(OF_REPLICA[rank]), self._tokens, 2)

            return together(forked([group | rank for rank in ranks], act))
        finally:
            device.terminate()


def together(results: list[Result]) -> Result:
    """What two replicas did, as if it were one engine."""
    if failed := [result for result in results if "failed" in result]:
        return min(failed, key=lambda result: bool(result["is_ended"]))
    by_prompt = {prompt: (rank, at) for rank, own in enumerate(OF_REPLICA) for at, prompt in enumerate(own)}
    places = [by_prompt[prompt] for prompt in sorted(by_prompt)]
    passes = [[results[rank]["passes"][number][at] for rank, at in places] for number in range(2)]
    return {"passes": passes, "totals": [totals for result in results for totals in result["totals"]]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- cells -------------------------------------------------------------------------------------------------------------


def identical(mine: Result, theirs: Result) -> dict[str, int]:
    pairs = [
        (a, b)
        for my_pass, their_pass in zip(mine["passes"], theirs["passes"], strict=True)
        for my_tokens, their_tokens in zip(my_pass, their_pass, strict=True)
        for a, b in zip(my_tokens, their_tokens, strict=True)
    ]
    return {"identical": sum(a == b for a, b in pairs), "total": len(pairs)}


class Cells:
    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def cell(self, mode: str, executor: str, form: str, precision: str) -> dict[str, Any]:
        """One engine's figures, or why there are none."""
        if executor == "ray" and importlib.util.find_spec("ray") is None:
            return {"reason": "the extra vllm-ndp[ray] is not installed"}
        options = (MODES | BESIDE)[mode] | FORMS[form] | {"distributed_executor_backend": executor}
        options |= {"max_num_seqs": 1} if precision == "alone" else {}
        settings = SETTINGS[precision] | DEVICES_OF.get(mode, {})
        options |= self._runs.family(mode)
        run = self._runs.run_replicas if mode == "DP2" else self._runs.run
        result = run(options, settings)
        for _ in range(2):  # a cluster of Ray's that is not there after 30 s gives up, which a busy machine makes it do
            if RAY_GAVE_UP in result.get("failed", ""):
                result = run(options, settings)
        if "failed" in result:
            print(result["log"][-3000:], file=sys.stderr)
            return {"reason": result["failed"]}
        own = {name: [totals[name] for totals in result["totals"]] for name in ("row_checks", "cold_pairs")}
        own |= {
            "row_mismatches": sum(totals["sidecar_mismatches"] for totals in result["totals"]),
            "fallback_pairs": sum(totals["fallback_pairs"] for totals in result["totals"]),
            "simulated_ps": [totals["simulated_ps"] for totals in result["totals"]],
        }
        return (
            identical(result, self._reference(mode, precision)) | self._stock_alike(mode, form, precision, result) | own
        )

    def _reference(self, mode: str, precision: str) -> Result:
        """In one process, eager: stock vLLM, or the plugin at the same settings. Raises where it does not run."""
        settings = None if precision == "identity" else SETTINGS[precision]
        options = self._runs.family(mode) | ({"max_num_seqs": 1} if precision == "alone" else {})
        if mode == "DP2" and settings is not None:  # a plan depends on which requests run together
            found = [self._runs.once(f"{precision} of {own}", {}, settings, own) for own in OF_REPLICA]
            result = together(found)
        else:
            model = Path(options.get("model", MODEL)).name
            result = self._runs.once(f"{model} {precision} in one process", options, settings)
        if "failed" in result:
            raise RuntimeError(f"nothing to compare with: {result['failed']}\n{result['log']}")
        return result

    def _stock_alike(self, mode: str, form: str, precision: str, result: Result) -> dict[str, Any]:
        """Against stock vLLM with the same ranks and form, started by mp."""
        if precision != "identity" or mode not in MODES:
            return {}
        if reason := STOCK_CANNOT.get((mode, form)):
            return {"stock_alike": {"reason": reason}}
        options = MODES[mode] | FORMS[form] | {"distributed_executor_backend": "mp"}
        theirs = self._runs.once(f"stock {mode} {form}", options, None)
        return {"stock_alike": {"reason": theirs["failed"]} if "failed" in theirs else identical(result, theirs)}


# -- wall time ---------------------------------------------------------------------------------------------------------

SIDES: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "all hot": {"cold_precision": "full", "hot_experts": 8},
    "half hot": SETTINGS["quantized"],
}


def wall(runs: Runs, modes: list[str], rounds: int) -> list[dict[str, Any]]:
    """Seconds of a pass from the prefix cache, by round: stock, plugin with all experts hot, and as it is used; engine
    after engine, in turns. The least of each side is compared."""
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for mode in modes:
            for side, settings in SIDES.items():
                options = MODES[mode] | ({"distributed_executor_backend": "mp"} if mode != "TP1" else {})
                result = runs.run(options, settings, num_passes=8)
                if "failed" in result:
                    print(f"{mode} {side} failed: {result['failed']}\n{result['log'][-2000:]}", file=sys.stderr)
                    continue
                taken.setdefault((mode, side), []).append(round(min(result["seconds"][1:]), 4))
                print(f"round {number + 1}: {mode} {side} {taken[mode, side][-1]} s", flush=True)
    rows = []
    for mode in modes:
        least = {side: min(taken[mode, side]) for side in SIDES if (mode, side) in taken}
        ratios = {side: round(took / least["stock"], 3) for side, took in least.items() if "stock" in least}
        print(f"{mode:12} " + ", ".join(f"{side} {took} s ({ratios.get(side)})" for side, took in least.items()))
        by_round = {side: taken[mode, side] for side in least}
        rows.append({"mode": mode, "measured_seconds": by_round, "of_stock": ratios})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=(*MODES, *BESIDE), default=[*MODES, *BESIDE], metavar="MODE")
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=EXECUTORS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[*FORMS])
    parser.add_argument("--precisions", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--references", type=Path, help="directory that keeps what cells are compared with")
    parser.add_argument("--wall", type=int, metavar="ROUNDS", help="time stock and the plugin in turns instead")
    add_json_option(parser)
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    measurement = Measurement(__doc__)
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401  # once, for every engine that is forked

    references = arguments.references or Path(tempfile.mkdtemp(prefix="ranks-matrix-"))
    runs = Runs(references, arguments.tokens)
    if arguments.wall:
        measurement.end(
            {"wall": wall(runs, [m for m in arguments.modes if m in MODES], arguments.wall)}, arguments.json
        )
        return
    kept: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())["figures"]["cells"]
    today = commit()
    for cell in kept:
        if cell["commit"] != today:
            cell["earlier"] = "of earlier code"
    cells = {tuple(cell[key] for key in ("mode", "executor", "form", "precision")): cell for cell in kept}
    wanted = [
        (mode, executor, form, precision)
        for form in arguments.forms
        for executor in arguments.executors
        for mode in arguments.modes
        for precision in arguments.precisions
        if is_a_case(mode, executor, form, precision)
    ]
    made = Cells(runs)
    for name in wanted:
        if name in cells and not {"reason", "earlier"} & cells[name].keys():
            continue
        found = made.cell(*name)
        cells[name] = dict(zip(("mode", "executor", "form", "precision"), name, strict=True))
        cells[name] |= found | {"commit": today}
        said = found.get("reason") or f"{found['identical']}/{found['total']}, fallback {found['fallback_pairs']}"
        print(" ".join(f"{part:12}" for part in name), said, found.get("stock_alike", ""), flush=True)
        measurement.save({"tokens": arguments.tokens, "cells": ordered(cells)}, arguments.json)
    measurement.end({"tokens": arguments.tokens, "cells": ordered(cells)}, arguments.json)


def is_a_case(mode: str, executor: str, form: str, precision: str) -> bool:
    if mode in BESIDE:
        return (executor, form, precision) == ("mp", "eager", "identity")
    return precision != "alone" or "PP2" in mode


def ordered(cells: dict[tuple[str, ...], dict[str, Any]]) -> list[dict[str, Any]]:
    """As the table has them, whatever was taken first."""
    names = [*MODES, *BESIDE], EXECUTORS, [*FORMS], [*SETTINGS]
    return [
        cells[name]
        for name in sorted(cells, key=lambda name: [of.index(at) for of, at in zip(names, name, strict=True)])
    ]


if __name__ == "__main__":
    main()
