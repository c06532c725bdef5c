"""GGUF files of llama.cpp are read as its own package reads them; a damaged one is refused in one sentence."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in (multiply|add):RuntimeWarning")  # of drawn scales


from quantized_writers import write_gguf  # noqa: E402

from ndp_device.checkpoint import gguf_files  # noqa: E402
from ndp_device.common.errors import ConfigError, ReplicaError  # noqa: E402
from ndp_device.replicas.checkpoint import CheckpointExperts  # noqa: E402

EXPERTS, HIDDEN, INTERMEDIATE = 4, 256, 512
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
}
DEQUANTIZED = {one.name for one in gguf.quants._type_traits}
ROLES = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}


def written(directory: Path, kind: str, config: dict[str, Any] = CONFIG) -> dict[str, np.ndarray[Any, Any]]:
    """A checkpoint of one type in `directory`; the stored bytes of its experts, by role.

    Q8_0 is written from drawn weights. Other types are blocks of drawn bytes: gguf writes few of them. Blocks whose
    drawn scale is no number have smaller bytes.
    """
    generator = np.random.default_rng(0)
    _, values, size = next(row for row in gguf_files.TYPES.values() if row[0] == kind)
    stored = {}
    for role in ROLES:
        rows, columns = (HIDDEN, INTERMEDIATE) if role == "ffn_down_exps" else (INTERMEDIATE, HIDDEN)
        if kind == "Q8_0":
            weight = generator.standard_normal((EXPERTS, rows, columns)).astype(np.float32)
            stored[role] = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
        else:
            drawn = generator.integers(0, 256, (EXPERTS, rows, columns // values * size), np.uint8)
            if kind in DEQUANTIZED:
                made = gguf.quants.dequantize(drawn, gguf.GGMLQuantizationType[kind])
                is_bad = ~np.isfinite(made).reshape(EXPERTS, rows, -1, values).all(-1)
                drawn.reshape(EXPERTS, rows, -1, size)[is_bad] >>= 2  # a float16 below 2
            stored[role] = drawn
    experts = {f"blk.0.{role}.weight": one for role, one in stored.items()}
    plain = {
        "blk.0.ffn_gate_inp.weight": generator.standard_normal((EXPERTS, HIDDEN)).astype(np.float32),
        "blk.0.ffn_norm.weight": generator.standard_normal(HIDDEN).astype(np.float32),
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_gguf(directory / "model.gguf", experts | plain, dict.fromkeys(experts, kind), "qwen3moe")
    (directory / "config.json").write_text(json.dumps(config))
    return stored | plain


@pytest.mark.parametrize("kind", [name for name, _, _ in gguf_files.TYPES.values()])
def test_every_expert_has_the_values_that_llama_cpps_package_makes(tmp_path: Path, kind: str) -> None:
    stored, of_kind = written(tmp_path, kind), gguf.GGMLQuantizationType[kind]
    if kind not in DEQUANTIZED:
        with pytest.raises(ConfigError, match=f"llama.cpp's type {kind}, which the installed package gguf does not"):
            CheckpointExperts(tmp_path)
        return
    experts = CheckpointExperts(tmp_path)
    assert experts.shape.num_experts == EXPERTS
    for number in range(EXPERTS):
        one = experts.expert(0, number)
        for role, matrix in ROLES.items():
            wanted = gguf.quants.dequantize(stored[role], of_kind)[number]
            np.testing.assert_array_equal(getattr(one, matrix), wanted)
    np.testing.assert_array_equal(experts.norm_weight(0), stored["blk.0.ffn_norm.weight"])


def test_sizes_of_blocks_are_the_packages_own() -> None:
    sizes = gguf.GGML_QUANT_SIZES
    for number, (name, values, size) in gguf_files.TYPES.items():
        assert sizes[gguf.GGMLQuantizationType(number)] == (values, size), name


def test_a_norm_to_which_the_converter_has_added_one_is_taken_as_it_is(tmp_path: Path) -> None:
    stored = written(tmp_path, "Q8_0", CONFIG | {"model_type": "qwen3_next"})
    np.testing.assert_array_equal(CheckpointExperts(tmp_path).norm_weight(0), stored["blk.0.ffn_norm.weight"])


def _patched(path: Path, at: int, value: bytes) -> None:
    contents = bytearray(path.read_bytes())
    contents[at : at + len(value)] = value
    path.write_bytes(contents)


HUGE = struct.pack("<Q", 1 << 60)


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [
        (4, struct.pack("<I", 1), "GGUF version 1, and versions 2 and 3"),
        (4, struct.pack(">I", 3), "GGUF version 50331648"),
        (8, HUGE, "its header ends behind the file|no power of two|is damaged"),
        (16, HUGE, "its header ends behind the file|unknown type"),
        (24, HUGE, "its header ends behind the file"),
    ],
    ids=["version", "big-endian", "tensors", "entries", "key"],
)
def test_a_header_that_lies_costs_one_sentence(tmp_path: Path, at: int, value: bytes, complaint: str) -> None:
    written(tmp_path, "Q8_0")
    _patched(tmp_path / "model.gguf", at, value)
    with pytest.raises(ReplicaError, match=complaint) as caught:
        CheckpointExperts(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_anywhere_is_refused_in_one_sentence(tmp_path: Path) -> None:
    written(tmp_path, "Q8_0")
    whole = (tmp_path / "model.gguf").read_bytes()
    for length in [*range(0, 900, 7), len(whole) // 2, len(whole) - 1]:
        (tmp_path / "model.gguf").write_bytes(whole[:length])
        with pytest.raises((ReplicaError, ConfigError)) as caught:
            CheckpointExperts(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_type_that_is_not_known_and_a_scale_beside_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "Q8_0")
    whole = (tmp_path / "model.gguf").read_bytes()
    kind = whole.index(b"blk.0.ffn_gate_exps.weight") + len("blk.0.ffn_gate_exps.weight") + 4 + 3 * 8
    _patched(tmp_path / "model.gguf", kind, struct.pack("<I", 99))
    with pytest.raises(ReplicaError, match=r"ffn_gate_exps.weight is of ggml's type 99, which is not read"):
        CheckpointExperts(tmp_path)
    names = (b"blk.0.ffn_norm.weight", b"blk.0.ffn_up_exps.scale")
    norm, scale = (struct.pack("<Q", len(name)) + name for name in names)
    (tmp_path / "model.gguf").write_bytes(whole.replace(norm, scale))
    with pytest.raises(ConfigError, match=r"have a scale of their own \(blk.0.ffn_up_exps.scale\)"):
        CheckpointExperts(tmp_path)


def test_a_scale_beside_unquantized_experts_is_refused_too(tmp_path: Path) -> None:
    """llama.cpp multiplies with it whatever the type."""
    written(tmp_path, "Q8_0")
    sizes = {role: (HIDDEN, INTERMEDIATE) if role == "ffn_down_exps" else (INTERMEDIATE, HIDDEN) for role in ROLES}
    plain = {f"blk.0.{role}.weight": np.ones((EXPERTS, *size), np.float16) for role, size in sizes.items()}
    plain["blk.0.ffn_down_exps.scale"] = np.full(EXPERTS, 3, np.float32)
    write_gguf(tmp_path / "model.gguf", plain, {}, "qwen3moe")
    with pytest.raises(ConfigError, match=r"have a scale of their own \(blk.0.ffn_down_exps.scale\)"):
        CheckpointExperts(tmp_path)
