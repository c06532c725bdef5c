"""Quantized experts are read as their formats' own libraries read them; what is not read is refused by name."""

import importlib.util
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_kernel
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")

import make_family_models  # noqa: E402
import make_quantized_models as quantized  # noqa: E402
import quantized_writers as writers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from ndp_device.calibration.build import build_calibrated  # noqa: E402
from ndp_device.checkpoint import values as decoders  # noqa: E402
from ndp_device.checkpoint.files import TensorInfo, read_config  # noqa: E402
from ndp_device.checkpoint.names import DTYPES  # noqa: E402
from ndp_device.checkpoint.opening import stated_form, unpacked  # noqa: E402
from ndp_device.checkpoint.values import Packed  # noqa: E402
from ndp_device.common.errors import ConfigError, ReplicaError  # noqa: E402
from ndp_device.experts.expert import ByteExpert, ByteMatrix, Fp4Expert, QuantizedExpert, to_float32  # noqa: E402
from ndp_device.replicas.checkpoint import CheckpointExperts  # noqa: E402
from ndp_device.replicas.format import ReplicaFiles  # noqa: E402

ALWAYS_THERE = {"auto_gptq"} if sys.version_info[:2] == (3, 11) else set[str]()
"""`make setup` installs it, and a test that does not find it fails."""


def needs(package: str) -> Any:
    lacks = package not in ALWAYS_THERE and importlib.util.find_spec(package) is None
    return pytest.mark.skipif(lacks, reason=f"needs {package}")


needs_auto_gptq = needs("auto_gptq")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


def _marks(name: str) -> Any:
    return needs(quantized.NEEDS[name]) if name in quantized.NEEDS else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in quantized.FORMATS])
def test_every_expert_has_the_values_that_the_formats_own_library_makes(models: Path, name: str) -> None:
    """Exactly: the twin's values were rounded once, to the dtype in which they are read."""
    directory = quantized.make(name, models)
    ours, twin = CheckpointExperts(directory), CheckpointExperts(directory.with_name(f"{name}-dequantized"))
    assert (ours.shape.num_layers, ours.shape.num_experts) == (twin.shape.num_layers, twin.shape.num_experts)
    for layer in range(ours.shape.num_layers):
        for expert in range(ours.shape.num_experts):
            mine, theirs = ours.expert(layer, expert), twin.expert(layer, expert)
            for matrix in ("w1", "w3", "w2"):
                values = to_float32(getattr(mine, matrix), mine.dtype)
                np.testing.assert_array_equal(values, to_float32(getattr(theirs, matrix), theirs.dtype))
    sizes = ours.shape.hidden_size, ours.shape.intermediate_size
    assert stated_form(directory, read_config(directory), *sizes) == ours.stored_form  # before a download


@needs_auto_gptq
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_auto_gptqs_packer_is_read_at_every_width_it_has(bits: int) -> None:
    """3 bits cross the borders of its 32-bit words; groups in any order; zero points are stored less one."""
    rows, columns, group = 64, 96, 32
    generator = torch.Generator().manual_seed(bits)
    group_of = torch.randperm(columns, generator=generator) // group
    top = (1 << bits) - 1
    codes = torch.randint(0, top + 1, (rows, columns), generator=generator)
    zeros = torch.randint(1, top + 1, (rows, columns // group), generator=generator).float()
    scales = torch.rand(rows, columns // group, generator=generator).half().float() + 0.5
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = (codes - zeros[:, group_of]) * scales[:, group_of]
    packer = quantized.auto_gptq_linear()(bits, group, columns, rows, False, weight_dtype=torch.float32)
    packer.pack(linear, scales.clone(), zeros.clone(), group_of.to(torch.int32))
    parts = {"codes": "qweight", "zero": "qzeros", "scale": "scales", "group_of": "g_idx"}
    packed = Packed(decoders.gptq, (rows, columns), "F32", parts, bits=bits, block=(1, group), zero_is_less_one=True)
    values = packed.values(lambda name: getattr(packer, name).numpy(), None)
    np.testing.assert_allclose(values, linear.weight.detach(), rtol=1e-6, atol=1e-6)


def test_fp8_has_torchs_values_for_every_byte_and_blocks_may_be_cut_off_at_the_edges() -> None:
    everything = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    weight, scale = everything.repeat(2).reshape(4, 128)[:, :100], torch.tensor([[1.0, 2.0], [4.0, 0.5]])
    stored = {"codes": weight.contiguous().view(torch.uint8).numpy(), "scale": scale.numpy()}
    packed = Packed(decoders.scaled, (4, 100), "F32", {part: part for part in stored}, "e4m3", block=(3, 64))
    wanted = weight.float() * scale.repeat_interleave(3, 0)[:4].repeat_interleave(64, 1)[:, :100]
    np.testing.assert_array_equal(packed.values(lambda name: stored[name], None), wanted.numpy())


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "mixtral-mxfp4", "mixtral-nvfp4", "mixtral-nvfp4-modelopt"])
def test_fp4_is_given_as_it_is_stored_and_stands_for_the_same_values(models: Path, name: str) -> None:
    """The values of NVFP4 that are given otherwise are these, rounded to 16 bits."""
    checkpoint, rounding = CheckpointExperts(quantized.make(name, models)), 2.0**-8 if "nvfp4" in name else 0
    assert checkpoint.stored_form == (decoders.NVFP4 if rounding else decoders.MXFP4)
    for layer, expert in ((0, 0), (checkpoint.shape.num_layers - 1, checkpoint.shape.num_experts - 1)):
        full, stored = checkpoint.expert(layer, expert), checkpoint.as_stored(layer, expert)
        assert isinstance(stored, Fp4Expert)
        assert (stored.biases is None) == (full.biases is None)
        for mine, theirs in ((stored.w13, np.concatenate([full.w1, full.w3])), (stored.w2, full.w2)):
            wanted = to_float32(np.ascontiguousarray(theirs), full.dtype)
            np.testing.assert_allclose(reference_kernel.from_fp4(mine), wanted, rtol=rounding, atol=0)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("mixtral-fp8", 32),
        ("mixtral-fp8-modelopt", 0),
        ("mixtral-mxfp8", 32),
        ("mixtral-deepseek-fp8", 32),
        ("mixtral-int8", 0),
    ],
)
def test_8_bits_are_given_as_they_are_stored_and_stand_for_the_same_values(
    models: Path, name: str, columns: int
) -> None:
    """The values that are given otherwise are these, rounded to 16 bits."""
    checkpoint = CheckpointExperts(quantized.make(name, models))
    assert checkpoint.stored_form == ("int8" if "int8" in name else "float8", columns)
    assert checkpoint.stored_form.bits == 8
    for layer, expert in ((0, 0), (checkpoint.shape.num_layers - 1, checkpoint.shape.num_experts - 1)):
        full, stored = checkpoint.expert(layer, expert), checkpoint.as_stored(layer, expert)
        assert isinstance(stored, ByteExpert)
        for mine, theirs in ((stored.w1, full.w1), (stored.w3, full.w3), (stored.w2, full.w2)):
            values = torch.from_numpy(reference_kernel.from_bytes(mine)).to(getattr(torch, full.dtype)).float().numpy()
            np.testing.assert_array_equal(values, to_float32(np.ascontiguousarray(theirs), full.dtype))


def test_rows_of_8_bits_keep_their_scales_or_are_not_given() -> None:
    """Gate and up in one tensor: one after the other or in turns; blocks that end where they do, or not."""
    codes = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for of_rows, rows, wanted in (
        (1, slice(1, None, 2), [1, 3, 5, 7]),
        (4, slice(4, 8), [1]),
        (8, slice(4, 8), [0]),
        (8, slice(1, None, 2), [0]),
        (3, slice(None), [0, 1, 2]),
        (4, slice(2, 8), None),
        (4, slice(1, None, 2), None),
    ):
        scale = np.arange(-(-8 // of_rows), dtype=np.float32)[:, None]
        found = ByteMatrix("int8", codes, scale, (of_rows, 8)).at_rows(rows)
        assert (found is None) == (wanted is None), (of_rows, rows)
        if found is not None:
            np.testing.assert_array_equal(found.codes, codes[rows])
            assert found.scale[:, 0].tolist() == wanted


@given(*(st.integers(1, 12) for _ in range(4)))
def test_matrices_of_8_bits_lie_one_above_the_other_whatever_rows_a_scale_has(
    rows: int, of_rows: int, more: int, of_more: int
) -> None:
    def drawn(rows: int, of_rows: int) -> ByteMatrix:
        codes, scale = rng.integers(0, 256, (rows, 8), np.uint8), rng.random((-(-rows // of_rows), 2), np.float32)
        return ByteMatrix("int8", codes, scale, (of_rows, 4))

    rng = np.random.default_rng(0)
    above, below = drawn(rows, of_rows), drawn(more, of_more)
    both = above.above(below)
    assert both is not None
    wanted = [reference_kernel.weights_of(one) for one in (above, below)]
    np.testing.assert_array_equal(reference_kernel.weights_of(both), np.concatenate(wanted))
    assert above.above(replace(below, numbers="float8")) is None
    assert above.above(replace(below, block=(of_more, 8), scale=below.scale[:, :1])) is None


def test_a_byte_that_is_no_number_is_refused_with_its_tensor(models: Path, tmp_path: Path) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(quantized.make("mixtral-fp8", models), directory)
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.1.w2.weight"))
    tensors[name].view(torch.uint8)[5, 7] = 0xFF
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ReplicaError, match=f"{re.escape(name)} holds NaN or infinity"):
        CheckpointExperts(directory).as_stored(int(name.split(".")[2]), 1)


def test_columns_in_the_order_of_their_loss_are_served_as_they_are_stored(models: Path, tmp_path: Path) -> None:
    """GPTQ with desc_act: gate and up, which read one input, in one order; down in its own."""
    directory = tmp_path / "in-order-of-loss"
    shutil.copytree(quantized.make("mixtral-gptq", models), directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    orders = {
        name: torch.randperm(
            len(tensors[f"model.layers.0.block_sparse_moe.experts.0.{name}.g_idx"]), generator=generator
        )
        for name in ("w1", "w2")
    }
    for name in tensors:
        if name.endswith("g_idx") and ".experts." in name:
            tensors[name] = tensors[name][orders["w2" if ".w2." in name else "w1"]].contiguous()
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = CheckpointExperts(directory)
    assert checkpoint.stored_form == decoders.StoredForm("int4", 32)
    full, stored = checkpoint.expert(1, 2), checkpoint.as_stored(1, 2)
    assert isinstance(stored, QuantizedExpert)
    for mine, theirs in ((stored.w13, np.concatenate([full.w1, full.w3])), (stored.w2, full.w2)):
        wanted = to_float32(np.ascontiguousarray(theirs), full.dtype)
        assert mine.perm is not None
        np.testing.assert_allclose(
            reference_kernel.dequantize(mine), wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max()
        )


def test_matrices_with_one_scale_a_row_are_served_in_the_groups_that_divide_the_rows_of_all(
    models: Path, tmp_path: Path
) -> None:
    """GPTQ with group_size -1, as Mixtral-8x7B-Instruct's is: gate and up have another length of rows than down."""
    directory = tmp_path / "one-a-row"
    shutil.copytree(quantized.make("mixtral-gptq", models), directory)
    tensors = load_file(directory / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith((".scales", ".qzeros")):
            tensors[name] = value[:1].contiguous()
        elif name.endswith(".g_idx"):
            tensors[name] = torch.zeros_like(value)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= {"desc_act": True, "group_size": -1}
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = CheckpointExperts(directory)
    full, stored = checkpoint.expert(1, 2), checkpoint.as_stored(1, 2)
    inner, hidden = full.w1.shape
    assert inner != hidden
    group = math.gcd(inner, hidden)
    assert checkpoint.stored_form == decoders.StoredForm("int4", group)
    assert isinstance(stored, QuantizedExpert)
    for mine, theirs in ((stored.w13, np.concatenate([full.w1, full.w3])), (stored.w2, full.w2)):
        wanted = to_float32(np.ascontiguousarray(theirs), full.dtype)
        assert mine.group_size == group
        np.testing.assert_allclose(
            reference_kernel.dequantize(mine), wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max()
        )


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("block", [32, 160])
def test_integers_of_4_bits_become_numbers_of_16_as_numpy_computes_them(dtype: str, block: int) -> None:
    """Also those that the type holds as subnormal, zero, infinite or no number; words by rows and by columns."""
    rng, (rows, columns) = np.random.default_rng(0), (130, 480 if block == 160 else 320)
    codes = rng.integers(-(1 << 31), 1 << 31, (columns // 8, rows), np.int32)
    scale = (rng.standard_normal((rows, columns // block)) * 10.0 ** rng.integers(-12, 6, (rows, 1))).astype(np.float32)
    scale[7, 0] = np.nan
    zero = rng.integers(0, 16, scale.shape).astype(np.float32)
    packed = Packed(decoders.gptq, (rows, columns), dtype, {}, block=(1, block))
    for words in (codes.T, np.ascontiguousarray(codes.T)):
        whole = decoders.Whole(words, scale, zero, None)
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = decoders._as_stored(whole.rows_of(replace(packed, dtype="F32"))(0, rows), dtype)
        got = whole.rows_of(packed)(0, rows)
        as_float = to_float32(wanted, {"BF16": "bfloat16", "F16": "float16"}[dtype])
        assert np.isnan(as_float).sum() == block
        is_number = ~np.isnan(as_float)
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got.view(np.uint16)[is_number], wanted.view(np.uint16)[is_number])
        assert np.isnan(to_float32(got, {"BF16": "bfloat16", "F16": "float16"}[dtype])[~is_number]).all()


@pytest.mark.parametrize(
    ("packed", "form"),
    [
        ((decoders.scaled, "e4m3", "F32", (128, 128), 256), ("float8", 0)),
        ((decoders.scaled, "e4m3", "F32", (1, 64), 256), ("float8", 64)),
        ((decoders.scaled, "int8", "F32", (1, 64), 64), ("int8", 0)),
        ((decoders.scaled, "int8 of 127", "F32", (1, 64), 64), None),
        ((decoders.scaled, "fp4", "F8_E4M3", (1, 16), 64), decoders.NVFP4),
        ((decoders.scaled, "fp4", "F8_E4M3", (1, 16), 48), None),
        ((decoders.scaled, "fp4", "F8_E4M3", (1, 32), 64), None),
        ((decoders.scaled, "fp4", "F8_E8M0", (1, 32), 64), decoders.MXFP4),
        ((decoders.scaled, "fp4", "F8_E8M0", (1, 16), 64), None),
        ((decoders.gptq, "", "F16", (1, 24), 96), ("int4", 24)),
        ((decoders.awq, "", "F16", (24, 1), 96), ("int4", 24)),
        ((decoders.words, "", "F16", (1, 12), 96), None),
        ((decoders.words, "", "F16", (1, 64), 96), None),
        ((decoders.four_bit, "", "F32", (1, 1), 96), None),
    ],
)
def test_what_a_kernel_takes_as_it_is_stored_follows_from_codes_scales_and_blocks(packed: Any, form: Any) -> None:
    decode, elements, scale_dtype, block, columns = packed
    parts = {part: part for part in ("codes", "scale")}
    one = Packed(decode, (256, columns), "BF16", parts, elements, scale_dtype, block=block)
    assert one.stored_form == form
    if elements in ("e4m3", "int8"):
        assert replace(one, parts=parts | {"zero": "zero"}).stored_form is None
    if decode is not decoders.scaled:
        assert replace(one, bits=3).stored_form is None


@pytest.mark.parametrize(
    ("scale", "zero_point", "is_taken"), [(0.5, 7, True), (1 / 3, 7, False), (7e4, 7, False), (6e4, 7, False)]
)
def test_integers_are_served_as_they_are_stored_where_no_scale_or_offset_would_be_rounded_away(
    scale: float, zero_point: int, is_taken: bool
) -> None:
    """A third is no number of 16 bits; 7 times 60000 is infinite as one. Such a checkpoint is served by its values."""
    rng = np.random.default_rng(0)
    stored = {
        "codes": rng.integers(-(1 << 31), 1 << 31, (8, 4), np.int32),
        "scale": np.full((8, 1), scale, np.float32),
        "zero": np.full((1, 1), zero_point * 0x11111111, np.uint32).view(np.int32),
        "shape": np.array([8, 32]),
    }
    packed = Packed(decoders.words, (8, 32), "F32", {role: role for role in stored}, block=(1, 32))
    found = packed.codes(stored.__getitem__, None)
    assert (found is not None) == is_taken
    if found is not None:
        np.testing.assert_array_equal(reference_kernel.weights_of(found), packed.values(stored.__getitem__, None))


@pytest.mark.parametrize(
    ("scale_dtype", "byte", "of_all", "is_taken"),
    [
        *(("F8_E8M0", 120, {}, True), ("F8_E8M0", 0xFF, {}, False)),
        *(("F8_E4M3", 0x31, {"factor": 3.0}, True), ("F8_E4M3", 0x31, {"divisor": 3.0}, True)),
        *(("F8_E4M3", 0x7F, {"factor": 3.0}, False), ("F8_E4M3", 0xB1, {"factor": 3.0}, False)),
        *(("F8_E4M3", 0x31, {"factor": math.inf}, False), ("F8_E4M3", 0x31, {"divisor": 0.0}, False)),
    ],
)
def test_fp4_is_given_as_it_is_stored_where_every_scale_is_a_number_and_none_is_negative(
    scale_dtype: str, byte: int, of_all: dict[str, float], is_taken: bool
) -> None:
    group = 32 if scale_dtype == "F8_E8M0" else 16
    scale = np.full((4, 64 // group), 0x30, np.uint8)
    scale[2, 1] = byte
    stored = {"codes": np.arange(128, dtype=np.uint8).reshape(4, 32), "scale": scale}
    stored |= {role: np.array([number], np.float32) for role, number in of_all.items()}
    names = {role: role for role in stored}
    packed = Packed(decoders.scaled, (4, 64), "F32", names, "fp4", scale_dtype, block=(1, group))
    found = packed.codes(stored.__getitem__, None)
    assert (found is not None) == is_taken
    if found is not None:
        wanted = packed.values(stored.__getitem__, None)
        np.testing.assert_allclose(reference_kernel.weights_of(found), wanted, rtol=1e-6)


@pytest.mark.parametrize("elements", ["e4m3", "int8"])
def test_8_bits_under_a_scale_that_is_no_number_are_refused(elements: str) -> None:
    """The byte of E4M3's NaN is 127 among whole numbers."""
    stored = {"codes": np.full((4, 64), 0x7F, np.uint8), "scale": np.ones((4, 1), np.float32)}
    packed = Packed(decoders.scaled, (4, 64), "F32", {role: role for role in stored}, elements, block=(1, 64))
    if elements == "int8":
        found = packed.codes(stored.__getitem__, None)
        assert found is not None
        assert (reference_kernel.weights_of(found) == 127).all()
        stored["scale"][3] = np.inf
    with pytest.raises(ReplicaError, match="codes holds NaN or infinity"):
        packed.codes(stored.__getitem__, None)


def test_columns_that_are_no_whole_words_or_groups_are_decoded_all_the_same() -> None:
    """36 columns of FP4 in groups of 16; and a group of 48 that nobody states, whose columns all name the first."""
    rng, codes = np.random.default_rng(0), np.random.default_rng(1).integers(0, 256, (4, 18), np.uint8)
    stored: dict[str, Any] = {"codes": codes, "scale": rng.integers(0, 120, (4, 3), np.uint8)}
    packed = Packed(decoders.scaled, (4, 36), "BF16", {role: role for role in stored}, "fp4", "F8_E4M3", block=(1, 16))
    wanted = decoders._as_stored(replace(packed, dtype="F32").values(stored.__getitem__, None), "BF16")
    np.testing.assert_array_equal(packed.values(stored.__getitem__, None), wanted)

    stored = {
        "codes": rng.integers(-(1 << 31), 1 << 31, (6, 8), np.int32),
        "scale": rng.random((2, 8)).astype(np.float16),
        "zero": np.full((2, 1), 0x77777777, np.int32),
        "group_of": np.zeros(48, np.int32),
    }
    packed = Packed(
        decoders.gptq, (8, 48), "F16", {role: role for role in stored}, block=(1, 48), zero_is_less_one=True
    )
    numbers = decoders._unpack_stream(np.ascontiguousarray(stored["codes"].T), 4).astype(np.float32)
    of_first = stored["scale"][0].astype(np.float32)[:, None]
    np.testing.assert_array_equal(
        packed.values(stored.__getitem__, None), ((numbers - 8) * of_first).astype(np.float16)
    )
    for group_of in (np.zeros(48), np.arange(48) >= 16):  # one of several sizes that a kernel does not take
        assert packed.codes((stored | {"group_of": group_of.astype(np.int32)}).__getitem__, None) is None


def _is_experts(name: str) -> bool:
    return ".experts." in name and name.endswith("_proj")


@pytest.mark.calibration
def test_a_quantized_checkpoint_is_calibrated_like_what_it_stands_for(models: Path, tmp_path: Path) -> None:
    """gpt-oss runs beside its experts as it is; FP8 linear layers are refused, since torch would have to run them."""
    directory = quantized.make("gpt_oss-mxfp4", models)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{n}(line):\n    return line.split({n})\n" for n in range(200)))
    settings: dict[str, Any] = {"bits": (2,), "num_sequences": 8, "sequence_length": 32, "show_progress": False}
    twin = shutil.copytree(directory.with_name("gpt_oss-mxfp4-dequantized"), tmp_path / "twin")
    for file in twin.glob("*.safetensors"):  # MXFP4 decodes to bfloat16, whose products some processors round otherwise
        tensors = load_file(file)
        save_file({name: value.bfloat16() if _is_experts(name) else value for name, value in tensors.items()}, file)
    for source, out in ((directory, "mxfp4"), (twin, "plain")):
        build_calibrated(source, tmp_path / out, text, **settings)
    ours, plain = ReplicaFiles(tmp_path / "mxfp4"), ReplicaFiles(tmp_path / "plain")
    for layer in range(4):
        np.testing.assert_array_equal(ours.layer_losses(layer)[1], plain.layer_losses(layer)[1])
    with pytest.raises(ConfigError, match=r"_proj.weight of qwen3_moe-fp8-all is stored as F8_E4M3: leave out"):
        build_calibrated(quantized.make("qwen3_moe-fp8-all", models), tmp_path / "no", text, **settings)


EXPERT = "model.layers.0.mlp.experts.0.gate_proj"


def described(settings: dict[str, Any], **parts: tuple[str, tuple[int, ...]]) -> Packed:
    separator, shown_as = ("_", EXPERT) if "blocks" in parts else (".", f"{EXPERT}.weight")  # MXFP4 of all experts
    tensors = {f"{EXPERT}{separator}{part}": TensorInfo(*info, Path("f")) for part, info in parts.items()}
    small = {"I64": np.array([64, 96]), "U8": np.frombuffer(NF4_STATE, np.uint8)}
    shown, packed = unpacked(tensors, {"quantization_config": settings}, name="m", small=lambda info: small[info.dtype])
    assert list(shown) == list(packed) == [shown_as]
    return packed[shown_as]


def test_a_layer_of_its_own_width_is_read_by_its_tensors() -> None:
    """auto-round and gptqmodel give single layers other widths: the zero points show theirs."""
    eight = {"qweight": ("I32", (24, 64)), "qzeros": ("I32", (3, 16)), "scales": ("F16", (3, 64))}
    for settings in (GPTQ, {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}):
        assert (described(settings, **eight).bits, described(settings, **eight).shape) == (8, (64, 96))
    for packing, less_one in (("auto_round:auto_gptq", True), ("auto_round:gptqmodel", False), ("auto_round", False)):
        one = described({"quant_method": "auto-round", "bits": 8, "packing_format": packing}, **eight)
        assert one.zero_is_less_one == less_one
    awq = described({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}, **AWQ_PARTS)
    assert awq.decode is decoders.awq


def test_blocks_of_fp8_follow_from_the_makers_settings_or_the_shapes_of_the_scales() -> None:
    """A tensor, a row, blocks that config.json names in either way, modelopt's 128 x 128, 32 columns of MXFP8."""
    cases: list[tuple[dict[str, Any], str, tuple[int, ...], tuple[int, int]]] = [
        ({}, "F32", (), (64, 96)),
        ({}, "F32", (64, 1), (1, 96)),
        ({}, "F32", (64,), (1, 96)),
        ({"weight_block_size": [32, 32]}, "F8_E8M0", (2, 3), (32, 32)),
        ({"config_groups": {"0": {"weights": {"block_structure": [32, 48]}}}}, "BF16", (2, 2), (32, 48)),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "F32", (1, 1, 1, 1), (128, 128)),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "U8", (64, 3), (1, 32)),
    ]
    for settings, dtype, shape, block in cases:
        assert described(settings, weight=("F8_E4M3", (64, 96)), weight_scale=(dtype, shape)).block == block
    large = {"weight": ("F8_E4M3", (256, 384)), "weight_scale": ("F32", (2, 1, 3, 1))}
    assert described({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, **large).block == (128, 128)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("args", [{"strategy": "group", "group_size": 32}, {"strategy": "channel"}], ids=["g", "c"])
@pytest.mark.parametrize("form", ["symmetric", "asymmetric", "reordered"])
def test_compressed_tensors_packer_is_read_at_every_width_it_has(bits: int, args: dict[str, Any], form: str) -> None:
    """3, 5, 6 and 7 bits leave the end of each word empty; a row may end within one."""
    if form == "reordered" and args["strategy"] == "channel":
        return
    args = {"num_bits": bits, "symmetric": form == "symmetric"} | args
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(bits))
    write = writers.compressed_tensors("pack-quantized", actorder=form == "reordered", **args)
    assert_read_as(write, weight, {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": args}}})


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("form", ["symmetric", "asymmetric", "reordered"])
@pytest.mark.parametrize("num_experts", [2, 3, 96])
def test_compressed_tensors_of_all_experts_are_read_one_by_one(bits: int, form: str, num_experts: int) -> None:
    """As its packer stacks them. As many experts as the shape has numbers, or a row columns, are no exception."""
    args = {"num_bits": bits, "symmetric": form == "symmetric", "strategy": "group", "group_size": 32}
    write = writers.compressed_tensors("pack-quantized", actorder=form == "reordered", **args)
    drawn = torch.randn(num_experts, 64, 96, generator=torch.Generator().manual_seed(bits))
    each = [write("experts.gate_up_proj.weight", weight) for weight in drawn]
    once = {"weight_shape": torch.tensor(drawn.shape)}
    if form == "reordered":
        once["weight_g_idx"] = each[0][0]["experts.gate_up_proj.weight_g_idx"]
    raw = {name: torch.stack([stored[name] for stored, _ in each]).numpy() for name in each[0][0]}
    raw |= {f"experts.gate_up_proj.{part}": value.numpy() for part, value in once.items()}
    spelled = {value.numpy().dtype: name for kind, name in SPELLED.items() if kind != torch.bfloat16
               for value in [torch.zeros(1, dtype=kind)]}  # fmt: skip
    tensors = {name: TensorInfo(spelled[value.dtype], value.shape, Path(name)) for name, value in raw.items()}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": args}}}
    shown, packed = unpacked(
        tensors, {"quantization_config": settings}, name="m", small=lambda info: raw[str(info.file)].reshape(-1)
    )
    one = packed["experts.gate_up_proj.weight"]
    assert shown["experts.gate_up_proj.weight"].shape == (num_experts, 64, 96)
    for index, (_, values) in enumerate(each):
        read = to_float32(one.values(raw.__getitem__, index), DTYPES[one.dtype])
        np.testing.assert_array_equal(read, values.float().numpy())


@needs("auto_round_extension")
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:exllamav2"])
def test_auto_rounds_packers_are_read_at_every_width_they_have(bits: int, packing: str) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(bits))
    write = writers.auto_round(bits, less_one=packing.endswith("gptq"))
    assert_read_as(write, weight, {"quant_method": "auto-round", "bits": bits, "packing_format": packing})


@needs("bitsandbytes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_tables_and_nested_scales_are_read_in_each_dtype(dtype: Any, kind: str, nested: bool) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    write = writers.bitsandbytes_4bit(kind, dtype, nested=nested)
    assert_read_as(write, weight, {"quant_method": "bitsandbytes"})


def assert_read_as(write: writers.Quantize, weight: Any, settings: dict[str, Any]) -> None:
    """One matrix, written by its package, has the package's values to the last bit."""
    stored, values = write(f"{EXPERT}.weight", weight)
    raw = {name: value.contiguous().numpy() for name, value in stored.items() if value.dtype != torch.bfloat16}
    tensors = {name: TensorInfo(SPELLED[value.dtype], tuple(value.shape), Path(name)) for name, value in stored.items()}
    _, packed = unpacked(
        tensors, {"quantization_config": settings}, name="m", small=lambda info: raw[str(info.file)].reshape(-1)
    )
    one = packed[f"{EXPERT}.weight"]
    read = to_float32(one.values(raw.__getitem__, None), DTYPES[one.dtype])
    np.testing.assert_array_equal(read, values.float().numpy())


SPELLED = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64",
    torch.uint8: "U8", torch.int8: "I8",
}  # fmt: skip
NF4_STATE = b'{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [64, 96]}'
NF4_PARTS = {
    "weight": ("U8", (64 * 48, 1)), "weight.absmax": ("F32", (96,)), "weight.quant_map": ("F32", (16,)),
    "weight.quant_state.bitsandbytes__nf4": ("U8", (len(NF4_STATE),)),
}  # fmt: skip
NVFP4_PARTS = {
    "weight_packed": ("U8", (64, 48)), "weight_scale": ("F8_E4M3", (64, 6)), "weight_global_scale": ("F32", (1,)),
}  # fmt: skip
MODELOPT_PARTS = {"weight": ("U8", (64, 48)), "weight_scale": ("F8_E4M3", (64, 6)), "weight_scale_2": ("F32", ())}
INT8_PARTS = {"weight": ("I8", (64, 96)), "weight_scale": ("BF16", (64, 1)), "weight_zero_point": ("I8", (64, 1))}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4}
GPTQ_PARTS = {"qweight": ("I32", (12, 64)), "qzeros": ("I32", (3, 8)), "scales": ("F16", (3, 64))}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "version": "gemm"}
AWQ_PARTS = {"qweight": ("I32", (96, 8)), "qzeros": ("I32", (3, 8)), "scales": ("F16", (3, 64))}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
FP8_PARTS = {"weight": ("F8_E4M3", (64, 96)), "weight_scale_inv": ("F32", (2, 3))}
MXFP4_PARTS = {"blocks": ("U8", (4, 64, 3, 16)), "scales": ("U8", (4, 64, 3))}
COMPRESSED: dict[str, Any] = {"format": "pack-quantized", "config_groups": {"0": {"weights": {"num_bits": 4}}}}
COMPRESSED_PARTS = {
    "weight_packed": ("I32", (64, 12)), "weight_scale": ("BF16", (64, 3)), "weight_shape": ("I64", (2,))
}  # fmt: skip


def _but(whole: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """`whole` with some entries changed; those that become None are left out."""
    return {name: value for name, value in (whole | changed).items() if value is not None}


@pytest.mark.parametrize(
    ("settings", "parts", "complaint"),
    [
        (_but(GPTQ, quant_method="hqq"), GPTQ_PARTS, "of quant_method hqq with 4 bits; we read gptq"),
        (_but(GPTQ, quant_method=None), GPTQ_PARTS, "quant_method not given"),
        (_but(GPTQ, bits=5), GPTQ_PARTS, "quant_method gptq with 5 bits"),
        (_but(GPTQ, bits="4"), GPTQ_PARTS, "quantization_config cannot be read: Expected `int.*bits"),
        (GPTQ, _but(GPTQ_PARTS, scales=None), "its scales is missing beside qweight and qzeros"),
        (GPTQ, _but(GPTQ_PARTS, qzeros=None), "its qzeros is missing beside"),
        (GPTQ, _but(GPTQ_PARTS, scales=("F16", (3, 9))), "do not belong together"),
        (GPTQ, _but(GPTQ_PARTS, qzeros=("I32", (2, 8))), "do not belong together"),
        (GPTQ, _but(GPTQ_PARTS, qweight=("I32", (12,))), r"its qweight is I32 \[12\], and we read I32 with 2 dim"),
        (GPTQ, _but(GPTQ_PARTS, qweight=("F32", (12, 64))), "its qweight is F32"),
        (GPTQ, _but(GPTQ_PARTS, scales=("F16", (0, 64))), r"its scales is F16 \[0, 64\]"),
        (GPTQ, _but(GPTQ_PARTS, g_idx=("I32", (12,))), "do not belong together"),
        (_but(AWQ, version="marlin"), AWQ_PARTS, "awq with 4 bits, version marlin; we read"),
        (_but(AWQ, bits=8), AWQ_PARTS, "awq with 8 bits"),
        (AWQ, _but(AWQ_PARTS, qzeros=("I32", (4, 8))), "do not belong together"),
        (FP8, _but(FP8_PARTS, weight_scale_inv=None), "its weight_scale is missing beside weight"),
        (_but(FP8, weight_block_size=[128, 128]), FP8_PARTS,
         r"states blocks of \[128, 128\], and its tensors say otherwise"),
        (_but(FP8, weight_block_size=None), FP8_PARTS, "weight_block_size is missing"),
        (_but(FP8, weight_block_size=[0, 32]), FP8_PARTS, "quantization_config cannot be read: .*weight_block_size"),
        (_but(FP8, weight_block_size=[32]), FP8_PARTS, "quantization_config cannot be read: .*weight_block_size"),
        (FP8, _but(FP8_PARTS, weight_scale_inv=("I32", (2, 3))), "its weight_scale_inv is I32"),
        (FP8, _but(FP8_PARTS, weight=("F8_E5M2", (64, 96))), "its weight is F8_E5M2 .*we read F8_E4M3 or I8 or U8"),
        ({}, _but(NVFP4_PARTS, weight_scale=None), "its weight_scale is missing beside weight_global_scale and"),
        ({}, _but(NVFP4_PARTS, weight_scale=("F8_E4M3", (64, 3))), "do not belong together"),
        ({}, _but(NVFP4_PARTS, weight_scale=("F64", (64, 6))), "its weight_scale is F64"),
        ({}, _but(NVFP4_PARTS, weight_global_scale=None), "its weight_global_scale is missing beside"),
        ({}, _but(NVFP4_PARTS, weight_global_scale=("F32", (7,))), "do not belong together"),
        ({}, _but(MODELOPT_PARTS, weight_scale_2=None), "its weight_scale_2 is missing beside"),
        ({}, _but(MODELOPT_PARTS, weight=("U8", (64, 40))), "do not belong together"),
        ({}, _but(INT8_PARTS, weight_zero_point=("I8", (32, 1))), "do not belong together"),
        ({}, _but(INT8_PARTS, weight_zero_point=("F32", (64, 1))), "its weight_zero_point is F32"),
        ({}, _but(INT8_PARTS, weight_scale=("BF16", (63, 1))), "weight_block_size is missing"),
        ({}, _but(NF4_PARTS, **{"weight.quant_map": None}), "its weight.quant_map is missing"),
        ({}, _but(NF4_PARTS, **{"weight.quant_map": ("F32", (15,))}), "do not belong together"),
        ({}, _but(NF4_PARTS, **{"weight.absmax": ("F32", (95,))}), "do not belong together"),
        ({}, _but(NF4_PARTS, **{"weight.absmax": ("U8", (96,))}), "its weight.absmax is U8"),
        ({}, _but(NF4_PARTS, weight=("U8", (64 * 47, 1))), "do not belong together"),
        ({}, _but(MXFP4_PARTS, scales=None), "its scales is missing beside blocks"),
        ({}, _but(MXFP4_PARTS, scales=("U8", (4, 64, 2))), "do not belong together"),
        ({}, _but(MXFP4_PARTS, blocks=("I8", (4, 64, 3, 16))), "its blocks is I8"),
        (_but(COMPRESSED, config_groups=None), COMPRESSED_PARTS, "states no number of bits"),
        (_but(COMPRESSED, config_groups={"0": {"weights": {"num_bits": 9}}}), COMPRESSED_PARTS, "states 9 bits"),
        (_but(COMPRESSED, config_groups={"0": {"weights": {"num_bits": 2}}}), COMPRESSED_PARTS, "states 2 bits"),
        (_but(COMPRESSED, config_groups=[1]), COMPRESSED_PARTS, "cannot be read: Expected `object.*config_groups"),
        (_but(COMPRESSED, config_groups={"0": {"weights": {"num_bits": 4, "symmetric": False}}}), COMPRESSED_PARTS,
         "weight_zero_point is missing"),
        (COMPRESSED, _but(COMPRESSED_PARTS, weight_shape=None), "its weight_shape is missing"),
        (COMPRESSED, _but(COMPRESSED_PARTS, weight_g_idx=("I32", (95,))), "do not belong together"),
        ({"quant_method": "modelopt"}, {"weight_scale": ("F8_E4M3", (64, 6)), "input_scale": ("F32", ())},
         "quantized format .* quant_method modelopt"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_or_is_not_read_costs_one_sentence(
    settings: dict[str, Any], parts: dict[str, Any], complaint: str
) -> None:
    with pytest.raises((ConfigError, ReplicaError), match=complaint) as caught:
        described(settings, **parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (GPTQ, GPTQ_PARTS), (AWQ, AWQ_PARTS), (FP8, FP8_PARTS), (COMPRESSED, COMPRESSED_PARTS), ({}, NVFP4_PARTS),
        ({}, MODELOPT_PARTS), ({}, INT8_PARTS), ({}, NF4_PARTS),
    ],
    ids=["gptq", "awq", "fp8", "compressed", "nvfp4", "modelopt", "int8", "nf4"],
)  # fmt: skip
def test_each_format_is_read_before_anything_is_missing(settings: dict[str, Any], parts: dict[str, Any]) -> None:
    """Else the cases above could fail for another reason."""
    assert described(settings, **parts).shape == (64, 96)


@pytest.mark.parametrize(("scale_dtype", "block"), [("U8", 32), ("F8_E4M3", 16)])
def test_fp4_in_cpp_has_numpys_values_for_every_code_and_scale(
    scale_dtype: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN is one in both; its sign says nothing."""
    stored = {
        "codes": np.random.default_rng(0).integers(0, 256, (512, 3 * block // 2), np.uint8),
        "scale": np.arange(512 * 3).astype(np.uint8).reshape(512, 3),
        "factor": np.array([1.7], np.float32),
    }
    roles = ("codes", "scale") if scale_dtype == "U8" else stored
    packed = Packed(
        decoders.scaled,
        (512, 3 * block),
        "BF16",
        {role: role for role in roles},
        "fp4",
        scale_dtype,
        block=(1, block),
    )
    got = packed.values(stored.__getitem__, None)
    wanted = decoders._as_stored(replace(packed, dtype="F32").values(stored.__getitem__, None), "BF16")
    is_nan = (wanted & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal((got & 0x7FFF) > 0x7F80, is_nan)
    np.testing.assert_array_equal(got[~is_nan], wanted[~is_nan])
    assert 0 < is_nan.sum() < is_nan.size / 100


def test_modelopts_own_file_states_what_config_json_does_not(models: Path, tmp_path: Path) -> None:
    """Each layer its algorithm; where the file states another one, the checkpoint is refused."""
    directory = quantized.make("mixtral-fp8-modelopt", models)
    copy = shutil.copytree(directory, tmp_path / "mixtral")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    layers = {f"model.layers.{layer}.block_sparse_moe.experts": {"quant_algo": "FP8"} for layer in range(4)}
    stated = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    beside = copy / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": stated}))
    ours, wanted = CheckpointExperts(copy), CheckpointExperts(directory)
    for layer in range(4):
        np.testing.assert_array_equal(ours.expert(layer, 1).w2, wanted.expert(layer, 1).w2)
    layers["model.layers.3.block_sparse_moe.experts"] = {"quant_algo": "MXFP8"}
    beside.write_text(json.dumps({"quantization": stated}))
    with pytest.raises(ConfigError, match=r"layers.3.* states blocks of \[1, 32\], and its tensors say otherwise"):
        CheckpointExperts(copy)


@pytest.mark.parametrize("form", ["compressed", "modelopt_fp8", "NVFP4"])
def test_tensors_of_all_experts_that_do_not_name_experts_are_read_quantized(
    form: str, models: Path, tmp_path: Path
) -> None:
    """Granite's input_linear and output_linear, in a layout whose parts are those of one matrix stacked."""
    directory = make_family_models.make("granite_moe", models)
    tensors, stored, wanted = load_file(directory / "model.safetensors"), {}, {}
    write = getattr(quantized, form, None) or getattr(writers, form)
    for name, value in tensors.items():
        if "block_sparse_moe" not in name or value.ndim != 3:
            stored[name] = value
            continue
        each = [write(name, matrix) for matrix in value]
        wanted[name] = torch.stack([values for _, values in each])
        stored |= {part: torch.stack([one[part] for one, _ in each]).contiguous() for part in each[0][0]}
        if (shape := f"{name}_shape") in stored:
            stored[shape] = torch.tensor(value.shape)
    shutil.copytree(directory, tmp_path / "granite")
    settings = {"compressed": quantized._CT, "NVFP4": {}, "modelopt_fp8": {"quant_method": "modelopt"}}[form]
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "granite" / "config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "granite" / "model.safetensors")
    experts = CheckpointExperts(tmp_path / "granite")
    for layer in range(experts.shape.num_layers):
        down = wanted[f"model.layers.{layer}.block_sparse_moe.output_linear.weight"]
        read = experts.expert(layer, 2)
        np.testing.assert_array_equal(
            to_float32(read.w2, read.dtype), down[2].to(getattr(torch, read.dtype)).float().numpy()
        )
