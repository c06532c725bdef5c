"""A job that fills a replica directory, layer by layer, and goes on where it was stopped. Knows files and settings.

    DIR/experts-00001.3.JOB.safetensors    all of expert 3 alone, until layer 1 is whole

An expert from text takes minutes, so a job that is stopped keeps those of the layer that it did not finish.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ndp_device.calibration.progress import JobProgress, say
from ndp_device.common.errors import ConfigError, ReplicaError
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

MakeLayer = Callable[[int, JobProgress], LayerReplicas]
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

    with (
        JobProgress(name, total, already, show=show_progress) as progress,
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
            tables = [file.tensor(name) for name in ("loss", "relative_loss", "calibration_tokens", "own_weight")]
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
