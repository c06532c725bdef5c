"""Parts of an expert: they add up to the whole at every width, take equal bytes, and never lie across a scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from paths import MODEL, ROOT

from ndp_device.calibration.data_free import round_to_bytes
from ndp_device.common.activation import GPT_OSS
from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import PLAN_BITS
from ndp_device.experts.expert import Biases, Expert, FullExpert, QuantizedExpert, to_float32
from ndp_device.experts.part import WHOLE, Part
from ndp_device.kernels import load_kernel
from ndp_device.replicas.store import ExpertStore

REPLICAS = ROOT / "models" / "tiny-mixtral-replicas"
STORE = ExpertStore(MODEL, REPLICAS, kernel=load_kernel("reference"))
X = np.random.default_rng(5).standard_normal((3, STORE.shape.hidden_size), np.float32)


def computed(expert: Expert, kernel: str) -> NDArray[np.float32]:
    """The expert on every row of X, with gate 1."""
    loaded = load_kernel(kernel)
    rows = np.arange(len(X), dtype=np.int32)
    return loaded.execute(X, [loaded.prepare(expert)], rows, np.zeros_like(rows), np.ones(len(X), np.float32))


def at_8_bits(full: Expert) -> QuantizedExpert:
    """As `quantize` would make it: the bundled replicas have no 8 bits."""
    assert isinstance(full, FullExpert)
    w1, w3, w2 = (to_float32(weights, full.dtype) for weights in (full.w1, full.w3, full.w2))
    return QuantizedExpert(8, round_to_bytes(np.concatenate([w1, w3]), 64), round_to_bytes(w2, 64))


@pytest.mark.parametrize("kernel", ["reference", "native"])
@pytest.mark.parametrize("bits", PLAN_BITS)
@pytest.mark.parametrize("count", [2, 4])
def test_the_parts_of_one_expert_add_up_to_it(kernel: str, bits: int, count: int) -> None:
    """Expert 0 of layer 1, whose replica has its units in another order than the checkpoint. The native kernel rounds
    each group of what comes between the products by its largest value, and no group lies in two parts."""
    expert = STORE.expert(1, 0, bits) if bits in STORE.widths else at_8_bits(STORE.expert(1, 0, 16))
    parts = [Part(index, count).of(expert) for index in range(count)]
    assert sum(part.nbytes for part in parts) == expert.nbytes
    assert len({part.nbytes for part in parts}) == 1
    whole = computed(expert, kernel)
    added = np.sum([computed(part, kernel) for part in parts], axis=0)
    np.testing.assert_allclose(added, whole, rtol=0, atol=2e-6 * np.abs(whole).max())


def test_what_an_expert_adds_at_its_end_is_added_once() -> None:
    rng = np.random.default_rng(1)
    full = STORE.expert(0, 0, 16)
    assert isinstance(full, FullExpert)
    hidden, units = full.w2.shape
    biases = Biases(*(rng.standard_normal(size, np.float32) for size in (units, units, hidden)))
    expert = replace(full, biases=biases, activation=GPT_OSS)
    added = np.sum([computed(Part(index, 2).of(expert), "reference") for index in range(2)], axis=0)
    np.testing.assert_allclose(added, computed(expert, "reference"), rtol=1e-5, atol=1e-5)


def test_a_whole_expert_is_its_only_part() -> None:
    expert = STORE.expert(0, 0, 3)
    assert WHOLE.of(expert) is expert
    WHOLE.check(7, 64)


@pytest.mark.parametrize(("units", "group", "count"), [(256, 64, 3), (256, 64, 8), (256, 1, 64), (24, 8, 2)])
def test_a_border_within_a_scale_or_a_byte_is_refused(units: int, group: int, count: int) -> None:
    with pytest.raises(
        ConfigError, match=f"experts of {units} units with {group} to a scale cannot be cut into {count}"
    ):
        Part(0, count).check(units, group)


def test_widths_that_are_public_can_be_cut() -> None:
    """Mixtral's 14336 = 112 groups of 128, Qwen3-30B's 768 = 12 groups of 64."""
    for units, group, counts in ((14336, 128, (2, 4, 7, 8, 14, 16)), (768, 64, (2, 3, 4, 6))):
        for count in counts:
            Part(count - 1, count).check(units, group)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (0, 0), (-1, 2)])
def test_a_part_that_is_none_of_them_is_refused(index: int, count: int) -> None:
    with pytest.raises(ConfigError, match="a part of an expert must be"):
        Part(index, count)
