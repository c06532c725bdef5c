"""Every private name of vLLM that the plugin touches, and each place where it replaces something in vLLM.

One function each. `touches` says where vLLM's source has the name; tests/integration/vllm_hooks.py looks it up in the
installed vLLM and in wheels of other versions, and docs/measured/vllm_hooks.json records what each of them has.
tests/integration/test_vllm_private.py has a test for each function, and holds that no other file touches such a name.
Imports of vLLM stand inside the functions: the plugin's entry point imports this file in every process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ndp_device.common.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
_MOE = "model_executor/layers/fused_moe"
_SHARED = f"{_MOE}/runner/shared_experts.py"


class Touched(NamedTuple):
    """A name in vLLM's source, and the function of this file that depends on it."""

    function: str
    file: str
    """Below `vllm/`."""
    name: str
    """`Class.method`, or with `is_mentioned` a name that the source of `Class` or `Class.method` holds."""
    is_mentioned: bool
    on_cpu_only: bool
    """Whether builds for GPUs may lack it."""


TOUCHED: list[Touched] = []


def touches(file: str, name: str, *, is_mentioned: bool = False, on_cpu_only: bool = False) -> Callable[[F], F]:
    def note(function: F) -> F:
        TOUCHED.append(Touched(function.__name__, file, name, is_mentioned, on_cpu_only))
        return function

    return note


# -- configuration -------------------------------------------------------------------------------------------------


@touches("model_executor/models/config.py", "VerifyAndUpdateConfig.verify_and_update_config")
def call_for_every_architecture(configure: Callable[[Any], None]) -> None:
    """Have vLLM call `configure(vllm_config)` for every text architecture, after the architecture's own hook."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    for architecture in ModelRegistry.get_supported_archs():
        previous = MODELS_CONFIG_MAP.get(architecture)

        class Hook(previous or VerifyAndUpdateConfig):  # type: ignore[misc]
            _previous = previous

            @classmethod
            def verify_and_update_config(cls, vllm_config: Any) -> None:
                if cls._previous is not None:
                    cls._previous.verify_and_update_config(vllm_config)
                configure(vllm_config)

        MODELS_CONFIG_MAP[architecture] = Hook


@touches("distributed/kv_transfer/kv_connector/factory.py", "KVConnectorFactory._registry", is_mentioned=True)
def register_connector(name: str, module: str) -> None:
    """Make a connector known by name, once: vLLM's log line looks the parts of a MultiConnector up there."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


@touches("config/compilation.py", "CompilationConfig._attention_ops", is_mentioned=True)
def attention_operators(compilation_config: Any) -> list[str]:
    """Operators of attention that vLLM splits a captured graph at."""
    return list(compilation_config._attention_ops)


@touches("distributed/kv_transfer/kv_connector/v1/metrics.py", "KVConnectorPromMetrics._counter_cls", is_mentioned=True)
def metric_classes(metrics: Any) -> tuple[Any, Any, Any]:
    """Classes of counters, histograms and gauges, of Prometheus or of Ray, for a connector's metrics."""
    return metrics._counter_cls, metrics._histogram_cls, metrics._gauge_cls


@touches("v1/cudagraph_dispatcher.py", "CudagraphDispatcher.dispatch")
def full_graphs_where(runner: Any, fits: Callable[[], bool]) -> None:
    """Have a runner replay full graphs in steps only that fit. Raises ConfigError for one that chooses otherwise."""
    from vllm.config import CUDAGraphMode

    if (dispatcher := getattr(runner, "cudagraph_dispatcher", None)) is None:
        raise ConfigError("a decode step as one graph needs vLLM's model runner V1: set VLLM_USE_V2_MODEL_RUNNER=0")
    stock = dispatcher.dispatch

    def dispatch(*args: Any, invalid_modes: Any = None, **kwargs: Any) -> Any:
        invalid = set(invalid_modes or ()) | (set() if fits() else {CUDAGraphMode.FULL})
        return stock(*args, invalid_modes=invalid, **kwargs)

    dispatcher.dispatch = dispatch


# -- layers --------------------------------------------------------------------------------------------------------


@touches(_SHARED, "SharedExperts.__init__._layer", is_mentioned=True)
def layer_of_shared_experts(shared_experts: Any) -> Any:
    """The module that computes shared experts [T, H] -> [T, H], without vLLM's bookkeeping around it."""
    return shared_experts._layer


@touches(_SHARED, "SharedExperts._determine_shared_experts_order")
def leaves_shared_experts_to_us(shared_experts: Any, x: torch.Tensor) -> bool:
    """Whether vLLM leaves it to the MoE method to run the shared experts for these rows."""
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

    order = shared_experts._determine_shared_experts_order(x)
    return bool(order == SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)


@touches(_SHARED, "SharedExperts._output_idx")
def put_output_of_shared_experts(shared_experts: Any, output: torch.Tensor) -> None:
    """Leave what they gave where their own forward would have."""
    shared_experts._output[shared_experts._output_idx] = output


@touches(
    "model_executor/kernels/linear/scaled_mm/cpu.py", "_cpu_skip_gemm_dispatch", is_mentioned=True, on_cpu_only=True
)
def reads_its_weights_itself(layer: Any) -> bool:
    """Whether something else than the linear layer reads its weights, as MLA does on CPU."""
    return bool(getattr(layer, "_cpu_skip_gemm_dispatch", False))


@contextmanager
def _replaced(owner: type, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    stock = getattr(owner, name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        setattr(owner, name, stock)


@touches("model_executor/model_loader/default_loader.py", "DefaultModelLoader.track_weights_loading")
def weights_tracked_by(
    track: Callable[[Callable[..., None], Any, torch.nn.Module, set[str] | None], None],
) -> AbstractContextManager[None]:
    """Within: vLLM's loader compares the names that it has loaded by track(stock, loader, model, names)."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    stock = DefaultModelLoader.track_weights_loading

    def ours(self: Any, model: torch.nn.Module, loaded: set[str] | None, quantized: bool = False) -> None:
        track(stock, self, model, loaded)

    return _replaced(DefaultModelLoader, "track_weights_loading", ours)


@touches("model_executor/model_loader/default_loader.py", "DefaultModelLoader.get_all_weights")
def weights_passed_through(
    change: Callable[[Iterator[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]],
) -> AbstractContextManager[None]:
    """Within: vLLM's loader gives a model what change() makes of the checkpoint's tensors, name and tensor."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    stock = DefaultModelLoader.get_all_weights

    def ours(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return change(stock(self, *args, **kwargs))

    return _replaced(DefaultModelLoader, "get_all_weights", ours)


@touches(
    "model_executor/layers/vocab_parallel_embedding.py", "UnquantizedEmbeddingMethod.process_weights_after_loading"
)
def plain_heads_offered_to(take: Callable[[Any], bool]) -> AbstractContextManager[None]:
    """Within: an output matrix that its model makes without asking for a method is offered to take(layer) first. On a
    CPU a table of embeddings is laid out as a matrix once it is used as one, which few models do: a second copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    stock = UnquantizedEmbeddingMethod.process_weights_after_loading

    def ours(self: Any, layer: Any) -> None:
        def at_first_use(*product: Any) -> torch.Tensor:
            stock(self, layer)
            return layer.cpu_linear(*product)

        plain, is_head = type(self) is UnquantizedEmbeddingMethod, isinstance(layer, ParallelLMHead)
        if plain and not is_head and current_platform.is_cpu():
            layer.cpu_linear = at_first_use
        elif not (plain and is_head and take(layer)):
            stock(self, layer)

    return _replaced(UnquantizedEmbeddingMethod, "process_weights_after_loading", ours)


# -- operators -----------------------------------------------------------------------------------------------------


def has_operator(name: str) -> bool:
    """Whether vLLM's compiled library has an operator: its builds for some processors lack some."""
    return hasattr(torch.ops._C, name)


@touches("_custom_ops.py", "cpu_fused_moe", on_cpu_only=True)
def fused_experts_on_cpu() -> Callable[..., None]:
    """vLLM's CPU kernel for experts, which checks nothing: (out, x, w13, w2, b13, b2, weights, ids, activation, isa,
    skips the weights)."""
    from vllm._custom_ops import cpu_fused_moe

    operator: Callable[..., None] = cpu_fused_moe
    return operator


def pack_for_cpu(weights: torch.Tensor, to: torch.Tensor, isa: str) -> None:
    """Write weights [E, N, K] in the layout of vLLM's CPU kernel for experts."""
    torch.ops._C.prepack_moe_weight(weights, to, isa)


def asks_for_amx(dtype: torch.dtype) -> bool:
    """Whether vLLM's CPU kernel for experts may use AMX, for which it does not ask the system itself (SIGILL)."""
    if dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return False
    torch.cpu._init_amx()
    return True


def use_threads(number: int) -> None:
    """Threads of torch's and vLLM's operators in this process. vLLM's worker has replaced torch's own function by one
    that does nothing."""
    torch._C.set_num_threads(number)


@touches("_custom_ops.py", "scaled_fp8_quant")
def to_fp8_by_row(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, K] on a GPU -> codes [N, K] and scales f32 [N, 1], as vLLM's kernels read them."""
    from vllm._custom_ops import scaled_fp8_quant

    codes, scales = scaled_fp8_quant(rows, use_per_token_if_dynamic=True)
    return codes, scales


@touches(f"{_MOE}/config.py", "_get_config_dtype_str")
def tiles_of_stock(w13: tuple[int, ...], w2: tuple[int, ...], top_k: int, dtype: torch.dtype, num_rows: int) -> Any:
    """Tiles that vLLM's Triton kernel takes for experts of these shapes [E, ...]."""
    from vllm.model_executor.layers.fused_moe.config import _get_config_dtype_str
    from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

    return try_get_optimal_moe_config(w13, w2, top_k, _get_config_dtype_str(dtype=dtype), num_rows)


# -- sampling ------------------------------------------------------------------------------------------------------


@touches("v1/worker/gpu_model_runner.py", "GPUModelRunner._bookkeeping_sync")
@touches("v1/worker/gpu_input_batch.py", "InputBatch.num_reqs")
@contextmanager
def seeds_kept_for_tokens(runner: Any) -> Iterator[None]:
    """A request whose prompt is not whole yet samples without its seed: the token is thrown away.

    vLLM samples with the seed, then sets the generator back. A generator on CPU cannot be set back: there the engine
    died of the first chunk of a seeded request's prompt (vLLM 0.32). The seed's numbers go to tokens that count.
    """
    if not hasattr(runner, "discard_request_mask"):  # runner V2 has no such mask
        yield
        return
    batch = runner.input_batch
    partial_prompts = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
    kept = {index: batch.generators.pop(index) for index in partial_prompts if index in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(kept)


# -- compiled graphs -----------------------------------------------------------------------------------------------


@touches("compilation/decorators.py", "_try_load_aot_compiled_fn", on_cpu_only=True)
def load_saved_graphs(vllm_config: Any, model: torch.nn.Module, names: Collection[str]) -> None:
    """Load what an earlier start has compiled, if it calls the same layers of ours.

    vLLM 0.32 saves graphs on CPU too, but asks each one that it loads for a method that only graphs of its own back end
    have, so that every start compiles again (36 s for gpt-oss-20b). It finds them by the configuration; which layers
    are ours also depends on the checkpoint and on this package, and their numbers on the engines before this one.

    model: parts of it may have a configuration of their own. names: of this engine's operators, `number:module`.
    """
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
    for config in (vllm_config, *(part.vllm_config for part in model.modules() if hasattr(part, "vllm_config"))):
        if isinstance(config.additional_config, dict):
            config.additional_config = {**config.additional_config, "ndp_layers": digest}
    load = getattr(torch.compiler.load_compiled_function, "__wrapped__", torch.compiler.load_compiled_function)

    @wraps(load)
    def load_whole(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        graph = loaded._artifacts.compiled_fn
        if not hasattr(graph, "finalize_loading"):
            graph.finalize_loading = lambda config: None
        return loaded

    torch.compiler.load_compiled_function = load_whole


# -- processes -----------------------------------------------------------------------------------------------------

_LOOKS, _LONGEST_S = 32, 1e-3
"""A message is seen late by a 32nd of the time that it took, at most, and by 1 ms."""


@touches("distributed/device_communicators/shm_broadcast.py", "SpinCondition.wait")
def sleep_between_looks() -> None:
    """From now on readers of vLLM's message queues sleep between two looks, for a part of what they have waited.

    Stock readers look all the time for one second after a message. Nothing is lost: who looks need not be told.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if getattr(SpinCondition.wait, "sleeps", False):
        return
    idle = SpinCondition.wait

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        waited = time.monotonic() - self.last_read
        if waited > self.busy_loop_s:
            idle(self, timeout_ms)
        else:
            time.sleep(min(waited / _LOOKS, _LONGEST_S))

    wait.sleeps = True  # type: ignore[attr-defined]
    SpinCondition.wait = wait
