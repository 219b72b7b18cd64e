"""Continuous batching: who gets a share of each step, and whose blocks go when they run out."""

from dataclasses import replace

from holdfast.worker.request import Priority
from tests.worker.schedulers import make_request, make_scheduler, members, run_to_end, shares, step


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
    assert [delta.attempt for delta in run_to_end(scheduler)] == ["c", "b", "a", "d"]


def test_blocks_are_allocated_for_the_tokens_there_are_not_for_those_to_come():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_len=5, max_tokens=40))
    step(scheduler)
    assert (scheduler.stats().num_used_blocks, scheduler.stats().num_wasted_slots) == (2, 2)
    used = [(step(scheduler), scheduler.stats().num_used_blocks)[1] for _ in range(5)]
    assert used == [2, 2, 2, 3, 3]


def test_when_blocks_run_out_the_newest_of_the_worst_class_is_preempted():
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


def test_of_the_lowest_priority_the_one_with_the_fewest_tokens_computed_is_preempted():
    scheduler = make_scheduler(num_blocks=12, max_num_batched_tokens=64)
    for request_id, prompt_len, priority in (
        ("a", 4, Priority.NORMAL),
        ("b", 12, Priority.LOW),
        ("c", 5, Priority.LOW),
        ("d", 12, Priority.LOW),
    ):
        scheduler.add(make_request(request_id, prompt_len=prompt_len, priority=priority, max_tokens=12))
    steps = [step(scheduler)[0] for _ in range(5)]
    assert [members(plan) for plan in steps] == [*[[0, 1, 2, 3]] * 4, [0, 1, 3]]
    assert scheduler.stats().num_preemptions == 1


def test_a_higher_priority_is_not_preempted_though_it_has_fewer_tokens_computed():
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=64)
    for request_id, prompt_len, priority in (("a", 4, Priority.HIGH), ("b", 4, Priority.HIGH), ("c", 12, Priority.LOW)):
        scheduler.add(make_request(request_id, prompt_len=prompt_len, priority=priority, max_tokens=8))
    steps = [step(scheduler)[0] for _ in range(6)]
    assert [members(plan) for plan in steps] == [*[[0, 1, 2]] * 5, [0, 1]]


def test_the_first_in_the_order_of_service_is_not_preempted_though_it_has_the_fewest_tokens_computed():
    scheduler = make_scheduler(num_blocks=7)
    scheduler.add(make_request("a", prompt_len=4, max_tokens=12))
    scheduler.add(make_request("b", prompt_len=16, max_tokens=12))
    steps = [step(scheduler)[0] for _ in range(6)]
    assert [members(plan) for plan in steps] == [*[[0, 1]] * 5, [0]]


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


# --- Across classes ---


def test_a_better_class_takes_the_place_of_the_worst_that_loses_least():
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=64)
    for request_id, priority, prompt_len in (
        ("a", Priority.LOW, 9),
        ("b", Priority.LOW, 4),
        ("c", Priority.NORMAL, 3),
    ):
        scheduler.add(make_request(request_id, priority=priority, prompt_len=prompt_len))
    step(scheduler)
    scheduler.add(make_request("d", priority=Priority.CRITICAL))
    assert members(step(scheduler)[0]) == [2, 0, 3], "b had to go"
    assert scheduler.stats().num_preemptions == 1


def test_a_better_class_takes_the_blocks_of_as_many_as_it_needs():
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=64)
    for request_id in "abc":
        scheduler.add(make_request(request_id, priority=Priority.LOW, prompt_len=7))
    step(scheduler)
    scheduler.add(make_request("d", priority=Priority.HIGH, prompt_len=13))
    assert members(step(scheduler)[0]) == [0, 3]
    assert scheduler.stats().num_preemptions == 2


def test_nobody_is_preempted_for_one_who_would_not_fit_even_so():
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=64)
    scheduler.add(make_request("a", priority=Priority.HIGH, prompt_len=14))
    scheduler.add(make_request("b", priority=Priority.LOW))
    step(scheduler)
    scheduler.add(make_request("c", priority=Priority.HIGH, prompt_len=18, max_tokens=1))
    assert members(step(scheduler)[0]) == [0, 1]
    assert scheduler.stats().num_preemptions == 0


def test_an_equal_class_preempts_nobody():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", priority=Priority.HIGH))
    step(scheduler)
    scheduler.add(make_request("b", priority=Priority.HIGH))
    assert members(step(scheduler)[0]) == [0]


def test_a_better_class_is_computed_before_the_long_prompt_of_a_worse_one():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", priority=Priority.NORMAL, prompt_len=40))
    step(scheduler)
    scheduler.add(make_request("b", priority=Priority.HIGH, prompt_len=6))
    scheduler.add(make_request("c", priority=Priority.LOW, prompt_len=6))
    assert shares(step(scheduler)[0]) == [(1, 0, 6), (0, 8, 2)]


def test_a_better_class_gets_in_where_a_step_has_no_token_left():
    scheduler = make_scheduler(max_num_batched_tokens=2)
    for request_id in "ab":
        scheduler.add(make_request(request_id, prompt_len=1, priority=Priority.LOW))
    step(scheduler)
    scheduler.add(make_request("c", priority=Priority.HIGH, prompt_len=1))
    assert sorted(members(step(scheduler)[0])) == [0, 2]


def test_low_is_served_under_an_endless_stream_of_critical_ones():
    scheduler = make_scheduler(max_num_seqs=1, aging_s=10.0)
    scheduler.add(make_request("low", priority=Priority.LOW, max_tokens=4))
    for second in range(100):
        scheduler.add(make_request(f"critical-{second}", priority=Priority.CRITICAL, max_tokens=1), second)
        if any(delta.attempt == "low" for delta in step(scheduler, now=second)[1]):
            break
    assert second == 30, "three classes, ten seconds each"


def test_one_that_has_aged_is_not_preempted_by_the_class_it_has_caught_up_with():
    scheduler = make_scheduler(max_num_seqs=1, aging_s=10.0)
    scheduler.add(make_request("blocker", priority=Priority.CRITICAL, max_tokens=2))
    scheduler.add(make_request("low", priority=Priority.LOW))
    step(scheduler)
    step(scheduler)
    assert members(step(scheduler, now=20.0)[0]) == [1], "low counts as HIGH from here on"
    scheduler.add(make_request("high", priority=Priority.HIGH), 20.0)
    assert members(step(scheduler, now=20.0)[0]) == [1]
    scheduler.add(make_request("critical", priority=Priority.CRITICAL), 20.0)
    assert members(step(scheduler, now=20.0)[0]) == [3]


def test_waits_before_and_after_a_preemption_add_up():
    scheduler = make_scheduler(max_num_seqs=1, aging_s=10.0)
    scheduler.add(make_request("blocker", priority=Priority.CRITICAL, max_tokens=2))
    scheduler.add(make_request("low", priority=Priority.LOW))
    step(scheduler)
    step(scheduler, now=6.0)
    step(scheduler, now=6.0)  # low has waited 6 s, and runs
    scheduler.add(make_request("normal", priority=Priority.NORMAL, max_tokens=20), 100.0)
    assert members(step(scheduler, now=100.0)[0]) == [2]
    sequence = scheduler._sequences["low"]
    step(scheduler, now=103.9)
    assert sequence.service_class is Priority.LOW
    step(scheduler, now=104.0)
    assert sequence.service_class is Priority.NORMAL


# --- Fairness and room ---


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
        ended = {delta.attempt for delta in step(scheduler)[1] if delta.finish_reason}
        if "early" in ended:
            break
    assert number == 17, "one token at every step from the first on"


def test_all_prefills_and_decodes_go_on_with_fewer_tokens_in_a_step_than_sequences():
    scheduler = make_scheduler(max_num_batched_tokens=2, max_num_seqs=8)
    for request_id in "abc":
        scheduler.add(make_request(request_id, prompt_len=6, max_tokens=6))
    assert {delta.attempt for delta in run_to_end(scheduler) if delta.finish_reason} == set("abc")


def test_prompts_leave_decodes_the_time_that_the_limits_say():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    step(scheduler)
    scheduler.policy.limits = replace(scheduler.policy.limits, max_num_prefill_tokens=8)
    scheduler.add(make_request("b", prompt_len=12))
    scheduler.add(make_request("c", prompt_len=12))
    assert [shares(step(scheduler)[0]) for _ in range(3)] == [
        [(0, 4, 1), (1, 0, 8)],
        [(0, 5, 1), (1, 8, 4), (2, 0, 4)],
        [(0, 6, 1), (1, 12, 1), (2, 4, 8)],
    ]


def test_prompts_alone_have_the_whole_step():
    scheduler = make_scheduler()
    scheduler.policy.limits = replace(scheduler.policy.limits, max_num_prefill_tokens=8)
    scheduler.add(make_request("a", prompt_len=30))
    assert shares(step(scheduler)[0]) == [(0, 0, 30)]


def test_limits_lowered_below_what_runs_stop_newcomers_and_nobody_else():
    scheduler = make_scheduler()
    for request_id in "abcd":
        scheduler.add(make_request(request_id))
    step(scheduler)
    scheduler.policy.limits = replace(scheduler.policy.limits, max_num_seqs=2, max_num_batched_tokens=3)
    scheduler.add(make_request("e", prompt_len=8))
    assert members(step(scheduler)[0]) == [0, 1, 2, 3]
    assert len({delta.attempt for delta in run_to_end(scheduler) if delta.finish_reason}) == 5
