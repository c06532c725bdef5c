"""When steps leave a pipeline, by cases that fit on one hand."""

from __future__ import annotations

from vllm_ndp.cost_model.gpu_timing import PipelineClock


def test_one_request_waits_for_its_own_token():
    """Stages of 10 and 5: its second step cannot begin before its first token exists, at 15."""
    clock = PipelineClock(2)
    assert clock.run([10, 5], ["a"]) == (0, 15)
    clock.note_token("a", 15)
    assert clock.run([10, 5], ["a"]) == (15, 30)


def test_two_batches_fill_both_stages():
    """Stages of 10 and 10: the second batch enters when the first has left stage 0, and they never wait again."""
    clock = PipelineClock(2)
    assert clock.run([10, 10], ["a"]) == (0, 20)
    clock.note_token("a", 20)
    assert clock.run([10, 10], ["b"]) == (10, 30)
    clock.note_token("b", 30)
    assert clock.run([10, 10], ["a"]) == (20, 40)


def test_chunks_of_a_prompt_need_no_token_and_follow_at_once():
    clock = PipelineClock(2)
    assert clock.run([10, 30], ["a"]) == (0, 40)
    assert clock.run([10, 30], ["a"]) == (10, 70)  # stage 1 is busy until 40


def test_a_request_that_ended_holds_nobody_up():
    clock = PipelineClock(1)
    assert clock.run([10], ["a"]) == (0, 10)
    clock.note_token("a", 1000)
    clock.forget("a")
    assert clock.run([10], ["a"]) == (10, 20)
