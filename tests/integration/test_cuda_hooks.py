"""What vLLM's versions for GPUs do differently, without a GPU: their messages, their order of rows, their warm-up.

The record of hooks (docs/measured/vllm_hooks.json) is compared with the vLLM that is installed; with wheels of others
in NDP_VLLM_WHEELS (`pip download --no-deps vllm==0.33.0 -d FOLDER`) with those too.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_hooks

from vllm_ndp.integration.batch import RequestTracker, Span, TrackedRequest, row_order

TRACED = "vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor"
"""Since 0.31: of forced tokens on runner V2, which who asks for them names on the command line."""
WHEELS = sorted(Path(os.environ.get("NDP_VLLM_WHEELS", "/nonexistent")).glob("vllm-*.whl"))


@pytest.fixture(scope="module")
def versions() -> dict[str, Any]:
    return json.loads(vllm_hooks.RECORD.read_text())["figures"]["versions"]


def test_the_installed_vllm_has_what_the_record_says_of_its_version(versions: dict[str, Any]) -> None:
    version, read = vllm_hooks.of_installed()
    found = vllm_hooks.record(read)
    assert found["hooks"] == versions[version]["hooks"]
    assert found["lacking"] == []


@pytest.mark.skipif(not WHEELS, reason="no wheels in NDP_VLLM_WHEELS")
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name.split("-")[1])
def test_a_wheel_has_what_the_record_says_of_its_version(wheel: Path, versions: dict[str, Any]) -> None:
    version, read = vllm_hooks.of_wheel(wheel)
    found = vllm_hooks.record(read)
    assert found["hooks"] == versions[version]["hooks"]
    assert found["lacking"] == versions[version]["lacking"]


def test_recorded_versions_lack_no_name_that_we_import_but_one(versions: dict[str, Any]) -> None:
    assert set(versions) >= {"0.26.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"}
    lacking = {version: found["lacking"] for version, found in versions.items() if found["lacking"]}
    assert lacking == {key: [TRACED] for key in ("0.26.0", "0.30.0")}
    assert min(found["imports"] for found in versions.values()) > 50


def test_versions_differ_only_in_what_the_code_allows_for(versions: dict[str, Any]) -> None:
    """A hook that is absent or has another signature somewhere must be in this list, beside who handles it."""
    handled = {
        "length of its prompt": "batch._prompt_len",
        "order of rows, runner V2": "batch.row_order",
        "weights tracked by": "vllm_private.weights_tracked_by, which takes both signatures",
        "hot slots of 8 bits: scales by row": "Fp8Rows.quant_config, which names its arguments",
    }
    differing = {
        hook
        for hook, found in versions["0.32.0"]["hooks"].items()
        if any(other["hooks"][hook] != found for other in versions.values()) or found == vllm_hooks.ABSENT
    }
    assert differing == set(handled)


def test_slots_are_run_with_the_tiles_of_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks tiles up by the number of experts in the tensor: those of 3 slots of 8 experts are not stock's."""
    from vllm.model_executor.layers.fused_moe import fused_moe, get_config

    from vllm_ndp.integration.hot_slots import CudaSlotKernel, SlotWeights

    asked: list[tuple[int, int]] = []

    def tuned(E: int, N: int, dtype: str | None, *blocks: int) -> dict[int, dict[str, int]]:
        asked.append((E, N))
        return {1: {"BLOCK_SIZE_M": E}}

    monkeypatch.setattr(fused_moe, "get_moe_configs", tuned)
    kernel = CudaSlotKernel.of_vllm("silu", 8)
    used: list[Any] = []
    kernel.fused = lambda x, *args, **options: used.append(get_config())  # type: ignore[assignment,return-value]
    held = SlotWeights(torch.zeros(3, 64, 32), torch.zeros(3, 32, 32))
    for _ in range(2):
        kernel.run_named(torch.zeros(1, 32), held, torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32))
    assert used == [{"BLOCK_SIZE_M": 8}] * 2
    assert asked == [(8, 32)]  # once
    assert get_config() is None


def test_tiles_of_a_call_that_fails_are_not_those_of_the_next_one() -> None:
    from vllm.model_executor.layers.fused_moe import get_config

    from vllm_ndp.integration.hot_slots import CudaSlotKernel, SlotWeights

    kernel = CudaSlotKernel.of_vllm("silu", 8)

    def fails(*args: Any, **options: Any) -> torch.Tensor:
        assert get_config() is not None
        raise RuntimeError("no memory")

    kernel.fused = fails
    held = SlotWeights(torch.zeros(3, 64, 32), torch.zeros(3, 32, 32))
    with pytest.raises(RuntimeError, match="no memory"):
        kernel.run_named(torch.zeros(1, 32), held, torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32))
    assert get_config() is None


def message(*new: Any, drafts: dict[str, list[int]] | None = None) -> Any:
    return SimpleNamespace(
        finished_req_ids=set(),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
        num_scheduled_tokens={request.req_id: 3 for request in new},
        scheduled_spec_decode_tokens=drafts or {},
    )


def test_the_length_of_a_prompt_is_counted_where_the_message_does_not_say_it() -> None:
    """vLLM 0.26: no `prompt_len`; a prompt of tokens, and one of embeddings."""
    of_tokens = SimpleNamespace(req_id="a", prompt_token_ids=[5, 6, 7], block_ids=([1],), num_computed_tokens=0)
    of_embeds = SimpleNamespace(
        req_id="b", prompt_token_ids=None, prompt_embeds=[0.0] * 4, block_ids=([2],), num_computed_tokens=0
    )
    spans = RequestTracker().update(message(of_tokens, of_embeds, drafts={"b": [9]}))
    assert {name: span.request.prompt_len for name, span in spans.items()} == {"a": 3, "b": 4}
    assert {name: span.is_drafted for name, span in spans.items()} == {"a": False, "b": True}


def spans_of(**num_tokens: int) -> dict[str, Span]:
    return {
        name: Span(TrackedRequest(name, 1, []), 0, count, is_drafted=name.startswith("drafted"))
        for name, count in num_tokens.items()
    }


def before_0_28(num_tokens_per_req: dict[str, int], decode_query_len: int) -> list[str]:
    """Copied from vLLM 0.26.0."""
    key = lambda r: ((num := num_tokens_per_req[r]) != decode_query_len, num)  # noqa: E731
    return sorted(num_tokens_per_req, key=key)


def since_0_28(
    num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]], decode_query_len: int
) -> list[str]:
    """Copied from vLLM 0.33.0."""
    key = lambda r: (not draft_tokens.get(r), (num := num_tokens_per_req[r]) != decode_query_len, num)  # noqa: E731
    return sorted(num_tokens_per_req, key=key)


def test_runner_v1_keeps_the_order_in_its_batch() -> None:
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["c", "unscheduled", "a"]))
    assert row_order(runner, spans_of(a=1, c=9)) == ["c", "a"]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        (before_0_28, ["decode", "drafted", "prompt"]),
        (since_0_28, ["drafted", "decode", "prompt"]),
    ],
    ids=["0.26", "0.33"],
)
def test_runner_v2_sorts_and_so_do_we(
    sort: Callable[..., list[str]], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One decode row, a request with two drafts, a prompt of 20: drafts come first since they are told apart."""
    module = ModuleType("vllm.v1.worker.gpu.model_runner")
    module.sort_batch_req_ids = sort  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spans = spans_of(prompt=20, drafted=3, decode=1)
    assert row_order(SimpleNamespace(decode_query_len=1), spans) == order


def test_steps_of_a_warm_up_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runner V2 warms up with requests of its own making, through the worker's own execute_model and sample_tokens."""
    from vllm_ndp.integration import worker

    seen: list[str] = []

    def warm_up(self: Any) -> str:
        self.execute_model("made up")
        self.sample_tokens(None)
        return "times"

    monkeypatch.setattr(worker._Base, "compile_or_warm_up_model", warm_up)
    monkeypatch.setattr(worker._Base, "execute_model", lambda self, output: seen.append(output))
    monkeypatch.setattr(worker._Base, "sample_tokens", lambda self, output: seen.append("sampled"))
    warmed = object.__new__(worker.NdpWorker)  # without `ndp`: whoever asks for it fails
    warmed.model_runner = SimpleNamespace()  # of runner V2
    assert warmed.compile_or_warm_up_model() == "times"
    assert seen == ["made up", "sampled"]
    with pytest.raises(AttributeError, match="ndp"):
        warmed.execute_model("a real step")


def by_weights(runner: Any, allocated: int) -> int:
    """What vLLM 0.26.0 counts beside activations, of a worker that began with 1000 bytes allocated."""
    return int(runner.model_memory_usage)


def by_all_that_is_gone(runner: Any, allocated: int) -> int:
    """And vLLM 0.32.0: `total_consumed`."""
    return allocated - 1000


@pytest.mark.parametrize("counted", [by_weights, by_all_that_is_gone])
@pytest.mark.parametrize(
    ("asked", "planned", "left"),
    [(0, 0, 60000 * 9 // 10), (1 << 30, 1 << 30, 65536), (0, 65536, 60000 * 9 // 10)],
    ids=["profiled", "asked for", "kept by vLLM from a start before"],
)
def test_memory_for_what_the_plugin_allocates_is_left_unless_a_size_was_asked_for(
    asked: int, planned: int, left: int, counted: Callable[[Any, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 bytes of KV and 4 of routing per token: 9 tenths are left of what is there beside 3096 bytes of weights and
    5536 of staging slots and buffers, which are made when the model is loaded."""
    from vllm_ndp.integration import worker

    allocated, runner = [1000], SimpleNamespace(model_memory_usage=0)

    made = SimpleNamespace(pool=SimpleNamespace(shape=SimpleNamespace(num_layers=1, top_k=1)))

    def load(self: Any) -> None:
        allocated[0] += 3096
        runner.model_memory_usage = 3096

    def finish(runner: Any) -> Any:
        allocated[0] += 5536
        return SimpleNamespace(facts=made)

    making = SimpleNamespace(finish=finish, linears=None, stored_linears=None, has_every_layer=False)
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(worker.torch.cuda, "memory_allocated", lambda: allocated[0])
    monkeypatch.setattr(worker.Assembly, "begin", lambda config, opened: making)
    monkeypatch.setattr(worker, "bytes_per_entry", lambda num_layers, top_k: 4)
    monkeypatch.setattr(worker._Base, "load_model", load)

    def profile(self: Any) -> int:
        self.cache_config.kv_cache_memory_bytes = planned  # VLLM_ENABLE_STARTUP_PLAN
        return 65536 if asked else 65536 + 3096 - counted(runner, allocated[0])

    monkeypatch.setattr(worker._Base, "determine_available_memory", profile)
    monkeypatch.setattr(worker.limits, "kv_bytes_per_token", lambda specs: 36)
    sized = object.__new__(worker.NdpWorker)
    sized.vllm_config = sized._opened = None  # type: ignore[assignment]
    sized.model_runner = runner
    sized.cache_config = SimpleNamespace(kv_cache_memory_bytes=asked)
    sized.get_kv_cache_spec = dict  # type: ignore[method-assign]
    sized.load_model()
    assert sized.determine_available_memory() == left
