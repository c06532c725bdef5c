"""Experts that the end of a prefill streamed and that will be hot stay: same tokens, fewer reads of the pool."""

import os
import resource
import threading
import time

import numpy as np
import pytest
from engines import PROMPTS, REPLICAS, engine, greedy, token_ids

from vllm_ndp.config import NdpSettings
from vllm_ndp.integration import controller, hot_experts
from vllm_ndp.integration.hot_experts import Migrator

pytestmark = pytest.mark.vllm


SETTINGS = {"hot_experts": 3, "avg_bits": 2.0, "prefill": "streamed", "replicas": str(REPLICAS)}
"""Prompts that are streamed whole have the most to keep."""


def serve(keeps: bool, monkeypatch: pytest.MonkeyPatch):
    """Tokens of three batches in chunks, totals, how often an expert was read, and whether slots hold what they name.

    Then a prompt that was to change the placement leaves, and slots hold the placement as before. Where nothing is kept
    each copy beside a step takes 20 ms longer.
    """
    reads, threads = list[tuple[int, int]](), set[str]()
    load, fill = hot_experts.StagingStreamer._load, hot_experts.StagingStreamer.fill

    def counted(self, layer, expert, *more):
        reads.append((layer, expert))
        load(self, layer, expert, *more)

    def slow(self, *arguments):
        if threading.current_thread() is not threading.main_thread():
            threads.add(threading.current_thread().name)
            threading.Event().wait(0 if keeps else 0.02)
        fill(self, *arguments)

    monkeypatch.setattr(hot_experts.StagingStreamer, "_load", counted)
    monkeypatch.setattr(hot_experts.StagingStreamer, "fill", slow)
    monkeypatch.setattr(NdpSettings, "keeps_streamed", keeps)
    with engine(settings=SETTINGS, max_num_batched_tokens=32) as llm:
        reads.clear()
        tokens = [token_ids(greedy(llm, batch, 8)) for batch in ([PROMPTS[0]], PROMPTS[1:], [PROMPTS[2] * 5])]
        totals = llm.collective_rpc("ndp_totals")[0]
        num_reads = len(reads)
        assert_slots_hold_what_they_name()
        first = token_ids(greedy(llm, [PROMPTS[0]], 6))
        prefills = llm.collective_rpc("ndp_totals")[0]["prefills"]
        assert greedy(llm, [PROMPTS[3]], 1)  # ends with its prefill, after it has kept experts
        assert llm.collective_rpc("ndp_totals")[0]["prefills"] == prefills
        assert token_ids(greedy(llm, [PROMPTS[0]], 6)) == first
        assert_slots_hold_what_they_name()
    monkeypatch.undo()
    assert len(threads) == 1
    return tokens, totals, num_reads


def assert_slots_hold_what_they_name() -> None:
    """Every slot against its expert, packed anew from the checkpoint; and the slots against the placement."""
    ours = controller.current_controller().worker
    for layer in range(ours.facts.pool.shape.num_layers):
        slots = ours.parts.hot.layers[layer]
        assert sorted(slots.expert_in) == np.flatnonzero(ours.run.planner.placement.hot[layer]).tolist()
        for slot, expert in enumerate(slots.expert_in):
            anew = slots.held.empty_like(1)
            slots.kernel.load(anew, 0, ours.facts.pool.expert(layer, expert))
            assert anew.w13.equal(slots.held.w13[slot : slot + 1])
            assert anew.w2.equal(slots.held.w2[slot : slot + 1])
            assert slots.where[expert] == slot == int(slots.expert_map[expert])


def test_keeping_streamed_experts_saves_a_read_each_and_neither_that_nor_slow_copies_change_a_token(monkeypatch):
    kept, moved = (serve(keeps, monkeypatch) for keeps in (True, False))
    assert kept[0] == moved[0]
    assert kept[1]["kept_experts"] > 0 == moved[1]["kept_experts"]
    assert kept[1]["migrated_experts"] + kept[1]["kept_experts"] == moved[1]["migrated_experts"]
    assert kept[2] == moved[2] - kept[1]["kept_experts"]
    assert kept[1]["simulated_ps"] < moved[1]["simulated_ps"]


# -- copies beside the step: a layer waits for its own and for nothing else --------------------------------------------

TIMEOUT_S = 20


@pytest.fixture
def migrator():
    migrator = Migrator(os.sched_getaffinity(0))
    yield migrator
    migrator.close()


def test_a_layer_does_not_wait_for_a_later_one(migrator):
    done, release = [], threading.Event()
    migrator.begin(0, [lambda: done.append(0)])
    migrator.begin(1, [lambda: release.wait(TIMEOUT_S), lambda: done.append(1)])
    migrator.wait(0)
    migrator.wait(7)  # has nothing to move
    assert done == [0]
    release.set()
    migrator.wait(1)
    assert done == [0, 1]


def test_what_a_move_raises_is_raised_once_where_its_layer_waits(migrator):
    def fail():
        raise OSError("the pool is gone")

    migrator.begin(0, [fail])
    migrator.begin(1, [lambda: None])
    migrator.wait(1)
    with pytest.raises(OSError, match="the pool is gone"):
        migrator.wait(0)
    migrator.wait(0)


def test_a_layer_that_still_moves_takes_no_second_set_of_moves(migrator):
    migrator.begin(3, [lambda: None])
    with pytest.raises(ValueError, match="layer 3 still waits"):
        migrator.begin(3, [lambda: None])


def test_the_copying_thread_may_use_every_core_though_its_maker_is_bound_to_one():
    cores, seen = os.sched_getaffinity(0), []
    try:
        os.sched_setaffinity(0, {min(cores)})
        migrator = Migrator(cores)
        migrator.begin(0, [lambda: seen.append(os.sched_getaffinity(0))])
        migrator.wait(0)
        migrator.close()
    finally:
        os.sched_setaffinity(0, cores)
    assert seen == [cores]


# -- An error inside a layer is seen as it is, and the engine serves the next request ----------------------------------


def test_what_a_layer_raises_is_not_masked_and_the_next_request_is_served(monkeypatch):
    """Before the answer, and while a message is under way. Once `end_step: every layer must have ended` hid the cause,
    and the next request died of the open step."""
    from vllm_ndp.integration.hot_slots import CpuSlotKernel

    with engine(settings={"hot_experts": 3, "avg_bits": 2.0, "replicas": str(REPLICAS), "execution": "paper"}) as llm:
        before = token_ids(greedy(llm, [PROMPTS[0]], 6))
        fused = CpuSlotKernel.fused
        for at, prompt in (("hot", PROMPTS[1]), ("sent", PROMPTS[2])):
            calls: list[int] = []

            def fails_once(self, x, *arguments, at=at, calls=calls):  # type: ignore[no-untyped-def]
                calls.append(len(x))
                if at == "hot" or (len(x) == 1 and len(calls) > 6):  # a decode row, whose message has left
                    monkeypatch.undo()
                    raise ArithmeticError("a kernel that fails")
                return fused(self, x, *arguments)

            monkeypatch.setattr(CpuSlotKernel, "fused", fails_once)
            with pytest.raises(Exception, match="a kernel that fails"):
                greedy(llm, [prompt], 6)
            assert calls, "the error must have been raised"
            llm.llm_engine.abort_request(list(llm.llm_engine.output_processor.request_states), internal=True)
            assert token_ids(greedy(llm, [PROMPTS[0]], 6)) == before
        totals = llm.collective_rpc("ndp_totals")[0]
        assert totals["device_state"] == "up"
        assert totals["fallback_pairs"] == 0


def test_a_trace_that_cannot_be_written_any_longer_costs_no_request(tmp_path, capsys):
    """The kernel refuses every write to a file, as on a full disk; the trace holds what was written before."""
    from vllm_ndp.traces.trace import Trace

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    settings = {"hot_experts": 8, "cold_precision": "full", "record": str(tmp_path / "trace")}
    with engine(settings=settings) as llm:
        before = token_ids(greedy(llm, [PROMPTS[0]], 6))
        time.sleep(3)  # what waits reaches the disk every two seconds
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            assert token_ids(greedy(llm, [PROMPTS[0]], 6)) == before
            time.sleep(3)
            assert token_ids(greedy(llm, [PROMPTS[0]], 6)) == before
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.count("requests go on without a trace") == 1
    assert len(Trace.load(tmp_path / "trace").prompt_len) >= 1
