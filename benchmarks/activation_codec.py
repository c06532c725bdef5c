"""How small do activations become on their way to a host CPU or an expander, and what does that lose?

    python benchmarks/activation_codec.py [--model models/tiny-mixtral] [--sequences 2] [--bits 8 6 5 4 3]

Runs the model on held-out text and records what enters each MoE layer's experts (a row once per chosen expert) and what
comes back. Per width: bytes over 16-bit bytes for messages of 1, 16 and 256 rows, with and without a compressor behind
the bit planes; energy of the error over energy of the values; the same of an expert's result when both ways are packed,
and that in units of what 1-bit weights lose there, which is the unit of replay's losses. Last: nats per token when all
pairs of the model go both ways packed, paired by sequence. `--sample FILE` keeps a few recorded rows (.npz): a test
measures them again. Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from packed_activations import ActivationCodec, decode, relative_error
from quality import MODEL, MixedExperts, MixedModel, held_out_sequences, replicas_of
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.store import ExpertStore
from ndp_device.widths import FULL_PRECISION_BITS

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measured import Measurement, add_json_option

MESSAGES = (1, 16, 256)
SAMPLE_ROWS = 32  # per layer


class PackedExperts(MixedExperts):
    """MixedExperts whose pairs go both ways through a codec; without one it records what would go."""

    codec: ActivationCodec | None = None

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        self.routed = ids, gates
        y = torch.zeros_like(x)
        sent, back, coarse = (
            torch.zeros_like(x),
            torch.zeros(*ids.shape, x.shape[1]),
            torch.zeros(*ids.shape, x.shape[1]),
        )
        sent = self.packed(x)
        for expert in range(self.num_experts):
            rows, slots = torch.where(ids == expert)
            back[rows, slots] = self.result(expert, FULL_PRECISION_BITS, sent[rows])
            if self.codec is None:
                coarse[rows, slots] = self.result(expert, 1, x[rows])
        if self.codec is None:
            self.recorded = x.numpy(), back.flatten(0, 1).numpy(), coarse.flatten(0, 1).numpy(), ids.numpy()
        flat = self.packed(back.flatten(0, 1)).view(back.shape)
        y += (flat * gates[..., None]).sum(dim=1)
        return y

    def result(self, expert: int, bits: int, x: Tensor) -> Tensor:
        w13, w2 = self.weights[expert, bits]
        gate, up = (x @ w13.T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ w2.T

    def packed(self, values: Tensor) -> Tensor:
        return values if self.codec is None else torch.from_numpy(decode(self.codec.encode(values.numpy())))


def ratios(codec: ActivationCodec, values: list[NDArray[np.float32]]) -> list[float]:
    """Mean over the layers' messages of so many rows, at most 32 messages each."""
    out = []
    for rows in MESSAGES:
        messages = [layer[at : at + rows] for layer in values for at in range(0, len(layer) - rows + 1, rows)]
        some = messages[:: max(len(messages) // 128, 1)]
        out.append(round(float(np.mean([codec.ratio(message) for message in some])), 4))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--sequences", type=int, default=2, help="per domain, of 512 tokens")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 6, 5, 4, 3])
    parser.add_argument("--sample", type=Path, metavar="FILE", help="keep some recorded rows of each layer")
    add_json_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measurement = Measurement(__doc__)
    store = ExpertStore(arguments.model, replicas_of(arguments.model), kernel=ReferenceKernel())
    model = MixedModel(arguments.model, store)
    model.experts = [PackedExperts(store, layer) for layer in range(store.shape.num_layers)]
    for block, experts in zip(model.model.model.layers, model.experts, strict=True):
        block.mlp.experts = experts
    tokens = torch.cat(list(held_out_sequences(arguments.model, arguments.sequences).values()))
    model.prefill(tokens)
    plain = model.decode(None)
    sent, back, coarse, ids = (
        list(part) for part in zip(*(experts.recorded for experts in model.experts), strict=True)
    )
    if arguments.sample is not None:
        rows = np.linspace(0, len(sent[0]) - 1, SAMPLE_ROWS).astype(int)
        keep = {
            "sent": np.stack([layer[rows] for layer in sent]),
            "back": np.stack(
                [layer.reshape(len(x), -1, x.shape[1])[rows, 0] for layer, x in zip(back, sent, strict=True)]
            ),
        }
        np.savez_compressed(arguments.sample, **{name: values.astype(np.float16) for name, values in keep.items()})
    table = Table(
        title=f"{arguments.model.name}: {len(sent[0])} decode rows x {len(sent)} layers, hidden size {sent[0].shape[1]}"
    )
    for heading in (
        "bits",
        "16-bit bytes, 1 / 16 / 256 rows in",
        "out",
        "error in",
        "error out",
        "both ways",
        "in units of 1-bit weights",
        "nats per token",
    ):
        table.add_column(heading, justify="right")
    figures = {}
    one_bit = float(np.mean([relative_error(whole, rough) for whole, rough in zip(back, coarse, strict=True)]))
    for bits in arguments.bits:
        codec = ActivationCodec(bits)
        errors = [np.mean([relative_error(x, decode(codec.encode(x))) for x in side]) for side in (sent, back)]
        both = []
        for experts, x, whole, chosen in zip(model.experts, sent, back, ids, strict=True):
            packed = torch.from_numpy(decode(codec.encode(x)))
            result = torch.zeros(*chosen.shape, x.shape[1])
            for expert in range(experts.num_experts):
                rows, slots = torch.where(torch.from_numpy(chosen) == expert)
                result[rows, slots] = experts.result(expert, FULL_PRECISION_BITS, packed[rows])
            both.append(relative_error(whole, decode(codec.encode(result.flatten(0, 1).numpy()))))
            experts.codec = codec
        model.prefill(tokens)
        lost = model.decode(None) - plain
        for experts in model.experts:
            experts.codec = None
        figure = {
            "ratio_in": ratios(codec, sent),
            "ratio_out": ratios(codec, back),
            "ratio_in_without_compressor": ratios(ActivationCodec(bits, deflate=False), sent),
            "ratio_out_without_compressor": ratios(ActivationCodec(bits, deflate=False), back),
            "error_in": float(errors[0]),
            "error_out": float(errors[1]),
            "error_both_ways": float(np.mean(both)),
            "in_units_of_1_bit_weights": float(np.mean(both)) / one_bit,
            "nats_per_token": float(lost.mean()),
            "nats_standard_error": float(lost.std(ddof=1) / np.sqrt(len(lost))),
        }
        figures[str(bits)] = figure
        table.add_row(
            str(bits),
            " / ".join(f"{ratio:.3f}" for ratio in figure["ratio_in"]),
            " / ".join(f"{ratio:.3f}" for ratio in figure["ratio_out"]),
            *(
                f"{figure[name]:.2e}"
                for name in ("error_in", "error_out", "error_both_ways", "in_units_of_1_bit_weights")
            ),
            f"{figure['nats_per_token']:+.5f} ± {figure['nats_standard_error']:.5f}",
        )
    Console(width=160).print(table)
    print(f"1-bit weights: error {one_bit:.3f} of the result's energy")
    summary = {"model_digest": store.model_digest, "rows": len(sent[0]), "one_bit_error": one_bit, "by_bits": figures}
    measurement.end(summary, arguments.json)


if __name__ == "__main__":
    main()
