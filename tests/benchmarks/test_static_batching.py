"""Static batching: whole batches, at their peak from the start, to their very end."""

from benchmarks.static_batching import StaticBatching
from tests.worker.schedulers import make_request, make_scheduler, members, run_to_end, shares, step


def test_a_static_batch_runs_to_its_end_before_anyone_joins():
    scheduler = make_scheduler(make_policy=StaticBatching)
    scheduler.add(make_request("a", max_tokens=1))
    scheduler.add(make_request("b", max_tokens=3))
    plans = [step(scheduler)[0]]
    scheduler.add(make_request("c", max_tokens=2))
    plans += [step(scheduler)[0] for _ in range(4)]
    assert [members(plan) for plan in plans] == [[0, 1], [1], [1], [2], [2]]
    assert not scheduler.has_work


def test_a_static_batch_is_prefilled_before_it_decodes():
    scheduler = make_scheduler(make_policy=StaticBatching, max_num_batched_tokens=6)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    plans = [shares(step(scheduler)[0]) for _ in range(3)]
    assert plans == [[(0, 0, 4), (1, 0, 2)], [(1, 2, 2)], [(0, 4, 1), (1, 4, 1)]]


def test_a_static_batch_holds_the_blocks_of_its_peak_until_its_last_sequence_ended():
    scheduler = make_scheduler(make_policy=StaticBatching)
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
    scheduler = make_scheduler(make_policy=StaticBatching, num_blocks=6)
    for request_id in "abc":
        scheduler.add(make_request(request_id, max_tokens=9))
    assert len(step(scheduler)[0].sequences) == 2
    run_to_end(scheduler)
    assert scheduler.stats().num_preemptions == 0


def test_aborting_the_last_sequence_ends_a_static_batch():
    scheduler = make_scheduler(make_policy=StaticBatching, max_num_seqs=2)
    for request_id, max_tokens in (("a", 1), ("b", 9), ("c", 1)):
        scheduler.add(make_request(request_id, max_tokens=max_tokens))
    step(scheduler)
    scheduler.abort("b")
    assert scheduler.stats().num_used_blocks == 0
    assert shares(step(scheduler)[0]) == [(2, 0, 4)]
