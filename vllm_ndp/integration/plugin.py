"""What vLLM's plugin loader calls in every process. Registers names; changes nothing until `quantization="ndp"`.

Must stay idempotent and cheap: the loader runs it in the front end, the engine core, each worker and the
model-inspection subprocess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METHOD = "ndp"
WORKER_CLASS = "vllm_ndp.integration.worker.NdpWorker"
CONNECTOR = "NdpConnector"
CONNECTOR_MODULE = "vllm_ndp.integration.connector"


def register() -> None:
    """Entry point `vllm.general_plugins`."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if METHOD in QUANTIZATION_METHODS:
        return
    from vllm_ndp.integration.quantization import NdpConfig

    register_quantization_config(METHOD)(NdpConfig)
    _hook_architectures()


def _hook_architectures() -> None:
    """Have vLLM call `configure` for every text architecture, after whatever hook the architecture already has."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    for architecture in ModelRegistry.get_supported_archs():
        previous = MODELS_CONFIG_MAP.get(architecture)

        class Hook(previous or VerifyAndUpdateConfig):  # type: ignore[misc]
            _previous = previous

            @classmethod
            def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
                if cls._previous is not None:
                    cls._previous.verify_and_update_config(vllm_config)
                configure(vllm_config)

        MODELS_CONFIG_MAP[architecture] = Hook


def configure(vllm_config: VllmConfig) -> None:
    """Point an engine that asked for `ndp` at our worker; refuse what cannot work. Leaves every other engine alone."""
    if vllm_config.model_config.quantization != METHOD:
        return
    from vllm_ndp.integration import compat

    settings = compat.check(vllm_config)
    vllm_config.parallel_config.worker_cls = WORKER_CLASS
    compat.keep_moe_out_of_graphs(vllm_config)
    compat.share_cores_with_the_device(settings)
    compat.bind_ranks(vllm_config)
    compat.let_ray_run_on_cpu(vllm_config)
    if settings.report and vllm_config.kv_transfer_config is None:
        vllm_config.kv_transfer_config = _report_connector()


def _report_connector() -> Any:
    """A connector that moves no KV: it only lets finished requests carry their two clocks."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_consumer",  # a producer would change how preemption treats finished blocks
    )
