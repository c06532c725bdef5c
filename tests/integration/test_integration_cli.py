"""Our two programs: their last line is JSON, their errors are one line and exit code 2.

That the installed programs end as the functions called here is held by test_command_lines.py.
"""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from engines import MODEL, REPLICAS, altered, run_program
from in_this_process import run_here
from until import until

from ndp_device.common.errors import ConfigError


def test_a_host_that_is_killed_leaves_neither_its_device_nor_the_private_directory():
    """SIGKILL: the host cannot clean up, so its device does."""
    host = (
        "import os, pathlib, sys; from vllm_ndp.device_client.process import DeviceProcess; "
        "device = DeviceProcess.spawn(pathlib.Path(sys.argv[1]), None); "
        "print(device.pid, device.directory, flush=True); os.kill(os.getpid(), 9)"
    )
    done = run_program(sys.executable, "-c", host, MODEL)
    pid, directory = done.stdout.split()
    until(lambda: not Path(directory).exists())
    until(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.vllm
def test_demo_shows_a_table() -> None:
    """As a program, with its JSON: test_smoke_demo.py."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()  # that of an engine which failed in a test before
    done = run_here("vllm-ndp", "demo", "--tokens", "2")
    assert done.returncode == 0, done.stderr
    assert "8 requests in one batch; cold experts computed by process" in done.stdout
    assert "{" not in done.stdout


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["verify", "no/such/model"], "no config.json in no/such/model"),
        (["demo", "docs"], "no config.json in docs"),
        (["demo", "--hot-experts", "9"], "'hot_experts' is 9, the model has only 8"),
    ],
)
def test_vllm_ndp_refuses_in_one_line(arguments: list[str], wanted: str):
    done = run_here("vllm-ndp", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm-ndp: ")
    assert wanted in last
    assert "Traceback" not in done.stderr


def _model(directory: Path, kind: str) -> Path:
    """The bundled model, with a type that nobody knows, with code of its own, or without tokenizer."""
    if kind == "no tokenizer":
        for path in altered(directory).glob("tokenizer*"):
            path.unlink()
        return directory
    own = {"auto_map": {"AutoConfig": "configuration_my.MyConfig"}} if kind == "its own code" else {}
    altered(directory, model_type="my_moe", architectures=["MyMoeForCausalLM"], **own)
    (directory / "configuration_my.py").write_text("raise SystemExit('the code of the model ran')\n")
    return directory


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("command", "kind", "says"),
    [
        ("demo {model}", "unknown type", "my_moe"),
        ("demo {model}", "its own code", "only with code that comes with the model, and this command runs none"),
        ("demo {model}", "no tokenizer", "tokenizer"),
        ("record {model} --prompts {prompts} --out {out}", "unknown type", "my_moe"),
    ],
)
def test_a_model_that_vllm_does_not_serve_is_one_sentence_with_its_reason(
    command: str, kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(tmp_path / "model", kind)
    (tmp_path / "prompts.txt").write_text("a prompt")
    words = command.format(model=model, prompts=tmp_path / "prompts.txt", out=tmp_path / "out").split()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    done = run_here("vllm-ndp", *words)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert said.startswith(f"vllm-ndp: vLLM cannot serve {model}: "), done.stderr
    assert says in said
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


# -- what is counted of a run, beside a pretended vLLM -----------------------------------------------------------------


class PretendedLLM:
    """Answers every prompt with the same tokens, or as it was told, and keeps how it was made."""

    made: list[dict[str, Any]]

    def __init__(self, answers: list[list[list[int]]], totals: list[dict[str, int]]) -> None:
        """answers: token ids of each prompt, by pass; totals: by call."""
        self._answers, self._totals = iter(answers), iter(totals)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

    def generate(self, prompts: list[str], *_: Any, **__: Any) -> list[Any]:
        return [
            SimpleNamespace(
                prompt_token_ids=[0] * 3,
                outputs=[SimpleNamespace(token_ids=tokens, text="[/b] :key: said")],
                kv_transfer_params={"ndp": REPORT | {"hot_pairs": 3 * (at == 0)}},
            )
            for at, tokens in enumerate(next(self._answers))
        ]

    def collective_rpc(self, name: str) -> list[dict[str, Any]]:
        return [STATUS if name == "ndp_status" else next(self._totals)]


REPORT = {"cold_pairs": 1, "fallback_pairs": 0, "avg_bits": 2.5, "output_tokens": 4}
REPORT |= {"measured_ttft_ms": 7.0, "measured_tpot_ms": 5.0, "simulated_ttft_us": 3.0, "simulated_tpot_us": 2.0}
STATUS = {"plugin_active": True, "device_pid": 8, "engine_pid": 9, "moe_layers": 4, "experts": 8, "hot_experts": 2}
STATUS |= {"hardware": "h", "pe_mode": "p"}


def pretend(monkeypatch: pytest.MonkeyPatch, *engines: PretendedLLM) -> list[dict[str, Any]]:
    """How each of these is asked for, once it is."""
    from vllm_ndp.integration import commands

    asked, left = list[dict[str, Any]](), iter(engines)
    monkeypatch.setattr(commands, "import_vllm", lambda: None)
    monkeypatch.setattr(commands, "quiet_llm", lambda model, **how: asked.append(how) or next(left))
    return asked


@pytest.mark.vllm
def test_verify_counts_every_token_of_every_pass_and_every_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ndp.integration.commands import verify

    same = [[1, 2, 3]] * 8
    other = [[1, 2, 4], *same[1:]]
    totals = [{"sidecar_mismatches": of, "row_checks": 10, "cold_pairs": 7, "fallback_pairs": 1} for of in (0, 2)]
    stock, eager, compiled = (
        PretendedLLM(*of) for of in (([same, other], []), ([same, other], totals[:1]), ([same, same], totals[1:]))
    )
    asked = pretend(monkeypatch, stock, eager, compiled)
    result = verify(MODEL, 3, 3)
    assert (result["tokens_identical"], result["tokens_total"]) == (4 * 24 - 1, 4 * 24)
    assert result["modes"]["eager, prefix cache"] == "23/24"
    assert [result[key] for key in totals[0]] == [2, 20, 14, 2]
    assert [how["enforce_eager"] for how in asked] == [True, True, False]
    settings = {"cold_precision": "full", "hot_experts": 3}
    assert [how.get("additional_config") for how in asked] == [None, {"ndp": settings}, {"ndp": settings}]


@pytest.mark.vllm
def test_demo_counts_what_its_prompts_did_and_not_its_warm_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_ndp.integration.commands import demo

    pairs = {"hot_pairs": 5, "cold_pairs": 6, "fallback_pairs": 7}
    after = {"hot_pairs": 15, "cold_pairs": 26, "fallback_pairs": 37}
    asked = pretend(monkeypatch, PretendedLLM([[[1]], [[1, 2, 3, 4]] * 8], [pairs, after]))
    told = demo(MODEL, None, 2, 2.5, 4)
    assert [told[name] for name in pairs] == [10, 20, 30]
    assert (told["tokens"], told["requests"], told["avg_bits"]) == (8 * 4, 8, 2.5)
    assert (told["measured_tpot_ms"], told["simulated_tpot_us"]) == (5.0, 2.0)
    assert asked[0]["additional_config"]["ndp"]["replicas"] == str(REPLICAS)  # beside the model
    shown = capsys.readouterr().out
    assert "[/b] :key: said…" in shown  # it ended by an error of the table's own markup
    rows = [line.split() for line in shown.splitlines() if "said" in line]
    cells = [[word for word in row if word not in "│┃|%"] for row in rows]
    assert cells[0][:8] == ["python", "75", "1", "2.50", "7.0", "5.00", "3.0", "2.0"]


@pytest.mark.vllm
@pytest.mark.parametrize(("hot", "in_force"), [(None, 8), (0, 0)])
def test_record_keeps_every_prompt_and_routes_only_unless_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hot: int | None, in_force: int
) -> None:
    from vllm_ndp.integration.commands import record

    (tmp_path / "prompts").write_text("one\nline\n\n \n\ntwo\n")
    answers = PretendedLLM([[[1, 2], [1, 2, 3]]], [{"steps": 4, "sidecar_mismatches": 1}])
    asked = pretend(monkeypatch, answers)
    told = record(MODEL, tmp_path / "prompts", tmp_path / "out", hot, 2.5, 3, 5)
    assert [told[name] for name in ("requests", "prompt_tokens", "tokens", "steps", "sidecar_mismatches")] == [
        *(2, 6, 5, 4, 1)
    ]
    settings = asked[0]["additional_config"]["ndp"]
    assert (settings["hot_experts"], settings["record"], asked[0]["max_num_seqs"]) == (
        *(in_force, str(tmp_path / "out"), 5),
    )
    (tmp_path / "prompts").write_text(" \n\n\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        record(MODEL, tmp_path / "prompts", tmp_path / "out", hot, 2.5, 3, 5)
