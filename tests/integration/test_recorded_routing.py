"""A trace's routing inside vLLM: stock with random weights, and the plugin, whose own recorder sees it from outside.

Run as a program it is such engines, one after the other, each of which gets the trace's requests from the first one on:
vLLM reads the strategy's name when its plugins are loaded, once a process.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import MODEL, REPLICAS, ROOT

from vllm_ndp.traces.importers import import_trace
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm
STRATEGY = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
REQUESTS, ROWS = 12, 48


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve requests of 48 rows, prompts of 20 to 42, at random: nothing that a router would choose."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("trace")
    scores = rng.random((REQUESTS, ROWS, 4, 8))
    experts = scores.argsort(-1)[..., :2]
    weights = rng.random(experts.shape, np.float32)
    np.savez(folder / "a.npz", experts=experts, weights=weights, prompt_len=20 + 2 * np.arange(REQUESTS))
    import_trace(folder / "a.npz", "npz").save(folder / "trace")
    return folder / "trace"


@pytest.fixture(scope="module")
def ran(trace: Path) -> str:
    """What this file printed as a program."""
    done = subprocess.run(
        [sys.executable, __file__, str(trace.parent / "again")], capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {STRATEGY: f"ndp:{trace}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_stock_vllm_runs_the_recorded_experts_and_refuses_other_lengths_and_shapes(ran: str) -> None:
    assert f"equal {3 * ROWS * 4 * 2} of {3 * ROWS * 4 * 2}" in ran
    assert "TraceError: request 3 of the trace has 48 rows, and vLLM asks for row 48" in ran
    assert "TraceError: vLLM's request 28 is the trace's 4, whose prompt has 28 tokens, and came with 5" in ran
    assert "the trace has 2 of 8 experts a token, the model 4 of 32" in ran


def test_the_example_sends_what_the_trace_asks_for(ran: str) -> None:
    tokens = sum(ROWS + 1 - (20 + 2 * n) for n in range(REQUESTS))
    assert f"measured: {REQUESTS} requests and {tokens} tokens in" in ran


def test_requests_that_meet_in_steps_keep_their_own_routing(trace: Path, ran: str) -> None:
    """Prompts in parts, twelve requests for eight places: what the plugin records is the trace."""
    before, again = Trace.load(trace), Trace.load(trace.parent / "again")
    assert len(again.sequences) == len(before.sequences) == REQUESTS
    for mine, theirs in zip(again.sequences, before.sequences, strict=True):
        for name in ("prompt_ids", "decode_ids", "prompt_weights", "decode_weights"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))


def generate(llm: Any, requests: list[int], prompt_len: int | None = None, more: int = 1) -> None:
    """Of the trace's requests, as long as recorded, unless told otherwise."""
    from vllm import SamplingParams

    of = [Trace.load(Path(os.environ[STRATEGY].removeprefix("ndp:"))).sequences[number] for number in requests]
    prompts = [{"prompt_token_ids": [7] * (prompt_len or len(one.prompt_ids))} for one in of]
    params = [SamplingParams(max_tokens=len(one.decode_ids) + more, ignore_eos=True) for one in of]
    llm.generate(prompts, params, use_tqdm=False)


def engine(model: Path = MODEL, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(model), dtype="float32", max_model_len=128, max_num_batched_tokens=50, max_num_seqs=8, block_size=32,
        kv_cache_memory_bytes=64 << 20, enforce_eager=True, enable_prefix_caching=False, **options,
    )  # fmt: skip


def stock() -> None:
    llm, seen = engine(load_format="dummy"), list[np.ndarray[Any, Any]]()
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    forward = RoutedExperts.forward_modular

    def spy(self: Any, *, topk_ids: Any, **others: Any) -> Any:
        seen.append(topk_ids.numpy().copy())
        return forward(self, topk_ids=topk_ids, **others)

    RoutedExperts.forward_modular = spy
    trace, equal, of = Trace.load(Path(os.environ[STRATEGY].removeprefix("ndp:"))), 0, 0
    for number in (0, 1, 2):
        seen.clear()
        generate(llm, [number])
        found = np.concatenate([np.stack(seen[at : at + 4], axis=1) for at in range(0, len(seen), 4)])
        wanted = trace.sequences[number]
        equal += int((found == np.concatenate([wanted.prompt_ids, wanted.decode_ids])).sum())
        of += found.size
    print(f"equal {equal} of {of}")
    for told in ({"more": 2}, {"prompt_len": 5}):
        with said():
            generate(llm, [3], **told)
        llm.llm_engine.abort_request(list(llm.llm_engine.output_processor.request_states), internal=True)
    with said():
        generate(engine(ROOT / "models/tiny-qwen3-moe", load_format="dummy"), [4])  # the next one to come


class said:
    """What ends a call is printed."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        print(f"{type(error).__name__}: {error}")
        return True


def plugin(record: str) -> None:
    settings = {"hot_experts": 4, "replicas": str(REPLICAS), "record": record, "deadline_ms": 20_000.0}
    llm = engine(quantization="ndp", additional_config={"ndp": settings})
    generate(llm, list(range(REQUESTS)))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    record = sys.argv[1]
    sys.argv = ["", os.environ[STRATEGY].removeprefix("ndp:"), str(MODEL)]
    runpy.run_path("examples/routing_in_stock_vllm.py", run_name="__main__")
    plugin(record)
    stock()
