"""Real vLLM engines for tests: small, in this process, started and ended so that the next one can follow.

Knows how to start vLLM, and how to look at the processes it leaves. Knows no test.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:  # a program without the plugin imports this file, and must find none of our modules
    from ndp_device.common.errors import NdpError
    from vllm_ndp.lab.exact.live import LiveReplay
    from vllm_ndp.traces.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-mixtral"
REPLICAS = ROOT / "models" / "tiny-mixtral-replicas"
BIN = Path(sys.executable).parent
VLLM_PROGRAM, NDP_PROGRAM = BIN / "vllm", BIN / "vllm-ndp"

IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines in this process start in seconds and free their memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound, every later test and every second worker would share one core
}
"""What conftest.py sets for engines in this process only; programs of their own bind their threads as users' do."""

PROMPTS = (
    "def parse(line):\n    parts = line.split(',')\n    for part in parts:\n",
    "static void free_list(struct node *head)\n{\n    while (head) {\n",
    "She had always wished to see the sea, and now that the carriage stood at the door",
    "CREATE TABLE orders (id integer PRIMARY KEY, total numeric);",
)

PATIENCE_S = 600
"""How long a program may take. `vllm serve` starts in 25 s on a quiet machine, in five minutes with load 10."""

PATIENT_DEADLINE_MS = 20_000.0
"""How long an engine of these tests waits for its device, where the default is one second.

On a machine with load 10 a device answers later than that now and then. The engine then computes those experts itself,
as it should, and what a test says of the device (pairs computed there, tokens at its widths) is not what happened.
Waiting longer changes nothing on a quiet machine. The default is tested where late answers are allowed for:
test_integration_faults.py, test_integration_offline.py and the demo.
"""

_SMALL: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,  # what vLLM's CPU attention needs
    "disable_log_stats": True,
}


def latent_attention(model: Path) -> dict[str, Any]:
    """Options of a model with latent attention: on AMX vLLM chooses a backend for it that has no float32."""
    return {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in (model / "config.json").read_text() else {}


@contextmanager
def engine(model: Path = MODEL, *, settings: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """A small `vllm.LLM` in this process: stock, or with the plugin when `settings` is given (`{}` = its defaults).

    `options` replace those of `_SMALL`, and `settings` the patient deadline and the named hardware, by whose prices
    every machine decides alike. It is shut down at the end, so another engine can follow.
    """
    from vllm import LLM
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    plugin: dict[str, Any] = {}
    if settings is not None:
        ndp = {"deadline_ms": PATIENT_DEADLINE_MS, "hardware": "h100-ndp512"} | settings
        plugin = {"quantization": "ndp", "additional_config": {"ndp": ndp}}
    ensure_kv_transfer_shutdown()  # vLLM keeps the connector of an engine that failed to start or in a step
    llm = LLM(str(model), **(_SMALL | latent_attention(model) | plugin | options))
    try:
        yield llm
        if settings is not None:
            check_pairs_of_engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def check_pairs_of_engine(llm: Any) -> None:
    """Each worker's totals: no pair was lost, counted twice or taken for another phase's, whatever the test did."""
    told = zip(llm.collective_rpc("ndp_status"), llm.collective_rpc("ndp_totals"), strict=True)
    for status, totals in told:
        check_pairs(totals, status["moe_layers"] * status["top_k"])
        here = totals["fallback_pairs"] + totals["prefill_fallback_pairs"]  # of whole steps: one may have been lost
        assert sum(totals["fallback_causes"].values()) >= here


def check_pairs(counts: Mapping[str, Any], pairs_per_row: int) -> None:
    """Of a report, of totals, or of what /metrics grew by: the kinds of each phase add up to its rows' pairs."""
    from vllm_ndp.layer.split import DECODE_KINDS, PROMPT_KINDS  # a program without the plugin imports this file

    for phase, kinds in (("decode", DECODE_KINDS), ("prompt", PROMPT_KINDS)):
        pairs = {kind: counts[f"{kind}_pairs"] for kind in kinds}
        assert sum(pairs.values()) == counts[f"{phase}_rows"] * pairs_per_row, (phase, pairs, counts)


def greedy(llm: Any, prompts: Sequence[Any], tokens: int | Sequence[int], lora: Any = None, **params: Any) -> list[Any]:
    """RequestOutputs of so many greedy tokens per prompt, whatever the model thinks of ending."""
    from vllm import SamplingParams

    counts = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    sampling = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **params) for count in counts]
    return list(llm.generate(list(prompts), sampling, use_tqdm=False, lora_request=lora))


LONG_PROMPTS = tuple(prompt * 4 for prompt in PROMPTS)
"""Chunked where a step takes 64 rows, and in the prefix cache afterwards."""
_MOST_TOKENS = 24


def stock_tokens_of(prompts: Sequence[str], tokens: int) -> list[list[int]]:
    """Greedy tokens of stock vLLM in float32, of the bundled model; an engine starts once for the same prompts."""
    assert tokens <= _MOST_TOKENS
    return [whole[:tokens] for whole in _stock_tokens_of(tuple(prompts))]


@cache
def _stock_tokens_of(prompts: tuple[str, ...]) -> list[list[int]]:
    with engine(max_num_batched_tokens=64) as llm:
        return token_ids(greedy(llm, prompts, _MOST_TOKENS))


def kill_in_the_middle(llm: Any, prompts: Sequence[str], tokens: int, pid: int) -> list[list[int]]:
    """Tokens of the prompts, while a process is killed once each of them has some."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"k{index}", prompt, sampling)
    found: dict[str, list[int]] = {}
    killed = False
    while llm.llm_engine.has_unfinished_requests():
        if not killed and len(found) == len(prompts):
            os.kill(pid, signal.SIGKILL)
            killed = True
        for output in llm.llm_engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    assert killed
    return [found[name] for name in sorted(found)]


def token_ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def altered(
    out: Path, model: Path = MODEL, *, change: Callable[[dict[str, Any]], object] | None = None, **config: Any
) -> Path:
    """A copy of a model: `change` alters its tensors by name, `config` replaces entries of config.json."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, out, ignore=shutil.ignore_patterns("eval", "traces", "licences"))
    if change is not None:
        change(tensors := load_file(out / "model.safetensors"))
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return out


def trace_of(directory: Path, model: Path = MODEL) -> Trace:
    """What an engine with this model has recorded."""
    from ndp_device.checkpoint.files import model_digest
    from vllm_ndp.traces.trace import Trace

    return Trace.load(directory, model_digest=model_digest(model))


def replay_of(trace: Trace) -> LiveReplay:
    """As `vllm-ndp replay` makes it, which finds the losses that the run planned with."""
    from vllm_ndp.lab.cli.recorded import losses_of_run
    from vllm_ndp.lab.exact.live import replay_live

    return replay_live(trace, losses_of_run(trace, None))


@cache
def parser() -> Any:
    """Of `vllm serve`. vLLM writes into the defaults of what it parsed: copy that."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def user_environment(**changes: str) -> dict[str, str]:
    """What a program started by a user would see: the tests' environment without what suits engines in this process."""
    environment = {name: value for name, value in os.environ.items() if name not in IN_PROCESS}
    return environment | changes


def free_port() -> int:
    """Of the loopback, by the system's choice."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_program(
    *command: str | Path, timeout_s: float = PATIENCE_S, cwd: Path = ROOT, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run to its end with captured output. `changes` go into its environment."""
    return subprocess.run(
        [str(part) for part in command],
        env=user_environment(**changes),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def last_json(text: str) -> dict[str, Any]:
    """The JSON object on the last line of a program's stdout."""
    result = json.loads(text.strip().splitlines()[-1])
    assert isinstance(result, dict)
    return result


def device_processes(ancestor_pid: int | None = None) -> list[psutil.Process]:
    """The ndp device processes below a process (default: this one)."""
    below = psutil.Process(ancestor_pid).children(recursive=True)
    return [process for process in below if _is_device(process)]


def _is_device(process: psutil.Process) -> bool:
    try:
        return "ndp_device" in process.cmdline()
    except psutil.Error:
        return False


def sentence(error: pytest.ExceptionInfo[NdpError]) -> str:
    """The message, after checking that it is one line without a trace of how it came about."""
    text = str(error.value)
    assert "\n" not in text
    assert "Traceback" not in text
    assert 20 < len(text) < 400
    return text
