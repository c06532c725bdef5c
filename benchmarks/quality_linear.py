"""What do linear layers at 8 or 4 bits ('linear_bits') cost on held-out text, alone and beside cold experts?

    python benchmarks/quality_linear.py [--replicas DIR] [--sequences 16] [--avg-bits 4 3]

As quality.py, with transformers' attention projections and output matrix replaced by what the engine runs: the same
quantization, the same kernel, prompts included. Every row is compared with full precision on the same sequences: mean
of the paired differences of nats per token, and its standard error. Experts: full precision, or all of them cold at
some bits on average, by the default rule. float32. Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import measured
import numpy as np
import torch
from numpy.typing import NDArray
from quality import MODEL, Cell, MixedModel, held_out_sequences, loss_tables, mean_and_error, plan_bits, replicas_of
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ndp_device.kernels.native import NativeKernel
from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.integration.linear_layers import quantize
from vllm_ndp.planning.importance import ImportanceScore


class QuantizedLinear(torch.nn.Module):
    """One linear layer as the engine runs it."""

    def __init__(self, kernel: NativeKernel, linear: torch.nn.Linear, bits: int) -> None:
        super().__init__()
        matrix, self.error = quantize(linear.weight.data.bfloat16(), bits)
        self.kernel, self.prepared = kernel, kernel.prepare_matrix(matrix)

    def forward(self, x: Tensor) -> Tensor:
        y = self.kernel.multiply(x.reshape(-1, x.shape[-1]).numpy(), self.prepared)
        return torch.from_numpy(y).reshape(*x.shape[:-1], -1)


def quantize_linears(model: torch.nn.Module, bits: int) -> list[float]:
    """In place; the relative error of each layer's weights."""
    kernel, found = NativeKernel(threads=1), []
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, torch.nn.Linear) and name in ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head"):
                setattr(parent, name, QuantizedLinear(kernel, layer, bits))
                found.append(getattr(parent, name).error)
    return found


def measure(
    model: MixedModel, sequences: list[Tensor], avg_bits: list[float], replicas: Path
) -> list[NDArray[np.float64]]:
    """nll of every sequence [N]: experts in full precision, then cold at each average."""
    losses, rows = loss_tables(replicas), [[] for _ in range(1 + len(avg_bits))]
    for tokens in sequences:
        prompts = model.prefill(tokens)
        rows[0].append(model.decode(None))
        nobody = ImportanceScore.from_weights(np.ones(prompts[0].counts.shape))
        for row, bits in zip(rows[1:], avg_bits, strict=True):
            cell = Cell(bits, 0, "relative", "prefill")
            row.append(model.decode(np.stack([plan_bits(cell, one, one, nobody, losses) for one in prompts])))
    return [np.concatenate(row) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--replicas", type=Path, help="default: those beside the model, else data-free ones")
    parser.add_argument("--sequences", type=int, default=16, help="per domain, of 512 tokens, the first 256 a prompt")
    parser.add_argument("--avg-bits", type=float, nargs="*", default=[4, 3])
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    measurement = measured.Measurement(str(__doc__))
    torch.set_num_threads(1)
    replicas = arguments.replicas or replicas_of(arguments.model)
    store = ExpertStore(arguments.model, replicas, kernel=ReferenceKernel())
    sequences = list(held_out_sequences(arguments.model, arguments.sequences).values())
    table, rows, full = Table(title="nats above full precision"), [], None
    for column in ("linear layers", "experts", "nats", "standard error", "error of weights"):
        table.add_column(column, justify="right")
    for linear_bits in (16, 8, 4):
        model = MixedModel(arguments.model, store)
        errors = quantize_linears(model.model, linear_bits) if linear_bits < 16 else [0.0]
        found = measure(model, sequences, arguments.avg_bits, replicas)
        full = found[0] if full is None else full
        for experts, nll in zip([16, *arguments.avg_bits], found, strict=True):
            delta, error = mean_and_error(nll - full)
            row = {"linear_bits": linear_bits, "expert_bits": experts, "delta_nll": round(delta, 5)}
            row |= {"standard_error": round(error, 5), "weight_error": round(float(np.mean(errors)), 5)}
            rows.append(row)
            table.add_row(*map(str, row.values()))
    Console(width=100).print(table)
    measurement.end(
        {"sequences": len(full), "full_precision_nll": round(float(full.mean()), 4), "rows": rows}, arguments.json
    )


if __name__ == "__main__":
    main()
