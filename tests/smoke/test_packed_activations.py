"""Activations packed in bit planes: exact codes, the recorded sample's ratio and error, and bytes that lie.

tests/data/tiny-mixtral-activations.npz: 32 held-out decode rows of each layer of models/tiny-mixtral, what entered its
experts ("sent") and the result of the first chosen one ("back"), written on 2026-11-22 by
`python benchmarks/activation_codec.py --sample FILE`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA, ROOT

from ndp_device.errors import ConfigError
from vllm_ndp.lab.systems.cxl_expert import _PACKED_SHARE, packed_share

sys.path.insert(0, str(ROOT / "benchmarks"))
from packed_activations import BITS, ActivationCodec, decode, relative_error

with np.load(DATA / "tiny-mixtral-activations.npz") as recorded:
    SAMPLE = {name: recorded[name].astype(np.float32) for name in ("sent", "back")}


def test_a_row_packs_by_hand():
    """One row of 8 values in one group at 3 bits: codes -3..3, so 3.0 at the top gives a scale of 1 and each value is
    its own code, .4 rounds to 0. Planes of 8 bits: signs 10000000, twos 01100000, ones 11001000; a byte each, never
    smaller deflated. 11 bytes of header, 2 of scale, 3 planes of 5 + 1."""
    row = np.array([[-1.0, 3.0, 2.0, 0.4, 1.0, 0.0, 0.0, 0.0]])
    message = ActivationCodec(3, group_size=8).encode(row)
    assert len(message) == 11 + 2 + 3 * 6
    assert [message[13 + 6 * plane + 5] for plane in range(3)] == [0b10000000, 0b01100000, 0b11001000]
    assert decode(message).tolist() == [[-1.0, 3.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0]]


@settings(max_examples=60)
@given(
    st.integers(1, 9), st.integers(1, 70), st.sampled_from(BITS), st.integers(1, 80), st.booleans(), st.integers(0, 99)
)
def test_what_is_unpacked_is_within_half_a_step_of_each_groups_range(rows, columns, bits, group, deflate, seed):
    values = np.random.default_rng(seed).normal(size=(rows, columns)) * 10.0 ** (seed % 7 - 3)
    unpacked = decode(ActivationCodec(bits, group, deflate).encode(values))
    assert unpacked.shape == values.shape
    for start in range(0, columns, group):
        part = slice(start, start + group)
        largest = np.abs(values[:, part]).max(axis=1, keepdims=True)
        # half a step, the scale's own rounding in float16, and codes that are cut at the top because of it
        allowed = largest / (2 ** (bits - 1) - 1) * 0.5 + largest * 2**-10 + 2**-24 * 2 ** (bits - 1)
        assert (np.abs(unpacked[:, part] - values[:, part]) <= allowed).all()


@pytest.mark.parametrize(("bits", "error"), [(8, 3.5e-5), (4, 1.15e-2)])
@pytest.mark.parametrize("way", ["sent", "back"])
def test_recorded_activations_shrink_and_lose_what_the_replayed_system_says(bits, error, way):
    """Messages of 1 and 16 rows of 128 values, on a 24th of the rows that the figures were measured on."""
    codec = ActivationCodec(bits)
    for rows in (1, 16):
        messages = [layer[at : at + rows] for layer in SAMPLE[way] for at in range(0, 32, rows)]
        measured = np.mean([codec.ratio(message) for message in messages])
        assert measured == pytest.approx(packed_share(bits, np.array(rows * 128)), rel=0.02)
    errors = [relative_error(layer, decode(codec.encode(layer))) for layer in SAMPLE[way]]
    assert np.mean(errors) == pytest.approx(error, rel=0.05)


def test_a_larger_message_of_fewer_bits_is_smaller_and_16_bits_are_not_packed():
    values = np.array([1, 128, 500, 2048, 32768, 1 << 20])
    shares = [packed_share(bits, values) for bits in sorted(_PACKED_SHARE)]
    assert all((np.diff(share) <= 0).all() for share in shares)
    assert all((wide > narrow).all() for narrow, wide in itertools.pairwise(shares))
    assert (packed_share(16, values) == 1).all()


def test_messages_that_encode_cannot_have_written_are_refused():
    message = ActivationCodec(4).encode(SAMPLE["sent"][0])
    for broken in (b"", message[:5], message[:40], message[:-1], message + b"\0", b"\0" * len(message)):
        with pytest.raises(ValueError, match=r"activation|plane|packed"):
            decode(broken)
    first_plane = 11 + 32 * 2 * 2
    for kind in (2, 255):
        with pytest.raises(ValueError, match="plane"):
            decode(message[:first_plane] + bytes([kind]) + message[first_plane + 1 :])


@settings(max_examples=200)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_ends_in_a_value_error_or_in_numbers(place, value):
    message = bytearray(ActivationCodec(4).encode(SAMPLE["sent"][0][:4]))
    message[place % len(message)] = value
    with contextlib.suppress(ValueError):
        assert decode(bytes(message)).size > 0


@pytest.mark.parametrize("values", [[[np.nan]], [[np.inf]], [[1e6]], [1.0], [[]]])
def test_what_is_no_activation_is_refused(values):
    with pytest.raises(ValueError, match="activations"):
        ActivationCodec().encode(values)


@pytest.mark.parametrize("fields", [{"bits": 1}, {"bits": 9}, {"group_size": 0}, {"group_size": 1 << 16}])
def test_impossible_codecs_are_refused(fields):
    with pytest.raises(ConfigError, match="must lie in"):
        ActivationCodec(**fields)
