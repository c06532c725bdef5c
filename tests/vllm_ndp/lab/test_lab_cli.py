"""The lab's commands: a table, or one JSON object with --json; one sentence and exit code 2 for bad input.

They run in this process (tests/in_this_process.py).
"""

import csv
import json
import subprocess
from dataclasses import replace

import msgspec
import numpy as np
import pyarrow.parquet
import pytest
from in_this_process import run_here
from paths import DATA, ROOT

from ndp_device.replicas.format import load_losses
from vllm_ndp.lab.cli.recorded import losses
from vllm_ndp.layer.setup import Setup
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.slow  # together

TRACE = str(DATA / "tiny-mixtral-trace")


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """As `vllm-ndp ARGUMENTS`, whose exit code must be `code`."""
    done = run_here("vllm-ndp", *arguments)
    assert done.returncode == code, done.stderr
    return done


def told(*arguments: str) -> dict:
    """The one object that a command prints with --json."""
    return json.loads(run(*arguments, "--json").stdout)


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_compare_prints_a_table_and_the_same_rows_as_a_file_and_json(tmp_path):
    done = run(
        "compare", TRACE, "--systems", "context_aware, monde", "--policies", "prefill,oracle",
        "--batch", "1,4,64", "--out", str(tmp_path / "t.csv"), "--set", "dram.kind=ideal",
    )  # fmt: skip
    result = told(
        "compare", TRACE, "--systems", "context_aware, monde", "--policies", "prefill,oracle",
        "--batch", "1,4,64", "--set", "dram.kind=ideal",
    )  # fmt: skip
    assert "{" not in done.stdout
    assert len(result["rows"]) == 2 * (2 + 3)
    assert result["skipped"] == ["batch 64: only 12 requests to replay"]
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == [row["policy"] for row in result["rows"]]
    assert float(rows[0]["decode_tokens_per_s"]) == pytest.approx(result["rows"][0]["decode_tokens_per_s"])
    assert "context_aware" in done.stdout
    assert "tokens/s" in done.stdout
    late = run("compare", TRACE, "--out", str(tmp_path / "t.txt"), code=2)
    assert "must end with one of .parquet, .csv, .md" in late.stderr
    assert not late.stdout, "before anything is computed"
    assert float(rows[1]["over_paper"]) == pytest.approx(
        float(rows[1]["decode_tokens_per_s"]) / float(rows[0]["decode_tokens_per_s"]) - 1
    )


def test_several_values_of_an_option_are_a_grid_whose_rows_name_their_point(tmp_path):
    words = ["--systems", "fiddler,monde", "--memory", "24,80", "--avg-bits", "2,3", "--fit", "--jobs", "2"]
    result = told("compare", TRACE, *words, "--out", str(tmp_path / "rows.parquet"))
    rows = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert rows == result["rows"]
    assert [(row["memory_gb"], row["asked_bits"]) for row in rows[::4]] == [(24, 2), (24, 3), (80, 2), (80, 3)]


def test_arrivals_prints_latencies_whose_causes_add_up_and_every_token_as_csv(tmp_path):
    model = str(DATA.parent.parent / "models" / "tiny-mixtral")
    hosts = told(
        "arrivals", TRACE, TRACE, "--model", model, "--process", "bursty", "--rate", "500", "--requests", "3",
        "--goodput", "ttft:500", "--out", str(tmp_path / "tokens.csv"),
    )["hosts"]  # fmt: skip
    assert [host["tokens"] for host in hosts] == [3 * 257, 3 * 257]
    with (tmp_path / "tokens.csv").open() as file:
        rows = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]
    for number, host in enumerate(hosts):
        of = [row for row in rows if row["host"] == number]
        first = min(of, key=lambda row: row["simulated_at_ps"])
        causes = [name for name in first if name.endswith("_ps") and "_at_" not in name]
        came = first["simulated_at_ps"] - sum(first[name] for name in causes)
        took = max(row["simulated_at_ps"] for row in of) - came
        assert host["simulated_tokens_per_s"] == pytest.approx(len(of) / (took / 1e12))
        for latency in ("ttft_p50", "ttft_p99.9", "tpot_p90", "tpot_p99.9"):
            assert host[latency]["simulated_ps"] == sum(host[latency]["causes_ps"].values())
    assert len(rows) == 6 * 257
    assert "request_goodput" in hosts[0]["simulated_bench_serve"]


def test_an_average_below_2_bits_is_called_of_no_use_on_stderr():
    few, enough = (run("compare", TRACE, "--systems", "monde", "--avg-bits", bits) for bits in ("1.5", "2"))
    assert few.returncode == enough.returncode == 0
    assert "1.5 bits on average are too few for useful answers" in few.stderr
    assert "too few" not in enough.stderr


def test_a_recording_that_was_cut_off_is_used_and_said_to_be(tmp_path):
    whole = Trace.load(DATA / "tiny-mixtral-trace")
    replace(whole, complete=False).save(tmp_path / "cut")
    cut, done = (run("analyze", path, "--json") for path in (str(tmp_path / "cut"), TRACE))
    assert last_json(cut) == last_json(done) | {"trace": str(tmp_path / "cut")}
    assert (
        f"was cut off; its {len(whole.prompt_len)} requests and {len(whole.step)} rows on disk are used" in cut.stderr
    )
    assert "cut off" not in done.stderr


def test_a_trace_is_synthesised_analysed_and_its_prior_used(tmp_path):
    trace, prior = str(tmp_path / "trace"), str(tmp_path / "prior.npy")
    made = last_json(
        run("trace-synth", "mixtral-8x7b", "--out", trace, "--requests", "8", "--prompt-len", "16",
            "--decode-len", "16")
    )  # fmt: skip
    assert (made["requests"], made["layers"], made["experts"]) == (8, 32, 8)
    analysed = told("analyze", trace, "--prior-out", prior)
    assert analysed["coverage"]["oracle"]["mean"] > analysed["coverage"]["prompt"]["mean"]
    assert np.load(prior).shape == (32, 8)
    used = told("compare", trace, "--systems", "fiddler", "--prior", prior)
    assert used["num_requests"] == 8
    assert told("analyze", trace, "--hot-experts", "8")["coverage"]["prompt"]["mean"] == 1


def test_what_a_command_would_ignore_is_refused_and_what_one_system_refuses_is_told():
    replicas = ("--replicas", str(REPLICAS))
    for words, says in (
        (("compare", TRACE, TRACE, *replicas), "--replicas belong to one trace, 2 were given"),
        (("arrivals", TRACE, TRACE, *replicas), "--replicas belong to one trace, 2 were given"),
        (("compare", TRACE, "--policy-option", "losses=absolute"), "give --replicas too"),
        (("reproduce", "paper", TRACE), "a trace belongs to hobbit, got one with 'paper'"),
    ):
        assert says in run(*words, code=2).stderr
    assert [row["name"] for row in told("reproduce", "hobbit", TRACE)["rows"]].count("mix") == 3
    found = told("compare", TRACE, "--systems", "fiddler,balanced", "--option", "spill_bits=5")
    assert [one["why"] for one in found["refused"]] == ["spill_bits must be one of 1, 2, 3, 4, got 5"]
    usual, *measured = (
        told("compare", TRACE, "--systems", "context_aware", *words)["rows"][0]["loss"]
        for words in ((), replicas, (*replicas, "--policy-option", "losses=absolute"))
    )
    assert len({usual, *measured}) == 3, "each by its own table"
    served = [told("arrivals", TRACE, "--requests", "1", *words)["hosts"] for words in ((), replicas)]
    assert served[0] != served[1]


REPLICAS = ROOT / "models" / "tiny-mixtral-replicas"


@pytest.mark.parametrize("first", [0, 2])
def test_a_stages_trace_takes_its_own_layers_of_the_models_replicas(first: int):
    whole = Trace.load(DATA / "tiny-mixtral-trace")
    setup = Setup(
        preset="h100-ndp512",
        overrides={},
        host_dims={},
        expert_bytes={},
        group_size=32,
        activation_bytes=2,
        stage=first // 2,
        num_stages=2,
        first_layer=first,
    )
    provenance = msgspec.structs.replace(whole.provenance, num_layers=2, live=setup)
    trace = replace(whole, provenance=provenance, ids=whole.ids[:, :2], weights=whole.weights[:, :2])
    found = losses(trace, REPLICAS).mse
    assert np.array_equal(found, LossTable.from_measured(*load_losses(REPLICAS, "relative")).mse[first : first + 2])
