"""Recording: what goes in comes out, crashes lose the tail only, damage is refused by the name of the file."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stopped_disk import StoppedDisk
from until import until

from ndp_device.common import kept
from ndp_device.common.errors import ConfigError, TraceError
from vllm_ndp.lab.load.run import of_steps
from vllm_ndp.traces.format import (
    CHANGED,
    DECODE,
    DOWN,
    PREFILL,
    REJECTED,
    TABLES,
    UNTIMED,
    Provenance,
    read_manifest,
    write_chunk,
    write_manifest,
)
from vllm_ndp.traces.recorder import TraceWriter
from vllm_ndp.traces.trace import Sequence, Trace, from_sequences

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
            writer.add_request(request, f"req-{request}", prompt_len=5, arrival_s=0.1 * request, label="prose")
        for step in range(steps):
            rows = 10 if step == 0 else 2
            ids, weights = choices(rows, step)
            requests = np.repeat(np.arange(2, dtype=np.int32), rows // 2)
            positions = (np.tile(np.arange(5), 2) if step == 0 else np.full(2, 4 + step)).astype(np.int32)
            phases = np.full(rows, PREFILL if step == 0 else DECODE, np.uint8)
            written.append((ids.copy(), weights.copy()))
            ids = ids.astype(PROVENANCE.id_type)
            writer.append_step(step, requests, positions, phases, ids, weights)
            writer.append_event(step, 7, step * 10, 10 + step, measured_step_s=0.1, fallback_pairs=2 * step)
            for array in (requests, positions, phases, ids, weights):
                array[:] = 1  # the caller may use its arrays again
        cells = np.full((L, E), 2, np.uint8)
        writer.append_plan(2, 7, np.eye(L, E, dtype=bool), {0: cells})
        cells[:] = 1
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
        assert trace.arrival_s.tolist() == [0.0, 0.1]
        assert {name: column.tolist() for name, column in trace.events.items()} == {
            "step": [0, 1, 2, 3],
            "epoch": [7] * 4,
            "simulated_start_ps": [0, 10, 20, 30],
            "simulated_step_ps": [10, 11, 12, 13],
            "measured_step_s": [0.1] * 4,
            "fallback_pairs": [0, 2, 4, 6],
        }
        assert [of.tolist() for of in trace.simulated_steps()] == [[0, 10, 20, 30], [10, 11, 12, 13]]
        assert [trace.plans[name].tolist() for name in ("step", "epoch", "request")] == [[2, 2], [7, 7], [-1, 0]]
        assert (trace.plans["cells"] == [np.eye(L, E), np.full((L, E), 2)]).all()
        assert set(trace.labels) == {"prose"}
        assert trace.provenance == PROVENANCE


def test_steps_without_a_simulated_time_stay_without_one_and_the_trace_says_so_in_one_sentence(tmp_path):
    with TraceWriter(tmp_path / "trace", PROVENANCE) as writer:
        for step, time_ps in enumerate((7, None, None)):
            writer.append_event(step, 1, time_ps, time_ps, measured_step_s=0.1)
    Trace.load(tmp_path / "trace").save(tmp_path / "again")
    for name in ("trace", "again"):
        stored = pq.read_table(tmp_path / name / "steps-00000.parquet")
        assert stored["simulated_step_ps"].to_pylist() == [7, None, None], "null on disk, and no number that means it"
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
    assert trace.stats(first).scores.sum(axis=1) == pytest.approx(first.prompt_weights.sum(axis=(0, 2)))
    assert trace.stats(first, "decode").scores.sum(axis=1) == pytest.approx(first.decode_weights.sum(axis=(0, 2)))


def test_a_position_that_ran_twice_counts_once_and_the_last_run_wins(tmp_path):
    with TraceWriter(tmp_path / "trace", PROVENANCE) as writer:
        writer.add_request(0, "preempted", prompt_len=4)
        for step in (0, 1):
            ids, weights = choices(4, step)
            writer.append_step(step, np.zeros(4), np.arange(4), np.zeros(4), ids, weights)
    (sequence,) = Trace.load(tmp_path / "trace").sequences
    assert (sequence.prompt_ids == choices(4, 1)[0]).all()


def test_drafted_tokens_that_were_rejected_are_no_tokens_of_their_request(tmp_path):
    ids, weights = choices(5, 0)
    with TraceWriter(tmp_path / "trace", PROVENANCE) as writer:
        writer.add_request(0, "drafted", prompt_len=1)
        writer.append_step(0, [0], [0], [PREFILL], ids[:1], weights[:1])
        writer.append_step(1, [0] * 3, [1, 2, 3], [DECODE, DECODE, REJECTED], ids[1:4], weights[1:4])
        writer.append_step(2, [0], [4], [REJECTED], ids[4:], weights[4:])
    (sequence,) = Trace.load(tmp_path / "trace").sequences
    assert (sequence.decode_ids == ids[1:3]).all()


def test_requests_that_were_told_out_of_order_keep_what_was_said_of_each(tmp_path):
    with TraceWriter(tmp_path / "trace", PROVENANCE) as writer:
        for request, name, length in ((1, "b", 2), (2, "c", 3), (0, "a", 1)):
            writer.add_request(request, name, prompt_len=length, arrival_s=0.5 * length, label=name.upper())
    trace = Trace.load(tmp_path / "trace")
    assert (trace.request_ids, trace.labels) == (["a", "b", "c"], ["A", "B", "C"])
    assert (trace.prompt_len.tolist(), trace.arrival_s.tolist()) == ([1, 2, 3], [0.5, 1.0, 1.5])


@pytest.mark.parametrize("numbers", [(0, 0), (1, 2)])
def test_requests_that_are_not_numbered_once_each_are_refused(tmp_path, numbers):
    with TraceWriter(tmp_path / "trace", PROVENANCE) as writer:
        for number in numbers:
            writer.add_request(number, "r", prompt_len=1)
    with pytest.raises(TraceError, match=r"requests must be numbered 0\.\.1, each once"):
        Trace.load(tmp_path / "trace")


def test_requests_one_after_the_other_take_a_step_for_the_prompt_and_one_for_each_token():
    """And a selection of them is what those requests are, in the order that was asked for."""
    sequences = [
        Sequence.of(name, *choices(tokens, tokens), prompt, arrival_s=prompt / 4)
        for name, tokens, prompt in (("a", 4, 2), ("b", 3, 1), ("c", 1, 1))
    ]
    trace = replace(from_sequences(PROVENANCE, sequences), complete=False)
    assert trace.step.tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
    assert trace.phase.tolist() == [PREFILL] * 2 + [DECODE] * 2 + [PREFILL] + [DECODE] * 2 + [PREFILL]
    with pytest.raises(TraceError, match="holds no steps of a live run"):
        trace.simulated_steps()
    chosen = trace.select([2, 0])
    assert (chosen.labels, chosen.request_ids, chosen.complete) == (["c", "a"], ["2", "0"], False)
    assert (chosen.prompt_len.tolist(), chosen.arrival_s.tolist()) == ([1, 2], [0.25, 0.5])
    for own, of in zip(chosen.sequences, (sequences[2], sequences[0]), strict=True):
        assert (own.label, own.arrival_s) == (of.label, of.arrival_s)
        assert (own.prompt_ids == of.prompt_ids).all()
        assert (own.decode_weights == of.decode_weights).all()


@pytest.mark.parametrize("complete", [True, False])
def test_a_recording_that_was_cut_off_is_still_known_to_be_when_it_is_saved(tmp_path, complete):
    whole = from_sequences(PROVENANCE, [Sequence.of("a", *choices(4, 0), 2)])
    replace(whole, complete=complete).save(tmp_path / "trace")
    trace = Trace.load(tmp_path / "trace")
    assert (len(trace.step), trace.complete) == (4, complete)


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
    with pytest.raises(ConfigError, match="not empty"):
        Trace.load(tmp_path / "trace").save(tmp_path / "trace")


@pytest.mark.parametrize("failure", [None, OSError(28, "No space left on device")], ids=["slow", "failing"])
def test_a_disk_that_cannot_keep_up_holds_the_run_up_until_it_writes_or_fails(tmp_path, monkeypatch, failure):
    """16 rows wait behind the request that the disk does not take; the next row waits for the disk."""
    is_writing, writes = threading.Event(), threading.Event()

    def slow(*arguments):
        is_writing.set()
        writes.wait()
        if failure:
            raise failure
        write_chunk(*arguments)

    monkeypatch.setattr("vllm_ndp.traces.recorder.write_chunk", slow)
    monkeypatch.setattr("vllm_ndp.traces.recorder._BUFFER_TOKEN_LAYERS", 16 * L)
    writer, appended, raised = TraceWriter(tmp_path / "trace", PROVENANCE, flush_seconds=0.01), [], []

    def run():
        try:
            for step in range(60):
                writer.append_step(step, [0], [step], [0], *choices(1, step))
                appended.append(step)
        except TraceError as error:
            raised.append(error)

    writer.add_request(0, "r", prompt_len=60)
    assert is_writing.wait(60)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: len(appended) >= 16, told=lambda: "the recorder took too few rows")
    thread.join(0.2)
    assert thread.is_alive()
    assert len(appended) == 16
    writes.set()
    thread.join(60)
    assert not thread.is_alive()
    if failure:
        assert "No space left" in str(raised)
    else:
        writer.close()
        assert Trace.load(tmp_path / "trace").position.tolist() == list(range(60))


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
        (np.zeros((1, L, K), int), np.zeros((1, L, 3)), "must be"),
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
        ("manifest.json", lambda raw: kept.seal(json.loads(raw) | {"format": "theirs"}), "is a 'theirs' version 1"),
    ],
)
def test_a_damaged_trace_is_refused_by_name_in_one_sentence(tmp_path, name, damage, says):
    record(tmp_path / "trace")
    file = tmp_path / "trace" / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(TraceError, match=says) as caught:
        Trace.load(tmp_path / "trace")
    assert "\n" not in str(caught.value)


def test_chunks_together_claim_no_more_rows_than_their_files_can_hold(tmp_path, monkeypatch):
    """A row has three numbers of 4 bytes and a phase, and 5 bytes for each choice."""
    with TraceWriter(tmp_path, PROVENANCE) as writer:
        writer.add_request(0, "r", prompt_len=200)
    for chunk in (0, 1):
        (ids, weights), rows = choices(100, chunk), 100 * chunk + np.arange(100)
        columns = {"step": rows, "request": rows * 0, "position": rows, "phase": rows * 0}
        told = columns | {"ids": ids.astype(np.uint8), "weights": weights}
        write_chunk(tmp_path, "routing", chunk, told, PROVENANCE)
    write_manifest(tmp_path, PROVENANCE, {"requests": 1, "routing": 2})
    monkeypatch.setattr("vllm_ndp.traces.format._MAX_UNFOLDING", dict.fromkeys(TABLES, 0))
    room = 200 * (3 * 4 + 1 + L * K * 5)
    monkeypatch.setattr("vllm_ndp.traces.format._SMALL_BYTES", room)
    assert len(Trace.load(tmp_path).step) == 200
    monkeypatch.setattr("vllm_ndp.traces.format._SMALL_BYTES", room - 1)
    with pytest.raises(TraceError, match=r"routing-00001\.parquet and the chunks before it claim more rows"):
        Trace.load(tmp_path)
    monkeypatch.setattr("vllm_ndp.traces.format._SMALL_BYTES", 100)
    with pytest.raises(TraceError, match=r"requests-00000\.parquet is damaged: its \d+ bytes unfold into"):
        Trace.load(tmp_path)


def test_a_missing_file_and_one_under_anothers_name_are_refused(tmp_path):
    record(tmp_path)
    routing = tmp_path / "routing-00000.parquet"
    routing.write_bytes((tmp_path / "requests-00000.parquet").read_bytes())
    with pytest.raises(TraceError, match=r"does not have the columns .*: wanted step int32, got request int32"):
        Trace.load(tmp_path)
    routing.unlink()
    with pytest.raises(TraceError, match=r"routing-00000\.parquet is missing"):
        Trace.load(tmp_path)


def test_a_trace_of_another_model_is_refused(tmp_path):
    record(tmp_path / "trace")
    with pytest.raises(TraceError, match="digest aa, this model has bb"):
        Trace.load(tmp_path / "trace", model_digest="bb")
    TraceWriter(tmp_path / "unknown", msgspec.structs.replace(PROVENANCE, model_digest="")).close()
    assert Trace.load(tmp_path / "unknown", model_digest="bb").provenance.model == "tiny"


def test_names_of_requests_that_are_no_text_are_damage(tmp_path):
    record(tmp_path)
    file = tmp_path / "requests-00000.parquet"
    table = pq.read_table(file)
    names = pa.array([b"\xff\xfe", b"b"]).view(pa.string())
    pq.write_table(table.set_column(1, table.schema.field("id"), names), file, write_page_checksum=True)
    with pytest.raises(TraceError, match=r"requests-00000\.parquet is damaged: .*UTF8"):
        Trace.load(tmp_path)


@pytest.mark.parametrize("column", ["ids", "weights"])
def test_a_choice_without_a_value_is_refused(tmp_path, column):
    record(tmp_path)
    file = tmp_path / "routing-00000.parquet"
    table = pq.read_table(file)
    at, values = table.column_names.index(column), table[column].combine_chunks()
    flat = pa.array([None, *values.flatten().to_pylist()[1:]], type=values.type.value_type)
    holed = pa.FixedSizeListArray.from_arrays(flat, type=values.type)
    pq.write_table(table.set_column(at, table.schema.field(at), holed), file, write_page_checksum=True)
    with pytest.raises(TraceError, match=f"column '{column}' of a trace must have a value in every row"):
        Trace.load(tmp_path)


def test_a_table_that_another_program_wrote_is_read(tmp_path):
    """Programs that have nothing to say about it call every column nullable."""
    record(tmp_path)
    file = tmp_path / "routing-00000.parquet"
    table, ids = pq.read_table(file), Trace.load(tmp_path).ids
    columns = pa.schema([field.with_nullable(True) for field in table.schema])
    pq.write_table(pa.Table.from_arrays(table.columns, schema=columns), file)
    assert (Trace.load(tmp_path).ids == ids).all()


def test_a_choice_that_cannot_be_is_refused_with_its_trace(tmp_path):
    record(tmp_path)
    write_manifest(tmp_path, msgspec.structs.replace(PROVENANCE, num_experts=K), {"requests": 1, "routing": 1})
    with pytest.raises(TraceError, match=re.escape(f"{tmp_path}: expert ids must lie in 0..{K - 1}, got ")):
        Trace.load(tmp_path)


def test_a_directory_without_manifest_is_not_a_trace(tmp_path):
    with pytest.raises(TraceError, match="is not a trace"):
        read_manifest(tmp_path)
