"""Eight requests always run while the device is killed and stopped: are tokens the same, and how long does a step take?

One engine in this process, the bundled model in fp32 with experts in full precision on the device, so that a lost call
is computed here with the same result. The same requests run twice, in the same batches: undisturbed, then with kill -9
and SIGSTOP of the device at random instants. Every token must be the same, and every request must end.

Many disturbances are taken in rounds of `--round`, each compared with its own undisturbed run and added to FILE, so
that a run that is stopped, or ends after `--seconds`, is a run.

    python benchmarks/chaos.py --kills 50 [--stops 10] [--round 50] [--seconds S] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy as np
from measured import ROOT, Measurement, add_json_option

RUNNING = 8
DEADLINE_MS = 300
STOPPED_S = 0.1
SERVES_S = 0.5  # at most, before it is disturbed again
WORDS = ("def parse(line):", "static void free_list(", "She had always wished", "CREATE TABLE orders (", "The sea")


class Requests:
    """Request n, the same one whenever it is asked for: a prompt, and how many tokens it shall have."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, number: int) -> tuple[str, int]:
        rng = random.Random(f"{self._seed} {number}")
        return " ".join(rng.choices(WORDS, k=rng.randrange(1, 5))), rng.randrange(24, 96)


def make_llm() -> Any:
    from vllm import LLM

    ndp = {"cold_precision": "full", "hot_experts": 2, "deadline_ms": DEADLINE_MS}
    return LLM(
        str(ROOT / "models" / "tiny-mixtral"),
        dtype="float32", enforce_eager=True, max_model_len=512, max_num_batched_tokens=512, max_num_seqs=RUNNING,
        kv_cache_memory_bytes=64 << 20, block_size=32, disable_log_stats=True, enable_prefix_caching=False,
        quantization="ndp", additional_config={"ndp": ndp},
    )  # fmt: skip


class Engine:
    def __init__(self, llm: Any) -> None:
        """llm: in this process, in fp32, with its device's experts in full precision."""
        self._llm = llm

    def run(self, requests: Requests, goes_on: Callable[[int], bool]) -> tuple[dict[int, list[int]], list[float]]:
        """Keep eight requests running as long as goes_on(requests begun). Tokens of each, seconds of each step."""
        from vllm import SamplingParams

        engine, begun, tokens, steps = self._llm.llm_engine, 0, {}, []
        while True:
            while engine.get_num_unfinished_requests() < RUNNING and goes_on(begun):
                prompt, count = requests(begun)
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                engine.add_request(f"{begun}", prompt, params)
                begun += 1
            if not engine.has_unfinished_requests():
                return tokens, steps
            start = time.perf_counter()
            outputs = engine.step()
            steps.append(time.perf_counter() - start)
            for output in outputs:
                if output.finished:
                    tokens[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)

    def totals(self) -> dict[str, Any]:
        found: dict[str, Any] = self._llm.collective_rpc("ndp_totals")[0]
        return found


class Disturbance:
    """Kills and stops at random instants, from a thread, as long as the engine runs."""

    def __init__(self, kills: int, stops: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._left = ["kill"] * kills + ["stop"] * stops
        self._rng.shuffle(self._left)
        self.done: list[str] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._left

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        from vllm_ndp.integration.controller import current_controller

        while self._left and not self._closed.is_set():
            member = current_controller().device.link.members.each[0]  # type: ignore[union-attr]
            member.process._next_spawn_s = 0.0  # the pause between two starts would leave nothing to kill
            if member.client.state != "up":
                time.sleep(0.005)
                continue
            time.sleep(self._rng.random() * SERVES_S)
            what = self._left.pop()
            with suppress(ProcessLookupError):
                if what == "kill":
                    os.kill(member.process.pid, signal.SIGKILL)
                else:
                    os.kill(member.process.pid, signal.SIGSTOP)
                    time.sleep(self._rng.random() * STOPPED_S)
                    os.kill(member.process.pid, signal.SIGCONT)
            self.done.append(what)


def percentiles_ms(steps_s: list[float]) -> list[float]:
    found: list[float] = np.percentile(np.array(steps_s) * 1e3, [50, 99, 100]).round(1).tolist()
    return found


def measure(engine: Engine, seed: int, *, kills: int, stops: int) -> dict[str, Any]:
    """What happens to requests that always run while so many disturbances do, against the same ones undisturbed."""
    requests, begun_s = Requests(seed), time.monotonic()
    engine.run(requests, lambda begun: begun < RUNNING)  # what is done once
    before = engine.totals()
    disturbance = Disturbance(kills, stops, seed)
    try:
        disturbed, disturbed_s = engine.run(requests, lambda begun: not disturbance.is_over)
    finally:
        disturbance.close()
    after = engine.totals()
    time.sleep(2.0)
    undisturbed, undisturbed_s = engine.run(requests, lambda begun: begun < len(disturbed))
    wrong = [number for number in disturbed if disturbed[number] != undisturbed.get(number)]
    short = [number for number, tokens in disturbed.items() if len(tokens) != requests(number)[1]]
    return {
        "kills": disturbance.done.count("kill"), "stops": disturbance.done.count("stop"),
        "requests": len(disturbed), "tokens": sum(map(len, disturbed.values())),
        "wrong": [(seed, number) for number in wrong], "unfinished": [(seed, number) for number in short],
        "pairs_by_device": after["cold_pairs"] - before["cold_pairs"],
        "pairs_computed_here": after["fallback_pairs"] - before["fallback_pairs"],
        "steps_s": {"undisturbed": undisturbed_s, "disturbed": disturbed_s},
        "seconds": round(time.monotonic() - begun_s, 1),
    }  # fmt: skip


def together(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What all rounds say."""
    added: dict[str, Any] = {name: rounds[0][name] for name in rounds[0] if name != "steps_s"}
    for later in rounds[1:]:
        added = {name: value + later[name] for name, value in added.items()}
    steps = {kind: [s for one in rounds for s in one["steps_s"][kind]] for kind in ("undisturbed", "disturbed")}
    return added | {
        "rounds": len(rounds), "deadline_ms": DEADLINE_MS,
        "step_ms": {
            kind: dict(zip(("p50", "p99", "max"), percentiles_ms(taken), strict=True)) for kind, taken in steps.items()
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--round", type=int, default=50, help="disturbances before they are compared")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no round begins after so long")
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    given = parser.parse_args()
    measurement, llm, begun_s = Measurement(__doc__), make_llm(), time.monotonic()
    engine, rounds, count = Engine(llm), list[dict[str, Any]](), -(-(given.kills + given.stops) // given.round)
    for number in range(count):
        kills, stops = (
            given.kills * (number + 1) // count - given.kills * number // count,
            given.stops * (number + 1) // count - given.stops * number // count,
        )
        rounds.append(measure(engine, given.seed + number, kills=kills, stops=stops))
        measurement.save(together(rounds), given.json)
        if time.monotonic() - begun_s > given.seconds:
            break
    figures = together(rounds)
    llm.llm_engine.engine_core.shutdown()
    print("\n".join(f"{name:20} {value}" for name, value in figures.items()))
    measurement.end(figures, given.json)
    assert not figures["wrong"], f"requests {figures['wrong']} (seed, number) have other tokens"
    assert not figures["unfinished"], f"requests {figures['unfinished']} (seed, number) did not end"


if __name__ == "__main__":
    main()
