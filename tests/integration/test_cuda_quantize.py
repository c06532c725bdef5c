"""`quantize --device cuda` on the pretended GPU: nothing mixes memories, and the replicas are those of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pretend_gpu import GPU, PretendGpu

from ndp_device.calibration.calibrated import CalibratedExpert, FloatExpert, RoutedInputs, load_solver, quantize_expert
from ndp_device.experts.expert import FullExpert

HIDDEN, INTERMEDIATE, TOKENS = 32, 48, 80


def quantized(device: torch.device) -> CalibratedExpert:
    random = np.random.default_rng(0)
    draw = lambda *shape: random.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5  # noqa: E731
    full = FullExpert("float32", draw(INTERMEDIATE, HIDDEN), draw(INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE))
    rows, held_out = torch.from_numpy(draw(TOKENS, HIDDEN)), torch.from_numpy(draw(TOKENS, HIDDEN))
    ids = torch.from_numpy(random.integers(0, 2, (TOKENS, 1)))
    solve = load_solver("nested", 16, {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0})
    inputs, unseen = RoutedInputs(rows, ids), RoutedInputs(held_out, ids)
    return quantize_expert(FloatExpert(full, device), 0, inputs, unseen, solve)


def test_an_expert_is_quantized_on_a_gpu_as_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit here, where the GPU's arithmetic is the host's; on a real one `gpu_check.py` compares the losses."""
    wanted = quantized(torch.device("cpu"))
    gpu, make = PretendGpu(), torch.tensor

    def tensor(values: Any, *, device: Any = None, **more: Any) -> torch.Tensor:
        made = make(values, **more)  # torch fills it before any operator is seen
        return gpu.tensor(made) if device == GPU else made

    monkeypatch.setattr(torch, "tensor", tensor)
    with gpu:
        found = quantized(GPU)
    assert gpu.launches > 1000  # it was there
    assert found.num_tokens == wanted.num_tokens
    assert np.array_equal(found.loss, wanted.loss)
    for bits, mine in found.replicas.items():
        for name in ("planes", "scale", "offset"):
            for matrix in ("w13", "w2"):
                theirs = getattr(getattr(wanted.replicas[bits], matrix), name)
                assert np.array_equal(getattr(getattr(mine, matrix), name), theirs), (bits, matrix, name)
