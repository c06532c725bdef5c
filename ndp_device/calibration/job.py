"""A job that fills a replica directory, layer by layer, goes on where it was stopped, and says how far it is.

    DIR/experts-00001.3.JOB.safetensors    all of expert 3 alone, until layer 1 is whole

An expert from text takes minutes, so a job that is stopped keeps those of the layer that it did not finish.

Time left is the time so far, times the work that is left over the work that is done. Mostly each expert is one unit of
work. A calibration's stages are counted by their multiplications: the first stage of the first expert tells how long
the last expert will take.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.model_shape import ModelShape
from ndp_device.common.outputs import REPLICAS, require_own_folder
from ndp_device.replicas.format import (
    MANIFEST,
    ExpertsOfFile,
    LayerReplicas,
    Manifest,
    check_layer_file,
    layer_parts,
    read_manifest,
    remove_unfinished,
    write_layer,
    write_manifest,
    write_whole,
)
from ndp_device.replicas.mapped import MappedFile

MakeLayer = Callable[[int, "JobProgress"], LayerReplicas]
"""(layer, told of each expert and of the work) -> its replicas."""


def run_job(out_dir: Path, manifest: Manifest, make_layer: MakeLayer, *, show_progress: bool) -> Manifest:
    """Write every layer that is not there yet: safe, as one processor makes the same bytes of a job each time."""
    require_own_folder(out_dir, REPLICAS)
    remove_unfinished(out_dir)
    manifest = _resume(out_dir, manifest)
    shape = manifest.model
    kept = len(KeptExperts(out_dir, manifest))
    already = len(manifest.layers) * shape.num_experts + kept
    if show_progress and already:
        more = f", and {kept} more experts are made" if kept else ""
        say(f"{out_dir} goes on: {len(manifest.layers)} of {shape.num_layers} layers are whole{more}")
    name, total = f"{manifest.source} replicas of {shape.name}", shape.num_layers * shape.num_experts
    written: Future[Manifest] | None = None

    def write(layer: int, replicas: LayerReplicas, manifest: Manifest) -> Manifest:
        manifest = write_layer(out_dir, layer, replicas, manifest)
        KeptExperts(out_dir, manifest).remove_old()
        return manifest

    progress = JobProgress(name, total, already, show=show_progress)
    with (
        progress.bar,
        ThreadPoolExecutor(1) as beside,  # a layer is written while the next one is made
    ):
        for layer in range(shape.num_layers):
            if layer in manifest.layers:
                continue
            replicas = make_layer(layer, progress)
            if written is not None:
                manifest = written.result()
            written = beside.submit(write, layer, replicas, manifest)
        return manifest if written is None else written.result()


def _resume(out_dir: Path, manifest: Manifest) -> Manifest:
    """The manifest to go on with: a fresh one, or the one in out_dir less the layers whose files are not whole.

    A job that was refused or stopped in its first layer left nothing but single experts, which bear its name.
    """
    present = read_manifest(out_dir) if (out_dir / MANIFEST).exists() else None
    if present is None or not present.layers:
        write_manifest(out_dir, manifest)
        KeptExperts(out_dir, manifest).remove_old()
        return manifest
    # weights of layers are measured when all layers are there
    if msgspec.structs.replace(present.unweighed(), layers={}) != manifest:
        raise ConfigError(
            f"{out_dir} already holds replicas of another model or made with other settings: "
            "choose another output directory, or delete that one"
        )
    whole = {}
    for layer, file in present.layers.items():
        try:
            check_layer_file(out_dir, layer, present, check_contents=True)
        except (ReplicaError, OSError):
            continue
        whole[layer] = file
    present = msgspec.structs.replace(present, layers=whole)
    KeptExperts(out_dir, present).remove_old()
    return present


@dataclass(frozen=True)
class KeptExperts:
    """Single experts of a job, for another run of it to go on with."""

    directory: Path
    manifest: Manifest

    def __len__(self) -> int:
        return len(self._paths())

    def keep(self, layer: int, expert: int, made: LayerReplicas) -> LayerReplicas:
        """Write one expert, all that `made` holds; returns views of the file."""
        write_whole(self._path(layer, expert), layer_parts(layer, made, self.manifest))
        kept = self.of(layer, expert)
        assert kept is not None
        return kept

    def of(self, layer: int, expert: int) -> LayerReplicas | None:
        """What an earlier run kept of this expert; None where it kept nothing that can be read."""
        try:
            file = MappedFile(self._path(layer, expert))
            tables = [file.tensor(name) for name in ("loss", "relative_loss", "calibration_tokens")]
            experts = ExpertsOfFile(self.manifest, layer, file)
            return LayerReplicas(({bits: experts.at(0, bits) for bits in self.manifest.bits},), *tables)
        except ReplicaError:
            return None

    def remove_old(self) -> None:
        """Remove those that lie in a layer's file by now, or that a job with other settings kept."""
        for path in self._paths():
            layer, _, job, _ = path.name.removeprefix("experts-").split(".")
            if job != self.manifest.job or int(layer) in self.manifest.layers:
                path.unlink()

    def _paths(self) -> list[Path]:
        return list(self.directory.glob("experts-*.*.*.safetensors"))

    def _path(self, layer: int, expert: int) -> Path:
        return self.directory / f"experts-{layer:05d}.{expert}.{self.manifest.job}.safetensors"


# -- how far it is ----------------------------------------------------------------------------------------------------

_SAID_EVERY_S = 30
"""How often a log is told, at least."""


class JobProgress:
    """What is made of a job's experts, from any thread."""

    def __init__(self, name: str, num_experts: int, already: int, *, show: bool) -> None:
        self._lock = threading.Lock()
        self._num_experts, self._made = num_experts, already
        self._total, self._work = float(num_experts - already), 0.0
        self._in_units = True
        self._started = self._said = time.monotonic()
        console = Console(stderr=True)
        self._in_log = show and not console.is_terminal
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[made]}"), TimeElapsedColumn()
        self.bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=console, disable=not show)
        self._task = self.bar.add_task(name, total=1.0, made=f"{already}/{num_experts}", left="")

    def expect(self, total: float) -> None:
        """The job's work from now on, in units of `did`; without it, each expert is one."""
        self._total, self._in_units = total, False

    def made(self) -> None:
        """One more expert."""
        with self._lock:
            self._made += 1
        self.did(1.0 if self._in_units else 0.0)

    def did(self, work: float) -> None:
        with self._lock:
            self._work += work
            now = time.monotonic()
            if not self._work:
                return
            left = in_words((now - self._started) * max(self._total / self._work - 1, 0.0)) + " left"
            part, made = min(self._work / self._total, 1.0), f"{self._made}/{self._num_experts}"
            self.bar.update(self._task, completed=part, made=made, left=left)
            if self._in_log and now - self._said >= _SAID_EVERY_S:  # which shows no bar
                self._said = now
                passed = in_words(now - self._started)
                say(f"{100 * part:.0f} %: {self._made} of {self._num_experts} experts made after {passed}, {left}")


def in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def say(message: str) -> None:
    print(f"ndp-device: {message}", file=sys.stderr, flush=True)


_LOOP = 14_000
"""Multiplications that take as long as the column loop with one weight, at four widths: 330 ns of a Zen 4 core."""
_SYMMETRIC = 0.6
"""Part of a moment's products that is computed: its lower half in strips."""
_FACTOR = 1 / 3
"""Cholesky's C**3 / 6 at half the speed of products."""
_LAYER_ROWS, _TEST_ROWS = 1024, 1024
"""Of a layer, where an expert has many rows itself, and of the loss table: as many as there mostly are."""


@dataclass(frozen=True)
class Work:
    """Multiplications of a calibration, by stage."""

    shape: ModelShape
    num_tokens: int
    sequence_length: int
    num_tracks: int
    num_widths: int
    sweeps: int

    @property
    def answers(self) -> float:
        """One row through one expert."""
        return 3.0 * self.shape.hidden_size * self.shape.intermediate_size

    @property
    def moments(self) -> float:
        """One row, before and within its expert."""
        return _SYMMETRIC * (self.shape.hidden_size**2 + self.shape.intermediate_size**2)

    @property
    def passing(self) -> float:
        """All text through one layer beside its experts, up to them and, again, through it."""
        hidden = self.shape.hidden_size
        return 2.0 * self.num_tokens * hidden * (4 * hidden + self.sequence_length)

    @property
    def of_layer(self) -> float:
        """The rows that stand for the layer, through one expert."""
        return _LAYER_ROWS * (2 / 3 * self.answers + self.moments)

    @property
    def losses(self) -> float:
        return (1 + self.num_widths) * self.answers * _TEST_ROWS

    def solver(self, num_rows: int, num_columns: int) -> float:
        passes = (0.5 + self.sweeps) * num_columns + _LOOP / 8 * (1 + self.sweeps)
        return _FACTOR * num_columns**3 + self.num_tracks * num_rows * num_columns * passes

    @property
    def expert(self) -> float:
        """One expert, less its rows."""
        hidden, inner = self.shape.hidden_size, self.shape.intermediate_size
        return self.of_layer + self.losses + self.solver(2 * inner, hidden) + self.solver(hidden, inner)

    def job(self, layers_done: int, experts_kept: int) -> float:
        """What is left to do when so many layers are whole, and experts in the layers behind."""
        shape, rows = self.shape, self.num_tokens * self.shape.top_k
        through = self.passing + rows * self.answers
        layers, experts = shape.num_layers - layers_done, shape.num_experts
        solving = (layers - experts_kept / experts) * (experts * self.expert + rows * self.moments)
        weighing = shape.num_layers * through
        return math.fsum([shape.num_layers * through, solving, weighing])
