"""The model that a person names before anything is loaded: a public shape, a config.json, a checkpoint, an id of a hub.

Only sizes are read, of a checkpoint one expert, and of a hub nothing but config.json. Of a hub's repository the
checkpoint alone is fetched, without second copies, through huggingface_hub: it has the cache, the keys and the address
(HF_HOME, HF_TOKEN, HF_ENDPOINT).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ndp_device.checkpoint.files import INDEX, WHOLE, has_weights, indexed_files, read_config, read_json, weight_files
from ndp_device.checkpoint.opening import PackedLinears, stated_form, stated_method
from ndp_device.checkpoint.spellings import text_config
from ndp_device.checkpoint.values import StoredForm
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import WholeModel
from ndp_device.model_config import public_model
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.timing.public_models import PUBLIC_MODELS, SHAPES, public_shape
from vllm_ndp.cost_model.costs import model_named

_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "max_seq_length"),
    "seq_len",
)
_SCALED_ALREADY = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embeddings whose factor the length contains, or which have none."""

SERVED_METHODS = ("mxfp4", "fp8", "compressed-tensors", "gptq", "awq", "modelopt", "auto-round")
"""quant_method of a checkpoint that we serve."""
BROKEN_ON_CPU = {
    "JambaForCausalLM": "vLLM's CPU build lacks the operator of its Mamba layers (selective_scan_fwd)",
    "Glm4MoeLiteForCausalLM": "vLLM's CPU build rotates its keys wrongly, and its text is wrong without a word",
}
"""Limits of vLLM itself, found by running it without the plugin. A test fails once vLLM lifts one."""

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_BESIDE_WEIGHTS = [
    *("config.json", "generation_config.json", "quant*_config.json", "hf_quant_config.json", "params.json", INDEX),
    *("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "tekken.json"),
    *("*.model", "*.jinja", "chat_template*", "*processor_config.json"),
]
_CHECKPOINT_FILES = [*_BESIDE_WEIGHTS, WHOLE, "model-*-of-*.safetensors"]
"""Files that a checkpoint without an index is loaded from. Weights in other formats are not fetched."""
_FOLDERS = ["*/*"]
"""No part of a checkpoint lies in a folder: there are second copies (original/, checkpoint-500/, onnx/)."""


@dataclass(frozen=True)
class CheckpointSource:
    """A model and what `vllm serve` is told of it."""

    model: WholeModel
    served_as: str
    """A directory or an id: what stands after `vllm serve`."""
    read_from: str
    """For people: what the sizes were taken from."""
    stored_bytes: int | None = None
    """Of its files; None where there are none."""
    stored_form: StoredForm | None = None
    """How its experts are stored where they may be served so."""
    linear_form: StoredForm | None = None
    """How most of its linear layers are stored where they may be served so."""
    longest: int | None = None
    """Most tokens of a request, by config.json; None where nobody has said."""
    unserved: str = ""
    """Why no such checkpoint is served, in a sentence; empty where it is."""
    unserved_on_cpu: str = ""
    """The same of a machine without a GPU."""


def source_named(name: str) -> CheckpointSource:
    """Find the model. Raises ConfigError in one sentence where it has no sizes, or no experts."""
    path = Path(name)
    if path.is_file():
        return _of_config(path.parent.resolve().name, path, str(path.parent), f"{name} alone")
    if path.is_dir() and not has_weights(path):
        return _of_config(path.resolve().name, path / "config.json", name, f"{path / 'config.json'} alone")
    if path.is_dir():
        stored = sum(file.stat().st_size for file in weight_files(path))
        read_from = "config.json and the headers of its tensors"
        experts, longest = CheckpointExperts(path), longest_context(read_config(path))
        model, form = _as_served(model_named(name)), experts.stored_form
        source = CheckpointSource(model, name, read_from, stored, form, _linear_form(path, model), longest)
        return _with_limits(source, path, read_config(path))
    if name.lower() in SHAPES:
        return _published(name.lower(), PUBLIC_MODELS[name.lower()].source)
    known = {model.source.lower(): shape for shape, model in PUBLIC_MODELS.items()}
    if shape := known.get(name.lower()):
        return _published(shape, name)
    if is_repo(name):
        with asked_of_hub(f"there is no directory {name}, and its config.json") as hub:
            config = Path(hub.hf_hub_download(name, "config.json"))
        return _of_config(name, config, name, "config.json on the hub")
    return CheckpointSource(public_shape(name), name, "")  # raises, and names the nearest one


def _with_limits(source: CheckpointSource, directory: Path, config: Mapping[str, Any]) -> CheckpointSource:
    classes = config.get("architectures")
    on_cpu = unserved_on_cpu([one for one in classes if isinstance(one, str)] if isinstance(classes, list) else [])
    return replace(source, unserved=why_unserved(directory, config), unserved_on_cpu=on_cpu)


def why_unserved(directory: Path, config: Mapping[str, Any]) -> str:
    """Why a checkpoint is not served, in a sentence; empty where it is."""
    method = stated_method(directory, config)
    if method and method not in SERVED_METHODS:
        return unserved_method(method)
    if has_weights(directory) and not any(directory.glob("*.safetensors")):
        return "vLLM loads no dense layer of a GGUF file, so serve the model's safetensors"
    return ""


def unserved_method(method: str) -> str:
    return f"{method} checkpoints are not served: give one in bfloat16, or in one of {', '.join(SERVED_METHODS)}"


def unserved_on_cpu(architectures: Sequence[str]) -> str:
    """Why a model of one of these classes is not served without a GPU, in a sentence; empty where it is."""
    return next(
        (
            f"{one} cannot be served on a CPU: {BROKEN_ON_CPU[one]}; on CUDA it is accepted"
            for one in architectures
            if one in BROKEN_ON_CPU
        ),
        "",
    )


def _published(shape: str, served_as: str) -> CheckpointSource:
    model = SHAPES[shape]
    form = stated_form(None, PUBLIC_MODELS[shape].config, model.hidden_size, model.intermediate_size)
    return CheckpointSource(model, served_as, "its published sizes", stored_form=form)


def _linear_form(path: Path, model: WholeModel) -> StoredForm | None:
    weights = PackedLinears(path).weights_by_form
    return next((form for form, number in weights.items() if 2 * number > model.beside_weights), None)


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest request that vLLM takes, by the usual keys of config.json; None where it has none."""
    inner = text_config(config)
    given = [value for key in _LENGTHS if type(value := inner.get(key)) is int and value > 0]
    own = inner.get("model_max_length")  # counts alone
    longest = own if type(own) is int and own > 0 else min(given, default=None)
    return None if longest is None else int(longest * _rope_factor(inner))


def _rope_factor(config: Mapping[str, Any]) -> float:
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(given, Mapping):
        return 1.0
    for one in (given, *given.values()):  # of all layers, or by their kind
        if isinstance(one, Mapping) and one.get("rope_type", one.get("type", "default")) not in _SCALED_ALREADY:
            factor = one.get("factor")
            return float(factor) if isinstance(factor, int | float) and 1 <= factor < 1e6 else 1.0
    return 1.0


def _of_config(name: str, path: Path, served_as: str, read_from: str) -> CheckpointSource:
    config = read_config(path.parent) if path.name == "config.json" else read_json(path)
    inner = text_config(config)
    dtype = next((str(one[key]) for one in (inner, config) for key in ("dtype", "torch_dtype") if one.get(key)), "")
    model = _as_served(replace(public_model(name, inner), dtype=dtype or "bfloat16"))
    columns = model.hidden_size, model.intermediate_size
    form, longest = stated_form(path.parent, config, *columns), longest_context(config)
    source = CheckpointSource(model, served_as, read_from, stored_form=form, longest=longest)
    return _with_limits(source, path.parent, config)


def _as_served(model: WholeModel) -> WholeModel:
    """Change the dtype to the one that vLLM takes by itself: 16 bits for a checkpoint of 32, or of FP8."""
    return replace(model, dtype="bfloat16") if model.dtype.startswith(("float32", "float8")) else model


# -- a hub of models ---------------------------------------------------------------------------------------------------


def is_repo(name: str) -> bool:
    """Whether this can be an id, and is no directory here."""
    return _REPO.fullmatch(name) is not None and not Path(name).exists()


def checkpoint_dir(name: str) -> Path:
    """A directory as it is; a model's id as its place in the hub's cache, fetched first where it is not there."""
    if not is_repo(name):
        return Path(name)
    with asked_of_hub(f"the checkpoint {name}") as hub:

        def fetch(files: list[str], revision: str | None) -> Path:
            wanted = {"allow_patterns": files, "ignore_patterns": _FOLDERS}
            return Path(hub.snapshot_download(name, revision=revision, **wanted))

        directory = fetch(_BESIDE_WEIGHTS, None)
        commit = directory.name  # whatever is pushed meanwhile
        fetch(indexed_files(directory) or _CHECKPOINT_FILES, commit)
        if not has_weights(directory):  # under other names
            fetch(["*.safetensors"], commit)
        return directory


@contextmanager
def asked_of_hub(what: str) -> Iterator[Any]:
    """huggingface_hub, whose errors leave as one sentence about `what`."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ModuleNotFoundError:
        raise ConfigError(f"{what} needs the package huggingface_hub: pip install huggingface_hub") from None
    try:
        yield huggingface_hub
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
        advice = "unset HF_HUB_OFFLINE, or give a directory" if offline else "check its name, HF_TOKEN and HF_ENDPOINT"
        raise ConfigError(f"{what} cannot be had from the hub ({_first_line(error)}): {advice}") from None


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text.rstrip(".:")
