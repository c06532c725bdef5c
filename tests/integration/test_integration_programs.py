"""Programs of their own: what an engine keeps in memory, vLLM's benchmark, a model on a hub, routing by vLLM itself."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import routed_experts
from engines import IN_PROCESS, MODEL, PROMPTS, ROOT, VLLM_PROGRAM, last_json, run_program, trace_of
from local_hub import local_hub

from vllm_ndp.operating.sizing import ENGINE_BYTES, GB, Sizing
from vllm_ndp.operating.sources import source_named
from vllm_ndp.traces.importers import ImportSettings, import_trace

pytestmark = [pytest.mark.vllm, pytest.mark.programs]

HIDDEN, INTERMEDIATE, LAYERS = 512, 1792, 2
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 2  # gate, up and down in bfloat16: 5.5 MB
TOLERANCE = EXPERT_BYTES
"""One expert of 5.5 MB. Seen on 2026-11-20: each difference within 0.5 MB of its arithmetic."""

OWN_BYTES = 9_600_000
"""What the plugin itself takes, from modules to sidecar: 9.3 to 10.1 MB seen on 2026-11-30, 15.2 three days before."""

BUNDLED = 8
"""Stands for the bundled model, which has so many experts."""

ENGINES = {"E16 K2": (16, 2), "E16 K8": (16, 8), "E32 K2": (32, 2), "E16 stock": (16, None), "bundled K4": (BUNDLED, 4)}

KV_BYTES = 64 << 20
"""What engines of these tests are given (engines.py), all of it in memory once they have started."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    models = {BUNDLED: MODEL}
    for experts in (16, 32):
        models[experts] = tmp_path_factory.mktemp(f"random-{experts}")
        made = run_program(
            *(sys.executable, ROOT / "benchmarks" / "make_random_mixtral.py", models[experts]),
            *("--hidden", str(HIDDEN), "--intermediate", str(INTERMEDIATE)),
            *("--layers", str(LAYERS), "--experts", str(experts)),
        )
        assert made.returncode == 0, made.stderr
    return models


@pytest.fixture(scope="module")
def engines(models: dict[int, Path]) -> dict[str, dict[str, int]]:
    """What each engine says once it is loaded, each in a process of its own."""

    def measure(experts: int, hot: int | None) -> dict[str, int]:
        program = Path(__file__).with_name("resident_memory.py")
        done = run_program(sys.executable, program, models[experts], *([] if hot is None else [str(hot)]))
        assert done.returncode == 0, done.stderr[-2000:]
        return last_json(done.stdout)

    with ThreadPoolExecutor(2) as pool:  # a GB each
        results = dict(zip(ENGINES, pool.map(lambda engine: measure(*engine), ENGINES.values()), strict=True))
    assert all(result["tokens"] == 16 for result in results.values())
    return results


@pytest.fixture(scope="module")
def memory(engines: dict[str, dict[str, int]]) -> dict[str, int]:
    """Anonymous bytes of each engine once it is loaded."""
    return {name: result["start_bytes"] for name, result in engines.items()}


def test_memory_grows_by_one_expert_per_hot_slot(memory: dict[str, int]):
    """6 more slots in each of 2 layers: 12 * 5.5 MB = 66 MB."""
    grown = memory["E16 K8"] - memory["E16 K2"]
    assert grown == pytest.approx(6 * LAYERS * EXPERT_BYTES, abs=TOLERANCE)


def test_sixteen_more_experts_cost_nothing_while_they_are_cold(memory: dict[str, int]):
    """Copied, they would be 16 * 2 * 5.5 MB = 176 MB; mapped, they are 0."""
    assert memory["E32 K2"] - memory["E16 K2"] == pytest.approx(0, abs=TOLERANCE)


def test_stock_vllm_holds_every_expert_the_plugin_leaves_in_the_pool(memory: dict[str, int]):
    """14 of 16 experts in 2 layers, less the one staging slot that the layers share: 27 * 5.5 MB = 149 MB."""
    saved = memory["E16 stock"] - memory["E16 K2"]
    assert saved == pytest.approx((14 * LAYERS - 1) * EXPERT_BYTES - OWN_BYTES, abs=TOLERANCE)


@pytest.mark.parametrize("engine", ["E16 K2", "E16 K8", "E32 K2", "bundled K4"])
def test_plan_says_beforehand_what_an_engine_will_hold(
    engine: str, engines: dict[str, dict[str, int]], models: dict[int, Path]
):
    """`vllm-ndp plan`: the plugin's parts to the byte, all that the process holds within 5 %. A demand that fills the
    KV cache of these engines: one request with as many tokens as 64 MiB hold."""
    (experts, num_hot), measured = ENGINES[engine], engines[engine]
    model = source_named(str(models[experts])).model
    sizing = Sizing(model, 64 * GB, context=KV_BYTES // model.kv_bytes)
    option = sizing.option(num_hot, 4)
    assert option is not None
    assert num_hot is not None
    assert option.host["hot experts"] == measured["hot_bytes"]
    assert option.host["staging slot"] == measured["staging_bytes"]
    assert option.host["routing sidecar"] == measured["sidecar_bytes"]
    assert sizing.all_experts == measured["pool_bytes"]
    held = ENGINE_BYTES + sum(
        option.host[part] for part in ("hot experts", "other weights", "staging slot", "KV cache")
    )
    assert measured["start_bytes"] == pytest.approx(held, rel=0.05)


# -- The benchmark a user would run: vLLM's own with the plugin --------------------------------------------------------


def test_vllm_bench_throughput_runs_with_the_plugin(tmp_path: Path):
    result_file = tmp_path / "result.json"
    done = run_program(
        *(VLLM_PROGRAM, "bench", "throughput", "--model", MODEL, "--quantization", "ndp"),
        *("--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "12", "--num-prompts", "8"),
        *("--max-model-len", "128", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--enforce-eager", "--output-json", result_file),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "vllm-ndp: what is effective" in done.stderr
    assert "tokens/s" in done.stdout
    result = json.loads(result_file.read_text())
    assert result["num_requests"] == 8
    assert result["tokens_per_second"] > 0


# -- A model named by its id on a hub: fetched as vLLM fetches it, or refused in one sentence --------------------------


ID = "lab/tiny-mixtral"
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
settings = {"hot_experts": 4, "cold_precision": "full"}
options = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], quantization="ndp", additional_config={"ndp": settings}, max_model_len=256, max_num_seqs=4,
          kv_cache_memory_bytes=16 << 20, enforce_eager=True, dtype="float32", **options)
outputs = llm.generate(json.loads(sys.argv[3]), SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
print(json.dumps({"tokens": [list(output.outputs[0].token_ids) for output in outputs]}))
"""


def serve(name: str, environment: dict[str, str], **options: object):
    """One engine in a process of its own, with the model by this name."""
    arguments = (sys.executable, "-c", PROGRAM, name, json.dumps(options), json.dumps(PROMPTS[:2]))
    return run_program(*arguments, **IN_PROCESS, **environment)


def test_an_id_is_fetched_once_and_serves_as_its_directory_does(tmp_path: Path):
    """First from the hub; then without it, from the cache alone."""
    shutil.copytree(MODEL, tmp_path / "hub" / ID)
    with local_hub(tmp_path / "hub", tmp_path / "cache") as hub:
        first = serve(ID, hub.environment)
        assert first.returncode == 0, first.stderr[-3000:]
        fetched = {
            request.rpartition("/")[2] for request in hub.seen if request.startswith("GET") and "resolve" in request
        }
        again = serve(ID, hub.environment | {"HF_HUB_OFFLINE": "1"})
    assert "model.safetensors" in fetched
    local = serve(str(MODEL), {})
    assert last_json(first.stdout) == last_json(again.stdout) == last_json(local.stdout)


@pytest.mark.parametrize("offline", ["0", "1"])
def test_an_id_that_is_nowhere_is_refused_in_one_sentence(offline: str, tmp_path: Path):
    """vLLM itself refuses it, before it asks us, while config.json cannot be had; with that and no weights we do."""
    (tmp_path / "hub" / ID).mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, tmp_path / "hub" / ID / name)
    with local_hub(tmp_path / "hub", tmp_path / "cache") as hub:
        if offline == "1":  # what an interrupted download leaves
            snapshot = "from huggingface_hub import snapshot_download; import sys; snapshot_download(sys.argv[1])"
            assert run_program(sys.executable, "-c", snapshot, ID, **hub.environment).returncode == 0
        done = serve(ID, hub.environment | {"HF_HUB_OFFLINE": offline})
    assert done.returncode != 0
    last = [line for line in done.stderr.splitlines() if "ConfigError" in line or "ReplicaError" in line]
    assert last, done.stderr[-3000:]
    assert "is one of .safetensors or .gguf" in last[-1] or "cannot be had from the hub" in last[-1]


# -- routing that vLLM records itself, by its newer model runner on a CPU ----------------------------------------------


def test_what_vllm_itself_records_is_what_our_recorder_saw_of_the_same_run(tmp_path):
    done = run_program(sys.executable, Path(routed_experts.__file__), tmp_path / "trace")
    assert done.returncode == 0, done.stderr[-4000:]
    answers = last_json(done.stdout)["answers"]
    (tmp_path / "answers.jsonl").write_text("\n".join(answers))
    imported = import_trace(tmp_path / "answers.jsonl", "vllm", ImportSettings("tiny", num_experts=8))
    ours = trace_of(tmp_path / "trace")
    assert imported.prompt_len.tolist() == ours.prompt_len.tolist()
    assert len(imported.sequences) == len(routed_experts.TOKENS)
    for theirs, own, tokens in zip(imported.sequences, ours.sequences, routed_experts.TOKENS, strict=True):
        assert len(theirs.decode_ids) == tokens - 1  # the last token has no row
        for rows, seen in ((theirs.prompt_ids, own.prompt_ids), (theirs.decode_ids, own.decode_ids)):
            assert np.array_equal(np.sort(rows, axis=2), np.sort(seen, axis=2))
