"""`vllm-ndp push` and `pull`: replica sets on a hub of models. Knows options and last lines; operating/hub.py works."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.outputs import REPLICAS

app = typer.Typer()
RepoArgument = Annotated[str, typer.Argument(metavar="REPO", help="ORGANISATION/NAME on the hub.")]


@command(
    app,
    "push",
    examples=(
        "vllm-ndp push replicas my-org/tiny-mixtral-replicas --license apache-2.0 --base-model my-org/tiny-mixtral",
    ),
)
def push(
    replicas: Annotated[Path, typer.Argument(metavar="REPLICAS", help="Directory that `quantize` wrote.")],
    repo: RepoArgument,
    license_: Annotated[str, typer.Option("--license", help="That of the model whose experts they are.")],
    base_model: Annotated[str | None, typer.Option(help="The model's id on the hub, for the card.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository a private one.")] = False,
) -> None:
    """Put a replica set on the hub, with a card that vouches.

    Every byte is checked first. The card (README.md) has digests, losses and the licence; nothing is written here.
    """
    from vllm_ndp.operating.hub import push as push_to_hub

    url = push_to_hub(replicas, repo, license_=license_, base_model=base_model, private=private)
    print_json({"pushed": str(replicas), "repo": repo, "commit": url})


@command(
    app,
    "pull",
    examples=(
        "vllm-ndp pull my-org/tiny-mixtral-replicas --out REPLICAS --model models/tiny-mixtral",
        "vllm-ndp pull my-org/tiny-mixtral-replicas",
    ),
)
def pull(
    repo: RepoArgument,
    out: Annotated[Path | None, REPLICAS, typer.Option(help="Directory to write; default: in our cache.")] = None,
    model: Annotated[str | None, typer.Option(help="Directory or id of the model that they must be of.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
) -> None:
    """Fetch a replica set from the hub, and check every byte."""
    from vllm_ndp.operating.hub import pull as pull_from_hub

    pulled = pull_from_hub(repo, out, model, revision)
    manifest = pulled.manifest
    print_json(
        {
            "replicas": str(pulled.directory),
            "digest": manifest.digest,
            "model": manifest.model.name,
            "model_digest": manifest.model_digest,
            "bits": list(manifest.bits),
            "bytes": pulled.num_bytes,
        }
    )
