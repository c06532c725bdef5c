"""Write a tiny checkpoint with random weights for every family of Mixture-of-Experts models that was run here.

    python tests/checkpoints/make_family_models.py OUT                  # all of them, 2 to 4 M parameters each
    python tests/checkpoints/make_family_models.py OUT qwen3_moe gpt_oss

They show that a family is read, routed and computed right, never how good its text is: the tests run each one on stock
vLLM and on the plugin, and compare tokens. The same seed gives the same bytes. Nothing is downloaded: the tokenizer is
the bundled model's (4096 words). Prints one JSON object: family -> directory.

families.toml says of each family what differs from the others. transformers builds them; where it has no class, that
table gives the names and shapes of the tensors.
Weights are drawn anew after transformers has built the model, wide enough that the logits of two words rarely tie; with
the draws of the classes themselves nearly all of them do.
"""

import argparse
import json
import re
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "models" / "tiny-mixtral"

COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 4096,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)


@dataclass(frozen=True)
class Family:
    """How one family's tiny model is built: transformers' configuration class and what differs from COMMON."""

    config_class: str
    """Empty: transformers has none, and `tensors` says what there is."""
    sizes: Mapping[str, Any]
    nulls: Sequence[str] = ()
    """Sizes that are null in config.json, which TOML cannot say."""
    added: Mapping[str, Any] = field(default_factory=dict)
    """Keys of published config.json files that transformers' class drops and vLLM reads."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of a multimodal model's vision tower; `sizes` are its language model's."""
    tokens: Mapping[str, Any] = field(default_factory=dict)
    """A multimodal model's keys beside the two: tokens that stand for images and videos."""
    tensors: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Names that vLLM's loader of the family takes, as patterns -> shape."""
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    """Of preprocessor_config.json, where vLLM reads one even for text alone."""
    own_class: bool = False
    """Whether published checkpoints bring the class of their config.json, which no library has."""
    norm_mean: float = 1.0
    """What a norm's weight is drawn around: 0 where the model adds the 1 itself."""
    ones: Sequence[str] = ()
    """Norms of published checkpoints that transformers' class leaves out and vLLM reads: [H], all 1."""
    dtype: str = "float32"
    on_cpu: bool = True
    """Whether stock vLLM runs this checkpoint on a CPU: others are compared with transformers only."""


def _read(path: Path) -> dict[str, Family]:
    return {name: Family(**fields) for name, fields in tomllib.loads(path.read_text()).items()}


OUTLINES: Mapping[str, Family] = MappingProxyType(_read(Path(__file__).with_name("outlines.toml")))
"""Of architectures that no engine here builds whole: what stock vLLM and the plugin say of them before that."""

FAMILIES: Mapping[str, Family] = MappingProxyType(_read(Path(__file__).with_name("families.toml")))

CONFIGURATION = """\
from transformers import PretrainedConfig


class FamilyConfig(PretrainedConfig):
    def __init__(self, **keys):
        nested = {k: PretrainedConfig(**v) for k, v in keys.items() if k.endswith("_config") and isinstance(v, dict)}
        super().__init__(**(keys | nested))
"""

_LEFT_ALONE = ("inv_freq", "A_log", "dt_bias")
_EMBEDDINGS = ("embed_tokens", "word_embeddings", "tok_embeddings")


def make(name: str, out: Path, *, seed: int = 0) -> Path:
    """Write the family's model to out/name, or leave it where a whole one is; returns the directory."""
    import torch
    import transformers

    directory = out / name
    if (directory / "tokenizer_config.json").is_file():
        return directory
    transformers.utils.logging.disable_progress_bar()
    family, generator = (FAMILIES | OUTLINES)[name], torch.Generator().manual_seed(seed)
    if family.tensors:
        _save_from_table(family, directory, generator)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            _save_from_class(family, directory, generator)
    if family.preprocessor:
        (directory / "preprocessor_config.json").write_text(json.dumps(family.preprocessor))
    for file in ("tokenizer.json", "tokenizer_config.json"):  # last: what says that the directory is whole
        shutil.copyfile(TOKENIZER / file, directory / file)
    return directory


def _save_from_class(family: Family, directory: Path, generator: Any) -> None:
    import torch
    import transformers

    config = getattr(transformers, family.config_class)(**_keys(family))
    auto = transformers.AutoModelForImageTextToText if family.vision else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    buffers = (item for item in model.named_buffers() if "correction_bias" in item[0])
    _redraw([*model.named_parameters(), *buffers], family, generator)
    model.to(getattr(torch, family.dtype)).save_pretrained(directory)
    _add_keys(directory / "config.json", family.added)
    _add_ones(directory / "model.safetensors", family.ones, COMMON["hidden_size"])


def _save_from_table(family: Family, directory: Path, generator: Any) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {name: torch.zeros(*shape) for pattern, shape in family.tensors.items() for name in _names(pattern)}
    _redraw(tensors.items(), family, generator)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_keys(family)))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if family.own_class:
        (directory / "configuration_family.py").write_text(CONFIGURATION)
    _add_keys(directory / "config.json", family.added)


def _names(pattern: str) -> Iterator[str]:
    """Every name that a pattern stands for: braces hold words or a range, as in a shell."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        yield pattern
        return
    first, dots, last = braces[1].partition("..")
    words = map(str, range(int(first), int(last) + 1)) if dots else braces[1].split(",")
    for word in words:
        yield from _names(pattern[: braces.start()] + word + pattern[braces.end() :])


def _keys(family: Family) -> dict[str, Any]:
    """Of config.json, before what is added to it."""
    sizes: dict[str, Any] = {**COMMON, **family.sizes, **dict.fromkeys(family.nulls)}
    if family.vision:
        sizes = {"text_config": sizes, "vision_config": dict(family.vision), "tie_word_embeddings": False}
    own_class = {"auto_map": {"AutoConfig": "configuration_family.FamilyConfig"}} if family.own_class else {}
    return sizes | dict(family.tokens) | own_class


def _redraw(values: Iterable[tuple[str, Any]], family: Family, generator: Any) -> None:
    import torch

    def normal(values: Any, scale: float, mean: float = 0.0) -> None:
        values.copy_(mean + scale * torch.randn(values.shape, generator=generator))

    with torch.no_grad():
        for name, value in values:
            last = name.rsplit(".", 1)[-1]
            if last in _LEFT_ALONE or last == "D":
                continue
            if "correction_bias" in name:
                normal(value, 0.04)
            elif "norm" in name and value.ndim == 1 and last == "weight":
                is_plain = "linear_attn.norm" in name  # the gated norm multiplies by its weight in every family
                normal(value, 0.01, 1.0 if is_plain else family.norm_mean)
            elif last.endswith("scale"):
                normal(value, 0.05, 1.0)
            elif any(word in name for word in _EMBEDDINGS):
                normal(value, 0.25)
            elif value.ndim < 2 or last.endswith("bias"):
                normal(value, 0.01)
            else:
                normal(value, value.shape[-1 if value.ndim == 2 else -2] ** -0.5)


def _add_keys(path: Path, added: Mapping[str, Any]) -> None:
    """To the language model's, except those that the whole model has already (`architectures`)."""
    config = json.loads(path.read_text())
    for key, value in added.items():
        (config if key in config else config.get("text_config", config))[key] = value
    path.write_text(json.dumps(config, indent=1) + "\n")


def _add_ones(path: Path, names: Sequence[str], size: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    if names:
        save_file(load_file(path) | {name: torch.ones(size) for name in names}, path, metadata={"format": "pt"})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "families", nargs="*", choices=[*FAMILIES, *OUTLINES, []], metavar="FAMILY", help=", ".join(FAMILIES)
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    made = {name: str(make(name, options.out, seed=options.seed)) for name in options.families or FAMILIES}
    print(json.dumps(made))


if __name__ == "__main__":
    main()
