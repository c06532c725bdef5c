"""What a step knows of its rows: the sums of lists against the arrays, and the check of the KV entries both ways."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.integration import device_link
from vllm_ndp.integration.batch import BatchRows, RequestTracker, Span, TrackedRequest
from vllm_ndp.integration.device_link import Gather, add_sums
from vllm_ndp.integration.planner import PlanRunner
from vllm_ndp.integration.routing_sidecar import Routed, RoutingSidecar
from vllm_ndp.lab.exact.engine import modelled_host
from vllm_ndp.lab.exact.live import RecordedRun
from vllm_ndp.layer.run import Run
from vllm_ndp.layer.tiers import Tiers
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement, Plan
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlanChange, PlannerRules
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace

BLOCK = 4


def rows_of(shapes: list[tuple[int, int, int]]) -> BatchRows:
    """Each (prompt length, start, tokens); block tables grow downwards, so that no entry follows from the position."""
    spans = []
    for number, (prompt_len, start, num_tokens) in enumerate(shapes):
        num_blocks = -(-(start + num_tokens) // BLOCK)
        blocks = [1000 * (number + 1) - block for block in range(num_blocks)]
        request = TrackedRequest(f"r{number}", prompt_len, blocks, prefilled=start >= prompt_len)
        spans.append(Span(request, start, num_tokens))
    return BatchRows(tuple(spans))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(1, 5)), min_size=1, max_size=6))
def test_sums_over_requests_are_sums_over_rows(shapes: list[tuple[int, int, int]]) -> None:
    rows = rows_of(shapes)
    assert rows.num_rows == len(rows.positions) == len(rows.decode) == len(rows.owner)
    assert rows.decode.tolist() == [
        p >= rows.spans[r].first_decode for p, r in zip(rows.positions, rows.owner, strict=True)
    ]
    assert rows.all_decode == bool(rows.decode.all())
    assert [rows.owner[first] for first in rows.first_rows] == list(range(len(shapes)))


@pytest.mark.parametrize("tokens", [1, 30])
def test_a_row_is_expected_where_its_position_lies_in_the_blocks_of_its_request(tokens: int) -> None:
    rows = rows_of([(1, 7, tokens), (1, 2, tokens), (1, 9, tokens)])
    assert rows.expected_slot_mapping(BLOCK).tolist() == [
        span.request.blocks[position // BLOCK] * BLOCK + position % BLOCK
        for span in rows.spans
        for position in range(span.start, span.start + span.num_tokens)
    ]


def test_drafts_beside_the_end_of_a_prompt_are_prefill_until_there_is_a_plan() -> None:
    """Of a prompt of 5, its last row and two drafts after it: the first step knows no plan, a recomputation does."""
    (span,) = rows_of([(5, 4, 3)]).spans
    assert (span.num_drafts, span.num_sampled_rows) == (2, 3)
    assert BatchRows((span,)).decode.tolist() == [False, False, False]
    span.request.prefilled, span.request.num_output_tokens = True, 2
    assert (span.num_drafts, span.num_sampled_rows) == (0, 1)
    assert BatchRows((span,)).decode.tolist() == [False, True, True]


def new_request(name: str, prompt: int, blocks: list[int]) -> NewRequestData:
    return NewRequestData(name, list(range(prompt)), [], None, None, (blocks,), 0, None)


def message(new: list[NewRequestData], finished: set[str] = frozenset(), **scheduled: int) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.scheduled_new_reqs, made.finished_req_ids, made.num_scheduled_tokens = new, set(finished), scheduled
    return made


@pytest.mark.parametrize(
    ("prompt", "finished", "is_known"),
    [(8, set(), True), (12, set(), False), (8, {"a"}, False)],
    ids=["resumed", "goes on with more", "ended, and another begins under its name"],
)
def test_a_plan_belongs_to_a_prompt_and_not_to_a_name(prompt: int, finished: set[str], is_known: bool) -> None:
    """Model runner V2 sends a request that was preempted as a new one; a session with a longer prompt."""
    tracker, plan, score = RequestTracker(), object(), object()
    request = tracker.update(message([new_request("a", 8, [1, 2])], a=8))["a"].request
    request.plan, request.score, request.prefilled = plan, score, True  # type: ignore[assignment]
    span = tracker.update(message([new_request("a", prompt, [5, 6, 7])], finished, a=prompt))["a"]
    assert (span.request is request) == is_known
    assert span.request.blocks == [5, 6, 7]
    assert span.ends_prefill != is_known
    assert (span.request.plan, span.request.score) == ((plan, score) if is_known else (None, None))


def sidecar_with(entries: list[int]) -> RoutingSidecar:
    """Two layers, three experts a row; of the entry n expert n is first."""
    sidecar, at = RoutingSidecar(2, 3, torch.device("cpu"), 6, 4), torch.tensor(entries)
    for layer in range(2):
        weights = at[:, None] + torch.full((1, 3), layer / 2)
        sidecar.note(layer, at).write(Routed(torch.empty(0), weights, at[:, None] + torch.arange(3)))
    return sidecar


def lacking(sidecar: RoutingSidecar) -> list[int]:
    return sorted(set(range(24)) - set(sidecar.noted(range(6), 24)[1].tolist()))


def test_entries_of_blocks_that_were_loaded_count_as_none_until_a_pass_writes_them() -> None:
    sidecar, entries = sidecar_with(list(range(24))), np.arange(24)
    assert lacking(sidecar) == []
    sidecar.note_written(entries)
    assert not sidecar.lacks_some
    sidecar.forget([1, 3])
    assert lacking(sidecar) == [4, 5, 6, 7, 12, 13, 14, 15]
    sidecar.note_written(np.array([6, 7, 8, 12]))
    assert lacking(sidecar) == [4, 5, 13, 14, 15]


def test_blocks_that_vllm_copies_take_their_routing_and_the_lack_of_it_along() -> None:
    """A prompt that shares a part of a block with another gets a copy of it."""
    sidecar = sidecar_with(list(range(12)))
    sidecar.copy_blocks([(1, 4), (2, 3)])
    ids, weights = sidecar.read(np.array([16, 17, 12, 15]))
    assert ids[:, 0, 0].tolist() == [4, 5, 8, 11]
    assert weights[:, 1, 2].tolist() == [4.5, 5.5, 8.5, 11.5]
    sidecar.forget([2])
    sidecar.copy_blocks([(2, 5), (1, 3)])
    assert {*range(12, 24)} & {*lacking(sidecar)} == {20, 21, 22, 23}


# -- rows on their way out and sums on their way back, natively --------------------------------------------------------

HIDDEN = 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(st.integers(1, 40), st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_partial_sums_are_added_as_torch_adds_them(
    dtype: torch.dtype, num_rows: int, data: st.DataObject, seed: int
) -> None:
    random = np.random.default_rng(seed)
    sent = np.sort(random.permutation(num_rows)[: data.draw(st.integers(1, num_rows))])
    scale = random.choice([1e-39, 1e-3, 1.0, 1e38], (num_rows, 1))
    out = torch.from_numpy(random.uniform(-3, 3, (num_rows, HIDDEN)) * scale).to(dtype)
    sums = (random.uniform(-3, 3, (len(sent), HIDDEN)) * scale[sent]).astype(np.float32)
    expected, few = out.clone(), device_link.FEW_ROWS
    try:
        device_link.FEW_ROWS = 0
        add_sums(expected, sums, sent)
    finally:
        device_link.FEW_ROWS = few
    add_sums(out, sums, sent)
    assert np.array_equal(out.float().numpy(), expected.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_sent", [1, 5, 128, 129, 200])
def test_gathered_rows_are_those_of_the_tensor(dtype: torch.dtype, num_sent: int) -> None:
    """128 rows are gathered natively, 129 by torch."""
    x = torch.randn(200, HIDDEN).to(dtype)
    sent = np.sort(np.random.default_rng(0).permutation(200)[:num_sent])
    found = Gather(HIDDEN, dtype).rows(x, sent)
    wanted = x[torch.from_numpy(sent)]
    assert np.array_equal(found.view(np.uint8), wanted.view(torch.uint8).numpy())


# -- What the plugin's planner tells slots and device, which are stand-ins here; tracker and planner are real ----------


LAYERS, EXPERTS, PROMPT = 32, 8, 64


def planner_beside(link: Any) -> tuple[PlanRunner, list[RoutingStats]]:
    """A planner of no request yet, and what two prompts chose."""
    slots, device = SimpleNamespace(place=lambda placement: None), SimpleNamespace(link=link)
    sizes: dict[str, Any] = {"num_requests": 2, "prompt_len": PROMPT, "decode_len": 2}
    trace = synthetic_trace(SyntheticSettings(LAYERS, EXPERTS, 2, **sizes, seed=4))
    policy, loss = load_policy("prefill", PolicySettings()), LossTable.nominal(LAYERS, EXPERTS)
    rules = PlannerRules(policy, Budget(3, 3.0, num_warm=2), loss)
    setup = modelled_host(Costs(load_hardware("h100-ndp512"), model_named("mixtral-8x7b")), rules)
    costs, tracker = RecordedRun(trace, setup, rules).engine.costs, RequestTracker()
    run = Run[str](setup, rules, costs, None, Tiers(LAYERS, EXPERTS), 2, lambda: ())
    stats = [RoutingStats.from_choices(of.prompt_ids, of.prompt_weights, EXPERTS) for of in trace.sequences]
    return PlanRunner(run, tracker, cast(Any, slots), cast(Any, device)), stats


def end_prompts(planner: PlanRunner, stats: dict[str, RoutingStats]) -> None:
    there = {name: TrackedRequest(name, PROMPT, []) for name in stats}
    planner._requests.requests.update(there)
    planner.run.end_prefills([(name, there[name], of) for name, of in stats.items()], there.values)


def test_a_device_prepares_no_expert_that_the_hosts_cpu_computes() -> None:
    """Warm experts have widths in the plans, as all have; no decode row of theirs goes to the device."""
    announced: list[tuple[NDArray[np.uint8], NDArray[np.bool_]]] = []
    link = SimpleNamespace(
        wait_installed=lambda: None,
        begin_install=lambda epoch, widths, hot: announced.append((widths.copy(), hot.copy())),
    )
    planner, stats = planner_beside(link)
    end_prompts(planner, {"a": stats[0]})
    assert planner.replan().keys() == {"a"}
    ((widths, hot),) = announced
    placement = planner.run.planner.placement
    assert placement.warm.sum() == LAYERS * 2
    assert (hot == placement.hot).all()
    assert ((widths != 0) == ~(placement.hot | placement.warm)).all()


def test_prompts_that_ended_are_counted_and_one_whose_name_another_request_has_now_is_none_of_them() -> None:
    planner, stats = planner_beside(None)
    end_prompts(planner, {"a": stats[0], "b": stats[1]})
    assert planner.replan().keys() == {"a", "b"}
    assert planner.prefills == 2
    end_prompts(planner, {"a": stats[0], "b": stats[1]})
    planner._requests.requests["a"] = TrackedRequest("a", PROMPT, [])
    assert planner.replan().keys() == {"b"}
    assert planner.prefills == 3


def test_ranks_tell_plans_apart_by_tiers_by_widths_and_by_what_a_pair_pays_for() -> None:
    planner, _ = planner_beside(None)
    hot = np.array([[True, False, False]])
    usual, weights = np.array([[0, 3, 3]], np.uint8), np.zeros((1, 3, 3), np.float32)
    narrow, sums = BitwidthPlan(np.minimum(usual, 2)), set[int]()
    for width in (16, 4):
        for bits in (narrow, BitwidthPlan(usual), BitwidthPlan(usual, weights), BitwidthPlan(usual, weights + 1)):
            placement = Placement(hot, widths=np.where(hot, width, 0))
            planner._announce(PlanChange(1, placement, {"a": Plan(1, placement, bits)}, hot, 0))
            sums.add(planner.checksum)
    assert len(sums) == 8
