"""Rows on their way out and sums on their way back, natively, against torch's operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ndp.integration import device_link
from vllm_ndp.integration.device_link import Gather, add_sums

HIDDEN = 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(st.integers(1, 40), st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_partial_sums_are_added_as_torch_adds_them(
    dtype: torch.dtype, num_rows: int, data: st.DataObject, seed: int
) -> None:
    random = np.random.default_rng(seed)
    sent = np.sort(random.permutation(num_rows)[: data.draw(st.integers(1, num_rows))])
    scale = random.choice([1e-39, 1e-3, 1.0, 1e38], (num_rows, 1))
    out = torch.from_numpy(random.uniform(-3, 3, (num_rows, HIDDEN)) * scale).to(dtype)
    sums = (random.uniform(-3, 3, (len(sent), HIDDEN)) * scale[sent]).astype(np.float32)
    expected, few = out.clone(), device_link.FEW_ROWS
    try:
        device_link.FEW_ROWS = 0
        add_sums(expected, sums, sent)
    finally:
        device_link.FEW_ROWS = few
    add_sums(out, sums, sent)
    assert np.array_equal(out.float().numpy(), expected.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_sent", [1, 5, 128, 129, 200])
def test_gathered_rows_are_those_of_the_tensor(dtype: torch.dtype, num_sent: int) -> None:
    """128 rows are gathered natively, 129 by torch."""
    x = torch.randn(200, HIDDEN).to(dtype)
    sent = np.sort(np.random.default_rng(0).permutation(200)[:num_sent])
    found = Gather(HIDDEN, dtype).rows(x, sent)
    wanted = x[torch.from_numpy(sent)]
    assert np.array_equal(found.view(np.uint8), wanted.view(torch.uint8).numpy())
