"""Synthetic routing beside the figures that others have published of real models (traces/routing.py)."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from ndp_device.errors import ConfigError
from vllm_ndp.lab.locality import Locality, locality
from vllm_ndp.traces.routing import read_routing, routing_named, routing_of
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace

REPEATS = {0: 0.079, 6: 0.562, 7: 0.597, 18: 0.556, 19: 0.540, 30: 0.540, 31: 0.577, 47: 0.206}
HITS = {
    "random": (0.365, 0.582, 0.767, 0.906),
    "lfu": (0.425, 0.615, 0.795, 0.917),
    "lru": (0.424, 0.647, 0.810, 0.918),
    "oracle": (0.608, 0.784, 0.888, 0.929),
}
"""Of caches of 8, 16, 32 and 64 of 128, one per layer, empty at first: 25 prompts, 129 decode tokens each."""
TOP_16 = (0.545, 0.608, 0.569, 0.620, 0.890)
"""By kind of work."""


@cache
def qwen3() -> Locality:
    routing = routing_named("qwen3-30b-a3b").settings("qwen3-30b-a3b", num_requests=25, prompt_len=32, decode_len=129)
    return locality(synthetic_trace(routing))


def test_qwen3_repeats_layer_by_layer():
    found = {layer: qwen3().repeats[layer] for layer in REPEATS}
    assert found == pytest.approx(REPEATS, abs=0.02)
    assert qwen3().repeats.mean() == pytest.approx(0.427, abs=0.02)


def test_qwen3_has_the_published_hit_curves():
    for rule, published in HITS.items():
        ours = [qwen3().mean_hits(rule, places) for places in (8, 16, 32, 64)]
        assert ours == pytest.approx(published, abs=0.035), rule


def test_qwen3_is_as_concentrated_and_as_cold_at_first():
    """Entropy .61 to .81 by kind. Another project, three prompts: first 64 tokens miss .138 of choices at 40 % of the
    experts, later ones .053. The hits above allow no .053: between 32 and 64 experts LRU misses .115 of 129 tokens'
    choices at 51; with .138 of the first 64 the others miss .092."""
    assert qwen3().concentration[:, 16].mean() == pytest.approx(np.mean(TOP_16), abs=0.02)
    assert 0.61 < qwen3().entropy.mean() < 0.81
    early, later = (curve[:, 51].mean() for curve in (qwen3().early_misses, qwen3().later_misses))
    assert early == pytest.approx(0.138, abs=0.02)
    assert later == pytest.approx(0.053, abs=0.04)
    assert later == pytest.approx(0.092, abs=0.015)


def test_gpt_oss_hits_as_little_as_published():
    """8 to 9 % in a cache of 3 % of 128 experts, top-4."""
    routing = routing_of("gpt-oss-120b").settings("gpt-oss-120b", num_layers=4, prompt_len=8)
    found = locality(synthetic_trace(routing))
    assert 0.08 <= found.mean_hits("lru", 4) <= 0.095


def test_qwen38_has_the_published_lru_curve():
    routing = routing_named("qwen3.8-flash-next")
    sizes = {"num_layers": 2, "num_experts": 512, "top_k": 10, "num_requests": 8}
    found = locality(synthetic_trace(routing.settings("qwen3.8-flash-next", **sizes, prompt_len=8)))
    ours = [found.mean_hits("lru", places) for places in (93, 186, 279, 372, 512)]
    assert ours == pytest.approx([0.435, 0.62, 0.72, 0.79, 0.85], abs=0.05)
    assert found.mean_hits("static", 32) == pytest.approx(0.10, abs=0.02)  # of another report on the same model


@pytest.mark.parametrize(("experts", "top_k"), [(64, 6), (160, 6)])
def test_near_chance_repeats_little_more_than_chance(experts, top_k):
    routing = routing_named("near-chance").settings(
        "mine", num_layers=2, num_experts=experts, top_k=top_k, num_requests=8, prompt_len=8
    )
    found = locality(synthetic_trace(routing))
    assert 1.1 <= found.repeats.mean() * experts / top_k <= 2


def test_a_routing_says_what_it_was_fitted_to():
    assert routing_of("qwen3-30b-a3b").label("qwen3-30b-a3b") == "qwen3-30b-a3b, fitted"
    assert routing_named("qwen3-30b-a3b").label("mixtral-8x7b") == "qwen3-30b-a3b, not fitted to mixtral-8x7b"
    assert routing_of("mixtral-8x7b").label("mixtral-8x7b") == "memoryless, fitted to nothing"
    assert SyntheticSettings(1, 2, 1).routing == "fitted to nothing"
    with pytest.raises(ConfigError, match="did you mean 'qwen3-30b-a3b'"):
        routing_named("qwen3-30b")


def test_a_file_that_holds_no_fit_is_refused(tmp_path):
    path = tmp_path / "fit.json"
    for text in ("", "{}", '{"fit": {"name": "x"}}', '{"fit": {"name": "x", "source": "", "signal": "much"}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"fit\.json holds no fit"):
            read_routing(str(path), "mixtral-8x7b")


def test_few_layers_stand_for_all_of_a_models():
    routing = routing_named("qwen3-30b-a3b")
    assert len(routing.settings("qwen3-30b-a3b").strength) == 48
    few = routing.settings("qwen3-30b-a3b", num_layers=4)
    assert few.strength == tuple(routing.strength[at] for at in (6, 18, 30, 42))
