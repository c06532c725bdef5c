"""Paired differences and TOST: by hand, and on samples that are equal or not by construction."""

from __future__ import annotations

import numpy as np
import pytest
from paths import DATA

from vllm_ndp.lab.compare import beside_fastest, compare, paired
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.traces.trace import Trace

BUNDLED = Trace.load(DATA / "tiny-mixtral-trace")


def test_a_pair_is_judged_by_the_difference_of_each_request():
    """Requests differ by a factor of 100, each by 1 % of the mean: equal within 5 %."""
    other = np.geomspace(1, 100, 40)
    own = other + 0.01 * other.mean()
    one = paired(own, other)
    assert (one.mean, one.low, one.high) == pytest.approx((0.01, 0.01, 0.01))
    assert one.equal
    assert not paired(own, other, margin=0.009).equal


def test_few_noisy_requests_are_not_shown_equal():
    """Absence of evidence: the interval holds 0, and TOST says no."""
    noise = np.random.default_rng(0).normal(size=(2, 6))
    one = paired(*(100 + 20 * noise))
    assert one.low < 0 < one.high
    assert not one.equal


def test_every_row_of_a_comparison_stands_beside_the_fastest_of_its_batch():
    found = compare(BUNDLED, CompareSettings(systems=("context_aware", "fiddler"), policies=("prefill",)))
    beside = beside_fastest(found.replayed)
    times = [done.decode_ps.mean() for done in found.replayed]
    fastest = int(np.argmin(times))
    assert [one.mean for one in beside] == pytest.approx([each / min(times) - 1 for each in times])
    assert (beside[fastest].mean, beside[fastest].equal) == (0, True)
    assert not beside[1 - fastest].equal
