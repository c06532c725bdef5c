"""Whether a model, its experts and the KV cache of a batch fit into modelled memories. Bytes only, no time.

A system states where the experts of the whole model lie (`Memory`). Everything else that a GPU must hold is the same
for all systems and is added here. Room for activations is not counted: it depends on the serving program.
"""

from __future__ import annotations

from dataclasses import dataclass

from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape, WholeModel
from ndp_device.common.widths import WIDTHS
from ndp_device.timing.spec import Hardware
from vllm_ndp.cost_model.costs import Costs

CAPACITY_OF = {
    "gpu": "gpu.hbm_capacity_bytes",
    "device": "dram.capacity_bytes",
    "host": "host.memory_capacity_bytes",
    "expander": "host.cxl_capacity_bytes",
}
"""Place -> the hardware value that says how much it holds."""

STAGED_EXPERTS = 2
"""Places through which other experts stream: one computes while the next one arrives."""


class DoesNotFit(ConfigError):
    """A system needs more memory than the hardware has. Other systems of a comparison may fit."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a system's experts occupy, by place, of the whole model."""

    gpu: int = 0
    device: int = 0
    host: int = 0
    expander: int = 0


@dataclass(frozen=True)
class Footprint:
    """All that one system holds in memory while it decodes one batch."""

    experts: Memory
    other_weights: int
    kv_cache: int

    @classmethod
    def of(cls, experts: Memory, shape: WholeModel, kv_tokens: int, requests: int) -> Footprint:
        """kv_tokens: of all requests of the batch together, when most are cached; windows of attention not counted."""
        return cls(
            experts,
            other_weights=shape.dtype_bytes * shape.other_weights,
            kv_cache=kv_tokens * shape.kv_bytes + requests * shape.state_bytes,
        )

    @property
    def gpu(self) -> int:
        return self.experts.gpu + self.other_weights + self.kv_cache

    def by_place(self) -> dict[str, int]:
        return {**vars(self.experts), "gpu": self.gpu}

    def require(self, hardware: Hardware, who: str, advice: str) -> None:
        """Raises DoesNotFit with the bytes that are missing, and what they would be for."""
        parts, known = [], hardware.values()
        for place, needed in self.by_place().items():
            key = CAPACITY_OF[place]
            if (lacking := needed - int(known[key])) <= 0:
                continue
            needs = f"experts {self.experts.gpu}, other weights {self.other_weights}, KV cache {self.kv_cache}"
            uses = f" ({needs})" if place == "gpu" else " for experts"
            parts.append(f"{place} memory lacks {lacking} bytes: it needs {needed}{uses} and {key} is {known[key]}")
        if parts:
            raise DoesNotFit(f"{who} does not fit, {'; '.join(parts)}: {advice}")


def all_experts_bytes(shape: ModelShape) -> int:
    """Every expert of the model in full precision."""
    return shape.num_layers * shape.num_experts * shape.expert_bytes


def slots_bytes(shape: ModelShape, num_hot: int, slot_bytes: int = 0) -> int:
    """GPU memory of num_hot experts per layer, and of the places through which others stream. Such places are not
    needed where every expert has a slot of its own. `slot_bytes`: of a hot one, 0 = in full precision."""
    held = min(num_hot, shape.num_experts)
    staged = 0 if held == shape.num_experts else STAGED_EXPERTS
    return shape.num_layers * held * (slot_bytes or shape.expert_bytes) + staged * shape.expert_bytes


def beside_device_memory(
    costs: Costs, num_hot: int, widest: int = WIDTHS[-1], *, computes_on_host: bool = False
) -> Memory:
    """Memory of plans with num_hot experts per layer on the GPU. The device holds every expert in full precision, for
    prompts and migrations, and as a nested replica of up to `widest` bits. Where the host's CPU computes some, its
    memory holds every one that it may be asked for."""
    shape = costs.shape
    replicas = shape.num_layers * shape.num_experts * costs.stored_replica_bytes(widest)
    experts = all_experts_bytes(shape)
    gpu = slots_bytes(shape, num_hot, costs.slot_bytes)
    return Memory(gpu, experts + replicas, host=experts if computes_on_host else 0)
