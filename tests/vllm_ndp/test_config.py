"""The plugin's settings: every one has a default that works, and nothing impossible can be asked for."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from ndp_device.common.errors import ConfigError
from vllm_ndp.config import DEBUG, TOP, DeviceAddress, NdpSettings
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.replanner import Replanner

NAMES = [field.name for field in dataclasses.fields(NdpSettings)]


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_settings_are_the_defaults(nothing: object):
    assert NdpSettings.from_mapping(nothing) == NdpSettings()
    assert NdpSettings().addresses == ()


def test_what_is_recorded_says_what_is_in_force():
    recorded = json.loads(json.dumps(NdpSettings(device_hosts=2).recorded()))
    assert recorded["device_hosts"] == 2
    assert recorded["policy_options"] == {"bit_rule": "pairs", "losses": "relative"}


@pytest.mark.parametrize(
    ("changed", "in_slots", "alone"),
    [
        ({}, False, True),
        ({"avg_bits": 3.5}, False, False),
        ({"max_loss": 0.1}, False, False),
        ({"offload_bits": 4}, False, True),
        ({"offload_bits": 2}, False, False),
        ({"cold_precision": "full"}, False, False),
        ({"slot_bits": 8}, False, True),  # a GPU's slots are quantized on arrival
        ({"slot_bits": 8}, True, False),
        ({"slot_bits": 4}, True, True),
        ({"slot_bits": 4, "avg_bits": 2.0}, True, False),
        ({"slot_bits": 4, "avg_bits": 2.0, "hot_experts": 8}, True, True),  # nothing is cold
        ({"hot_experts": 8}, True, False),
        ({"plan": "joint"}, False, False),
    ],
)
def test_experts_run_at_one_width_where_no_setting_names_another(
    changed: dict[str, object], in_slots: bool, alone: bool
):
    settings = NdpSettings(**{"avg_bits": 4.0, "hot_experts": 2} | changed)
    assert settings.runs_only_at(4, 8, in_slots=in_slots) is alone


@pytest.mark.parametrize(
    ("changed", "width"),
    [({}, 4), ({"slot_bits": 8}, 8), ({"hot_experts": 7}, None), ({"slot_bits": 16}, None)],
)
def test_a_server_has_one_width_where_slots_of_it_hold_every_expert(changed: dict[str, object], width: int | None):
    assert NdpSettings(**{"slot_bits": 4, "hot_experts": 8} | changed).only_width(8) == width


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("hot_expert", "hot_experts"),
        ("avgbits", "avg_bits"),
        ("cold-precision", "cold_precision"),
        ("Replica", "replicas"),
        ("device", "devices"),
        ("device_hosts", "device_hosts' in 'debug"),
        ("bit_rule", "bit_rule' in 'policy"),
        ("spill_bits", "slot_bits"),
    ],
)
def test_an_unknown_setting_names_the_nearest_known_one(wrong: str, near: str):
    with pytest.raises(ConfigError, match=f"unknown ndp setting '{wrong}': did you mean '{near}'"):
        NdpSettings.from_mapping({wrong: 2})


def test_a_setting_like_no_other_lists_all_known_ones():
    with pytest.raises(ConfigError, match="known settings are hot_experts, ") as error:
        NdpSettings.from_mapping({"zzzzzz": 2})
    assert all(name in str(error.value) for name in TOP)


def test_a_person_need_not_know_more_than_20_settings_and_every_value_has_one_way_in():
    assert len(TOP) <= 20
    assert not set(TOP) & set(DEBUG)
    assert {*TOP, *DEBUG} - {"debug"} == set(NAMES) - {*("running", "max_loss", "policy_options", "device_copies")}


@given(st.text(max_size=20).filter(lambda name: name not in TOP))
def test_no_unknown_name_is_ever_accepted(name: str):
    with pytest.raises(ConfigError, match="unknown ndp setting"):
        NdpSettings.from_mapping({name: None})


def test_whole_numbers_are_taken_where_a_float_is_wanted():
    """JSON writes 3.0 as 3."""
    settings = NdpSettings.from_mapping({"avg_bits": 3, "deadline_ms": 250})
    assert (settings.avg_bits, settings.deadline_ms) == (3.0, 250.0)
    assert isinstance(settings.avg_bits, float)


def test_the_bit_rule_in_force_is_the_policys_option_where_there_is_one():
    """What the start-up table shows."""
    assert NdpSettings().bit_rule_in_force == "pairs"
    assert NdpSettings(policy_options={"bit_rule": "uniform"}).bit_rule_in_force == "uniform"


@pytest.mark.parametrize("settings", [{"plan": "joint"}, {"debug": {"bits_for": "batch"}}])
def test_where_no_request_has_bits_of_its_own_bits_are_dealt_to_experts_over_layers(settings: dict[str, Any]):
    assert NdpSettings.from_mapping(settings).bit_rule_in_force == "layers"


def test_a_prior_of_another_model_is_refused_before_the_first_prompt(tmp_path: Path):
    np.save(tmp_path / "prior.npy", np.ones((2, 8)))
    settings = NdpSettings(policy="static", policy_options={"prior": str(tmp_path / "prior.npy")})
    with pytest.raises(ConfigError, match="prior is for a model of"):
        settings.planning(8).rules(LossTable.nominal(3, 8))


def test_a_policy_is_a_name_or_options_of_which_the_name_is_one():
    options = {"alpha": 0.7}
    settings = NdpSettings.from_mapping({"policy": options})
    options["alpha"] = 0.1
    assert (settings.policy, settings.policy_options) == ("prefill", {"alpha": 0.7})
    named = NdpSettings.from_mapping({"policy": {"name": "random", "seed": 3}})
    assert (named.policy, named.policy_options) == ("random", {"seed": 3})
    assert NdpSettings.from_mapping({"policy": "random"}).policy_options == {}


@pytest.mark.parametrize(
    ("asked", "num_experts", "hot"), [(None, 8, 4), (None, 5, 2), (None, 1, 0), (0, 8, 0), (8, 8, 8)]
)
def test_hot_experts_are_half_of_them_unless_asked_otherwise(asked: int | None, num_experts: int, hot: int):
    assert NdpSettings(hot_experts=asked).resolve_hot_experts(num_experts) == hot


@pytest.mark.parametrize(
    ("settings", "offload_bits"),
    [
        ({}, 3),
        ({"execution": "balanced", "offload_bits": 2}, 2),
        ({"offload_bits": 1}, 1),
        ({"execution": "paper"}, 0),
        ({"cold_precision": "full"}, 0),
        ({"hot_experts": 8}, 0),
        ({"hot_experts": 0}, 0),
    ],
)
def test_hot_experts_may_run_on_the_device_unless_the_paper_is_asked_for_or_nothing_is_quantized(
    settings, offload_bits
):
    assert NdpSettings(**settings).resolve_offload_bits(8) == offload_bits


def test_the_documented_settings_are_the_ones_that_exist():
    page = (ROOT / "docs" / "compatibility.md").read_text()

    def documented(part: str) -> list[str]:
        tables = [table.partition("\n\n")[0] for table in part.split("| setting | default | effect |")[1:]]
        rows = [row for table in tables for row in table.splitlines()[2:]]
        return sorted(name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1]))

    on_top, _, for_researchers = page.partition("Settings under `debug`")
    assert (documented(on_top), documented(for_researchers)) == (sorted(TOP), sorted(DEBUG))


def test_what_only_researchers_turn_is_taken_under_debug():
    settings = NdpSettings.from_mapping({"debug": {"device_hosts": 3, "gpu": "streams"}})
    assert (settings.device_hosts, settings.gpu) == (3, "streams")
    with pytest.raises(ConfigError, match="unknown ndp setting 'device_host' in 'debug': did you mean 'device_hosts'"):
        NdpSettings.from_mapping({"debug": {"device_host": 3}})
    with pytest.raises(ConfigError, match="ndp setting 'debug' must be"):
        NdpSettings.from_mapping({"debug": [3]})
    with pytest.raises(ConfigError, match="ndp setting 'device_hosts' must be a whole number"):
        NdpSettings.from_mapping({"debug": {"device_hosts": "3"}})


A, B = "tcp://a:1", "tcp://b:1"


@pytest.mark.parametrize(
    ("devices", "addresses", "count", "keys"),
    [
        (2, (), 2, []),
        (A, (A,), 1, [None]),
        ([A], (A,), 1, [None]),
        ([{"address": A, "keys": "k"}, "ipc:///b"], (A, "ipc:///b"), 2, ["k", None]),
        ({"address": A, "keys": "k"}, (A,), 1, ["k"]),
        ([{"address": A, "keys": "k"}, {"address": B, "keys": "k"}], (A, B), 2, ["k", "k"]),
        ([{"address": A, "keys": "k"}, {"address": B, "keys": "l"}], (A, B), 2, ["k", "l"]),
    ],
)
def test_devices_are_counted_or_named_in_one_place(devices: Any, addresses: Any, count: int, keys: Any):
    settings = NdpSettings.from_mapping({"devices": devices})
    assert (settings.addresses, settings.num_devices) == (addresses, count)
    assert [one.keys for one in settings.running] == keys


def test_the_identity_mode_plans_full_precision_whatever_bit_rule_the_options_name():
    """Live and replay read the rule from here: once replay let the option win, and their simulated times differed."""
    options = {"bit_rule": "uniform"}
    identity = NdpSettings(cold_precision="full", hot_experts=1, policy_options=options)
    rules = identity.planning(4).rules(LossTable.nominal(2, 4))
    assert rules.full_precision
    planner = Replanner(rules, 2, 4)
    plan = planner.replan({0: ImportanceScore.from_weights(np.ones((2, 4)))}).plans[0]
    assert set(plan.bits.bits[~plan.placement.hot].tolist()) == {16}


@pytest.mark.parametrize(
    "others",
    [
        {"hardware": "h100-ndp512"},
        {"hardware_overrides": {"gpu.hbm_bytes_per_s": 1}},
        {"device_hosts": 2},
        {"running": (DeviceAddress("ipc:///run/ndp/a"),)},
        {"devices": 2},
    ],
)
def test_prices_are_this_machines_unless_others_are_named(others: dict[str, Any]):
    """A named hardware is a researcher's; devices that others share or started are priced by the model of them."""
    assert NdpSettings().with_prices(8, one_worker_on_cpu=True).prices == "measured"
    assert NdpSettings().with_prices(8, one_worker_on_cpu=False).prices == "simulated"
    assert NdpSettings(**others).with_prices(8, one_worker_on_cpu=True).prices == "simulated"
    assert NdpSettings(prices="simulated").with_prices(8, one_worker_on_cpu=True).prices == "simulated"


def test_simulated_times_have_a_hardware_where_none_is_named():
    assert NdpSettings().preset == "h100-ndp512"
    assert NdpSettings(hardware="h100-ndp512-lpddr5").preset == "h100-ndp512-lpddr5"


@pytest.mark.parametrize(
    "others",
    [
        {"execution": "paper", "prefill": "streamed"},
        {"cold_precision": "full", "prefill": "streamed"},
        {"hot_experts": 8},
    ],
)
def test_prices_are_not_measured_where_nothing_is_decided_by_them(others: dict[str, Any]):
    with pytest.raises(ConfigError, match="'prices' is 'measured', which has no effect where plans are fixed"):
        NdpSettings(prices="measured", **others).require_use_of_prices(8)
    NdpSettings(**others).require_use_of_prices(8)
    assert NdpSettings(**others).with_prices(8, one_worker_on_cpu=True).prices == "simulated"
    del others[min(others)]
    NdpSettings(prices="measured", **others).require_use_of_prices(8)


def test_a_budget_of_nats_is_a_value_of_avg_bits():
    settings = NdpSettings.from_mapping({"avg_bits": {"max_loss": 0.05}})
    assert (settings.avg_bits, settings.max_loss) == (4.0, 0.05)
    recorded = settings.recorded()
    assert recorded["max_loss"] == 0.05


# -- what cannot be, alone or together ---------------------------------------------------------------------------------

VALUES = [
    ("hot_experts", -1, "be 0 or more, got -1"),
    *(("avg_bits", value, f"lie in 1..4 or be 8, got {value}") for value in (0.99, 4.01, float("nan"))),
    *(
        ("deadline_ms", v, f"be positive and at most 3600000, got {v}")
        for v in (0.0, 1e308, float("nan"), float("inf"))
    ),
    ("offload_bits", 5, "be one of 1, 2, 3, 4, 8, got 5"),
    ("device_hosts", 0, "be 1 or more, got 0"),
    ("execution", "fast", "be one of auto, balanced, paper, got 'fast'"),
    ("cold_precision", "half", "be one of quantized, full, got 'half'"),
    ("fallback", "none", "be one of full, same, got 'none'"),
    ("linear_bits", 3, "be one of 8, 4, got 3"),
    # of another type: refused, not converted
    *(("hot_experts", value, f"be a whole number or null, got {value!r}") for value in (2.0, "2", True)),
    *(("avg_bits", value, f"be a number, got {value!r}") for value in ("3", True, None)),
    ("devices", 5555.0, 'be {"devices": 2}, '),
    ("replicas", 1, "be text or null, got 1"),
    *((name, "", "be text or null, got ''") for name in ("replicas", "record", "hardware")),
    *(("itl_factor", value, f"be at least 1, or 0 for none, got {value}") for value in (0.5, float("inf"))),
    ("devices", 10**9, "be 64 or fewer, got 1000000000"),
    ("policy", ["alpha"], "be text, got ['alpha']"),
    ("hardware_overrides", "gpu.num_sms=1", "be an object, got 'gpu.num_sms=1'"),
]
FULL, SPLIT = {"cold_precision": "full"}, {"debug": {"device_experts": "split"}}
IMPOSSIBLE: list[tuple[Any, str]] = [
    *((raw, "must be a mapping of settings") for raw in ([], "hot_experts=2", 3)),
    *(
        ({"debug": {name: value}} if name in DEBUG else {name: value}, f"ndp setting '{name}' must {says}")
        for name, value, says in VALUES
    ),
    ({"hot_experts": 9}, "'hot_experts' is 9, the model has only 8 experts per layer"),
    (FULL | {"replicas": "somewhere"}, "'replicas' is 'somewhere' beside cold_precision 'full'"),
    (FULL | {"linear_bits": 8}, "'linear_bits' is 8 beside cold_precision 'full'"),
    (FULL | {"debug": {"offload_bits": 2}}, "'offload_bits' is 2 beside"),
    ({"execution": "paper", "debug": {"offload_bits": 2}}, "'offload_bits' has no effect"),
    *(
        ({"execution": "balanced"} | more, "'execution' is 'balanced', which needs quantized cold experts")
        for more in (FULL, {"hot_experts": 8}, {"hot_experts": 0})
    ),
    # policies
    ({"policy": {"alpha": 1.5}}, "alpha must lie in 0..1, got 1.5"),
    ({"policy": {"alpha": -0.1}}, "alpha must lie in 0..1, got -0.1"),
    ({"policy": {"bit_rule": "mean"}}, "bit_rule must be one of"),
    ({"policy": {"losses": "mse"}}, "losses must be one of"),
    ({"policy": {"stickiness": 2}}, "policy 'prefill' has no option 'stickiness': known are alpha, bit_rule"),
    ({"policy": {"bit_rule": "pairs"}, "plan": "joint"}, "'plan' is 'joint', so that every expert has one width"),
    ({"policy": {"bit_rule": "pairs"}, "debug": {"bits_for": "batch"}}, "'bits_for' is 'batch', so that every expert"),
    # a budget of nats
    ({"avg_bits": {"nats": 0.05}}, "'avg_bits' must be a number or"),
    ({"max_loss": 0.05}, 'unknown ndp setting \'max_loss\': write {"avg_bits": {"max_loss": NATS}}'),
    ({"avg_bits": {"max_loss": 0.05}, "policy": {"bit_rule": "mse"}}, "needs bit_rule 'layers'"),
    ({"avg_bits": {"max_loss": "little"}}, "'max_loss' must be a number"),
    *(({"avg_bits": {"max_loss": value}}, "nats above 0, got") for value in (0, -1, float("nan"), float("inf"))),
    # devices
    *(({"devices": devices}, "'devices' must be") for devices in ({"address": A, "key": "k"}, [3], True)),
    ({"devices": "udp://a:1"}, "ipc:// or tcp:// address, got 'udp://a:1'"),
    ({"devices": {"address": "ipc:///a", "keys": "k"}}, "keys are for tcp:// addresses"),
    ({"devices": [{"address": one, "keys": "k"} for one in (A, "ipc:///b")]}, "no effect on the device ipc:///b"),
    ({"devices": ["ipc:///a", "here"]}, "must be a number, or an ipc:// or tcp:// address, got 'here'"),
    ({"devices": 0}, "'devices' must be 1 or more, got 0"),
    ({"devices": ["ipc:///a"] * 2}, "'devices' must name each device once"),
    ({"devices": []}, "'devices' must name at least one device"),
    ({"devices": 2, "debug": {"prices": "measured"}}, "use 'prices': 'simulated', one embedded device, or addresses"),
    (
        {"devices": 2, "debug": {"device_experts": {"copies": 3}}},
        "'device_experts' must ask for 1 to 2 copies, the number of devices, got 3",
    ),
    ({"devices": 3, "debug": {"device_experts": {"copy": 1}}}, 'or {"copies": N}, got '),
    ({"debug": {"device_experts": "halves"}}, "'device_experts' must be one of copies, split, got 'halves'"),
    (SPLIT, "gives each of several devices a part of every expert, got 1 of them: name more"),
    (SPLIT | {"devices": ["ipc:///a"]}, "got 1 of them: name more devices"),
    # tiers
    ({"warm_experts": -1}, "'warm_experts' must be 0 or more, got -1"),
    ({"hot_experts": 4, "warm_experts": 5}, "beside 4 hot experts, the model has only 8 experts per layer: at most 4"),
    ({"hot_experts": 4, "warm_experts": 4, "execution": "balanced"}, "4 of 8 experts hot and 4 warm: use 'auto'"),
    ({"slot_bits": 5}, "'slot_bits' must be one of 1, 2, 3, 4, 16, 8, got 5"),
    (FULL | {"slot_bits": 4}, "which quantizes nothing: drop one of the two"),
    ({"slot_bits": 4, "hot_experts": 0}, "'hot_experts' is 0, which leaves no GPU memory to 'slot_bits' 4"),
    ({"plan": "jiont"}, "must be one of fixed, joint, joint+host, got 'jiont'"),
    ({"plan": "joint", "slot_bits": 4}, "'slot_bits' is 4, but a joint plan gives every hot expert a width"),
    ({"plan": "joint+host", "warm_experts": 1}, "'warm_experts' is 1, but a joint plan says itself how many"),
    (FULL | {"plan": "joint"}, "'cold_precision' is 'full', but a joint plan chooses"),
    ({"plan": "joint", "execution": "balanced"}, "'execution' is 'balanced', but a joint plan has placed experts"),
    ({"plan": "joint", "hot_experts": 0}, "leaves no GPU memory"),
]


def checked(raw: Any) -> None:
    """As a start checks settings, of a model of 8 experts a layer."""
    settings = NdpSettings.from_mapping(raw)
    settings.resolve_hot_experts(8)
    settings.resolve_offload_bits(8)


@pytest.mark.parametrize(("raw", "said"), IMPOSSIBLE, ids=[said for _, said in IMPOSSIBLE])
def test_what_cannot_be_is_refused_in_one_sentence(raw: Any, said: str):
    with pytest.raises(ConfigError) as error:
        checked(raw)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_stands_beside_the_impossible_is_possible():
    checked({"debug": {"prices": "measured"}, "devices": ["ipc:///run/ndp/a", "ipc:///run/ndp/b"]})
