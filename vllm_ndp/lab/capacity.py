"""Which rows of a comparison fit into the modelled memories, and with `fit` how large they can be made.

Knows what systems say of their memory. Does not know how they work or how long anything takes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ndp_device.common.widths import WIDTHS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import DoesNotFit, Footprint
from vllm_ndp.lab.systems.system import ReplayOptions, System, TooFewPlaces
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.outcome import Summary
from vllm_ndp.planning.plan import Budget


class Planned(NamedTuple):
    """One row to be: a system, the requests it serves, and what it is told."""

    system: System
    batches: Batches
    options: ReplayOptions


def fitted(planned: list[Planned], costs: Costs, *, fit: bool) -> tuple[list[Planned], list[str]]:
    """(those that fit into the memories, why others do not), before anything is replayed.

    Raises DoesNotFit for a system of which no variant fits at some batch size; with `fit` only if nothing at all does.
    A system that K places cannot hold, TooFewPlaces, does not stop the others: more memory would not help it.
    """
    running: list[Planned] = []
    refused: list[tuple[Planned, DoesNotFit]] = []
    for one in planned:
        try:
            running.append(_largest(one, costs) if fit else _require(one, costs, "give fewer --hot-experts, or --fit"))
        except DoesNotFit as refusal:
            refused.append((one, refusal))
    for one, reason in sorted(refused, key=lambda refusal: isinstance(refusal[1], TooFewPlaces)):
        others = any(other.system is one.system and other.batches is one.batches for other in running)
        if not (others or ((fit or isinstance(reason, TooFewPlaces)) and running)):
            raise reason
    return running, list(dict.fromkeys(str(reason) for _, reason in refused))


def _require(one: Planned, costs: Costs, advice: str) -> Planned:
    own = "".join(f", {name} {value}" for name, value in one.options.own.items())
    who = f"{one.system.name} with K {one.options.budget.num_hot} at batch {one.batches.shape[1]}{own}"
    _footprint(one, costs).require(costs.hardware, who, advice)
    return one


def _footprint(one: Planned, costs: Costs) -> Footprint:
    experts, batches = one.system.memory(costs, one.options), one.batches
    return Footprint.of(experts, costs.shape, int(batches.kv_tokens.max()), batches.shape[1])


def with_memory(row: Summary, one: Planned, costs: Costs) -> Summary:
    """The row with what it holds in each memory; K is 0 where no place on the GPU is kept for an expert."""
    held = _footprint(one, costs)
    without = replace(one.options, budget=replace(one.options.budget, num_hot=0))
    try:
        uses_places = one.system.memory(costs, without).gpu != held.experts.gpu
    except TooFewPlaces:
        uses_places = False  # its own experts in the memory that the places of others take
    return replace(
        row,
        num_hot=one.options.budget.num_hot if uses_places else 0,
        gpu_gb=held.gpu / 1e9,
        device_gb=held.experts.device / 1e9,
        host_gb=held.experts.host / 1e9,
        expander_gb=held.experts.expander / 1e9,
    )


def _with_the_rest(one: Planned, costs: Costs) -> Planned:
    footprint = _footprint(one, costs)
    free = costs.hardware.gpu.hbm_capacity_bytes - (footprint.gpu - footprint.experts.gpu)
    return one._replace(options=replace(one.options, gpu_bytes=free))


def _largest(one: Planned, costs: Costs) -> Planned:
    """The same with the widest replicas and the most hot experts that fit, tried from the largest down.

    A system that can use any number of bytes gets the remaining bytes too.
    """
    wanted = one.options
    smallest: DoesNotFit | None = None
    for widest in reversed(WIDTHS):
        for num_hot in range(min(wanted.budget.num_hot, costs.shape.num_experts), -1, -1):
            budget = Budget(num_hot, min(wanted.budget.avg_bits, widest))
            options = replace(wanted, budget=budget, widest=widest)
            try:
                found = _require(one._replace(options=options), costs, "nothing of it fits, take another hardware")
                return _with_the_rest(found, costs) if one.system.fills_memory else found
            except DoesNotFit as reason:
                smallest = reason
    assert smallest is not None
    raise smallest
