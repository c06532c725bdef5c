"""Counts and times of a layer, from its split and what came of it: for the plugin's steps and for the exact replay.

Knows a split and the simulated clock. Does not know who ran the pairs, nor requests.
"""

from __future__ import annotations

from vllm_ndp.cost_model.gpu_timing import LayerTime, StepClock
from vllm_ndp.layer.split import Split, Splitter


def end_layer(clock: StepClock, splitter: Splitter, split: Split, device_ps: int | None) -> LayerTime:
    """End the layer that `split` was of. `device_ps`: of the device's answer, 0 where it was not asked or has no
    simulated time. None where no answer came: its pairs were computed here, and count as fallbacks and as streamed."""
    experts, pairs = split.stream_experts, split.stream_pairs
    if device_ps is None:
        device_ps, experts, pairs = 0, splitter.fall_back(), pairs + len(split.device.experts)
    return clock.end_layer(
        split.hot_loads,
        hot_bytes=split.hot_bytes,
        device_ps=device_ps,
        streamed_experts=experts,
        streamed_pairs=pairs,
        host_ps=split.host_ps,
    )
