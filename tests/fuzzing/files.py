"""Every kind of file that others may have written: a real one, ways to damage it, and the code that reads it.

A case ends well when the reader accepts it or raises an NdpError. Settings and hardware values are here too: they are
JSON that a user hands over, though no file of ours.
"""

import base64
import io
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from small_checkpoint import write_small_checkpoint

from fuzzing.mutate import NUMBERS, mutated_bytes, mutated_json
from fuzzing.packed import make_gguf, make_packed
from ndp_device.calibration.build import build_data_free
from ndp_device.checkpoint.files import INDEX, model_digest, read_config
from ndp_device.checkpoint.spellings import text_config
from ndp_device.model_config import whole_model
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import MANIFEST, ReplicaFiles, load_losses
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import field_types, load_hardware
from vllm_ndp.config import NdpSettings
from vllm_ndp.planning.policies import read_prior
from vllm_ndp.traces.importers import ImportSettings, import_trace
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace
from vllm_ndp.traces.trace import Trace

Make = Callable[[Path], None]
"""Write the real file or directory at this path."""
Damage = Callable[[random.Random, Path], None]
Read = Callable[[Path], object]
SETTINGS = ImportSettings(sequence_len=4, prompt_len=2)
CHECKPOINT_CONFIG = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 100,
    "hidden_act": "silu",
    "model_type": "mixtral",
}


@dataclass(frozen=True)
class Kind:
    """One kind of file: how a real one is made, damaged and read."""

    name: str
    make: Make
    damage: Damage
    read: Read


def kinds() -> list[Kind]:
    return [
        Kind("config", _make_checkpoint, _in_json("config.json"), _read_checkpoint),
        Kind("index", _make_indexed, _in_json(INDEX), _read_checkpoint),
        Kind("checkpoint-header", _make_checkpoint, _in_header("model.safetensors"), _read_checkpoint),
        Kind("checkpoint-bytes", _make_checkpoint, _in_bytes("model.safetensors"), _read_checkpoint),
        Kind("packed-config", _make_packed, _in_json("config.json"), _read_checkpoint),
        Kind("packed-header", _make_packed, _in_header("model.safetensors"), _read_every_expert),
        Kind("packed-bytes", _make_packed, _in_bytes("model.safetensors"), _read_every_expert),
        Kind("gguf-head", _make_gguf, _in_first_bytes("model.gguf", 700), _read_checkpoint),
        Kind("gguf-bytes", _make_gguf, _in_bytes("model.gguf"), _read_checkpoint),
        Kind("manifest", _make_replicas, _in_json(MANIFEST), _read_replicas),
        Kind("replica-header", _make_replicas, _in_header("experts-00001.safetensors"), _read_replicas_unchecked),
        Kind("replica-bytes", _make_replicas, _in_bytes("experts-00001.safetensors"), _read_replicas_unchecked),
        Kind("replica-digest", _make_replicas, _in_bytes("experts-00001.safetensors"), _read_replicas),
        Kind("trace-manifest", _make_trace, _in_json("manifest.json"), _read_trace),
        Kind("trace-rows", _make_trace, _in_table, _read_trace),
        Kind("trace-bytes", _make_trace, _in_bytes("routing-00000.parquet"), _read_trace),
        Kind("prior", _make_prior, _changed("", _damaged_array), read_prior),
        Kind("import-npz", _make_npz, _in_archive, _import("npz")),
        Kind("import-npz-bytes", _make_npz, _in_bytes(""), _import("npz")),
        Kind("import-vllm", _make_vllm, _changed("", _other_line), _import("vllm")),
        Kind("import-routelog", _make_routelog, _changed("", _other_line), _import("routelog")),
        Kind("import-moe-trace", _make_moe_trace, _in_bytes(""), _import("moe-trace")),
        Kind("import-selection", _make_selection, _in_json(""), _import("expert-selection")),
        Kind("import-dynande", _make_dynande, _in_bytes(""), _import("dynande")),
        Kind("settings", _make_settings, _in_json(""), _read_settings),
        Kind("hardware", _make_hardware, _in_hardware, _read_hardware),
    ]


def _read_checkpoint(path: Path) -> object:
    checkpoint, shape = CheckpointExperts(path), CheckpointExperts(path).shape
    experts = [checkpoint.expert(layer, shape.num_experts - 1) for layer in range(shape.num_layers)]
    norms = [checkpoint.norm_weight(layer) for layer in range(shape.num_layers)]
    sums = [float(np.asarray(part, np.uint32).sum()) for expert in experts for part in (expert.w1.view("u1"),)]
    whole = whole_model(shape, text_config(read_config(path)), checkpoint.layout.moe_index)
    return model_digest(path), whole, norms, sums


def _read_every_expert(path: Path) -> object:
    checkpoint = CheckpointExperts(path)
    shape = checkpoint.shape
    return [checkpoint.expert(layer, one) for layer in range(shape.num_layers) for one in range(shape.num_experts)]


def _read_replicas(path: Path) -> object:
    return _every_expert(ReplicaFiles(path))


def _read_replicas_unchecked(path: Path) -> object:
    return _every_expert(ReplicaFiles(path, check_contents=False)), load_losses(path, "relative")


def _every_expert(files: ReplicaFiles) -> object:
    shape = files.manifest.model
    return files.loss_digest, [
        files.expert(layer, expert, bits).nbytes
        for layer in range(shape.num_layers)
        for expert in range(shape.num_experts)
        for bits in files.manifest.bits
    ]


def _read_trace(path: Path) -> object:
    trace = Trace.load(path)
    return [trace.stats(sequence) for sequence in trace.sequences if len(sequence.prompt_ids)]


def _import(kind: str) -> Read:
    return lambda path: import_trace(path, kind, SETTINGS)


def _read_settings(path: Path) -> object:
    try:
        given = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None  # vLLM reads the text of settings
    settings = NdpSettings.from_mapping(given)
    load_hardware(settings.preset, **settings.hardware_overrides)
    return settings.resolve_offload_bits(8)


def _read_hardware(path: Path) -> object:
    overrides = json.loads(path.read_text())
    hardware = load_hardware(overrides.pop("preset"), **overrides)
    return hardware.config_hash, DeviceModel(hardware)


def _make_checkpoint(path: Path) -> None:
    write_small_checkpoint(path, **CHECKPOINT_CONFIG)


def _make_packed(path: Path) -> None:
    make_packed(path, CHECKPOINT_CONFIG)


def _make_gguf(path: Path) -> None:
    make_gguf(path, CHECKPOINT_CONFIG)


def _make_indexed(path: Path) -> None:
    _make_checkpoint(path)
    raw = (path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    names = json.loads(raw[8 : 8 + length])
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}))


def _make_replicas(path: Path) -> None:
    model = write_small_checkpoint(path.with_name(f"{path.name}-model"))
    build_data_free(model, path, group_size=8, show_progress=False)
    shutil.rmtree(model)


def _small_trace() -> Trace:
    settings = SyntheticSettings(
        num_layers=2, num_experts=4, top_k=2, num_requests=3, prompt_len=4, decode_len=3, concentration=5.0, seed=1
    )
    return synthetic_trace(settings, "small")


def _make_trace(path: Path) -> None:
    _small_trace().save(path)


def _make_prior(path: Path) -> None:
    np.save(path.open("wb"), np.arange(1, 9, dtype=np.float64).reshape(2, 4))


def _ids(tokens: int) -> Any:
    """[tokens, 2, 2], a token's experts distinct in each layer."""
    first = np.random.default_rng(0).integers(0, 8, (tokens, 2, 1))
    return np.concatenate([first, (first + 3) % 8], axis=2)


def _make_npz(path: Path) -> None:
    ids = np.stack([_ids(6), _ids(6)])
    weights = np.full(ids.shape, 0.5, np.float32)
    np.savez_compressed(path.open("wb"), experts=ids, weights=weights, prompt_len=np.array([2, 3]), domain=[0, 1])


def _make_vllm(path: Path) -> None:
    stored = io.BytesIO()
    np.save(stored, _ids(5))
    usage = {"prompt_tokens": 3, "completion_tokens": 3}
    lines = [
        {"id": "a", "usage": usage, "choices": [{"routed_experts": _ids(5).tolist()}]},
        {
            "id": "b",
            "choices": [
                {
                    "prompt_token_ids": [1, 2, 3],
                    "routed_experts": base64.b64encode(stored.getvalue()).decode(),
                }
            ],
        },
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _cells() -> list[tuple[int, int, list[int]]]:
    """(token, layer, ids), the ids of a cell two of eight."""
    return [(token, layer, [token, (token + layer + 1) % 8]) for token in range(8) for layer in range(2)]


def _make_routelog(path: Path) -> None:
    names = ("type", "req_id", "token_idx", "layer", "topk_ids")
    rows = [dict(zip(names, ("route", "a", *cell), strict=True)) for cell in _cells()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_moe_trace(path: Path) -> None:
    cells = [("prefill", 8, layer, token, *ids) for layer in range(2) for token, of, ids in _cells() if of == layer]
    cells += [("decode", 1, layer, 0, 1, 2) for layer in range(2)]
    path.write_text("# phase,n_tokens,layer,token_idx,e0,e1\n" + "".join(",".join(map(str, c)) + "\n" for c in cells))


def _make_selection(path: Path) -> None:
    ids = _ids(8)
    parts = (slice(0, 4), slice(4, 5), slice(5, 6))
    path.write_text(json.dumps([{str(layer): ids[part, layer].tolist() for layer in range(2)} for part in parts]))


def _make_dynande(path: Path) -> None:
    rows = [
        f"{layer},{token}," + ",".join("0.5" if expert in ids else "0" for expert in range(8)) + "\n"
        for token, layer, ids in _cells()
    ]
    path.write_text("layer_id,token_id," + ",".join(f"expert_{e}" for e in range(8)) + "\n" + "".join(rows))


def _make_settings(path: Path) -> None:
    options = {"alpha": 0.5, "bit_rule": "importance", "seed": 1, "prior_tokens": 4.0}
    path.write_text(
        json.dumps(
            {
                "hot_experts": 4,
                "avg_bits": 3,
                "policy": {"name": "random", **options},
                "devices": "ipc:///nowhere",
                "hardware_overrides": {"dram.channels": 20, "array.units": 8},
                "deadline_ms": 500.0,
                "debug": {"device_hosts": 3},
                "replicas": "somewhere",
            }
        )
    )


def _make_hardware(path: Path) -> None:
    path.write_text(json.dumps({"preset": "h100-ndp512", "dram.channels": 20, "dram.cl": 46}))


def _changed(name: str, change: Callable[[random.Random, bytes], bytes]) -> Damage:
    """Of the file itself, or of one in a directory."""

    def damage(rng: random.Random, path: Path) -> None:
        file = path / name if name else path
        file.write_bytes(change(rng, file.read_bytes()))

    return damage


def _in_json(name: str) -> Damage:
    return _changed(name, lambda rng, raw: mutated_json(rng, json.loads(raw)))


def _in_bytes(name: str) -> Damage:
    return _changed(name, mutated_bytes)


def _in_first_bytes(name: str, count: int) -> Damage:
    """Of a binary header, which is a small part of its file."""
    return _changed(name, lambda rng, raw: mutated_bytes(rng, raw[:count]) + raw[count:])


def _in_header(name: str) -> Damage:
    """Of a safetensors file: its JSON, with a length that fits again."""

    def change(rng: random.Random, raw: bytes) -> bytes:
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        kept = dict(rng.sample(sorted(header.items()), 3)) if rng.random() < 0.5 else header
        changed = json.loads(text) if _is_json(text := mutated_json(rng, kept)) else None
        text = json.dumps(header | changed).encode() if isinstance(changed, dict) and rng.random() < 0.8 else text
        return struct.pack("<Q", len(text)) + text + raw[8 + length :]

    return _changed(name, change)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _other_line(rng: random.Random, raw: bytes) -> bytes:
    lines = raw.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = mutated_json(rng, json.loads(lines[at]))
    return b"\n".join(lines) + b"\n"


def _damaged_array(rng: random.Random, raw: bytes) -> bytes:
    """Another header over the same values, or other bytes."""
    if rng.random() < 0.4 or raw[:6] != b"\x93NUMPY":
        return mutated_bytes(rng, raw)
    (length,) = struct.unpack("<H", raw[8:10])
    shape = tuple(rng.choice((0, 1, 2, 8, 2**31, 10**12, 2**62, -1)) for _ in range(rng.randrange(5)))
    descr = rng.choice(("<f8", "<f4", "<i8", "|u1", "|O", "<U4", "<c16", "|S8", "<f8,<f8", "<M8[s]", "|V8", "|b1"))
    header = repr({"descr": descr, "fortran_order": rng.random() < 0.3, "shape": shape}).encode()
    header += b" " * rng.randrange(64) + b"\n"
    return raw[:8] + struct.pack("<H", len(header)) + header + raw[10 + length :]


def _in_archive(rng: random.Random, path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    kind = rng.randrange(4)
    if kind == 0:
        del members[name]
    elif kind == 1:
        array = np.load(io.BytesIO(members[name]))
        other = io.BytesIO()
        np.save(other, _other_values(rng, array))
        members[name] = other.getvalue()
    else:
        members[name] = _damaged_array(rng, members[name])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, contents in members.items():
            archive.writestr(name, contents)


def _other_values(rng: random.Random, array: Any) -> Any:
    kind = rng.randrange(5)
    if kind == 0:
        return array.astype(
            rng.choice(("f8", "i1", "u8", "U4", "?", "c16") if array.dtype.kind in "iuf" else ("U4", "S2"))
        )
    if kind == 1:
        return array.reshape(-1)[: rng.randrange(1 + array.size)]
    if kind == 2:
        return array[..., None]
    if kind == 3 and array.dtype.kind in "iuf":
        array = array.copy()
        array.reshape(-1)[rng.randrange(array.size)] = rng.choice((-1, 127, 0))
        return array
    return np.full(array.shape, np.nan)


def _in_table(rng: random.Random, path: Path) -> None:
    """Rows of a trace with other values, or columns of other names and types; its checksums fit."""
    file = path / f"{rng.choice(('routing', 'requests'))}-00000.parquet"
    file.write_bytes(_other_table(rng, pq.read_table(file)))


def _other_table(rng: random.Random, table: pa.Table) -> bytes:
    index = rng.randrange(table.num_columns)
    field, values = table.schema.field(index), table.column(index).to_pylist()
    kind = rng.randrange(6)
    if kind == 0:
        table = table.remove_column(index)
    elif kind == 1:
        table = table.rename_columns([f"x{name}" if name == field.name else name for name in table.column_names])
    elif kind == 2:
        table = table.slice(0, rng.randrange(table.num_rows))
    elif kind == 3:
        values[rng.randrange(len(values))] = None
        table = table.set_column(index, pa.field(field.name, field.type), pa.array(values, field.type))
    elif kind == 4:
        table = table.set_column(index, field.name, pa.array([str(value) for value in values]))
    else:
        at = rng.randrange(len(values))
        value = rng.choice((0, 1, 127, 200, 2**31 - 1, -1, float("nan"), float("inf")))
        is_list = isinstance(values[at], list)
        values[at] = [value, *values[at][1:]] if is_list else value if not isinstance(values[at], str) else "x"
        try:
            table = table.set_column(index, field, pa.array(values, field.type))
        except (pa.ArrowException, OverflowError):
            table = table.slice(1)
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd", write_page_checksum=True)
    return out.getvalue()


_WHOLE = sorted(key for key, kind in field_types().items() if kind is int)


def _in_hardware(rng: random.Random, path: Path) -> None:
    overrides: dict[str, Any] = {"preset": rng.choice(("h100-ndp512", "h100-ndp512-lpddr5"))}
    for key in rng.sample(_WHOLE, rng.choice((1, 1, 2, 4))):
        overrides[key] = rng.choice((*NUMBERS[:18], 3, 16, 64, 100, 1000, 2048, 4096, "x", None, [1], True))
    if rng.random() < 0.3:
        overrides["dram.refresh"] = rng.choice(("off", "all-bank", "", None, ["off"], 1))
    path.write_text(json.dumps(overrides))
