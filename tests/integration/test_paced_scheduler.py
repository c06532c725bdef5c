"""Steps with tokens of prompts are as long as time allows while requests decode; tokens stay those of stock vLLM."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import MODEL, PROMPTS, engine, greedy, sentence, token_ids
from hypothesis import given
from hypothesis import strategies as st

from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape
from vllm_ndp.integration import device_link
from vllm_ndp.integration.compat import is_server
from vllm_ndp.integration.device_link import DeviceLink
from vllm_ndp.integration.paced_scheduler import PacedScheduler, StepTimes
from vllm_ndp.layer.split import Pairs

TIMES = st.floats(1e-4, 1.0)


def measured(quiet_s: float, fixed_s: float, token_s: float) -> StepTimes:
    times = StepTimes()
    for prompt_tokens in (0, 512, 0, 64, 128):
        times.note(prompt_tokens, quiet_s if prompt_tokens == 0 else fixed_s + token_s * prompt_tokens)
    return times


@given(TIMES, TIMES, st.floats(1e-5, 1e-2))
def test_a_step_lasts_what_was_asked_or_twice_its_fixed_time(quiet_s: float, fixed_s: float, token_s: float) -> None:
    tokens = measured(quiet_s, fixed_s, token_s).tokens_within(3.0)
    assert tokens is not None
    allowed = max(3 * quiet_s, 2 * fixed_s)
    assert tokens == 16 or fixed_s + token_s * tokens <= allowed * (1 + 1e-6)
    assert fixed_s + token_s * (tokens + 16) >= allowed * (1 - 1e-6)  # and no smaller than that


@given(TIMES, st.floats(1e-5, 1e-2))
def test_steps_of_one_size_cost_a_quiet_step_and_their_tokens(quiet_s: float, token_s: float) -> None:
    times = StepTimes()
    times.note(0, quiet_s)
    times.note(256, quiet_s + 256 * token_s)
    tokens = times.tokens_within(3.0)
    assert tokens is not None
    assert tokens == 16 or quiet_s + token_s * tokens <= 3 * quiet_s * (1 + 1e-6)


def test_before_anything_is_measured_there_is_no_bound() -> None:
    times = StepTimes()
    assert times.tokens_within(3.0) is None
    times.note(0, 0.1)
    assert times.tokens_within(3.0) is None


def test_a_server_is_told_by_its_command_line() -> None:
    assert is_server(["/bin/vllm", "serve", "MODEL"])
    assert is_server(["/lib/vllm/entrypoints/openai/api_server.py", "--model", "MODEL"])
    assert not is_server(["/bin/vllm", "bench", "throughput"])
    assert not is_server(["mine.py"])


@pytest.mark.vllm
def test_while_others_decode_a_long_prompt_comes_in_parts_and_no_token_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams

    steps: list[dict[str, int]] = []
    schedule = PacedScheduler.schedule

    def noted(self: PacedScheduler, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        steps.append(dict(output.num_scheduled_tokens))
        return output

    monkeypatch.setattr(PacedScheduler, "schedule", noted)
    monkeypatch.setattr(StepTimes, "tokens_within", lambda self, factor: 16 if factor == 2.5 else None)
    long, drawn = PROMPTS[0] * 8, SamplingParams(temperature=1.0, seed=6, max_tokens=32)
    settings = {"cold_precision": "full", "hot_experts": 4, "itl_factor": 2.5}
    with engine(MODEL, settings=settings, enable_prefix_caching=False) as llm:
        expected = [token_ids(greedy(llm, [prompt], 32)) for prompt in PROMPTS[1:3]]
        expected.append(token_ids(llm.generate([long], drawn, use_tqdm=False)))
        assert llm.collective_rpc("ndp_status")[0]["itl_factor"] == 2.5
        steps.clear()
        llm.enqueue(list(PROMPTS[1:3]), SamplingParams(temperature=0.0, max_tokens=32))
        running = llm.llm_engine
        for _ in range(4):
            running.step()
        assert all(count == 1 for count in steps[-1].values())  # both decode
        llm.enqueue([long], drawn)
        done = {}
        while running.has_unfinished_requests():
            done |= {out.request_id: out for out in running.step() if out.finished}
        found = [[list(done[name].outputs[0].token_ids)] for name in sorted(done, key=int)]
    assert found == expected
    late = max(done, key=int)
    parts = [(step[name], len(step)) for step in steps for name in step if name.split("-")[0] == late]
    assert len([count for count, beside in parts if count > 1 and beside > 1]) > 1
    assert all(count <= 16 for count, beside in parts if beside > 1)


@pytest.mark.vllm
def test_pacing_that_cannot_work_is_refused() -> None:
    with (
        pytest.raises(ConfigError) as error,
        engine(MODEL, settings={"itl_factor": 3}, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"),
    ):
        pass
    assert "'itl_factor' cannot work beside --scheduler-cls" in sentence(error)


# -- How long a call with prompt rows may take: longer than one of decode, with a cap for large models -----------------


MIXTRAL = ModelShape("mixtral-8x7b", 32, 8, 2, 4096, 14336)
CHUNK = 8192


@pytest.fixture
def link() -> DeviceLink:
    members: Any = SimpleNamespace(clients=[None], deadline_ms=300.0)
    setup: Any = SimpleNamespace(spill_bits=0, splits_prefill=True)
    return DeviceLink(members, setup, None, MIXTRAL, range(1), torch.float32, None)


def prompt_of(num_rows: int) -> tuple[Any, Pairs]:
    """A step of one prompt, and one pair for each of its rows."""
    rows, each = SimpleNamespace(all_decode=False, decode=np.zeros(num_rows, np.bool_)), np.arange(num_rows)
    return SimpleNamespace(rows=rows), Pairs.of(each, each % 8, np.ones(num_rows, np.float32))


def test_prompts_of_mixtral_prolong_the_deadline_by_the_cap_at_most(link: DeviceLink) -> None:
    assert link._prompts_s(*prompt_of(1)) == pytest.approx(3 * 4096 * 14336 / 2.5e9)
    for num_rows in (CHUNK // 10, 2 * CHUNK):
        assert num_rows * MIXTRAL.weights_per_expert / 2.5e9 > 50
        assert link._prompts_s(*prompt_of(num_rows)) == device_link._MOST_PROMPT_S <= 10


def test_a_round_trip_is_told_once(link: DeviceLink) -> None:
    link.round_trips_s.append(0.5)
    assert (link.take_round_trips(), link.take_round_trips()) == ([0.5], [])
