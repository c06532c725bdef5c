"""vLLM's Ray executor on CPU: its CPU platform names no resource of Ray, so it refuses Ray there.

Gives it one, `vllm_cpu`, one unit per rank. On GPUs vLLM's own executor runs as it is. On a cluster each node is
started with `ray start --resources='{"vllm_cpu": N}'`. Why it has to replace two things of vLLM's, and until when:
patches/cpu-ray/README.md.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from vllm_ndp.integration import vllm_private

RESOURCE = "vllm_cpu"


class CpuRayWorkerProc(RayWorkerProc):
    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Ray knows no accelerator here: a rank is its own number."""
        return ray.get_runtime_context().get_node_id(), [vllm_private.rank_of_ray_worker(self)]


class CpuRayExecutor(RayExecutorV2):
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_private.run_ray_workers(RESOURCE, CpuRayWorkerProc)
        if not ray.is_initialized() and "RAY_ADDRESS" not in os.environ:
            ranks = vllm_config.parallel_config.world_size
            os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by itself: ranks would yield to all that runs here
            options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": True}
            ray.init(num_cpus=ranks, resources={RESOURCE: ranks}, **options)
        super().__init__(vllm_config, *args, **kwargs)
