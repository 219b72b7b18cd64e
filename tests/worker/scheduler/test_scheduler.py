"""The life of requests in the scheduler. `test_batching.py` looks at what each step is filled with."""

from dataclasses import replace

import pytest

from holdfast.worker.errors import InvalidRequestError, QueueFullError
from holdfast.worker.request import FinishReason, TokenDelta
from holdfast.worker.step_plan import NO_ROWS, StepResult
from holdfast.worker.step_update import is_plain
from tests.worker.schedulers import EOS, make_request, make_result, make_scheduler, run_to_end, shares, step


def abort_delta(request_id, first_token_index):
    return TokenDelta(
        attempt=request_id,
        first_token_index=first_token_index,
        token_ids=(),
        finish_reason=FinishReason.ABORT,
    )


# --- Steps ---


def test_nothing_to_do_is_no_plan():
    scheduler = make_scheduler()
    assert scheduler.plan() is None
    assert not scheduler.has_work


def test_deltas_are_numbered_from_the_first_output_token():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", max_tokens=3))
    deltas = run_to_end(scheduler)
    assert [delta.first_token_index for delta in deltas] == [0, 1, 2]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.LENGTH]


def test_the_end_of_sequence_token_is_part_of_the_output():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    (delta,) = step(scheduler, token_id=EOS)[1]
    assert (delta.token_ids, delta.finish_reason) == ((EOS,), FinishReason.STOP)
    assert not scheduler.has_work


def test_the_context_ends_a_request_that_asks_for_more():
    scheduler = make_scheduler(max_model_len=10)
    scheduler.add(make_request("a", prompt_len=7, max_tokens=50))
    deltas = run_to_end(scheduler)
    assert len(deltas) == 3
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_drafts_that_a_plan_brings_are_committed_as_far_as_they_are_right():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_len=5))
    plan = scheduler.plan()
    drafted = replace(plan.sequences[0], token_ids=(100, 101, 102, 103, 104, 7, 8), num_draws=3)
    result = StepResult(step_id=plan.step_id, token_ids=((7, 9, 10),))
    (delta,) = scheduler.commit(replace(plan, decodes=NO_ROWS, others=(drafted,)), result)
    assert delta.token_ids == (7, 9)
    assert shares(scheduler.plan()) == [(0, 6, 1)]


def test_one_plan_at_a_time():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    plan = scheduler.plan()
    with pytest.raises(AssertionError, match="has not been committed"):
        scheduler.plan()
    scheduler.commit(plan, make_result(plan))
    with pytest.raises(AssertionError, match="no plan in flight"):
        scheduler.commit(plan, make_result(plan))


def test_a_result_of_another_step_is_our_mistake():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    plan = scheduler.plan()
    with pytest.raises(AssertionError, match="not that of the oldest plan"):
        scheduler.commit(plan, replace(make_result(plan), step_id=99))


# --- What is refused ---


def refusal(scheduler, request) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.add(request)
    assert not scheduler.has_work
    return caught.value


def test_a_prompt_longer_than_the_context_is_refused():
    scheduler = make_scheduler(max_model_len=10)
    assert scheduler.add(make_request("fits", prompt_len=9)) is None
    scheduler.abort("fits")
    error = refusal(scheduler, make_request("too long", prompt_len=10))
    assert error.field == "prompt"
    assert str(error).startswith("prompt = '10 tokens': must be at most 9 tokens: the context holds 10")


def test_a_prompt_larger_than_the_cache_is_refused():
    error = refusal(make_scheduler(num_blocks=2), make_request("too long", prompt_len=9))
    assert error.field == "prompt"
    assert "at most 8 tokens" in error.limit


def test_a_request_that_could_not_run_to_its_end_alone_is_refused():
    scheduler = make_scheduler(num_blocks=2)
    error = refusal(scheduler, make_request("a", prompt_len=5, max_tokens=5))
    assert (error.field, error.value) == ("sampling_params.max_tokens", 5)
    assert "at most 4" in error.limit
    scheduler.add(make_request("b", prompt_len=5, max_tokens=4))
    assert len(run_to_end(scheduler)) == 4
    assert scheduler.stats().num_preemptions == 0


def test_the_context_bounds_what_a_request_may_need_of_the_cache():
    scheduler = make_scheduler(num_blocks=2, max_model_len=9)
    scheduler.add(make_request("a", prompt_len=5, max_tokens=None))
    assert len(run_to_end(scheduler)) == 4


def test_a_full_queue_refuses_until_someone_was_admitted():
    scheduler = make_scheduler(max_num_waiting=2)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    with pytest.raises(QueueFullError):
        scheduler.add(make_request("c"))
    step(scheduler)
    scheduler.add(make_request("c"))
    assert scheduler.load().num_waiting == 1


def test_an_id_that_is_in_use_is_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    with pytest.raises(InvalidRequestError, match="request_id = 'a': is in use"):
        scheduler.add(make_request("a"))
    run_to_end(scheduler)
    assert scheduler.add(make_request("a")) is None


# --- Continued requests ---


def test_a_continued_request_goes_on_at_its_index_and_counts_what_came_before():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", outputs=(7, 7, 7), max_tokens=5))
    plan, deltas = step(scheduler)
    assert shares(plan) == [(0, 0, 7)]
    assert plan.sequences[0].draw.first_output_index == 3
    deltas += run_to_end(scheduler)
    assert [(delta.first_token_index, delta.token_ids) for delta in deltas] == [(3, (7,)), (4, (7,))]
    assert deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [((7, 7), FinishReason.LENGTH), ((7, 7, 7), FinishReason.LENGTH), ((EOS,), FinishReason.STOP)],
    ids=["all tokens", "more than all", "end of sequence"],
)
def test_a_continued_request_that_was_complete_gets_one_last_delta_at_once(outputs, reason):
    scheduler = make_scheduler(max_num_waiting=1)
    scheduler.add(make_request("fills the queue"))
    delta = scheduler.add(make_request("a", outputs=outputs, max_tokens=2))
    assert delta == TokenDelta(attempt="a", first_token_index=len(outputs), token_ids=(), finish_reason=reason)
    assert scheduler.abort("a") is None
    assert scheduler.stats().num_finished == 1


# --- Aborts ---


def test_an_abort_frees_the_blocks_at_once():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    step(scheduler)
    assert scheduler.abort("a") == abort_delta("a", 1)
    assert scheduler.load().num_free_blocks == scheduler.load().num_total_blocks
    assert (scheduler.has_work, scheduler.plan()) == (False, None)


def test_a_waiting_request_can_be_aborted():
    scheduler = make_scheduler(max_num_seqs=1)
    for request_id in "abc":
        scheduler.add(make_request(request_id, max_tokens=1))
    assert scheduler.abort("b") == abort_delta("b", 0)
    assert [delta.attempt for delta in run_to_end(scheduler)] == ["a", "c"]


def test_an_unknown_or_finished_request_cannot_be_aborted():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", max_tokens=1))
    step(scheduler)
    assert scheduler.abort("a") is None
    assert scheduler.abort("b") is None
    assert scheduler.stats().num_aborted == 0


def test_an_abort_while_a_step_runs_drops_what_the_step_drew():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    plan = scheduler.plan()
    scheduler.abort("a")
    scheduler.add(make_request("a"))
    assert [delta.attempt for delta in scheduler.commit(plan, make_result(plan))] == ["b"]
    scheduler.check_integrity()
    assert shares(scheduler.plan()) == [(1, 4, 1), (2, 0, 4)], "the new a starts from its own beginning"


def test_abort_all_answers_everyone():
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in "abc":
        scheduler.add(make_request(request_id))
    plan = scheduler.plan()
    assert scheduler.abort_all() == [abort_delta(request_id, 0) for request_id in "abc"]
    assert scheduler.commit(plan, make_result(plan)) == []
    assert not scheduler.has_work
    scheduler.check_integrity()


# --- Counts ---


def test_load_counts_who_runs_who_waits_and_what_is_left_to_compute():
    scheduler = make_scheduler(max_num_batched_tokens=6, max_num_seqs=2)
    for request_id in "abc":
        scheduler.add(make_request(request_id))
    step(scheduler)
    load = scheduler.load()
    assert (load.num_running, load.num_waiting) == (2, 1)
    assert load.num_waiting_tokens == 1 + 2 + 4
    assert load.num_total_blocks - load.num_free_blocks == 2


def test_stats_count_steps_tokens_and_ends():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", max_tokens=3))
    scheduler.add(make_request("b", max_tokens=3))
    step(scheduler)
    scheduler.abort("b")
    run_to_end(scheduler)
    stats = scheduler.stats()
    assert (stats.num_steps, stats.num_tokens_computed, stats.num_tokens_recomputed) == (3, 4 + 4 + 1 + 1, 0)
    assert (stats.num_finished, stats.num_aborted, stats.num_preemptions) == (1, 1, 0)
    assert (stats.num_used_blocks, stats.num_free_blocks, stats.num_wasted_slots) == (0, 64, 0)


def test_the_first_tokens_say_how_long_the_request_has_waited():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", max_tokens=3), now=10.0)
    deltas = []
    while (plan := scheduler.plan(now=14.0)) is not None:
        deltas += scheduler.commit(plan, make_result(plan))
    assert [delta.queued_s for delta in deltas] == [4.0, 0.0, 0.0]
    assert [is_plain(delta) for delta in deltas] == [False, True, False]
