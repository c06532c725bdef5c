"""What config.json states of a quantized tensor is used, and held against what the tensors show. Written by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from small_checkpoint import EXPERTS, LAYERS, as_stored, write_safetensors, write_small_checkpoint

from ndp_device.calibration.build import build_data_free
from ndp_device.checkpoint.files import TensorInfo, read_config
from ndp_device.checkpoint.names import DTYPES
from ndp_device.checkpoint.opening import _with_settings, unpacked
from ndp_device.checkpoint.stated import Entry, Settings, Transform, TransformConfig, Transforms
from ndp_device.common.errors import ConfigError, NdpError, ReplicaError
from ndp_device.experts.expert import to_float32
from ndp_device.replicas.checkpoint import CheckpointExperts

EXPERT = "model.layers.1.mlp.experts.2.down_proj"
ROWS, COLUMNS = 64, 160  # 160 columns: two groups of 64 and one of 32
SPELLED = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}
Stored = dict[str, NDArray[Any]]


def read(settings: dict[str, Any], stored: Stored, **dtypes: str) -> NDArray[np.float32]:
    """Values of one matrix, of which these parts are stored; dtypes: of parts that numpy has no dtype for."""
    raw = {f"{EXPERT}.{part}": values for part, values in stored.items()}
    infos = {
        f"{EXPERT}.{part}": TensorInfo(
            dtypes.get(part, SPELLED[str(values.dtype)]), values.shape, Path(f"{EXPERT}.{part}")
        )
        for part, values in stored.items()
    }
    config = {"quantization_config": settings}
    _, packed = unpacked(infos, config, name="m", small=lambda info: raw[str(info.file)].reshape(-1))
    one = packed[f"{EXPERT}.weight"]
    return to_float32(one.values(raw.__getitem__, None), DTYPES[one.dtype])


def stream(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """[N, C] -> int32 [N, ceil(C * bits / 32)]: the lowest bit first, across words."""
    each = ((codes[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(len(codes), -1)
    each = np.pad(each, ((0, 0), (0, -each.shape[1] % 32)))
    return np.ascontiguousarray(np.packbits(each, axis=1, bitorder="little")).view(np.int32)


def words(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """[N, C] -> int32 [N, ceil(C / (32 // bits))]: no code crosses a word."""
    each = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each))).reshape(len(codes), -1, each).astype(np.uint32)
    return (codes << (np.arange(each, dtype=np.uint32) * np.uint32(bits))).sum(-1, dtype=np.uint32).view(np.int32)


class Matrix:
    """Drawn codes [N, C], scales and zero points [N, G], and the values they stand for, rounded once."""

    def __init__(self, bits: int = 4, group: int = 64, *, symmetric: bool = True, least: int = 1) -> None:
        generator, top = np.random.default_rng(bits), (1 << bits) - 1
        groups = -(-COLUMNS // group)
        self.codes = generator.integers(0, top + 1, (ROWS, COLUMNS))
        self.scale = generator.uniform(0.01, 0.02, (ROWS, groups)).astype(np.float16)
        drawn = generator.integers(least, top + 1, (ROWS, groups))
        self.zero = np.full_like(drawn, 1 << (bits - 1)) if symmetric else drawn
        self.group_of = np.arange(COLUMNS) // group

    @property
    def values(self) -> NDArray[np.float32]:
        zero, scale = self.zero[:, self.group_of], self.scale[:, self.group_of].astype(np.float32)
        return ((self.codes - zero) * scale).astype(np.float16).astype(np.float32)

    def gptq(self, bits: int = 4, *, less_one: bool = True) -> Stored:
        zeros = stream(self.zero.T - less_one, bits)
        return {"qweight": stream(self.codes, bits).T.copy(), "qzeros": zeros, "scales": self.scale.T.copy()}

    def awq(self) -> Stored:
        def packed(values: NDArray[Any]) -> NDArray[np.int32]:  # [C, N]
            order = values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
            return stream(order.reshape(len(values), -1), 4)

        return {"qweight": packed(self.codes.T), "qzeros": packed(self.zero.T), "scales": self.scale.T.copy()}

    def compressed(self, pack: Any = stream, bits: int = 4, *, symmetric: bool = True) -> Stored:
        shape = np.array([ROWS, COLUMNS])
        stored = {"weight_packed": pack(self.codes, bits), "weight_scale": self.scale, "weight_shape": shape}
        return stored if symmetric else stored | {"weight_zero_point": pack(self.zero.T, bits).T.copy()}

    def int8(self) -> Stored:
        return {"weight": (self.codes - self.zero[:, self.group_of]).astype(np.int8), "weight_scale": self.scale}


def groups(*weights: dict[str, Any], targets: tuple[list[str], ...] = (["Linear"],)) -> dict[str, Any]:
    each = [{"targets": of, "weights": one} for of, one in zip(targets, weights, strict=True)]
    return {"quant_method": "compressed-tensors", "config_groups": {str(n): one for n, one in enumerate(each)}}


def in_groups(group: int | None, **others: Any) -> dict[str, Any]:
    return groups({"num_bits": 4, "type": "int", "group_size": group} | others)


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
AUTO_ROUND: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}

SHORT_GROUPS = [
    pytest.param(GPTQ, Matrix().gptq(), "group_size", id="gptq"),
    pytest.param(AUTO_ROUND, Matrix().gptq(), "group_size", id="auto-round"),
    pytest.param(AWQ, Matrix().awq(), "group_size", id="awq"),
    pytest.param(AWQ | {"group_size": None, "q_group_size": 64}, Matrix().awq(), "q_group_size", id="older-awq"),
    pytest.param(in_groups(64), Matrix().compressed(), None, id="compressed-tensors"),
    pytest.param(in_groups(64, num_bits=8), Matrix().int8(), None, id="int8"),
]


@pytest.mark.parametrize(("settings", "stored", "key"), SHORT_GROUPS)
def test_groups_are_as_wide_as_stated_and_the_last_one_may_be_short(
    settings: dict[str, Any], stored: Stored, key: str | None
) -> None:
    np.testing.assert_array_equal(read(settings, stored), Matrix().values)


@pytest.mark.parametrize("size", [32, 128, -1, None])
@pytest.mark.parametrize(("settings", "stored", "key"), SHORT_GROUPS)
def test_another_group_size_than_the_scales_show_and_none_where_they_leave_a_rest_are_refused(
    settings: dict[str, Any], stored: Stored, key: str | None, size: int | None
) -> None:
    """160 columns under 3 scales: no division says how wide the groups are."""
    bits = 8 if "weight" in stored else 4
    other = settings | {key: size} if key else in_groups(size, num_bits=bits, strategy="group" if size else None)
    with pytest.raises(NdpError, match=rf"{EXPERT}: .*(its tensors say otherwise|do not belong together)"):
        read(other, stored)


def test_single_modules_have_group_sizes_of_their_own() -> None:
    """GPTQ's dynamic, auto-round's extra_config (a name, its end, a pattern), compressed-tensors' targets."""
    own, other = {"group_size": 64}, {"group_size": 32}
    wide = GPTQ | {"group_size": 128}
    for dynamic in ({r"+:.*experts\.2\..*": own}, {r".*down_proj": own, ".*": other}):
        np.testing.assert_array_equal(read(wide | {"dynamic": dynamic}, Matrix().gptq()), Matrix().values)
    for key in (EXPERT, "down_proj", r".*experts\.\d+"):
        settings = AUTO_ROUND | {"group_size": 128, "extra_config": {"up_proj": other, key: own}}
        np.testing.assert_array_equal(read(settings, Matrix().gptq()), Matrix().values)
    weights = [{"num_bits": 4, "group_size": size} for size in (32, 64)]
    for targets in ((["Linear"], [r"re:.*down_proj$"]), (["re:.*"], [EXPERT])):
        for order in (1, -1):
            settings = groups(*weights[::order], targets=targets[::order])
            np.testing.assert_array_equal(read(settings, Matrix().compressed()), Matrix().values)
    with pytest.raises(ConfigError, match=r"the pattern '\(': missing \), unterminated"):
        read(GPTQ | {"dynamic": {"(": own}}, Matrix().gptq())


def test_where_no_target_names_a_module_the_one_group_that_fits_is_meant() -> None:
    weights = [{"num_bits": 4, "group_size": size} for size in (32, 64)]
    settings = groups(*weights, targets=(["Embedding"], ["Attention"]))
    np.testing.assert_array_equal(read(settings, Matrix().compressed()), Matrix().values)
    both = groups(*[{"num_bits": 4, "group_size": size} for size in (64, 70)], targets=(["A"], ["B"]))
    with pytest.raises(ConfigError, match="allow more than one reading of its weight_packed"):
        read(both, Matrix().compressed())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_every_width_lie_dense_or_none_crosses_a_word(bits: int, symmetric: bool) -> None:
    """compressed-tensors packs dense from 0.18 on; 0.17 and older fill up each word."""
    matrix = Matrix(bits, symmetric=symmetric, least=0)
    for pack in (stream, words):
        settings = in_groups(64, num_bits=bits, symmetric=symmetric)
        values = read(settings, matrix.compressed(pack, bits, symmetric=symmetric))
        np.testing.assert_array_equal(values, matrix.values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("label", [None, "gptq", "gptq_v2"])
@pytest.mark.parametrize("less_one", [True, False])
def test_zero_points_of_symmetric_codes_are_known_whatever_the_label(
    bits: int, label: str | None, less_one: bool
) -> None:
    settings = GPTQ | {"bits": bits, "checkpoint_format": label}
    values = read(settings, Matrix(bits).gptq(bits, less_one=less_one))
    np.testing.assert_array_equal(values, Matrix(bits).values)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_zero_point_of_0_that_borrows_is_read_where_the_label_says_who_wrote_it(bits: int) -> None:
    """gptqmodel subtracts one from all zero points of a word at once."""
    matrix = Matrix(bits, symmetric=False, least=0)
    matrix.zero[:8] = 0
    stored = matrix.gptq(bits, less_one=False)
    ones = np.uint32(sum(1 << first for first in range(0, 32, bits)))
    stored["qzeros"] = (stored["qzeros"].view(np.uint32) - ones).view(np.int32)
    settings = GPTQ | {"bits": bits, "sym": False}
    np.testing.assert_array_equal(read(settings | {"checkpoint_format": "gptq"}, stored), matrix.values)
    with pytest.raises(ReplicaError, match=r"down_proj.qzeros holds zero points of 0 stored less one"):
        read(settings, stored)


def test_a_zero_point_of_0_that_has_none_behind_it_needs_no_label() -> None:
    matrix = Matrix(symmetric=False)
    matrix.zero[7::8] = 0
    stored = matrix.gptq(less_one=False)
    stored["qzeros"] = (stored["qzeros"].view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    np.testing.assert_array_equal(read(GPTQ | {"sym": False}, stored), matrix.values)


def _asymmetric(form: str) -> Stored:
    return getattr(Matrix(symmetric=False), form)()


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        pytest.param(GPTQ, _asymmetric("gptq"), id="gptq"),
        pytest.param(GPTQ | {"sym": None, "dynamic": {".*": {"sym": True}}}, _asymmetric("gptq"), id="dynamic"),
        pytest.param(AUTO_ROUND, _asymmetric("gptq"), id="auto-round"),
        pytest.param(AWQ | {"zero_point": False}, _asymmetric("awq"), id="awq"),
        pytest.param(in_groups(64), Matrix(symmetric=False).compressed(symmetric=False), id="compressed-tensors"),
        pytest.param(
            in_groups(64, num_bits=8),
            Matrix().int8() | {"weight_zero_point": np.ones((ROWS, 3), np.int8)},
            id="int8",
        ),
    ],
)  # fmt: skip
def test_zero_points_that_symmetric_codes_cannot_have_are_refused(settings: dict[str, Any], stored: Stored) -> None:
    with pytest.raises(
        ReplicaError, match=r"states symmetric codes, and .*(qzeros|zero_point) holds other zero points"
    ):
        read(settings, stored)


def test_zero_points_that_are_stated_and_not_there_are_refused() -> None:
    with pytest.raises(ReplicaError, match="its weight_zero_point is missing"):
        read(in_groups(64, symmetric=False), Matrix().compressed())
    with pytest.raises(ConfigError, match="states zero points"):
        read(in_groups(64, num_bits=8, symmetric=False), Matrix().int8())


@pytest.mark.parametrize(
    "labels",
    [
        {"checkpoint_format": "marlin"}, {"checkpoint_format": "gptq_p"}, {"format": "bitblas"},
        {"checkpoint_format": "gptq", "format": "gptq_v2"},
    ],
)  # fmt: skip
def test_a_layout_that_is_not_read_and_two_at_once_are_refused(labels: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="we read either gptq or gptq_v2"):
        read(GPTQ | labels, Matrix().gptq())


def test_gptqmodels_second_word_for_the_layout_counts() -> None:
    matrix = Matrix(symmetric=False)
    settings = GPTQ | {"sym": False, "format": "gptq_v2"}
    np.testing.assert_array_equal(read(settings, matrix.gptq(less_one=False)), matrix.values)


def test_the_stored_order_of_columns_is_held_against_what_is_stated() -> None:
    matrix = Matrix()
    in_order = {"g_idx": matrix.group_of.astype(np.int32)}
    np.testing.assert_array_equal(read(GPTQ, matrix.gptq() | in_order), matrix.values)
    matrix.group_of = np.random.default_rng(0).permutation(matrix.group_of)
    shuffled, acting = {"g_idx": matrix.group_of.astype(np.int32)}, GPTQ | {"desc_act": True}
    np.testing.assert_array_equal(read(acting, matrix.gptq() | shuffled), matrix.values)
    with pytest.raises(ReplicaError, match=r"g_idx puts columns into another order, and config.json states that there"):
        read(GPTQ, matrix.gptq() | shuffled)
    with pytest.raises(ReplicaError, match=r"g_idx puts 160 columns under one scale, and config.json states 64"):
        read(acting, matrix.gptq() | {"g_idx": np.zeros(COLUMNS, np.int32)})
    with pytest.raises(ConfigError, match=r"states another order of columns .* which g_idx would hold"):
        read(acting, matrix.gptq())
    with pytest.raises(ConfigError, match=r"states another order of columns .* which weight_g_idx would hold"):
        read(in_groups(64, actorder="group"), matrix.compressed())
    ordered = matrix.compressed() | {"weight_g_idx": shuffled["g_idx"]}
    np.testing.assert_array_equal(read(in_groups(64, actorder="dynamic"), ordered), matrix.values)
    with pytest.raises(ReplicaError, match="weight_g_idx puts columns into another order"):
        read(in_groups(64, actorder="weight"), ordered)


def of_4_bits(groups: int) -> Stored:
    return {"weight_packed": np.zeros((64, 64), np.uint8), "weight_scale": np.ones((64, groups), np.uint8)}


FP8: Stored = {"weight": np.zeros((64, 64), np.uint8), "weight_scale": np.ones((64, 1), np.float32)}


@pytest.mark.parametrize(
    ("weights", "stored", "dtypes"),
    [
        pytest.param({"num_bits": 4, "type": "float", "group_size": 64}, Matrix().compressed(), {}, id="words"),
        pytest.param({"num_bits": 8, "type": "float", "group_size": 64}, Matrix().int8(), {}, id="int8"),
        pytest.param(
            {"num_bits": 4, "type": "float", "group_size": 32}, of_4_bits(8), {"weight_scale": "F8_E4M3"}, id="nvfp4"
        ),
        pytest.param({"num_bits": 4, "type": "float", "group_size": 16}, of_4_bits(4), {}, id="mxfp4"),
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, FP8, {"weight": "F8_E4M3"}),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, FP8, {"weight": "F8_E4M3"}),
        ({"num_bits": 8, "type": "float", "block_structure": "32x32"}, FP8, {"weight": "F8_E4M3"}),
    ],
)
def test_types_widths_and_blocks_that_the_tensors_do_not_have_are_refused(
    weights: dict[str, Any], stored: Stored, dtypes: dict[str, str]
) -> None:
    if dtypes.get("weight_scale") == "F8_E4M3":
        stored = stored | {"weight_global_scale": np.ones(1, np.float32)}
    with pytest.raises(ConfigError, match=r"states .*, and its tensors say otherwise"):
        read(groups(weights), stored, **dtypes)


def test_one_scale_for_all_is_refused_where_blocks_are_stated() -> None:
    stored = {"weight": np.zeros((64, 64), np.uint8), "weight_scale_inv": np.ones((), np.float32)}
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    with pytest.raises(ConfigError, match=r"states blocks of \[32, 32\], and its tensors say otherwise"):
        read(settings, stored, weight="F8_E4M3")


def test_bitsandbytes_last_block_may_be_short_and_its_kind_is_that_of_config_json() -> None:
    """64 x 160 values in blocks of 4096."""
    state = b'{"quant_type": "nf4", "blocksize": 4096, "dtype": "float32", "shape": [64, 160]}'
    generator = np.random.default_rng(0)
    codes, scale = generator.integers(0, 16, 64 * 160), generator.random(3).astype(np.float32)
    table = np.linspace(-1, 1, 16, dtype=np.float32)
    stored: Stored = {
        "weight": (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        "weight.absmax": scale,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(state, np.uint8),
    }
    settings = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
    wanted = (table[codes] * np.repeat(scale, 4096)[: codes.size]).reshape(64, 160)
    np.testing.assert_array_equal(read(settings, stored), wanted)
    with pytest.raises(ConfigError, match="states bnb_4bit_quant_type fp4"):
        read(settings | {"bnb_4bit_quant_type": "fp4"}, stored)


# -- what lies or is stated beside -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "stored", "unread"),
    [
        pytest.param({"num_bits": 8, "type": "float"}, FP8 | {"weight_scale_inv": np.ones((64, 1), np.float32)},
                     "weight_scale_inv", id="two scales"),
        pytest.param({"num_bits": 8, "type": "int"}, Matrix().int8() | {"weight_g_idx": np.zeros(COLUMNS, np.int32)},
                     "weight_g_idx", id="an order of columns"),
        pytest.param({"num_bits": 4, "type": "float"}, of_4_bits(4) | {"weight_global_scale": np.ones(1, np.float32)},
                     "weight_global_scale", id="a scale of all"),
        pytest.param({"num_bits": 4}, Matrix().compressed() | {"scales": np.ones((64, 3), np.float16)},
                     "scales", id="of another format"),
    ],
)  # fmt: skip
def test_a_part_that_would_change_the_values_and_is_of_another_format_is_refused(
    weights: dict[str, Any], stored: Stored, unread: str
) -> None:
    dtypes = {"weight": "F8_E4M3"} if stored.get("weight") is FP8["weight"] else {}
    with pytest.raises(ReplicaError, match=rf"its {unread} is no part of"):
        read(groups(weights), stored, **dtypes)


def test_zero_points_that_compressed_tensors_once_wrote_beside_fp8_are_left_alone() -> None:
    read(groups({"num_bits": 8, "type": "float"}), FP8 | {"weight_zero_point": np.zeros((64, 1), np.int8)},
         weight="F8_E4M3")  # fmt: skip


def test_scales_of_a_square_matrix_that_lie_along_its_columns_are_refused() -> None:
    along = {"weight": FP8["weight"], "weight_scale": np.ones((1, 64), np.float32)}
    with pytest.raises(NdpError, match="do not belong together"):
        read({"quant_method": "fp8"}, along, weight="F8_E4M3")


@pytest.mark.parametrize("targets", [[EXPERT], "re:.*down_proj", ["Linear"]])
def test_experts_whose_inputs_are_turned_while_they_run_are_refused(targets: list[str] | str) -> None:
    """An online transform of compressed-tensors: vLLM's own layers of experts leave it out in silence."""

    def stated(location: str, **others: Any) -> dict[str, Any]:
        apply = [{"targets": targets, "location": location} | others]
        scheme = {"type": "hadamard", "apply": apply, "head_dim": 32}
        return in_groups(64) | {"transform_config": {"config_groups": {"R4": scheme}}}

    for location in ("input", "output"):
        with pytest.raises(ConfigError, match=f"{EXPERT}: config.json's transform_config turns"):
            read(stated(location), Matrix().compressed())
    for settings in (stated("weight_input"), stated("input", ignore=["re:.*experts.*"])):
        np.testing.assert_array_equal(read(settings, Matrix().compressed()), Matrix().values)


def rewritten(directory: Path, dtype: str, change: Stored | None = None, **others: str) -> tuple[Path, Stored]:
    """A small checkpoint with its tensors in several dtypes, and its values before they are stored."""
    write_small_checkpoint(directory)
    tensors = load_file(directory / "model.safetensors") | (change or {})
    write_safetensors(directory / "model.safetensors", tensors, dtype, **others)
    return directory, tensors


NAME = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"


@pytest.mark.parametrize("word", ["w2", "1", "w1"])
@pytest.mark.parametrize(
    ("dtype", "other"), [("bfloat16", "float16"), ("float16", "bfloat16"), ("bfloat16", "float32")]
)
def test_experts_of_several_dtypes_are_read_exactly(tmp_path: Path, word: str, dtype: str, other: str) -> None:
    """Some matrices of all experts, or some experts: float32 holds the values of each."""
    directory, tensors = rewritten(tmp_path / "m", dtype, **{word: other})
    experts = CheckpointExperts(directory)
    assert not experts.lies_in_place
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            full = experts.expert(layer, expert)
            assert full.dtype == "float32"
            for matrix in ("w1", "w3", "w2"):
                name = NAME.format(layer, expert, matrix)
                own = other if word in name.split(".") else dtype
                wanted = to_float32(as_stored(tensors[name], own), own)
                np.testing.assert_array_equal(getattr(full, matrix), wanted)


def test_experts_of_one_dtype_lie_in_place(tmp_path: Path) -> None:
    directory, _ = rewritten(tmp_path / "m", "bfloat16")
    assert CheckpointExperts(directory).lies_in_place


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("matrix", "value"), [("w1", np.nan), ("w3", -np.nan), ("w2", np.inf), ("w1", -np.inf)])
def test_an_expert_with_nan_or_infinity_is_refused_by_layer_and_number(
    tmp_path: Path, dtype: str, matrix: str, value: float
) -> None:
    name = NAME.format(1, 2, matrix)
    _, tensors = rewritten(tmp_path / "m", "float32")
    spoilt = tensors[name].copy()
    spoilt[3, 5] = value
    directory, _ = rewritten(tmp_path / "spoilt", dtype, {name: spoilt})
    experts = CheckpointExperts(directory)
    experts.expert(1, 1)
    with pytest.raises(ReplicaError, match="spoilt: expert 2 of layer 1 holds NaN or infinity"):
        experts.expert(1, 2)
    with pytest.raises(ReplicaError, match="spoilt: expert 2 of layer 1 holds NaN or infinity"):
        build_data_free(directory, tmp_path / "replicas", show_progress=False)


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_that_no_replica_holds_are_served_and_not_quantized(tmp_path: Path, sign: int) -> None:
    name = NAME.format(1, 2, "w2")
    _, tensors = rewritten(tmp_path / "m", "float32")
    large = tensors[name].copy()
    large[3, 5] = sign * 1e38
    directory, _ = rewritten(tmp_path / "large", "bfloat16", {name: large})
    assert to_float32(CheckpointExperts(directory).expert(1, 2).w2, "bfloat16")[3, 5] == pytest.approx(
        sign * 1e38, 0.01
    )
    with pytest.raises(ReplicaError, match=r"large: expert 2 of layer 1 holds 9.97e\+37, .* weights up to 32752"):
        build_data_free(directory, tmp_path / "replicas", show_progress=False)
    largest = tensors[name].clip(-1, 1) * 32000
    directory, _ = rewritten(tmp_path / "largest", "bfloat16", {name: largest})
    build_data_free(directory, tmp_path / "others", show_progress=False)


EIGHT_BITS = {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 8, "type": "int"}}}}


def in_two_files(directory: Path) -> dict[str, NDArray[Any]]:
    """One matrix of 8 bits in a small checkpoint, its scales in a file of their own."""
    write_small_checkpoint(directory, quantization_config=EIGHT_BITS)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    name = NAME.format(1, 2, "w2")
    codes, scale = np.ones(tensors[name].shape, np.int8), np.ones((len(tensors[name]), 1), np.float32)
    tensors[name] = codes
    save_file(tensors, directory / "model-00001-of-00002.safetensors")
    save_file({f"{name}_scale": scale}, directory / "model-00002-of-00002.safetensors")
    return tensors


def test_a_file_of_scales_that_is_rewritten_is_noticed(tmp_path: Path) -> None:
    in_two_files(tmp_path / "m")
    experts = CheckpointExperts(tmp_path / "m")
    for layer in range(LAYERS):
        experts.check(layer)
    with (tmp_path / "m" / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"abcd")
    experts.check(0)
    with pytest.raises(ReplicaError, match=r"model-00002-of-00002.safetensors was cut short or rewritten"):
        experts.check(1)


def test_a_matrix_that_is_there_plain_and_quantized_is_refused(tmp_path: Path) -> None:
    tensors = in_two_files(tmp_path / "m")
    name = NAME.format(1, 1, "w2")
    more = {f"{name}_packed": np.ones((16, 6), np.int32), f"{name}_scale": np.ones((16, 1), np.float32)}
    save_file(tensors | more, tmp_path / "m" / "model-00001-of-00002.safetensors")
    with pytest.raises(ReplicaError, match=rf"{name} is there as F32 and beside it in a quantized form"):
        CheckpointExperts(tmp_path / "m")


def test_what_older_compressed_tensors_call_compression_config_is_used(tmp_path: Path) -> None:
    directory = write_small_checkpoint(tmp_path / "m", compression_config=GPTQ)
    assert _with_settings(directory, read_config(directory)) == {"quantization_config": GPTQ}


def mixed(**layers: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


E4M3: dict[str, Any] = {"weight": np.zeros((256, 384), np.uint8), "weight_scale": np.ones((2, 3), np.float32)}


@pytest.mark.parametrize(
    "key",
    [EXPERT, "model.layers.1.mlp.experts", "model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.down_proj"],
)
def test_an_algorithm_of_one_layer_is_found_as_vllm_finds_it(key: str) -> None:
    """By the module, a module around it, all experts' matrices of its kind, with experts left out."""
    settings = mixed(**{key: {"quant_algo": "fp8_pb_wo"}, "lm_head": {"quant_algo": "NVFP4", "group_size": 16}})
    read(settings, E4M3, weight="F8_E4M3")
    with pytest.raises(ConfigError, match=r"states float of 4 bits, 16 columns to a scale, and its tensors say other"):
        read(mixed(**{key: {"quant_algo": "NVFP4"}}), E4M3, weight="F8_E4M3")
    with pytest.raises(ConfigError, match=r"states blocks of \[64, 64\], and its tensors say otherwise"):
        read(mixed(**{key: {"quant_algo": "FP8_PB_WO", "group_size": 64}}), E4M3, weight="F8_E4M3")


def test_each_matrix_is_read_by_its_own_algorithm() -> None:
    """One scale of the whole tensor and one per row of a tensor of one row look alike but in what is stated."""
    stored = {"weight": np.zeros((1, 64), np.uint8), "weight_scale": np.ones((1, 1), np.float32)}
    for name in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        assert read(mixed(**{EXPERT: {"quant_algo": name}}), stored, weight="F8_E4M3").shape == (1, 64)
    rows = {"weight": np.zeros((64, 64), np.uint8), "weight_scale": np.ones((64, 1), np.float32)}
    read(mixed(**{EXPERT: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}), rows, weight="F8_E4M3")
    with pytest.raises(ConfigError, match=r"states blocks of \[64, 64\], and its tensors say otherwise"):
        read(mixed(**{EXPERT: {"quant_algo": "FP8"}}), rows, weight="F8_E4M3")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (mixed(lm_head={"quant_algo": "FP8"}), f"{EXPERT}: config.json's quantized_layers has no algorithm for it"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers has no algorithm for it"),
        (mixed(**{EXPERT: {"quant_algo": "W4A8_AWQ"}}), "modelopt's algorithm W4A8_AWQ, which is not read"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "modelopt's algorithm INT4_AWQ, which is not read"),
        (mixed(**{EXPERT: {}}), "quantization_config cannot be read: .*quant_algo"),
    ],
)
def test_an_algorithm_that_is_missing_or_not_read_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(settings, E4M3, weight="F8_E4M3")


def test_what_is_said_of_a_module_goes_before_what_is_said_of_all_and_an_exempt_one_has_nothing_of_its_own() -> None:
    """GPTQ's `dynamic`: the first pattern that matches, "-:" for what is left as it is."""
    own = {"+:.*experts": Entry(bits=8, sym=False), "-:.*gate": Entry(bits=2, sym=False)}
    settings = Settings(bits=4, sym=True, dynamic=own)
    found = [settings.of(module)[0] for module in ("a.experts.0", "a.gate", "a.attn")]
    assert [(one.num_bits, one.symmetric) for one in found] == [(8, False), (4, True), (4, True)]


@pytest.mark.parametrize(
    ("location", "turns"), [("input", True), ("output", True), ("weight_input", False), ("weight_output", False)]
)
def test_what_is_turned_in_the_file_is_not_turned_while_it_runs(location: str, turns: bool) -> None:
    of_linears = Transforms([Transform(["Linear"], ["re:.*gate"], location)])
    settings = Settings(transform_config=TransformConfig({"0": of_linears}))
    assert (settings.turns("a.experts.0"), settings.turns("a.gate")) == (turns, False)
