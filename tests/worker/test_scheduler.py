"""The scheduler's decisions, one by one. `test_scheduler_properties.py` goes through them at random."""

from dataclasses import replace

import pytest

from worker.config import SchedulerConfig
from worker.errors import InvalidRequestError, QueueFullError
from worker.plan import StepPlan, StepResult
from worker.request import EngineRequest, FinishReason, Priority, SamplingParams, TokenDelta
from worker.scheduler import Scheduler

EOS, BLOCK_SIZE = 0, 4


def make_scheduler(num_blocks=64, max_model_len=100, **config):
    return Scheduler(
        SchedulerConfig(**{"max_num_batched_tokens": 32, "max_num_seqs": 8, **config}),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
    )


def make_request(request_id, prompt_len=4, outputs=(), priority=Priority.NORMAL, **params):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(100, 100 + prompt_len)),
        output_token_ids=outputs,
        priority=priority,
        sampling_params=SamplingParams(**{"seed": 1, "max_tokens": 8, **params}),
    )


def make_result(plan: StepPlan, token_id=7) -> StepResult:
    drawn = tuple((token_id,) * sequence.num_draws for sequence in plan.sequences)
    return StepResult(step_id=plan.step_id, token_ids=drawn)


def step(scheduler: Scheduler, token_id=7) -> tuple[StepPlan, list[TokenDelta]]:
    """One step in which every draw is `token_id`."""
    plan = scheduler.plan()
    deltas = scheduler.commit(plan, make_result(plan, token_id))
    scheduler.check_integrity()
    return plan, deltas


def run_to_end(scheduler: Scheduler) -> list[TokenDelta]:
    deltas = []
    while scheduler.has_work:
        deltas += step(scheduler)[1]
    return deltas


def shares(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Sequence id, first position and number of tokens of each sequence in a plan."""
    return [(s.sequence_id, s.first_position, len(s.token_ids)) for s in plan.sequences]


def members(plan: StepPlan) -> list[int]:
    return [sequence.sequence_id for sequence in plan.sequences]


def abort_delta(request_id, first_token_index):
    return TokenDelta(
        request_id=request_id,
        first_token_index=first_token_index,
        token_ids=(),
        finish_reason=FinishReason.ABORT,
    )


# --- Steps ---


def test_nothing_to_do_is_no_plan():
    scheduler = make_scheduler()
    assert scheduler.plan() is None
    assert not scheduler.has_work


def test_a_prompt_is_computed_in_chunks_and_only_the_last_one_draws():
    scheduler = make_scheduler(max_num_batched_tokens=3)
    scheduler.add(make_request("a", prompt_len=7))
    plans = [step(scheduler)[0] for _ in range(3)]
    assert [shares(plan) for plan in plans] == [[(0, 0, 3)], [(0, 3, 3)], [(0, 6, 1)]]
    assert [plan.sequences[0].num_draws for plan in plans] == [0, 0, 1]
    assert [len(plan.sequences[0].block_ids) for plan in plans] == [1, 2, 2], "blocks of the positions so far"
    assert plans[2].sequences[0].draw.first_output_index == 0


def test_decodes_go_first_and_chunks_of_prompts_fill_the_rest_of_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    scheduler.add(make_request("a"))
    step(scheduler)
    scheduler.add(make_request("b", prompt_len=7))
    scheduler.add(make_request("c", prompt_len=7))
    assert shares(step(scheduler)[0]) == [(0, 4, 1), (1, 0, 5)]
    assert shares(step(scheduler)[0]) == [(0, 5, 1), (1, 5, 2), (2, 0, 3)]


def test_finished_sequences_leave_and_new_ones_join_at_every_step():
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id, max_tokens in (("a", 1), ("b", 3), ("c", 2)):
        scheduler.add(make_request(request_id, max_tokens=max_tokens))
    assert [members(step(scheduler)[0]) for _ in range(3)] == [[0, 1], [1, 2], [1, 2]]
    assert not scheduler.has_work


def test_newcomers_are_admitted_by_priority_then_arrival():
    scheduler = make_scheduler(max_num_seqs=1)
    for request_id, priority in (
        ("a", Priority.LOW),
        ("b", Priority.NORMAL),
        ("c", Priority.HIGH),
        ("d", Priority.LOW),
    ):
        scheduler.add(make_request(request_id, priority=priority, max_tokens=1))
    assert [delta.request_id for delta in run_to_end(scheduler)] == ["c", "b", "a", "d"]


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
    (delta,) = scheduler.commit(replace(plan, sequences=(drafted,)), result)
    assert delta.token_ids == (7, 9)
    assert shares(scheduler.plan()) == [(0, 6, 1)]


def test_one_plan_at_a_time():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    plan = scheduler.plan()
    with pytest.raises(AssertionError, match="has not been committed"):
        scheduler.plan()
    scheduler.commit(plan, make_result(plan))
    with pytest.raises(AssertionError, match="no outstanding plan"):
        scheduler.commit(plan, make_result(plan))


def test_a_result_of_another_step_is_our_mistake():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    plan = scheduler.plan()
    with pytest.raises(AssertionError, match="not that of the outstanding plan"):
        scheduler.commit(plan, replace(make_result(plan), step_id=99))


# --- Memory ---


def test_blocks_are_allocated_for_the_tokens_there_are_not_for_those_to_come():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_len=5, max_tokens=40))
    step(scheduler)
    assert (scheduler.stats().num_used_blocks, scheduler.stats().num_wasted_slots) == (2, 2)
    used = [(step(scheduler), scheduler.stats().num_used_blocks)[1] for _ in range(5)]
    assert used == [2, 2, 2, 3, 3]


def test_when_blocks_run_out_the_newest_of_the_lowest_priority_is_preempted():
    scheduler = make_scheduler(num_blocks=10)
    for request_id, priority in (
        ("a", Priority.NORMAL),
        ("b", Priority.LOW),
        ("c", Priority.LOW),
        ("d", Priority.HIGH),
    ):
        scheduler.add(make_request(request_id, priority=priority, max_tokens=12))
    steps = [step(scheduler)[0] for _ in range(6)]
    assert [len(plan.sequences) for plan in steps] == [4, 4, 4, 4, 4, 3]
    assert members(steps[-1]) == [3, 0, 1], "c, the newest of LOW, had to go"
    assert scheduler.stats().num_preemptions == 1


def test_a_preempted_sequence_keeps_its_outputs_and_is_replayed_before_later_arrivals():
    scheduler = make_scheduler(num_blocks=8)
    for request_id in "abc":
        scheduler.add(make_request(request_id, max_tokens=12))
    while scheduler.stats().num_preemptions == 0:
        step(scheduler)
    scheduler.add(make_request("d"))
    plan, _ = step(scheduler)
    while 2 not in members(plan):
        assert 3 not in members(plan)
        plan, _ = step(scheduler)
    replay = plan.sequences[0]
    assert (replay.first_position, replay.token_ids) == (0, (100, 101, 102, 103, 7, 7, 7, 7, 7))
    assert replay.draw.first_output_index == 5
    assert scheduler.stats().num_tokens_recomputed == 8, "the last of its nine tokens had not been computed before"


def test_a_newcomer_that_would_soon_be_preempted_again_is_not_admitted():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("a", prompt_len=7, max_tokens=6))
    step(scheduler)
    scheduler.add(make_request("b", prompt_len=8, max_tokens=2))
    assert scheduler.load().num_free_blocks == 2
    assert members(step(scheduler)[0]) == [0], "b would fit now, but no longer once a needs its third block"
    run_to_end(scheduler)
    assert scheduler.stats().num_preemptions == 0


def test_the_first_of_the_waiting_is_not_overtaken_by_one_that_fits():
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_request("a", prompt_len=8, max_tokens=5))
    step(scheduler)
    scheduler.add(make_request("big", prompt_len=16))
    scheduler.add(make_request("small", prompt_len=1))
    assert members(step(scheduler)[0]) == [0]


def test_nobody_starves_under_a_flood_of_newcomers():
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=4)
    scheduler.add(make_request("early", prompt_len=12, max_tokens=18))
    for number in range(30):
        scheduler.add(make_request(f"flood-{number}", max_tokens=20))
        if not any(delta.request_id == "early" and delta.finish_reason for delta in step(scheduler)[1]):
            continue
        break
    assert number == 17, "one token at every step from the first on"


def test_all_prefills_and_decodes_go_on_with_fewer_tokens_in_a_step_than_sequences():
    scheduler = make_scheduler(max_num_batched_tokens=2, max_num_seqs=8)
    for request_id in "abc":
        scheduler.add(make_request(request_id, prompt_len=6, max_tokens=6))
    assert {delta.request_id for delta in run_to_end(scheduler) if delta.finish_reason} == set("abc")


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
    assert delta == TokenDelta(request_id="a", first_token_index=len(outputs), token_ids=(), finish_reason=reason)
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
    assert [delta.request_id for delta in run_to_end(scheduler)] == ["a", "c"]


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
    assert [delta.request_id for delta in scheduler.commit(plan, make_result(plan))] == ["b"]
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


# --- Static batching ---


def test_a_static_batch_runs_to_its_end_before_anyone_joins():
    scheduler = make_scheduler(policy="static")
    scheduler.add(make_request("a", max_tokens=1))
    scheduler.add(make_request("b", max_tokens=3))
    plans = [step(scheduler)[0]]
    scheduler.add(make_request("c", max_tokens=2))
    plans += [step(scheduler)[0] for _ in range(4)]
    assert [members(plan) for plan in plans] == [[0, 1], [1], [1], [2], [2]]
    assert not scheduler.has_work


def test_a_static_batch_is_prefilled_before_it_decodes():
    scheduler = make_scheduler(policy="static", max_num_batched_tokens=6)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    plans = [shares(step(scheduler)[0]) for _ in range(3)]
    assert plans == [[(0, 0, 4), (1, 0, 2)], [(1, 2, 2)], [(0, 4, 1), (1, 4, 1)]]


def test_a_static_batch_holds_the_blocks_of_its_peak_until_its_last_sequence_ended():
    scheduler = make_scheduler(policy="static")
    scheduler.add(make_request("a", max_tokens=1))
    scheduler.add(make_request("b", max_tokens=9))
    step(scheduler)
    stats = scheduler.stats()
    assert stats.num_used_blocks == 1 + 3
    assert stats.num_wasted_slots == 4 + (12 - 5), "all of a, which has ended, and what b may still fill"
    assert (scheduler.load().num_running, stats.num_finished) == (1, 1)
    run_to_end(scheduler)
    assert scheduler.stats().num_used_blocks == 0


def test_a_static_batch_takes_only_what_fits_at_its_peak():
    scheduler = make_scheduler(policy="static", num_blocks=6)
    for request_id in "abc":
        scheduler.add(make_request(request_id, max_tokens=9))
    assert len(step(scheduler)[0].sequences) == 2
    run_to_end(scheduler)
    assert scheduler.stats().num_preemptions == 0


def test_aborting_the_last_sequence_ends_a_static_batch():
    scheduler = make_scheduler(policy="static", max_num_seqs=2)
    for request_id, max_tokens in (("a", 1), ("b", 9), ("c", 1)):
        scheduler.add(make_request(request_id, max_tokens=max_tokens))
    step(scheduler)
    scheduler.abort("b")
    assert scheduler.stats().num_used_blocks == 0
    assert shares(step(scheduler)[0]) == [(2, 0, 4)]
