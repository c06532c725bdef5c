"""The end-to-end benchmark's figures and arguments; the systems themselves are far too large for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-mixtral"
sys.path.insert(0, str(ROOT / "benchmarks"))
import end_to_end  # noqa: E402
import end_to_end_named  # noqa: E402
import end_to_end_rows  # noqa: E402
import end_to_end_systems  # noqa: E402
import end_to_end_threads  # noqa: E402

MIXTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 4096,
}


def one_pass(step_s: float, foreign: float = 0.0, steps: int = 9, prefill_s: float = 1.0) -> dict[str, Any]:
    """The first step holds a migration of a second."""
    return {"prefill_s": prefill_s, "steps_s": [1.0] + [step_s] * (steps - 1), "foreign": [foreign] * (steps + 1)}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "--model must be a checkpoint directory"),
        (["--model", "/nowhere"], "--model must be a checkpoint directory"),
        (["--model", str(MODEL), "--systems", "stock-bf16,stock"], "got 'stock'"),
        (["--model", str(MODEL), "--batches", "1,x"], "got '1,x'"),
        (["--model", str(MODEL), "--batches", "0"], "must be at least 1"),
        (["--model", str(MODEL), "--tokens", "1"], "--tokens at least 2"),
        (["--model", str(MODEL), "--cores", "4097"], "--cores must lie in 1.."),
        (["--model", str(MODEL), "--systems", "3db895e-cold4"], "--before must be a checkout of 3db895e"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        end_to_end.parse(arguments)
    assert stop.value.code == 2
    assert wanted in capsys.readouterr().err.splitlines()[-1]


def test_laps_leave_no_time_out_and_looks_at_other_programs_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 ms and looks of 5 ms on a clock that only they move: one before, one after the prefill, one for each
    quarter of a second, one at the end. An engine in another process computes during a look, so its time counts."""
    now, looks = [0.0], []

    def look(_: object) -> float:
        now[0] += 0.005
        looks.append(now[0])
        return now[0] / 2

    monkeypatch.setattr(end_to_end_systems.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(end_to_end_systems.StepClock, "_foreign_s", look)
    clock = end_to_end_systems.StepClock()
    for _ in range(61):
        now[0] += 0.01
        clock.lap()
    ended = now[0] - (looks[-1] == now[0]) * 0.005
    done = clock.to_pass()
    assert done.prefill_s + sum(done.steps_s) == pytest.approx(ended - looks[0])
    assert len(done.foreign) == 61
    assert all(0.4 < share < 0.6 for share in done.foreign)
    assert len(looks) == 5


def test_steps_beside_which_others_computed_do_not_count() -> None:
    one = one_pass(0.1)
    one["steps_s"][5:], one["foreign"][6:] = [0.5] * 4, [1.0] * 4
    assert end_to_end_rows.step_ms(
        one_pass(0.1) | {"steps_s": one["steps_s"] + [0.1] * 3, "foreign": one["foreign"] + [0.0] * 3}
    ) == (
        pytest.approx(100),
        7,
    )


def test_too_few_quiet_steps_and_all_are_taken() -> None:
    one = one_pass(0.5, foreign=1.0, steps=5)
    assert end_to_end_rows.step_ms(one) == (pytest.approx(500), 0)


def test_a_system_s_figure_is_the_median_of_its_rounds_and_a_ratio_that_of_the_rounds_ratios() -> None:
    """Stock's second round met a slow minute, as ours did: the ratio does not move."""
    stock = end_to_end_rows.figures_of([one_pass(step) for step in (0.2, 0.8, 0.2)], batch=8, prompt_tokens=32)
    ours = end_to_end_rows.figures_of([one_pass(step) for step in (0.1, 0.4, 0.1)], batch=8, prompt_tokens=32)
    assert ours["decode_tokens_per_s"] == pytest.approx(80)
    assert ours["prefill_tokens_per_s"] == pytest.approx(256)
    assert ours["first_step_ms"] == pytest.approx(1000)
    assert ours["quiet_steps"] == 24
    assert ours["rounds"]["decode_tokens_per_s"] == pytest.approx([80, 20, 80])
    assert end_to_end_rows.in_turns(ours, stock, "decode_tokens_per_s") == pytest.approx(2)


def test_a_token_reads_its_experts_attention_and_output_matrix() -> None:
    """Mixtral's width: 352 MB an expert in bf16, 71.6 at 3 bits; attention 84 MB a layer; 4096 words 34 MB."""
    other = end_to_end_rows.other_bytes(MIXTRAL)
    assert other == pytest.approx(2 * 83.9e6 + 33.6e6, rel=0.01)
    stock = end_to_end_rows.floor_bytes(end_to_end_named.SYSTEMS["stock-bf16"], MIXTRAL, 1.0, 0)
    assert stock == pytest.approx(other + 4 * 352.3e6, rel=1e-3)
    half = end_to_end_rows.floor_bytes(end_to_end_named.SYSTEMS["hot4-cold3"], MIXTRAL, 0.5, 0)
    assert half == pytest.approx(other + 2 * 352.3e6 + 2 * 71.6e6, rel=1e-3)
    slots = end_to_end_rows.floor_bytes(end_to_end_named.SYSTEMS["slots4-linear4"], MIXTRAL, 1.0, 0)
    on_device = end_to_end_rows.floor_bytes(end_to_end_named.SYSTEMS["defaults-linear4"], MIXTRAL, 0.0, 0)
    assert slots == pytest.approx(on_device)  # hot slots of 4 bits
    whole = other + 16 * 352.3e6
    same = end_to_end_rows.floor_bytes(end_to_end_named.SYSTEMS["llama-q4_0"], MIXTRAL, 1.0, int(whole))
    assert same == pytest.approx(stock, rel=1e-3)  # a file of 16 bits costs what stock costs


def test_table_and_json_hold_measured_and_missing_systems() -> None:
    arguments = end_to_end.parse(["--model", str(MODEL), "--batches", "1", "--systems", "stock-bf16,hot4-cold3"])
    memory = {"engine_anonymous_bytes": 7 << 30, "device_rss_bytes": 1 << 30, "device_anonymous_bytes": 1 << 29}
    status = {"hot_bytes": 0, "staging_bytes": 0, "device_bytes": 1 << 30}
    rounds = {
        step: [{"passes": {"1": one_pass(step)}, "long_prompt_s": seconds} for seconds in (9, 4, 4)]
        for step in (0.1, 0.2)
    }
    plugin = {"memory": memory, "status": status, "pairs": {"hot_pairs": 30, "cold_pairs": 10, "prefill_pairs": 99}}
    entries = [
        end_to_end_rows.summarise("stock-bf16", rounds[0.2], {"memory": memory}, arguments),
        end_to_end_rows.summarise("hot4-cold3", rounds[0.1], plugin, arguments),
        {"system": "vllm-int4", "unavailable": "no AMX"},
    ]
    entries = [{"group": 0, **entry} for entry in entries]
    for entry in entries[:2]:
        entry["resident_over_served"] = end_to_end_rows.resident_over_served(entry, MIXTRAL)
    assert json.loads(json.dumps(entries))[1]["hot_share"] == 0.75
    output = StringIO()
    Console(file=output, width=250).print(end_to_end_rows.table_of(entries, arguments, "title"))
    assert "10.0 (2.00)" in output.getvalue()
    assert entries[1]["long_prompt"]["prefill_tokens_per_s"] == 128
    assert "one prompt of 512" in output.getvalue()
    assert "not available: no AMX" in output.getvalue()


def test_processor_time_is_that_of_the_thread_that_computed() -> None:
    before = end_to_end_threads.thread_times(os.getpid())
    numbers: list[int] = []

    def compute() -> None:
        numbers.append(threading.get_native_id())
        while time.thread_time() < 0.1:
            pass
        done.wait()

    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(compute)
        while end_to_end_threads.thread_times(os.getpid()).get(_thread(numbers), _IDLE).ran < 0.1:
            time.sleep(0.01)
        after = end_to_end_threads.thread_times(os.getpid())
        done.set()
        computing.result()
    spent = end_to_end_threads.spent_between(before, after)[_thread(numbers)]
    assert spent.ran >= 0.1
    rows = end_to_end_threads.rows_of_step(before, after, steps=10)
    assert {(row["process"], row["thread"]) for row in rows if row["ms"] >= 10} >= {("front-end", _comm())}
    output = StringIO()
    table = end_to_end_threads.table_of_threads([{"system": "defaults", "threads": rows}], batch=1)
    Console(file=output, width=200).print(table)
    assert "front-end" in output.getvalue()


_IDLE = end_to_end_threads.Spent(0, 0, 0)


def _comm() -> str:
    return Path("/proc/self/comm").read_text().strip()


def _thread(numbers: list[int]) -> end_to_end_threads.Thread:
    return end_to_end_threads.Thread("front-end", _comm(), numbers[0] if numbers else 0)


def test_a_share_of_the_experts_is_a_number_of_this_model_s_and_the_instruction_sets_are_a_matter_of_the_environment(
    tmp_path: Path,
) -> None:
    arguments = end_to_end.parse(["--model", str(MODEL), "--replicas", str(tmp_path), "--long-prompt", "64"])
    experts = json.loads((MODEL / "config.json").read_text())["num_local_experts"]
    for name, count in (("all-hot", experts), ("hot4-cold3", experts // 2), ("hot0-cold4", 0)):
        job = end_to_end_named.job_of(name, arguments)
        assert job.engine["additional_config"]["ndp"]["hot_experts"] == count
        assert (job.longest, job.most_at_once) == (96, 1024)
    assert "hot_experts" not in end_to_end_named.job_of("defaults", arguments).engine["additional_config"]["ndp"]
    assert "NDP_ISA" not in end_to_end_named.environment_of("defaults", arguments)
    narrow = end_to_end.parse(["--model", str(MODEL), "--replicas", str(tmp_path), "--isa", "avx2"])
    assert end_to_end_named.environment_of("defaults", narrow)["NDP_ISA"] == "avx2"


@pytest.mark.parametrize(("isa", "said"), [("avx512", ["False"]), ("avx2", ["False", "False", "AVX2"])])
def test_a_process_that_is_told_of_fewer_instruction_sets_loads_no_wider_extension(isa: str, said: list[str]) -> None:
    asked = "torch.cpu._is_amx_tile_supported()"
    if isa == "avx2":
        asked += ", torch.cpu._is_avx512_supported(), torch.backends.cpu.get_cpu_capability()"
    source = f"import end_to_end_systems, torch; print({asked})"
    environment = os.environ | end_to_end_systems.ISAS[isa] | {"PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == said


def test_a_job_survives_the_way_to_its_process() -> None:
    job = end_to_end_systems.Job("a", "vllm", "m", (1, 8), 32, 16, {"quantization": "ndp"})
    assert end_to_end_systems.Job.parse(job.to_json()) == job


def test_memory_is_held_against_the_weights_that_are_served_and_the_cache() -> None:
    """Stock holds all in 16 bits; the plugin the device's replicas, and nothing of the experts."""
    experts, rest = (
        16 * end_to_end_rows.expert_bytes(MIXTRAL, 16),
        end_to_end_rows.other_bytes(MIXTRAL) + 2 * 4096 * 4096,
    )
    cache = end_to_end_systems.KV_BYTES
    stock = {"system": "stock-bf16", "memory": {"engine_anonymous_bytes": experts + rest + cache}}
    assert end_to_end_rows.resident_over_served(stock, MIXTRAL) == pytest.approx(1)
    status = {"hot_bytes": 0, "staging_bytes": 0, "device_bytes": 1 << 30}
    memory = {"engine_anonymous_bytes": rest + cache, "device_anonymous_bytes": 2 << 30, "device_rss_bytes": 9 << 30}
    ours = {"system": "defaults-linear16", "memory": memory, "status": status}
    assert end_to_end_rows.resident_over_served(ours, MIXTRAL) == pytest.approx(
        1 + (1 << 30) / (rest + cache + (1 << 30))
    )


def test_a_system_without_its_files_says_which_are_missing(tmp_path: Path) -> None:
    arguments = end_to_end.parse(["--model", str(MODEL), "--gguf", str(tmp_path)])
    for name, missing in (("hot4-cold3", "--replicas"), ("llama-q4_0", "q4_0.gguf")):
        with pytest.raises(end_to_end_named.Unavailable, match=missing):
            end_to_end_named.job_of(name, arguments)
