"""The worker: vLLM's own, plus a controller that is told about every step before and after it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, NoReturn

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from ndp_device.common.errors import ConfigError, NdpError
from ndp_device.common.machine_memory import give_memory_back
from vllm_ndp.integration import vllm_private
from vllm_ndp.integration.assembly import Assembly, LoadedWorker
from vllm_ndp.integration.compat import say
from vllm_ndp.integration.controller import NdpController
from vllm_ndp.integration.cuda import limits
from vllm_ndp.integration.linear_layers import checked_as_unquantized
from vllm_ndp.integration.routing_sidecar import bytes_per_entry
from vllm_ndp.integration.serving import status
from vllm_ndp.integration.waiting import follow_owner

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Base
else:
    from vllm.v1.worker.gpu_worker import Worker as _Base


class NdpWorker(_Base):
    _warms_up = False

    _loaded: LoadedWorker
    ndp: NdpController

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        follow_owner()
        self._opened = ExitStack()
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if current_platform.is_cpu() and self.parallel_config.world_size > 1:
            vllm_private.sleep_between_looks()
        try:
            making = Assembly.begin(self.vllm_config, self._opened)  # layers attach themselves while the model loads
            linears, stored = making.linears, making.stored_linears
            with (
                checked_as_unquantized(of_draft=lambda: making.has_every_layer),
                vllm_private.weights_passed_through(
                    lambda stream: stream if making.has_every_layer else stored.values_in(stream)
                ),
                nullcontext() if linears is None else vllm_private.plain_heads_offered_to(linears.take_plain_head),
            ):
                super().load_model(*args, **kwargs)
            before = _allocated_bytes()
            self._loaded = making.finish(self.model_runner)
            if current_platform.is_cpu():
                linear_names = () if linears is None else linears.names
                vllm_private.load_saved_graphs(
                    self.vllm_config, self.model_runner.get_model(), [*making.operators.values(), *linear_names]
                )
            if beside := _allocated_bytes() - before:  # subtracted as weights, or as all that is no longer free (0.32)
                self.model_runner.model_memory_usage += beside
            _make_room_for_the_stage_before(self.model_runner)
            give_memory_back()  # before vLLM looks whether its KV cache fits
        except NdpError as error:
            if self.parallel_config.world_size > 1:  # what vLLM then says in the process above does not name the cause
                say(f"rank {self.rank} cannot start: {error}")
            raise

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self.ndp = NdpController(self._loaded, kv_cache_config)

    def determine_available_memory(self) -> int:
        """Leave room for the routing sidecar, which lies beside the KV cache. A size that was asked for is kept."""
        was_asked_for = bool(self.cache_config.kv_cache_memory_bytes)  # vLLM may set it, from a start before this one
        available: int = super().determine_available_memory()
        if current_platform.is_cpu() or was_asked_for:
            return available
        kv_bytes = limits.kv_bytes_per_token(self.get_kv_cache_spec())
        shape = self._loaded.facts.pool.shape
        sidecar_bytes = bytes_per_entry(shape.num_layers, shape.top_k)
        return limits.leave_room(available, sidecar_bytes, kv_bytes)

    def compile_or_warm_up_model(self) -> Any:
        self._warms_up = True
        try:
            return super().compile_or_warm_up_model()
        finally:
            self._warms_up = False
            give_memory_back()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._warms_up:  # model runner V2 warms up with requests of its own making: no step of anybody
            return super().execute_model(scheduler_output, *args, **kwargs)
        with self.ndp.step(scheduler_output):
            return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        on_cpu = current_platform.is_cpu()
        with vllm_private.seeds_kept_for_tokens(self.model_runner) if on_cpu else nullcontext():
            output = super().sample_tokens(*args, **kwargs)
        if not self._warms_up:
            self.ndp.log.note_sampled(output)
        return output

    def shutdown(self) -> None:
        self._opened.close()
        super().shutdown()

    # -- reached by `LLM.collective_rpc(name)` ----------------------------------------------------------------------

    def ndp_status(self) -> dict[str, Any]:
        """Return what is effective: the residency table as data."""
        return self.ndp.status()

    def ndp_totals(self) -> dict[str, Any]:
        """Counts since start-up."""
        return self.ndp.totals_dict()

    def ndp_live(self, latest: int = 50) -> dict[str, Any] | None:
        return self.ndp.live(latest)

    def ndp_experts(self) -> dict[str, Any] | None:
        """Return which experts are hot where, for each layer of this worker; None where another rank tells."""
        facts, run = self._loaded.facts, self._loaded.run
        return status.experts(run.planner, self.ndp.last_planned, facts.layers) if facts.ranks.leads else None

    def ndp_requests(self, client_id: str) -> dict[str, Any]:
        """Return the reports of one request of a client, by vLLM's ids, and which of its parts still run here."""
        running = status.made_of(client_id, self._loaded.requests.requests)
        return {"finished": self.ndp.log.finished.find(client_id), "running": running}


_CHANGED = (
    "pool, replicas and device would keep the old checkpoint beside new weights: start a new server on the new one"
)
_SAVED = "vLLM holds only the hot experts, and would save them as if they were all: copy the checkpoint"
_REFUSED = {
    **dict.fromkeys(("reload_weights", "start_weight_update", "update_weights", "reset_weights"), _CHANGED),
    **dict.fromkeys(("save_sharded_state", "save_tensorized_model"), _SAVED),
    "compute_weight_checksums": "the experts that vLLM holds change with every prompt: compare the files of checkpoint "
    "and replicas (ndp-device verify)",
    "update_config": "the plugin has planned and built its layers by the configuration: start a new server",
}
"""Calls of vLLM's workers that would change weights, and why they cannot be. Callers get the sentence, and the engine
goes on."""


def _refusing(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"quantization 'ndp' does not work together with {name}: {why}")

    return refuse


for _name, _why in _REFUSED.items():
    setattr(NdpWorker, _name, _refusing(_name, _why))


class SleepingMultiprocExecutor(MultiprocExecutor):
    """vLLM's executor of several processes, whose own process sleeps while its workers compute (waiting.py)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_private.sleep_between_looks()
        super().__init__(*args, **kwargs)


def _allocated_bytes() -> int:
    return 0 if current_platform.is_cpu() else int(torch.cuda.memory_allocated())


def _make_room_for_the_stage_before(runner: Any) -> None:
    """vLLM's CPU build makes it while it warms up, which it leaves out without compilation: it then ends in an assert.

    tests/integration/test_integration_layouts.py tells when that is no longer so.
    """
    if not current_platform.is_cpu() or get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )
