"""A recorded run's setup: every field reaches what is planned, priced and held by it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ndp_device.common.errors import ConfigError
from vllm_ndp.cost_model.costs import model_named
from vllm_ndp.layer.devices import of_part
from vllm_ndp.layer.setup import Planning, Setup
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget

LOSS, MIXTRAL = LossTable.nominal(32, 8), model_named("mixtral-8x7b")
PLANNING: dict[str, Any] = {"policy": "prefill", "options": {}, "hot_experts": 3, "avg_bits": 2.5}
SETUP: dict[str, Any] = {
    "preset": "h100-ndp512",
    "overrides": {"dram.kind": "ideal"},
    "host_dims": {},
    "expert_bytes": {3: 1, 16: 1},
    "group_size": 32,
    "activation_bytes": 2,
}


def test_plans_are_made_by_the_rules_that_were_recorded(tmp_path: Path) -> None:
    own = {"warm_experts": 2, "max_loss": 0.1, "bits_for": "batch", "keeps_streamed": False, "full_precision": True}
    rules = Planning(**PLANNING, **own).rules(LOSS)
    assert rules.budget == Budget(3, 2.5, 2, 0.1)
    assert (rules.loss, rules.bits_for, rules.keeps_streamed, rules.full_precision) == (LOSS, "batch", False, True)
    np.save(tmp_path / "prior.npy", np.ones((32, 4)))
    with pytest.raises(ConfigError, match="prior"):
        Planning(**PLANNING | {"options": {"prior": str(tmp_path / "prior.npy")}}).rules(LOSS)


def test_prices_are_of_the_hardware_the_groups_and_the_slots_that_were_recorded() -> None:
    parts = {"num_devices": 3, "splits_experts": True}  # each reads 41 bytes
    own = {"expert_bytes": {4: 41, 8: 1}, "num_gpus": 2, "slot_bits": 4, "stored_bits": 4, "stored_bytes": 123} | parts
    costs, usual = (Setup(**SETUP | more).costs_of(MIXTRAL) for more in (own, {}))
    assert (costs.shape, costs.hardware.dram.kind, costs.group_size) == (MIXTRAL, "ideal", 32)
    assert (costs.num_gpus, costs.slot_bits, costs.slot_bytes, costs.has_bytes) == (2, 4, 123, True)
    assert of_part(costs, 3).replica_bytes(4) == 41
    whole_slots = Setup(**SETUP | own | {"slot_bits": 16}).costs_of(MIXTRAL)
    assert (whole_slots.slot_bytes, whole_slots.replica_bytes(4)) == (MIXTRAL.expert_bytes, 123)
    assert (usual.num_gpus, usual.slot_bits, usual.stored, usual.has_bytes) == (1, 16, None, False)


def test_a_host_computes_where_it_was_told_to_or_a_joint_plan_may() -> None:
    told = [
        {"planning": Planning(**PLANNING, warm_experts=1)},
        {"joint_tiers": "gpu+host+device"},
        {"planning": Planning(**PLANNING), "joint_tiers": "gpu+device"},
        {},
    ]
    assert [Setup(**SETUP, **each).has_warm_experts for each in told] == [True, True, False, False]


def test_several_devices_hold_what_was_recorded_and_a_lone_one_has_no_choice() -> None:
    costs = Setup(**SETUP).costs_of(MIXTRAL)
    assert Setup(**SETUP).devices_of(costs, full_precision=False) is None
    two = Setup(**SETUP, num_devices=3, device_copies=2).devices_of(costs, full_precision=False)
    assert two is not None
    assert (two.num_devices, two.num_copies, two.held.sum(), two.num_parts) == (3, 2, 2 * 256, 1)
    parts = Setup(**SETUP, num_devices=2, splits_experts=True).devices_of(costs, full_precision=False)
    assert parts is not None
    assert parts.num_parts == 2
    small = Setup(**SETUP | {"overrides": {"dram.capacity_bytes": 60 * 10**9}}, num_devices=2)
    costs = small.costs_of(MIXTRAL)
    assert small.devices_of(costs, full_precision=True) is not None, "half of 90 GB, and no replicas beside them"
    with pytest.raises(ConfigError, match="1 copies of 256 experts do not fit"):
        small.devices_of(costs, full_precision=False)
