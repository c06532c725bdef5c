"""How the processes of an engine on CPU wait: asleep, since what they wait for needs the core.

Stock vLLM starts a worker process even for one rank, and the engine's process polls for its answer without sleeping.
Between parallel regions OpenMP's threads spin. On a machine whose cores also run the device both take time from what
computes. So one rank runs in the engine's own process, several ranks are polled for with sleeps, and OpenMP's threads
sleep soon. A user who names an executor, or sets OpenMP's own variables, keeps them. Why, and what vLLM could do
instead: patches/sleeping-readers/README.md.

Workers end when the process that asked for their engine ends, at any moment of the start-up.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from vllm_ndp.integration import vllm_private

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ndp_device.kernels.native import NativeKernel
    from vllm_ndp.integration.batch import Span

ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Full name of the executor. vLLM's CPU platform replaces the short name, because OpenMP's variables must be set before
the process starts; `configure` sets them."""
SLEEPING = "vllm_ndp.integration.worker.SleepingMultiprocExecutor"

_SPINS = "GOMP_SPINCOUNT"
_SPIN_COUNT = "2000"
"""libgomp's spin count, a guess: long enough for regions of one kernel that follow each other, too short for the
device's answer. Only the whole change was measured (docs/log/end-to-end.md), not this number."""
_before: dict[str, str | None] = {}
"""Variables that were set in this process for its engine, as they were."""


def configure(vllm_config: VllmConfig) -> None:
    """Choose the executor and OpenMP's variables of the processes that this one will start."""
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    if not current_platform.is_cpu() or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "1":
        return
    set_for_engine(_SPINS, _SPIN_COUNT)
    if parallel.data_parallel_size > 1 or parallel.distributed_executor_backend not in ("uni", "mp"):
        return
    if parallel.distributed_executor_backend == "mp":
        if parallel.world_size > 1:
            parallel.distributed_executor_backend = SLEEPING
        return
    parallel.distributed_executor_backend = ONE_PROCESS
    for name, value in _openmp_variables(vllm_config).items():
        set_for_engine(name, value)


def restore() -> None:
    """Undo what was set in this process for an engine before."""
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def set_for_engine(name: str, value: str) -> None:
    """Until `restore`. A user's way of waiting stays."""
    if name == _SPINS and {"OMP_WAIT_POLICY", _SPINS} & set(os.environ):
        return
    _before[name] = os.environ.get(name)
    os.environ[name] = value


def _openmp_variables(vllm_config: VllmConfig) -> dict[str, str]:
    """Variables that vLLM's executor gives its first worker process: its cores, and as many threads."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    outside = dict(os.environ)
    with OMPProcessManager(vllm_config).configure_omp_envs(rank=0, local_rank=0):
        return {name: value for name, value in os.environ.items() if outside.get(name) != value}


_FEW_ROWS, _FEW_KV_TOKENS = 16, 2560
"""Of twelve layers of Qwen3-30B-A3B's shape a token takes .91 to .95 of the time with up to 2500 tokens of KV cache,
and 1.05 with 5000, where attention has work for two threads (Xeon with AMX, 2026-11-29). Rows: a guess."""


class StepThreads:
    """Threads in a step whose matrices are all the device's kernel's: what is left to vLLM is small for few rows.

    One thread computes that, and the kernel's threads stay awake meanwhile. Else OpenMP's threads and the kernel's
    would take turns on the same cores, and each turn wakes one that sleeps, five times a layer.
    """

    def __init__(self, kernel: NativeKernel | None) -> None:
        """kernel: None where other kernels have threads of their own to do."""
        self._kernel, self._all = kernel, torch.get_num_threads()

    @contextmanager
    def of(self, spans: Iterable[Span]) -> Iterator[None]:
        """Within: one forward pass of these."""
        kernel = self._kernel
        if kernel is None or not _is_small(spans):
            yield
            return
        vllm_private.use_threads(1)
        kernel.stay_awake(True)
        try:
            yield
        finally:
            kernel.stay_awake(False)
            vllm_private.use_threads(self._all)


def _is_small(spans: Iterable[Span]) -> bool:
    rows = kv_tokens = 0
    for span in spans:
        rows += span.num_tokens
        kv_tokens += span.start + span.num_tokens
    return rows <= _FEW_ROWS and kv_tokens <= _FEW_KV_TOKENS


_OWNER = "NDP_ENGINE_OWNER"
_GRACE_S = 10.0
"""Time that a worker has to end in order. Its device ends with it either way."""


def own_engines() -> None:
    """In the front: workers of engines that this process starts from now on follow it."""
    os.environ[_OWNER] = str(os.getpid())


def follow_owner() -> None:
    """In a worker, before it starts anything. Without an owner on this machine (Ray) it follows nobody."""
    owner = int(os.environ.get(_OWNER, os.getpid()))
    if owner == os.getpid():
        return
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_after, args=(handle,), name="ndp-owner", daemon=True).start()


def _end_after(owner: int) -> None:
    """owner: a descriptor of the process."""
    select.select([owner], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
