"""One system of end_to_end.py, in a process of its own: an arm that runs passes.

A pass: `batch` prompts of random tokens at once, then `tokens` more tokens each, drawn at temperature 1, so that a
random model does not fall into one token over and over. Prefill ends when every prompt has its first token; decode
steps are what comes after. Every system gets the same prompts, and the cores this process was given.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from arm import answer
from end_to_end_threads import Spent, Thread, command_of, descendants, rows_of_step, thread_times
from numpy.typing import NDArray

KV_BYTES = 256 << 20
CORES = frozenset(os.sched_getaffinity(0))  # asked first: OpenMP may bind this thread to one of them later
LOOK_EVERY_S = 0.25
WARM_TOKENS = 4
FIRST_TOKEN_ID = 3  # below: unknown, begin and end of text
_HIDDEN = "END_TO_END_HIDDEN"
_AMX = ("_is_amx_tile_supported", "_is_amx_fp16_supported")
_AVX512 = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported")
ISAS: dict[str, dict[str, str]] = {
    "avx512": {"NDP_ISA": "avx512bf16", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", _HIDDEN: " ".join(_AMX)},
    "avx2": {
        "NDP_ISA": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        _HIDDEN: " ".join(_AMX + _AVX512),
    },
}
"""Environment of a system that must take the processor for one that has no more than this."""


def hide(names: Sequence[str]) -> None:
    """vLLM asks torch which extension to load. Its other processes come here, too: they import the program."""
    import torch

    for name in names:
        setattr(torch.cpu, name, lambda: False)


if _HIDDEN in os.environ:
    hide(os.environ[_HIDDEN].split())


@dataclass(frozen=True)
class Job:
    """What one child is asked for; travels as JSON."""

    name: str
    kind: str  # vllm | llama
    model: str  # checkpoint directory, or GGUF file
    batches: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of vllm.LLM
    long_prompt: int = 0  # tokens of a prompt of which only the first answer is measured; 0: none

    @property
    def longest(self) -> int:
        """Tokens of a sequence; a few to spare."""
        return max(self.prompt_tokens + self.tokens, self.long_prompt) + 32

    @property
    def most_at_once(self) -> int:
        """Tokens of a step."""
        return max(max(self.batches) * self.prompt_tokens, self.long_prompt)

    @classmethod
    def parse(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**values | {"batches": tuple(values["batches"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Pass:
    """Wall times of one pass."""

    prefill_s: float
    steps_s: list[float]  # decode steps, each one token for every sequence
    foreign: list[float]  # beside each of them, and first beside the prefill: cores that other programs used
    threads: list[dict[str, Any]] = field(default_factory=list)  # processor time of a decode step


@dataclass(frozen=True)
class Order:
    """One pass: `batch` prompts of `prompt_tokens` random tokens, drawn from `seed`, and `tokens` more tokens each."""

    batch: int
    prompt_tokens: int
    tokens: int
    seed: int


def serve(job: Job) -> None:
    """Get ready, then answer an Order with a Pass, and None with {"memory": ..., ...}.

    A prompt that is not measured goes before each: while others run, the system may reclaim a waiting one's pages.
    """
    warm = Order(1, job.prompt_tokens, 1, seed=0)
    system = {"vllm": VllmSystem, "llama": LlamaSystem}[job.kind](job)

    def act(question: Mapping[str, Any] | None) -> dict[str, Any]:
        if question is None:
            return {"memory": system.memory(), **system.facts()}
        system.run(*_drawn(warm, system.vocabulary))
        return asdict(system.run(*_drawn(Order(**question), system.vocabulary)))

    try:
        shapes = [(batch, job.prompt_tokens, WARM_TOKENS) for batch in job.batches]
        for shape in shapes + [(1, job.long_prompt, 1)] * (job.long_prompt > 0):
            system.run(*_drawn(Order(*shape, seed=0), system.vocabulary))
        answer(act)
    finally:
        system.close()


def _drawn(order: Order, vocabulary: int) -> tuple[list[list[int]], int]:
    rng = np.random.default_rng(order.seed)
    return rng.integers(FIRST_TOKEN_ID, vocabulary, (order.batch, order.prompt_tokens)).tolist(), order.tokens


class VllmSystem:
    """vLLM with or without the plugin, through its own engine, step by step."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM

        self._llm = LLM(
            job.model,
            dtype="bfloat16",
            max_model_len=job.longest,
            max_num_seqs=max(job.batches),
            max_num_batched_tokens=job.most_at_once,
            kv_cache_memory_bytes=KV_BYTES,
            enforce_eager=True,
            disable_log_stats=True,
            enable_prefix_caching=False,
            **job.engine,
        )
        self.vocabulary: int = self._llm.get_tokenizer().vocab_size
        self._is_plugin = job.engine.get("quantization") == "ndp"
        self._pairs: dict[str, int] = {}
        self._count = 0

    def run(self, prompts: Sequence[list[int]], tokens: int) -> Pass:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        params = SamplingParams(
            temperature=1.0, max_tokens=tokens + 1, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        waiting, clock = set(), StepClock()
        for prompt in prompts:
            self._count += 1
            waiting.add(str(self._count))
            engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            waiting -= {output.request_id for output in outputs}
            for output in outputs:
                self._note(output)
            if outputs and not waiting:
                clock.lap()
        return clock.to_pass()

    def _note(self, output: Any) -> None:
        if output.finished and self._is_plugin:
            report = output.kv_transfer_params["ndp"]
            for kind in ("hot", "spilled", "cold", "prefill", "prefill_device", "fallback"):
                name = f"{kind}_pairs"
                self._pairs[name] = self._pairs.get(name, 0) + report.get(name, 0)

    def memory(self) -> dict[str, int]:
        sizes = {pid: memory_of(pid) for pid in descendants(os.getpid())}
        device = [pid for pid in sizes if "ndp_device" in command_of(pid)]
        engine = max((pid for pid in sizes if pid not in device), key=lambda pid: sizes[pid]["Anonymous"])
        found = {f"engine_{key.lower()}_bytes": value for key, value in sizes[engine].items()}
        for pid in device:
            found |= {f"device_{key.lower()}_bytes": value for key, value in sizes[pid].items()}
        return found

    def facts(self) -> dict[str, Any]:
        if not self._is_plugin:
            return {}
        status = self._llm.collective_rpc("ndp_status")[0]
        kept = ("hot_bytes", "staging_bytes", "device_bytes", "device_cores", "kernel", "pool")
        return {"pairs": self._pairs, "status": {name: status[name] for name in kept if name in status}}

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class LlamaSystem:
    """llama.cpp through llama-cpp-python's C interface, as its own batched example does it."""

    def __init__(self, job: Job) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        threads = len(CORES)
        self._model = llama_cpp.llama_model_load_from_file(job.model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {job.model}: write it again with benchmarks/gguf_mixtral.py")
        parameters = llama_cpp.llama_context_default_params()
        sequences = max(job.batches)
        parameters.n_ctx = sequences * job.longest
        parameters.n_seq_max = sequences
        parameters.n_batch = job.most_at_once
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self._batch = llama_cpp.llama_batch_init(job.most_at_once, 0, 1)
        self.vocabulary: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._file_bytes = Path(job.model).stat().st_size
        self._rng = np.random.default_rng(1)

    def run(self, prompts: Sequence[list[int]], tokens: int) -> Pass:
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        clock = StepClock()
        position = len(prompts[0])
        chosen = self._decode(
            [
                (token, at, row, at == position - 1)
                for row, prompt in enumerate(prompts)
                for at, token in enumerate(prompt)
            ]
        )
        clock.lap()
        for step in range(tokens):
            chosen = self._decode([(token, position + step, row, True) for row, token in enumerate(chosen)])
            clock.lap()
        return clock.to_pass()

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Rows of (token, position, sequence, wanted) -> one token drawn for every wanted row."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if self._api.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp could not decode a batch: its context is too small")
        wanted_rows = [i for i, row in enumerate(rows) if row[3]]
        logits = np.stack([self._logits(i) for i in wanted_rows])
        return (logits + self._rng.gumbel(size=logits.shape)).argmax(axis=1).tolist()

    def _logits(self, row: int) -> NDArray[np.float32]:
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, row), (self.vocabulary,))

    def memory(self) -> dict[str, int]:
        return {f"engine_{key.lower()}_bytes": value for key, value in memory_of(os.getpid()).items()}

    def facts(self) -> dict[str, Any]:
        return {"llama_cpp_python": self._api.__version__, "file_bytes": self._file_bytes}

    def close(self) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


class StepClock:
    """Laps of a pass: the first is its prefill. Beside each, what other programs took of the machine meanwhile.

    To look at them takes milliseconds, so it happens seldom: steps since the last look share what was seen. Its time
    counts in the lap after it, because an engine of another process goes on meanwhile, for which nobody may be charged
    nothing.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._foreign: list[float] = []
        self._after_prefill: dict[Thread, Spent] = {}
        self._looked = self._seen = 0.0
        self._look()
        self._began = time.perf_counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self._seconds.append(now - self._began)
        self._began = now
        if len(self._seconds) == 1 or now - self._looked >= LOOK_EVERY_S:
            self._note()
        if len(self._seconds) == 1:
            self._after_prefill = thread_times(os.getpid())

    def to_pass(self) -> Pass:
        if len(self._foreign) < len(self._seconds):
            self._note()
        steps = len(self._seconds) - 1
        threads = rows_of_step(self._after_prefill, thread_times(os.getpid()), steps) if steps else []
        return Pass(self._seconds[0], self._seconds[1:], self._foreign, threads)

    def _note(self) -> None:
        looked, seen = self._looked, self._seen
        self._look()
        foreign = max(self._seen - seen, 0.0) / (self._looked - looked)
        self._foreign += [foreign] * (len(self._seconds) - len(self._foreign))

    def _look(self) -> None:
        self._looked, self._seen = time.perf_counter(), self._foreign_s()

    def _foreign_s(self) -> float:
        """CPU seconds spent on our cores outside our tree, by programs here or by other guests of the hypervisor.

        The kernel counts in hundredths of a second.
        """
        wanted = {f"cpu{core}" for core in CORES}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        busy = sum(sum(map(int, line[1:4])) + sum(map(int, line[6:9])) for line in lines if line[0] in wanted)
        ours = 0
        for pid in descendants(os.getpid()):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ours += int(fields[11]) + int(fields[12])
        return (busy - ours) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> dict[str, int]:
    """Bytes resident, and of them those that belong to this process alone and to no file (weights that were copied)."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        if name in ("Rss:", "Anonymous:"):
            found[name[:-1]] = int(value) << 10
    return found
