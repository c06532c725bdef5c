"""`vllm-ndp top`: a running server or device in the terminal. Knows options and the picture; operating/ asks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ndp_device.common.command_line import JsonOption, command, print_json
from ndp_device.common.errors import DeviceUnavailable
from vllm_ndp.cli.shared import SERVER

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from vllm_ndp.operating.watch import Rates, Sample, Watched

app = typer.Typer()


@command(
    app,
    "top",
    examples=(
        f"vllm-ndp top {SERVER}",
        f"vllm-ndp top {SERVER} --count 1 --json",
        f"vllm-ndp top {SERVER} --count 1 --all",
        "vllm-ndp top ipc://$HOME/.ndp/device --count 2",
    ),
)
def top(
    target: Annotated[
        str, typer.Argument(metavar="ADDR", help="HOST:PORT of vllm serve; ipc:// or tcp:// of a device.")
    ],
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Between two looks.")] = 1.0,
    count: Annotated[int, typer.Option(metavar="N", min=0, help="So many looks, then end; 0: until Ctrl-C.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="The server's key, for /v1/ndp/status.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This host's key file, where the device wants keys.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Everything that is effective in the server, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a running server or device.

    One that stops answering is waited for; one that never answered is an error.
    """
    from vllm_ndp.operating.watch import watched

    view = _View(watched(target, api_key=api_key, key=key), interval, count, show_all=show_all)
    if as_json:
        view.lines()
    else:
        view.live()


class _View:
    def __init__(self, target: Watched, interval_s: float, count: int, *, show_all: bool) -> None:
        self._target, self._interval_s, self._count, self._show_all = target, interval_s, count, show_all
        self._before: Sample | None = None
        self._after = target.look()
        self._lost = ""

    def live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(highlight=False)
        with Live(self.picture(), console=console, auto_refresh=False, screen=False) as live:
            try:
                for _ in self._looks():
                    live.update(self.picture(), refresh=True)
            except KeyboardInterrupt:
                pass

    def lines(self) -> None:
        """One JSON object for each look but the first, which has no rates, unless it is the only one."""
        if self._count == 1:
            print_json(self.last())
        try:
            for _ in self._looks():
                print_json(self.last())
        except KeyboardInterrupt:
            pass

    def _looks(self) -> Any:
        """Yield after each look but the first, which the constructor took."""
        number = 1
        while self._count == 0 or number < self._count:
            time.sleep(self._interval_s)
            try:
                self._before, self._after = self._after, self._target.look()
                self._lost = ""
            except DeviceUnavailable as error:
                self._lost = str(error)
            number += 1
            yield number

    def last(self) -> dict[str, Any]:
        """The last look as plain values."""
        from vllm_ndp.operating.watch import rates

        result: dict[str, Any] = {"target": self._target.name, "answers": not self._lost}
        result |= {"levels": dict(self._after.levels), "totals": dict(self._after.sums)}
        if self._before is not None:
            result["rates"] = vars(rates(self._before, self._after))
        return result | {"status": dict(self._after.status)}

    def picture(self) -> RenderableType:
        from rich.console import Group

        from vllm_ndp.operating.watch import rates

        between = None if self._before is None else rates(self._before, self._after)
        head = f"[bold]{self._target.name}[/]  " + (f"[red]{self._lost}[/]" if self._lost else "answers")
        if "protocol" in self._after.status:
            return Group(head, _device(self._after, between))
        shown = [head, _load(self._after, between), _times(self._after, between), *_plugin(self._after, between)]
        return Group(*shown, *(_effective(self._after.status) if self._show_all else []))


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(show_header=bool(columns), title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name != columns[0] else "left")
    return table


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def _load(now: Sample, between: Rates | None) -> RenderableType:
    table = _table("requests", "running", "waiting", "KV cache", "prompt tokens", "output tokens", "ended")
    per_s, counted = {} if between is None else between.per_s, ("prompt tokens", "output tokens", "requests")
    table.add_row(
        "now, per second",
        _number(now.levels.get("running"), ".0f"),
        _number(now.levels.get("waiting"), ".0f"),
        f"{100 * now.levels.get('KV cache used', 0.0):.1f} %",
        *(_number(per_s.get(name)) for name in counted),
    )
    table.add_row("since the start", "", "", "", *(_number(now.sums.get(name), ".0f") for name in counted))
    return table


def _times(now: Sample, between: Rates | None) -> RenderableType:
    """A row for each clock, of what has ended between two looks, or else since the server started; beside the measured
    one what the start expected of one request."""
    from vllm_ndp.operating.watch import START, rates

    means = {} if between is None else between.means
    is_now = any(value is not None for value in means.values())
    table = _table(f"clock, {'now' if is_now else 'since the start'}", "TTFT ms", "TPOT ms", "device ms", "planning ms")
    means = means if is_now else rates(START, now).means

    def milliseconds(name: str) -> str:
        value = means.get(name)
        return "-" if value is None else f"{1e3 * value:.3g}"

    table.add_row(
        "measured",
        *(milliseconds(f"measured {what}") for what in ("TTFT", "TPOT", "device round trip", "planning")),
    )
    workers = now.status.get("workers") or [{}]
    if (expected := (workers[0].get("effective") or {}).get("expected_step_s")) is not None:
        table.add_row("expected, one request", "", f"{1e3 * expected:.3g}", "", "")
    table.add_row("simulated", milliseconds("simulated TTFT"), milliseconds("simulated TPOT"), "", "")
    return table


def _plugin(now: Sample, between: Rates | None) -> list[RenderableType]:
    from vllm_ndp.operating.server import PAIR_KINDS
    from vllm_ndp.operating.watch import START, rates

    if not any(name.endswith(" pairs") for name in now.sums):
        return ["vllm-ndp is not active in this server, or has served nothing yet"]
    pairs, per_s = _table("pairs", "now, per second", "since the start"), {} if between is None else between.per_s
    for place in PAIR_KINDS:
        if total := now.sums.get(f"{place} pairs", 0.0):
            pairs.add_row(place.replace("_", ", "), _number(per_s.get(f"{place} pairs"), ".0f"), f"{total:.0f}")
    pairs.add_row("experts moved", _number(per_s.get("experts moved")), _number(now.sums.get("experts moved"), ".0f"))
    up, share = now.levels.get("device up"), rates(START, now).hot_share
    device = "-" if up is None else "up" if up else "[red]down: the host computes for it[/]"
    told = f"device {device}; hot share {'-' if share is None else f'{100 * share:.0f} %'} since the start"
    return [pairs, told, *_requests(now.status)]


def _requests(status: Any) -> list[RenderableType]:
    """The plan and the running requests, which our routes tell. One hint where the server has no such routes."""
    workers = status.get("workers") or []
    if not workers:
        return [
            "[dim]more where the server has our routes: --middleware, or VLLM_PLUGINS with ndp (docs/serving.md)[/]"
        ]
    plan, effective = workers[0].get("plan") or {}, workers[0].get("effective") or {}
    bits = plan.get("avg_bits")
    told = (
        f"plan {plan.get('epoch')}: {plan.get('hot_experts')} of {effective.get('experts')} experts hot, "
        f"{'-' if bits is None else bits} bits; simulates {effective.get('hardware')}"
    )
    if memory := workers[0].get("memory"):
        told += "; " + _memory(memory)
    running = _table("running", "phase", "prompt", "output")
    for request in status.get("running", [])[:10]:
        running.add_row(
            str(request["id"])[:40], request["phase"], str(request["prompt_tokens"]), str(request["output_tokens"])
        )
    ended = _table("ended last", "prompt", "output", "how", "measured TPOT ms", "simulated TPOT us")
    for report in status.get("finished", [])[:5]:
        ended.add_row(
            str(report["id"])[:30],
            str(report.get("prompt_tokens")),
            str(report.get("output_tokens")),
            str(report.get("finish")),
            _number(report.get("measured_tpot_ms"), ".3g"),
            _number(report.get("simulated_tpot_us"), ".3g"),
        )
    return [told, *([running] if status.get("running") else []), *([ended] if status.get("finished") else [])]


def _effective(status: Any) -> list[RenderableType]:
    """All rows of the table that a server prints ten of as it starts."""
    tables: list[RenderableType] = []
    for worker in status.get("workers") or []:
        tables.append(table := _table())
        table.title = "what is effective"
        table.add_column("")
        table.add_column("")
        for what, value in worker["table"]:
            table.add_row(what, value)
    return tables


def _memory(memory: Any) -> str:
    from vllm_ndp.operating.sizing import human

    each = ", ".join(f"{name} {human(one['held'])}" for name, one in memory.items())
    mapped = sum(one["mapped"] for one in memory.values())
    return f"held: {each}; mapped from files, in the page cache: {human(mapped)}"


def _device(now: Sample, between: Rates | None) -> RenderableType:
    from vllm_ndp.operating.sizing import human

    status = now.status
    table = _table("device", "")
    rows = {
        "model": status["model"],
        "replicas": f"{status['replicas']}, {human(status['resident_bytes'])}",
        "kernel": status["kernel"],
        "simulates": f"{status['hardware']}, {status['pe_mode']}",
        "hosts": f"{now.levels['sessions']:.0f}",
        "answered": f"{now.sums['executed']:.0f}",
        "answered/s": "-" if between is None else f"{between.per_s['executed']:.1f}",
        "refused": f"{now.sums['refused']:.0f}",
        "pid": str(status["pid"]),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
