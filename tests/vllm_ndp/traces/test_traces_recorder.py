"""Recording: what goes in comes out, crashes lose the tail only, damage is refused by the name of the file."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
from stopped_disk import StoppedDisk
from until import until

from ndp_device.common import kept
from ndp_device.common.errors import ConfigError, TraceError
from vllm_ndp.lab.load.run import of_steps
from vllm_ndp.traces.format import CHANGED, DECODE, DOWN, PREFILL, UNTIMED, Provenance, read_manifest
from vllm_ndp.traces.recorder import TraceWriter
from vllm_ndp.traces.trace import Trace

L, E, K = 3, 8, 2
PROVENANCE = Provenance(model="tiny", num_layers=L, num_experts=E, top_k=K, model_digest="aa", source="recorded")


def choices(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    ids = generator.random((rows, L, E)).argsort(axis=2)[:, :, :K]
    return ids, generator.random((rows, L, K), dtype=np.float32)


def record(directory: Path, steps: int = 4, **settings) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two requests with prompts of 5; step 0 is their prefill, then each decodes one token a step."""
    written = []
    with TraceWriter(directory, PROVENANCE, **settings) as writer:
        for request in (0, 1):
            writer.add_request(request, f"req-{request}", prompt_len=5, arrival_s=0.5 * request, label="prose")
        for step in range(steps):
            rows = 10 if step == 0 else 2
            ids, weights = choices(rows, step)
            requests = np.repeat([0, 1], rows // 2)
            positions = np.tile(np.arange(5), 2) if step == 0 else np.full(2, 4 + step)
            phases = np.full(rows, PREFILL if step == 0 else DECODE)
            writer.append_step(step, requests, positions, phases, ids, weights)
            writer.append_event(step, epoch=1, simulated_start_ps=step * 10, simulated_step_ps=10, measured_step_s=0.1)
            written.append((ids.copy(), weights.copy()))
            ids[:] = 0  # the caller may use its arrays again
        writer.append_plan(1, 1, np.eye(L, E, dtype=bool), {0: np.full((L, E), 2, np.uint8)})
    return written


def test_what_was_recorded_is_loaded_bit_for_bit_and_saved_so(tmp_path):
    written = record(tmp_path / "trace")
    Trace.load(tmp_path / "trace").save(tmp_path / "saved")
    for trace in (Trace.load(tmp_path / "trace", model_digest="aa"), Trace.load(tmp_path / "saved")):
        assert trace.complete
        assert (trace.ids == np.concatenate([ids for ids, _ in written])).all()
        assert (trace.weights == np.concatenate([weights for _, weights in written])).all()
        assert trace.step.tolist() == [0] * 10 + [1, 1, 2, 2, 3, 3]
        assert trace.request_ids == ["req-0", "req-1"]
        assert trace.arrival_s.tolist() == [0.0, 0.5]
        assert trace.events["simulated_start_ps"].tolist() == [0, 10, 20, 30]
        assert trace.plans["cells"].shape == (2, L, E)
        assert trace.plans["request"].tolist() == [-1, 0]
        assert set(trace.labels) == {"prose"}
        assert trace.provenance == PROVENANCE


def test_steps_without_a_simulated_time_stay_without_one_and_the_trace_says_so_in_one_sentence(tmp_path):
    with TraceWriter(tmp_path / "trace", PROVENANCE) as writer:
        for step, time_ps in enumerate((7, None, None)):
            writer.append_event(step, 1, time_ps, time_ps, measured_step_s=0.1)
    stored = pq.read_table(tmp_path / "trace" / "steps-00000.parquet")
    assert stored["simulated_step_ps"].to_pylist() == [7, None, None], "null on disk, and no number that means it"
    Trace.load(tmp_path / "trace").save(tmp_path / "again")
    trace = Trace.load(tmp_path / "again")
    assert trace.events["simulated_step_ps"].tolist() == [7, UNTIMED, UNTIMED]
    sentence = "the trace has no simulated times of 2 of its 3 steps, because its device, real hardware, has none"
    assert trace.lacks.startswith(sentence)
    with pytest.raises(TraceError, match=sentence):
        trace.simulated_steps()
    with pytest.raises(TraceError, match=sentence):
        of_steps(trace)


def test_sequences_split_prompt_and_decode_of_each_request(tmp_path):
    record(tmp_path / "trace")
    trace = Trace.load(tmp_path / "trace")
    first, second = trace.sequences
    assert (len(first.prompt_ids), len(first.decode_ids)) == (5, 3)
    assert (second.decode_ids == trace.ids[[11, 13, 15]]).all()
    assert (trace.stats(first).counts.sum(axis=1) == 5 * K).all()


def test_a_position_that_ran_twice_counts_once_and_the_last_run_wins(tmp_path):
    with TraceWriter(tmp_path / "trace", PROVENANCE) as writer:
        writer.add_request(0, "preempted", prompt_len=4)
        for step in (0, 1):
            ids, weights = choices(4, step)
            writer.append_step(step, np.zeros(4), np.arange(4), np.zeros(4), ids, weights)
    (sequence,) = Trace.load(tmp_path / "trace").sequences
    assert (sequence.prompt_ids == choices(4, 1)[0]).all()


def test_more_rows_than_a_buffer_holds_all_arrive_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_ndp.traces.recorder._BUFFER_TOKEN_LAYERS", 16 * L)
    with TraceWriter(tmp_path / "trace", PROVENANCE) as writer:
        writer.add_request(0, "long", prompt_len=500)
        for step in range(100):
            ids, weights = choices(5, step)
            writer.append_step(step, np.zeros(5), 5 * step + np.arange(5), np.zeros(5), ids, weights)
        ids, weights = choices(40, 100)  # one step larger than the whole buffer
        writer.append_step(100, np.zeros(40), 500 + np.arange(40), np.ones(40), ids, weights)
    trace = Trace.load(tmp_path / "trace")
    assert trace.position.tolist() == list(range(540))
    assert len(list((tmp_path / "trace").glob("routing-*.parquet"))) > 1


def test_a_killed_recording_keeps_what_was_flushed(tmp_path):
    script = """
import sys, time, numpy as np
from pathlib import Path
from vllm_ndp.traces.format import Provenance
from vllm_ndp.traces.recorder import TraceWriter
writer = TraceWriter(Path(sys.argv[1]), Provenance(model="m", num_layers=3, num_experts=8, top_k=2), flush_seconds=0.05)
writer.add_request(0, "r", prompt_len=1)
for step in range(10**6):
    writer.append_step(step, [0], [step], [1], np.tile([0, 1], (1, 3, 1)), np.ones((1, 3, 2)))
    time.sleep(0.001)
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "trace")])
    try:
        until((tmp_path / "trace" / "routing-00001.parquet").exists, told=lambda: "the recorder never flushed")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    trace = Trace.load(tmp_path / "trace")
    assert not trace.complete
    assert trace.position.tolist() == list(range(len(trace.position)))
    assert len(trace.position) > 1


@pytest.mark.parametrize("saved", [False, True], ids=["recorded", "saved"])
def test_whenever_the_machine_stops_a_trace_is_read_up_to_where_it_was_on_disk(tmp_path, monkeypatch, saved):
    monkeypatch.setattr("vllm_ndp.traces.recorder._BUFFER_TOKEN_LAYERS", 20 * L)
    disk, place = StoppedDisk(tmp_path / "disk"), "saved/new/trace" if saved else "new/trace"
    with disk.watched():
        record(disk.root / "new" / "trace", steps=30)
        whole = Trace.load(disk.root / "new" / "trace")
        if saved:
            whole.save(disk.root / place)
    surely = []
    for states in disk.laid_out(place, tmp_path):
        rows = []
        for directory in states:
            trace = Trace.load(directory) if (directory / "manifest.json").exists() else None
            rows.append(len(trace.ids) if trace else -1)
            if trace:
                assert (trace.ids == whole.ids[: rows[-1]]).all()
                assert (trace.weights == whole.weights[: rows[-1]]).all()
                assert rows[-1] == len(whole.ids) or not trace.complete
        surely.append(min(rows))
    assert surely == sorted(surely), "what was on disk is gone"
    assert set(surely) >= {-1, 0, len(whole.ids)}
    assert [Trace.load(directory).complete for directory in states] == [True]


def test_nobody_but_its_owner_reads_a_trace(tmp_path):
    """Not even in a directory of another's making, nor one that was saved from another, nor while it is written."""
    (tmp_path / "made").mkdir(mode=0o755)
    previous = os.umask(0)
    try:
        record(tmp_path / "new" / "trace")
        record(tmp_path / "made")
        Trace.load(tmp_path / "made").save(tmp_path / "saved")
        aside = []
        with patch("os.fsync", lambda handle: aside.append(os.fstat(handle))):
            record(tmp_path / "watched")
    finally:
        os.umask(previous)
    files = [path for place in ("new/trace", "made", "saved", "watched") for path in (tmp_path / place).iterdir()]
    assert {stat.filemode(path.stat().st_mode) for path in files} == {"-rw-------"}
    assert {stat.filemode(status.st_mode) for status in aside if stat.S_ISREG(status.st_mode)} == {"-rw-------"}
    made = [stat.filemode((tmp_path / name).stat().st_mode) for name in ("new/trace", "saved", "watched")]
    assert made == ["drwx------"] * 3


def test_what_became_of_devices_is_kept(tmp_path):
    with TraceWriter(tmp_path / "trace", PROVENANCE) as writer:
        writer.append_devices(3, {0: DOWN, 2: DOWN})
        writer.append_devices(4, {-1: CHANGED})
        writer.append_devices(5, {})
    for directory in ("trace", "copy"):
        found = Trace.load(tmp_path / directory).devices
        assert found["step"].tolist() == [3, 3, 4]
        assert found["device"].tolist() == [0, 2, -1]
        assert found["change"].tolist() == [DOWN, DOWN, CHANGED]
        if directory == "trace":
            Trace.load(tmp_path / "trace").save(tmp_path / "copy")


def test_a_trace_is_not_recorded_over_another(tmp_path):
    record(tmp_path / "trace")
    with pytest.raises(ConfigError, match="not empty"):
        TraceWriter(tmp_path / "trace", PROVENANCE)


def test_a_disk_that_fails_is_told_to_the_caller_and_close(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    writer = TraceWriter(tmp_path / "trace", PROVENANCE, flush_seconds=0.01)
    monkeypatch.setattr("vllm_ndp.traces.recorder.write_chunk", full)
    writer.add_request(0, "r", prompt_len=1)
    with pytest.raises(TraceError, match="No space left"):
        writer.close()


@pytest.mark.parametrize(
    ("ids", "weights", "says"),
    [
        (np.zeros((1, L, 3), int), np.zeros((1, L, 3)), "must be"),
        (np.full((1, L, K), E), np.zeros((1, L, K)), r"0\.\.7"),
    ],
)
def test_rows_of_another_model_are_refused(tmp_path, ids, weights, says):
    with TraceWriter(tmp_path / "trace", PROVENANCE) as writer, pytest.raises(TraceError, match=says):
        writer.append_step(0, [0], [0], [0], ids, weights)


def test_a_closed_trace_takes_nothing_more(tmp_path):
    writer = TraceWriter(tmp_path / "trace", PROVENANCE)
    writer.close()
    with pytest.raises(TraceError, match="closed"):
        writer.add_request(0, "late", prompt_len=1)


def flipped(raw: bytes) -> bytes:
    at = len(raw) // 3
    return raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :]


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("routing-00000.parquet", lambda raw: raw[:-20], r"routing-00000\.parquet is damaged"),
        ("routing-00000.parquet", flipped, r"routing-00000\.parquet"),
        ("manifest.json", lambda raw: b'{"format": "vllm-ndp-trace"', r"manifest\.json is damaged"),
        ("manifest.json", lambda raw: kept.seal(json.loads(raw) | {"version": 99}), "version 99"),
    ],
)
def test_a_damaged_trace_is_refused_by_name_in_one_sentence(tmp_path, name, damage, says):
    record(tmp_path / "trace")
    file = tmp_path / "trace" / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(TraceError, match=says) as caught:
        Trace.load(tmp_path / "trace")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_one_under_anothers_name_are_refused(tmp_path):
    record(tmp_path)
    routing = tmp_path / "routing-00000.parquet"
    routing.write_bytes((tmp_path / "requests-00000.parquet").read_bytes())
    with pytest.raises(TraceError, match="does not have the columns"):
        Trace.load(tmp_path)
    routing.unlink()
    with pytest.raises(TraceError, match=r"routing-00000\.parquet is missing"):
        Trace.load(tmp_path)


def test_a_trace_of_another_model_is_refused(tmp_path):
    record(tmp_path / "trace")
    with pytest.raises(TraceError, match="digest aa, this model has bb"):
        Trace.load(tmp_path / "trace", model_digest="bb")


def test_a_directory_without_manifest_is_not_a_trace(tmp_path):
    with pytest.raises(TraceError, match="is not a trace"):
        read_manifest(tmp_path)
