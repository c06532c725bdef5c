"""The generated parts of docs/faults.md: kinds of faults, kills, memory over time, attacks, a layer without its device.

Faults come from docs/faults.toml, figures from one file of docs/measured/ each. A part says if that is not taken yet.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from measured_figures import Figures, about, cited

ABSENT = "Not taken yet: `{}` with `--json`, as {}.json beside the other measurements."
WAYS = ("socket", "memory")
GETS = {
    "a busy core": "for comparison: no peer at all",
    "flood of pings": "answers, and the end of its connection where 64 wait",
    "many that ping": "answers: one in two while a host computes",
    "many silent": "a handshake; of 256 connections the one that is silent longest ends",
    "garbage": "a sentence for each message; the end of its connection at a frame above 8 MiB",
    "endless message": "the end of its connection after three seconds without a whole message",
    "answers not read": "80 answers, then the end of its connection",
    "wants memory": "one of 16 segments for a second if it does not use it, or the socket alone",
    "commands of zeromq": "a PONG for each, from the libzmq thread of all hosts (given up)",
    "bodies that nobody wants": "a sentence for each",
    "plans without an end": "an answer for each; four experts at a time while a host computes",
    "pings by memory": "answers, one message of each ring in turn",
    "comes and goes": "a connection",
}
"""What each attack of benchmarks/hostile_beside_honest.py gets from the device."""


OUTCOMES = {
    "The device dies, hangs or restarts": "the host computes the calls; the device is used again once it answers",
    "Answers are late, damaged or wrong": "the host rejects the answer, opens a new connection and computes the call",
    "One of several devices": "devices with copies take over the pairs within the same deadline",
    "Plans and sessions": "the host keeps the plan and installs it again; a pair without its replica runs on the host",
    "The host ends or forks": "the device frees the host's connection and memory; an embedded device ends",
    "Faulty or greedy peers": "that peer loses its connection or waits; others are served",
    "Paths, ports and keys": "one sentence refuses the peer, the path or the request",
    "Shared memory": "the socket carries the message",
    "Files": "one sentence refuses the file; a mapped file that changes costs the calls that need it",
}
"""What happens after each kind of fault, in short."""


def known_faults(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "docs" / "faults.toml").read_text())


def kinds(root: Path) -> str:
    """How many faults of each kind the tests cover, and what happens in short."""
    counts = Counter(fault["group"] for fault in known_faults(root)["fault"])
    lines = ["| kind of fault | covered | what happens |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {kind} | {number} | {OUTCOMES[kind]} |" for kind, number in counts.items())])


def every_fault(root: Path) -> str:
    """The whole list, by kind, and the test files that its letters stand for."""
    known = known_faults(root)
    lines = ["The last column names tests: a letter for the file, then parts of their names.", ""]
    lines += ["| letter | test file | runs |", "|---|---|---|"]
    lines += [f"| {letter} | `{row['file']}` | {row['runs']} |" for letter, row in known["files"].items()]
    for kind in dict.fromkeys(fault["group"] for fault in known["fault"]):
        lines += ["", f"## {kind}", "", "| fault | noticed by | what happens | test |", "|---|---|---|---|"]
        own = (fault for fault in known["fault"] if fault["group"] == kind)
        lines += [f"| {one['fault']} | {one['noticed_by']} | {one['then']} | {one['tests']} |" for one in own]
    return "\n".join(lines)


def kills(measured: dict[str, Figures]) -> str:
    """What became of requests, pairs and processes when something was killed: a row for each file."""
    disturbed = measured["chaos"].figures
    bursts = measured["burst"].figures.values()
    unequal = sum(len(burst["wrong"]) for burst in bursts)
    cases = [row["left"] for row in measured["ends"].figures["results"] if row["engine"] == "plugin"]
    left = sum(bool(case["processes"] or case["files"]) for case in cases)
    results = {
        "chaos": (
            "do kills and stops under vLLM lose a request?",
            f"{disturbed['kills']} kills, {disturbed['stops']} stops, {disturbed['requests']} requests: "
            f"{len(disturbed['unfinished'])} lost, {len(disturbed['wrong'])} wrong",
        ),
        "burst": (
            "is every pair counted once?",
            f"reports, `/metrics` and totals: {unequal or 'no'} differences",
        ),
        "ends": ("does a killed script leave processes?", f"{left} of {len(cases)} do"),
    }
    lines = ["| question | result | |", "|---|---|---|"]
    lines += [f"| {question} | {result} | {cited(measured[name])} |" for name, (question, result) in results.items()]
    return "\n".join(lines)


def soak(measured: dict[str, Figures]) -> str:
    """Slopes with their intervals."""
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
    asked = ", ".join(f"{count} {how}" for how, count in figures["requests"].items())
    return "\n".join([
        f"{figures['hours']:.2f} h, the device killed {figures['kills']} times; {asked}.", "", *lines, "", about(found),
    ])  # fmt: skip


def sloped(growth: dict[str, float] | None) -> str:
    return (
        "too short" if growth is None else f"{growth['per_hour']:+.2f} ({growth['low']:+.2f} to {growth['high']:+.2f})"
    )


def hostile(measured: dict[str, Figures]) -> str:
    """One row per attack: what it gets, what it costs an honest host by socket and by memory, and a newcomer."""
    found = measured.get("hostile_beside_honest")
    if found is None:
        return ABSENT.format("python benchmarks/hostile_beside_honest.py", "hostile_beside_honest")
    lines = [
        "| attack | what it gets | call by socket, p50 us, before / during | by memory | lost | newcomer in after |",
        "|---|---|---|---|---|---|",
        *(_attack(name, gets, found.figures) for name, gets in GETS.items()),
    ]
    memory = f"The device held {found.figures['device_rss_mib']} MiB after all of it."
    return "\n".join([*lines, "", memory, "", about(found)])


def _attack(name: str, gets: str, figures: Figures) -> str:
    ways = [figures[f"{name.replace(' ', '_')}, {way}"] for way in WAYS]
    cells = [f"{of['before']['p50_us']:.0f} / {of['during']['p50_us']:.0f}" for of in ways]
    lost = sum(of[phase]["lost"] for of in ways for phase in ("before", "during", "after"))
    waits = [wait for of in ways for wait in of.get("newcomers_s", [])]
    newcomer = "none in 10 s" if None in waits else f"{max(waits):.2f} s" if waits else "-"
    return f"| {name} | {gets} | {' | '.join(cells)} | {lost} | {newcomer} |"


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
        "While the device is away, the host computes its experts and asks in each call whether it is back. A layer "
        f"that knows of no device takes {figures['local_over_away']:.3f} times as long ({low:.3f} to {high:.3f}; "
        f"target at least {figures['goal']}; {figures['pairs_of_steps']} pairs of steps). "
        f"Microseconds of a layer: {layers}.",
        "",
        f"The return of a device costs this many usual steps of {figures['usual_step_ms']} ms: {costs} (target: below "
        "1).",
        "", about(found),
    ])  # fmt: skip
