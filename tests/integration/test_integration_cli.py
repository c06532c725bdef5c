"""Our two programs: their last line is JSON, their errors are one line and exit code 2.

That the installed programs end as the functions called here is held by test_command_lines.py.
"""

import io
import sys
from pathlib import Path

import psutil
import pytest
from engines import MODEL, altered, run_program
from in_this_process import run_here
from until import until


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
