"""Entry point of vLLM's plugin loader in every process. Registers names; changes nothing until `quantization="ndp"`.

Must stay idempotent and cheap: the loader runs it in the front end, the engine core, each worker and the
model-inspection subprocess.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ndp.integration import refusals, vllm_private

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

METHOD = "ndp"


def register() -> None:
    """Entry point `vllm.general_plugins`."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if METHOD in QUANTIZATION_METHODS:
        return
    refusals.end_in_one_sentence()
    from vllm_ndp.integration.quantization import NdpConfig

    register_quantization_config(METHOD)(NdpConfig)
    vllm_private.call_for_every_architecture(configure)


def configure(vllm_config: VllmConfig) -> None:
    """Point an engine that asked for `ndp` at our worker; refuse what cannot work. Leaves every other engine alone."""
    from vllm_ndp.integration import waiting

    waiting.restore()
    if vllm_config.model_config.quantization != METHOD:
        return
    from vllm_ndp.integration import compat, paced_scheduler, self_sizing
    from vllm_ndp.integration.waiting import own_engines
    from vllm_ndp.traces.recorder import require_writable

    compat.refuse_mixed_settings(sys.argv)
    if refusals.serves_ndp(sys.argv):
        _load_our_routes()
        if refusals.is_brief():
            refusals.filter_log()
    settings = compat.check(vllm_config)
    settings = self_sizing.choose(vllm_config, settings)
    if settings.record is not None:
        require_writable(Path(settings.record))
    own_engines()
    if vllm_config.parallel_config.worker_cls == "auto":
        vllm_config.parallel_config.worker_cls = compat.WORKER_CLASS
    compat.settle_graphs(vllm_config)
    compat.share_cores_with_the_device(settings)
    compat.bind_ranks(vllm_config)
    paced_scheduler.schedule_by_time(vllm_config, settings)
    waiting.configure(vllm_config)
    if isinstance(given := vllm_config.load_config.model_loader_extra_config, dict):  # else vLLM refuses it
        vllm_config.load_config.model_loader_extra_config = {"enable_weights_track": True} | given
    vllm_config.kv_transfer_config = _with_connectors(vllm_config.kv_transfer_config)


def _load_our_routes() -> None:
    """In a server: name our routes to vLLM, which loads none that VLLM_PLUGINS does not name, and all other plugins.

    Nothing changes where VLLM_PLUGINS is set, nor where that would bring another package's routes.
    """
    if "VLLM_PLUGINS" in os.environ:
        return
    groups = ("general", "io_processor", "platform", "stat_logger")
    others = {one.name for group in groups for one in entry_points(group=f"vllm.{group}_plugins")}
    if not any(one.name in others - {METHOD} for one in entry_points(group="vllm.endpoint_plugins")):
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(others | {METHOD}))


def _with_connectors(theirs: KVTransferConfig | None) -> KVTransferConfig:
    """A connector that moves no KV, so that finished requests carry their two clocks; and the user's, if there is one,
    of which we then see what it loads."""
    from vllm_ndp.integration import compat
    from vllm_ndp.integration.connector import MovesNoKv

    ours = {
        "kv_connector": compat.CONNECTOR,
        "kv_connector_module_path": compat.CONNECTOR_MODULE,
        "kv_role": "kv_consumer",  # a producer would change how preemption treats finished blocks
    }
    if theirs is None:
        return MovesNoKv(**ours)
    if theirs.kv_connector_module_path == compat.CONNECTOR_MODULE:
        return theirs  # configured before
    vllm_private.register_connector(compat.CONNECTOR, compat.CONNECTOR_MODULE)
    extra = theirs.kv_connector_extra_config
    extra = extra if theirs.kv_connector == "MultiConnector" else {"connectors": [_as_part(theirs)]}
    return dataclasses.replace(  # with all else that the user has set: what a failed load leads to is of the whole
        theirs,
        kv_connector="MultiConnector",
        kv_connector_module_path=compat.CONNECTOR_MODULE,
        kv_connector_extra_config=extra | {"connectors": [*extra["connectors"], ours]},
    )


def _as_part(connector: KVTransferConfig) -> dict[str, Any]:
    """Values that a MultiConnector wants of each of its parts; the engine's id is of the whole."""
    values = dataclasses.asdict(connector)
    del values["engine_id"]
    return values
