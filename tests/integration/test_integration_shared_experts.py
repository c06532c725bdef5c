"""Shared experts run while the device works: after a layer's message has left, before its answer is waited for."""

from pathlib import Path
from typing import Any

import make_family_models
import pytest
from engines import PROMPTS, engine, greedy, replay_of, token_ids, trace_of

pytestmark = pytest.mark.vllm

FAMILIES = ("deepseek_v3", "llama4")
"""Latent attention, a dense layer and an unweighted shared expert; one whose input is not weighed as that of the routed
ones is. `make test-families` has the others."""
WINDOWS = "gpt_oss"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("families")
    for family in (*FAMILIES, WINDOWS):
        make_family_models.make(family, out)
    return out


def watched(llm: Any) -> list[tuple[str, int]]:
    """(what, MoE layer) in the order in which it happens from now on: send, shared, answer."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    events: list[tuple[str, int]] = []
    worker = llm.llm_engine.model_executor.driver_worker.worker
    runners = [module for module in worker.model_runner.model.modules() if isinstance(module, MoERunner)]
    for layer, runner in enumerate(runners):
        runner.shared_experts._layer.register_forward_hook(lambda *_, layer=layer: events.append(("shared", layer)))
    client = worker.ndp.device.link.client
    begin, finish = client.begin_execute, client.finish_execute
    sent: dict[int, int] = {}

    def begin_and_note(layer: int, *message: Any, **options: Any) -> Any:
        events.append(("send", layer))
        handle = begin(layer, *message, **options)
        sent[handle.id] = layer
        return handle

    def finish_and_note(handle: Any) -> Any:
        events.append(("answer", sent[handle.id]))
        return finish(handle)

    client.begin_execute, client.finish_execute = begin_and_note, finish_and_note
    return events


OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 128, "max_model_len": 512}
LONG = (PROMPTS[0] * 4, PROMPTS[1], PROMPTS[2] * 3)


def generate(llm: Any) -> list[list[int]]:
    """Prompts in chunks beside decode rows, requests that end at different steps."""
    return token_ids(greedy(llm, LONG, [4, 7, 10]))


@pytest.fixture(scope="module")
def stock_tokens(models: Path) -> dict[str, list[list[int]]]:
    """Of each family, eager."""
    tokens = {}
    for family in FAMILIES:
        with engine(models / family, **OPTIONS) as llm:
            tokens[family] = generate(llm)
    return tokens


def assert_the_message_leaves_first(events: list[tuple[str, int]], num_layers: int, num_steps: int) -> None:
    calls = [i for i, (what, _) in enumerate(events) if what == "send"]
    assert len(calls) > num_layers, "too few layers asked the device to show anything"
    for i in calls:
        layer = events[i][1]
        assert events[i : i + 3] == [("send", layer), ("shared", layer), ("answer", layer)]
    shared = [layer for what, layer in events if what == "shared"]
    assert shared == list(range(num_layers)) * num_steps, "each layer's shared expert runs once a step, in order"


def assert_replays(model: Path, recorded: Path) -> None:
    """Attention layers of several kinds, dense layers and shared experts, through the trace, to the picosecond."""
    replayed = replay_of(trace_of(recorded, model))
    assert len(replayed.steps) > 8
    assert replayed.identical


COMPILED: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"backend": "eager"}}
"""Traced and split as always."""


@pytest.mark.parametrize(
    ("family", "compiled"),
    [*((family, {}) for family in FAMILIES), pytest.param(FAMILIES[0], COMPILED, marks=pytest.mark.families)],
)
def test_the_message_leaves_before_the_shared_expert_runs_tokens_are_stocks_and_replays_are_equal(
    models: Path, stock_tokens: dict[str, list[list[int]]], tmp_path: Path, family: str, compiled: dict[str, Any]
) -> None:
    settings = {"cold_precision": "full", "record": str(tmp_path / "trace")}
    with engine(models / family, settings=settings, **compiled, **OPTIONS) as llm:
        events = watched(llm)
        tokens = generate(llm)
        totals = llm.collective_rpc("ndp_totals")[0]
        controller = llm.llm_engine.model_executor.driver_worker.worker.ndp
        num_layers, layers = len(controller.worker.parts.hot.layers), controller.status()["decode_layers"]
        kinds = controller.worker.facts.shape.kinds
    assert tokens == stock_tokens[family]
    assert totals["fallback_pairs"] == 0
    assert layers == "plain", "few decode rows take the native layer in every family"
    assert_the_message_leaves_first(events, num_layers, totals["steps"])
    assert len(kinds) >= 2, "decoder layers of several kinds"
    assert_replays(models / family, tmp_path / "trace")


def test_layers_with_and_without_a_window_take_their_simulated_time_again_when_replayed(
    models: Path, tmp_path: Path
) -> None:
    settings = {"cold_precision": "full", "record": str(tmp_path / "trace")}
    with engine(models / WINDOWS, settings=settings, **OPTIONS) as llm:
        generate(llm)
        shape = llm.llm_engine.model_executor.driver_worker.worker.ndp.worker.facts.shape
    assert len(shape.kinds) >= 2, "decoder layers of several kinds"
    assert_replays(models / WINDOWS, tmp_path / "trace")
