"""Two devices behind one engine: stock vLLM's tokens with one of them killed, live times that replay gives again."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from engines import (
    LONG_PROMPTS,
    MODEL,
    engine,
    greedy,
    kill_in_the_middle,
    replay_of,
    stock_tokens_of,
    token_ids,
    trace_of,
)
from small_checkpoint import write_small_checkpoint
from until import until

from ndp_device.checkpoint.files import model_digest
from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.common.errors import NdpError
from vllm_ndp.config import DeviceAddress, NdpSettings
from vllm_ndp.device_client.handshake import Requirements
from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.integration.compat import hardware_of
from vllm_ndp.integration.device_members import DeviceMembers
from vllm_ndp.traces.format import DOWN

pytestmark = pytest.mark.vllm

TOKENS = 24
TWO = {"hot_experts": 3, "cold_precision": "full", "devices": 2, "deadline_ms": 10_000}


@dataclass
class Told:
    """What one engine with two devices did: undisturbed, with one killed in mid-run, and afterwards."""

    directory: Path
    pids: list[list[int]] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)
    executed: list[list[int]] = field(default_factory=list)
    totals: list[dict[str, Any]] = field(default_factory=list)

    def note(self, llm: Any, tokens: list[list[int]]) -> None:
        self.pids.append(llm.collective_rpc("ndp_status")[0]["device_pids"])
        self.tokens.append(tokens)
        self.executed.append(executed(llm))
        self.totals.append(llm.collective_rpc("ndp_totals")[0])


def killed_and_back(directory: Path, settings: dict[str, Any]) -> Told:
    made = Told(directory)
    with engine(settings=settings | {"record": str(directory)}, max_num_batched_tokens=64) as llm:
        made.note(llm, token_ids(greedy(llm, LONG_PROMPTS, TOKENS)))
        made.note(llm, kill_in_the_middle(llm, LONG_PROMPTS, TOKENS, made.pids[0][0]))
        before = executed(llm)[0]
        until(lambda: greedy(llm, LONG_PROMPTS[:1], 4) and executed(llm)[0] > before)  # it serves again
        made.note(llm, token_ids(greedy(llm, LONG_PROMPTS, TOKENS)))
    return made


def executed(llm: Any) -> list[int]:
    """Answers of each device that were used."""
    from vllm_ndp.integration.controller import current_controller

    return [client.counters.executed for client in current_controller().device.link.client.clients]  # type: ignore[union-attr]


def test_two_devices_give_the_tokens_of_stock_vllm_also_while_one_is_killed_and_started_again_and_a_run_replays(
    tmp_path: Path,
) -> None:
    """Each expert has a copy on the other device, so that no pair is left to the engine. The trace says which device
    was down in which step. Of the few in which that changed it says so, and their time is the recorded one."""
    told = killed_and_back(tmp_path / "trace", TWO)
    assert told.tokens == [stock_tokens_of(LONG_PROMPTS, TOKENS)] * 3
    assert [totals["fallback_pairs"] for totals in told.totals] == [0, 0, 0]
    assert told.totals[0]["cold_pairs"] > 0
    assert len(set(told.pids[0])) == 2
    assert min(told.executed[0]) > 0  # both of them compute
    assert told.totals[1]["device_state"] == "up"
    assert told.executed[1][1] > told.executed[0][1]
    assert told.pids[2][0] != told.pids[0][0]  # without a restart of the engine
    assert told.pids[2][1] == told.pids[0][1]
    assert told.executed[2][0] > told.executed[1][0]

    trace = trace_of(told.directory)
    live, num_steps = trace.provenance.live, told.totals[0]["steps"]
    assert live is not None
    assert (live.num_devices, live.device_copies) == (2, 2)
    replay = replay_of(trace)
    assert len(replay.steps) == told.totals[-1]["steps"] > num_steps > 20
    assert replay.identical
    assert replay.fallback_steps == 0
    assert replay.changed_steps <= 6  # none where the loss was noticed between two steps
    down = trace.devices["step"][trace.devices["change"] == DOWN]
    assert len(down)
    assert down.min() > num_steps
    without = replay_of(replace(trace, devices={}))
    assert not without.identical
    assert without.step_ps[:num_steps].tolist() == without.recorded_step_ps[:num_steps].tolist()


def test_without_one_half_the_engine_computes_whole_experts_counts_no_unit_twice_and_its_run_replays(
    tmp_path: Path,
) -> None:
    """There is no other copy: what the other half answers is not used until both are there again."""
    split = killed_and_back(tmp_path / "trace", TWO | {"debug": {"device_experts": "split"}})
    assert split.tokens == [stock_tokens_of(LONG_PROMPTS, TOKENS)] * 3
    assert split.executed[0][0] == split.executed[0][1] > 0
    assert split.totals[1]["fallback_pairs"] > 0
    assert split.executed[2][0] > split.executed[1][0]
    trace = trace_of(split.directory)
    live = trace.provenance.live
    assert live is not None
    assert (live.num_devices, live.splits_experts) == (2, True)
    assert live.expert_bytes[16] * 2 == 3 * 128 * 256 * 2
    replay = replay_of(trace)
    assert len(replay.steps) == split.totals[-1]["steps"]
    assert replay.identical
    assert replay.changed_steps <= 6
    assert not replay_of(replace(trace, devices={})).identical


# -- what is refused, in one sentence, before anything is served ---------------------------------------------------


def refusal(*addresses: str) -> str:
    """What opening these devices for the bundled model says."""
    running = tuple(DeviceAddress(address, None) for address in addresses)
    settings = NdpSettings(running=running, cold_precision="full")
    requirements = Requirements(open_checkpoint(MODEL).shape, hardware_of(settings), full_precision=True)
    with pytest.raises(NdpError) as caught:
        DeviceMembers(settings, requirements, MODEL, model_digest(MODEL), None, set())
    return str(caught.value)


def test_a_list_that_names_one_device_twice_is_refused(device: DeviceProcess, tmp_path: Path):
    tmp_path.chmod(0o700)
    other_name = tmp_path / "again"
    other_name.symlink_to(device.directory / "device")
    said = refusal(device.address, f"ipc://{other_name}")
    assert f"{device.address} and ipc://{other_name} are one device: name each device once" in said


def test_a_device_of_another_model_among_several_is_refused_by_its_address(device: DeviceProcess, tmp_path: Path):
    another = DeviceProcess.spawn(write_small_checkpoint(tmp_path / "another"), None)
    try:
        said = refusal(device.address, another.address)
    finally:
        another.terminate()
    assert another.address in said
    assert device.address not in said
