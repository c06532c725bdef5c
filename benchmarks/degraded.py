"""What does a decode layer cost while the device is away, and what does it cost that it comes back?

    away        half of the experts hot, the device dead and not started again: what it would have computed is computed
                here, and each call asks whether it is back
    local       the same engine and placement, but nothing in it knows of a device: no message, no look, no account
    every hot   an engine of its own whose experts are all hot: one fused call, as stock vLLM does it

Away and local take turns step by step within one generation, in an order that is drawn for each pair of steps, so that
what the machine does meanwhile meets both. The figure is the median, over pairs of steps, of local over away, with the
interval (95 %) that drawing the pairs anew gives it. Every hot is another process and takes turns by the round only.

Then the device is allowed back: what do the steps that do something about it (start the program, connect, greet, get
the plan, take the first answer) cost beyond a median step away? All of them together, in steps. Beside it stands the
longest of as many steps in which nothing happened.

    python benchmarks/degraded.py [--model DIR] [--batch 1] [--rounds 10] [--fallback full|same] [--pool packed]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from arm import Arm, answer
from measured import ROOT, Measurement, add_json_option
from moe_layer_overhead import Stopwatch

GOAL, RETURN_GOAL_STEPS = 0.95, 1.0
FIRST_STEPS = 4  # of a generation: its prompt, and what is done once
STEPS_AFTER = 8
DRAWN = 2000
COMING = ("GREETING", "REPLAYING")  # stages of a connection on its way up
OPTIONS = ("model", "batch", "tokens", "dtype", "fallback", "pool")


class NoCall:
    """What stands where a call would: nothing comes."""

    answer = None

    def add(self, out: Any) -> bool:
        return False

    def abandon(self) -> None:
        pass


class NoDevice:
    """Where a layer has its link: only the arithmetic that a real one has for the time it is away."""

    def __init__(self, device: Any) -> None:
        self.compute_locally = device.compute_locally

    def start(self, step: Any, layer: int, x: Any, pairs: Any) -> NoCall:
        return NoCall()


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
        dtype=given.dtype, enforce_eager=True, max_model_len=1024, max_num_seqs=given.batch, block_size=32,
        kv_cache_memory_bytes=64 << 20, disable_log_stats=True, enable_prefix_caching=False,
        quantization="ndp", additional_config={"ndp": ndp},
    )  # fmt: skip
    controller = llm.llm_engine.model_executor.driver_worker.worker.ndp
    prompts = [{"prompt_token_ids": [5 + i, 90 + i, 700 + i, 33]} for i in range(given.batch)]
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    watch, rng = Stopwatch(llm, lambda: 0), random.Random(0)
    llm.generate(prompts, params, use_tqdm=False)

    def hot_us() -> float:
        watch.clear()
        llm.generate(prompts, params, use_tqdm=False)
        return statistics.median(watch.layers[len(watch.layers) // 8 :]) * 1e6

    member = None if given.arm == "hot" else controller.device.link.members.each[0]
    if member is not None:
        respawn, member.process.respawn = member.process.respawn, lambda: False

    def kill() -> None:
        member.process._process.kill()
        member.process._process.wait()
        llm.generate(prompts, params, use_tqdm=False)
        assert not controller.device.is_up

    def begin(num_tokens: int) -> None:
        for prompt in prompts:
            name, asked = str(prompt["prompt_token_ids"]), SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            llm.llm_engine.add_request(name, prompt, asked)
        for _ in range(FIRST_STEPS):
            llm.llm_engine.step()

    def in_turns() -> dict[str, list[float]]:
        """Microseconds of a layer in each step of each kind, pair by pair."""
        real, taken = controller.device.link, {"away": list[float](), "local": list[float]()}
        devices = {"away": (controller.device, real), "local": (SimpleNamespace(is_up=False), NoDevice(real))}
        layers = [layer for layer in LAYERS.values() if layer._link is real]
        assert layers
        begin(given.tokens)
        order: list[str] = []
        while llm.llm_engine.has_unfinished_requests():
            order = order or rng.sample(sorted(devices), 2)
            kind = order.pop()
            for layer in layers:
                layer._device, layer._link = devices[kind]
            watch.clear()
            llm.llm_engine.step()
            taken[kind].append(sum(watch.layers) / len(layers) * 1e6)
        for layer in layers:
            layer._device, layer._link = devices["away"]
        count = min(map(len, taken.values()))
        return {kind: times[:count] for kind, times in taken.items()}

    def back() -> dict[str, Any]:
        """The device goes and comes: seconds of the steps that did something about it, of a median one, of others."""
        client, process = controller.device.link.client, member.process
        member.process._next_spawn_s, after = 0.0, 0
        steps: list[float] = []
        begin(980)
        for _ in range(24):
            steps.append(timed_step(llm))
        usual = statistics.median(steps)
        active, idle = list[float](), list[float]()
        member.process.respawn = respawn
        while llm.llm_engine.has_unfinished_requests() and after < STEPS_AFTER:
            spawned, was_coming = process.num_spawned, client.stage.name in COMING
            seconds = timed_step(llm)
            acted = process.num_spawned > spawned or was_coming or client.stage.name in COMING
            is_up = controller.device.is_up
            (active if acted or (is_up and not after) else idle).append(seconds)
            after += is_up
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        assert after == STEPS_AFTER, "the device was not in use again before the requests had ended"
        member.process.respawn = lambda: False
        return {"usual_s": usual, "active_s": active, "longest_of_others_s": max(rng.sample(idle, len(active)))}

    if member is not None:
        kill()

    def act(question: str) -> dict[str, Any]:
        if question == "measure":
            return {"hot": hot_us()} if member is None else in_turns()
        found = back()
        kill()
        return found

    answer(act)


def timed_step(llm: Any) -> float:
    start = time.perf_counter()
    llm.llm_engine.step()
    return time.perf_counter() - start


def start_arm(name: str, given: argparse.Namespace) -> Arm:
    command = [sys.executable, __file__, "--arm", name]
    for option in OPTIONS:
        command += [f"--{option}", str(getattr(given, option))]
    return Arm(command, OMP_NUM_THREADS="1")


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
    arms = {name: start_arm(name, given) for name in ("hot", "away")}
    hot, rounds = list[float](), list[dict[str, list[float]]]()
    for number in range(given.rounds):
        for name in ("hot", "away") if number % 2 else ("away", "hot"):
            taken = arms[name].ask("measure")
            if name == "hot":
                hot.append(taken["hot"])
            else:
                rounds.append(taken)
    returns = [arms["away"].ask("back") for _ in range(given.returns)]
    for arm in arms.values():
        arm.close()
    away, local = (np.concatenate([one[kind] for one in rounds]) for kind in ("away", "local"))
    ratios = local / away
    drawn = np.random.default_rng(0).choice(ratios, (DRAWN, len(ratios)))
    figures = {
        "batch": given.batch, "fallback": given.fallback, "pool": given.pool, "pairs_of_steps": len(ratios),
        "layer_us": {
            "every hot": round(statistics.median(hot), 1), "local": round(float(np.median(local)), 1),
            "away": round(float(np.median(away)), 1),
        },
        "local_over_away": round(float(np.median(ratios)), 3),
        "local_over_away_95": np.quantile(np.median(drawn, axis=1), (0.025, 0.975)).round(3).tolist(),
        "local_over_away_by_round": [round(float(np.median(np.divide(r["local"], r["away"]))), 3) for r in rounds],
        "local_over_away_of_medians": round(float(np.median(local) / np.median(away)), 3),
        "goal": GOAL,
        "return_costs_steps": [
            round(sum(one["active_s"]) / one["usual_s"] - len(one["active_s"]), 2) for one in returns
        ],
        "return_longest_step_in_usual_steps": [round(max(one["active_s"]) / one["usual_s"], 2) for one in returns],
        "longest_of_as_many_others": [round(one["longest_of_others_s"] / one["usual_s"], 2) for one in returns],
        "return_goal_steps": RETURN_GOAL_STEPS,
        "usual_step_ms": round(statistics.median(one["usual_s"] for one in returns) * 1e3, 2),
    }  # fmt: skip
    for name, value in figures.items():
        print(f"{name:40} {value}")
    measurement.end(figures, given.json)


if __name__ == "__main__":
    main()
