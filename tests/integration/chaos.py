"""Eight requests always run while the device is killed and stopped at random instants: are tokens the same?

The same requests run twice, in the same batches: undisturbed, then with kill -9 and SIGSTOP of the device. Every token
must be the same, and every request must end.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

RUNNING = 8
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


class Engine:
    def __init__(self, llm: Any) -> None:
        """llm: in this process, in fp32, with its device's experts in full precision."""
        self._llm = llm

    def run(self, requests: Requests, goes_on: Callable[[int], bool]) -> dict[int, list[int]]:
        """Keep eight requests running as long as goes_on(requests begun). Tokens of each."""
        from vllm import SamplingParams

        engine, begun, tokens = self._llm.llm_engine, 0, {}
        while True:
            while engine.get_num_unfinished_requests() < RUNNING and goes_on(begun):
                prompt, count = requests(begun)
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                engine.add_request(f"{begun}", prompt, params)
                begun += 1
            if not engine.has_unfinished_requests():
                return tokens
            for output in engine.step():
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


def measure(engine: Engine, seed: int, *, kills: int, stops: int) -> dict[str, Any]:
    """What happens to requests that always run while so many disturbances do, against the same ones undisturbed."""
    requests = Requests(seed)
    engine.run(requests, lambda begun: begun < RUNNING)  # what is done once
    before = engine.totals()
    disturbance = Disturbance(kills, stops, seed)
    try:
        disturbed = engine.run(requests, lambda begun: not disturbance.is_over)
    finally:
        disturbance.close()
    after = engine.totals()
    time.sleep(2.0)
    undisturbed = engine.run(requests, lambda begun: begun < len(disturbed))
    wrong = [number for number in disturbed if disturbed[number] != undisturbed.get(number)]
    short = [number for number, tokens in disturbed.items() if len(tokens) != requests(number)[1]]
    return {
        "kills": disturbance.done.count("kill"), "stops": disturbance.done.count("stop"),
        "requests": len(disturbed), "tokens": sum(map(len, disturbed.values())),
        "wrong": [(seed, number) for number in wrong], "unfinished": [(seed, number) for number in short],
        "pairs_by_device": after["cold_pairs"] - before["cold_pairs"],
        "pairs_computed_here": after["fallback_pairs"] - before["fallback_pairs"],
    }  # fmt: skip
