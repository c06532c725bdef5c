"""How well measured times of GPU kernels foretell a layer that was held out.

Every shape (a layer of experts, a matrix, an attention of so many heads) is taken out with all its rows, and asked for.
An unseen model's shards are taken out together.

Then whole tokens of published engines (engines.csv). A step is all layers and the head. Experts count at the width that
is published, all other weights at 16 bits; products of FP8 were measured to take as long. Where a row says that other
weights are codes, a decode step takes less by the bytes that they save. A step of n requests touches as many experts as
n even draws do on average. TensorRT-LLM's experts lie whole on one GPU each and run in kernels of its own: their layer
takes what was measured of it, under routing as skewed as NVIDIA's own estimates have it.
In a run each answer has one prompt of every other request in it, or of every request where its own counts. Requests are
half way through their answers. No constant is fitted to these rows. A row whose `why` begins with "apart" was run under
conditions that the model does not have; it is computed and shown, and counted by itself.
docs/timing.md: what a layer has beside the clock's kernels. Sampling and what the host does between steps are nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.decoder_layers import Latent
from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import PS_PER_S, ceil_div
from vllm_ndp.cost_model.gpu_timing import GpuModel
from vllm_ndp.cost_model.silicon import BITS, CARDS, EXPERTS, Kernel, Layer, fitted, kernel, product_ps, spread_ps
from vllm_ndp.lab.reproduce import Reproduction, Row

LAYERS = tuple(name for names in EXPERTS.values() for name in names)
ENGINES = Path(__file__).with_name("engines.csv")
NORMS = 2
"""Of a layer. No table has them, nor the rotary embedding but that of latent attention."""
SMALL_KERNEL_PS, SMALL_KERNEL_PERCENT = 3_000_000, 80
"""What each takes without data, and its share of the memory's rate: the file of each card in aiconfigurator-core 0.12.0
(`systems/*.yaml`) has these two numbers."""
APART = "; apart: "
_ONE = 1 << 16


Alike = Callable[[tuple[int, ...]], object]
"""Shapes of which it says the same are held out together."""


def _errors(of: Kernel, alike: Alike, foretold: Callable[[int, NDArray[np.bool_]], float]) -> NDArray[np.float64]:
    """Relative, of every row, by all rows that are not alike. Empty where nothing is left."""
    kinds = [alike(shape) for shape in of.groups]
    among = [np.array([other != kind for other in kinds]) for kind in kinds]
    took = of.took_ps.tolist()
    return np.array([abs(foretold(row, there) / took[row] - 1) for row, there in enumerate(among) if there.any()])


def held_out(of: Kernel, alike: Alike) -> NDArray[np.float64]:
    return _errors(
        of, alike, lambda row, among: of.ratio(tuple(of.sizes[row].tolist()), among) * int(of.base_ps[row]) / _ONE
    )


def layers_held_out(card: str, name: str, alike: Alike) -> NDArray[np.float64]:
    """The same of MoE layers, by what is fitted to them."""
    of, gpu = kernel(card, name), load_hardware(CARDS[card][0]).gpu
    fits: dict[tuple[int, ...], Layer] = {}

    def foretold(row: int, among: NDArray[np.bool_]) -> float:
        shape = of.groups[row]
        if shape not in fits:
            fits[shape] = fitted(of, shape, BITS[name], (gpu.hbm_bytes_per_s, gpu.flops_per_s), among)
        layer, pairs = fits[shape], shape[2] << of.places[row]
        touched = min(pairs, shape[3])
        return layer.fixed_ps + layer.growing_ps(touched, pairs, touched * layer.expert_bytes)

    return _errors(of, alike, foretold)


def _rows(card: str, name: str, what: str, errors: NDArray[np.float64]) -> list[Row]:
    if not len(errors):
        return []
    said = f"{len(errors)} rows; {what} held out"
    return [
        Row(f"{card} {name}", quantity, "%", None, 100 * float(np.quantile(errors, q)), said)
        for quantity, q in (("median error", 0.5), ("p95 error", 0.95))
    ]


def between_ps(gpu: GpuModel, rows: int) -> int:
    """What a layer's kernels take that the simulated clock leaves out; every GPU runs all of them."""
    shape, card = gpu.shape, gpu.hardware.gpu
    moved = 4 * rows * shape.hidden_size * shape.dtype_bytes  # the row and the residual, both ways
    small = SMALL_KERNEL_PS + ceil_div(moved * 100 * PS_PER_S, SMALL_KERNEL_PERCENT * card.hbm_bytes_per_s)
    rates = card.hbm_bytes_per_s, card.flops_per_s
    kernels = NORMS + (not isinstance(shape.decoder[-1].attention, Latent))
    return kernels * small + product_ps(gpu.card, shape.num_experts, shape.hidden_size, rows, rates)


def engine_ps(gpu: GpuModel, size: int, rows: int, before: tuple[int, ...], head_rows: int, spread: str = "") -> int:
    """All layers and the head, with all experts of `size` bytes in the GPU's memory. spread: the kernel, if they lie
    whole on the GPUs."""
    shape = gpu.shape
    if spread:
        sizes = shape.hidden_size, shape.intermediate_size, shape.top_k, shape.num_experts, gpu.num_gpus
        experts = spread_ps(gpu.card, spread, sizes, rows)
    else:
        touched = round(shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** rows))
        experts = gpu.experts_ps(touched, rows * shape.top_k, touched * size)
    layer = experts + gpu.shared_ps(rows) + between_ps(gpu, rows)
    return sum(before) + shape.num_layers * layer + gpu.head_ps(head_rows, head_rows)


def published_engines() -> list[tuple[Row, float]]:
    """Rates in tokens/s of all requests, each with the share that ours may be off."""
    rows = []
    lines = [line for line in ENGINES.read_text().splitlines() if not line.startswith("#")]
    for given in csv.DictReader(lines):
        shape = public_shape(given["model"])
        bits, of = (int(part) for part in given["weight_bits"].split("/"))
        size = ceil_div(shape.weights_per_expert * bits, of * 8)
        own = given["kernel"]  # of the engine, where the clock's is another one
        decode, spread = ("decode", own) if own.endswith("-spread") else (own or "decode", "")
        gpu = GpuModel(load_hardware(given["card"]), shape, int(given["gpus"]), slot_bytes=size, decode=decode)
        prompt, answer, unit = int(given["prompt"]), int(given["answer"]), given["unit"]
        other_bits, of = (int(part) for part in given["other_bits"].split("/"))
        saved = (shape.beside_weights + shape.head_weights) * (16 * of - other_bits) // (of * 8)
        saved_ps = saved * PS_PER_S // (gpu.num_gpus * gpu.hardware.gpu.hbm_bytes_per_s)
        prompt_ps = 0
        if unit != "decode":
            seen = gpu.before_experts_ps(prompt, prompt, prompt * (prompt + 1) // 2, [(0, prompt)])
            prompt_ps = engine_ps(gpu, size, prompt, seen, 1, spread)
        for number, figure in zip(given["requests"].split(), given["figures"].split(), strict=True):
            requests = int(number)
            before = gpu.before_experts_ps(requests, requests * (prompt + answer // 2))
            took = engine_ps(gpu, size, requests, before, requests, spread) - saved_ps
            took += (requests - (unit == "ms")) * prompt_ps // max(answer, 1)
            rate = 1e3 * requests / float(figure) if unit == "ms" else float(figure)
            said = f"{given['gpus']} {given['card']}, {given['model']}, {given['weight_bits']} bits, "
            said += f"{prompt} + {answer} tokens, requests: {requests}" + f"; {given['why']}" * bool(given["why"])
            name = f"{given['engine']}, {given['source']}"
            row = Row(name, "decode", "tokens/s", rate, requests * PS_PER_S / took, said)
            rows.append((row, int(given["tolerance"]) / 100))
    return rows


def reproduce() -> Reproduction:
    def model(shape: tuple[int, ...]) -> object:
        """Shards of one model agree in all but how wide a shard is."""
        return shape[0], *shape[2:]

    rows: list[Row] = []
    cards: dict[str, dict[str, float]] = {}
    everything = []
    for card in CARDS:
        of_card = []
        for name in (*LAYERS, "gemm", "decode", "prefill", "latent"):
            of = kernel(card, name)
            if name in LAYERS:
                errors = layers_held_out(card, name, tuple)
                of_card.append(errors)
                rows += _rows(card, name, "all shards of its model", layers_held_out(card, name, model))
            else:
                errors = held_out(of, tuple if name == "gemm" else lambda shape: shape[1:])
            rows += _rows(card, name, f"{of.num_left_out} warm or disturbed; its shape", errors)
        layers = np.concatenate(of_card)
        everything.append(layers)
        rows += _rows(card, "all MoE layers", "their shape", layers)
        cards[card] = _said(layers)
    engines = [row for row, _ in published_engines()]
    rows += engines
    return Reproduction(
        "aiconfigurator-core 0.12.0: vLLM 0.24.0 kernels timed by NVIDIA",
        tuple(rows),
        (
            "targets: MoE layers whose shape is held out, median 10 % and p95 25 % on each card",
            "target: three engines within 20 %",
        ),
        {
            **_said(np.concatenate(everything)),
            "cards": cards,
            "engines within 20 %": within([row for row in engines if APART not in row.assumptions]),
            "apart, within 20 %": within([row for row in engines if APART in row.assumptions]),
        },
    )


def within(engines: list[Row]) -> dict[str, str]:
    """How many rows of each engine are within 20 %, of how many."""
    far: dict[str, list[float]] = {}
    for row in engines:
        far.setdefault(row.name.split(",")[0], []).append(abs(row.deviation or 0.0))
    return {engine: f"{sum(off <= 0.20 for off in each)} of {len(each)}" for engine, each in far.items()}


def _said(errors: NDArray[np.float64]) -> dict[str, float]:
    return {name: round(float(np.quantile(errors, q)), 4) for name, q in (("median", 0.5), ("p95", 0.95))}
