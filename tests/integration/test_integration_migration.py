"""Experts that the end of a prefill streamed and that will be hot stay: same tokens, fewer reads of the pool."""

from __future__ import annotations

import numpy as np
import pytest
from engines import PROMPTS, REPLICAS, engine, greedy, token_ids

from vllm_ndp.config import NdpSettings
from vllm_ndp.integration import controller, streaming

pytestmark = pytest.mark.vllm


SETTINGS = {"hot_experts": 3, "avg_bits": 2.0, "prefill": "streamed", "replicas": str(REPLICAS)}
"""Prompts that are streamed whole have the most to keep."""


def serve(keeps: bool, monkeypatch: pytest.MonkeyPatch, **options):
    """Tokens of three batches, totals, how often an expert was read, and whether slots hold what they name."""
    reads: list[tuple[int, int]] = []
    load = streaming.StagingStreamer._load

    def counted(self, layer, expert, *more):
        reads.append((layer, expert))
        load(self, layer, expert, *more)

    monkeypatch.setattr(streaming.StagingStreamer, "_load", counted)
    monkeypatch.setattr(NdpSettings, "keeps_streamed", keeps)
    with engine(settings=SETTINGS, **options) as llm:
        reads.clear()
        tokens = [token_ids(greedy(llm, batch, 8)) for batch in ([PROMPTS[0]], PROMPTS[1:], [PROMPTS[2] * 5])]
        totals = llm.collective_rpc("ndp_totals")[0]
        num_reads = len(reads)
        assert_slots_hold_what_they_name()
    monkeypatch.undo()
    return tokens, totals, num_reads


def assert_slots_hold_what_they_name() -> None:
    """Every slot against its expert, packed anew from the checkpoint; and the slots against the placement."""
    ours = controller.current_controller().worker
    for layer in range(ours.facts.pool.shape.num_layers):
        slots = ours.parts.hot.layers[layer]
        assert sorted(slots.expert_in) == np.flatnonzero(ours.parts.planner.replanner.placement.hot[layer]).tolist()
        for slot, expert in enumerate(slots.expert_in):
            anew = slots.held.empty_like(1)
            slots.kernel.load(anew, 0, ours.facts.pool.expert(layer, expert))
            assert anew.w13.equal(slots.held.w13[slot : slot + 1])
            assert anew.w2.equal(slots.held.w2[slot : slot + 1])
            assert slots.where[expert] == slot == int(slots.expert_map[expert])


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 32}], ids=["one-chunk", "chunks"])
def test_keeping_streamed_experts_saves_a_read_each_and_changes_no_token(monkeypatch, options):
    kept, moved = (serve(keeps, monkeypatch, **options) for keeps in (True, False))
    assert kept[0] == moved[0]
    assert kept[1]["kept_experts"] > 0 == moved[1]["kept_experts"]
    assert kept[1]["migrated_experts"] + kept[1]["kept_experts"] == moved[1]["migrated_experts"]
    assert kept[2] == moved[2] - kept[1]["kept_experts"]
    assert kept[1]["simulated_ps"] < moved[1]["simulated_ps"]


def test_slots_hold_the_placement_again_when_the_prompt_that_was_to_change_it_has_left(monkeypatch):
    with engine(settings=SETTINGS) as llm:
        first = token_ids(greedy(llm, [PROMPTS[0]], 6))
        assert greedy(llm, [PROMPTS[3]], 1)  # ends with its prefill, after it has kept experts
        assert llm.collective_rpc("ndp_totals")[0]["prefills"] == 1
        again = token_ids(greedy(llm, [PROMPTS[0]], 6))
        assert_slots_hold_what_they_name()
    assert first == again
