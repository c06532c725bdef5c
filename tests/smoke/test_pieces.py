"""Pieces of a long measurement: what hangs is ended, what was found is kept, what is kept is not run again."""

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_check
import gpu_engines
import gpu_speed
import gpu_timeline
import pieces as runner
import pytest
from paths import ROOT
from pieces import Run
from until import until

SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import pieces
from pieces import LeftOutError, Piece, Pieces, Run

pieces.LEAST_S, pieces.GRACE_S = 4.0, 1.0
log = open(Path(__file__).with_name("calls"), "a")

def called(name):
    log.write(name + "\\n")
    log.flush()

def quick(run):
    called("quick")
    return {{"found": 7}}

def hangs(run):
    called("hangs")
    time.sleep(60)

def left_out(run, way):
    raise LeftOutError("there is no such machine")

def table(run, way):
    called(way)
    if way == "hangs":
        time.sleep(60)
    if way == "fails":
        raise ValueError("no kernel")
    return [{{"value": len(way), "_hidden": sorted(row["way"] for row in run.before)}}]

PIECES = {{
    "hangs": Piece("Does it hang?", 0.001, hangs),
    "quick": Piece("Is it quick?", 0.001, quick),
    "absent": Piece("Is it here?", 0.001, left_out, ("a", "b")),
    "apart_absent": Piece("Is it here, apart?", 0.1, left_out, ("a", "b"), apart=True),
    "here": Piece("How do ways of one process do?", 0.004, table, ("one", "fails", "three", "hangs", "five")),
    "long": Piece("Is there time?", 9.0, quick),
}}
made = Pieces(Path(__file__), PIECES, lambda: "")
arguments = sys.argv[1:]
if "--piece" in arguments:
    options = dict(zip(arguments[::2], arguments[1::2]))
    name, out = options["--piece"], Path(options["--out"])
    if "--way" in options:
        made.run_way(name, options["--way"], out, dry=False, seconds=float(options["--seconds"]))
    else:
        earlier = options.get("--earlier")
        made.run_here(name, out, dry=False, seconds=float(options["--seconds"]), earlier=earlier and Path(earlier))
else:
    made.run_all(arguments[1].split(","), Path(arguments[0]), None, minutes=1.0, again="--again" in arguments)
"""


class Toy:
    """A program with pieces that do as their names say, and what came of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "toy.py"
        self.script.write_text(SCRIPT.format(benchmarks=str(ROOT / "benchmarks")))

    def run(self, names: str, *options: str) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, str(self.script), str(self.folder), names, *options],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(line.split(": ", 1) for line in done.stdout.splitlines())

    def rows(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.file(name)["figures"]["results"]
        return found

    def file(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / f"gpu_{name}.json").read_text())
        return content

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().split()


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def test_a_piece_that_hangs_is_ended_and_the_next_one_runs(toy: Toy) -> None:
    became = toy.run("hangs,quick,long,absent,apart_absent")
    assert became["hangs"].startswith("FAILED after ")
    assert "it took longer than" in became["hangs"]
    assert became["quick"].startswith("ran in")
    assert became["long"] == "no time left: run this again"
    assert became["absent"] == became["apart_absent"] == "left out, there is no such machine"
    assert sorted(path.name for path in toy.folder.glob("gpu_*.json")) == ["gpu_quick.json"]
    assert toy.file("quick")["figures"] == {"gpu": "none: a dry run", "found": 7}
    assert toy.run("quick")["quick"] == "there already"
    assert toy.calls.count("quick") == 1


def test_of_ways_in_one_process_one_that_hangs_or_fails_costs_no_other(toy: Toy) -> None:
    """Those after it run in a new process, as after a kernel that has read memory which is not there."""
    became = toy.run("here,quick")
    assert became["here"].startswith("3 of 5 ways, FAILED: fails, hangs in ")
    assert became["quick"].startswith("ran in")
    assert [row.get("value", row.get("failed")) for row in toy.rows("here")] == [
        3, "ValueError: no kernel", 5, runner.NOT_ENDED, 4,
    ]  # fmt: skip
    assert runner.UNFINISHED not in toy.file("here")["figures"]
    assert not any("_hidden" in row for row in toy.rows("here"))
    assert toy.run("here")["here"] == "FAILED before: fails, hangs; --again runs these"
    assert toy.calls == ["one", "fails", "three", "hangs", "five", "quick"]
    assert toy.run("here", "--again")["here"].startswith("3 of 5 ways, FAILED: fails, hangs in ")
    assert toy.calls[6:] == ["fails", "hangs"]  # what was found is kept
    assert [row.get("value") for row in toy.rows("here")] == [3, None, 5, None, 4]


def test_what_a_call_has_found_is_there_when_it_is_killed_itself(toy: Toy) -> None:
    """The machine is taken back in the middle: every file is whole, and the next call goes on."""
    call = subprocess.Popen([sys.executable, str(toy.script), str(toy.folder), "quick,here"], start_new_session=True)
    until(lambda: (toy.folder / "calls").exists() and "hangs" in toy.calls)
    os.killpg(call.pid, signal.SIGKILL)
    call.wait()
    assert [row["way"] for row in toy.rows("here")] == ["one", "fails", "three", "hangs"]
    toy.run("quick,here")
    assert [row["way"] for row in toy.rows("here")] == ["one", "fails", "three", "hangs", "five"]
    assert toy.calls.count("quick") == 1


# -- each piece's own code, around an engine that is made up ----------------------------------------------------------


class MadeUpEngine:
    """Says what an engine would say, about no model."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        self.settings = settings

    def collective_rpc(self, name: str) -> list[dict[str, Any]]:
        totals = {"row_checks": 1, "sidecar_mismatches": 0, "cold_pairs": 2, "fallback_pairs": 0, "device_state": "up"}
        status = {"decode_layers": "", "slot_kernel": "", "carrier": "", "hot_bytes": 1, "device_pid": 2**22 + 1}
        return [totals if name == "ndp_totals" else status]


def outputs(llm: MadeUpEngine, prompts: list[Any], tokens: int, **params: Any) -> list[Any]:
    given = [len(prompt["prompt_token_ids"]) if isinstance(prompt, dict) else 4 for prompt in prompts]
    chosen = [{9: SimpleNamespace(logprob=-0.5)}] * tokens
    return [
        SimpleNamespace(
            prompt_token_ids=[9] * count,
            prompt_logprobs=[None, *[{9: SimpleNamespace(logprob=-1.0)}] * (count - 1)],
            outputs=[SimpleNamespace(token_ids=[9] * tokens, logprobs=chosen, text="text")],
        )
        for count in given
    ]


NEEDS_MORE = {
    "kernels",
    "streams",
    "routing",
    "wide",
    "link",
    "quantizing",
    "waits",
    "timeline",
    "device_killed",
}
"""Pieces that start programs, profile a GPU or kill a process."""


@pytest.mark.parametrize("name", sorted(set(gpu_check.PIECES) - NEEDS_MORE))
def test_a_piece_that_a_gpu_is_needed_for_makes_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its way of counting and comparing, in every way: no GPU branch is run for the first time in the hour."""
    asked: list[dict[str, Any] | None] = []

    def engine(settings: dict[str, Any] | None = None, *args: Any, **options: Any) -> MadeUpEngine:
        asked.append(settings)
        return MadeUpEngine(settings)

    monkeypatch.setattr(gpu_engines, "on_gpu", lambda: True)
    monkeypatch.setattr(gpu_engines, "engine", engine)
    monkeypatch.setattr(gpu_engines, "end", lambda llm: None)
    monkeypatch.setattr(gpu_engines, "greedy", outputs)
    monkeypatch.setattr(gpu_speed, "WIDE_REPLICAS", tmp_path)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    piece, before = gpu_check.PIECES[name], list[dict[str, Any]]()
    if not piece.ways:
        assert piece.run(Run(False, tmp_path))
    for way in piece.ways:
        before += [{"way": way, **row} for row in piece.run(Run(False, tmp_path, before), way)]
    json.dumps(before)
    assert len({row["way"] for row in before}) == len(piece.ways)
    assert all(row.get("equal", 1) for row in before)
    compares = {"identity", "narrow_slots"}  # with stock vLLM, which runs once
    if piece.ways:
        assert len(asked) == len(piece.ways) + (name in compares)


def event(kind: str, stream: int, start: float, end: float, name: str = "") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "args": {"stream": stream}}


def test_what_lies_beside_kernels_is_counted_as_hidden() -> None:
    """Kernels 0-100 and 150-200. The packet ends at 20, the device 20-160 (80 + 10 of it hidden), the sums 160-170; an
    expert arrives 10-20 and 110-120."""
    events = [
        event("kernel", 7, 0, 20, gpu_timeline.LAST_OF_PACKET),
        event("kernel", 7, 20, 100, "fused_moe_kernel"),
        event("kernel", 9, 150, 200),
        event("gpu_memcpy", 9, 100, 101, "Memcpy HtoD (Pinned -> Device)"),
        event("gpu_memcpy", 7, 100, 101, "Memcpy DtoD"),
        event("gpu_memcpy", 7, 160, 170, "Memcpy HtoD (Pinned -> Device)"),
        event("gpu_memcpy", 7, 171, 172, "Memcpy HtoD (Pinned -> Device)"),
        event("gpu_memcpy", 20, 10, 20, "Memcpy HtoD (Pinned -> Device)"),
        event("gpu_memcpy", 20, 110, 120, "Memcpy HtoD (Pinned -> Device)"),
        {"ph": "M", "name": "process_name"},
    ]
    found = gpu_timeline.beside(events)
    assert (found["gpu_busy_share"], found["lane_copies"], found["lane_copies_hidden"]) == (0.75, 2, 0.5)
    assert (found["device_answers"], found["device_us"], found["device_hidden"]) == (1, 140, round(90 / 140, 3))


def test_the_timeline_knows_the_kernel_that_ends_a_packet() -> None:
    kernels = ast.parse((ROOT / "vllm_ndp/integration/cuda/kernels.py").read_text())
    names = [node.name for node in ast.walk(kernels) if isinstance(node, ast.FunctionDef)]
    assert gpu_timeline.LAST_OF_PACKET in names
