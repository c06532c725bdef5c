"""Sweeps: the same rows whoever finds them, in whatever order, in however many runs; and what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import sys

import numpy as np
import pytest
from paths import DATA
from stopped_disk import StoppedDisk

from ndp_device.common.errors import ConfigError, NdpError
from vllm_ndp.lab.compare import CompareSettings, compare
from vllm_ndp.lab.sweep.grid import Axes, Grid
from vllm_ndp.lab.sweep.jobs import parse_jobs, run_each
from vllm_ndp.lab.sweep.results import NAME, Line
from vllm_ndp.lab.sweep.run import compare_by, run_sweep
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace
from vllm_ndp.traces.trace import Trace

TRACE = Trace.load(DATA / "tiny-mixtral-trace")
SETTINGS = CompareSettings(
    systems=("context_aware", "monde", "gpu_on_demand"), policies=("prefill", "oracle"), batches=(1, 4, 64), fit=True
)
AXES = Axes(("mixtral-8x7b", "mixtral-8x22b"), ("h100-ndp512", "h200-gen5"), (80,))


def grid(axes: Axes = AXES, **changes) -> Grid:
    return Grid([TRACE], axes, dataclasses.replace(SETTINGS, **changes))


def values(rows) -> list[dict]:
    """as_dict turns NaN into None, so that equal rows compare equal."""
    return [row.as_dict() for row in rows]


def test_two_processes_find_what_one_finds_in_every_field():
    alone = compare(TRACE, SETTINGS)
    shared = compare_by(2, TRACE, SETTINGS)
    assert values(shared.rows) == values(alone.rows)
    assert [d.decode_ps.tobytes() for d in shared.replayed] == [d.decode_ps.tobytes() for d in alone.replayed]
    assert (shared.skipped, shared.config_hash, shared.num_requests) == (
        alone.skipped,
        alone.config_hash,
        alone.num_requests,
    )


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'vllm-ndp[ray]'")
def test_a_ray_cluster_finds_what_one_process_finds_in_every_field():
    assert values(compare_by("ray", TRACE, SETTINGS).rows) == values(compare(TRACE, SETTINGS).rows)


def test_a_sweep_is_compare_at_every_point(tmp_path):
    result = run_sweep(grid(), tmp_path, 2)
    assert len({point for point, _ in result.rows}) == 4
    for model in AXES.models:
        for hardware in AXES.hardware:
            settings = dataclasses.replace(
                SETTINGS, model=model, hardware=hardware, overrides={"gpu.hbm_capacity_bytes": 80 * 10**9}
            )
            here = [row for point, row in result.rows if (point.model, point.hardware) == (model, hardware)]
            assert values(here) == values(compare(TRACE, settings).rows)
    assert result.skipped == ["batch 64: only 12 requests to replay"]


@pytest.mark.parametrize("kept", [1, 2, 7, 10_000])
def test_a_stopped_sweep_goes_on_and_ends_the_same_to_the_digit(tmp_path, kept):
    """Whatever was on disk when it stopped: the heading alone, some rows, or all but the end of the last one."""
    whole = run_sweep(grid(), tmp_path / "whole")
    lines = (tmp_path / "whole" / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / NAME).write_bytes(b"".join(lines[:kept])[: None if kept < 10_000 else -9])
    again = run_sweep(grid(), tmp_path / "stopped", 2)
    assert again.found_before == min(kept, len(lines) - 1) - 1
    assert values(row for _, row in again.rows) == values(row for _, row in whole.rows)
    assert [point for point, _ in again.rows] == [point for point, _ in whole.rows]
    assert run_sweep(grid(), tmp_path / "stopped").found_before == len(grid().tasks)


def test_every_row_that_was_found_is_kept_when_the_machine_stops(tmp_path):
    disk = StoppedDisk(tmp_path / "disk")
    with disk.watched():
        whole = run_sweep(grid(Axes(("mixtral-8x7b",), ("h100-ndp512",), (80,)), batches=(1, 4)), disk.root / "new")
    surely = [min(state.get(f"new/{NAME}", b"").count(b"\n") for state in states) for states in disk.moments]
    assert surely == sorted(surely), "what was on disk is gone"
    assert set(surely) == set(range(len(whole.rows) + 2)), "a heading, and a line when its row is found"


def test_a_result_reads_back_from_disk_to_the_digit():
    replayed = compare(TRACE, SETTINGS).replayed[3]
    back = Line.of("key", replayed).result
    assert values([back.row]) == values([replayed.row])
    assert back.decode_ps.tobytes() == replayed.decode_ps.tobytes()
    assert math.isnan(back.row.over_paper)
    assert Line.of("key", "it does not fit").result == "it does not fit"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"avg_bits": 2.0}, "settings"),
        ({"systems": ("monde",)}, "settings"),
        ({"axes": Axes(("mixtral-8x7b",), ("h100-ndp512",))}, "axes"),
    ],
)
def test_a_directory_of_another_sweep_is_refused_and_left_alone(tmp_path, change, named):
    run_sweep(grid(systems=("fiddler",)), tmp_path)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(ConfigError, match=f"other .*{named}"):
        run_sweep(grid(**{"systems": ("fiddler",)} | change), tmp_path)
    assert (tmp_path / NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("place", "line"),
    [
        (0, b'{"key": 1}\n'),
        (1, b'{"key": 1}\n'),
        (1, b'{"key": "a", "row": {"batch": "x"}}\n'),
        (1, b"[" * 9999 + b"\n"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(tmp_path, place, line):
    run_sweep(grid(systems=("fiddler",)), tmp_path)
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    lines[place] = line
    (tmp_path / NAME).write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match="is not a file of a sweep" if place == 0 else "line 2 is damaged"):
        run_sweep(grid(systems=("fiddler",)), tmp_path)


def test_each_model_takes_the_trace_of_its_routing_shape(tmp_path):
    settings = SyntheticSettings.of_shape("olmoe", num_requests=4, prompt_len=4, decode_len=3)
    both = Grid(
        [TRACE, synthetic_trace(settings)],
        Axes(("olmoe", "mixtral-8x7b"), ("h100-ndp512",)),
        CompareSettings(systems=("fiddler",)),
    )
    assert [(point.model, point.trace) for point in both.points] == [("olmoe", 1), ("mixtral-8x7b", 0)]
    assert len(run_sweep(both, tmp_path).rows) == 2


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (lambda: Axes(("mixtral-8x7b",), ("h100-ndp512",), (0,)), "at least 1 GB"),
        (lambda: Axes(("mixtral-8x7b",) * 2, ("h100-ndp512",)), "every value once"),
        (lambda: Axes((), ("h100-ndp512",)), "at least one model"),
        (lambda: grid(Axes(("olmoe",), ("h100-ndp512",))), "add a trace of its routing shape"),
        (lambda: grid(Axes(("mixtral-8x7b",), ("h100",))), "did you mean"),
        (lambda: grid(policies=("prefil",)), "did you mean 'prefill'"),
        (lambda: parse_jobs("two"), "--jobs must be a number"),
        (lambda: parse_jobs("0"), "--jobs must be a number"),
    ],
)
def test_what_no_point_could_do_is_refused_before_anything_runs(axes, says):
    with pytest.raises(NdpError, match=says):
        axes()


def test_a_trace_that_no_model_of_the_sweep_has_is_refused():
    other = synthetic_trace(SyntheticSettings.of_shape("olmoe", num_requests=2, prompt_len=2, decode_len=1))
    with pytest.raises(ConfigError, match="64 experts top-8 as trace 2"):
        Grid([TRACE, other], Axes(("mixtral-8x7b",), ("h100-ndp512",)), SETTINGS)


def test_without_ray_the_flag_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"vllm-ndp\[ray\]"):
        parse_jobs("ray")


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_every_piece_of_work_is_done_once(jobs):
    assert dict(run_each(lambda piece: piece**2, range(20), jobs)) == {n: n**2 for n in range(20)}


def test_work_is_shared_by_processes_that_see_what_the_caller_saw():
    held = np.arange(5)
    done = dict(run_each(lambda piece: (int(held[piece]), os.getpid()), range(5), 2))
    assert [done[n][0] for n in range(5)] == held.tolist()
    assert os.getpid() not in {pid for _, pid in done.values()}


def test_an_error_of_a_piece_reaches_the_caller():
    def fail(piece: int) -> int:
        raise ConfigError("it does not fit")

    with pytest.raises(ConfigError, match="it does not fit"):
        list(run_each(fail, range(4), 2))


def test_a_worker_that_dies_ends_the_work_in_one_sentence():
    with pytest.raises(NdpError, match="fewer --jobs"):
        list(run_each(lambda piece: os._exit(9), range(4), 2))


def test_what_one_system_refuses_does_not_keep_the_others_from_a_point(tmp_path):
    """24 GB hold no four experts of 8x7B per layer, which Fiddler keeps, but MoNDE, which keeps none."""
    tasks = grid(
        Axes(("mixtral-8x7b",), ("h100-ndp512",), (24, 80)), systems=("fiddler", "monde"), batches=(1,), fit=False
    )
    result = run_sweep(tasks, tmp_path)
    assert [(point.memory_gb, row.system) for point, row in result.rows] == [
        *[(24, "monde")] * 3,
        (80, "fiddler"),
        *[(80, "monde")] * 3,
    ]
    ((point, why),) = result.refused
    assert point.memory_gb == 24
    assert "gpu memory lacks" in why


def test_a_point_that_refuses_is_one_of_the_results(tmp_path, monkeypatch):
    """What a budget that fits nothing will say is not this file's business: here one hardware's rows refuse."""
    tasks = grid(systems=("fiddler",))
    run = tasks.run
    monkeypatch.setattr(tasks, "run", lambda n: "too small" if tasks.tasks[n].point.hardware == "h200-gen5" else run(n))
    result = run_sweep(tasks, tmp_path)
    assert [(point.hardware, why) for point, why in result.refused] == [("h200-gen5", "too small")] * 2
    assert {point.hardware for point, _ in result.rows} == {"h100-ndp512"}
    assert json.loads((tmp_path / NAME).read_text().splitlines()[-1])["refused"] == "too small"
