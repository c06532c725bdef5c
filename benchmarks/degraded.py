"""What does a decode layer cost while the device is away, and what does it cost that it comes back?

Three ways in turns, in each round, a decode layer of the same requests on each (median):

    away        half of the experts hot, the device dead and not started again: what it would have computed is computed
                here, and each call asks whether it is back
    local       the same engine and placement, but nothing in it knows of a device: no message, no look, no account
    every hot   an engine of its own whose experts are all hot: one fused call, as stock vLLM does it

Then the device is allowed back: how much longer than a median step away the longest step is, from there until eight
steps after it is in use. (The steps after that are faster.)

    python benchmarks/degraded.py [--model DIR] [--batch 1] [--rounds 10] [--fallback full|same] [--pool packed]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from measured import ROOT, Measurement, add_json_option
from moe_layer_overhead import MARK, Stopwatch

GOAL = 0.95
STEPS_AFTER = 8
OPTIONS = ("model", "batch", "tokens", "dtype", "fallback", "pool")


class NoCall:
    """What stands where a call would: its layer and widths, for the arithmetic here."""

    def __init__(self, layer: int, bits: Any) -> None:
        self.layer, self.bits = layer, bits

    def result(self) -> None:
        return None

    def abandon(self) -> None:
        pass


class NoDevice:
    """Where a layer has its device: only the arithmetic that a real one has for the time it is away."""

    is_up = False

    def __init__(self, device: Any) -> None:
        self.compute_locally = device.compute_locally

    def submit(self, step: Any, layer: int, x: Any, split: Any) -> NoCall | None:
        pairs = split.device
        return NoCall(layer, step.bits_of(layer, pairs)) if len(pairs.rows) else None

    def submit_few(self, number: int, layer: int, x: Any, few: Any, count: int) -> NoCall:
        return NoCall(layer, few.pair_bits[:count])


def run_arm(given: argparse.Namespace) -> None:
    """Answer each line that comes in: `measure` and `back`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from vllm_ndp.integration.moe_layer import LAYERS

    experts = json.loads((ROOT / given.model / "config.json").read_text())["num_local_experts"]
    hot = experts if given.arm == "hot" else experts // 2
    ndp = {"hot_experts": hot, "avg_bits": 3.0, "fallback": given.fallback, "pool": given.pool}
    if given.arm == "hot":
        ndp |= {"cold_precision": "full"}
        del ndp["avg_bits"]
    llm = LLM(
        given.model,
        dtype=given.dtype, enforce_eager=True, max_model_len=512, max_num_seqs=given.batch, block_size=32,
        kv_cache_memory_bytes=64 << 20, disable_log_stats=True, enable_prefix_caching=False,
        quantization="ndp", additional_config={"ndp": ndp},
    )  # fmt: skip
    controller = llm.llm_engine.model_executor.driver_worker.worker.ndp
    prompts = [{"prompt_token_ids": [5 + i, 90 + i, 700 + i, 33]} for i in range(given.batch)]
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    watch = Stopwatch(llm, lambda: 0)
    llm.generate(prompts, params, use_tqdm=False)

    def layer_us() -> float:
        watch.clear()
        llm.generate(prompts, params, use_tqdm=False)
        return statistics.median(watch.layers[len(watch.layers) // 8 :]) * 1e6

    member = None if given.arm == "hot" else controller.device._members[0]
    if member is not None:
        respawn, member.process.respawn = member.process.respawn, lambda: False

    def kill() -> None:
        member.process._process.kill()
        member.process._process.wait()
        llm.generate(prompts, params, use_tqdm=False)
        assert not controller.device.is_up

    def back() -> dict[str, float]:
        """The device goes and comes; seconds of the longest step of its return, and of a median one without it."""
        steps: list[float] = []
        member.process._next_spawn_s, after = 0.0, 0
        for prompt in prompts:
            llm.llm_engine.add_request(
                str(prompt["prompt_token_ids"]), prompt,
                SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True),
            )  # fmt: skip
        for _ in range(12):
            llm.llm_engine.step()
        while len(steps) < 24:
            steps.append(timed_step(llm))
        usual = statistics.median(steps)
        steps, member.process.respawn = [], respawn
        while llm.llm_engine.has_unfinished_requests():
            steps.append(timed_step(llm))
            after += controller.device.is_up
            if after == STEPS_AFTER:
                break
        longest = max(steps)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        assert after == STEPS_AFTER, "the device was not in use again before the requests had ended"
        member.process.respawn = lambda: False
        return {"usual_s": usual, "longest_s": longest, "steps": len(steps)}

    if member is not None:
        kill()
    print(MARK, flush=True)
    for line in sys.stdin:
        if line.strip() == "back":
            found = back()
            kill()
        elif member is None:
            found = {"hot_us": layer_us()}
        else:
            real = controller.device
            found = {"away_us": layer_us()}
            layers = [layer for layer in LAYERS.values() if layer._device is real]
            assert layers
            for layer in layers:
                layer._device = NoDevice(real)
            found["local_us"] = layer_us()
            for layer in layers:
                layer._device = real
        print(MARK + json.dumps(found), flush=True)


def timed_step(llm: Any) -> float:
    start = time.perf_counter()
    llm.llm_engine.step()
    return time.perf_counter() - start


class Arm:
    def __init__(self, name: str, given: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--arm", name]
        for option in OPTIONS:
            command += [f"--{option}", str(getattr(given, option))]
        environment = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        self._answer()

    def ask(self, what: str) -> dict[str, float]:
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._answer())
        return found

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return line.removeprefix(MARK)
        raise SystemExit("an engine ended: see above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny-mixtral")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--returns", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--fallback", choices=("full", "same"), default="full")
    parser.add_argument("--pool", choices=("checkpoint", "packed"), default="packed")
    add_json_option(parser)
    parser.add_argument("--arm", choices=("hot", "away"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        run_arm(given)
        return
    measurement = Measurement(__doc__)
    arms = {name: Arm(name, given) for name in ("hot", "away")}
    rounds = [arms["hot"].ask("measure") | arms["away"].ask("measure") for _ in range(given.rounds)]
    returns = [arms["away"].ask("back") for _ in range(given.returns)]
    for arm in arms.values():
        arm.close()
    figures = {
        "batch": given.batch, "fallback": given.fallback, "pool": given.pool, "rounds": given.rounds,
        "layer_us": {name: round(statistics.median(one[f"{name}_us"] for one in rounds), 1)
                     for name in ("hot", "local", "away")},
        "local_over_away": round(statistics.median(one["local_us"] / one["away_us"] for one in rounds), 3),
        "hot_over_away": round(statistics.median(one["hot_us"] / one["away_us"] for one in rounds), 3),
        "goal": GOAL,
        "longest_step_of_a_return_in_usual_steps": [round(one["longest_s"] / one["usual_s"], 2) for one in returns],
        "usual_step_ms": round(statistics.median(one["usual_s"] for one in returns) * 1e3, 2),
    }  # fmt: skip
    for name, value in figures.items():
        print(f"{name:40} {value}")
    measurement.end(figures, given.json)


if __name__ == "__main__":
    main()
