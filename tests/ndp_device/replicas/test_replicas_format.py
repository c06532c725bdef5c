"""Replica directories: what was written is read, and what cannot be trusted is refused by name."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from paths import ROOT
from reference_kernel import REFERENCE, unpack
from small_checkpoint import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, write_safetensors, write_small_checkpoint

from ndp_device.calibration.build import build_data_free
from ndp_device.calibration.data_free import expert_losses
from ndp_device.checkpoint.files import model_digest
from ndp_device.common import kept
from ndp_device.common.activation import GPT_OSS, SILU, Activation
from ndp_device.common.errors import ConfigError, NdpError, ReplicaError, why_unwritable
from ndp_device.common.kept import default_cache_dir
from ndp_device.common.widths import default_group_size
from ndp_device.replicas import format
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import (
    LayerReplicas,
    ReplicaFiles,
    layer_file_name,
    load_losses,
    read_manifest,
    safetensors_parts,
    write_layer,
    write_manifest,
)
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.traces import format as traces


@pytest.fixture
def replicas(built: Path, tmp_path: Path) -> Path:
    """A copy a test may damage."""
    return shutil.copytree(built, tmp_path / "replicas")


def test_every_width_is_a_prefix_of_the_widest(built: Path) -> None:
    files = ReplicaFiles(built)
    widest = files.expert(1, 2, 4)
    for bits in (1, 2, 3):
        for name in ("w13", "w2"):
            narrow, wide = getattr(files.expert(1, 2, bits), name), getattr(widest, name)
            np.testing.assert_array_equal(unpack(narrow.planes), unpack(wide.planes) >> (4 - bits))
            assert np.shares_memory(narrow.planes, wide.planes)
            assert narrow.planes.ctypes.data == wide.planes.ctypes.data
            assert narrow.planes.flags.c_contiguous


def test_a_wider_replica_is_never_further_from_the_weights(built: Path) -> None:
    loss, relative = (load_losses(built, kind)[0] for kind in ("absolute", "relative"))
    assert loss.shape == relative.shape == (LAYERS, EXPERTS, 4)
    assert (loss != relative).all()
    assert (loss > 0).all()
    assert (np.diff(loss, axis=-1) < 0).all()
    assert relative[..., 3].max() < 0.05 < relative[..., 0].min() < 1


def test_the_stored_loss_is_what_the_stored_replicas_lose(model_dir: Path, built: Path) -> None:
    files, checkpoint = ReplicaFiles(built), CheckpointExperts(model_dir)
    norm_weight = checkpoint.norm_weight(1)
    inputs = np.random.default_rng([1, 2]).standard_normal((64, HIDDEN), dtype=np.float32) * norm_weight
    by_bits = {bits: files.expert(1, 2, bits) for bits in (1, 2, 3, 4)}
    loss, relative = expert_losses(inputs, checkpoint.expert(1, 2), by_bits)
    np.testing.assert_array_equal(loss, files.layer_losses(1)[0][2])
    np.testing.assert_array_equal(relative, files.layer_losses(1)[1][2])


def test_the_digest_of_replicas_is_that_of_their_bytes_and_of_nothing_else(
    model_dir: Path, built: Path, replicas: Path, tmp_path: Path
) -> None:
    """Where they lie, and what the manifest tells of their making, is not part of it; one other byte is."""
    digest, loss_digest = ReplicaFiles(built).manifest.digest, ReplicaFiles(built).loss_digest
    manifest = read_manifest(replicas)
    write_manifest(replicas, msgspec.structs.replace(manifest, solver={"name": "x"}, calibration={"file": "y"}))
    assert (ReplicaFiles(replicas).manifest.digest, ReplicaFiles(replicas).loss_digest) == (digest, loss_digest)
    other = manifest.layers | {1: msgspec.structs.replace(manifest.layers[1], blake2b="0" * 32)}
    assert msgspec.structs.replace(manifest, layers=other).digest != digest
    build_data_free(model_dir, tmp_path / "wide", group_size=16, show_progress=False)
    assert ReplicaFiles(tmp_path / "wide").manifest.digest != digest
    assert ReplicaFiles(tmp_path / "wide").loss_digest != loss_digest


def test_an_interrupted_build_goes_on_with_the_layers_that_are_missing(
    model_dir: Path, built: Path, replicas: Path
) -> None:
    manifest = json.loads((replicas / "manifest.json").read_text())
    del manifest["layers"]["1"]
    (replicas / "manifest.json").write_bytes(kept.seal(manifest))
    written = (replicas / "experts-00000.safetensors").stat().st_mtime_ns
    with pytest.raises(ReplicaError, match=r"unfinished: experts-00001\.safetensors"):
        ReplicaFiles(replicas)
    build_data_free(model_dir, replicas, group_size=8, show_progress=False)
    assert (replicas / "experts-00000.safetensors").stat().st_mtime_ns == written
    assert (replicas / "manifest.json").read_bytes() == (built / "manifest.json").read_bytes()
    ReplicaFiles(replicas)


def test_a_build_repairs_a_damaged_layer(model_dir: Path, built: Path, replicas: Path) -> None:
    _flip_last_byte(replicas / "experts-00001.safetensors")
    left_behind = replicas / ".experts-00001.safetensors.999999999.unfinished"  # no process has that number
    left_behind.touch()
    build_data_free(model_dir, replicas, group_size=8, show_progress=False)
    name = "experts-00001.safetensors"
    assert (replicas / name).read_bytes() == (built / name).read_bytes()
    assert not left_behind.exists()


def test_a_build_with_other_settings_leaves_what_is_there_alone(model_dir: Path, built: Path) -> None:
    before = {file.name: file.read_bytes() for file in built.iterdir()}
    with pytest.raises(ConfigError, match="other settings"):
        build_data_free(model_dir, built, group_size=16, show_progress=False)
    assert {file.name: file.read_bytes() for file in built.iterdir()} == before


def test_a_build_of_some_widths_offers_those_only(model_dir: Path, tmp_path: Path) -> None:
    build_data_free(model_dir, tmp_path / "out", bits=(3, 2), group_size=8, show_progress=False)
    store = ExpertStore(None, tmp_path / "out", kernel=REFERENCE)
    assert store.widths == {2, 3}
    loss, _, _ = load_losses(tmp_path / "out", "absolute")
    assert np.isnan(loss[..., [0, 3]]).all()
    assert np.isfinite(loss[..., [1, 2]]).all()
    with pytest.raises(ReplicaError, match="cannot be had at 4 bits"):
        store.get(0, 0, 4)


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, -1])
def test_a_truncated_file_is_refused_by_name(replicas: Path, kept_bytes: int) -> None:
    path = replicas / "experts-00001.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ReplicaError, match=rf"^{path} is truncated .*; run vllm-ndp quantize again$"):
        ReplicaFiles(replicas)


def test_a_file_that_was_found_whole_is_hashed_again_once_somebody_wrote_it(
    replicas: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path / "cache"))
    hashed: list[str] = []
    digest = format._digest
    monkeypatch.setattr(format, "_digest", lambda path: hashed.append(path.name) or digest(path))
    names = [layer_file_name(layer) for layer in range(read_manifest(replicas).model.num_layers)]
    ReplicaFiles(replicas, once=True)
    assert hashed == names
    ReplicaFiles(replicas, once=True)
    assert hashed == names
    ReplicaFiles(replicas)
    assert hashed == 2 * names, "who asks for the contents gets them"
    contents, before = bytearray((replicas / names[1]).read_bytes()), (replicas / names[1]).stat()
    (replicas / names[1]).write_bytes(contents)
    os.utime(replicas / names[1], ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync --times does
    ReplicaFiles(replicas, once=True)
    assert hashed == [*2 * names, names[1]]
    contents[-1] ^= 1
    (replicas / names[1]).write_bytes(contents)
    for _ in range(2):
        with pytest.raises(ReplicaError, match="is damaged"):
            ReplicaFiles(replicas, once=True)


def test_a_missing_file_and_a_linked_file_are_refused_by_name(replicas: Path) -> None:
    path = replicas / "experts-00000.safetensors"
    path.rename(replicas / "elsewhere")
    with pytest.raises(ReplicaError, match=r"experts-00000\.safetensors must be a plain file"):
        ReplicaFiles(replicas)
    path.symlink_to(replicas / "elsewhere")
    with pytest.raises(ReplicaError, match=r"experts-00000\.safetensors must be a plain file"):
        ReplicaFiles(replicas)


def test_replicas_of_another_model_are_refused(replicas: Path, tmp_path: Path) -> None:
    other = write_small_checkpoint(tmp_path / "other", seed=1)
    assert model_digest(other) != read_manifest(replicas).model_digest
    with pytest.raises(ReplicaError, match="not of the model being served"):
        ExpertStore(other, replicas, kernel=REFERENCE)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        ({"format": "gguf"}, "format 'gguf'"),
        ({"version": 2}, "version 2, wanted 'ndp-moe-replicas' version 1"),
        ({"bits": [2, 1]}, "rising selection"),
        ({"bits": [5]}, "rising selection"),
        ({"group_size": 12}, "multiple of 8"),
        ({"container": "zip"}, "container"),
        ({"model": {"name": "small"}}, "missing required field"),
        ({"activation": [{"limit": 7.0}]}, "of .* layers, got 1"),
        ({"activation": [{"limit": -7.0}] * LAYERS}, "a limit above 0"),
        ({"activation": [{"slope": 1.0}] * LAYERS}, "slope"),
        (None, "not a replica manifest"),
    ],
)
def test_a_manifest_we_cannot_follow_is_refused(replicas: Path, edit: dict[str, object] | None, complaint: str) -> None:
    path = replicas / "manifest.json"
    path.write_bytes(b"{" if edit is None else kept.seal(json.loads(path.read_text()) | edit))
    with pytest.raises(ReplicaError, match=complaint):
        ReplicaFiles(replicas)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        ({"bits": [1, 2, 3]}, r"scale and offset must be of the 3 widths \[1, 2, 3\], got \[4, "),
        (
            {"hidden_size": 2 * HIDDEN},
            rf"w2 must be \[{2 * HIDDEN}, {INTERMEDIATE}\] as the manifest's model says, got",
        ),
    ],
)
def test_experts_that_are_not_what_the_manifest_says_are_refused(
    replicas: Path, edit: dict[str, Any], complaint: str
) -> None:
    path = replicas / "manifest.json"
    told = json.loads(path.read_text())
    (told if "bits" in edit else told["model"]).update(edit)
    path.write_bytes(kept.seal(told))
    with pytest.raises(ReplicaError, match=rf"experts-00000\.safetensors is damaged: .*{complaint}"):
        ReplicaFiles(replicas).expert(0, 0, 2)


def test_an_empty_directory_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ReplicaError, match="run vllm-ndp quantize"):
        ReplicaFiles(tmp_path)


def test_widths_that_are_no_prefixes_of_each_other_cannot_be_written_as_nested(built: Path, tmp_path: Path) -> None:
    files = ReplicaFiles(built)
    mixed = {bits: files.expert(0, 0 if bits == 4 else 1, bits) for bits in (1, 2, 3, 4)}
    table = np.ones((1, 4))
    layer = LayerReplicas((mixed,), table, table, np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match="cannot be nested"):
        write_layer(tmp_path, 0, layer, files.manifest)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_costs_one_sentence(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose a directory you may write to") as caught:
        build_data_free(model_dir, tmp_path / "file" / "out", show_progress=False)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_no_matter_of_rights() -> None:
    with pytest.raises(OSError, match="No space") as caught:
        Path("/dev/full").write_bytes(b"one")
    assert why_unwritable(caught.value) == "No space left on device; make room there, or choose another disk"


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path / "ndp"))
    assert default_cache_dir("abc") == tmp_path / "ndp" / "replicas" / "abc"
    monkeypatch.delenv("NDP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir("abc") == tmp_path / "xdg" / "vllm-ndp" / "replicas" / "abc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir("abc") == tmp_path / ".cache" / "vllm-ndp" / "replicas" / "abc"


def test_groups_are_64_wide_up_to_matrices_of_1023_columns_and_128_from_1024() -> None:
    assert default_group_size(1023, 4096) == 64
    assert default_group_size(1024, 4096) == 128


def test_the_store_serves_both_sources_and_counts_bytes(model_dir: Path, built: Path) -> None:
    """At k bits one weight costs k bits of planes and 4 bytes of scale and offset per group of 8."""
    store = ExpertStore(model_dir, built, kernel=REFERENCE)
    weights = 3 * HIDDEN * INTERMEDIATE
    assert store.widths == {1, 2, 3, 4, 16}
    for bits in (1, 2, 3, 4):
        assert store.expert_bytes(1, 2, bits) == weights * bits // 8 + weights // 8 * 4
    assert store.expert_bytes(1, 2, 16) == weights * 4
    assert (store.shape.num_layers, store.replica_source) == (LAYERS, "data-free")
    assert store.model_digest == model_digest(model_dir)
    assert store.resident_bytes == sum(file.stat().st_size for file in built.glob("*.safetensors"))
    assert store.get(1, 2, 3) is store.get(1, 2, 3)
    for layer, expert in ((LAYERS, 0), (0, EXPERTS), (-1, 0)):
        with pytest.raises(ReplicaError, match=f"expert {expert} of layer {layer} cannot be had"):
            store.get(layer, expert, 2)


def test_each_source_can_be_served_alone(model_dir: Path, built: Path) -> None:
    kernel = REFERENCE
    full_only, replicas_only = ExpertStore(model_dir, None, kernel=kernel), ExpertStore(None, built, kernel=kernel)
    assert (full_only.widths, full_only.replica_source, full_only.resident_bytes) == ({16}, "none", 0)
    assert replicas_only.widths == {1, 2, 3, 4}
    assert replicas_only.shape == full_only.shape
    assert replicas_only.model_digest == full_only.model_digest
    with pytest.raises(ConfigError, match="needs experts"):
        ExpertStore(None, None, kernel=kernel)


def test_a_checkpoint_with_an_expert_missing_is_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    more = write_small_checkpoint(tmp_path / "more", num_local_experts=EXPERTS + 1)
    with pytest.raises(NdpError, match=rf"experts\.{EXPERTS}\.w1"):
        CheckpointExperts(more)
    wide = write_small_checkpoint(tmp_path / "wide", hidden_size=HIDDEN * 2)
    with pytest.raises(NdpError, match=f"hidden_size {HIDDEN * 2}, the tensors say {HIDDEN}"):
        CheckpointExperts(wide)
    cut = shutil.copytree(model_dir, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-HIDDEN])
    with pytest.raises(ReplicaError, match="truncated"):
        CheckpointExperts(tmp_path / "cut").expert(LAYERS - 1, EXPERTS - 1)


def _flip_last_byte(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)


# -- experts with biases and another activation ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def clamped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint as gpt-oss lays it out (transposed, interleaved, biases, clamped), and its data-free replicas."""
    model_dir = tmp_path_factory.mktemp("checkpoints") / "clamped"
    write_small_checkpoint(model_dir, model_type="gpt_oss", architectures=["GptOssForCausalLM"])
    rng = np.random.default_rng(3)
    tensors = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.post_attention_layernorm.weight"] = rng.uniform(0.5, 1.5, HIDDEN)
        for name, shape in (
            ("gate_up_proj", (EXPERTS, HIDDEN, 2 * INTERMEDIATE)),
            ("gate_up_proj_bias", (EXPERTS, 2 * INTERMEDIATE)),
            ("down_proj", (EXPERTS, INTERMEDIATE, HIDDEN)),
            ("down_proj_bias", (EXPERTS, HIDDEN)),
        ):
            tensors[f"{prefix}.mlp.experts.{name}"] = rng.normal(size=shape)
    write_safetensors(model_dir / "model.safetensors", tensors, "float32")
    out = tmp_path_factory.mktemp("replicas") / "clamped"
    build_data_free(model_dir, out, group_size=8, show_progress=False)
    return model_dir, out


def test_biases_and_activation_travel_with_the_replicas(clamped: tuple[Path, Path]) -> None:
    model_dir, out = clamped
    manifest, files, checkpoint = read_manifest(out), ReplicaFiles(out), CheckpointExperts(model_dir)
    assert (manifest.activation, manifest.biases) == ((GPT_OSS,) * LAYERS, True)
    kernel, full = REFERENCE, checkpoint.expert(1, 2)
    x = np.random.default_rng(0).standard_normal((1, HIDDEN)).astype(np.float32)
    pair = np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)
    wanted = kernel.execute(x, [kernel.prepare(full)], *pair)
    errors = []
    for bits in manifest.bits:
        replica = files.expert(1, 2, bits)
        assert replica.biases is not None
        assert full.biases is not None
        for part in ("gate", "up", "down"):
            np.testing.assert_array_equal(getattr(replica.biases, part), getattr(full.biases, part))
        errors.append(np.linalg.norm(kernel.execute(x, [kernel.prepare(replica)], *pair) - wanted))
    assert errors[3] < errors[2] < errors[0]
    loss, _, _ = load_losses(out, "absolute")
    assert (np.diff(loss, axis=-1) < 0).all()


def test_a_layer_has_changed_where_a_file_of_its_biases_has(clamped: tuple[Path, Path], tmp_path: Path) -> None:
    model = shutil.copytree(clamped[0], tmp_path / "model")
    tensors = safetensors.numpy.load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    index = {name: f"model-0000{1 + ('_bias' in name)}-of-00002.safetensors" for name in tensors}
    for file in set(index.values()):
        of_file = {name: values for name, values in tensors.items() if index[name] == file}
        safetensors.numpy.save_file(of_file, model / file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    checkpoint = CheckpointExperts(model)
    checkpoint.check(0)
    os.truncate(model / "model-00002-of-00002.safetensors", 8)
    with pytest.raises(ReplicaError, match="was cut short"):
        checkpoint.check(0)


def test_replicas_of_layers_that_clamp_at_different_limits_say_so_per_layer(tmp_path: Path) -> None:
    limits = [0.0, *(0.5,) * (LAYERS - 1)]
    model_dir, out = write_small_checkpoint(tmp_path / "model", swiglu_limits=limits), tmp_path / "replicas"
    build_data_free(model_dir, out, group_size=8, show_progress=False)
    manifest, files = read_manifest(out), ReplicaFiles(out)
    wanted = (SILU, *(Activation(limit=0.5),) * (LAYERS - 1))
    assert manifest.activation == wanted
    assert tuple(files.expert(layer, 0, 2).activation for layer in range(LAYERS)) == wanted


# -- a digest of its own text ------------------------------------------------------------------------------------------


OURS = [
    (read_manifest, ROOT / "models" / "tiny-mixtral-replicas"),
    (traces.read_manifest, ROOT / "tests" / "data" / "tiny-mixtral-trace"),
]


@pytest.fixture(params=OURS, ids=["replicas", "trace"])
def manifest(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Callable[[Path], Any], Path]:
    """(its reader, a copy)."""
    read, directory = request.param
    shutil.copyfile(directory / "manifest.json", tmp_path / "manifest.json")
    return read, tmp_path / "manifest.json"


def test_no_flipped_bit_is_accepted(manifest: tuple[Callable[[Path], Any], Path]) -> None:
    """Sixty anywhere, and each bit of the digest's own field."""
    read, path = manifest
    whole, chance = path.read_bytes(), random.Random(0)
    read(path.parent)
    places = [chance.randrange(8 * len(whole)) for _ in range(60)]
    places += range(8 * whole.index(b'"manifest_digest"'), 8 * len(whole.rstrip()))
    accepted = []
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            read(path.parent)
        except NdpError:
            continue
        accepted.append(place)
    assert accepted == []


def test_one_without_a_digest_is_refused(manifest: tuple[Callable[[Path], Any], Path]) -> None:
    read, path = manifest
    fields = json.loads(path.read_text())
    del fields["manifest_digest"]
    path.write_text(json.dumps(fields))
    with pytest.raises(NdpError, match="has no 'manifest_digest'"):
        read(path.parent)


def test_a_layers_file_has_the_bytes_of_the_library() -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "0.w13.planes": rng.integers(0, 255, (4, 3, 5), np.uint8),
        "0.w13.scale": rng.random((2, 3, 1)).astype(np.float16),
        "0.w13.perm": np.arange(5, dtype=np.int32)[::-1],
        "0.b2": rng.random(3, np.float32),
        "loss": rng.random((2, 4)),
        "calibration_tokens": np.arange(2),
        "a": np.zeros((0, 3), np.float16),
    }
    contents = b"".join(safetensors_parts(tensors, {"format": "one"}))
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    assert contents == safetensors.numpy.save(contiguous, {"format": "one"})
