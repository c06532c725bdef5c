"""The job that fills a replica directory, layer by layer, and goes on where it was stopped. Knows files and settings.

Does not know how a layer is quantized: that is data_free.py (from the weights alone) or calibrated.py (from text).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track

from ndp_device.calibration.data_free import quantize_nested
from ndp_device.calibration.loss_table import expert_losses
from ndp_device.errors import ConfigError, ReplicaError
from ndp_device.kernels.reference import to_float32
from ndp_device.model_shape import ModelShape, model_digest
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import (
    MANIFEST,
    LayerReplicas,
    Manifest,
    check_layer_file,
    read_manifest,
    write_layer,
    write_manifest,
)
from ndp_device.replicas.replica import REPLICA_BITS, FullExpert, QuantizedExpert

TRACK_WEIGHTS: Mapping[int, float] = {1: 0.3, 2: 1.0, 3: 2.0, 4: 4.0}
"""What an error at each width costs in a nested container: leans to the low widths, which lose most by nesting."""

_PROBE_ROWS = 64
_WIDE = 1024


def default_cache_dir(model_digest: str) -> Path:
    """A model's place in the cache: under $NDP_CACHE_DIR, $XDG_CACHE_HOME/vllm-ndp or ~/.cache/vllm-ndp."""
    chosen = os.environ.get("NDP_CACHE_DIR")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-ndp"
    return base / "replicas" / model_digest


def default_group_size(shape: ModelShape) -> int:
    """128 weights share a scale and an offset; 64 where a matrix is narrower than 1024 and 128 would be few groups."""
    return 128 if min(shape.hidden_size, shape.intermediate_size) >= _WIDE else 64


def build_data_free(
    model_dir: Path,
    out_dir: Path,
    *,
    bits: Sequence[int] = REPLICA_BITS,
    group_size: int | None = None,
    show_progress: bool = True,
) -> Manifest:
    """Nested replicas from the weights alone, in about 2 us per weight of one core; continues an interrupted build.

    Its loss table is a proxy: output error on unit normal rows times the weight of the layer's norm, not on text.
    """
    checkpoint = CheckpointExperts(model_dir)
    track_weights = {width: TRACK_WEIGHTS[width] for width in sorted(bits)}
    manifest = Manifest(
        model=checkpoint.shape,
        model_digest=model_digest(model_dir),
        container="nested",
        bits=tuple(track_weights),
        group_size=group_size or default_group_size(checkpoint.shape),
        source="data-free",
        solver={"name": "least-squares", "track_weights": list(track_weights.values())},
        calibration={"inputs": "unit normal times the norm's weight", "rows": _PROBE_ROWS},
    )

    def make_layer(layer: int) -> LayerReplicas:
        experts, losses = [], []
        norm_weight = to_float32(*checkpoint.norm_weight(layer))
        for expert in range(checkpoint.shape.num_experts):
            full = checkpoint.expert(layer, expert)
            w13, w2 = full_matrices(full)
            quantized = [quantize_nested(matrix, manifest.group_size, track_weights) for matrix in (w13, w2)]
            experts.append({b: QuantizedExpert(b, *(matrix[b] for matrix in quantized)) for b in track_weights})
            rng = np.random.default_rng([layer, expert])
            inputs = rng.standard_normal((_PROBE_ROWS, norm_weight.size), dtype=np.float32) * norm_weight
            losses.append(expert_losses(inputs, full, experts[-1]))
        loss, relative = (np.stack(table) for table in zip(*losses, strict=True))
        nobody = np.zeros(checkpoint.shape.num_experts)
        return LayerReplicas(tuple(experts), loss, relative, nobody.astype(np.int64), nobody)

    return run_job(out_dir, manifest, make_layer, show_progress=show_progress)


def run_job(
    out_dir: Path, manifest: Manifest, make_layer: Callable[[int], LayerReplicas], *, show_progress: bool
) -> Manifest:
    """Write every layer that is not there yet. The same job always writes the same bytes, so resuming is safe."""
    manifest = _resume(out_dir, manifest)
    todo = [layer for layer in range(manifest.model.num_layers) if str(layer) not in manifest.layers]
    bar = track(
        todo,
        f"{manifest.source} replicas of {manifest.model.name}",
        total=manifest.model.num_layers,
        completed=manifest.model.num_layers - len(todo),
        console=Console(stderr=True),
        disable=not show_progress,
    )
    for layer in bar:
        manifest = write_layer(out_dir, layer, make_layer(layer), manifest)
    return manifest


def full_matrices(full: FullExpert) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float32]], ...]:
    """(w13 [2I, H], w2 [H, I]) as float32."""
    w1, w3, w2 = (to_float32(w, full.dtype) for w in (full.w1, full.w3, full.w2))
    return np.concatenate([w1, w3]), w2


def _resume(out_dir: Path, manifest: Manifest) -> Manifest:
    """The manifest to go on with: a fresh one, or the one in out_dir less the layers whose files are not whole."""
    if not (out_dir / MANIFEST).exists():
        write_manifest(out_dir, manifest)
        return manifest
    present = read_manifest(out_dir)
    if msgspec.structs.replace(present, layers={}) != manifest:
        raise ConfigError(
            f"{out_dir} already holds replicas of another model or made with other settings: "
            "choose another output directory, or delete that one"
        )
    whole = {}
    for layer in present.layers:
        try:
            check_layer_file(out_dir, int(layer), present, check_contents=True)
        except (ReplicaError, OSError):
            continue
        whole[layer] = present.layers[layer]
    return msgspec.structs.replace(present, layers=whole)
