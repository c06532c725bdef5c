"""The jobs that make replicas: from the weights alone, and from text. Checks what is asked.

Other files quantize a layer: data_free.py from the weights alone, calibrated.py from text. job.py writes layers, and
goes on where it was stopped. Only jobs with text import torch and transformers.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from ndp_device.calibration import data_free
from ndp_device.calibration.job import JobProgress, KeptExperts, Work, run_job, say
from ndp_device.checkpoint.files import model_digest
from ndp_device.checkpoint.names import DTYPES
from ndp_device.common import machine_memory
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape
from ndp_device.common.widths import BYTE_BITS, REPLICA_WIDTHS, WIDTHS, default_group_size
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import WITHOUT_TOKENS, LayerReplicas, Manifest, ReplicaFiles, write_manifest

if TYPE_CHECKING:
    import torch

    from ndp_device.calibration.calibrated import RoutedInputs
    from ndp_device.calibration.streamed import RoutedBatch
    from ndp_device.calibration.text import CalibrationText

TRACK_WEIGHTS = {1: 0.3, 2: 1.0, 3: 2.0, 4: 4.0}
"""Weight of an error at each width in a nested container. Low widths weigh more, because they lose most by nesting."""

_TOKENS_PER_EXPERT = 32
"""Mean number of calibration tokens per expert. With fewer, most experts would be quantized against their layer
alone."""

DeviceName = Literal["auto", "cpu", "cuda"]
SolverName = Literal["nested", "independent", "auto-gptq"]
"""nested: one code for all widths; independent: our GPTQ at every width alone; auto-gptq: that library's, likewise."""

Effort = Literal["fast", "default", "best"]


def build_data_free(
    model_dir: Path,
    out_dir: Path,
    *,
    bits: Sequence[int] = WIDTHS,
    group_size: int | None = None,
    show_progress: bool = True,
) -> Manifest:
    """Nested replicas from the weights alone, at the speed in docs/replica-format.md; continues an interrupted build.

    Their loss table is a proxy: output error on unit normal rows times the weight of the layer's norm, not on text. A
    large expert is probed on part of its intermediate units.
    """
    checkpoint = CheckpointExperts(model_dir)
    bits = _checked_bits(bits)
    track_weights = {width: TRACK_WEIGHTS[width] for width in bits if width in WIDTHS}
    group_size = _checked_group_size(group_size, checkpoint.shape)
    probe: dict[str, str | int | float] = {
        "inputs": "unit normal times the norm's weight",
        "rows": data_free.PROBE_ROWS,
    }
    units = data_free.num_probe_units(checkpoint.shape.intermediate_size, group_size)
    if units < checkpoint.shape.intermediate_size:
        probe["units"] = units
    manifest = Manifest(
        activation=checkpoint.layout.activations,
        biases=checkpoint.layout.has_bias,
        model=checkpoint.shape,
        model_digest=model_digest(model_dir),
        container="nested",
        bits=bits,
        group_size=group_size,
        source="data-free",
        solver={"name": "least-squares", "track_weights": list(track_weights.values())},
        calibration=probe,
    )

    def make_layer(layer: int, progress: JobProgress) -> LayerReplicas:
        made = data_free.quantize_layer(
            checkpoint, layer, manifest.group_size, track_weights, with_bytes=BYTE_BITS in bits, advance=progress.made
        )
        checkpoint.check(layer)  # nothing may be made of a checkpoint that was cut short meanwhile
        return made

    return run_job(out_dir, manifest, make_layer, show_progress=show_progress)


def build_calibrated(
    model_dir: Path,
    out_dir: Path,
    calibration_file: Path,
    *,
    bits: Sequence[int] | None = None,
    group_size: int | None = None,
    solver: SolverName = "nested",
    num_sequences: int = 128,
    sequence_length: int = 512,
    seed: int = 0,
    shrink: float = 0.0,
    effort: Effort = "default",
    device_name: DeviceName = "auto",
    memory_bytes: int | None = None,
    show_progress: bool = True,
) -> Manifest:
    """Replicas by GPTQ against text, with a loss table from the eighth of the text that the solver did not see.

    The model is never in memory: its experts are read one at a time, each once per pass, and quantized where the pass
    needs them. A job that is continued only passes through the layers that are done.

    Experts of a layer are made side by side, as many as there are cores and memory for (memory.side_by_side):
    memory_bytes, or most of what the machine has.

    shrink: how far the solver distrusts the text (calibrated.load_solver); for subjects that the text does not cover.
    effort: time against loss, gptq.SWEEPS; what each costs and gives: docs/log/calibration.md.
    """
    with importing():
        import torch
        import transformers.modeling_utils

        from ndp_device.calibration import auto_gptq, calibrated, gptq, memory, streamed
        from ndp_device.calibration.text import HELD_OUT_EVERY, CalibrationText, load_config, load_tokenizer

        transformers.AutoModelForCausalLM  # noqa: B018  # imports the most

    if solver not in get_args(SolverName):
        raise ConfigError(f"solver must be one of {', '.join(get_args(SolverName))}, got {solver!r}")
    bits = _checked_bits(bits or (auto_gptq.BITS if solver == "auto-gptq" else WIDTHS))
    if solver == "auto-gptq":
        if not set(bits) <= set(auto_gptq.BITS):
            raise ConfigError(f"auto-gptq makes replicas of {list(auto_gptq.BITS)} bits, got {list(bits)}: use nested")
        auto_gptq.load_gptq_class()
    if device_name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device on this machine: drop --device cuda, or say --device cpu")
    device = torch.device("cpu" if device_name == "cpu" or not torch.cuda.is_available() else "cuda")
    products = gptq.products_on(device)
    checkpoint = CheckpointExperts(model_dir)
    shape = checkpoint.shape
    group_size = _checked_group_size(group_size, shape)
    track_weights = {width: TRACK_WEIGHTS[width] for width in bits if width in WIDTHS}
    if not 0 <= shrink < math.inf:
        raise ConfigError(f"shrink must be 0 or more, got {shrink}")
    if effort not in gptq.SWEEPS:
        raise ConfigError(f"effort must be one of {', '.join(gptq.SWEEPS)}, got {effort!r}")
    sweeps = 0 if solver == "auto-gptq" else gptq.SWEEPS[effort]
    solve = calibrated.load_solver(
        solver, group_size, track_weights, sweeps, shrink=shrink, has_bytes=BYTE_BITS in bits
    )
    _refuse_quantized_beside(checkpoint)
    config = load_config(model_dir)  # before hours of work: torch can run what stands beside the experts
    text = CalibrationText.draw(
        calibration_file,
        load_tokenizer(model_dir),
        num_sequences=num_sequences,
        sequence_length=sequence_length,
        seed=seed,
    )
    num_sequences, sequence_length = text.token_ids.shape
    _refuse_few_tokens(num_sequences - text.num_held_out, sequence_length, shape)
    manifest = Manifest(
        activation=checkpoint.layout.activations,
        biases=checkpoint.layout.has_bias,
        model=shape,
        model_digest=model_digest(model_dir),
        container="nested" if solver == "nested" else "independent",
        bits=bits,
        group_size=group_size,
        source="calibrated",
        solver={
            "name": solver,
            "damp": calibrated.DAMP,
            "sweeps": sweeps,
            "track_weights": list(track_weights.values()) if solver == "nested" else [],
            "shrink": shrink,
        },
        calibration={
            "file": text.file_name,
            "blake2b": text.blake2b,
            "num_sequences": num_sequences,
            "sequence_length": sequence_length,
            "held_out_every": HELD_OUT_EVERY,
            "seed": seed,
            "device": device.type,
        },
    )
    peak = memory.peak_memory(
        checkpoint,
        num_tokens=num_sequences * sequence_length,
        between_layers=streamed.bytes_between_layers(config, shape.hidden_size, sequence_length),
        group_size=group_size,
        num_widths=len(bits),
        num_tracks=len(track_weights) if solver == "nested" else 1,
        num_planes=sum(bits),
        item=products.itemsize if checkpoint.layout.dtype == "bfloat16" else 4,
    )
    cores = len(os.sched_getaffinity(0))
    alone = device.type != "cpu" or solver == "auto-gptq"  # which patches torch while it runs
    peak = memory.side_by_side(peak, 1 if alone else min(cores, shape.num_experts), memory_bytes)
    if show_progress:
        say(f"calibration of {shape.name} on {device.type} needs {peak} beside the mapped checkpoint")
    work = Work(
        shape,
        num_sequences * sequence_length,
        sequence_length,
        num_tracks=len(track_weights),
        num_widths=len(bits),
        sweeps=sweeps,
    )
    passing: Iterator[tuple[int, RoutedBatch]] | None = None
    for_solver = num_sequences - text.num_held_out
    kept = KeptExperts(out_dir, manifest)

    def parts_of(batch: RoutedBatch) -> tuple[RoutedInputs, RoutedInputs]:
        return batch.inputs(slice(None, for_solver)), batch.inputs(slice(for_solver, None))

    def float_expert(layer: int, expert: int) -> calibrated.FloatExpert:
        full = checkpoint.expert(layer, expert)
        checkpoint.refuse_large(layer, expert, full)
        weights = calibrated.FloatExpert(full, device, products)
        checkpoint.release()
        return weights

    def make_layer(layer: int, progress: JobProgress) -> LayerReplicas:
        nonlocal passing

        def did(amount: Callable[[Work], float]) -> None:
            progress.did(amount(work))

        def answers_of(weights: calibrated.FloatExpert, expert: int) -> torch.Tensor:
            answers = torch.cat([weights.answers(part, expert) for part in (inputs, held_out)])
            progress.did(len(answers) * work.answers)
            return answers

        if passing is None:
            progress.expect(work.job(layer, len(kept)))
            model = streamed.load_without_experts(model_dir, device, products)
            forward = streamed.StreamedForward(model, text.held_out_last, shape)
            passing = enumerate(forward.layers())
        for index, batch in passing:
            progress.did(work.passing)
            if index == layer:
                break
            inputs, held_out = parts_of(batch)
            for expert in range(shape.num_experts):  # a layer that is done: its answers only
                batch.add(expert, answers_of(float_expert(index, expert), expert))
        inputs, held_out = parts_of(batch)
        inputs.layer_moment.sum()  # before experts ask for it at the same time

        def made(expert: int) -> tuple[LayerReplicas, torch.Tensor]:
            weights = float_expert(layer, expert)
            if (already := kept.of(layer, expert)) is not None:
                return already, answers_of(weights, expert)
            new, answers = calibrated.quantize_expert(weights, expert, inputs, held_out, solve, did)
            checkpoint.check(layer)
            progress.made()
            return kept.keep(layer, expert, new), answers

        def added(expert: int, of_expert: tuple[LayerReplicas, torch.Tensor]) -> LayerReplicas:
            """No name holds its answers while the next one is made: 0.15 GB at Mixtral's width."""
            batch.add(expert, of_expert[1])
            return of_expert[0]

        experts = range(shape.num_experts)
        with calibrated.side_by_side(peak.experts, cores // peak.experts) as threads:
            return LayerReplicas.of(list(map(added, experts, threads.map(made, experts))))

    made = run_job(out_dir, manifest, make_layer, show_progress=show_progress)
    passing = None  # and with it the model and the sequences
    machine_memory.give_memory_back()
    return made if made.is_weighed else weigh(model_dir, out_dir, text, device)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Takes half of the processor's seconds from importing transformers.

    It makes a million objects that stay: the garbage collector would look through them again and again, the last time
    when the process ends. It imports packages for functions that a calibration has no use for.
    """
    if "torch" not in sys.modules:
        # else threads without work spin, and on a busy machine keep others from theirs: 71 core seconds instead of 19
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    first = "transformers" not in sys.modules  # else it knows by now what is installed
    unused = ["sklearn", "scipy"] if torch.cuda.is_available() else ["sklearn", "scipy", "triton"]
    hidden = [name for name in unused if first and name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: as if it were not installed
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if first and not sys.modules.get("triton"):  # which complains of what it finds alive at the end
            gc.freeze()
        if collects:
            gc.enable()
        for name in hidden:
            del sys.modules[name]


def weigh(model_dir: Path, replicas_dir: Path, text: CalibrationText, device: torch.device) -> Manifest:
    """Measure what a loss in each layer does to the model's answer (weighing.py); write it into the manifest.

    With it, how many experts the text never reached. One more pass through the model, of the sequences held out.
    """
    from ndp_device.calibration import streamed, weighing

    checkpoint = CheckpointExperts(model_dir)
    _refuse_quantized_beside(checkpoint)
    files = ReplicaFiles(replicas_dir, model_digest=model_digest(model_dir))
    tokens = text.held_out_last[-text.num_held_out :]
    branching = weighing.num_branching(len(text.token_ids), checkpoint.shape.num_layers, len(tokens))
    model = streamed.load_without_experts(model_dir, device)
    nats = weighing.nats_per_loss(model, tokens, branching, checkpoint, files)
    mean = max(float(nats.mean()), 1e-30)
    without_tokens = sum(int((files.calibration_tokens(n) == 0).sum()) for n in range(checkpoint.shape.num_layers))
    manifest = msgspec.structs.replace(
        files.manifest,
        layer_weights=tuple(float(f"{one / mean:.4g}") for one in nats),
        nats_per_loss=float(f"{mean:.4g}"),
        calibration=files.manifest.calibration | {WITHOUT_TOKENS: without_tokens},
    )
    write_manifest(replicas_dir, manifest)
    return manifest


def _refuse_quantized_beside(checkpoint: CheckpointExperts) -> None:
    for name, info in checkpoint.tensors.items():
        if info.dtype not in DTYPES and not info.dtype.startswith(("I64", "BOOL")):
            raise ConfigError(
                f"calibration runs in torch what stands beside the experts, and {name} of {checkpoint.shape.name} is "
                f"stored as {info.dtype}: leave out --calibration, or give the linear layers in bfloat16"
            )


def _refuse_few_tokens(num_sequences: int, sequence_length: int, shape: ModelShape) -> None:
    each = num_sequences * sequence_length * shape.top_k / shape.num_experts
    if each < _TOKENS_PER_EXPERT:
        wanted = -(-_TOKENS_PER_EXPERT * shape.num_experts // (shape.top_k * sequence_length))
        raise ConfigError(
            f"{num_sequences} sequences of {sequence_length} tokens send each of the {shape.num_experts} experts of a "
            f"layer {each:.0f} tokens on average, and fewer than {_TOKENS_PER_EXPERT} tell nothing of it: "
            f"give --samples {-(-wanted * 8 // 7)} or more, or no --calibration"
        )


def _checked_bits(bits: Sequence[int]) -> tuple[int, ...]:
    if not set(bits) & set(WIDTHS) or not set(bits) <= set(REPLICA_WIDTHS):
        raise ConfigError(
            f"bits must be a selection of {list(WIDTHS)}, with {BYTE_BITS} beside them or not, got {list(bits)}"
        )
    return tuple(sorted(set(bits)))


def _checked_group_size(group_size: int | None, shape: ModelShape) -> int:
    if shape.hidden_size % 8 or shape.intermediate_size % 8:
        raise ConfigError(
            f"experts of {shape.name} cannot be quantized: rows are stored as bits of whole bytes, so hidden size and "
            f"intermediate size must be multiples of 8, got {shape.hidden_size} and {shape.intermediate_size}; "
            'serve this model with "cold_precision": "full"'
        )
    if group_size is None:
        return default_group_size(shape.hidden_size, shape.intermediate_size)
    if group_size < 8 or group_size % 8:
        raise ConfigError(f"group_size must be a multiple of 8, got {group_size}")
    return group_size
