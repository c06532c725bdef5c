"""The asynchronous layer in a real engine, on CPU tensors: tokens, counts and simulated times are the eager layer's."""

from itertools import pairwise
from typing import Any

import pytest
from engines import PROMPTS, REPLICAS, engine, greedy, token_ids

from vllm_ndp.integration.connector import NdpConnector
from vllm_ndp.integration.controller import LateReport, current_controller
from vllm_ndp.integration.cuda import messenger
from vllm_ndp.integration.report import StepReport
from vllm_ndp.integration.worker import NdpWorker

pytestmark = pytest.mark.vllm
PAPER: dict[str, Any] = {
    "hot_experts": 4,
    "execution": "paper",
    "replicas": str(REPLICAS),
    "debug": {"bits_for": "request"},
}


def outcome(llm: Any) -> tuple[str, Any]:
    layers, outputs = llm.collective_rpc("ndp_status")[0]["decode_layers"], greedy(llm, PROMPTS, 16)
    reports = [output.kv_transfer_params["ndp"] for output in outputs]
    kept = [{k: v for k, v in report.items() if not k.startswith("measured_")} for report in reports]
    assert all(report["cold_pairs"] for report in reports)
    return layers, (token_ids(outputs), kept, llm.collective_rpc("ndp_totals")[0])


def test_an_engine_gives_the_same_tokens_counts_and_simulated_times_whichever_way_its_layers_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who runs beside a request decides with it what is hot: so two alone as well."""
    with engine(settings={**PAPER, "debug": PAPER["debug"] | {"gpu": "plain"}}) as llm:  # its layers wait
        (eager, wanted), of_two = outcome(llm), token_ids(greedy(llm, PROMPTS[:2], 8))
    monkeypatch.setattr(messenger, "CORES", 1)  # so that the thread sends here, too
    with engine(settings={**PAPER, "debug": PAPER["debug"] | {"gpu": "thread"}}) as llm:
        layers, found = outcome(llm)
        carrier = llm.collective_rpc("ndp_status")[0]["carrier"]
        late = ask_for_reports_as_runner_v2_does(monkeypatch)
        before, tokens = llm.collective_rpc("ndp_totals")[0], token_ids(greedy(llm, PROMPTS[:2], 8))
        after = llm.collective_rpc("ndp_totals")[0]
    assert carrier == "shared memory"
    assert (eager, layers) == ("plain", "thread, asynchronous up to 256 rows, a thread sends")
    assert found == wanted
    assert tokens == of_two
    counted = sum(report.pairs[name]["cold"] for report in late for name in report.pairs)
    assert counted == after["cold_pairs"] - before["cold_pairs"] > 0


def ask_for_reports_as_runner_v2_does(monkeypatch: pytest.MonkeyPatch) -> list[StepReport]:
    """Not within a step, but while its tokens are sampled; once each."""
    late: list[StepReport] = []
    sample = NdpWorker.sample_tokens

    def sample_tokens(self: NdpWorker, *args: Any) -> Any:
        if (report := self.ndp.take_report()) is not None:
            late.append(report)
        assert self.ndp.take_report() is None
        return sample(self, *args)

    monkeypatch.setattr(NdpConnector, "build_connector_worker_meta", lambda self: None)
    monkeypatch.setattr(NdpWorker, "sample_tokens", sample_tokens)
    return late


def test_reports_of_steps_with_every_expert_hot_may_be_asked_for_after_the_next_step_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {**PAPER, "hot_experts": 8}
    with engine(settings={**settings, "debug": PAPER["debug"] | {"gpu": "plain"}}) as llm:
        tokens, wanted = token_ids(greedy(llm, PROMPTS, 16)), llm.collective_rpc("ndp_totals")[0]
    late: list[LateReport] = []

    def keep(self: NdpConnector) -> None:
        if isinstance(report := current_controller().take_report(), LateReport):
            assert report.made is None, "somebody waited for the step's counts"
            late.append(report)

    monkeypatch.setattr(NdpConnector, "build_connector_worker_meta", keep)
    with engine(settings={**settings, "debug": PAPER["debug"] | {"gpu": "thread"}}) as llm:
        assert token_ids(greedy(llm, PROMPTS, 16)) == tokens
        assert [report.made is None for report in late[-3:]] == [False, True, True]
        reports = [report.get() for report in reversed(late)][::-1]
        assert llm.collective_rpc("ndp_totals")[0] == wanted
    assert len(reports) == 15
    assert all(first.end_ps == then.start_ps == then.before_ps for first, then in pairwise(reports))
