"""The trace on disk: a directory of Parquet chunks and a manifest, whose tables and columns docs/trace-format.md names.

A chunk appears under its name only when it is complete and on disk (kept.py). So a crash loses only the rows that
were still in memory. A trace is its owner's alone: it holds names of requests, and routing tells of their contents.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ndp_device.common import kept
from ndp_device.common.errors import NdpError, TraceError
from ndp_device.common.model_shape import MAX_EXPERTS, MAX_EXPERTS_IN_ALL, MAX_LAYERS
from ndp_device.common.strict_files import Refused, open_plain
from vllm_ndp.layer.setup import Setup

FORMAT = "vllm-ndp-trace"
VERSION = 1
MANIFEST = "manifest.json"
TABLES = ("requests", "plans", "devices", "steps", "routing")
"""Tables in the order in which they are flushed: a routing row never outlives its request, nor a step's time its
devices."""

PREFILL, DECODE, CACHED, REJECTED = 0, 1, 2, 3
PHASES = ("prefill", "decode", "cached", "rejected")
"""`cached`: the row did not run, and its routing came from the prefix cache; it counts for statistics only. `rejected`:
the row of a drafted token that was not accepted. It ran and took time, but is no token of its request."""

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700

ALL_REQUESTS = -1

UNTIMED = -1
"""Simulated time in memory of a step that has none, such as with real hardware; null on disk."""
MAY_LACK = ("simulated_start_ps", "simulated_step_ps")
"""Columns that may hold it."""

DOWN, CHANGED = 0, 1
"""Of a device: it served nothing in the step. Or: a device was lost or came back within the step, so the
step's time depends on the moment (device -1)."""

_ROWS_AT_ONCE = 1 << 14
_SMALL_BYTES = 128 << 20
_MAX_UNFOLDING = {"plans": 256}
"""Factor by which the chunks of a table may unfold, 32 unless named here. Chunks may always unfold into _SMALL_BYTES.
Routing unfolds 2 to 6 times; plans that follow each other are nearly equal."""
_MAX_FOOTER_BYTES = 1 << 20
_MAX_FOOTER_ITEMS = 1 << 20


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trace comes from. Empty strings mean: its maker did not know."""

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int = 0
    intermediate_size: int = 0
    model_digest: str = ""
    tokenizer_digest: str = ""
    source: str = ""
    """recorded | synthetic | import:<format>"""
    weights: str = "router"
    """router: what the router gave | uniform: 1/k, because the source holds ids only"""
    hardware: str = ""
    hardware_hash: str = ""
    policy: str = ""
    settings: dict[str, Any] = {}
    live: Setup | None = None
    """None where nothing was simulated: imported, synthetic, or recorded without placement."""

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_experts, self.top_k) < 1 or self.top_k > self.num_experts:
            raise TraceError(
                f"a trace needs num_layers >= 1 and 1 <= top_k <= num_experts, got num_layers {self.num_layers}, "
                f"top_k {self.top_k}, num_experts {self.num_experts}"
            )
        if self.num_experts > MAX_EXPERTS:
            raise TraceError(f"at most {MAX_EXPERTS} experts per layer can be recorded, got {self.num_experts}")
        if self.num_layers > MAX_LAYERS or self.num_layers * self.num_experts > MAX_EXPERTS_IN_ALL:
            raise TraceError(
                f"at most {MAX_LAYERS} layers with {MAX_EXPERTS_IN_ALL} experts in all can be recorded, got "
                f"{self.num_layers} layers of {self.num_experts}"
            )

    @property
    def id_type(self) -> str:
        """numpy name of the smallest type that holds an expert id."""
        return "uint8" if self.num_experts <= 256 else "uint16"


class TraceManifest(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    version: int
    provenance: Provenance
    chunks: dict[str, int] | None = None
    """Chunks per table, written when the trace was closed; None: still being written, or its writer died."""


def require_choices(ids: NDArray[Any], weights: NDArray[Any], made: Provenance) -> None:
    """What every reader, importer and recorder of rows must hold: ids and weights [N, L, k] of a router.

    ids before they are cast to the trace's type, which would wrap them. Raises TraceError that
    names row, layer and what came.
    """
    want = (len(ids), made.num_layers, made.top_k)
    if ids.shape != want or weights.shape != want:
        raise TraceError(f"ids and weights must be {list(want)}, got {list(ids.shape)} {list(weights.shape)}")
    if ids.dtype.kind not in "iu":
        raise TraceError(f"expert ids must be whole numbers, got {ids.dtype}")
    if not ids.size:
        return
    # the ufuncs themselves: ids.min() takes three times as long for the few ids of a small step
    low, high = np.minimum.reduce(ids, axis=None), np.maximum.reduce(ids, axis=None)
    if not 0 <= low <= high < made.num_experts:
        cell = _first((ids < 0) | (ids >= made.num_experts))
        raise TraceError(
            f"expert ids must lie in 0..{made.num_experts - 1}, got {low}..{high}: {_cell(cell)} has "
            f"{ids[cell].tolist()}"
        )
    for start in range(0, len(ids), _ROWS_AT_ONCE):
        ranks = np.ascontiguousarray(np.moveaxis(ids[start : start + _ROWS_AT_ONCE], 2, 0))  # [k, rows, L]
        for apart in range(1, made.top_k):
            if (same := ranks[apart:] == ranks[:-apart]).any():
                row, layer = _first(same.any(axis=0))
                raise TraceError(
                    f"a token chooses an expert at most once: {_cell((start + row, layer))} has "
                    f"{ids[start + row, layer].tolist()}"
                )
    low, high = np.minimum.reduce(weights, axis=None), np.maximum.reduce(weights, axis=None)
    if not 0 <= low <= high < np.inf:
        cell = _first(~((weights >= 0) & (weights < np.inf)))
        raise TraceError(f"router weights must be finite and at least 0: {_cell(cell)} has {weights[cell].tolist()}")


def _first(wrong: NDArray[np.bool_]) -> tuple[int, int]:
    """(row, layer)"""
    row, layer = np.argwhere(wrong)[0].tolist()[:2]
    return row, layer


def _cell(cell: tuple[int, int]) -> str:
    return f"row {cell[0]}, layer {cell[1]}"


def schema(table: str, provenance: Provenance) -> pa.Schema:
    """Columns of one table; ids and weights are [num_layers * top_k], layer by layer, as the router returned them."""
    choices = provenance.num_layers * provenance.top_k
    cells = provenance.num_layers * provenance.num_experts
    columns: dict[str, list[tuple[str, pa.DataType]]] = {
        "routing": [
            ("step", pa.int32()),
            ("request", pa.int32()),
            ("position", pa.int32()),
            ("phase", pa.uint8()),
            ("ids", pa.list_(pa.from_numpy_dtype(provenance.id_type), choices)),
            ("weights", pa.list_(pa.float32(), choices)),
        ],
        "requests": [
            ("request", pa.int32()),
            ("id", pa.string()),
            ("label", pa.string()),
            ("prompt_len", pa.int32()),
            ("arrival_s", pa.float64()),
        ],
        "steps": [
            ("step", pa.int32()),
            ("epoch", pa.int64()),
            ("simulated_start_ps", pa.int64()),
            ("simulated_step_ps", pa.int64()),
            ("measured_step_s", pa.float64()),
            ("fallback_pairs", pa.int64()),
        ],
        "devices": [("step", pa.int32()), ("device", pa.int32()), ("change", pa.uint8())],
        "plans": [
            ("step", pa.int32()),
            ("epoch", pa.int64()),
            ("request", pa.int32()),
            ("cells", pa.list_(pa.uint8(), cells)),
        ],
    }
    return pa.schema([pa.field(name, kind, nullable=name in MAY_LACK) for name, kind in columns[table]])


def _arrow_columns(columns: Mapping[str, Any], wanted: pa.Schema) -> list[pa.Array]:
    arrays = []
    for field in wanted:
        values = columns[field.name]
        if pa.types.is_fixed_size_list(field.type):
            flat = np.ascontiguousarray(values).reshape(-1)
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(flat), type=field.type))
        else:
            lacks = values == UNTIMED if field.nullable and isinstance(values, np.ndarray) else None
            arrays.append(pa.array(values, type=field.type, mask=lacks))
    return arrays


def _chunk_path(directory: Path, table: str, index: int) -> Path:
    return directory / f"{table}-{index:05d}.parquet"


def write_chunk(directory: Path, table: str, index: int, columns: Mapping[str, Any], provenance: Provenance) -> None:
    """Complete and on disk, or absent. columns: arrays by name, or lists of values."""
    path, wanted = _chunk_path(directory, table, index), schema(table, provenance)
    rows = pa.Table.from_arrays(_arrow_columns(columns, wanted), schema=wanted)
    with kept.written(path, aside=path.with_suffix(".tmp"), mode=PRIVATE_FILE) as file:
        pq.write_table(
            rows,
            file,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )


def write_manifest(directory: Path, provenance: Provenance, chunks: dict[str, int] | None) -> None:
    manifest = TraceManifest(format=FORMAT, version=VERSION, provenance=provenance, chunks=chunks)
    path = directory / MANIFEST
    with kept.written(path, aside=directory / (MANIFEST + ".tmp"), mode=PRIVATE_FILE) as file:
        file.write(kept.seal(manifest))


def read_manifest(directory: Path) -> TraceManifest:
    """Raises TraceError for anything that is not a manifest of ours in this version."""
    path = directory / MANIFEST
    try:
        manifest = kept.read_sealed(path, TraceManifest)
    except OSError:
        raise TraceError(f"{directory} is not a trace: it has no readable {MANIFEST}") from None
    except (Refused, NdpError) as error:
        raise TraceError(f"{path} is damaged or not a trace manifest: {error}") from None
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise TraceError(
            f"{path} is a {manifest.format!r} version {manifest.version}, this program reads {FORMAT!r} "
            f"version {VERSION}"
        )
    return manifest


def read_table(directory: Path, table: str, manifest: TraceManifest) -> pa.Table:
    """All chunks of a table. Raises TraceError naming the chunk that is damaged, foreign or missing."""
    wanted = schema(table, manifest.provenance)
    found = sorted(directory.glob(f"{table}-*.parquet"))
    expected = len(found) if manifest.chunks is None else manifest.chunks.get(table, 0)
    room = _room(sum(path.stat().st_size for path in found), table)
    parts = []
    for index in range(expected):
        path = _chunk_path(directory, table, index)
        if not path.exists():
            raise TraceError(f"{path} is missing: the trace has {expected} chunks of {table!r}; restore it")
        try:
            with open_parquet(path, table, page_checksum_verification=True) as file:
                _require_columns(path, wanted, file.schema_arrow)
                room -= file.metadata.num_rows * _row_bytes(wanted)
                if room < 0:
                    raise TraceError(
                        f"{path} and the chunks before it claim more rows than files of their size can hold: "
                        "restore them or delete the trace"
                    )
                part = pa.Table.from_arrays(file.read().columns, schema=wanted)
            part.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: names that are not UTF-8, and Refused
            raise TraceError(f"{path} is damaged: {_one_line(error)}; restore it or delete the trace") from None
        parts.append(part)
    return pa.concat_tables(parts) if parts else wanted.empty_table()


def _require_columns(path: Path, wanted: pa.Schema, came: pa.Schema) -> None:
    """Names and types; that a column cannot lack a value is looked up in its values."""
    columns = ([(column.name, column.type) for column in of] for of in (wanted, came))
    for want, got in itertools.zip_longest(*columns, fillvalue=("no", "column")):
        if want != got:
            raise TraceError(
                f"{path} does not have the columns of a trace of this model: wanted {want[0]} {want[1]}, "
                f"got {got[0]} {got[1]}"
            )


def open_parquet(path: Path, table: str = "", **options: Any) -> pq.ParquetFile:
    """Open a Parquet file whose footer claims no more than its size allows. Raises Refused, OSError or Arrow's own."""
    with open_plain(path) as file:  # nothing that a pipe or a device of this name could hold up
        size = os.fstat(file.fileno()).st_size
    opened = pq.ParquetFile(
        path, thrift_string_size_limit=_MAX_FOOTER_BYTES, thrift_container_size_limit=_MAX_FOOTER_ITEMS, **options
    )
    # Of row groups, not of their columns: a damaged column ends the process in Arrow 26, whose column() lets a C++
    # exception out.
    stated = sum(opened.metadata.row_group(group).total_byte_size for group in range(opened.metadata.num_row_groups))
    if stated > _room(size, table):
        opened.close()
        raise Refused(f"its {size} bytes unfold into {stated}: write it with less compression")
    return opened


def _room(size: int, table: str) -> int:
    """Into how many bytes files of this size may unfold."""
    return max(_SMALL_BYTES, _MAX_UNFOLDING.get(table, 32) * size)


def _row_bytes(wanted: pa.Schema) -> int:
    """Bytes of one row in memory, strings aside."""
    kinds = [field.type for field in wanted]
    return sum(
        kind.list_size * kind.value_type.bit_width // 8 if pa.types.is_fixed_size_list(kind) else kind.bit_width // 8
        for kind in kinds
        if not pa.types.is_string(kind)
    )


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
