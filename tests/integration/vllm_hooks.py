"""Which of vLLM's names and signatures does the plugin depend on, and are they the same in every version?

    python tests/integration/vllm_hooks.py                   the vLLM that is installed: compared with the record
    python tests/integration/vllm_hooks.py WHEEL... --json docs/measured/vllm_hooks.json      from CUDA wheels

Reads source only: a wheel is opened where it lies, nothing of it is imported or installed. What the plugin imports is
found in its own source; what it calls, overrides or reads is named in PUBLIC with the reason, or in
vllm_ndp/integration/vllm_private.py if the name is private. A wheel comes with
`pip download --no-deps vllm==VERSION` (300 MB). docs/gpu.md links the record.
"""

import argparse
import ast
import importlib.util
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_ndp.integration import vllm_private

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "measured" / "vllm_hooks.json"
Read = Callable[[str], str | None]
"""The source of a file of vLLM, by its path below `vllm/`; None: there is none."""
MOE = "model_executor/layers/fused_moe"
METHOD, RUNNER = f"{MOE}/fused_moe_method_base.py", f"{MOE}/runner/moe_runner.py"
WORKER, V2 = "v1/worker/gpu_worker.py", "v1/worker/gpu/model_runner.py"
SCHEDULED, COMPILATION = "v1/core/sched/output.py", "config/compilation.py"
CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py"
ON_CPU_ONLY = {"vllm._custom_ops", "vllm.utils.cpu_resource_utils", "vllm.v1.executor.ray_executor_v2"}
"""Modules that the plugin imports on CPU only: what a CUDA wheel holds of them does not matter."""
MOVED = {"AuthenticationMiddleware"}
"""Names that the plugin looks for in several places, of which each version has one."""


class Hook(NamedTuple):
    what: str  # as the docs' table says it
    file: str
    name: str  # of a function, `Class.method`, `Class` (its fields) or, after a dot, an attribute that its source names
    kind: str = "signature"  # or "mentions"
    fields: tuple[str, ...] = ()  # of a class: those that we read


PRIVATE = tuple(
    Hook(one.function.replace("_", " "), one.file, one.name, "mentions" if one.is_mentioned else "signature")
    for one in vllm_private.TOUCHED
    if not one.on_cpu_only
)
"""Shown by the tests of test_vllm_private.py, which are named after the functions."""
PUBLIC = (
    Hook("MoE method: slots in place of experts", METHOD, "FusedMoEMethodBase.create_weights"),
    Hook("MoE method: routed rows", METHOD, "FusedMoEMethodBase.apply"),
    Hook("MoE method: sizes are not rounded", METHOD, "FusedMoEMethodBase.maybe_roundup_sizes"),
    Hook("the method stays ours", METHOD, "FusedMoEMethodBase.supports_internal_mk"),
    Hook("routing before `apply`", RUNNER, "MoERunner._apply_quant_method.select_experts", "mentions"),
    Hook("hot slots: the fused kernel", f"{MOE}/fused_moe.py", "fused_experts"),
    Hook("hot slots: tiles by E", f"{MOE}/fused_moe.py", "try_get_optimal_moe_config"),
    Hook("hot slots: tiles by E, applied", f"{MOE}/__init__.py", "override_config"),
    Hook("hot slots of 8 bits: scales by row", f"{MOE}/config.py", "fp8_w8a8_moe_quant_config"),
    Hook("hot slots of 4 bits: scales and zero points by group", f"{MOE}/config.py", "int4_w4a16_moe_quant_config"),
    Hook("our operator", "utils/torch_utils.py", "direct_register_custom_op"),
    Hook("operator that graphs are split at", RUNNER, "MoERunner._select_forward.moe_forward", "mentions"),
    Hook("graphs are split before vLLM fills its list", COMPILATION, "CompilationConfig.set_splitting_ops_for_v1"),
    Hook("worker: load", WORKER, "Worker.load_model"),
    Hook("worker: memory for the KV cache", WORKER, "Worker.determine_available_memory"),
    Hook("worker: layers' KV entries", WORKER, "Worker.get_kv_cache_spec"),
    Hook("worker: KV cache exists", WORKER, "Worker.initialize_from_config"),
    Hook("worker: warm-up", WORKER, "Worker.compile_or_warm_up_model"),
    Hook("worker: a step", WORKER, "Worker.execute_model"),
    Hook("worker: tokens of a step", WORKER, "Worker.sample_tokens"),
    Hook("worker: end", WORKER, "Worker.shutdown"),
    Hook("a new request", SCHEDULED, "NewRequestData",
         fields=("req_id", "prompt_token_ids", "prompt_embeds", "block_ids", "num_computed_tokens")),
    Hook("length of its prompt", SCHEDULED, "NewRequestData.prompt_len"),
    Hook("a running request", SCHEDULED, "CachedRequestData",
         fields=("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens")),
    Hook("a step's message", SCHEDULED, "SchedulerOutput",
         fields=("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "scheduled_spec_decode_tokens",
                 "finished_req_ids")),
    Hook("order of rows, runner V1", "v1/worker/gpu_model_runner.py", "GPUModelRunner.__init__.input_batch",
         "mentions"),
    Hook("order of rows, runner V2", V2, "sort_batch_req_ids"),
    Hook("its length of a decode", V2, "GPUModelRunner.__init__.decode_query_len", "mentions"),
    Hook("KV entries of the rows", "forward_context.py", "ForwardContext.slot_mapping", "mentions"),
    Hook("connector: a step's report", CONNECTOR, "KVConnectorBase_V1.build_connector_worker_meta"),
    Hook("connector: reports arrive", CONNECTOR, "KVConnectorBase_V1.update_connector_output"),
    Hook("connector: a request has ended", CONNECTOR, "KVConnectorBase_V1.request_finished"),
    Hook("offloading, which is refused", "config/offload.py", "UVAOffloadConfig.cpu_offload_gb", "mentions"),
    Hook("offloading by prefetch, which is refused", "config/offload.py",
         "PrefetchOffloadConfig.offload_group_size", "mentions"),
    Hook("model runner V2 by default", "config/vllm.py", "VllmConfig.use_v2_model_runner"),
)  # fmt: skip
HOOKS = (*PUBLIC, *PRIVATE)
ABSENT = "absent"


def of_wheel(path: Path) -> tuple[str, Read]:
    """Version and source of a wheel."""
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())
    version = re.sub(r"\+.*", "", path.name.split("-")[1])
    return version, lambda file: archive.read(f"vllm/{file}").decode() if f"vllm/{file}" in names else None


def of_installed() -> tuple[str, Read]:
    """Version and source of the vLLM of this environment, which is not imported for it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("no vLLM is installed here: name wheels")
    folder = Path(spec.origin).parent
    version = re.search(r"""version = ['"]([\d.]+)""", (folder / "_version.py").read_text())
    assert version is not None
    return version[1], lambda file: (folder / file).read_text() if (folder / file).exists() else None


def find(tree: ast.AST, names: list[str]) -> ast.AST | None:
    """The definition of `Class.method` and the like, the first one of that name."""
    for name in names:
        body = getattr(tree, "body", [])
        found = [node for node in body if getattr(node, "name", None) == name]
        if not found:
            return None
        tree = found[0]
    return tree


def look_up(read: Read, hook: Hook) -> str:
    """What this version has for a hook, in words that are equal where nothing we depend on differs."""
    source = read(hook.file)
    if source is None:
        return ABSENT
    tree, names = ast.parse(source), hook.name.split(".")
    if hook.kind == "mentions":
        where = find(tree, names[:-1])
        text = source if where is tree else "" if where is None else ast.get_source_segment(source, where) or ""
        mentioned = names[-1] in text
        return "there" if mentioned else ABSENT
    where = find(tree, names)
    if isinstance(where, ast.ClassDef):
        fields = {node.target.id for node in where.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
        lacking = [field for field in hook.fields if field not in fields]
        return f"lacks {', '.join(lacking)}" if lacking else "all there"
    if isinstance(where, ast.FunctionDef):
        args = where.args
        names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
        names += [f"*{args.vararg.arg}"] if args.vararg else ["*"] if args.kwonlyargs else []
        names += [arg.arg for arg in args.kwonlyargs] + ([f"**{args.kwarg.arg}"] if args.kwarg else [])
        kinds = [node.id for node in where.decorator_list if isinstance(node, ast.Name)]
        return f"{'property ' if 'property' in kinds else ''}({', '.join(names)})"
    return ABSENT


def imported_names() -> Iterator[tuple[str, str]]:
    """(module, name) of everything that the plugin imports from vLLM, wherever the import stands."""
    for path in sorted((ROOT / "vllm_ndp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
            if module and (module == "vllm" or module.startswith("vllm.")) and module not in ON_CPU_ONLY:
                yield from ((module, alias.name) for alias in node.names)  # type: ignore[union-attr]


def has_name(read: Read, module: str, name: str) -> bool:
    """Whether a module of vLLM defines, imports or lazily offers a name, or contains a module of that name."""
    folder = "/".join(module.split(".")[1:])
    below = f"{folder}/" if folder else ""
    source = read(f"{below}__init__.py") or read(f"{folder}.py")
    if source is None:
        return False
    return bool(re.search(rf"\b{re.escape(name)}\b", source)) or any(
        read(f"{below}{name}{ending}") is not None for ending in (".py", "/__init__.py")
    )


def record(read: Read) -> dict[str, object]:
    wanted = sorted(set(imported_names()))
    found = {(module, name) for module, name in wanted if has_name(read, module, name)}
    moved = {name for _, name in found} & MOVED
    lacking = [f"{module}.{name}" for module, name in wanted if (module, name) not in found and name not in moved]
    return {"hooks": {hook.what: look_up(read, hook) for hook in HOOKS}, "imports": len(wanted), "lacking": lacking}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path, help="wheels of vLLM; without one, what is installed")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import measured

    measured.add_json_option(parser)
    arguments = parser.parse_args()
    measurement = measured.Measurement(__doc__)
    sources = [of_wheel(path) for path in arguments.wheels] or [of_installed()]
    found = {version: record(read) for version, read in sorted(sources)}
    known = json.loads(RECORD.read_text())["figures"]["versions"] if RECORD.exists() else {}
    status = 0
    for version, what in found.items():
        if what["lacking"]:
            print(f"vLLM {version} lacks {', '.join(what['lacking'])}")  # type: ignore[arg-type]
            status = 1
        for name, text in what["hooks"].items():  # type: ignore[attr-defined]
            if version in known and known[version]["hooks"].get(name) != text:
                print(f"vLLM {version}: {name} is {text}, the record has {known[version]['hooks'].get(name)}")
                status = 1
    if arguments.json is None:
        print(f"{', '.join(found)}: {'as recorded' if not status else 'not as recorded'}")
        return status
    measurement.end({"versions": found}, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
