"""`vllm-ndp scaling`: what more devices, GPUs and larger batches bring, and what a shared pool saves.

Knows options, the table and the last line. lab/scaling.py computes, lab/page.py draws.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ndp_device.common.command_line import HardwareOption, SetOption, command, print_json
from vllm_ndp.cli.options import hardware_values, integers, names
from vllm_ndp.lab.options import PageOption, TableOption

if TYPE_CHECKING:
    from vllm_ndp.lab.scaling import Pool, ScalingPoint

app = typer.Typer()


@dataclasses.dataclass(frozen=True)
class ScaleOptions:
    """Values to vary, and what is the same at every point."""

    models: Annotated[str, typer.Option(help="Public shapes, or all four of the docs.")] = "all"
    devices: Annotated[str, typer.Option(help="Numbers of devices.")] = "1,2,3,4,5,6,7,8"
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs that split each layer.")] = "1,2,4,8"
    batch: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,4,16,64,256"
    hosts: Annotated[
        int, typer.Option(help="Hosts that share a pool of devices; 0 = leave that out.", metavar="N", min=0)
    ] = 8
    pool_batch: Annotated[
        int, typer.Option(help="Requests that each of those decodes together.", metavar="N", min=1)
    ] = 8
    bits: Annotated[int, typer.Option(help="Of experts on devices.", metavar="N", min=1, max=4)] = 3
    context: Annotated[int, typer.Option(help="Cached tokens of each request.", metavar="N", min=1)] = 4096
    split: Annotated[bool, typer.Option(help="Each device has a part of every expert, not copies of some.")] = False
    hardware: HardwareOption = "h100-ndp512"
    set_: SetOption = None


@command(
    app,
    "scaling",
    shows=True,
    examples=(
        "vllm-ndp scaling --models mixtral-8x7b --devices 1,2 --gpus 1 --batch 1,8 --hosts 2",
        "vllm-ndp scaling --models mixtral-8x7b --devices 1,2,4 --gpus 1 --batch 1 --hosts 0 --html scaling.html",
    ),
)
def scaling(over: ScaleOptions, out: TableOption = None, html: PageOption = None) -> None:
    """Tokens/s over devices, GPUs, batches; hosts that share them.

    GPU memory holds as many hot experts as fit; all others are on devices. The table also names the part that takes
    most of a step. All times are simulated.
    """
    from ndp_device.timing.spec import load_hardware
    from vllm_ndp.cli.terminal import waiting
    from vllm_ndp.lab.cli.tables import write_rows
    from vllm_ndp.lab.scaling import MODELS, Scale, Setup, curve, pool, stops_paying

    started = time.perf_counter()
    counts, batches = integers(over.devices, "--devices", least=1), integers(over.batch, "--batch", least=1)
    sizes, hosts, pool_batch = integers(over.gpus, "--gpus", least=1), over.hosts, over.pool_batch
    hardware = load_hardware(over.hardware, **hardware_values(over.set_))
    setup = Setup(hardware, bits=over.bits, context=over.context, splits_experts=over.split)
    points: list[ScalingPoint] = []
    pools: list[Pool] = []
    for model in names(over.models, MODELS):
        with waiting(f"scaling {model}"):
            scale = Scale(model, setup, max(*batches, hosts * pool_batch))
            found = curve(scale, batches, sizes, counts)
            points += found
            shared = [pool(scale, pool_batch, size, counts, hosts) for size in sizes] if hosts else []
            pools += [one for one in shared if one is not None][:1]  # on the fewest GPUs that hold it
    _print(points, pools)
    if out is not None:
        write_rows([_rounded(point) for point in points], out)
    if html is not None:
        from vllm_ndp.lab.page import of_scaling, write_page

        write_page(html, f"Scaling on {over.hardware}", of_scaling(points, pools))
    lines: dict[tuple[str, int, int], list[ScalingPoint]] = {}
    for point in points:
        lines.setdefault((point.model, point.num_gpus, point.batch), []).append(point)
    result: dict[str, Any] = {
        "points": [_rounded(point) for point in points],
        "stops_paying": [
            {"model": model, "gpus": size, "batch": count, "devices": stops_paying(line)}
            for (model, size, count), line in lines.items()
        ],
        "pools": [_of_pool(one) for one in pools],
        "page": None if html is None else str(html),
        "seconds": round(time.perf_counter() - started, 2),
    }
    print_json(result, shown=True)


def _rounded(point: ScalingPoint) -> dict[str, Any]:
    values = dataclasses.asdict(point)
    values["tokens_per_s"] = round(point.tokens_per_s, 2)
    values["shares"] = {part: round(share, 3) for part, share in point.shares.items() if share >= 0.0005}
    return values


def _of_pool(pool: Pool) -> dict[str, Any]:
    return {
        "model": pool.model,
        "hosts": pool.num_hosts,
        "batch": pool.batch,
        "gpus": pool.shared[0].num_gpus if pool.shared else None,
        "private_devices": pool.num_hosts * pool.num_private,
        "private_tokens_per_s": round(pool.private_tokens_per_s, 2),
        "shared": {point.num_devices: round(point.tokens_per_s, 2) for point in pool.shared},
        "execution": {point.num_devices: point.execution for point in pool.shared},
        "most": {point.num_devices: point.bound for point in pool.shared},
        "enough": pool.enough,
        "saved": pool.saved,
    }


def _print(points: list[ScalingPoint], pools: list[Pool]) -> None:
    from rich.console import Console
    from rich.table import Table

    from vllm_ndp.cli.terminal import print_table
    from vllm_ndp.lab.scaling import PAYS, stops_paying

    counts = sorted({point.num_devices for point in points})
    table = Table(title="simulated decode tokens/s, by number of devices; what takes most of a step")
    for name in (
        "model",
        "GPUs",
        "batch",
        "hot per layer",
        *(f"{number} device{'s' if number > 1 else ''}" for number in counts),
        f"one more adds\nless than {100 * PAYS:g} % from",
        "takes most, first and last",
    ):
        table.add_column(name, justify="left" if name == "model" else "right")
    for model, size, count in dict.fromkeys((point.model, point.num_gpus, point.batch) for point in points):
        line = [one for one in points if (one.model, one.num_gpus, one.batch) == (model, size, count)]
        speeds = {one.num_devices: f"{one.tokens_per_s:.4g}" for one in line}
        ends = dict.fromkeys((line[0].bound, line[-1].bound))
        cells = [speeds.get(number, "-") for number in counts]
        table.add_row(
            model, str(size), str(count), str(line[0].num_hot), *cells, str(stops_paying(line) or "-"), ", ".join(ends)
        )
    print_table(table, width=200)
    console = Console(width=200)
    for pool in pools:
        private = pool.num_hosts * pool.num_private
        makes = (
            "no shared pool that was asked for makes"
            if pool.enough is None
            else (f"a shared pool of {pool.enough} devices makes at least")
        )
        console.print(
            f"  {pool.model}: {pool.num_hosts} hosts of batch {pool.batch} make {pool.private_tokens_per_s:.4g} "
            f"tokens/s with {private} devices of their own; {makes} 90 % of that"
        )
