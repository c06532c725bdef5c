"""A GPU that is one, with the interface of the pretended one: the same tests run on real streams, events and kernels.

On the host's own memory it is what the plugin has without a GPU: streams that are done at once; layers have another
kernel there, so that tests of layers run on GPUs only. Counts no waits: real ones are seen by a profiler. Knows torch,
and nothing of the plugin but its streams and pinned memory.
"""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch
from pretend_gpu import PretendGpu

from vllm_ndp.integration.cuda.streams import Stream, make_stream, pinned_for

GPUS = ["pretended", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [*GPUS, "host"]


class RealGpu:
    def __init__(self, device: torch.device) -> None:
        self.device, self.pinned = device, pinned_for(device)
        self.waits: list[str] = []
        self.launches = 0

    def __enter__(self) -> RealGpu:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        return self

    def __exit__(self, *error: object) -> None: ...

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        return data.clone().to(self.device)

    def stream(self) -> Stream:
        return make_stream(self.device)


Gpu: TypeAlias = PretendGpu | RealGpu


def gpu_of(kind: str) -> Gpu:
    if kind == "pretended":
        return PretendGpu()
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return RealGpu(torch.device("cpu") if kind == "host" else torch.device("cuda", 0))
