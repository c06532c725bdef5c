"""Files made to hurt whoever reads them: each is read in a process of its own, whose time and memory are taken.

Run by tests/test_hostile_files.py. Prints one JSON line per case: name, how it ended, seconds, MiB beyond the start.
"""

import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuzzing.files import Kind, kinds
from ndp_device.common.errors import NdpError
from ndp_device.timing.dram import transfer
from ndp_device.timing.spec import field_types, load_hardware

KINDS = {kind.name: kind for kind in kinds()}
DEEP = b"[" * 200_000
GIB = 1 << 30


def cases() -> Iterator[tuple[str, Kind, Callable[[Path], None]]]:
    """(name, what reads it, what turns a real file into it)."""
    for kind, file in (
        ("config", "config.json"), ("index", "model.safetensors.index.json"), ("manifest", "manifest.json"),
        ("trace-manifest", "manifest.json"),
    ):  # fmt: skip
        yield f"{kind} nested 200 000 deep", KINDS[kind], lambda path, file=file: _write(path / file, DEEP)
        yield (
            f"{kind} nested 500 deep",
            KINDS[kind],
            lambda path, file=file: _write(path / file, b'{"x":' * 500 + b"1" + b"}" * 500),
        )
        yield f"{kind} of 2 GiB", KINDS[kind], lambda path, file=file: os.truncate(path / file, 2 * GIB)
        yield (
            f"{kind} of empty lists",
            KINDS[kind],
            lambda path, file=file: _write(path / file, b'{"x": [' + b"[]," * 1_300_000 + b"1]}"),
        )
        yield f"{kind} with a flipped bit", KINDS[kind], lambda path, file=file: _flip(path / file)
        yield f"{kind} that is a pipe", KINDS[kind], lambda path, file=file: _pipe(path / file)
        yield f"{kind} that is empty", KINDS[kind], lambda path, file=file: _write(path / file, b"")
    for key in (
        "num_attention_heads",
        "num_hidden_layers",
        "num_local_experts",
        "num_experts_per_tok",
        "vocab_size",
        "hidden_size",
    ):
        for value in (10**9, 10**30, 1e308, [1], {}, "8", None, True, -1):
            yield f"config {key} {value!r}", KINDS["config"], _set("config.json", [key], value)
    for value in (10**9, 2**63, -1, [4], "4", 1e300):
        for key in ("num_layers", "num_experts", "hidden_size"):
            yield f"manifest {key} {value!r}", KINDS["manifest"], _set("manifest.json", ["model", key], value)
        for key in ("num_layers", "num_experts", "top_k"):
            yield (
                f"trace {key} {value!r}",
                KINDS["trace-manifest"],
                _set("manifest.json", ["provenance", key], value),
            )
    for key in ("model", "bits", "layers", "container"):
        yield f"manifest without {key}", KINDS["manifest"], _set("manifest.json", [key], ...)
    yield "manifest group_size 0", KINDS["manifest"], _set("manifest.json", ["group_size"], 0)
    shape = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    for kind, file, name in (
        ("checkpoint-header", "model.safetensors", shape),
        ("replica-header", "experts-00001.safetensors", "0.w13.scale"),
    ):
        for part, value in (
            ("shape", [2**62, 2**62]), ("shape", [10**30]), ("shape", [1e999]), ("shape", [-1, -384]), ("shape", 7),
            ("shape", ...), ("dtype", ...), ("dtype", []), ("data_offsets", ...), ("data_offsets", [0, 2**63]),
            ("data_offsets", [5, 0]), ("data_offsets", [0]), ("data_offsets", ["0", "4"]),
        ):  # fmt: skip
            yield f"{kind} {part} {value!r}", KINDS[kind], _header(file, [name, part], value)
        yield f"{kind} entry of a list", KINDS[kind], _header(file, [name], [])
        yield f"{kind} nested", KINDS[kind], _raw_header(file, DEEP)
        yield f"{kind} of 30 MiB of empty objects", KINDS[kind], _raw_header(file, b"[" + b"{}," * 10_000_000 + b"1]")
        yield f"{kind} that claims 2 GiB", KINDS[kind], _long_header(file)
    far = shape.replace(".0.w1", ".999999999.w1")
    entry = {"dtype": "F32", "shape": [24, 16], "data_offsets": [0, 1536]}
    yield "checkpoint of 10^9 experts", KINDS["checkpoint-header"], _header("model.safetensors", [far], entry)
    yield "prior of 8 TB", KINDS["prior"], lambda path: _array(path, (10**6, 10**6))
    yield "prior of 2^62 layers", KINDS["prior"], lambda path: _array(path, (2**62, 0))
    yield "prior of objects", KINDS["prior"], lambda path: _array(path, (2, 4), "|O")
    yield "prior that is a pipe", KINDS["prior"], _pipe
    yield "npz that unfolds into 1 GiB", KINDS["import-npz"], _npz_bomb
    yield "npz of 2^40 requests without tokens", KINDS["import-npz"], _npz_of_nothing
    yield "npz that is a pipe", KINDS["import-npz"], _pipe
    for kind in ("import-vllm", "import-routelog"):
        yield f"{kind} nested", KINDS[kind], lambda path: _write(path, DEEP + b"\n")
        yield f"{kind} line of 2 GiB", KINDS[kind], lambda path: os.truncate(path, 2 * GIB)
        yield f"{kind} line of empty lists", KINDS[kind], lambda path: _write(path, b"[" + b"[]," * 10_000_000 + b"1]")
        yield f"{kind} with a flipped bit", KINDS[kind], _flip
        yield f"{kind} line that is a list", KINDS[kind], lambda path: _write(path, b"[1]\n")
    yield "trace chunk of other columns, 1 GiB unfolded", KINDS["trace-rows"], _foreign_bomb
    yield "trace chunk of the right columns, 2 GiB unfolded", KINDS["trace-rows"], _own_bomb
    yield "trace chunk that is a pipe", KINDS["trace-rows"], lambda path: _pipe(path / "routing-00000.parquet")
    for kind in ("import-moe-trace", "import-dynande"):
        yield f"{kind} of 2 GiB without a line", KINDS[kind], lambda path: os.truncate(path, 2 * GIB)
        yield f"{kind} that is a pipe", KINDS[kind], _pipe
    hardware = KINDS["hardware"]
    reads = Kind("hardware", hardware.make, hardware.damage, _transfer)
    for key in sorted(key for key, kind in field_types().items() if kind is int):
        yield f"hardware {key} of 2^31", reads if key.startswith("dram.") else hardware, _hardware(key, 2**31)
    yield "hardware dram.channels of 10^30", reads, _hardware("dram.channels", 10**30)


def _transfer(path: Path) -> object:
    overrides = json.loads(path.read_text())
    overrides.pop("preset")
    return transfer(load_hardware(**overrides).dram, 1 << 20)


def _write(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x80
    path.write_bytes(raw)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _set(file: str, keys: list[str], value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        whole = json.loads((path / file).read_text())
        _put(whole, keys, value)
        (path / file).write_text(json.dumps(whole))

    return change


def _put(whole: Any, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        whole = whole[key]
    if value is ...:
        del whole[keys[-1]]
    else:
        whole[keys[-1]] = value


def _header(file: str, keys: list[str], value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        raw = (path / file).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        _put(header, keys, value)
        _with_header(path / file, json.dumps(header).encode(), raw[8 + length :])

    return change


def _raw_header(file: str, text: bytes) -> Callable[[Path], None]:
    return lambda path: _with_header(path / file, text, b"")


def _with_header(path: Path, text: bytes, body: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def _long_header(file: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        _write(path / file, struct.pack("<Q", 2 * GIB))
        os.truncate(path / file, 3 * GIB)

    return change


def _array(path: Path, shape: tuple[int, ...], descr: str = "<f8") -> None:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64))


def _npz_bomb(path: Path) -> None:
    header = repr({"descr": "|u1", "fortran_order": False, "shape": (1, 1 << 20, 32, 32)}).encode() + b"\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("experts.npy", "w") as member:
        member.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        for _ in range(1 << 6):
            member.write(bytes(1 << 24))


def _npz_of_nothing(path: Path) -> None:
    header = repr({"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 0, 2, 2)}).encode() + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("experts.npy", "weights.npy"):
            archive.writestr(name, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)


def _repeated(path: Path, rows: pa.Table, times: int) -> None:
    with pq.ParquetWriter(path, rows.schema, compression="zstd", use_dictionary=False, write_statistics=False) as file:
        for _ in range(times):
            file.write_table(rows)


def _foreign_bomb(path: Path) -> None:
    _repeated(path / "routing-00000.parquet", pa.table({"x": np.zeros(1 << 24, np.int64)}), 8)


def _own_bomb(path: Path) -> None:
    chunk = path / "routing-00000.parquet"
    rows = pq.read_table(chunk)
    zeros = [_zeros(field.type, 1 << 20) for field in rows.schema]
    _repeated(chunk, pa.Table.from_arrays(zeros, schema=rows.schema), 64)


def _zeros(kind: pa.DataType, count: int) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        flat = np.zeros(count * kind.list_size, kind.value_type.to_pandas_dtype())
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), type=kind)
    return pa.nulls(count, kind).fill_null(0)


def _hardware(key: str, value: int) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps({"preset": "h100-ndp512", key: value})) and None


def _mib(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) >> 10


def _read_alone(kind: Kind, path: Path) -> dict[str, Any]:
    """In a child, so that a case that hangs, ends the process or takes all memory is one case."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with open(reader) as file:
            told = file.read()
        os.waitpid(child, 0)
        return json.loads(told) if told else {"end": "the process ended", "seconds": 60.0, "mib": 0}
    signal.alarm(60)
    resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _mib("VmRSS"), time.perf_counter()
    try:
        kind.read(path)
        end = "accepted"
    except NdpError as error:
        end = f"refused: {error}"
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"[:300]
    spent = {"end": end, "seconds": round(time.perf_counter() - start, 3), "mib": _mib("VmHWM") - before}
    os.write(writer, json.dumps(spent).encode())
    os._exit(0)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Path] = {}
        for name, kind, change in cases():
            if kind.name not in made:
                made[kind.name] = Path(folder, kind.name)
                kind.make(made[kind.name])
            original, path = made[kind.name], Path(folder, "hostile")
            (shutil.copytree if original.is_dir() else shutil.copyfile)(original, path)
            change(path)
            print(json.dumps({"name": name, **_read_alone(kind, path)}), flush=True)
            (shutil.rmtree if path.is_dir() else os.unlink)(path)


if __name__ == "__main__":
    sys.exit(main())
