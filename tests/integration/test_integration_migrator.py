"""Copies beside the step: a layer waits for its own and for nothing else, and what goes wrong is said there."""

from __future__ import annotations

import os
import threading

import pytest
from engines import PROMPTS, REPLICAS, engine, greedy, token_ids

from vllm_ndp.integration import streaming
from vllm_ndp.integration.hot_experts import Migrator

pytestmark = pytest.mark.vllm
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


@pytest.mark.parametrize("pool", ["checkpoint", "packed"])
def test_slow_copies_change_no_token(pool, monkeypatch):
    settings = {
        "hot_experts": 3,
        "avg_bits": 2.0,
        "replicas": str(REPLICAS),
        "debug": {"pool": pool},
    }
    kind = {"checkpoint": streaming.StagingStreamer, "packed": streaming.PackedStreamer}[pool]
    fill, pause, threads = kind.fill, threading.Event(), set()

    def slow(self, *arguments):
        if threading.current_thread() is not threading.main_thread():
            threads.add(threading.current_thread().name)
            pause.wait(0.02)
        fill(self, *arguments)

    tokens = []
    for wanted in (fill, slow):
        monkeypatch.setattr(kind, "fill", wanted)
        with engine(settings=settings) as llm:
            tokens.append([token_ids(greedy(llm, batch, 8)) for batch in ([PROMPTS[0]], PROMPTS[1:])])
    assert tokens[0] == tokens[1]
    assert len(threads) == 1
