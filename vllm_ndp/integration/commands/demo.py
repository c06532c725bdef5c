"""`vllm-ndp demo`: the whole journey in one command, printed so that a person sees what happened where."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ndp_device.checkpoint.opening import open_checkpoint
from vllm_ndp.config import DEFAULT_HARDWARE, NdpSettings
from vllm_ndp.integration.commands.engines import import_vllm, quiet_llm

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


def run(model: Path, replicas: Path | None, hot_experts: int, avg_bits: float, tokens: int) -> dict[str, Any]:
    shape = open_checkpoint(model).shape
    NdpSettings(hot_experts=hot_experts, avg_bits=avg_bits).resolve_hot_experts(shape.num_experts)
    beside = model.with_name(model.name + "-replicas")
    if replicas is None and (beside / "manifest.json").exists():
        replicas = beside
    settings: dict[str, Any] = {"hot_experts": hot_experts, "avg_bits": avg_bits, "hardware": DEFAULT_HARDWARE}
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
    console = Console(width=118)
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
