"""A host for a trace that no plugin recorded: model, hardware and rules are named, not read from the recording."""

from __future__ import annotations

import dataclasses

import numpy as np

from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.layer.setup import Setup
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.format import Provenance
from vllm_ndp.traces.trace import Trace


def modelled_host(
    costs: Costs,
    rules: PlannerRules,
    *,
    offload_bits: int = 0,
    device_hosts: int = 1,
    splits_prefill: bool = False,
) -> Setup:
    """The Setup that a live run with these rules writes into its trace."""
    usual = load_hardware(costs.hardware.preset).values()
    return Setup(
        preset=costs.hardware.preset,
        overrides={name: value for name, value in costs.hardware.values().items() if value != usual[name]},
        host_dims=costs.shape.recorded(),
        expert_bytes={bits: costs.replica_bytes(bits) for bits in (*rules.loss.widths, FULL_PRECISION_BITS)},
        group_size=costs.group_size,
        activation_bytes=costs.shape.dtype_bytes,
        spill_bits=offload_bits,
        device_hosts=device_hosts,
        splits_prefill=splits_prefill,
    )


def with_layers(trace: Trace, loss: LossTable, num_layers: int) -> tuple[Trace, LossTable]:
    """The trace of a model with so many layers: each layer of the recording stands for as many as it must."""
    recorded = trace.provenance.num_layers
    if recorded == num_layers:
        return trace, loss
    layers = np.arange(num_layers) * recorded // num_layers
    longer = dataclasses.replace(
        trace,
        provenance=_with_layers(trace.provenance, num_layers),
        ids=trace.ids[:, layers],
        weights=trace.weights[:, layers],
        events={},
        plans={},
    )
    return longer, loss.of_layers(layers)


def _with_layers(provenance: Provenance, num_layers: int) -> Provenance:
    fields = {name: getattr(provenance, name) for name in provenance.__struct_fields__}
    return Provenance(**fields | {"num_layers": num_layers, "live": None})
