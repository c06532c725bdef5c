"""Which system decodes fastest on a GPU of so many GB: where near-data computing pays, and where it does not.

Every system gets the whole GPU memory beside attention and KV cache; the memories of device and host hold every model,
so that only the GPU's size decides. Two questions at each size: the fastest at all, and the fastest of those that lose
no more than the device's row. For a trace and its model, or for public shapes on synthetic routing. Knows rows of
`compare`. Draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ndp_device.errors import NdpError
from ndp_device.timing.shapes import public_shape
from vllm_ndp.lab.compare import CompareSettings, Replays, Workload
from vllm_ndp.lab.vectorised.outcome import Summary
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace

GB = 10**9
MEMORY_GB = (8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160)
SYSTEMS = ("balanced", "quantized", "vllm_offload", "llama_cpp", "ktransformers", "fiddler")
DEVICE = "balanced"
AVG_BITS = 3.0
_LAYERS = 4
ROOMY: dict[str, str | int] = {
    "dram.capacity_bytes": 2 * 10**12,
    "host.memory_capacity_bytes": 2 * 10**12,
    "host.cxl_capacity_bytes": 2 * 10**12,
}
SHAPES = ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b", "qwen3-235b-a22b", "deepseek-v3")
"""From small to large, with few large experts and with many small ones."""

OWN_BITS = {"gpt-oss-20b": 4, "gpt-oss-120b": 4, "deepseek-v3": 8}
"""Models that were released with narrow experts: at that width and above they lose nothing."""


@dataclass(frozen=True)
class Cell:
    """One model on one size of GPU memory; no rows where not even attention fits."""

    model: str
    memory_gb: int
    rows: tuple[Summary, ...]  # fastest first

    @property
    def device(self) -> Summary | None:
        """The device's row that loses least."""
        return min((row for row in self.rows if row.system == DEVICE), key=lambda row: row.loss, default=None)

    @property
    def fastest(self) -> Summary | None:
        return self.rows[0] if self.rows else None

    @property
    def fastest_alike(self) -> Summary | None:
        """Of the rows that lose no more than the device's; the fastest at all where the device has none."""
        device = self.device
        return next((row for row in self.rows if device is None or row.loss <= device.loss), None)


def frontier(
    workload: Workload,
    settings: CompareSettings,
    memory_gb: Iterable[int] = MEMORY_GB,
    loss: LossTable | None = None,
) -> list[Cell]:
    """A cell per size, with the settings' model, hardware and first batch size."""
    num_experts = workload.trace.provenance.num_experts
    cells = []
    for size in memory_gb:
        at = replace(
            settings,
            overrides={**settings.overrides, **ROOMY, "gpu.hbm_capacity_bytes": size * GB},
            systems=SYSTEMS,
            policies=("prefill",),
            batches=settings.batches[:1],
            num_hot=num_experts,
            avg_bits=AVG_BITS,
            fit=True,
            options={},
        )
        try:
            replays = Replays(workload, at, loss)
        except NdpError:
            cells.append(Cell(settings.model, size, ()))
            continue
        rows = [_as_released(replays.replay(c)[0].row, settings.model) for c in replays.combinations]
        cells.append(Cell(settings.model, size, tuple(sorted(rows, key=lambda row: -row.decode_tokens_per_s))))
    return cells


def frontier_of_shapes(
    models: Iterable[str], settings: CompareSettings, memory_gb: Iterable[int] = MEMORY_GB
) -> list[Cell]:
    """The cells of public shapes: synthetic routing of each one's experts, four layers that stand for all."""
    cells, sizes, named = [], tuple(memory_gb), tuple(models)
    for model in named:
        public_shape(model)  # refused before the first of them takes its time
    for model in named:
        routing = SyntheticSettings.of_shape(model, num_requests=6, prompt_len=256, decode_len=64)
        trace = synthetic_trace(replace(routing, num_layers=_LAYERS), model)
        at = replace(settings, model=model, overrides={**settings.overrides, "dram.kind": "ideal"}, batches=(1,))
        cells += frontier(Workload(trace), at, sizes)
    return cells


def _as_released(row: Summary, model: str) -> Summary:
    own = OWN_BITS.get(model)
    if own is None or row.system not in ("quantized", "llama_cpp") or int(row.policy.split()[0]) < own:
        return row
    return replace(row, loss=0.0)
