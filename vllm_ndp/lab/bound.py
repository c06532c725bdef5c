"""The bound that no schedule beats: least decode time at a given loss, least loss at a given time. With proof.

The bounded class of schedules: in every step and layer the GPU's own places run at most K used experts in full
precision. Moves between steps are free, and the schedule knows the routing ahead. The link may also copy an expert
while the layer waits. All others run on the device, at 1 to 4 or 16 bits, as the schedule likes. A layer takes
max(shared experts + GPU, device), as everywhere. The class has the paper's system, `balanced`, `adaptive`, MoNDE and
GPU on demand. It has no system with quantized or split experts on the GPU, or with experts on the CPU.

    cell      one layer of one step; cells are independent, so   least sum of times with sum of losses <= L
    bound     for any price of loss:  time(L) >= sum over cells of min(time + price x loss) - price x L
    schedule  the cells' choices at two prices side by side, some cells from either, so that the loss is just met
    gap       how far the schedule is above the bound

Cells with few experts are tried choice by choice. Up to one pass of the arrays (4 rows) experts differ in their loss
only. There dynamic programming over (experts on the GPU, time on the device) finds every choice worth making. In other
cells a weighted mean of both sides bounds the slower one. The mean makes experts, and the rows of an expert,
independent. Knows costs and losses. Does not know policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS, WIDTHS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import shared_ps
from vllm_ndp.lab.vectorised.outcome import Outcome, Summary, layer_factor, step_times
from vllm_ndp.layer.joint_menu import OF_ONE_BIT, losses_by_width
from vllm_ndp.planning.bitwidths import LossTable

DEVICE_BITS = (FULL_PRECISION_BITS, *reversed(WIDTHS))
_MOST_TRIED = 300
"""Choices of a cell that are tried one by one; (1 + 5 widths) ** 3 are 216."""
_MEANS = np.linspace(0.0, 1.0, 17)
"""Weights of the GPU in the mean of both sides."""
_PRICES = np.logspace(5, 14, 46)
"""Picoseconds that a unit of loss is worth, to begin with: from none of a layer's time to all of it."""
_REFINED = 8
"""More prices between two of them, for one question."""
_CHUNK = 1 << 21
_MOST_UNITS = 96
"""Units of time of a full-precision expert on the device, at most."""
_MOST_STATES, _MOST_CHOICES, _MOST_RELAXED = 1 << 27, 1 << 24, 1 << 21
"""Most states of the programme, choices that are kept, and values by slot and width, over all cells."""


P = TypeVar("P", "BoundRows", "Cells")


@dataclass(frozen=True)
class Fronts:
    """Choices worth making in each of C cells: infinite times where a cell has fewer choices than others."""

    least_ps: NDArray[np.float64]  # [C, F], it takes so long at least
    most_ps: NDArray[np.float64]  # [C, F], and at most
    losses: NDArray[np.float64]  # [C, F]


@dataclass(frozen=True)
class BoundRows:
    """The P pairs of C cells one by one: what each costs the device at least, and loses, at every width."""

    slots: NDArray[np.int64]  # [C, P]; the number of slots where there is no pair
    device_ps: NDArray[np.float64]  # [C, P, W]
    losses: NDArray[np.float64]  # [C, P, W]

    @classmethod
    def of(cls, batches: Batches, each_ps: NDArray[np.float64], relative: NDArray[np.float64]) -> BoundRows:
        """each_ps [G, D, L, S, W]: of one row of a slot's expert; relative [L, E, W]: losses."""
        g, b, d, layers, k = batches.shape
        num_slots = each_ps.shape[3]

        def by_cell(values: NDArray[Any]) -> NDArray[Any]:
            """[G, B, D, L, k, ...] -> [C, P, ...]."""
            moved = np.moveaxis(values, 1, 3)
            return moved.reshape(g * d * layers, b * k, *values.shape[5:])

        places = batches.loads.places
        exists = np.broadcast_to(batches.pairs, places.shape)
        losses = relative[np.arange(layers)[:, None], batches.ids] * batches.weights[..., None]
        return cls(
            by_cell(np.where(exists, places % num_slots, num_slots)),
            by_cell(each_ps.reshape(-1, each_ps.shape[4])[places]),
            by_cell(losses),
        )

    def cheapest(self, weight: float, price: float, num_slots: int) -> NDArray[np.float64]:
        """[C, S]: the least sum over an expert's rows of weight x time + price x loss."""
        lost = np.where(self.losses > 0, np.inf, 0.0) if np.isinf(price) else price * self.losses
        least = (weight * self.device_ps + lost).min(axis=2)
        count = len(self.slots)
        where = np.arange(count)[:, None] * (num_slots + 1) + self.slots
        sums = np.bincount(where.ravel(), weights=least.ravel(), minlength=count * (num_slots + 1))
        by_slot: NDArray[np.float64] = sums.astype(np.float64).reshape(count, num_slots + 1)[:, :num_slots]
        return by_slot


@dataclass(frozen=True)
class Cells:
    """C layers of steps with up to S used experts each. Times in picoseconds, losses as `Cold.loss` sums them."""

    gpu_ps: NDArray[np.float64]  # [C, S]
    device_ps: NDArray[np.float64]  # [C, S, W] with all rows at one width: DEVICE_BITS, after the first 8 if there are
    losses: NDArray[np.float64]  # [C, S, W]
    used: NDArray[np.bool_]  # [C, S]
    places: NDArray[np.int64]  # [C], experts that may run on the GPU
    beside_ps: NDArray[np.float64]  # [C], the GPU's other work in the layer
    message_ps: float  # what a cell pays once it uses the device, at least
    message_more_ps: float  # and at most on top of it
    rows: BoundRows | None = None
    """Where an expert has more rows than one pass takes, some of them may run at one width and some at another."""
    is_reachable: bool = True
    """False where copies are so cheap that all experts were given a place: no schedule can be told."""

    @classmethod
    def of(cls, batches: Batches, costs: Costs, loss: LossTable, num_hot: int) -> Cells:
        """The cells of a whole trace; num_hot: K."""
        g, b, d, layers, _ = batches.shape
        loads = batches.loads
        rows, shape = loads.rows, loads.rows.shape
        bits = [FULL_PRECISION_BITS, *reversed(loss.widths)]
        table = costs.device_experts_ps(b)[bits]
        device = np.moveaxis(table[:, rows], 0, -1)
        relative = losses_by_width(loss, OF_ONE_BIT)[:, :, bits]
        gates = loads.total(batches.weights, np.broadcast_to(batches.pairs, batches.ids.shape))
        losses = relative[np.arange(layers)[:, None], loads.experts] * gates[..., None]
        links = costs.links_ps(b)
        opening = float(costs.device_fill_ps + links[1, 1])
        used = rows > 0
        # Where a copy takes longer than the device needs for everything in full precision, none is worth it.
        in_place = device[..., 0].sum(axis=3) + costs.device_fill_ps + links[-1, -1]
        places = np.where(costs.copy_opening_ps + costs.copy_ps >= in_place, num_hot, shape[3])
        cells = g * d * layers
        split = None
        if rows.max() > costs.hardware.array.rows:
            # So many rows cost at least their share of the fullest passes, however they are spread over widths.
            each = np.minimum.accumulate(table[:, 1:] / np.arange(1, b + 1), axis=1)
            split = BoundRows.of(batches, np.moveaxis(each[:, np.maximum(rows - 1, 0)], 0, -1), relative)
        return cls(
            costs.gpu_experts_ps(b)[rows].reshape(cells, -1),
            device.reshape(cells, shape[3], -1),
            losses.reshape(cells, shape[3], -1),
            used.reshape(cells, -1),
            places.reshape(cells).astype(np.int64),
            np.broadcast_to(shared_ps(batches, costs), (g, d, layers)).reshape(cells),
            opening,
            float(links[-1, -1] - links[1, 1]),
            split,
            bool((places == num_hot).all()),
        )

    def part(self, which: slice) -> Cells:
        return replace(_part(self, which), rows=None if self.rows is None else _part(self.rows, which))

    def times(self, choice: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(least time, loss) of each cell for choice [C, S]: 0 the GPU, 1.. a width of the device."""
        away = (choice > 0) & self.used
        at = np.maximum(choice - 1, 0)[..., None]
        device = np.where(away, np.take_along_axis(self.device_ps, at, 2)[..., 0], 0.0).sum(axis=1)
        device += np.where(away.any(axis=1), self.message_ps, 0.0)
        gpu = self.beside_ps + np.where(away, 0.0, self.gpu_ps).sum(axis=1)
        loss = np.where(away, np.take_along_axis(self.losses, at, 2)[..., 0], 0.0).sum(axis=1)
        return np.maximum(gpu, device), loss

    def fronts(self) -> Fronts | None:
        """None where neither way to find them applies, or both would take too long."""
        if self.rows is not None:
            return None
        num_slots = self.used.shape[1]
        every = (1 + self.device_ps.shape[2]) ** num_slots
        if every <= _MOST_TRIED and every * len(self.used) <= _MOST_CHOICES:
            return self._tried(num_slots)
        equal = self._equal_costs()
        return None if equal is None else self._programmed(*equal)

    def _tried(self, num_slots: int) -> Fronts:
        """Every choice."""
        columns = []
        for choice in itertools.product(range(1 + self.device_ps.shape[2]), repeat=num_slots):
            chosen = np.broadcast_to(np.array(choice), self.used.shape)
            times, losses = self.times(chosen)
            fits = ((chosen == 0) & self.used).sum(axis=1) <= self.places
            more = np.where(((chosen > 0) & self.used).any(axis=1), self.message_more_ps, 0.0)
            columns.append((np.where(fits, times, np.inf), times + more, losses))
        return Fronts(*(np.stack(column, axis=1) for column in zip(*columns, strict=True)))

    def _equal_costs(self) -> tuple[float, NDArray[np.float64]] | None:
        """(GPU, device [W]) time of an expert, if all that are used take the same."""
        gpu, device = self.gpu_ps[self.used], self.device_ps[self.used]
        if not len(gpu) or np.ptp(gpu) > 0 or np.ptp(device, axis=0).max() > 1e-6 * device.max():
            return None
        return float(gpu[0]), device[0]

    def _programmed(self, gpu_ps: float, device_ps: NDArray[np.float64]) -> Fronts | None:
        """The least loss for every number of experts on the GPU and every time of the device, in whole units."""
        units, unit_ps, unit_most_ps = _in_units(device_ps)
        num_slots = self.used.shape[1]
        most_here = int(min(self.places.max(), num_slots))
        # Beyond what the GPU takes for all, or the device for those that have no place, there is nothing to gain.
        alone = (num_slots - int(self.places.min())) * units[0] if self.places.min() < num_slots else 0
        span = max(alone, int((num_slots * gpu_ps + self.beside_ps.max()) / unit_ps) + 1)
        span = min(span, num_slots * int(units[0])) + 1
        kept = len(self.places) * (span + most_here + 1)
        if len(self.places) * (most_here + 1) * span > _MOST_STATES or kept > _MOST_CHOICES:
            return None
        parts = []
        size = max(_CHUNK // ((most_here + 1) * span), 1)
        for start in range(0, len(self.places), size):
            part = self.part(slice(start, start + size))
            parts.append(part._programmed_part(gpu_ps, units, unit_ps, unit_most_ps, most_here, span))
        return Fronts(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _programmed_part(
        self,
        gpu_ps: float,
        units: NDArray[np.int64],
        unit_ps: float,
        unit_most_ps: float,
        most_here: int,
        span: int,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        least = np.full((len(self.places), most_here + 1, span), np.inf)
        least[:, 0, 0] = 0.0
        for slot in range(self.used.shape[1]):
            after = np.full_like(least, np.inf)
            after[:, 1:] = least[:, :-1]
            for width, count in enumerate(units.tolist()):
                if count < span:
                    reached = least[:, :, :-count] + self.losses[:, slot, width, None, None]
                    after[:, :, count:] = np.minimum(after[:, :, count:], reached)
            least = np.where(self.used[:, slot, None, None], after, least)
        none = np.arange(most_here + 1)[:, None] > self.places[:, None, None]
        least = np.where(none, np.inf, least)
        least = np.minimum.accumulate(np.minimum.accumulate(least, axis=2), axis=1)
        here = self.beside_ps[:, None] + gpu_ps * np.arange(most_here + 1)
        away, away_most = (
            np.where(np.arange(span) > 0, self.message_ps + more + unit * np.arange(span), 0.0)
            for unit, more in ((unit_ps, 0.0), (unit_most_ps, self.message_more_ps))
        )
        # For each time of the device as many on the GPU as take no longer, and the other way round.
        number = np.arange(len(self.places))[:, None]
        beside = np.clip(((away[None] - self.beside_ps[:, None]) / gpu_ps).astype(np.int64), 0, most_here)
        within = np.clip(((here - self.message_ps) / unit_ps).astype(np.int64), 0, span - 1)
        counts = np.concatenate([beside, np.broadcast_to(np.arange(most_here + 1), here.shape)], axis=1)
        ends = np.concatenate([np.broadcast_to(np.arange(span), beside.shape), within], axis=1)
        gpu = np.take_along_axis(here, counts, axis=1)
        losses = least[number, counts, ends]
        times = np.where(np.isfinite(losses), np.maximum(gpu, away[ends]), np.inf)
        return times, np.maximum(gpu, away_most[ends]), np.where(np.isfinite(losses), losses, 0.0)


def _part(record: P, which: slice) -> P:
    """The same of some cells, of which every array has a row each."""
    arrays: dict[str, Any] = {
        name: value[which] for name, value in vars(record).items() if isinstance(value, np.ndarray)
    }
    return replace(record, **arrays)


def _in_units(device_ps: NDArray[np.float64]) -> tuple[NDArray[np.int64], float, float]:
    """(whole units [W], least and most picoseconds of one), so that the times come nearest to whole numbers."""
    best: tuple[NDArray[np.int64], float, float] | None = None
    for most in range(8, _MOST_UNITS + 1):
        units = np.maximum(np.rint(device_ps / device_ps.max() * most), 1).astype(np.int64)
        ratios = device_ps / units
        if best is None or ratios.max() / ratios.min() < best[2] / best[1]:
            best = units, float(ratios.min()), float(ratios.max())
    assert best is not None
    return best


@dataclass(frozen=True)
class _Priced:
    """The cells' best choices at one price of loss."""

    price: float
    bound: float  # sum of the least time + price x loss, or less
    times: NDArray[np.float64]  # [C], of the choices; what they may take at most
    losses: NDArray[np.float64]  # [C]

    @property
    def time(self) -> float:
        return float(self.times.sum())

    @property
    def loss(self) -> float:
        return float(self.losses.sum())


@dataclass(frozen=True)
class BoundAnswer:
    """bound <= the least there is <= reached, by a schedule that was found."""

    bound: float
    reached: float


@dataclass
class Bound:
    """Questions about one set of cells; what was computed for one serves the others."""

    cells: Cells
    _known: dict[float, _Priced] = field(default_factory=dict)

    @cached_property
    def is_affordable(self) -> bool:
        """Whether questions are answered in seconds."""
        return self._fronts is not None or self.cells.device_ps.size <= _MOST_RELAXED

    def least_time(self, loss: float) -> BoundAnswer:
        """Picoseconds of all cells together, for a sum of losses of at most `loss`."""

        def enough(priced: _Priced) -> bool:
            return priced.loss <= loss

        dear, cheap = self._around(enough)
        bound = max(p.bound - p.price * loss for p in self._known.values() if np.isfinite(p.price))
        bound = max(bound, self._lossless.bound) if loss <= 0 else bound
        if not self.cells.is_reachable:
            return BoundAnswer(max(bound, 0.0), np.inf)
        if cheap is None:
            return BoundAnswer(max(bound, 0.0), dear.time)
        reached = _mixed(dear.losses, cheap.losses, dear.times, cheap.times, loss)
        return BoundAnswer(max(bound, 0.0), reached)

    def least_loss(self, time_ps: float) -> BoundAnswer:
        """Sum of losses, for at most time_ps of all cells together; infinite where no schedule is so fast."""

        def slow(priced: _Priced) -> bool:
            return priced.time > time_ps

        fastest = self._at(0.0)
        if fastest.bound > time_ps:
            return BoundAnswer(np.inf, np.inf)
        bounds = [(p.bound - time_ps) / p.price for p in self._known.values() if 0 < p.price < np.inf]
        dear, cheap = self._around(slow)
        bounds += [(p.bound - time_ps) / p.price for p in self._known.values() if 0 < p.price < np.inf]
        bound = max(0.0, *bounds)
        if not slow(self._lossless):
            return BoundAnswer(0.0, 0.0)
        if not self.cells.is_reachable:
            return BoundAnswer(bound, np.inf)
        if cheap is None:
            return BoundAnswer(bound, fastest.loss)
        return BoundAnswer(bound, _mixed(cheap.times, dear.times, cheap.losses, dear.losses, time_ps))

    def _around(self, dear_enough: Callable[[_Priced], bool]) -> tuple[_Priced, _Priced | None]:
        """The lowest price known for which that holds and the highest for which it does not, after some refinement."""
        prices = [0.0, *_PRICES.tolist()]
        first, after = 0, len(prices)  # it holds from some index on; len: only without any loss
        while first < after:
            middle = (first + after) // 2
            if dear_enough(self._at(prices[middle])):
                after = middle
            else:
                first = middle + 1
        dear = self._lossless if after == len(prices) else self._at(prices[after])
        if after == 0:
            return dear, None
        cheap = self._at(prices[after - 1])
        if after in (1, len(prices)):
            return dear, cheap
        for _ in range(_REFINED):
            between = self._at(float(np.sqrt(dear.price * cheap.price)))
            if dear_enough(between):
                dear = between
            else:
                cheap = between
        return dear, cheap

    @cached_property
    def _lossless(self) -> _Priced:
        return self._at(np.inf)

    @cached_property
    def _fronts(self) -> Fronts | None:
        return self.cells.fronts()

    def _at(self, price: float) -> _Priced:
        if price not in self._known:
            fronts = self._fronts
            self._known[price] = self._relaxed(price) if fronts is None else self._chosen(fronts, price)
        return self._known[price]

    def _chosen(self, fronts: Fronts, price: float) -> _Priced:
        if np.isinf(price):
            value = np.where(fronts.losses > 0, np.inf, fronts.least_ps)
        else:
            value = fronts.least_ps + price * fronts.losses
        best = value.argmin(axis=1)[:, None]
        least, most, losses = (np.take_along_axis(a, best, 1)[:, 0] for a in (value, fronts.most_ps, fronts.losses))
        return _Priced(price, float(least.sum()), most, losses)

    def _relaxed(self, price: float) -> _Priced:
        parts = []
        size = max(_CHUNK // self.cells.device_ps[0].size, 1)
        for start in range(0, len(self.cells.places), size):
            parts.append(_relax(self.cells.part(slice(start, start + size)), price))
        bound, times, losses = (np.concatenate(column) for column in zip(*parts, strict=True))
        return _Priced(price, float(bound.sum()), times, losses)


def _relax(cells: Cells, price: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(bound, time, loss) [C]: the slower side is at least any weighted mean of both, in which experts are independent.

    The schedule is the best of those that the means choose, with what it really takes.
    """
    count = len(cells.places)
    bound, best = np.zeros(count), np.full(count, np.inf)
    times, losses = np.full((2, count), np.inf)
    number = np.maximum(cells.used.sum(axis=1), 1)[:, None]
    priced = np.where(cells.losses > 0, np.inf, 0.0) if np.isinf(price) else price * cells.losses
    rank = np.arange(cells.used.shape[1])
    for weight in _MEANS:
        away = (1 - weight) * cells.device_ps + priced
        width = away.argmin(axis=2)
        device = np.take_along_axis(away, width[..., None], 2)[..., 0] + (1 - weight) * cells.message_ps / number
        if cells.rows is not None:
            device = cells.rows.cheapest(1 - weight, price, cells.used.shape[1])
            device = device + (1 - weight) * cells.message_ps / number
        gain = np.where(cells.used, device - weight * cells.gpu_ps, -np.inf)  # of running on the GPU instead
        order = np.argsort(-gain, axis=1, kind="stable")
        ranked = np.take_along_axis(gain, order, axis=1)
        taken = (rank < cells.places[:, None]) & (ranked > 0)
        least = np.where(cells.used, device, 0.0).sum(axis=1) - np.where(taken, ranked, 0.0).sum(axis=1)
        bound = np.maximum(bound, least + weight * cells.beside_ps)
        here = np.zeros(taken.shape, np.bool_)
        np.put_along_axis(here, order, taken, axis=1)
        time, loss = cells.times(np.where(here | ~cells.used, 0, width + 1))
        value = np.where(loss > 0, np.inf, time) if np.isinf(price) else time + price * loss
        better = value < best
        best = np.where(better, value, best)
        times, losses = np.where(better, time, times), np.where(better, loss, losses)
    return bound, times + cells.message_more_ps * cells.used.any(axis=1), losses


def _mixed(
    within: NDArray[np.float64],
    beyond: NDArray[np.float64],
    cost_within: NDArray[np.float64],
    cost_beyond: NDArray[np.float64],
    most: float,
) -> float:
    """The cost when some cells choose as the cheaper schedule, which goes beyond `most`, until that is reached."""
    excess, saved = beyond - within, cost_within - cost_beyond
    takes = np.flatnonzero(saved > 0)
    order = takes[np.argsort(np.maximum(excess[takes], 0.0) / saved[takes], kind="stable")]
    total = within.sum() + np.cumsum(excess[order])
    possible = int((total <= most).sum()) if len(order) else 0
    return float(cost_within.sum() - saved[order[:possible]].sum())


def regretted(row: Summary, outcome: Outcome, batches: Batches, costs: Costs, bound: Bound) -> Summary:
    """The row with what it could have been; as it is where the bound would take too long."""
    if not bound.is_affordable:
        return row
    running = batches.rows > 0
    taken_ps, whole_ps = outcome.moe_ps[running].sum(), np.nansum(step_times(outcome, batches, costs))
    count = float(batches.valid.sum()) * batches.shape[3]
    # The same arithmetic in another order: a row's own loss and time must be within reach of it.
    lost, slack = outcome.cold.loss * count, 1 + 1e-9
    time, loss = bound.least_time(lost * slack), bound.least_loss(float(taken_ps) * slack)
    factor = layer_factor(batches, costs)
    beside_ps = whole_ps - outcome.migration_ps.sum() - factor * taken_ps
    over, over_reached = (whole_ps / (beside_ps + factor * least) - 1 for least in (time.bound, time.reached))
    return replace(
        row, regret=float(over), regret_at_least=float(max(over_reached, 0.0)), least_loss=loss.bound / count
    )
