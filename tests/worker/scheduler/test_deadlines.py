"""Requests that nobody waits for any more are dropped, and so are those that could not be in time."""

from tests.worker.schedulers import dropped, make_request, make_scheduler, members, run_to_end, step


def test_a_request_past_its_deadline_is_dropped_whether_it_waits_or_runs():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("runs", time_left_s=5.0), 100.0)
    scheduler.add(make_request("waits", time_left_s=4.0), 100.0)
    scheduler.add(make_request("patient"), 100.0)
    step(scheduler, now=100.0)
    assert dropped(scheduler) == []
    assert members(step(scheduler, now=105.0)[0]) == [2]
    assert sorted(dropped(scheduler)) == ["runs", "waits"]
    assert dropped(scheduler) == []
    assert scheduler.stats().num_expired == 2
    scheduler.check_integrity()


def test_when_all_were_late_there_is_nothing_to_do():
    scheduler = make_scheduler()
    scheduler.add(make_request("late", time_left_s=0.0), 7.0)
    assert scheduler.plan(7.0) is None
    assert dropped(scheduler) == ["late"]
    assert not scheduler.has_work
    assert scheduler.add(make_request("late"), 8.0) is None, "its id is free again"


def test_one_that_ended_or_was_aborted_in_time_is_not_heard_of_again():
    scheduler = make_scheduler()
    for request_id in "ab":
        scheduler.add(make_request(request_id, max_tokens=1, time_left_s=5.0))
    scheduler.abort("b")
    run_to_end(scheduler)
    scheduler.add(make_request("c"), 6.0)
    step(scheduler, now=6.0)
    assert dropped(scheduler) == []


def test_one_that_could_not_come_to_its_first_token_in_time_is_dropped_early():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.deadlines.tokens_per_s = 10.0
    scheduler.add(make_request("blocker", max_tokens=50))
    step(scheduler)
    scheduler.add(make_request("hopeless", prompt_len=30, time_left_s=5.0))
    scheduler.add(make_request("hopeful", prompt_len=5, time_left_s=5.0))
    step(scheduler, now=1.9)
    assert dropped(scheduler) == []
    step(scheduler, now=2.0)
    assert dropped(scheduler) == ["hopeless"], "30 tokens take 3 of the 5 seconds"
    step(scheduler, now=4.4)
    assert dropped(scheduler) == []


def test_without_a_known_speed_one_may_hope_until_its_deadline():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("blocker", max_tokens=50))
    step(scheduler)
    scheduler.add(make_request("long", prompt_len=30, time_left_s=5.0))
    step(scheduler, now=4.9)
    assert dropped(scheduler) == []


def test_one_that_runs_has_until_its_deadline():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.deadlines.tokens_per_s = 10.0
    scheduler.add(make_request("long", prompt_len=30, time_left_s=5.0))
    step(scheduler)
    step(scheduler, now=4.9)
    assert dropped(scheduler) == []
    assert scheduler.plan(5.0) is None


def test_what_is_in_the_prefix_cache_takes_no_time():
    scheduler = make_scheduler(prefix_caching=True, max_num_seqs=1)
    scheduler.add(make_request("before", prompt_len=30, max_tokens=1))
    run_to_end(scheduler)
    scheduler.deadlines.tokens_per_s = 10.0
    scheduler.add(make_request("blocker", max_tokens=50, salt="other"), 10.0)
    step(scheduler, now=10.0)
    scheduler.add(make_request("again", prompt_len=30, time_left_s=5.0), 10.0)
    step(scheduler, now=14.7)
    assert dropped(scheduler) == []
    step(scheduler, now=14.8)
    assert dropped(scheduler) == ["again"], "28 of its tokens are cached, and 2 take 0.2 seconds"
