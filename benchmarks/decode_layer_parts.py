"""Where does the time of a decode layer with a call to the device go, and which part of it is above its floor?

    python benchmarks/decode_layer_parts.py --shape qwen3-30b-a3b --layers 2 --rounds 6

One engine, half of the experts hot, 3 bits for the others, random weights of a published shape. Each layer is cut where
one part ends and the next begins:

    route     vLLM's router and its way to our layer
    split     which pair runs where, and the message laid out
    send      the message into the link
    hot       vLLM's fused kernel over the hot slots; the device works at the same time
    wait      from then until the answer is here
    add       the answer into the output, counts and clock
    leave     from our layer back to vLLM's caller

The floor of `hot` is the bytes of the router and the hot experts over what one core reads, measured in the same rounds;
that of the whole is the slower side's bytes over it, and one message without experts there and back. Least values,
since other programs only add to them; of a round, then the median of rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from make_random_mixtral import config_of, write
from measured import Measurement, add_json_option
from moe_layer_overhead import Floor, round_trips, without_experts

from ndp_device.timing.shapes import SHAPES

PARTS = ("route", "split", "send", "hot", "wait", "add", "leave")
LEAST = 0.1
"""Which quantile stands for the least value: a single layer may have met a warm cache."""


class Cuts:
    """Times of the layer that is running, and the parts of all layers that had a call."""

    def __init__(self, llm: Any) -> None:
        self.rows: list[list[float]] = []
        self._now: list[float] = []
        from vllm_ndp.integration import device_link, hot_slots, moe_layer, step

        for module in llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.modules():
            if type(module).__name__ == "MoERunner":
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end)
        controller = llm.llm_engine.model_executor.driver_worker.worker.ndp
        self._before(moe_layer.MoELayer, "_run")
        self._after(step.Step, "split")
        self._after(type(controller.device.link), "start")
        self._after(hot_slots.HotSlots, "run")
        self._after(device_link.DeviceCall, "result")
        self._after(moe_layer.MoELayer, "_run")

    def _begin(self, *_: Any) -> None:
        self._now = [time.perf_counter()]

    def _end(self, *_: Any) -> None:
        if len(self._now) == len(PARTS):
            self.rows.append(np.diff([*self._now, time.perf_counter()]).tolist())
        self._now = []

    def _before(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def cut(*args: Any, **kwargs: Any) -> Any:
            self._now.append(time.perf_counter())
            return inner(*args, **kwargs)

        setattr(owner, name, cut)

    def _after(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def cut(*args: Any, **kwargs: Any) -> Any:
            done = inner(*args, **kwargs)
            self._now.append(time.perf_counter())
            return done

        setattr(owner, name, cut)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b", metavar="NAME")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=6)
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(str(__doc__))
    shape = SHAPES[arguments.shape]
    with tempfile.TemporaryDirectory(prefix=f"{arguments.shape}-") as aside:
        sizes = shape.hidden_size, shape.intermediate_size, arguments.layers, shape.num_experts, shape.top_k
        write(Path(aside), config_of(*sizes), 0)
        figures = run(Path(aside), shape.num_experts, arguments.tokens, arguments.rounds)
    measurement.end({"shape": arguments.shape, "batch": 1, "rounds": arguments.rounds, **figures}, arguments.json)


def run(model: Path, num_experts: int, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        quantization="ndp",
        additional_config={"ndp": {"hot_experts": num_experts // 2, "avg_bits": 3.0}},
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        enable_prefix_caching=False,
    )
    controller = llm.llm_engine.model_executor.driver_worker.worker.ndp
    client, floor, cuts = controller.device.link.client, Floor(controller, 1), Cuts(llm)
    begin, last = client.begin_execute, list[tuple[Any, ...]]()

    def begin_and_note(*message: Any) -> Any:
        floor.note(message[5], message[6])
        last[:] = [tuple(part.copy() if hasattr(part, "copy") else part for part in message)]
        return begin(*message)

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 90, 700, 33]}
    llm.generate([prompt], params, use_tqdm=False)
    rounds: list[dict[str, float]] = []
    for _ in range(num_rounds):
        cuts.rows.clear()
        floor.clear()
        floor.measure_bandwidth()
        client.begin_execute = begin_and_note
        llm.generate([prompt], params, use_tqdm=False)
        client.begin_execute = begin
        rows = np.array(cuts.rows) * 1e6
        found = {f"measured_{part}_us": float(np.quantile(rows[:, at], LEAST)) for at, part in enumerate(PARTS)}
        found["measured_layer_us"] = float(np.quantile(rows.sum(axis=1), LEAST))
        found["measured_bare_round_trip_us"] = 1e6 * min(round_trips(client, without_experts(last[0]), 0.001))
        found["measured_device_us"] = 1e6 * float(np.quantile(round_trips(client, last[0], 0.001), LEAST))
        hot_bytes = statistics.mean(floor.host_bytes)
        found["measured_gb_per_s"] = 1e-9 / floor.seconds_per_byte
        found["measured_hot_floor_us"] = 1e6 * hot_bytes * floor.seconds_per_byte
        found["measured_floor_us"] = floor.us(found["measured_bare_round_trip_us"])
        found["layer_over_floor"] = found["measured_layer_us"] / found["measured_floor_us"]
        found["hot_over_floor"] = found["measured_hot_us"] / found["measured_hot_floor_us"]
        rounds.append(found)
        print({name: round(value, 2) for name, value in found.items()}, flush=True)
    return {name: round(statistics.median(found[name] for found in rounds), 3) for name in rounds[0]}


if __name__ == "__main__":
    main()
