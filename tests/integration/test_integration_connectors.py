"""Connectors of vLLM's own beside the plugin. KV that they load has no routing: plans go without, whatever the role."""

from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, check_pairs, engine, greedy, replay_of, token_ids, trace_of

pytestmark = pytest.mark.vllm
SETTINGS = {"hot_experts": 4, "cold_precision": "full"}
TOKENS = 8
STORED = "A store that another engine has filled holds keys and values, and no routing. " * 6
OTHERS = tuple(prompt * 6 for prompt in PROMPTS)
BLOCK = 32
STAND_INS = "connector_stand_ins"


def example(directory: Path, role: str = "kv_producer", name: str = "ExampleConnector", **more: str) -> dict[str, Any]:
    extra = {"shared_storage_path": str(directory)}
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra} | more


def offloading() -> dict[str, Any]:
    extra = {"cpu_bytes_to_use": 64 << 20, "spec_name": "HostOffload", "spec_module_path": STAND_INS}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def several(*parts: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": list(parts)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def ask(llm: Any, prompt: str = STORED) -> tuple[list[int], dict[str, Any]]:
    """Tokens and report of one request alone."""
    (output,) = greedy(llm, [prompt], TOKENS)
    report = output.kv_transfer_params["ndp"]
    check_pairs(report, 4 * 2)
    assert report["prompt_tokens"] == output.num_cached_tokens + report["prompt_rows"]
    return token_ids([output])[0], report | {"cached": output.num_cached_tokens}


def importance(llm: Any) -> Any:
    """Of the request that was planned last, as its plan has it."""
    return llm.collective_rpc("ndp_experts")[0]["importance"]


@pytest.fixture(scope="module")
def computed() -> tuple[list[int], int]:
    """Tokens of the prompt where nothing is loaded, and how many tokens it has."""
    with engine(settings=SETTINGS) as llm:
        tokens, report = ask(llm)
    assert report["loaded_tokens"] == 0
    return tokens, report["prompt_tokens"]


def test_a_fresh_engine_on_a_filled_store_plans_by_the_rows_that_it_computes(
    tmp_path: Path, computed: tuple[list[int], int]
) -> None:
    """Whatever the role, which this connector ignores: it once ended the engine. The first engine fills the store."""
    stored = (computed[1] - 1) // BLOCK * BLOCK
    for role, loaded in (("kv_both", 0), ("kv_consumer", stored)):
        with engine(settings=SETTINGS, kv_transfer_config=example(tmp_path / "kv", role)) as llm:
            tokens, report = ask(llm)
            assert tokens == computed[0]
            assert report["cached"] == report["loaded_tokens"] == loaded
            tokens, report = ask(llm)  # the blocks are vLLM's own now, and their routing is as unknown
            assert (tokens, report["cached"], report["loaded_tokens"]) == (computed[0], stored, loaded)


def test_a_prompt_in_blocks_that_others_had_before_is_planned_without_their_routing_and_replays(tmp_path: Path) -> None:
    """Within one process it was, in silence: the same prompt then had a plan of its own after each of the others.

    A recorded run has no row of what was loaded: its replay makes the same plans from the others alone.
    """
    found = []
    for other in (STORED, OTHERS[0]):
        directory = tmp_path / f"trace-{len(found)}"
        settings = SETTINGS | {"record": str(directory)}
        with engine(settings=settings, kv_transfer_config=example(tmp_path / "kv")) as llm:
            _, first = ask(llm, other)
            llm.reset_prefix_cache()
            _, report = ask(llm)
            assert report["loaded_tokens"] == report["cached"] > 0
            found.append(importance(llm))
            ask(llm)  # in blocks of vLLM's own prefix cache now
            ask(llm, OTHERS[3])
            llm.reset_prefix_cache()
            assert ask(llm, OTHERS[3])[1]["loaded_tokens"] > 0
        trace, loaded = trace_of(directory), set(range(report["loaded_tokens"]))
        prompts = [set(range(one["prompt_tokens"])) for one in (first, report, report)]
        rows = [set(trace.position[trace.request == request].tolist()) for request in range(3)]
        assert [prompt - there for prompt, there in zip(prompts, rows, strict=True)] == [set(), loaded, loaded]
        replayed = replay_of(trace)
        assert replayed.plan_mismatches == 0
        assert replayed.identical
    assert found[0] == found[1]


def test_kv_that_was_offloaded_comes_back_without_its_routing(computed: tuple[list[int], int]) -> None:
    """vLLM's offloading connector loads beside the steps: the request waits, its blocks are given out already."""
    with engine(settings=SETTINGS, kv_transfer_config=offloading()) as llm:
        tokens, report = ask(llm)
        assert (tokens, report["loaded_tokens"]) == (computed[0], 0)
        of_whole = importance(llm)
        for other in OTHERS:
            ask(llm, other)
        assert llm.reset_prefix_cache()
        tokens, report = ask(llm)
        assert tokens == computed[0]
        assert report["loaded_tokens"] == report["cached"] > 0
        of_rest = importance(llm)
        assert of_rest != of_whole
        for _ in range(2):  # hits of vLLM's own prefix cache
            assert ask(llm)[1]["loaded_tokens"] == report["loaded_tokens"]
            assert importance(llm) == of_rest
        assert llm.reset_prefix_cache()
        longer = STORED + OTHERS[0]  # what is computed behind it counts
        assert ask(llm, longer)[1]["loaded_tokens"] == report["loaded_tokens"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["step by step", "scheduled ahead"])
def test_a_load_that_fails_in_the_step_that_ends_a_prompt_leaves_no_plan_behind(
    tmp_path: Path, computed: tuple[list[int], int], asynchronous: bool
) -> None:
    """vLLM computes the prompt again, and it is planned by what is computed then."""
    theirs = example(tmp_path / "kv", name="FailsOnce", kv_connector_module_path=STAND_INS)
    theirs["kv_load_failure_policy"] = "recompute"
    with engine(settings=SETTINGS, kv_transfer_config=theirs, async_scheduling=asynchronous) as llm:
        ask(llm)
        of_whole = importance(llm)
        ask(llm, OTHERS[0])
        assert llm.reset_prefix_cache()
        (output,) = greedy(llm, [STORED], TOKENS)
        report = output.kv_transfer_params["ndp"]
        assert report["prompt_rows"] > report["prompt_tokens"]  # its last ones twice
        assert importance(llm) == of_whole
        assert (token_ids([output])[0], report["loaded_tokens"]) == (computed[0], 0)


def test_ours_and_theirs_find_their_own_words_in_the_answer_and_metrics_count(tmp_path: Path) -> None:
    """vLLM copies the entries of both into one dictionary before the step's report is there. A connector alone makes
    the same engine: test_integration_refusals.py."""
    theirs = example(tmp_path / "kv", name="Tells", kv_connector_module_path=STAND_INS)
    connector = several(theirs, example(tmp_path / "more"))
    with engine(settings=SETTINGS, kv_transfer_config=connector, disable_log_stats=False) as llm:
        outputs = greedy(llm, [STORED, *OTHERS], TOKENS)
        metrics = llm.get_metrics()
    for output in outputs:
        assert output.kv_transfer_params["theirs"] > 0
        report = output.kv_transfer_params["ndp"]
        assert (report["output_tokens"], report["finish"]) == (TOKENS, "length")
        check_pairs(report, 4 * 2)
    counted = {one.labels.get("where"): one.value for one in metrics if one.name == "vllm:ndp_pairs"}
    for kind in ("hot", "cold", "prefill"):
        assert counted[kind] == sum(output.kv_transfer_params["ndp"][f"{kind}_pairs"] for output in outputs) > 0
