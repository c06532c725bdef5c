"""vLLM's executor of several processes, whose own process sleeps while its workers compute. Workers: worker.py."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_ndp.integration.waiting import sleep_while_waiting


class SleepingMultiprocExecutor(MultiprocExecutor):
    def _init_executor(self) -> None:
        sleep_while_waiting()
        super()._init_executor()
