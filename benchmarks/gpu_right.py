"""Pieces of gpu_check.py that ask whether it is right: kernels, tokens, log-probabilities, a device that dies.

A wrong answer raises where nothing else could be trusted; else the figures say how many tokens are equal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_engines as engines
from gpu_engines import HALF, PATIENT_MS, PROMPTS
from measured import ROOT
from pieces import LeftOutError, Row, Run

TESTS = ROOT / "tests/integration"


def kernels(run: Run) -> dict[str, Any]:
    """The tests of the device's kernels on every path of this processor. AMX is chosen by itself where there is
    one."""
    tests = ROOT / "tests/ndp_device/kernels" / ("test_kernels_reference.py" if run.dry else "")
    return {"tests": passed([str(tests)], "go on with NDP_ISA=avx512vnni in front of every command")}


def streams(run: Run) -> dict[str, Any]:
    """The property tests of layers, streams and events, on real streams, events and kernels."""
    if not engines.on_gpu():
        raise LeftOutError("streams and events are a GPU's; without one the same tests run on a pretended GPU")
    files = [str(TESTS / f"test_cuda_{name}.py") for name in ("layer", "copies", "streaming", "rows")]
    return {"tests": passed([*files, "-m", "gpu"], "go on with the last rung that serves")}


def passed(arguments: list[str], way_out: str) -> str:
    """What pytest says last. Raises where a test fails."""
    words = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    print(done.stdout[-4000:], done.stderr[-1000:])  # to the log
    if "No module named" in done.stderr:
        raise LeftOutError(done.stderr.strip().splitlines()[-1])
    said = (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
    if done.returncode:
        raise RuntimeError(f"{said}: {way_out}")
    return said


def routing(run: Run) -> dict[str, Any]:
    """The Triton kernels against the torch operators; without a GPU in Triton's interpreter."""
    if not engines.on_gpu():
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", str(TESTS / "test_cuda_routing.py"), "-m", "slow"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stdout[-1500:])
        return {"interpreted": done.stdout.strip().splitlines()[-1]}
    import torch

    from vllm_ndp.integration.cuda import kernels, packet
    from vllm_ndp.integration.cuda.streams import pinned_for
    from vllm_ndp.integration.routing_sidecar import Routed

    torch.manual_seed(0)
    rows_found = []
    for rows, experts, top_k, slots in ((1, 8, 2, 4), (8, 8, 2, 4), (64, 128, 8, 64), (256, 128, 8, 64)):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        expert_map = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
        expert_map[torch.randperm(experts, device="cuda")[:slots]] = torch.arange(
            slots, dtype=torch.int32, device="cuda"
        )
        ids = torch.rand(rows, experts, device="cuda").topk(top_k).indices.to(torch.int32)
        weights = torch.rand(rows, top_k, device="cuda")
        routed = Routed(x, weights, ids)
        form = packet.RowForm(top_k, 4096, x.dtype)
        cuda = torch.device("cuda")
        both = []
        for split in (kernels.split, packet.split):
            into = packet.Fields.allocate(rows, form, pinned_for(cuda), cuda)
            split(expert_map, routed, into, slots)
            both.append((into, microseconds(partial(split, expert_map, routed, into, slots))))
        (mine, kernel_us), (theirs, operators_us) = both
        torch.cuda.synchronize()
        if not int(mine.word[0]):
            raise RuntimeError(f"the kernels for {rows} rows did not say that the packet is there")
        sent = int(theirs.head[1])
        counts = {"slots": rows, "ids": rows, "weights": rows, "sent_rows": sent, "x": sent}
        for name, count in counts.items():
            if not torch.equal(getattr(mine, name)[:count], getattr(theirs, name)[:count]):
                raise RuntimeError(f"{name} of {rows} rows differs between the kernel and the operators")
        rows_found.append({"rows": rows, "experts": experts, "kernel_us": kernel_us, "operators_us": operators_us})
    return {"results": rows_found}


def microseconds(call: Callable[[], object], count: int = 200) -> float:
    """Of the GPU, per call."""
    import torch

    for _ in range(10):
        call()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    stop.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(stop) * 1000 / count, 2)


def rungs(run: Run, way: str) -> list[Row]:
    """Whether it serves with one thing more than the way before: rows checked and none wrong, cold pairs computed by
    the device, none left out. The first ones launch kernel by kernel, so that an error is raised where it is made."""
    if way in ("stock", "plain"):
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # read when CUDA is first asked for anything
    import torch
    import vllm

    if not engines.on_gpu() and way in ("streams", "kernels"):
        return [{"left out": "it adds streams or kernels of a GPU"}]
    start = time.perf_counter()
    llm = engines.engine(None if way == "stock" else {**HALF, "debug": {"gpu": way}})
    ready = time.perf_counter()
    tokens = engines.token_ids(engines.greedy(llm, PROMPTS, 32))
    row: Row = {"start_s": round(ready - start, 1), "tokens_s": round(time.perf_counter() - ready, 1)}
    row["tokens"] = [" ".join(map(str, of_one)) for of_one in tokens]
    if way == "stock":
        engines.end(llm)
        return [row | {"vllm": vllm.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}]
    totals, status = llm.collective_rpc("ndp_totals")[0], llm.collective_rpc("ndp_status")[0]
    engines.end(llm)
    kept = {name: totals[name] for name in ("row_checks", "sidecar_mismatches", "cold_pairs", "fallback_pairs")}
    if kept["sidecar_mismatches"] or kept["fallback_pairs"] or not kept["row_checks"] or not kept["cold_pairs"]:
        raise RuntimeError(f"it does not serve as it should: {kept}")
    before = engines.kept_rows("rungs", [run.folder])
    plain = next((one["tokens"] for one in before if one["way"] == "plain" and "tokens" in one), row["tokens"])
    same = engines.equal_tokens(tokens, [list(map(int, of_one.split())) for of_one in plain])
    return [row | kept | {name: status[name] for name in ("decode_layers", "slot_kernel", "carrier")} | same]


def identity(run: Run, way: str) -> list[Row]:
    """fp32, device in full precision: stock's tokens, with IEEE products and the same tiles for every K."""
    if engines.kept_rows("rungs", [run.folder]) and engines.best_rung([run.folder]) == "auto":
        raise LeftOutError("no rung of this project has served")
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    if engines.on_gpu():
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")  # 0: other tiles for each K, so that near ties may differ
    tokens = 8 if run.dry else 128
    if (wanted := run.earlier("_stock")) is None:
        llm = engines.engine(dtype="float32")
        wanted = engines.token_ids(engines.greedy(llm, PROMPTS, tokens))
        engines.end(llm)
    settings = {"hot_experts": int(way.split()[0]), "cold_precision": "full", "deadline_ms": PATIENT_MS}
    options: dict[str, Any] = {}
    if way.endswith("in pieces"):
        options = engines.IN_PIECES
    elif way.endswith("in one graph"):
        options = engines.IN_ONE | {"compilation_config": {**engines.IN_ONE["compilation_config"], "mode": 0}}
    if options and not engines.on_gpu():
        raise LeftOutError("no graph is captured without a GPU; test_cuda_rungs.py has what stands for one")
    llm = engines.engine(settings, dtype="float32", **options)
    found = engines.token_ids(engines.greedy(llm, PROMPTS, tokens))
    engines.end(llm)
    return [{"rung": engines.rung(), **engines.equal_tokens(found, wanted), "_stock": wanted}]


def closeness(run: Run) -> dict[str, Any]:
    """bf16: log-probabilities of stock's own tokens, decoded one by one, beside the plugin's."""
    tokens = 8 if run.dry else 64
    llm = engines.engine()
    outputs = engines.greedy(llm, PROMPTS, tokens, logprobs=1)
    engines.end(llm)
    wanted = engines.chosen_logprobs(outputs)
    llm = engines.engine({"hot_experts": 4, "cold_precision": "full", "execution": "paper", "deadline_ms": PATIENT_MS})
    mine = engines.greedy(llm, PROMPTS, tokens, logprobs=1)
    engines.end(llm)
    agree = engines.equal_tokens(engines.token_ids(mine), engines.token_ids(outputs))
    found = engines.chosen_logprobs(mine)
    differences = []
    for a, b, x, y in zip(engines.token_ids(mine), engines.token_ids(outputs), found, wanted, strict=True):
        for i, (mine_token, token) in enumerate(zip(a, b, strict=True)):
            if mine_token != token:
                break
            differences.append(abs(x[i] - y[i]))
    differences.sort()
    return {**agree, "mean": sum(differences) / len(differences), "largest": differences[-1],
            "p99": differences[int(0.99 * (len(differences) - 1))]}  # fmt: skip


def narrow_slots(run: Run, way: str) -> list[Row]:
    """bf16, every expert hot at 16, 8 and 4 bits: log-probabilities of stock's own tokens, and bytes of the slots."""
    if not engines.on_gpu():
        raise LeftOutError(
            "slots of 8 and 4 bits are run by vLLM's kernels for a GPU; test_cuda_low_bits.py interprets them"
        )
    if (texts := run.earlier("_texts")) is None:
        llm = engines.engine()
        outputs = engines.greedy(llm, PROMPTS, 64)
        engines.end(llm)
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    llm = engines.engine({"hot_experts": 8, "slot_bits": int(way.removesuffix(" bits")), "deadline_ms": PATIENT_MS})
    scored = engines.greedy(llm, [{"prompt_token_ids": text} for text in texts], 1, prompt_logprobs=0)
    decoded = engines.token_ids(
        engines.greedy(llm, [{"prompt_token_ids": text[:-63]} for text in texts], 63)
    )  # few rows: other kernels
    status = llm.collective_rpc("ndp_status")[0]
    engines.end(llm)
    given = [step[token].logprob for output, text in zip(scored, texts, strict=True)
             for step, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)]  # fmt: skip
    return [{"kernel": status["slot_kernel"], "hot_bytes": status["hot_bytes"], "mean_logprob": sum(given) / len(given),
             **engines.equal_tokens(decoded, [text[-63:] for text in texts]), "_texts": texts}]  # fmt: skip


def device_killed(run: Run) -> dict[str, Any]:
    """An embedded device that is killed in mid-generation costs time only; another one is started."""
    llm = engines.engine({**HALF, "cold_precision": "full", "replicas": None, "deadline_ms": 1000.0})
    tokens = 24 if run.dry else 256
    wanted = engines.token_ids(engines.greedy(llm, PROMPTS, tokens))
    pid = llm.collective_rpc("ndp_status")[0]["device_pid"]
    timer = threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL))
    timer.start()
    found = engines.token_ids(engines.greedy(llm, PROMPTS, tokens))
    timer.join()
    for _ in range(20):  # the client looks for it between steps
        engines.greedy(llm, PROMPTS[:1], 4)
        totals = llm.collective_rpc("ndp_totals")[0]
        if totals["device_state"] == "up":
            break
        time.sleep(0.5)
    engines.end(llm)
    return {
        **engines.equal_tokens(found, wanted),
        "fallback_pairs": totals["fallback_pairs"],
        "device": totals["device_state"],
    }
