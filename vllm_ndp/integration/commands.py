"""`vllm-ndp demo`, `record` and `verify`: commands that start vLLM, in their own process and without its words.

What vLLM does not serve is one sentence. They run no code that comes with a model.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.common.errors import ConfigError, NdpError
from vllm_ndp.config import DEFAULT_HARDWARE, NdpSettings
from vllm_ndp.integration.refusals import words_of

_MOST_CHARACTERS = 400
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def import_vllm() -> None:
    """Import vLLM without its words; it runs in this process, since another would import all again.

    Variables that the user set stay.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, level in _QUIET.items():
        os.environ.setdefault(name, level)
    if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR":  # Triton is spoken of before vLLM sets that level
        for name in ("vllm.triton_utils.importing", "torch._library.triton"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.|torch\.")
    _ = importlib.import_module("vllm").LLM  # vLLM imports it when it is asked for


def quiet_llm(model: Path, **options: Any) -> Any:
    """vLLM's `LLM`, after `import_vllm`. Raises ConfigError with vLLM's reason where it does not serve this model."""
    from vllm import LLM

    try:
        return LLM(str(model), use_tqdm_on_load=False, disable_log_stats=True, **options)
    except NdpError:
        raise
    except Exception as error:  # vLLM and transformers raise whatever their parts raise
        said = words_of(error)
        if "trust_remote_code" in said or "trust-remote-code" in said:
            reason = (
                "vLLM knows its model type only with code that comes with the model, and this command runs none: use "
                "vllm serve --trust-remote-code, or give another model"
            )
        else:
            reason = f"{said[:_MOST_CHARACTERS]} ({type(error).__name__})"
        raise ConfigError(f"vLLM cannot serve {model}: {reason}") from None


# -- demo --------------------------------------------------------------------------------------------------------------

PROMPTS = {
    "python": "def read_config(path):\n    with open(path) as f:\n        data = json.load(f)\n    return",
    "c": "static int compare(const void *a, const void *b)\n{\n    const struct node *x = a;\n    if (x->",
    "prose": "It was a fine morning, and Elizabeth walked out before breakfast, determined to",
    "words": "noun: a small vessel for travel on water; synonyms: boat, ship; a person who",
    "sql": "The SELECT statement retrieves rows from a table. If the WHERE clause is specified, all rows that",
    "german": "Klicken Sie auf das Symbol, um die Datei zu öffnen. Wählen Sie im Menü",
    "xml": '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="48" height="48">\n  <g>\n    <path',
    "class": "class Cache:\n    def __init__(self, size):\n        self.items = {}\n\n    def get",
}


def demo(model: Path, replicas: Path | None, hot_experts: int, avg_bits: float | None, tokens: int) -> dict[str, Any]:
    """The whole journey in one command, printed so that a person sees what happened where."""
    shape = open_checkpoint(model).shape
    settings = _settings(hot_experts, avg_bits)
    NdpSettings.from_mapping(settings).resolve_hot_experts(shape.num_experts)
    beside = model.with_name(model.name + "-replicas")
    if replicas is None and (beside / "manifest.json").exists():
        replicas = beside
    if replicas is not None:
        settings["replicas"] = str(replicas.resolve())
    began = time.perf_counter()
    import_vllm()
    imported = time.perf_counter()
    from vllm import SamplingParams

    llm = quiet_llm(
        model,
        quantization="ndp",
        additional_config={"ndp": settings},
        max_model_len=512,
        max_num_seqs=len(PROMPTS),
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.generate(["warm up"], SamplingParams(max_tokens=2), use_tqdm=False)  # keep first-call costs out of the table
    before = llm.collective_rpc("ndp_totals")[0]
    ready = time.perf_counter()
    outputs = llm.generate(list(PROMPTS.values()), params, use_tqdm=False)
    seconds = time.perf_counter() - ready
    status, totals = llm.collective_rpc("ndp_status")[0], llm.collective_rpc("ndp_totals")[0]
    llm.llm_engine.engine_core.shutdown()
    reports = [output.kv_transfer_params["ndp"] for output in outputs]
    texts = [output.outputs[0].text for output in outputs]
    _show(status, reports, texts, seconds)
    num_tokens = sum(report["output_tokens"] for report in reports)
    return {
        "plugin_active": status["plugin_active"],
        "device_pid": status["device_pid"],
        "engine_pid": status["engine_pid"],
        "moe_layers": status["moe_layers"],
        "experts": status["experts"],
        "hot_experts": status["hot_experts"],
        "avg_bits": _mean([report["avg_bits"] for report in reports]),
        "requests": len(outputs),
        "tokens": num_tokens,
        "hot_pairs": totals["hot_pairs"] - before["hot_pairs"],
        "cold_pairs": totals["cold_pairs"] - before["cold_pairs"],
        "fallback_pairs": totals["fallback_pairs"] - before["fallback_pairs"],
        "measured_tpot_ms": _mean([report["measured_tpot_ms"] for report in reports]),
        "simulated_tpot_us": _mean([report["simulated_tpot_us"] for report in reports]),
        "measured_import_s": round(imported - began, 1),
        "measured_start_s": round(ready - imported, 1),
        "measured_generate_s": round(seconds, 1),
        "texts": texts,
    }


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4)


def _show(status: dict[str, Any], reports: list[dict[str, Any]], texts: list[str], seconds: float) -> None:
    console = Console(width=118, markup=False, emoji=False)  # a model may write [/b]
    table = Table(
        title=f"{len(reports)} requests in one batch; cold experts computed by process {status['device_pid']}",
        title_justify="left",
        caption="measured: wall clock of this machine.  simulated: "
        f"{status['hardware']}, {status['pe_mode']} arrays.  The two are never added.",
        caption_justify="left",
    )
    table.add_column("prompt")
    for name in (
        "hot\nshare",
        "cold\npairs",
        "bits",
        "measured\nTTFT ms",
        "measured\nTPOT ms",
        "simulated\nTTFT us",
        "simulated\nTPOT us",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what the model wrote", no_wrap=True)
    for name, report, text in zip(PROMPTS, reports, texts, strict=True):
        pairs = report["hot_pairs"] + report["cold_pairs"] + report["fallback_pairs"]
        table.add_row(
            name,
            f"{100 * report['hot_pairs'] / max(pairs, 1):.0f} %",
            str(report["cold_pairs"]),
            f"{report['avg_bits']:.2f}",
            f"{report['measured_ttft_ms']:.1f}",
            f"{report['measured_tpot_ms']:.2f}",
            f"{report['simulated_ttft_us']:.1f}",
            f"{report['simulated_tpot_us']:.1f}",
            text.replace("\n", "⏎")[:28] + "…",
        )
    console.print(table)
    tokens = sum(report["output_tokens"] for report in reports)
    console.print(f"{tokens} tokens in {seconds:.2f} s on this machine; engine pid {status['engine_pid']}.")


# -- record ------------------------------------------------------------------------------------------------------------


def record(
    model: Path,
    prompts_file: Path,
    out: Path,
    hot_experts: int | None,
    avg_bits: float | None,
    tokens: int,
    batch: int,
) -> dict[str, Any]:
    """Run prompts and keep every routing decision as a trace, as a server does with the setting `record`.

    By default every expert is hot, so that the run is stock vLLM's arithmetic, or that of a quantized checkpoint's
    own codes, and the trace holds routing only. With hot experts given it holds placements, bits and simulated times
    as well.
    """
    shape = open_checkpoint(model).shape
    hot = shape.num_experts if hot_experts is None else hot_experts
    settings = _settings(hot, avg_bits) | {"record": str(out.resolve())}
    NdpSettings.from_mapping(settings).resolve_hot_experts(shape.num_experts)
    prompts = _read_prompts(prompts_file)
    found = f"{len(prompts)} prompt{'s' * (len(prompts) > 1)}"
    print(f"vllm-ndp: {prompts_file} holds {found} (blank lines stand between them)", file=sys.stderr)
    import_vllm()
    from vllm import SamplingParams

    llm = quiet_llm(
        model,
        quantization="ndp",
        additional_config={"ndp": settings},
        enforce_eager=True,
        max_num_seqs=batch,
        kv_cache_memory_bytes=1 << 30,
    )
    params = SamplingParams(temperature=0.8, seed=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    totals = llm.collective_rpc("ndp_totals")[0]
    llm.llm_engine.engine_core.shutdown()  # the worker closes the trace
    return {
        "trace": str(out),
        "requests": len(outputs),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "steps": totals["steps"],
        "sidecar_mismatches": totals["sidecar_mismatches"],
        "measured_seconds": round(seconds, 3),
    }


def _settings(hot_experts: int, avg_bits: float | None) -> dict[str, Any]:
    """None: the plugin's default, by which a quantized checkpoint's experts run as stored."""
    asked = {} if avg_bits is None else {"avg_bits": avg_bits}
    return {"hot_experts": hot_experts, "hardware": DEFAULT_HARDWARE, **asked}


def _read_prompts(path: Path) -> list[str]:
    """Prompts separated by blank lines."""
    try:
        prompts = [part for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts must be a UTF-8 text file with blank lines between prompts: {error}") from None
    if not prompts:
        raise ConfigError(f"{path} holds no prompt: write at least one")
    return prompts


# -- verify ------------------------------------------------------------------------------------------------------------

_REPEATS = 6  # long enough that a 64-token budget cuts every prompt into chunks


def verify(model: Path, hot_experts: int | None, tokens: int) -> dict[str, Any]:
    """Is the plugin stock vLLM when nothing is quantized? fp32, greedy, token by token.

    Four ways through the same prompts: eager and compiled, each with a chunked prefill pass and a second pass that hits
    the prefix cache. Every comparison is with stock vLLM on the same prompts in the same process.
    """
    shape = open_checkpoint(model).shape
    settings = NdpSettings(cold_precision="full", hot_experts=hot_experts)
    settings.resolve_hot_experts(shape.num_experts)
    import_vllm()
    prompts = [words * _REPEATS for words in PROMPTS.values()]
    stock = _generate(model, prompts, tokens, enforce_eager=True, settings=None)[0][0]
    result: dict[str, Any] = {"tokens_total": 0, "tokens_identical": 0, "sidecar_mismatches": 0, "row_checks": 0}
    result |= {"cold_pairs": 0, "fallback_pairs": 0, "modes": {}}
    plugin = {"cold_precision": settings.cold_precision, "hot_experts": settings.hot_experts}
    for mode, eager in (("eager", True), ("compiled", False)):
        passes, totals = _generate(model, prompts, tokens, enforce_eager=eager, settings=plugin)
        for name, outputs in zip(("chunked prefill", "prefix cache"), passes, strict=True):
            same = sum(a == b for mine, theirs in zip(outputs, stock, strict=True) for a, b in zip(mine, theirs))  # noqa: B905
            total = sum(len(tokens_of_prompt) for tokens_of_prompt in stock)
            result["modes"][f"{mode}, {name}"] = f"{same}/{total}"
            result["tokens_identical"] += same
            result["tokens_total"] += total
            print(f"{mode}, {name}: {same} of {total} tokens identical", file=sys.stderr)
        for key in ("sidecar_mismatches", "row_checks", "cold_pairs", "fallback_pairs"):
            result[key] += totals[key]
    return result


def _generate(
    model: Path, prompts: list[str], tokens: int, *, enforce_eager: bool, settings: dict[str, Any] | None
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """Token ids of two passes (the second hits the prefix cache), and the plugin's totals."""
    from vllm import SamplingParams

    plugin: dict[str, Any] = {} if settings is None else {"quantization": "ndp", "additional_config": {"ndp": settings}}
    llm = quiet_llm(
        model,
        dtype="float32",
        enforce_eager=enforce_eager,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=64,
        max_num_seqs=len(prompts),
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        **plugin,
    )
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    passes = [
        [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
        for _ in range(2)
    ]
    totals = llm.collective_rpc("ndp_totals")[0] if settings is not None else {}
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return passes, totals
