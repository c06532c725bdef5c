"""MoEpic's cache configuration: layers worked by hand, the division of budgets against every division there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from vllm_ndp.lab.systems.moepic import THETAS, MoepicLoad, divide, num_tops, solve


def test_more_tops_fit_the_smaller_they_are():
    assert [num_tops(4, theta, 8) for theta in (0.0, 0.5, 0.8, 1.0)] == [0, 8, 5, 4]


def test_a_layer_worked_by_hand():
    """Two experts used, a copy takes 10, computing both 8, attention 2, all predictions right.

    Theta .5, both tops cached: bottoms are 10 of copies, of which the layer before hides 2 + 4 (attention, and what it
    computes after its own copies); the 4 left run beside the tops' 4: 8 in all. One top missing and waiting: its 10 are
    late, the other's bottom 5 hides behind 2 + 6; 10 of copies beside 2 of a top, then 6: 16. Prefetched: 15 of copies,
    8 hidden, 7 left, then 6: 13.
    """
    load = MoepicLoad(used=2, fetch_ps=10, compute_ps=8, attention_ps=2, accuracy=1.0)
    assert float(load.expected_ps(np.array(2.0), 0.5)) == pytest.approx(8)
    assert float(load.expected_ps(np.array(1.0), 0.5)) == pytest.approx(16)
    early = MoepicLoad(2, 10, 8, 2, 1.0, "prefetched")
    assert float(early.expected_ps(np.array(1.0), 0.5)) == pytest.approx(13)


def test_wrong_predictions_make_a_part_late_and_keep_the_link_busy():
    """As above with half of the predictions right: of the bottoms' 10, 5 are late; 5 right and 5 wrong ones were
    ordered, of which 6 are carried: 2 of the right ones are left. 7 of copies beside the tops' 4, then 4: 11."""
    load = MoepicLoad(used=2, fetch_ps=10, compute_ps=8, attention_ps=2, accuracy=0.5)
    assert float(load.expected_ps(np.array(2.0), 0.5)) == pytest.approx(11)


@pytest.mark.parametrize("seed", range(6))
def test_budgets_are_the_best_of_all_divisions(seed):
    """Also where time falls by leaps, on which moving one expert at a time gets stuck."""
    generator = np.random.default_rng(seed)
    times = -np.sort(-generator.integers(0, 40, (5, 4)).astype(np.float64), axis=0)
    for total in range(17):
        share = divide(times, total)
        assert share.sum() == total
        best = min(
            sum(times[size, layer] for layer, size in enumerate(sizes))
            for sizes in product(range(5), repeat=4)
            if sum(sizes) == total
        )
        assert times[share, np.arange(4)].sum() == best


def test_the_solver_gives_bytes_to_the_skewed_layer_and_a_theta_inside():
    """Even routing, and three experts that do it all: their layer gets three or more of four experts' bytes. Where
    compute is as long as copies and half of the experts fit, both ends of theta lose."""
    slots = np.arange(9) / 8
    rates = np.stack([slots, np.minimum(3 * slots, 1)], axis=1)
    _, share = solve(rates, 2.0, MoepicLoad(2.0, 100.0, 1.0, 0.0, 1.0))
    assert share.tolist() == [1, 3]
    concave = np.sqrt(slots)[:, None]
    theta, _ = solve(concave, 4.0, MoepicLoad(2.0, 100.0, 150.0, 0.0, 1.0))
    assert 0 < theta[0] < 1
    early = MoepicLoad(2.0, 100.0, 150.0, 0.0, 1.0, "prefetched")
    tops = [num_tops(4, theta, 8) for theta in THETAS.tolist()]
    times = early.expected_ps(2 * concave[tops, 0], THETAS)
    assert times[-1] == times.min()  # prefetched misses: theta 1 is never worse
