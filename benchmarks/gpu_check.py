"""What does the plugin do on this GPU: is it right, how often does it wait, how fast is it, and beside what?

    python benchmarks/gpu_check.py --minutes 50            every piece that is missing, most valuable first
    python benchmarks/gpu_check.py --minutes 10            some of them; the next call goes on from there
    python benchmarks/gpu_check.py --dry-run               what needs no GPU, small, on this machine

A piece is a process of its own that ends within ten minutes; what it found becomes `gpu_<piece>.json` in --out
(docs/measured, in a dry run a folder that is printed), with the machine and its GPU named. What is there, or in
docs/measured, is not run again (--again); of a table of several ways each is kept as soon as it is found, and the next
call goes on with those that are missing. A piece that fails or hangs leaves its last words in `gpu_<piece>.log` and
stops no other. docs/gpu.md: how to make the most of half an hour. No line of this has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import gpu_preset
import gpu_timeline
from measured import ROOT, Measurement, machine
from pieces import LeftOutError, Piece, Pieces, Row, Run

KEPT = ROOT / "docs" / "measured"
MODEL, REPLICAS = ROOT / "models/tiny-mixtral", ROOT / "models/tiny-mixtral-replicas"
TESTS = ROOT / "tests/integration"
WIDE = Path(tempfile.gettempdir()) / "ndp-wide"
WIDE_REPLICAS = Path(tempfile.gettempdir()) / "ndp-wide-replicas"
WIDE_LAYERS = 8
"""Random weights at the width of Mixtral-8x7B: 2.8 GB a layer."""
PATIENT_MS = 20_000.0  # Triton compiles for seconds in first calls; a cold expert on a CPU takes its time too
PROMPTS = (
    "def parse(line):\n    parts = line.split(',')\n",
    "static void free_list(struct node *head)\n{\n",
    "She had always wished to",
    "CREATE TABLE orders (id integer PRIMARY KEY",
)
HALF = {"hot_experts": 4, "replicas": str(REPLICAS), "execution": "paper", "deadline_ms": PATIENT_MS}


# -- engines -----------------------------------------------------------------------------------------------------------


def on_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def engine(settings: dict[str, Any] | None = None, model: Path = MODEL, **options: Any) -> Any:
    """A `vllm.LLM` in this process: stock, or with the plugin where settings are given."""
    from vllm import LLM
    from vllm.platforms import current_platform

    if not on_gpu() and not current_platform.is_cpu():
        raise LeftOutError("this vLLM is built for a GPU, and none is here")
    base: dict[str, Any] = {
        "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "seed": 0, "disable_log_stats": True,
        "dtype": "bfloat16", "enable_prefix_caching": False,  # a prompt that was seen costs no prefill
    }  # fmt: skip
    if model == MODEL:
        base["kv_cache_memory_bytes"] = 64 << 20  # several engines of one process must fit beside each other
    base |= {"attention_backend": "TRITON_ATTN"} if on_gpu() else {"block_size": 32}
    if settings is not None:
        base |= {"quantization": "ndp", "additional_config": {"ndp": settings}}
    return LLM(str(model), **(base | options))


def end(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def greedy(llm: Any, prompts: Any, tokens: int, **params: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **params)
    return list(llm.generate(list(prompts), sampling, use_tqdm=False))


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def equal_tokens(mine: list[list[int]], theirs: list[list[int]]) -> dict[str, int]:
    """How many tokens agree before the first that does not, of how many."""
    agree = 0
    for a, b in zip(mine, theirs, strict=True):
        differing = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        agree += differing[0] if differing else len(a)
    return {"equal": agree, "of": sum(map(len, theirs))}


# -- pieces ------------------------------------------------------------------------------------------------------------


def versions(run: Run) -> dict[str, Any]:
    import torch
    import vllm

    import vllm_ndp  # noqa: F401  # the plugin imports here

    found: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "none"
    if on_gpu():
        found["capability"] = list(torch.cuda.get_device_capability())
        found["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    return found


def routing(run: Run) -> dict[str, Any]:
    """The Triton kernels against the torch operators; without a GPU in Triton's interpreter."""
    if not on_gpu():
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", str(TESTS / "test_cuda_routing.py"), "-m", "slow"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stdout[-1500:])
        return {"interpreted": done.stdout.strip().splitlines()[-1]}
    import torch

    from vllm_ndp.integration.cuda import kernels, packet
    from vllm_ndp.integration.cuda import routing as operators

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
        size = packet.packet_bytes(rows, top_k, 4096, x.dtype)
        both = []
        for split in (kernels.split, operators.split):
            memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
            into = packet.lay_out(memory, rows, top_k, 4096, x.dtype)
            split(expert_map, ids, weights, x, into, slots)
            both.append((into, microseconds(partial(split, expert_map, ids, weights, x, into, slots))))
        (mine, kernel_us), (theirs, operators_us) = both
        pairs, sent = theirs.head[:2].tolist()
        for name, count in (("slots", rows), ("sent_rows", sent), ("pair_rows", pairs), ("pair_experts", pairs),
                            ("pair_weights", pairs), ("x", sent)):  # fmt: skip
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


def serves(run: Run) -> dict[str, Any]:
    """Whether it serves at all: rows checked and none wrong, cold pairs computed by the device, none left out."""
    llm = engine(HALF)
    outputs, totals = greedy(llm, PROMPTS, 32), llm.collective_rpc("ndp_totals")[0]
    status = llm.collective_rpc("ndp_status")[0]
    end(llm)
    kept = {name: totals[name] for name in ("row_checks", "sidecar_mismatches", "cold_pairs", "fallback_pairs")}
    if kept["sidecar_mismatches"] or not kept["row_checks"] or not kept["cold_pairs"]:
        raise RuntimeError(f"it does not serve as it should: {kept}")
    return {**kept, "decode_layers": status["decode_layers"], "slot_kernel": status["slot_kernel"],
            "text": outputs[0].outputs[0].text}  # fmt: skip


def identity(run: Run, way: str) -> list[Row]:
    """fp32, device in full precision: stock's tokens, with IEEE products and the same tiles for every K."""
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    if on_gpu():
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")  # 0: other tiles for each K, so that near ties may differ
    tokens = 8 if run.dry else 128
    if (wanted := next((row["_stock"] for row in run.before if "_stock" in row), None)) is None:
        llm = engine(dtype="float32")
        wanted = token_ids(greedy(llm, PROMPTS, tokens))
        end(llm)
    hot, layers = way.split(" hot, ")
    settings = {"hot_experts": int(hot), "cold_precision": "full", "layers": layers, "deadline_ms": PATIENT_MS}
    llm = engine(settings, dtype="float32")
    found = token_ids(greedy(llm, PROMPTS, tokens))
    end(llm)
    return [{**equal_tokens(found, wanted), "_stock": wanted}]


def closeness(run: Run) -> dict[str, Any]:
    """bf16: log-probabilities of stock's own tokens, decoded one by one, beside the plugin's."""
    tokens = 8 if run.dry else 64
    llm = engine()
    outputs = greedy(llm, PROMPTS, tokens, logprobs=1)
    end(llm)
    wanted = chosen_logprobs(outputs)
    llm = engine({"hot_experts": 4, "cold_precision": "full", "execution": "paper", "deadline_ms": PATIENT_MS})
    mine = greedy(llm, PROMPTS, tokens, logprobs=1)
    end(llm)
    agree = equal_tokens(token_ids(mine), token_ids(outputs))
    found = chosen_logprobs(mine)
    differences = []
    for a, b, x, y in zip(token_ids(mine), token_ids(outputs), found, wanted, strict=True):
        for i, (mine_token, token) in enumerate(zip(a, b, strict=True)):
            if mine_token != token:
                break
            differences.append(abs(x[i] - y[i]))
    differences.sort()
    return {**agree, "mean": sum(differences) / len(differences), "largest": differences[-1],
            "p99": differences[int(0.99 * (len(differences) - 1))]}  # fmt: skip


def narrow_slots(run: Run, way: str) -> list[Row]:
    """bf16, every expert hot at 16, 8 and 4 bits: log-probabilities of stock's own tokens, and bytes of the slots."""
    if not on_gpu():
        raise LeftOutError(
            "slots of 8 and 4 bits are run by vLLM's kernels for a GPU; test_cuda_low_bits.py interprets them"
        )
    if (texts := next((row["_texts"] for row in run.before if "_texts" in row), None)) is None:
        llm = engine()
        outputs = greedy(llm, PROMPTS, 64)
        end(llm)
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    llm = engine({"hot_experts": 8, "slot_bits": int(way.removesuffix(" bits")), "deadline_ms": PATIENT_MS})
    scored = greedy(llm, [{"prompt_token_ids": text} for text in texts], 1, prompt_logprobs=0)
    decoded = token_ids(
        greedy(llm, [{"prompt_token_ids": text[:-63]} for text in texts], 63)
    )  # few rows: other kernels
    status = llm.collective_rpc("ndp_status")[0]
    end(llm)
    given = [step[token].logprob for output, text in zip(scored, texts, strict=True)
             for step, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)]  # fmt: skip
    return [{"kernel": status["slot_kernel"], "hot_bytes": status["hot_bytes"], "mean_logprob": sum(given) / len(given),
             **equal_tokens(decoded, [text[-63:] for text in texts]), "_texts": texts}]  # fmt: skip


def chosen_logprobs(outputs: list[Any]) -> list[list[float]]:
    return [
        [step[token].logprob for step, token in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]
        for o in outputs
    ]


def device_killed(run: Run) -> dict[str, Any]:
    """An embedded device that is killed in mid-generation costs time only; another one is started."""
    llm = engine({**HALF, "cold_precision": "full", "replicas": None, "deadline_ms": 1000.0})
    tokens = 24 if run.dry else 256
    wanted = token_ids(greedy(llm, PROMPTS, tokens))
    pid = llm.collective_rpc("ndp_status")[0]["device_pid"]
    timer = threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL))
    timer.start()
    found = token_ids(greedy(llm, PROMPTS, tokens))
    timer.join()
    for _ in range(20):  # the client looks for it between steps
        greedy(llm, PROMPTS[:1], 4)
        totals = llm.collective_rpc("ndp_totals")[0]
        if totals["device_state"] == "up":
            break
        time.sleep(0.5)
    end(llm)
    return {**equal_tokens(found, wanted), "fallback_pairs": totals["fallback_pairs"], "device": totals["device_state"]}


WAITS: dict[str, dict[str, Any] | None] = {
    "asynchronous": {**HALF, "layers": "asynchronous"}, "eager": {**HALF, "layers": "eager"}, "stock": None,
    "all hot": {"hot_experts": 8, "deadline_ms": PATIENT_MS},
}  # fmt: skip


def waits(run: Run, way: str) -> list[Row]:
    """Host waits, copies and launches per layer and decode step, from the profiler."""
    if not on_gpu():
        raise LeftOutError("what waits for a GPU is counted by the profiler of one; without: test_cuda_layer.py")
    from torch.profiler import ProfilerActivity, profile

    llm = engine(WAITS[way])
    greedy(llm, PROMPTS[:1], 8)
    counts: dict[str, int] = {}
    for sign, tokens in ((-1, 2), (1, 34)):  # the difference is 32 decode steps, without prompt, start and end
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            greedy(llm, PROMPTS[:1], tokens)
        kinds = ("cudaStreamSync", "cudaEventSync", "cudaDeviceSync", "cudaMemcpy", "cudaLaunch", "cuLaunch")
        for event in profiled.key_averages():
            if event.key.startswith(kinds):
                counts[event.key] = counts.get(event.key, 0) + sign * event.count
    end(llm)
    return [{key: round(count / 32 / 4, 2) for key, count in sorted(counts.items())}]  # steps, layers


def timeline(run: Run) -> dict[str, Any]:
    """How much of the packet's and the sums' copies, and of the device's time, lies beside the hot experts."""
    if not on_gpu():
        raise LeftOutError("a timeline of copies beside kernels needs a GPU that runs both")
    from torch.profiler import ProfilerActivity, profile

    llm = engine({**HALF, "layers": "asynchronous"})
    greedy(llm, PROMPTS, 8)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        greedy(llm, PROMPTS, 9)
    end(llm)
    path = run.folder / "gpu_timeline.trace.json.gz"  # ui.perfetto.dev opens it
    profiled.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as file:
        return {"perfetto": path.name, **gpu_timeline.beside(json.load(file)["traceEvents"])}


SLOW = {"deadline_ms": PATIENT_MS, "execution": "paper"}
WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "stock": (None, {}),
    "4 of 8 hot": ({"hot_experts": 4, **SLOW}, {}),
    "8 of 8 hot": ({"hot_experts": 8, "deadline_ms": PATIENT_MS}, {}),
    "stock, half the experts offloaded": (None, {"cpu_offload_gb": WIDE_LAYERS * 4 * 0.33}),
    "4 of 8 hot, eager layers": ({"hot_experts": 4, "layers": "eager", **SLOW}, {}),
    "6 of 8 hot": ({"hot_experts": 6, **SLOW}, {}),
    "2 of 8 hot": ({"hot_experts": 2, **SLOW}, {}),
    "8 of 8 hot at 8 bits": ({"hot_experts": 8, "slot_bits": 8, "deadline_ms": PATIENT_MS}, {}),
    "8 of 8 hot at 4 bits": ({"hot_experts": 8, "slot_bits": 4, "deadline_ms": PATIENT_MS}, {}),
}
"""What is timed: settings of the plugin, None = stock; options of the engine."""


def wide(run: Run) -> dict[str, Any]:
    """The model that speed is measured on, and its replicas."""
    if run.dry:
        raise LeftOutError("8 layers at full width, 23 GB, are written where a GPU serves them")
    start = time.perf_counter()
    sizes = ["--hidden", "4096", "--intermediate", "14336", "--layers", str(WIDE_LAYERS), "--experts", "8"]
    subprocess.run([sys.executable, str(ROOT / "benchmarks/make_random_mixtral.py"), str(WIDE), *sizes], check=True)
    written = time.perf_counter()
    program = "import sys; from vllm_ndp.cli import main; sys.exit(main())"
    quantize = [sys.executable, "-c", program, "quantize", str(WIDE), "--out", str(WIDE_REPLICAS)]
    subprocess.run(quantize, check=True)
    return {"write_s": round(written - start, 1), "quantize_s": round(time.perf_counter() - written, 1)}


def way_at_width(run: Run, way: str, **options: Any) -> Any:
    """An engine of the model for speed; in a dry run of the small one."""
    settings, of_way = WAYS[way]
    if settings is not None:
        settings = {**settings, "replicas": str(REPLICAS if run.dry else WIDE_REPLICAS)}
    if run.dry:
        return engine(settings)
    if not WIDE_REPLICAS.exists():
        raise LeftOutError("the wide model is not on this machine: run --pieces wide --again first")
    return engine(settings, WIDE, gpu_memory_utilization=0.85, max_num_seqs=32, **of_way, **options)


def speed(run: Run, way: str) -> list[Row]:
    """Tokens per second at real width: decode and prefill, by how many of the 8 experts are hot, beside stock."""
    llm = way_at_width(run, way)
    rows = [{"batch": batch, **tokens_per_second(llm, batch, run.dry)} for batch in ((1,) if run.dry else (1, 8, 32))]
    end(llm)
    return rows


def tokens_per_second(llm: Any, batch: int, dry: bool) -> dict[str, float | None]:
    """The better of two runs each; None where noise is larger than what decoding takes."""
    few, many = (2, 6) if dry else (8, 40)
    prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 4000 + 10 for j in range(32)]} for i in range(batch)]
    greedy(llm, prompts, few)
    took = {}
    for tokens in (1, few, many):
        times = []
        for _ in range(2):
            start = time.perf_counter()
            greedy(llm, prompts, tokens)
            times.append(time.perf_counter() - start)
        took[tokens] = min(times)
    decoding = took[many] - took[few]
    return {
        "decode": round(batch * (many - few) / decoding, 1) if decoding > 0 else None,
        "prefill": round(batch * 32 / took[1], 1),
    }


PROMPT_LENGTHS = (64, 512, 1536)
PREFILLED = ("stock", "4 of 8 hot", "stock, half the experts offloaded")


def prefill(run: Run, way: str) -> list[Row]:
    """First token of one prompt at real width, by its length; where experts are cold they stream to the GPU.

    What streams is counted from the plugin's sizes: every cold expert of every layer, once per prompt.
    """
    llm = way_at_width(run, way, max_model_len=2048, max_num_batched_tokens=2048)
    rows = []
    for length in PROMPT_LENGTHS[:1] if run.dry else PROMPT_LENGTHS:
        took = []
        for number in range(2 if run.dry else 5):
            prompt = {"prompt_token_ids": [(7 * i + 31 * number) % 4000 + 10 for i in range(length)]}
            start = time.perf_counter()
            greedy(llm, [prompt], 1)
            took.append(time.perf_counter() - start)
        rows.append({"tokens": length, "first_token_ms": round(1000 * min(took[1:]), 1)})
    end(llm)
    return rows


def quantizing(run: Run) -> dict[str, Any]:
    """`quantize` with text, on the GPU and on the host: how long, and whether both lose the same."""
    program = "import sys; from vllm_ndp.cli import main; sys.exit(main())"
    rows = []
    for device in ("cpu", "cuda") if on_gpu() else ("cpu",):
        with tempfile.TemporaryDirectory() as folder:
            options = [
                "--calibration",
                str(MODEL / "calibration.txt"),
                "--device",
                device,
                "--samples",
                "8" if run.dry else "64",
            ]
            command = [sys.executable, "-c", program, "quantize", str(MODEL), "--out", f"{folder}/replicas", *options]
            if run.dry:
                command += ["--bits", "2"]
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)  # its words go to the log
        if done.returncode:
            raise RuntimeError(f"quantize ended with {done.returncode}: the lines before this one say why")
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append({"device": device, **{name: found[name] for name in ("experts", "seconds", "relative_loss")}})
    return {"results": rows}


def training(run: Run) -> dict[str, Any]:
    """The larger fixture: 109 M parameters on the bundled model's corpus, as far as nine minutes go."""
    if not on_gpu():
        raise LeftOutError("109 M parameters are not trained on a CPU in nine minutes")
    corpus = ROOT / ".cache/tiny_mixtral/corpus"
    if not list(corpus.glob("*.train.npy")):
        raise LeftOutError(f"no corpus in {corpus.relative_to(ROOT)}: make it with build_corpus.py and bring it along")
    script, out = ROOT / "benchmarks/tiny_mixtral/train.py", Path(tempfile.gettempdir()) / "ndp-larger"
    options = ["--size", "larger", "--device", "cuda", "--windows", "32", "--minutes", "8.5", "--out", str(out)]
    done = subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True, text=True)
    return {**json.loads(done.stdout.splitlines()[-1]), "checkpoint": str(out / "checkpoint")}


def graphs(run: Run, way: str) -> list[Row]:
    """PIECEWISE graphs that end before each MoE layer: the tokens without graphs, and what they gain."""
    if not on_gpu():
        raise LeftOutError("no graph is captured without a GPU; test_cuda_graphs.py has what stands for one")
    llm = engine(HALF, enforce_eager=False, compilation_config={"cudagraph_mode": way})
    tokens = token_ids(greedy(llm, PROMPTS, 64))
    row = {**tokens_per_second(llm, 1, run.dry), "_tokens": tokens}
    end(llm)
    wanted = next((other["_tokens"] for other in run.before if "_tokens" in other), None)
    return [row if wanted is None else row | equal_tokens(tokens, wanted)]


def link(run: Run) -> dict[str, Any]:
    """Rates and latencies of link, GPU memory and host, which become a preset beside the simulated ones."""
    if not on_gpu():
        raise LeftOutError("the link that is measured is the one to a GPU")
    kit = ROOT / "benchmarks/gpu_kit/probe_gpu.py"
    done = subprocess.run([sys.executable, str(kit)], capture_output=True, text=True, timeout=500, check=True)
    probed = json.loads(done.stdout.splitlines()[-1])
    return {"probed": probed}


OF_SPEED = tuple(WAYS)
PIECES = {
    "versions": Piece("Does everything import, and what is it?", 0.7, versions),
    "routing": Piece("Do the routing kernels give what the operators give?", 0.7, routing),
    "serves": Piece("Does it serve?", 1.2, serves),
    "identity": Piece(
        "Is it stock vLLM in fp32 when nothing is quantized?", 2.5, identity,
        ("4 hot, asynchronous", "4 hot, eager", "8 hot, asynchronous", "8 hot, eager"), dry_ways=2,
    ),
    "wide": Piece("How long does it take to make and to quantize eight layers at full width?", 2.5, wide),
    "speed": Piece("How fast is it beside stock and beside offloading?", 6, speed, OF_SPEED[:4], 2, apart=True),
    "waits": Piece("How often does a layer wait for the GPU?", 2, waits, tuple(WAITS)),
    "timeline": Piece("What lies beside what?", 1, timeline),
    "closeness": Piece("How close is it in bf16?", 1.2, closeness),
    "prefill": Piece(
        "How soon is the first token, with experts that stream and without?", 4, prefill, PREFILLED, 2, apart=True
    ),
    "link": Piece("What does a crossing cost?", 3, link),
    "device_killed": Piece("Does a killed device cost a token?", 1.2, device_killed),
    "graphs": Piece("Do pieces of graphs give the same tokens, and how fast?", 3, graphs, ("NONE", "PIECEWISE")),
    "narrow_slots": Piece(
        "What do slots of 8 and 4 bits lose?", 2, narrow_slots, ("16 bits", "8 bits", "4 bits")
    ),
    "speed_more": Piece(
        "How fast is it with more and fewer hot experts, and at fewer bits?", 7, speed, OF_SPEED[4:], 2, apart=True
    ),
    "quantizing": Piece("How long does quantizing take on the GPU, and is it as good as on the host?", 3, quantizing),
    "training": Piece("How well does a larger fixture do that is trained here?", 9.5, training),
}  # fmt: skip
"""Most valuable first: what fits into half an hour stands before what does not."""


# -- running them ------------------------------------------------------------------------------------------------------


@cache
def gpu_name() -> str:
    """Asked in another process, so that this one holds nothing of the GPU: the driver's own program, else torch."""
    driver = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    torch = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"]
    for ask in (driver, torch):
        try:
            done = subprocess.run(ask, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[0]
    return ""


def run_piece(name: str, arguments: argparse.Namespace) -> None:
    """In a process of its own: measure and write."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    pieces, file, dry = Pieces(Path(__file__), PIECES, gpu_name), arguments.out, arguments.dry_run
    if arguments.way is not None:
        pieces.run_way(name, arguments.way, file, dry=dry)
        return
    figures = pieces.run_here(name, file, dry=dry, seconds=arguments.seconds, earlier=arguments.earlier)
    if "probed" in figures:
        print(gpu_preset.write_preset(file, gpu_preset.FOLDER if file.parent == KEPT else file.parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing that is expected to end later")
    parser.add_argument("--pieces", default=",".join(PIECES), help=f"of {', '.join(PIECES)}")
    parser.add_argument("--out", type=Path, help="folder for the results; docs/measured, in a dry run a new one")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument(
        "--dry-run", action="store_true", help="on a machine without a GPU, small; pieces that need one say so"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="what became of each piece, and of the kit in --kit")
    parser.add_argument("--kit", type=Path, help="folder that gpu_kit/make_bundle.sh has written, for --json")
    for hidden, kind in (("--piece", str), ("--way", str), ("--earlier", Path), ("--seconds", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.piece:
        run_piece(arguments.piece, arguments)
        return 0
    if unknown := sorted(set(arguments.pieces.split(",")) - set(PIECES)):
        parser.error(f"no piece is called {unknown[0]}: there are {', '.join(PIECES)}")
    dry = arguments.dry_run
    if not dry and not gpu_name():
        print("no NVIDIA GPU answers here: run this where one does, or with --dry-run what needs none")
        return 2
    out = arguments.out or (Path(tempfile.mkdtemp(prefix="gpu-check-")) if dry else KEPT)
    out.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(__doc__)
    print(f"{machine()['processor']}, {gpu_name() or 'no GPU'}; results go to {out}", flush=True)
    names, kept = arguments.pieces.split(","), None if dry else KEPT
    became = Pieces(Path(__file__), PIECES, gpu_name).run_all(
        names, out.resolve(), kept, minutes=arguments.minutes, again=arguments.again, dry=dry
    )
    if arguments.json is not None:
        pieces = [{"piece": name, "question": PIECES[name].question, "became": what} for name, what in became.items()]
        measurement.end({"gpu": gpu_name() or "none", "pieces": pieces, "kit": kit_in(arguments.kit)}, arguments.json)
    return 1 if any("FAILED" in what for what in became.values()) else 0


def kit_in(folder: Path | None) -> list[dict[str, Any]]:
    """The parts that were built: what each holds, and the bytes of it."""
    parts = sorted(path.parent for path in folder.rglob("install_part.sh")) if folder is not None else []
    return [
        {"part": part.name, "bytes": sum(file.stat().st_size for file in part.iterdir()),
         "holds": {file.name.removesuffix(".tar.xz"): file.stat().st_size for file in sorted(part.glob("*.tar.xz"))}}
        for part in parts
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
