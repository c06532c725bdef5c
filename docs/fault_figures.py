"""The generated parts of docs/faults.md: the long night, attacks beside an honest host, a layer without its device.

Each comes from one file of docs/measured/, and says so where that was not taken yet.
"""

from __future__ import annotations

from measured_figures import Figures, about

ABSENT = "Not taken yet: `{}` with `--json`, as {}.json beside the other measurements."
EVERY_HOURS = 0.5
PROCESSES = ("server", "engine", "device")


def soak(measured: dict[str, Figures]) -> str:
    """Slopes with their intervals, then the series every half hour."""
    found = measured.get("soak")
    if found is None:
        return ABSENT.format("python benchmarks/soak.py", "soak")
    figures = found.figures
    lines = [
        "| process | RSS, MiB/h (95 %) | without maps of files | descriptors/h | threads/h | over |",
        "|---|---|---|---|---|---|",
    ]
    for name, growth in figures["growth"].items():
        cells = [sloped(growth[what]) for what in ("rss_mib", "own_mib", "fds", "threads")]
        hours = f"{growth['rss_mib']['over_hours']:.2f} h" if growth["rss_mib"] else "-"
        lines.append(f"| {name} | {' | '.join(cells)} | {hours} |")
    lines += ["", "| hour | requests | " + " | ".join(f"{name}: MiB, fds, threads" for name in PROCESSES) + " |"]
    lines.append("|---" * (2 + len(PROCESSES)) + "|")
    next_h = 0.0
    for sample in figures["series"]:
        if sample["at_s"] / 3600 < next_h and sample is not figures["series"][-1]:
            continue
        next_h = sample["at_s"] / 3600 + EVERY_HOURS
        cells = [
            f"{sample[name]['rss_mib']:.0f}, {sample[name]['fds']}, {sample[name]['threads']}"
            if name in sample
            else "-"
            for name in PROCESSES
        ]
        lines.append(f"| {sample['at_s'] / 3600:.2f} | {sample['requests'].get('answered', 0)} | {' | '.join(cells)} |")
    asked = ", ".join(f"{count} {how}" for how, count in figures["requests"].items())
    return "\n".join([
        f"{figures['hours']:.2f} h, the device killed {figures['kills']} times; {asked}.", "", *lines, "", about(found),
    ])  # fmt: skip


def sloped(growth: dict[str, float] | None) -> str:
    return (
        "too short" if growth is None else f"{growth['per_hour']:+.2f} ({growth['low']:+.2f} to {growth['high']:+.2f})"
    )


def hostile(measured: dict[str, Figures]) -> str:
    """Attack by attack: p50 and p99 before, during and after, and how soon a newcomer was served."""
    found = measured.get("hostile_beside_honest")
    if found is None:
        return ABSENT.format("python benchmarks/hostile_beside_honest.py", "hostile_beside_honest")
    lines = [
        "| attack, way | p50 us before / during / after | p99 us before / during / after | lost | slowest newcomer s |",
        "|---|---|---|---|---|",
    ]
    for name, of in found.figures.items():
        if not isinstance(of, dict):
            continue
        phases = [of[phase] for phase in ("before", "during", "after")]
        p50, p99 = (" / ".join(f"{phase[key]:.0f}" for phase in phases) for key in ("p50_us", "p99_us"))
        waits = of.get("newcomers_s", [])
        newcomer = "none in 10 s" if None in waits else f"{max(waits):.2f}" if waits else "-"
        lost = sum(phase["lost"] for phase in phases)
        lines.append(f"| {name.replace('_', ' ')} | {p50} | {p99} | {lost} | {newcomer} |")
    return "\n".join(
        [*lines, "", f"The device took {found.figures['device_rss_mib']} MiB after all of it.", "", about(found)]
    )


def degraded(measured: dict[str, Figures]) -> str:
    """A decode layer with its device away, against the same one that knows of none; and the return."""
    found = measured.get("degraded")
    if found is None:
        return ABSENT.format("python benchmarks/degraded.py", "degraded")
    figures = found.figures
    low, high = figures["local_over_away_95"]
    layers = ", ".join(f"{name} {value:.0f}" for name, value in figures["layer_us"].items())
    costs = ", ".join(f"{cost:.2f}" for cost in figures["return_costs_steps"])
    return "\n".join([
        f"Local over away: {figures['local_over_away']:.3f} ({low:.3f} to {high:.3f}; asked for: {figures['goal']}), "
        f"over {figures['pairs_of_steps']} pairs of steps. Microseconds of a layer: {layers}. A return costs in all, "
        f"in usual steps of {figures['usual_step_ms']} ms: {costs} (asked for: below 1).",
        "", about(found),
    ])  # fmt: skip
