"""Each function of vllm_private.py against the installed vLLM, and no such name in any other file."""

import ast
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_hooks
from engines import ROOT

pytest.importorskip("vllm")

from vllm import _custom_ops
from vllm.config import VllmConfig

from ndp_device.common.errors import ConfigError
from vllm_ndp.integration import vllm_private

pytestmark = pytest.mark.vllm
FILES = sorted((ROOT / "vllm_ndp").rglob("*.py"))
OWN = ROOT / "vllm_ndp/integration/vllm_private.py"
NOT_VLLMS = {"_asdict", "_replace", "_exit"}
"""Of named tuples and of os."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_given_by(trees: list[ast.Module]) -> set[str]:
    """Names that some file of ours defines or assigns."""
    given = set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            given.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            given.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            given.add(node.id)
    return given


def touched_in(tree: ast.Module, ours: set[str]) -> list[str]:
    """Private names that are not ours, and what is assigned to inside of something that vLLM has given."""
    found, from_vllm = list[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if parts[0] == "vllm":
                from_vllm |= {alias.asname or alias.name for alias in node.names}
            if parts[0] not in ("vllm_ndp", "ndp_device"):
                found += [name for name in (*parts, *(alias.name for alias in node.names)) if is_private(name)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            of_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            if of_super or node.attr not in ours:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and name.value not in ours:
                found.append(ast.unparse(node))
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            base = target
            while isinstance(base, ast.Attribute | ast.Subscript):
                base = base.value
            if base is not target and isinstance(base, ast.Name) and base.id in from_vllm:
                found.append(ast.unparse(target))
    return found


def test_no_other_file_touches_a_private_name_of_vllm_or_replaces_anything_in_it() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES if path != OWN}
    ours = names_given_by(list(trees.values())) | NOT_VLLMS
    assert {path.name: found for path, tree in trees.items() if (found := touched_in(tree, ours))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from vllm._custom_ops import cpu_fused_moe",
        "from vllm.config import _hidden",
        "from vllm.a import B\nB.wait = None",
        "from vllm.a import MAP\nMAP['x'] = None",
        "layer._output[0]",
        "getattr(layer, '_skips')",
        "super()._init_executor()",
    ],
)
def test_each_way_of_touching_one_is_seen(line: str) -> None:
    assert touched_in(ast.parse(line), {"_init_executor"}) != []


def test_every_function_has_a_test_and_every_name_is_in_the_installed_source() -> None:
    tree = ast.parse(OWN.read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} - {"touches", "_replaced"}
    tests = {node.name for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {f"test_{name}" for name in functions} <= tests
    _, read = vllm_hooks.of_installed()
    for one in vllm_private.TOUCHED:
        hook = vllm_hooks.Hook("", one.file, one.name, "mentions" if one.is_mentioned else "signature")
        assert vllm_hooks.look_up(read, hook) != vllm_hooks.ABSENT, one


def test_call_for_every_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is called after the architecture's own."""
    from vllm.model_executor.models import config

    order: list[str] = []

    class Theirs(config.VerifyAndUpdateConfig):
        @classmethod
        def verify_and_update_config(cls, vllm_config: Any) -> None:
            order.append("theirs")

    monkeypatch.setattr(config, "MODELS_CONFIG_MAP", {"MixtralForCausalLM": Theirs})
    vllm_private.call_for_every_architecture(lambda given: order.append(given))
    config.MODELS_CONFIG_MAP["MixtralForCausalLM"].verify_and_update_config("ours")
    assert order == ["theirs", "ours"]
    config.MODELS_CONFIG_MAP["OlmoeForCausalLM"].verify_and_update_config("another")
    assert order[2:] == ["another"]


def test_register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for _ in range(2):  # a second engine of the process
        vllm_private.register_connector("NdpConnectorOfThisTest", "vllm_ndp.integration.connector")
    try:
        assert "NdpConnectorOfThisTest" in KVConnectorFactory._registry
    finally:
        del KVConnectorFactory._registry["NdpConnectorOfThisTest"]


def test_attention_operators() -> None:
    from vllm.config import CompilationConfig

    operators = vllm_private.attention_operators(CompilationConfig())
    assert "vllm::unified_attention_with_output" in operators


def test_metric_classes() -> None:
    from prometheus_client import Counter, Gauge, Histogram
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

    class Metrics(KVConnectorPromMetrics):
        def observe(self, transfer_stats_data: Any, engine_idx: int = 0) -> None: ...

    given = {kind: kind for kind in (Counter, Histogram, Gauge)}
    assert vllm_private.metric_classes(Metrics(SimpleNamespace(kv_transfer_config=None), given, [], {})) == (
        Counter,
        Histogram,
        Gauge,
    )


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def shared_experts(*, ours: bool = True) -> Any:
    """vLLM's own object around a layer, left to the MoE method or run by vLLM itself."""
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

    parallel = SimpleNamespace(enable_eplb=False, use_fi_nvl_two_sided_kernels=False)
    return SharedExperts(Doubled(), SimpleNamespace(moe_parallel_config=parallel), False, lambda: ours)


def test_layer_of_shared_experts() -> None:
    assert isinstance(vllm_private.layer_of_shared_experts(shared_experts()), Doubled)


def test_leaves_shared_experts_to_us() -> None:
    x = torch.ones(2, 3)
    assert vllm_private.leaves_shared_experts_to_us(shared_experts(), x)
    assert not vllm_private.leaves_shared_experts_to_us(shared_experts(ours=False), x)


def test_put_output_of_shared_experts() -> None:
    shared, output = shared_experts(), torch.ones(2, 3)
    vllm_private.put_output_of_shared_experts(shared, output)
    assert shared.output is output


def test_reads_its_weights_itself() -> None:
    layer = torch.nn.Linear(2, 2)
    assert not vllm_private.reads_its_weights_itself(layer)
    layer._cpu_skip_gemm_dispatch = True
    assert vllm_private.reads_its_weights_itself(layer)


def test_weights_tracked_by() -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    stock, seen = DefaultModelLoader.track_weights_loading, []
    with vllm_private.weights_tracked_by(lambda *told: seen.append(told)):
        DefaultModelLoader.track_weights_loading("loader", "model", {"a"})
    assert seen == [(stock, "loader", "model", {"a"})]
    assert DefaultModelLoader.track_weights_loading is stock


def test_weights_passed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    monkeypatch.setattr(
        DefaultModelLoader, "get_all_weights", stock := lambda loader, config, model: iter([loader, config, model])
    )
    with vllm_private.weights_passed_through(lambda stream: (2 * one for one in stream)):
        assert list(DefaultModelLoader.get_all_weights(1, 2, 3)) == [2, 4, 6]
    assert DefaultModelLoader.get_all_weights is stock


def test_plain_heads_offered_to() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    class Theirs(UnquantizedEmbeddingMethod):
        """A method that was asked for takes its head itself."""

    head = ParallelLMHead.__new__(ParallelLMHead)
    other, table = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    stock, offered = UnquantizedEmbeddingMethod.process_weights_after_loading, []
    with vllm_private.plain_heads_offered_to(lambda layer: not offered.append(layer)):
        UnquantizedEmbeddingMethod().process_weights_after_loading(head)
        Theirs().process_weights_after_loading(other)
        UnquantizedEmbeddingMethod().process_weights_after_loading(table)
    assert offered == [head]
    if current_platform.is_cpu():  # a table of embeddings takes no second copy before it is used as a matrix
        unused, x = table.cpu_linear, torch.randn(3, 32)
        torch.testing.assert_close(unused(x, table.weight, table.bias), table(x))
        assert table.cpu_linear is not unused
    assert UnquantizedEmbeddingMethod.process_weights_after_loading is stock


ON_CPU = pytest.mark.skipif(not vllm_private.has_operator("prepack_moe_weight"), reason="vLLM's build for CPU")


@ON_CPU
def test_has_operator() -> None:
    assert not vllm_private.has_operator("an_operator_of_nobody")


@ON_CPU
def test_fused_experts_on_cpu() -> None:
    """Experts of ones whose weights are packed here: silu(32) * 32, summed over 32."""
    w13, w2 = torch.ones(1, 64, 32), torch.ones(1, 32, 32)
    packed = torch.empty_like(w13), torch.empty_like(w2)
    for weights, to in zip((w13, w2), packed, strict=True):
        vllm_private.pack_for_cpu(weights, to, "vec")
    x, out = torch.ones(1, 32), torch.empty(1, 32)
    weight, expert = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    vllm_private.fused_experts_on_cpu()(out, x, *packed, None, None, weight, expert, "silu", "vec", False)
    assert torch.allclose(out, torch.full((1, 32), 32.0**3))


@ON_CPU
def test_pack_for_cpu() -> None:
    """A permutation of the weights."""
    weights = torch.arange(2 * 64 * 32, dtype=torch.float32).view(2, 64, 32)
    packed = torch.empty_like(weights)
    vllm_private.pack_for_cpu(weights, packed, "vec")
    assert torch.equal(packed.flatten().sort().values, weights.flatten())


def test_asks_for_amx() -> None:
    assert not vllm_private.asks_for_amx(torch.float32)
    assert vllm_private.asks_for_amx(torch.bfloat16) == torch.cpu._is_amx_tile_supported()


def test_use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where vLLM's worker has taken torch's own function away."""
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    try:
        vllm_private.use_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        vllm_private.use_threads(before)


def test_to_fp8_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is a GPU's: what it is asked for."""
    asked: list[Any] = []
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", lambda *a, **k: asked.append((a, k)) or ("codes", "scales"))
    assert vllm_private.to_fp8_by_row("rows") == ("codes", "scales")
    assert asked == [(("rows",), {"use_per_token_if_dynamic": True})]


def test_tiles_of_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe

    asked: list[tuple[int, int]] = []
    tuned = {1: {"BLOCK_SIZE_M": 16}}
    monkeypatch.setattr(fused_moe, "get_moe_configs", lambda E, N, *rest: asked.append((E, N)) or tuned)
    assert vllm_private.tiles_of_stock((8, 64, 32), (8, 32, 32), 2, torch.bfloat16, 1) == tuned[1]
    assert asked == [(8, 32)]


def test_seeds_kept_for_tokens() -> None:
    """test_paced_scheduler.py has an engine with a seeded request whose prompt is cut."""
    generators = {0: "whole", 1: "partial", 3: "of nobody now"}
    batch = SimpleNamespace(num_reqs=3, generators=generators)
    mask = SimpleNamespace(np=np.array([False, True, True, True]))
    with vllm_private.seeds_kept_for_tokens(SimpleNamespace(input_batch=batch, discard_request_mask=mask)):
        assert generators == {0: "whole", 3: "of nobody now"}
    assert generators == {0: "whole", 1: "partial", 3: "of nobody now"}


def test_load_saved_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph without the method that vLLM asks for gets one; one that calls other layers of ours is not found: FP8
    layers that vLLM computed before, and the plugin after it was updated, ended a start."""

    class Graph:
        pass

    loaded = SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=Graph()))
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda *_, **__: loaded)

    def key_of(*names: str) -> str:
        config = VllmConfig(additional_config={"ndp": {}})
        model = torch.nn.Module()
        model.language_model = torch.nn.Module()
        model.language_model.vllm_config = copy.copy(config)  # a multimodal model's
        vllm_private.load_saved_graphs(config, model, names)
        assert model.language_model.vllm_config.compute_hash() == config.compute_hash()
        return config.compute_hash()

    experts = "0:model.layers.0.experts", "10:model.layers.1.experts"
    assert key_of(*experts) == key_of(*experts[::-1])
    assert key_of(*experts) != key_of(*experts, "2:model.layers.0.self_attn.qkv_proj")
    assert key_of(*experts) != key_of("4:model.layers.0.experts", experts[1])
    assert torch.compiler.load_compiled_function(f_globals={}) is loaded
    loaded._artifacts.compiled_fn.finalize_loading(None)


def test_sleep_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per process. test_waiting.py shows what it does to a reader."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)  # put back at the end
    vllm_private.sleep_between_looks()
    first = SpinCondition.wait
    vllm_private.sleep_between_looks()
    assert SpinCondition.wait is first


def test_full_graphs_where() -> None:
    """With vLLM's own dispatcher, which knows a graph of 4 decode rows."""
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.forward_context import BatchDescriptor
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    compilation = CompilationConfig(
        mode=0, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, max_cudagraph_capture_size=4, cudagraph_capture_sizes=[4]
    )
    compilation.post_init_cudagraph_sizes()
    config = SimpleNamespace(
        compilation_config=compilation, speculative_config=None, lora_config=None, num_speculative_tokens=0,
        scheduler_config=SimpleNamespace(max_num_seqs=4), parallel_config=SimpleNamespace(),
    )  # fmt: skip
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1)
    fits = [True]
    vllm_private.full_graphs_where(SimpleNamespace(cudagraph_dispatcher=dispatcher), lambda: fits[0])
    mode, rows = dispatcher.dispatch(num_tokens=3, uniform_decode=True)
    assert (mode, rows.num_tokens) == (CUDAGraphMode.FULL, 4)
    fits[0] = False
    assert dispatcher.dispatch(num_tokens=3, uniform_decode=True) == (CUDAGraphMode.NONE, BatchDescriptor(3))
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        vllm_private.full_graphs_where(SimpleNamespace(), lambda: True)
