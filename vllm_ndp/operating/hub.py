"""Checkpoints and replica sets on a hub of models: fetched by id, and replica sets pushed with a card that vouches.

Checks a replica set byte by byte against its own manifest: after the pull before use, and before a push. Speaks to the
hub through huggingface_hub, which has the cache, the keys and the address (HF_HOME, HF_TOKEN, HF_ENDPOINT). Knows
replica directories and cards. Does not know servers or devices.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ndp_device.checkpoint.files import model_digest
from ndp_device.checkpoint.headers import INDEX, WHOLE, has_weights, indexed_files
from ndp_device.common.cache import hub_cache_dir
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.widths import REPLICA_WIDTHS
from ndp_device.replicas.format import MANIFEST, Manifest, ReplicaFiles, load_loss_table

CARD = "README.md"
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
_REPLICA_FILES = [MANIFEST, "experts-*.safetensors", CARD]


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


def pull(repo: str, out: Path | None, model: str | None = None, revision: str | None = None) -> ReplicaFiles:
    """Fetch a replica set, into `out` or our cache. model: of which they must be, where given.

    Raises ReplicaError where a byte differs from what the manifest says, ConfigError where they are of another model.
    """
    _require_repo(repo)
    directory = hub_cache_dir(repo) if out is None else out
    with asked_of_hub(f"the replica set {repo}") as hub:
        options = {"revision": revision, "allow_patterns": _REPLICA_FILES, "ignore_patterns": _FOLDERS}
        fetched = Path(hub.snapshot_download(repo, local_dir=directory, **options))
    if not (fetched / MANIFEST).exists():
        raise ReplicaError(f"{repo} has no {MANIFEST}: it holds no replica set of vllm-ndp")
    return ReplicaFiles(fetched, model_digest=None if model is None else model_digest(checkpoint_dir(model)))


def push(directory: Path, repo: str, *, license_: str, base_model: str | None, private: bool) -> str:
    """Check every byte, and put the replicas and a card into the repository; the address of the commit."""
    _require_repo(repo)
    files = ReplicaFiles(directory)
    text = card(files, repo, license_=license_, base_model=base_model)
    names = [path.name for pattern in _REPLICA_FILES for path in sorted(directory.glob(pattern)) if path.name != CARD]
    with asked_of_hub(f"the replica set {repo}") as hub:
        api = hub.HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        added = {name: directory / name for name in names} | {CARD: text.encode()}
        commit = api.create_commit(
            repo,
            [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=what) for name, what in added.items()],
            commit_message=f"Replicas {files.manifest.digest} of model {files.manifest.model_digest}",
        )
    return str(commit.commit_url)


def card(files: ReplicaFiles, repo: str, *, license_: str, base_model: str | None) -> str:
    """The model card: what the replicas are of, how they were made, what each width loses, how to serve them."""
    manifest, model = files.manifest, files.manifest.model
    head = ["---", f"license: {license_}", "library_name: vllm-ndp", "tags: [vllm, vllm-ndp, mixture-of-experts]"]
    if base_model:
        head += [f"base_model: {base_model}", "base_model_relation: quantized"]
    rows = {
        "replicas": f"`{manifest.digest}`",
        "of the model with digest": f"`{manifest.model_digest}`",
        "sizes": f"{model.num_layers} layers x {model.num_experts} experts of {model.hidden_size} x "
        f"{model.intermediate_size}, {model.top_k} per token",
        "bits": ", ".join(map(str, manifest.bits)),
        "container": f"{manifest.container}, {manifest.group_size} weights share a scale",
        "made": manifest.source,
        "solver": _listed(manifest.solver),
        "calibrated with": _listed(manifest.calibration) or "nothing: from the weights alone",
        "bytes": str(files.num_bytes),
    }
    lines = [*head, "---", "", f"# Replicas of {base_model or model.name} for vllm-ndp", ""]
    lines += ["Every routed expert at low widths, for the device of vllm-ndp. The model itself is not in here.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
    lines += [
        "Loss: squared error of an expert's output over the squared output, as the replicas' own table has it.",
        "",
    ]
    lines += ["| bits | mean | worst expert |", "|---|---|---|", *_losses(files.directory, manifest), ""]
    lines += ["```", f"vllm-ndp pull {repo} --out REPLICAS --model MODEL"]
    settings = '\'{"ndp": {"replicas": "REPLICAS"}}\''
    lines += [f"vllm serve MODEL --quantization ndp --additional-config {settings}", "```", ""]
    return "\n".join(lines)


def _losses(directory: Path, manifest: Manifest) -> Iterator[str]:
    _, relative = load_loss_table(directory)
    for bits in manifest.bits:
        column = relative[..., REPLICA_WIDTHS.index(bits)]
        yield f"| {bits} | {np.nanmean(column):.4g} | {np.nanmax(column):.4g} |"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _require_repo(repo: str) -> None:
    if _REPO.fullmatch(repo) is None:
        raise ConfigError(f"a repository of the hub is named ORGANISATION/NAME, got {repo!r}")


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
