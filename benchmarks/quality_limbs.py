"""What does it cost on text to hold activations in 8 bits (one limb) instead of 15 (two), at each width of the experts?

    python benchmarks/quality_limbs.py [--model DIR] [--replicas DIR] [--sequences 16] [--bits 4 3 2 1] [--json FILE]

The sequences and prompts of quality.py; cold experts uniformly at one width, all of them or half (hot ones by the
prompt). Decode's experts run through the native kernel itself with two limbs and with one, and dequantized in float32.
A width's own loss is the rise over full precision with two limbs. The extra loss of one limb is the mean of paired
differences with its standard error. Safe: within two of these errors of zero, and below 5 % of the width's own loss.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import measured
import numpy as np
import torch
from numpy.typing import NDArray
from quality import MODEL, Cell, MixedModel, held_out_sequences, loss_tables, mean_and_error, plan_bits, replicas_of
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ndp_device.kernels.native import NativeKernel
from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.store import ExpertStore
from ndp_device.widths import FULL_PRECISION_BITS, LIMBS
from vllm_ndp.planning.importance import ImportanceScore

AT_MOST_OF_OWN = 0.05
Losses = NDArray[np.float64]


class KernelExperts(torch.nn.Module):
    """quality.MixedExperts with every pair of a layer through the native kernel."""

    def __init__(self, store: ExpertStore, layer: int, kernel: NativeKernel) -> None:
        super().__init__()
        self.kernel, self.num_experts = kernel, store.shape.num_experts
        self.widths = sorted(store.available(layer, 0))
        self.prepared = [store.get(layer, e, bits) for e in range(self.num_experts) for bits in self.widths]
        self.bits: Tensor | None = None
        self.routed: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        self.routed = ids, gates
        rows = torch.arange(len(x)).repeat_interleave(ids.shape[1])
        if self.bits is None:
            widths = torch.full_like(rows, FULL_PRECISION_BITS)
        else:
            widths = self.bits[rows // (len(x) // len(self.bits)), ids.flatten()]
        widths = torch.where(widths == 0, FULL_PRECISION_BITS, widths)
        index = ids.flatten() * len(self.widths) + torch.searchsorted(torch.tensor(self.widths), widths)
        y = self.kernel.execute(
            x.numpy(), self.prepared, rows.int().numpy(), index.int().numpy(), gates.flatten().float().numpy()
        )
        return torch.from_numpy(y)


class Arms:
    """One model whose experts can be those of any arm: float32, two limbs, one limb."""

    def __init__(self, model_dir: Path, replicas: Path) -> None:
        self.model = MixedModel(model_dir, ExpertStore(model_dir, replicas, kernel=ReferenceKernel()))
        self.of: dict[str, list[Any]] = {"float32": self.model.experts}
        for name, limbs in (("two limbs", 2), ("one limb", 1)):
            kernel = NativeKernel(dict.fromkeys(LIMBS, limbs), threads=1)
            store = ExpertStore(model_dir, replicas, kernel=kernel)
            self.of[name] = [KernelExperts(store, layer, kernel) for layer in range(store.shape.num_layers)]

    def use(self, name: str) -> None:
        self.model.experts = self.of[name]
        for block, experts in zip(self.model.model.model.layers, self.of[name], strict=True):
            block.mlp.experts = experts


def measure(arms: Arms, batches: list[Tensor], cells: list[Cell], losses: Any) -> dict[Cell, dict[str, Losses]]:
    """nll above full precision of each sequence, by cell and arm."""
    experts = arms.of["float32"]
    prior = ImportanceScore.from_weights(np.ones((len(experts), experts[0].num_experts)))
    parts: dict[Cell, dict[str, list[Losses]]] = {cell: {name: [] for name in arms.of} for cell in cells}
    for tokens in track(batches, "held-out domains", console=Console(stderr=True)):
        arms.use("float32")
        prompts = arms.model.prefill(tokens)
        full = arms.model.decode(None)
        for cell in cells:
            bits = np.stack([plan_bits(cell, prompt, prompt, prior, losses) for prompt in prompts])
            for name in arms.of:
                arms.use(name)
                parts[cell][name].append(arms.model.decode(bits) - full)
    return {cell: {name: np.concatenate(one) for name, one in by_arm.items()} for cell, by_arm in parts.items()}


def row_of(cell: Cell, losses: dict[str, Losses]) -> dict[str, Any]:
    own, own_error = mean_and_error(losses["two limbs"])
    extra, error = mean_and_error(losses["one limb"] - losses["two limbs"])
    of_float, _ = mean_and_error(losses["two limbs"] - losses["float32"])
    return {
        "bits": round(cell.avg_bits),
        "hot_experts": cell.hot_experts,
        "sequences": len(losses["two limbs"]),
        "own_loss": round(own, 5),
        "own_error": round(own_error, 5),
        "extra": round(extra, 6),
        "extra_error": round(error, 6),
        "part_of_own": round(extra / own, 4),
        "two_limbs_over_float32": round(of_float, 7),
        "safe": extra < 2 * error and extra < AT_MOST_OF_OWN * own,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="nats a token: loss with two limbs, and what one limb adds (standard errors)")
    for name in ("bits", "hot", "own loss", "one limb adds", "part of own", "safe"):
        table.add_column(name, justify="right")
    for row in rows:
        own = f"{row['own_loss']:.5f} ({row['own_error']:.5f})"
        extra = f"{row['extra']:+.6f} ({row['extra_error']:.6f})"
        place = str(row["bits"]), str(row["hot_experts"])
        table.add_row(*place, own, extra, f"{row['part_of_own']:+.2%}", str(row["safe"]))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--replicas", type=Path, help="default: those beside the model, else data-free ones")
    parser.add_argument("--sequences", type=int, default=16, help="per domain, of 512 tokens, the first 256 a prompt")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2, 1])
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    measurement = measured.Measurement(str(__doc__))
    torch.set_num_threads(1)
    replicas = arguments.replicas or replicas_of(arguments.model)
    arms = Arms(arguments.model, replicas)
    half = arms.of["float32"][0].num_experts // 2
    cells = [Cell(bits, hot, "uniform", "prefill") for bits in arguments.bits for hot in (0, half)]
    batches = list(held_out_sequences(arguments.model, arguments.sequences).values())
    found = measure(arms, batches, cells, loss_tables(replicas))
    rows = [row_of(cell, losses) for cell, losses in found.items()]
    print_table(rows)
    measurement.end({"model": arguments.model.name, "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
