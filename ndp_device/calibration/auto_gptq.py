"""auto-gptq's solver behind our interface, for comparison. An optional extra: docs/replica-format.md, "auto-gptq".

auto-gptq 0.7.1, the last release, cannot be imported beside today's transformers: its package file pulls in names that
are gone. Its GPTQ class alone still works, with two shims. An empty parent package makes Python execute only the one
submodule. On a machine without CUDA, the second shim makes torch.cuda.synchronize do nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import QuantizedMatrix, pack

BITS = (2, 3, 4)
"""Its levels are scale * (code - integer zero): at one bit these are zero and one other value, which is useless."""


def quantize(weights: Tensor, hessian: Tensor, *, bits: int, group_size: int, damp: float) -> QuantizedMatrix:
    """W [N, C] float32, H [C, C] -> the matrix as auto-gptq quantizes it, columns in falling order of H's diagonal."""
    if bits not in BITS:
        raise ConfigError(f"auto-gptq makes replicas of {list(BITS)} bits, not {bits}: use --solver nested for 1 bit")
    linear = torch.nn.Linear(weights.shape[1], weights.shape[0], bias=False, device=weights.device)
    linear.weight.data = weights.clone()
    solver = load_gptq_class()(linear)
    # by default sym is True and mse False, which loses more: docs/replica-format.md
    solver.quantizer.configure(bits, perchannel=True, sym=False, mse=True)
    solver.H, solver.nsamples = hessian.float().clone(), 1  # which it overwrites
    with synchronize_without_cuda(), torch.no_grad():
        scale, zero, group_of = solver.fasterquant(percdamp=damp, group_size=group_size, actorder=True)
    order = torch.argsort(group_of, stable=True)
    groups = group_of[order].long()
    codes = (linear.weight.data[:, order] / scale[:, groups] + zero[:, groups]).round().clamp(0, (1 << bits) - 1)
    return QuantizedMatrix(
        bits,
        pack(codes.to(torch.uint8).cpu().numpy(), bits),
        scale.cpu().numpy().astype(np.float16),
        (-scale * zero).cpu().numpy().astype(np.float16),
        group_size,
        order.cpu().numpy().astype(np.int32),
    )


def load_gptq_class() -> Any:
    """auto_gptq.quantization.gptq.GPTQ without running auto_gptq/__init__.py."""
    spec = importlib.util.find_spec("auto_gptq")
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError(
            "--solver auto-gptq needs the package auto-gptq: docs/replica-format.md says how to install it"
        )
    parent = types.ModuleType("auto_gptq")
    parent.__path__ = list(spec.submodule_search_locations)
    sys.modules["auto_gptq"] = parent
    try:
        return importlib.import_module("auto_gptq.quantization.gptq").GPTQ
    finally:
        del sys.modules["auto_gptq"]


@contextlib.contextmanager
def synchronize_without_cuda() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    original, torch.cuda.synchronize = torch.cuda.synchronize, lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.synchronize = original
