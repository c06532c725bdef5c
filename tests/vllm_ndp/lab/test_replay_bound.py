"""The bound against exhaustive search, each way of finding it, and every system of its class against the bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from by_hand import requests_of
from paths import DATA

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.bound import DEVICE_BITS, Bound, Cells
from vllm_ndp.lab.compare import compare
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.systems import SYSTEMS
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.traces.trace import Trace

TRACE = Trace.load(DATA / "tiny-mixtral-trace")
IDEAL = {"dram.kind": "ideal"}
COSTS = Costs(load_hardware("h100-ndp512", **IDEAL), model_named("mixtral-8x7b"))
WAYS = ("tried", "programmed", "relaxed")


def random_cells(seed: int, count: int, slots: int, places: int) -> Cells:
    """Mixtral's own times; losses that fall with the width, as replicas' do."""
    rng = np.random.default_rng(seed)
    device = COSTS.device_experts_ps(1)[list(DEVICE_BITS), 1]
    losses = rng.dirichlet(np.ones(slots), count)[:, :, None] * np.array([0, 0.012, 0.05, 0.23, 1.0])
    used = rng.random((count, slots)) < 0.8
    return Cells(
        gpu_ps=np.where(used, COSTS.gpu_experts_ps(1)[1], 0.0),
        device_ps=np.where(used[..., None], device, 0.0),
        losses=np.where(used[..., None], losses * rng.uniform(0.5, 1.5, (count, slots, 1)), 0.0),
        used=used,
        places=np.full(count, places),
        beside_ps=rng.random(count) * 1e7,
        message_ps=1e6,
        message_more_ps=0.0,
    )


def bound_by(way: str, cells: Cells) -> Bound:
    bound = Bound(cells)
    if way == "tried":
        fronts = cells._tried(cells.used.shape[1])
    elif way == "programmed":
        equal = cells._equal_costs()
        assert equal is not None
        fronts = cells._programmed(*equal)
        assert fronts is not None
    else:
        fronts = None
    bound.__dict__["_fronts"] = fronts
    return bound


def every_schedule(cells: Cells) -> list[tuple[float, float]]:
    """(time, loss) of all choices of all cells together."""
    per_cell = []
    for cell in range(len(cells.places)):
        part, found = cells.part(slice(cell, cell + 1)), []
        for choice in itertools.product(range(6), repeat=cells.used.shape[1]):
            chosen = np.array([choice])
            if ((chosen == 0) & part.used).sum() <= part.places[0]:
                time, loss = part.times(chosen)
                found.append((float(time[0]), float(loss[0])))
        per_cell.append(found)
    sums = [(0.0, 0.0)]
    for found in per_cell:
        grown = sorted({(time + a, loss + b) for time, loss in sums for a, b in found})
        sums, least = [], np.inf
        for time, loss in grown:  # a schedule that is slower and loses no less is never the least
            if loss < least:
                sums.append((time, loss))
                least = loss
    return sums


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("places", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_exhaustive_search_finds_nothing_below_the_bound_and_something_no_worse_than_what_was_reached(
    way, places, seed
):
    cells = random_cells(seed, count=5, slots=2, places=places)
    bound, schedules = bound_by(way, cells), every_schedule(cells)
    for allowed in np.linspace(0, max(loss for _, loss in schedules), 9):
        best = min(time for time, loss in schedules if loss <= allowed + 1e-12)
        answer = bound.least_time(float(allowed) + 1e-12)
        assert answer.bound <= best * (1 + 1e-9)
        assert answer.reached >= best * (1 - 1e-9)
    for time_ps in np.linspace(min(t for t, _ in schedules), max(t for t, _ in schedules), 9):
        least = min(loss for time, loss in schedules if time <= time_ps * (1 + 1e-9))
        answer = bound.least_loss(float(time_ps) * (1 + 1e-9))
        assert answer.bound <= least + 1e-9
        assert answer.reached >= least - 1e-9


@pytest.mark.parametrize(("way", "most"), [("tried", 1e-3), ("programmed", 5e-3)])
def test_of_many_cells_bound_and_schedule_are_a_thousandth_apart(way, most):
    """The price of loss leaves one cell undecided, whatever their number."""
    bound = bound_by(way, random_cells(7, count=400, slots=3, places=2))
    for lost in (0.0, 0.5, 5.0, 50.0):
        answer = bound.least_time(lost)
        assert 0 <= 1 - answer.bound / answer.reached < most


def test_programming_finds_what_trying_finds():
    cells = random_cells(11, count=50, slots=3, places=1)
    tried, programmed = bound_by("tried", cells), bound_by("programmed", cells)
    for lost in (0.0, 0.1, 1.0, 10.0):
        assert programmed.least_time(lost).bound == pytest.approx(tried.least_time(lost).bound, rel=5e-3)
        assert programmed.least_time(lost).bound <= tried.least_time(lost).reached


def test_rows_of_an_expert_at_widths_of_their_own_do_not_beat_the_bound():
    """Six rows choose one expert, nothing may run on the GPU: every row at every width, 15625 ways."""
    rng = np.random.default_rng(5)
    one = np.zeros((1, 1, 1), int)
    trace = requests_of([(one, one)] * 6, 8, [rng.random((1, 1, 1)) for _ in range(6)])
    batches, loss = Batches.of(trace, 6), LossTable.nominal(1, 8)
    bound = Bound(Cells.of(batches, COSTS, loss, num_hot=0))
    assert bound.cells.rows is not None
    gates, table, links = batches.weights[0, :, 0, 0, 0], COSTS.device_experts_ps(6), COSTS.links_ps(6)
    relative = np.concatenate([[0.0], (loss.mse[0, 0] / loss.mse[0, 0, 0])[::-1]])
    found = []
    for widths in itertools.product(range(5), repeat=6):
        counts = np.bincount(widths, minlength=5)
        device = sum(table[DEVICE_BITS[w], n] for w, n in enumerate(counts) if n)
        found.append(
            (float(device + COSTS.device_fill_ps + links[6, 6]), float((relative[list(widths)] * gates).sum()))
        )
    for allowed in np.linspace(0, max(loss for _, loss in found), 7):
        best = min(time for time, loss in found if loss <= allowed + 1e-9)
        answer = bound.least_time(float(allowed) + 1e-9)
        assert answer.bound <= best
        assert answer.reached >= best * (1 - 1e-9)


@pytest.mark.parametrize(("batch", "num_hot"), [(1, 4), (2, 0), (4, 2), (12, 4)])
def test_no_system_of_the_class_beats_the_bound(batch, num_hot):
    systems = tuple(name for name, system in SYSTEMS.items() if system.is_bounded)
    assert {"context_aware", "balanced", "replanned", "adaptive", "monde", "gpu_on_demand"} == set(systems)
    settings = CompareSettings(
        systems=systems, policies=("prefill", "oracle"), batches=(batch,), num_hot=num_hot, regret=True, overrides=IDEAL
    )
    for row in compare(TRACE, settings).rows:
        assert row.regret >= row.regret_at_least >= 0
        assert row.least_loss <= row.loss + 1e-9
        if batch <= 4:
            assert row.regret - row.regret_at_least < 0.02 * (1 + row.regret)


def test_rows_outside_the_class_and_comparisons_that_do_not_ask_have_no_regret():
    settings = CompareSettings(systems=("hobbit", "quantized"), regret=True, overrides=IDEAL)
    assert all(np.isnan(row.regret) for row in compare(TRACE, settings).rows)
    plain = CompareSettings(systems=("monde",), overrides=IDEAL)
    assert all(np.isnan(row.regret) for row in compare(TRACE, plain).rows)
