"""How much do replicas and their loss table depend on the text they are calibrated with?

    python benchmarks/calibration_sensitivity.py --layers 1

Calibrates some layers of the bundled model with several texts and asks of each: do its losses rank the experts as those
of the largest mixture do (Spearman, 2 bits); how many experts get other bits when a budget of 2.5 bits on average is
dealt by losses; and what do its 2-bit replicas lose on text of every domain that no calibration saw (relative output
error, mean over experts: no logits are computed here). Sources: the bundled mixture in several sizes, each domain alone
(the first half of its evaluation file; the second half is what is tested), and German, the one other language.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import measured
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from ndp_device.calibration import calibrated
from ndp_device.calibration.build import TRACK_WEIGHTS
from ndp_device.calibration.loss_table import expert_losses
from ndp_device.calibration.streamed import StreamedForward, load_without_experts
from ndp_device.calibration.text import CalibrationText
from ndp_device.replicas.checkpoint import CheckpointExperts

MODEL = measured.ROOT / "models" / "tiny-mixtral"
DOMAINS = ("c", "dict", "german", "prose", "python", "xml")
LENGTH, HALF = 512, 24
AVERAGE_BITS = 2.5
CPU = torch.device("cpu")
Losses = NDArray[np.float64]


class Study:
    """The bundled model, its layers that are looked at, and what each text sends to their experts."""

    def __init__(self, num_layers: int) -> None:
        self.layers = list(range(1, 1 + num_layers))
        self._checkpoint = CheckpointExperts(MODEL)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        shape = self._checkpoint.shape
        self.experts = [
            [calibrated.FloatExpert(self._checkpoint.expert(layer, n), CPU) for n in range(shape.num_experts)]
            for layer in range(shape.num_layers)
        ]
        self._solve = calibrated.load_solver("nested", 64, TRACK_WEIGHTS)

    def inputs(self, text: Path, num_sequences: int) -> tuple[list[calibrated.RoutedInputs], int]:
        """Of each layer looked at, solver's sequences first; how many of them are held out."""
        drawn = CalibrationText.draw(text, self._tokenizer, num_sequences=num_sequences, sequence_length=LENGTH, seed=0)
        forward = StreamedForward(load_without_experts(MODEL, CPU), drawn.held_out_last, len(self.experts))
        found = []
        for layer, batch in enumerate(forward.layers()):
            if layer in self.layers:
                found.append(batch.inputs(slice(None)))
            if layer == self.layers[-1]:
                break
            for expert, weights in enumerate(self.experts[layer]):
                batch.answer(expert, weights, CPU)
        return found, drawn.num_held_out

    def calibrate(self, text: Path, num_sequences: int) -> tuple[Losses, list[list[calibrated.CalibratedExpert]]]:
        found, num_held_out = self.inputs(text, num_sequences)
        held_out = num_held_out * LENGTH
        done = [
            [
                calibrated.quantize_expert(
                    weights,
                    expert,
                    calibrated.RoutedInputs(inputs.hidden[:-held_out], inputs.expert_ids[:-held_out]),
                    calibrated.RoutedInputs(inputs.hidden[-held_out:], inputs.expert_ids[-held_out:]),
                    self._solve,
                )
                for expert, weights in enumerate(self.experts[layer])
            ]
            for layer, inputs in zip(self.layers, found, strict=True)
        ]
        return np.array([[one.relative_loss for one in layer] for layer in done]), done

    def error_on(self, done: list[list[calibrated.CalibratedExpert]], inputs: list[calibrated.RoutedInputs]) -> float:
        """Mean relative output error at 2 bits over the experts that the text reaches."""
        errors = []
        for layer, of_layer, seen in zip(self.layers, done, inputs, strict=True):
            for expert, one in enumerate(of_layer):
                rows = seen.of(expert)
                if len(rows) >= 32:
                    replicas = {2: one.replicas[2]}
                    errors.append(expert_losses(rows.numpy(), self.experts[layer][expert].full, replicas)[1][1])
        return float(np.mean(errors))


def ranks(values: Losses) -> Losses:
    return np.argsort(np.argsort(values)).astype(np.float64)


def dealt_bits(losses: Losses) -> NDArray[np.int64]:
    """A bit at a time to the expert whose loss falls most, from 1 to at most 4, until the average is reached."""
    bits = np.ones(len(losses), np.int64)
    while bits.mean() < AVERAGE_BITS:
        each = np.arange(len(bits))
        gain = losses[each, bits - 1] - losses[each, bits.clip(max=3)]
        bits[np.where(bits < 4, gain, -1).argmax()] += 1
    return bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1, help="how many of layers 1 to 3")
    parser.add_argument("--sizes", type=int, nargs="*", default=[16, 64, 256], help="sequences of the mixture")
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    measurement = measured.Measurement(str(__doc__))
    study = Study(arguments.layers)
    with tempfile.TemporaryDirectory() as temporary:
        halves = {}
        for domain in DOMAINS:
            text = (MODEL / "eval" / f"{domain}.txt").read_text()
            for half, part in (("first", text[: len(text) // 2]), ("second", text[len(text) // 2 :])):
                halves[domain, half] = Path(temporary) / f"{domain}-{half}.txt"
                halves[domain, half].write_text(part)
        tests = {domain: study.inputs(halves[domain, "second"], 8)[0] for domain in DOMAINS}
        sources = {f"mixture, {n}": (MODEL / "calibration.txt", n) for n in sorted(arguments.sizes, reverse=True)}
        sources |= {f"{domain} alone, {HALF}": (halves[domain, "first"], HALF) for domain in DOMAINS}
        rows: dict[str, Any] = {}
        reference: Losses | None = None
        for name, (text, num_sequences) in sources.items():
            losses, done = study.calibrate(text, num_sequences)
            flat = losses.reshape(-1, 4)
            if reference is None:
                reference = flat
            rows[name] = {
                "fewest_tokens": min(one.num_tokens for layer in done for one in layer),
                "rank_correlation": round(float(np.corrcoef(ranks(flat[:, 1]), ranks(reference[:, 1]))[0, 1]), 3),
                "experts_with_other_bits": int((dealt_bits(flat) != dealt_bits(reference)).sum()),
                "error_2_bits": {domain: round(study.error_on(done, seen), 4) for domain, seen in tests.items()},
            }
            print(name, rows[name], flush=True)
    figures = {"layers": study.layers, "experts": len(study.experts[0]), "sequence_length": LENGTH, "sources": rows}
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
