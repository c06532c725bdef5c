"""What vLLM's own connectors lack on a CPU or leave out: imported by vLLM through their module paths.

HostOffload  the medium of vLLM's OffloadingConnector, whose own copies blocks by CUDA alone. Its manager is vLLM's
FailsOnce    vLLM's ExampleConnector, whose first load brings nothing, as where a store was lost
Tells        vLLM's ExampleConnector, which says something of its own in each answer, as connectors of two engines do
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffload(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return _Copies([each.tensor for each in kv_caches.tensors])


class _Copies(OffloadingWorker):
    """Chunks of one block each; a copy is done when it is begun, and told of in the step after."""

    def __init__(self, caches: list[torch.Tensor]) -> None:
        self._caches, self._held = caches, dict[int, list[torch.Tensor]]()
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, chunk in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            self._held[chunk] = [cache[block].clone() for cache in self._caches]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for chunk, block in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            for cache, held in zip(self._caches, self._held[chunk], strict=True):
                cache[block] = held
        return self._end(job_id)

    def _end(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All are done."""


class FailsOnce(ExampleConnector):
    _failed: set[int] | None = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = [each for each in self._get_connector_metadata().requests if not each.is_store]
        if loads and self._failed is None:
            self._failed = {int(slot) // self._block_size for each in loads for slot in each.slot_mapping}
        else:
            super().start_load_kv(forward_context, **kwargs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed or set(), self._failed and set()
        return failed


class Tells(ExampleConnector):
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, {"theirs": len(block_ids)}
