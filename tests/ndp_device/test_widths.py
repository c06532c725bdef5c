"""The one table of widths: what goes over the wire must never change its meaning."""

from __future__ import annotations

from ndp_device.common.widths import ALL_FLAGS, FLAG_OF_BITS, LIMBS, PLAN_BITS, REPLICA_WIDTHS


def test_a_plans_flags_are_those_of_the_protocol() -> None:
    """docs/protocol.md: bit i of a flag stands for the i-th of 1, 2, 3, 4, 16 and 8 bits."""
    assert {bits: flag for bits, flag in enumerate(FLAG_OF_BITS) if flag} == {1: 1, 2: 2, 3: 4, 4: 8, 16: 16, 8: 32}
    assert sum(FLAG_OF_BITS[bits] for bits in PLAN_BITS) == ALL_FLAGS == 63


def test_every_width_of_a_replica_has_activations_and_a_place_in_a_plan() -> None:
    assert tuple(LIMBS) == REPLICA_WIDTHS
    assert set(REPLICA_WIDTHS) < set(PLAN_BITS)
