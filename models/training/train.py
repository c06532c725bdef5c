"""Train one of the bundled models on the corpus that build_corpus.py wrote.

    python models/training/train.py [--model models/tiny-qwen3-moe] [--steps 5000] [--minutes 120]
    python models/training/train.py --model models/tiny-qwen3-moe --start models/tiny-qwen3-moe --out more
    python models/training/train.py --size larger --device cuda --windows 32 --minutes 9    109 M parameters

Every batch holds one window of each domain, or --windows of them. Muon (orthogonalised momentum) trains the experts
and the attention's value and output matrices; Adam the rest: Muon on queries and keys lets attention logits grow
without bound where a model does not normalise them, as Mixtral. The learning rate warms up, stays, then falls linearly
to zero; whichever of --steps and --minutes ends first ends the schedule, so that a slow machine still finishes well
(only a run that ends by steps can repeat).

MODEL/config.json says what is trained; its weights are not read. Goes on from OUT where a state lies there. --start
adds to a finished checkpoint, with new optimizers and a new schedule. OUT/checkpoint is a Hugging Face checkpoint in
bfloat16. Last line: JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from evaluate import MODEL, geometric_mean, held_out_tokens, perplexity
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "tiny_mixtral"

WINDOW_TOKENS = 512
MUON_RATE, ADAM_RATE, SLOW_RATE = 2.5e-3, 2e-3, 1e-3
MOMENTUM, ADAM_BETAS, WEIGHT_DECAY = 0.95, (0.9, 0.98), 0.1
WARMUP_STEPS, FLAT_PART, CLIP_NORM = 100, 0.25, 1.0
SIZES: dict[str, dict[str, int]] = {
    "bundled": {},
    "larger": {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64,
    },
}  # fmt: skip
"""What differs from the configuration of --model."""
SAVE_EVERY, LOOK_EVERY, LOOK_WINDOWS = 100, 250, 8


class Batches:
    """Batch n is a pure function of (corpus, seed, n): per domain, windows in an order drawn anew each epoch."""

    def __init__(self, corpus: Path, seed: int, windows: int = 1) -> None:
        """windows: of each domain in a batch."""
        files = sorted(corpus.glob("*.train.npy"))
        if not files:
            raise SystemExit(f"no *.train.npy in {corpus}: run build_corpus.py first")
        self.tokens = [np.load(path, mmap_mode="r") for path in files]
        self.seed, self.windows = seed, windows

    def __getitem__(self, step: int) -> Tensor:
        rows = []
        numbers = range(step * self.windows, (step + 1) * self.windows)
        for number, (domain, tokens) in itertools.product(numbers, enumerate(self.tokens)):
            num_windows = (len(tokens) - 1) // WINDOW_TOKENS
            epoch, index = divmod(number, num_windows)
            order = np.random.default_rng([self.seed, domain, epoch])
            shift = int(order.integers(len(tokens) - num_windows * WINDOW_TOKENS))
            start = int(order.permutation(num_windows)[index]) * WINDOW_TOKENS + shift
            rows.append(np.asarray(tokens[start : start + WINDOW_TOKENS], np.int64))
        return torch.from_numpy(np.stack(rows))


def orthogonalised(matrices: Tensor) -> Tensor:
    """[..., N, C] -> about the nearest matrix with all singular values 1 (five quintic Newton-Schulz steps)."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised per matrix and scaled to the size of an Adam step."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.parameters = parameters
        self.momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for name, parameter in self.parameters.items():
            momentum = self.momentum[name].mul_(MOMENTUM).add_(parameter.grad)
            update = parameter.grad + MOMENTUM * momentum
            if name.endswith("gate_up_proj"):  # two matrices of each expert lie in one tensor [E, 2I, H]
                update = update.unflatten(1, (2, -1))
            update = orthogonalised(update) * 0.2 * max(update.shape[-2:]) ** 0.5
            parameter.mul_(1 - rate * WEIGHT_DECAY).sub_(update.reshape(parameter.shape), alpha=rate)


class Adam:
    """Adam with decoupled weight decay on matrices; queries, keys, norms and routers learn at the slow rate."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.parameters = parameters
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in parameters.items()}

    @torch.no_grad()
    def step(self, part_of_rate: float, step: int) -> None:
        beta1, beta2 = ADAM_BETAS
        for name, parameter in self.parameters.items():
            rate = part_of_rate * (ADAM_RATE if "embed_tokens" in name else SLOW_RATE)
            first = self.first[name].lerp_(parameter.grad, 1 - beta1)
            second = self.second[name].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
            denominator = (second / (1 - beta2 ** (step + 1))).sqrt_().add_(1e-8)
            if parameter.ndim > 1:
                parameter.mul_(1 - rate * WEIGHT_DECAY)
            parameter.addcdiv_(first, denominator, value=-rate / (1 - beta1 ** (step + 1)))


def part_of_rate(step: int, progress: float) -> float:
    return min((step + 1) / WARMUP_STEPS, 1.0) * min((1 - progress) / (1 - FLAT_PART), 1.0)


class Run:
    """The model, both optimizers and how far they are; saved and restored without pickle."""

    def __init__(
        self,
        out: Path,
        seed: int,
        size: str = "bundled",
        device: str = "cpu",
        *,
        model: Path = MODEL,
        start: Path | None = None,
    ) -> None:
        self.out, self.step, self.elapsed_s, self.log = out, 0, 0.0, []
        torch.manual_seed(seed)
        if start is None:
            config = AutoConfig.from_pretrained(model, **SIZES[size])
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).to(device)
        self.model.set_experts_implementation("grouped_mm")
        named = dict(self.model.named_parameters())
        muon = {n for n in named if n.endswith(("gate_up_proj", "down_proj", "v_proj.weight", "o_proj.weight"))}
        self.muon = Muon({name: named[name] for name in sorted(muon)})
        self.adam = Adam({name: named[name] for name in sorted(named.keys() - muon)})
        if (out / "state.json").exists():
            self.restore()

    def learn(self, batch: Tensor, part_of_rate: float) -> float:
        """One step; returns the loss before it."""
        batch = batch.to(self.model.device)
        loss = self.model(batch, labels=batch, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.muon.step(part_of_rate * MUON_RATE)
        self.adam.step(part_of_rate, self.step)
        self.model.zero_grad()
        self.step += 1
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        groups = {
            "parameter": dict(self.model.named_parameters()),
            "momentum": self.muon.momentum,
            "first": self.adam.first,
            "second": self.adam.second,
        }
        return {f"{group}/{name}": tensor.data for group, named in groups.items() for name, tensor in named.items()}

    def restore(self) -> None:
        saved = load_file(self.out / "state.safetensors")
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])
        state = json.loads((self.out / "state.json").read_text())
        self.step, self.elapsed_s, self.log = state["step"], state["elapsed_s"], state["log"]

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors(), self.out / "state.new")
        os.replace(self.out / "state.new", self.out / "state.safetensors")
        state = {"step": self.step, "elapsed_s": round(self.elapsed_s, 1), "log": self.log}
        (self.out / "state.json").write_text(json.dumps(state))

    def export(self) -> Path:
        checkpoint = self.out / "checkpoint"
        copy = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16)
        copy.load_state_dict(self.model.state_dict())
        copy.save_pretrained(checkpoint)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / name, checkpoint / name)
        return checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=CACHE / "corpus")
    parser.add_argument("--model", type=Path, default=MODEL, help="the directory of its config.json")
    parser.add_argument("--start", type=Path, help="weights to begin with; default: random ones")
    parser.add_argument("--out", type=Path, help="default: .cache/tiny_mixtral/train-MODEL")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="bundled")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=1, help="of each domain in a batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if arguments.device != "cpu" else "highest")
    out = arguments.out or CACHE / f"train-{arguments.model.resolve().name}"
    run = Run(out, arguments.seed, arguments.size, arguments.device, model=arguments.model, start=arguments.start)
    batches = Batches(arguments.corpus, arguments.seed, arguments.windows)
    held_out = held_out_tokens(MODEL / "eval", Tokenizer.from_file(str(MODEL / "tokenizer.json")))

    tokens_per_step = len(batches.tokens) * arguments.windows * WINDOW_TOKENS
    began, before = time.monotonic(), run.elapsed_s
    progress = max(run.step / arguments.steps, run.elapsed_s / (60 * arguments.minutes))
    while progress < 1:
        rate = part_of_rate(run.step, progress)
        loss = run.learn(batches[run.step], rate)
        run.elapsed_s = before + time.monotonic() - began
        progress = max(run.step / arguments.steps, run.elapsed_s / (60 * arguments.minutes))
        if run.step % 50 == 0:
            tokens_per_s = run.step * tokens_per_step / run.elapsed_s
            print(f"step {run.step} loss {loss:.3f} rate {rate:.3f} {tokens_per_s:.0f} tokens/s", flush=True)
        if run.step % LOOK_EVERY == 0:
            scores = {domain: round(perplexity(run.model, t, LOOK_WINDOWS), 2) for domain, t in held_out.items()}
            run.log.append({"step": run.step, "elapsed_s": round(run.elapsed_s), "perplexity_of_first_windows": scores})
            print(json.dumps(run.log[-1]), flush=True)
        if run.step % SAVE_EVERY == 0:
            run.save()

    run.save()
    exported = AutoModelForCausalLM.from_pretrained(run.export(), dtype=torch.float32).eval()
    scores = {domain: round(perplexity(exported, tokens), 2) for domain, tokens in held_out.items()}
    result = {
        "steps": run.step,
        "tokens": run.step * tokens_per_step,
        "parameters": run.model.num_parameters(),
        "measured_minutes": round(run.elapsed_s / 60, 1),
        "perplexity": scores,
        "geometric_mean": round(geometric_mean(list(scores.values())), 2),
    }
    (out / "checkpoint" / "train_log.json").write_text(json.dumps({**result, "log": run.log}, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
