"""Analysis against traces whose answer is known, and the report as a browser shows it."""

from __future__ import annotations

import numpy as np
import pytest
from paths import DATA

from ndp_device.common.errors import TraceError
from vllm_ndp.lab.analysis import Interval, analyse
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace
from vllm_ndp.traces.trace import Trace

TRACE = Trace.load(DATA / "tiny-mixtral-trace")


def synthetic(**settings) -> Trace:
    sizes = {"num_layers": 3, "num_experts": 16, "top_k": 2, "num_requests": 24, "prompt_len": 64, "decode_len": 64}
    return synthetic_trace(SyntheticSettings(**{**sizes, **settings}))


def test_on_the_null_the_cosine_lies_in_its_band_and_the_prompt_gains_nothing():
    result = analyse(synthetic(signal=0.0), 8)
    inside = [
        low - 0.01 <= c <= high + 0.01
        for low, c, high in zip(result.cosine_null_low, result.cosine, result.cosine_null_high, strict=True)
    ]
    assert all(inside)
    assert result.over_static["prefill"].high < 0.02


def test_with_signal_the_prompt_covers_more_than_popularity_with_certainty():
    result = analyse(synthetic(signal=1.5), 8)
    assert result.over_static["prefill"].low > 0.05
    assert result.layers_outside_null == 3
    assert all(c > a for c, a in zip(result.cosine, result.cosine_across, strict=True))


def test_the_oracle_is_above_everything_and_random_covers_its_share():
    result = analyse(TRACE, 4)
    means = {name: value.mean for name, value in result.coverage.items()}
    assert means["oracle"] == max(means.values())
    assert means["random"] == pytest.approx(0.5, abs=0.08)
    assert all(v.low <= v.mean <= v.high for v in result.coverage.values())


def test_refreshing_more_often_follows_a_drift():
    result = analyse(synthetic(signal=1.5, drift=1.0, decode_len=256), 8)
    assert result.refresh[8].mean > result.refresh[128].mean > result.coverage["prefill"].mean


def test_a_prior_helps_where_the_prompt_is_one_token_long():
    result = analyse(synthetic(signal=0.3, concentration=1.0), 8)
    assert result.first_tokens_and_prior[1].low > result.first_tokens[1].high


def test_every_request_has_its_domain_and_length():
    result = analyse(TRACE, 4)
    assert set(result.by_domain) == {"python", "c", "prose", "dict", "sqldoc", "german", "japanese", "xml"}


def test_an_interval_narrows_with_more_requests():
    generator = np.random.default_rng(0)
    few, many = (Interval.of(generator.normal(size=n)) for n in (10, 1000))
    assert many.high - many.low < 0.2 < few.high - few.low


def test_one_request_is_not_enough():
    with pytest.raises(TraceError, match="at least 2 requests"):
        analyse(TRACE.select([0, 1]), 4)
