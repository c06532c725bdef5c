"""vLLM's Ray executor on CPU: its CPU platform names no resource of Ray, so it refuses Ray there.

Gives it one, `vllm_cpu`, one unit per rank. On GPUs vLLM's own executor runs as it is. On a cluster each node is
started with `ray start --resources='{"vllm_cpu": N}'`. Why it has to replace two things of vLLM's, and until when:
patches/cpu-ray/README.md.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2

RESOURCE = "vllm_cpu"


class CpuRayWorkerProc(ray_executor_v2.RayWorkerProc):
    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Ray knows no accelerator here: a rank is its own number."""
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]


class CpuRayExecutor(ray_executor_v2.RayExecutorV2):
    def _init_executor(self) -> None:
        type(current_platform).ray_device_key = RESOURCE
        ray_executor_v2.RayWorkerProc = CpuRayWorkerProc
        if not ray.is_initialized() and "RAY_ADDRESS" not in os.environ:
            ranks = self.parallel_config.world_size
            os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by itself: ranks would yield to all that runs here
            options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": True}
            ray.init(num_cpus=ranks, resources={RESOURCE: ranks}, **options)
        super()._init_executor()
