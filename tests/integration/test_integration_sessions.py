"""Sessions whose input comes in parts (vLLM's StreamingInput): one report counts the tokens of every part."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import _SMALL, MODEL, PATIENT_DEADLINE_MS, check_pairs

from vllm_ndp.traces.trace import Trace

PARTS = ([5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18, 19])
TOKENS = 6

pytestmark = pytest.mark.vllm


async def _session(engine: Any, name: str, tokens: Sequence[int], *, waits: bool) -> list[Any]:
    """Outputs of a session with so many tokens a part. waits: each part is sent once the one before is answered."""
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    answered = asyncio.Semaphore(0)

    def sampling(count: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def parts() -> AsyncIterator[Any]:
        for part, count in zip(PARTS, tokens, strict=True):
            yield StreamingInput({"prompt_token_ids": list(part)}, sampling(count))  # vLLM appends later parts to it
            for _ in range(count if waits else 0):
                await answered.acquire()

    outputs = []
    async for output in engine.generate(parts(), sampling(TOKENS), name):
        outputs.append(output)
        for _ in output.outputs[0].token_ids:
            answered.release()
    return outputs


async def _report(engine: Any, name: str) -> dict[str, Any]:
    """As the worker has it, which gets it with the step after the session's end."""
    for _ in range(600):
        ((found,),) = [
            [told["finished"].values() for told in await engine.collective_rpc("ndp_requests", args=(name,))]
        ]
        if found:
            return dict(next(iter(found)))
        await asyncio.sleep(0.1)
    pytest.fail(f"no report of {name}")


async def _run(record: Path) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = {"deadline_ms": PATIENT_DEADLINE_MS, "hardware": "h100-ndp512", "record": str(record)}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(str(MODEL), **_SMALL, quantization="ndp", additional_config={"ndp": settings})
    )
    try:
        found = {}
        for name, tokens, waits in (
            ("waits", (TOKENS,) * 3, True),
            ("at-once", (TOKENS,) * 3, False),
            ("single", (1, 1, 1), True),
        ):
            outputs = await _session(engine, name, tokens, waits=waits)
            found[name] = outputs, await _report(engine, name)
        return found
    finally:
        engine.shutdown()


def test_a_session_in_parts_counts_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    found = asyncio.run(_run(tmp_path / "recorded"))
    for name, (outputs, report) in found.items():
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert made == (3 if name == "single" else 3 * TOKENS)
        assert (report["finish"], report["output_tokens"]) == ("length", made), name
        assert report["prompt_tokens"] == sum(map(len, PARTS)) == report["prompt_rows"], name
        assert report["decode_rows"] == made - 3, "the last token of a part is never an input"
        assert len(report["measured_token_ms"]) == len(report["simulated_token_us"]) == made - 3, name
        check_pairs(report, 4 * 2)
    (told,) = [output.kv_transfer_params["ndp"] for output in found["at-once"][0] if output.kv_transfer_params]
    assert told == found["at-once"][1], "the client of a session that ends by itself has the same"
    trace = Trace.load(tmp_path / "recorded")
    kept = [sum(map(len, PARTS[: part + 1])) + part * (TOKENS - 1) for part in range(3)]
    assert trace.prompt_len.tolist()[:6] == kept * 2, "each part is a request of its trace, with all before it"
    assert [len(one.decode_ids) for one in trace.sequences] == [TOKENS - 1] * 6 + [0] * 3
