"""One type for the sizes of a model: what a checkpoint, a public shape and a recorded trace say, said alike."""

from __future__ import annotations

import dataclasses
import json

import pytest
from paths import MODEL

from ndp_device.checkpoint.files import read_config
from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.errors import ConfigError
from ndp_device.model_shape import ModelShape, WholeModel
from ndp_device.timing.shapes import SHAPES

SMALL = ModelShape("small", 2, 4, 2, 8, 16)

RECORDED_IN_2026 = {
    "hidden": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate": 256,
    "vocab": 512,
    "dtype_bytes": 4,
    "num_experts": 8,
    "top_k": 2,
}
"""`host_dims` as the first traces of live runs have it."""


def test_a_trace_recorded_before_the_types_were_one_still_loads() -> None:
    model = WholeModel.of_recorded(RECORDED_IN_2026)
    assert (model.hidden_size, model.intermediate_size, model.vocab_size, model.dtype_bytes) == (128, 256, 512, 4)
    assert model.recorded() == RECORDED_IN_2026


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_recorded_of_a_model_gives_the_same_sizes_back(name: str) -> None:
    again = WholeModel.of_recorded(SHAPES[name].recorded(), name)
    assert again == SHAPES[name]


def test_the_bundled_checkpoint_says_its_attention_in_its_config() -> None:
    experts, config = open_checkpoint(MODEL).shape, read_config(MODEL)
    model = WholeModel.of_config(experts, config)
    assert (model.num_heads, model.num_kv_heads) == (config["num_attention_heads"], config["num_key_value_heads"])
    assert model.num_heads * model.head_dim == model.hidden_size
    assert model.expert_bytes == 2 * 3 * 128 * 256
    assert {field: getattr(model, field) for field in vars(experts)} == vars(experts)


def test_a_run_in_another_dtype_than_its_checkpoint_reads_as_many_bytes_as_it_does() -> None:
    beside = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "vocab_size": 100}
    assert WholeModel.of_experts(SMALL, **beside).expert_bytes == 2 * 3 * 8 * 16
    assert WholeModel.of_experts(SMALL, dtype="float32", **beside).expert_bytes == 4 * 3 * 8 * 16


def test_sizes_that_no_model_has_are_refused() -> None:
    beside = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "vocab_size": 100}
    with pytest.raises(ConfigError, match="num_heads must be at least 1"):
        WholeModel.of_experts(SMALL, **{**beside, "num_heads": 0})
    with pytest.raises(ConfigError, match="top_k 5 must not exceed num_experts 4"):
        dataclasses.replace(SMALL, top_k=5)
    with pytest.raises(ConfigError, match="dtype must be one of float32, bfloat16"):
        _ = dataclasses.replace(SMALL, dtype="int4").dtype_bytes
    with pytest.raises(ConfigError, match="must give vocab_size, of which there is none"):
        WholeModel.of_config(SMALL, {"num_attention_heads": 2})
    lacking = {key: value for key, value in RECORDED_IN_2026.items() if key != "vocab"}
    with pytest.raises(ConfigError, match="must record the sizes hidden, num_layers"):
        WholeModel.of_recorded(lacking)


def test_a_replica_manifest_holds_the_experts_alone() -> None:
    """Its `model` is a ModelShape: replicas of one checkpoint stay the same whatever is computed beside them."""
    manifest = json.loads((MODEL.parent / "tiny-mixtral-replicas" / "manifest.json").read_text())
    assert ModelShape(**manifest["model"]) == open_checkpoint(MODEL).shape
