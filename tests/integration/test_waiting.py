"""Processes of an engine on CPU sleep while they wait: which executor, which of OpenMP's variables, and what stays."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from vllm_ndp.integration import vllm_private, waiting

OPENMP = ("OMP_PLACES", "OMP_PROC_BIND", "OMP_NUM_THREADS", "GOMP_SPINCOUNT")


def config(executor: str = "uni", ranks: int = 1, copies: int = 1) -> SimpleNamespace:
    parallel = SimpleNamespace(
        distributed_executor_backend=executor,
        world_size=ranks,
        local_world_size=ranks,
        data_parallel_size=copies,
        data_parallel_rank_local=None,
        _api_process_count=1,
    )
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in list(os.environ):  # engines of the tests before leave some
        if name.startswith(("VLLM_CPU_", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_", "GOMP_", "KMP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    yield
    waiting.restore()


def chosen(**settings) -> str:
    given = config(**settings)
    waiting.configure(given)
    return given.parallel_config.distributed_executor_backend


IN_A_PROCESS = """
import os, sys
from vllm_ndp.integration import waiting
from test_waiting import config
given = config()
waiting.configure(given)
assert given.parallel_config.distributed_executor_backend == waiting.ONE_PROCESS
print(os.environ["OMP_NUM_THREADS"], os.environ["OMP_PLACES"])
"""


def test_one_rank_runs_in_the_engines_own_process_with_the_cores_that_a_worker_would_have():
    """In a process of its own: vLLM remembers how it bound the threads of the engines before."""
    others = ("VLLM_", "OMP_", "GOMP_", "KMP_", "LD_PRELOAD")  # left by engines before
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    environment |= {"PYTHONPATH": str(Path(__file__).parent), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    command = [sys.executable, "-c", IN_A_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    cores = sorted(os.sched_getaffinity(0))
    assert done.stdout.splitlines()[-1] == f"{len(cores)} {{{','.join(map(str, cores))}}}"


def test_several_ranks_sleep_and_an_executor_that_was_named_stays():
    assert chosen(executor="mp", ranks=2) == waiting.SLEEPING
    assert chosen(executor="mp") == "mp"
    assert chosen(executor="ray", ranks=2) == "ray"
    assert chosen(copies=2) == "uni"


def test_what_was_set_is_undone_for_the_next_engine():
    before = {name: os.environ.get(name) for name in OPENMP}
    chosen()
    assert "GOMP_SPINCOUNT" in os.environ
    waiting.restore()
    assert {name: os.environ.get(name) for name in OPENMP} == before


@pytest.mark.parametrize("variable", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_waiting_policy_of_the_user_stays(variable, monkeypatch):
    monkeypatch.setenv(variable, "77")
    chosen()
    assert os.environ[variable] == "77"
    assert {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ) == {variable}


def test_an_engine_in_the_users_own_process_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert chosen() == "uni"
    assert "GOMP_SPINCOUNT" not in os.environ


PROGRAM = """
import resource, sys, threading, time
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm_ndp.integration.vllm_private import sleep_between_looks
if sys.argv[1] == "sleeping":
    sleep_between_looks()
queue = MessageQueue(1, 1)
reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
threading.Thread(target=lambda: [(time.sleep(0.1), queue.enqueue(n)) for n in range(5)]).start()
reader.dequeue(timeout=20)
before = resource.getrusage(resource.RUSAGE_SELF)
assert [reader.dequeue(timeout=20) for _ in range(4)] == [1, 2, 3, 4]
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_nvcsw - before.ru_nvcsw)
"""


def looks(kind: str) -> int:
    """How often a reader of four messages, a tenth of a second apart, gave up its core of its own accord."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, timeout=300, check=True
    )
    return int(done.stdout.split()[-1])


def test_a_reader_sleeps_between_looks_and_misses_no_message():
    """Asleep for a 32nd of what it has waited: 100 looks in a tenth of a second, not 100 000."""
    assert 4 <= looks("sleeping") < 4 * 400


def test_a_reader_that_has_waited_long_is_woken_as_stock_wakes_it():
    woken = []
    condition = SimpleNamespace(last_read=time.monotonic() - 10, busy_loop_s=1)
    stock = SpinCondition.wait
    try:
        SpinCondition.wait = lambda self, timeout_ms=None: woken.append(timeout_ms)
        vllm_private.sleep_between_looks()
        SpinCondition.wait(condition, 5)
        assert woken == [5]
    finally:
        SpinCondition.wait = stock
