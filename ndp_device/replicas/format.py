"""Replicas on disk: one safetensors file per layer and a manifest that vouches for them. See docs/replica-format.md.

    DIR/manifest.json                what the replicas are of, how they were made, a digest per layer file
    DIR/experts-00000.safetensors    bit planes, scales and offsets of every expert of layer 0, and its loss table

A name holds a whole file or nothing (kept.py). The manifest grows by one entry per layer, so a reader can name what is
missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.common import kept
from ndp_device.common.activation import SILU, Activation
from ndp_device.common.errors import ConfigError, NdpError, ReplicaError, why_unwritable
from ndp_device.common.kept import checked_file
from ndp_device.common.model_shape import ModelShape
from ndp_device.common.strict_files import Refused, open_plain
from ndp_device.common.widths import REPLICA_WIDTHS, WIDTHS, loss_columns
from ndp_device.experts.expert import Biases, NestedMatrix, QuantizedExpert, QuantizedMatrix
from ndp_device.replicas.mapped import MappedFile

FORMAT = "ndp-moe-replicas"
VERSION = 1
WITHOUT_TOKENS = "experts_without_tokens"
"""In a manifest's `calibration`: how many experts the text never reached, solved for their layer's moment."""
MANIFEST = "manifest.json"

Part = bytes | memoryview
_DTYPES = [np.dtype(name) for name in ("u1", "f2", "i4", "f4", "f8", "i8")]
"""Those of a layer's tensors, in the order in which safetensors sorts them."""

_UNFINISHED = ".unfinished"
_SURELY_LEFT_S = 60.0

Container = Literal["nested", "independent"]
"""nested: one set of planes whose first k are the k-bit replica, up to 4; independent: planes of their own for every
width. 8 bits have planes of their own in both."""


class LayerFile(msgspec.Struct, frozen=True):
    """Size and digest of one layer's file, as the manifest promises them."""

    num_bytes: int
    blake2b: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Provenance of a replica directory. `layers` maps a layer to its file, once that is written."""

    model: ModelShape
    model_digest: str
    container: Container
    bits: tuple[int, ...]
    group_size: int
    source: Literal["calibrated", "data-free"]
    solver: dict[str, str | int | float | list[float]]
    calibration: dict[str, str | int | float]
    format: str = FORMAT
    version: int = VERSION
    layers: dict[int, LayerFile] = {}
    activation: tuple[Activation, ...] = ()
    """Of each layer; none: SiLU in all."""
    biases: bool = False
    layer_weights: tuple[float, ...] = ()
    """Effect of the same relative loss in each layer on the model's answer, mean 1; none until it is measured."""
    nats_per_loss: float | None = None
    """Nats a token that a weight of 1 stands for, likewise."""

    def activation_of(self, layer: int) -> Activation:
        return self.activation[layer] if self.activation else SILU

    def __post_init__(self) -> None:
        if not self.bits or list(self.bits) != sorted(set(self.bits) & set(REPLICA_WIDTHS)):
            raise ValueError(f"bits must be a rising selection of {list(REPLICA_WIDTHS)}, got {list(self.bits)}")
        if self.group_size < 8 or self.group_size % 8:
            raise ValueError(f"group_size must be a multiple of 8, got {self.group_size}")
        if len(self.activation) not in (0, self.model.num_layers):
            raise ValueError(f"activation must be of {self.model.num_layers} layers, got {len(self.activation)}")
        weights = self.layer_weights
        if weights and (len(weights) != self.model.num_layers or not all(0 <= one < math.inf for one in weights)):
            raise ValueError(f"layer_weights must be {self.model.num_layers} finite numbers >= 0, got {list(weights)}")
        if self.nats_per_loss is not None and not 0 < self.nats_per_loss < math.inf:
            raise ValueError(f"nats_per_loss must be a finite number > 0, got {self.nats_per_loss}")

    @property
    def nested_bits(self) -> tuple[int, ...]:
        """The widths that share planes, rising."""
        return tuple(bits for bits in self.bits if bits in WIDTHS) if self.container == "nested" else ()

    def prefix(self, expert: int, bits: int) -> str:
        """How the names of the tensors of an expert at one width begin."""
        return f"{expert}" if bits in self.nested_bits else f"{expert}.{bits}"

    @property
    def job(self) -> str:
        """16 hex digits that name the settings: what a job that goes on must have in common with the one before."""
        settings = msgspec.structs.replace(self.unweighed(), layers={})
        return hashlib.blake2b(msgspec.json.encode(settings, order="sorted"), digest_size=8).hexdigest()

    @property
    def is_weighed(self) -> bool:
        return self.nats_per_loss is not None

    def unweighed(self) -> Manifest:
        """Without what is measured when all layers are there."""
        calibration = {name: value for name, value in self.calibration.items() if name != WITHOUT_TOKENS}
        return msgspec.structs.replace(self, layer_weights=(), nats_per_loss=None, calibration=calibration)

    @property
    def digest(self) -> str:
        """32 hex digits that name what the files hold and how it is read.

        The same bytes have the same digest, in any place and from any writer; another calibration has another digest.
        """
        digest = hashlib.blake2b(digest_size=16)
        meaning = (self.format, self.version, self.model_digest, self.container, self.bits, self.group_size)
        files = [(layer, self.layers[layer].num_bytes, self.layers[layer].blake2b) for layer in sorted(self.layers)]
        digest.update(msgspec.json.encode((meaning, files)))
        return digest.hexdigest()


@dataclass(frozen=True)
class LayerReplicas:
    """Every expert of one layer at every width, with what is known about its quality.

    - loss, relative_loss: float64 [E, columns], one for each of widths.loss_columns, NaN for a width that was not made
    - calibration_tokens: int64 [E], the routed tokens its Hessian was summed from (0 = data-free)
    """

    experts: tuple[dict[int, QuantizedExpert], ...]
    loss: NDArray[np.float64]
    relative_loss: NDArray[np.float64]
    calibration_tokens: NDArray[np.int64]

    def __post_init__(self) -> None:
        table = (len(self.experts), len(loss_columns(self.experts[0])))
        if self.loss.shape != table or self.relative_loss.shape != table:
            raise ValueError(f"loss tables must be {list(table)}, got {self.loss.shape} and {self.relative_loss.shape}")
        for expert, replicas in enumerate(self.experts):
            finite = all(
                np.isfinite(matrix.scale).all() and np.isfinite(matrix.offset).all()
                for replica in replicas.values()
                for matrix in (replica.w13, replica.w2)
            )
            if not finite:
                raise ValueError(f"expert {expert} has a scale or offset that float16 cannot hold")

    @classmethod
    def of(cls, parts: Sequence[LayerReplicas]) -> LayerReplicas:
        """The experts of several, in this order."""
        tables = ("loss", "relative_loss", "calibration_tokens")
        joined = (np.concatenate([getattr(part, name) for part in parts]) for name in tables)
        return cls(tuple(expert for part in parts for expert in part.experts), *joined)


def layer_file_name(layer: int) -> str:
    return f"experts-{layer:05d}.safetensors"


class ReplicaFiles:
    """A complete, checked replica directory; `expert(layer, expert, bits)` is a view of the mapped file."""

    def __init__(
        self, directory: Path, *, model_digest: str | None = None, check_contents: bool = True, once: bool = False
    ) -> None:
        """Raises ReplicaError for another model's replicas and for files that are missing, damaged or cut short.

        check_contents hashes every file (2 to 3 s per GB), not only sizes and headers. once: except those that this
        machine has hashed before, and that nobody has written, moved or replaced since.
        """
        self.directory = directory
        self.manifest = read_manifest(directory)
        if model_digest is not None and self.manifest.model_digest != model_digest:
            raise ReplicaError(
                f"{directory} holds replicas of {self.manifest.model.name} ({self.manifest.model_digest}), not of the "
                f"model being served ({model_digest}): run vllm-ndp quantize for this model"
            )
        missing = [n for n in range(self.manifest.model.num_layers) if n not in self.manifest.layers]
        if missing:
            raise ReplicaError(
                f"{directory} is unfinished: {layer_file_name(missing[0])} and {len(missing) - 1} more layers are not "
                "written yet; run the same vllm-ndp quantize again to finish it"
            )
        layers = range(self.manifest.model.num_layers)
        seen = {layer: _stamp(directory, layer, self.manifest) for layer in layers} if once else {}
        known = _read_seen(directory) if once else {}
        whole = {layer for layer, stamp in seen.items() if known.get(layer) == stamp}
        self._files = [
            check_layer_file(directory, layer, self.manifest, check_contents=check_contents and layer not in whole)
            for layer in layers
        ]
        if seen != known:
            _write_seen(directory, seen)
        self._experts = [ExpertsOfFile(self.manifest, layer, file) for layer, file in enumerate(self._files)]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.manifest.layers.values())

    def expert(self, layer: int, expert: int, bits: int) -> QuantizedExpert:
        if bits not in self.manifest.bits or not 0 <= expert < self.manifest.model.num_experts:
            raise ReplicaError(
                f"{self.directory} has no {bits}-bit replica of expert {expert}: it holds "
                f"{self.manifest.model.num_experts} experts at {list(self.manifest.bits)} bits"
            )
        return self._experts[layer].at(expert, bits)

    def check(self, layer: int) -> None:
        """Raise ReplicaError where this layer's file has changed since it was opened."""
        self._files[layer].check()

    def release(self, layer: int) -> None:
        """Nothing of this layer's file is needed in this process's memory for now."""
        self._files[layer].release()

    def layer_losses(self, layer: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(loss, relative loss), each float64 [E, columns]: one for each of widths.loss_columns."""
        columns = len(loss_columns(self.manifest.bits))
        loss, relative = (self._table(layer, name, columns) for name in ("loss", "relative_loss"))
        return loss.astype(np.float64), relative.astype(np.float64)

    def calibration_tokens(self, layer: int) -> NDArray[np.int64]:
        """Of each expert, as in LayerReplicas."""
        return self._table(layer, "calibration_tokens").astype(np.int64)

    def _table(self, layer: int, name: str, *columns: int) -> NDArray[Any]:
        """A copy of a table [E, columns]."""
        file, shape = self._files[layer], (self.manifest.model.num_experts, *columns)
        table = file.tensor(name).copy()
        if table.shape != shape:
            raise ReplicaError(f"{file.path} is damaged: its table {name} must be {list(shape)}")
        file.check()
        return table

    @cached_property
    def loss_digest(self) -> str:
        """32 hex digits that name the loss tables of all layers, as they lie in the files, and the layers' weights."""
        digest = hashlib.blake2b(digest_size=16)
        for layer in range(self.manifest.model.num_layers):
            for table in self.layer_losses(layer):
                digest.update(table.tobytes())
        digest.update(np.array(self.manifest.layer_weights).tobytes())
        if self.manifest.nats_per_loss is not None:
            digest.update(np.array(self.manifest.nats_per_loss).tobytes())
        return digest.hexdigest()


class ExpertsOfFile:
    """The experts of one layer that a file holds: views of its mapped bytes."""

    def __init__(self, manifest: Manifest, layer: int, file: MappedFile) -> None:
        self._manifest, self._layer, self._file = manifest, layer, file
        self._nested: WeakValueDictionary[str, NestedMatrix] = WeakValueDictionary()
        """Matrices in use: all widths of an expert are views of one."""

    def at(self, expert: int, bits: int) -> QuantizedExpert:
        prefix, file = self._manifest.prefix(expert, bits), self._file
        try:
            w13, w2 = self._matrix(f"{prefix}.w13", bits), self._matrix(f"{prefix}.w2", bits)
            sizes = self._manifest.model.hidden_size, self._manifest.model.intermediate_size
            if w2.shape != sizes:
                raise ValueError(f"w2 must be {list(sizes)} as the manifest's model says, got {list(w2.shape)}")
            biases = None
            if self._manifest.biases:
                gate, up = np.split(file.tensor(f"{prefix}.b13"), 2)
                biases = Biases(gate, up, file.tensor(f"{prefix}.b2"))
            return QuantizedExpert(bits, w13, w2, biases, self._manifest.activation_of(self._layer))
        except ValueError as error:
            raise ReplicaError(f"{file.path} is damaged: expert {expert} at {bits} bits: {error}") from None

    def _matrix(self, prefix: str, bits: int) -> QuantizedMatrix:
        if bits not in self._manifest.nested_bits:
            return QuantizedMatrix(bits, *self._parts(prefix))
        if (nested := self._nested.get(prefix)) is None:
            nested = NestedMatrix(self._manifest.nested_bits, *self._parts(prefix))
            self._nested[prefix] = nested
        return nested.at(bits)

    def _parts(self, prefix: str) -> tuple[Any, Any, Any, int, Any]:
        planes, scale, offset = (self._file.tensor(f"{prefix}.{part}") for part in ("planes", "scale", "offset"))
        perm = self._file.tensor(f"{prefix}.perm") if f"{prefix}.perm" in self._file else None
        return planes, scale, offset, self._manifest.group_size, perm


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        manifest = kept.read_sealed(path, Manifest)
    except FileNotFoundError:
        lacks = f"holds no replicas ({MANIFEST} is missing)" if directory.is_dir() else "does not exist"
        raise ReplicaError(f"{directory} {lacks}: run vllm-ndp quantize") from None
    except (OSError, Refused, NdpError) as error:
        raise ReplicaError(f"{path} is not a replica manifest: {error}") from None
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        raise ReplicaError(
            f"{path} has format {manifest.format!r} version {manifest.version}, wanted {FORMAT!r} version {VERSION}: "
            "run vllm-ndp quantize again"
        )
    return manifest


_Stamp = tuple[int, int, int, int, str]
"""Inode, size, times of the last change of contents and of anything, and the digest promised."""


def _stamp(directory: Path, layer: int, manifest: Manifest) -> _Stamp | None:
    """None where there is no file, which is refused with its own words."""
    try:
        found = (directory / layer_file_name(layer)).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, manifest.layers[layer].blake2b


def _read_seen(directory: Path) -> dict[int, _Stamp | None]:
    """Stamps of files that were whole; none where nothing can be read."""
    try:
        return msgspec.json.decode(checked_file(directory).read_bytes(), type=dict[int, _Stamp | None])
    except (OSError, msgspec.DecodeError, NdpError):
        return {}


def _write_seen(directory: Path, seen: dict[int, _Stamp | None]) -> None:
    """Where nothing can be written, every start hashes the files."""
    with contextlib.suppress(NdpError):
        write_whole(checked_file(directory), [msgspec.json.encode(seen)])


def check_layer_file(directory: Path, layer: int, manifest: Manifest, *, check_contents: bool) -> MappedFile:
    """The layer's file, mapped, after comparing it with what the manifest promises."""
    promised, path = manifest.layers[layer], directory / layer_file_name(layer)
    if path.is_file() and not path.is_symlink() and (size := path.stat().st_size) != promised.num_bytes:
        raise ReplicaError(
            f"{path} is truncated or half-written: {size} bytes instead of {promised.num_bytes}; "
            "run vllm-ndp quantize again"
        )
    file = MappedFile(path)
    if check_contents and _digest(path) != promised.blake2b:
        raise ReplicaError(f"{path} is damaged: its digest is not the manifest's; run vllm-ndp quantize again")
    return file


def write_layer(directory: Path, layer: int, replicas: LayerReplicas, manifest: Manifest) -> Manifest:
    """Write one layer's file and the manifest that now includes it; returns that manifest."""
    digest, num_bytes = hashlib.blake2b(digest_size=16), 0

    def passed() -> Iterator[Part]:
        nonlocal num_bytes
        for part in layer_parts(layer, replicas, manifest):
            digest.update(part)
            num_bytes += len(part)
            yield part

    write_whole(directory / layer_file_name(layer), passed())
    entry = LayerFile(num_bytes, digest.hexdigest())
    manifest = msgspec.structs.replace(manifest, layers=manifest.layers | {layer: entry})
    write_manifest(directory, manifest)
    return manifest


def layer_parts(layer: int, replicas: LayerReplicas, manifest: Manifest) -> Iterator[Part]:
    """A layer's file in parts, without a copy of its tensors."""
    tensors: dict[str, NDArray[Any]] = {
        "loss": replicas.loss,
        "relative_loss": replicas.relative_loss,
        "calibration_tokens": replicas.calibration_tokens,
    }
    for expert, by_bits in enumerate(replicas.experts):
        if tuple(by_bits) != manifest.bits:
            raise ValueError(f"expert {expert} must come at {list(manifest.bits)} bits, got {list(by_bits)}")
        for name in ("w13", "w2"):
            if nested := [getattr(by_bits[bits], name) for bits in manifest.nested_bits]:
                tensors |= _tensors(f"{expert}.{name}", NestedMatrix.of(nested))
            for bits in manifest.bits[len(manifest.nested_bits) :]:  # which are the narrowest
                tensors |= _tensors(f"{manifest.prefix(expert, bits)}.{name}", getattr(by_bits[bits], name))
        tensors |= _bias_tensors(layer, expert, by_bits, manifest)
    yield from safetensors_parts(tensors, {"format": f"{FORMAT} {VERSION}, layer {layer}"})


def safetensors_parts(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> Iterator[Part]:
    """The bytes that safetensors.numpy.save gives, which would hold them twice."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    in_order = sorted(tensors, key=lambda name: (-_DTYPES.index(tensors[name].dtype), name))
    for name in in_order:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        dtype = f"{'F' if tensor.dtype.kind == 'f' else tensor.dtype.kind.upper()}{8 * tensor.itemsize}"
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for name in in_order:
        yield np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data


def _bias_tensors(
    layer: int, expert: int, by_bits: dict[int, QuantizedExpert], manifest: Manifest
) -> dict[str, NDArray[Any]]:
    """Make the bias tensors that lie beside the planes, as float32; once for a nested container, whose widths share one
    order of rows."""
    tensors: dict[str, NDArray[Any]] = {}
    for bits, replica in by_bits.items():
        wanted = manifest.biases, manifest.activation_of(layer)
        if (replica.biases is not None, replica.activation) != wanted:
            raise ValueError(f"expert {expert} has another activation or other biases than the manifest says")
        if replica.biases is not None:
            prefix = manifest.prefix(expert, bits)
            tensors[f"{prefix}.b13"] = np.concatenate([replica.biases.gate, replica.biases.up])
            tensors[f"{prefix}.b2"] = np.ascontiguousarray(replica.biases.down)
    return tensors


def write_manifest(directory: Path, manifest: Manifest) -> None:
    write_whole(directory / MANIFEST, [kept.seal(manifest)])


def _tensors(prefix: str, matrix: QuantizedMatrix | NestedMatrix) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        f"{prefix}.planes": np.ascontiguousarray(matrix.planes),
        f"{prefix}.scale": np.ascontiguousarray(matrix.scale),
        f"{prefix}.offset": np.ascontiguousarray(matrix.offset),
    }
    return tensors if matrix.perm is None else tensors | {f"{prefix}.perm": matrix.perm}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def remove_unfinished(directory: Path) -> None:
    """Remove what builders that were killed left behind. A builder that lives holds a lock on the file it writes."""
    for path in directory.glob(f".*{_UNFINISHED}"):
        with contextlib.suppress(OSError), open_plain(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pid = path.name.removesuffix(_UNFINISHED).rpartition(".")[2]
            # between its creation and its lock a file is a few microseconds old, and its writer has a pid
            if not Path("/proc", pid).exists() or time.time() - path.stat().st_mtime > _SURELY_LEFT_S:
                path.unlink()


def write_whole(path: Path, parts: Iterable[Part]) -> None:
    """All of the parts under this name, or nothing new under it, whenever the machine stops."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        kept.make_directory(path.parent)
        with kept.written(path, aside=unfinished) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # its writer lives: remove_unfinished
            file.writelines(parts)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {why_unwritable(error)}") from None


def load_losses(replicas_dir: Path, kind: str) -> tuple[NDArray[np.float64], NDArray[np.float64] | None, float | None]:
    """(losses [L, E, columns], weights of layers [L], nats of a weight of 1) of one kind, relative or absolute.

    One column for each of widths.loss_columns, NaN for an absent width. Never rising with bits: where few held-out
    tokens made a wider replica look worse, it counts as its narrower one.

    Weights say what the same relative loss in each layer does to the answer, mean 1. None where that was not measured,
    and for absolute losses.
    """
    files = ReplicaFiles(replicas_dir, check_contents=False)
    both = [files.layer_losses(layer) for layer in range(files.manifest.model.num_layers)]
    losses = np.stack([relative if kind == "relative" else loss for loss, relative in both])
    losses = np.where(np.isnan(losses), np.nan, np.fmin.accumulate(losses, axis=-1))
    if kind != "relative":
        return losses, None, None
    weights = np.array(files.manifest.layer_weights) if files.manifest.layer_weights else None
    return losses, weights, files.manifest.nats_per_loss
